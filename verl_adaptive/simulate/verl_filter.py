"""verl's own dynamic sampling, ``algorithm.filter_groups``, as a peer in the simulator.

From verl 0.9.1, ``verl/trainer/ppo/v1/replay_buffer.py`` (``ReplayBuffer.sample``, synchronous trainer) and
``trainer_base.py`` (``_build_replay_buffer``, ``_add_prompts_to_generate``):

* a step sends B prompts, n rollouts each; every ``poll_interval`` (2 s) it looks at what is back;
* a look evicts the groups whose rewards are all equal, and each gives credit for two new prompts;
* while fewer than B groups are good, credit is spent on new prompts as long as no more than B prompts are in flight
  (``max_inflight_gen_batches`` is 1; verl counts prompts, and those that wait for a slot too);
* once B groups are good no more is sent, but what is in flight is waited for to its end ("drain"); then B groups train
  and the rest, good or not, is thrown away.

verl takes the B in no order of its own (they all bear the same step); here it is the order of submission. Its sampler
is the data set's order, its advantage GRPO's. The package's engine only keeps the account.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from verl_adaptive.engine import Closed, Engine, Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups

#: Seconds between two looks: the default of ``ReplayBuffer(poll_interval=…)``, which verl's configuration does not reach.
POLL = 2.0


class VerlFilter(Engine):
    """An engine that decides as verl's replay buffer does.

    Args:
        args, kwargs: as :class:`Engine`; the policy is plain GRPO's, and nothing is decided by the table.
    """

    kind = "verl"
    decided = False  # what is in flight is drained

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = replace(self.config, poll_interval=POLL)

    def begin(self, step: int) -> Requests:
        """Send the step's batch."""
        self._open_step(step)
        self._good: list[Groups] = []
        self._evicted: list[Groups] = []
        self._credit = 0  # new prompts that may be sent
        return self._send(self.facts.batch)

    def receive(self, results: Groups) -> Requests | None:
        """One look at what is back since the last one; new prompts, or None."""
        results = self._landed(results)
        # verl does not classify a failed group: it stays sampleable unless trainer.v1.sampler.sync_refill_failed_groups says otherwise.
        flat = results.degenerate() & (results.n > 1) & ~results.failed
        self._good.append(results.select(~flat))
        self._evicted.append(results.select(flat))
        if sum(map(len, self._good)) >= self.facts.batch:
            return None
        self._credit += 2 * int(flat.sum())
        count = min(self._credit, max(0, self.facts.batch - len(self.flight)))
        if count == 0:
            return None
        self._credit -= count
        return self._send(count)

    def finish(self) -> StepResult:
        """Take the batch; the rest is surplus.

        Raises:
            AdaptiveError: called while prompts are in flight.
        """
        if len(self.flight):
            raise AdaptiveError(f"{len(self.flight)} prompts are in flight: verl drains them")
        good, evicted = Groups.concat(self._good).sorted(), Groups.concat(self._evicted)
        first = np.arange(len(good)) < self.facts.batch
        kept = Closed.of(good, np.where(first, "trained", "surplus"), good.rollout_mask(first))
        closed = Closed.concat([kept, Closed.of(evicted, "no_variance")]).sorted()
        self.tracker.learn(closed.groups)
        result = StepResult(**vars(closed), ledger=self.ledger, note="", rounds=self.progress.rounds)
        self.tracker.account(result)
        return result

    def _send(self, count: int) -> Requests:
        index, source = np.zeros(0, dtype=np.int64), self.prompt_source
        while len(index) < count:
            index = np.concatenate([index, source.pull(count - len(index))])
        index, source.ahead = index[:count], np.concatenate([index[count:], source.ahead])
        n = np.full(count, self.facts.n, dtype=np.int64)
        sent = Requests(self._submissions(count), index, self.row_of[index], n, np.zeros(count, dtype=np.int64))
        self.flight = Requests.join([self.flight, sent])
        self.progress.rounds += 1
        return sent
