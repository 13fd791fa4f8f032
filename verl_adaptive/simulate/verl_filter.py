"""verl's own dynamic sampling, ``algorithm.filter_groups``, as a peer in the simulator.

From verl 0.9.1, ``verl/trainer/ppo/v1/replay_buffer.py`` (``ReplayBuffer.sample``, synchronous trainer) and
``trainer_base.py`` (``_build_replay_buffer``, ``_add_prompts_to_generate``):

* a step sends B prompts, n rollouts each; every ``poll_interval`` (2 s) it looks at what is back;
* a look evicts the groups whose rewards are all equal, and each gives credit for two new prompts;
* while fewer than B groups are good, credit is spent on new prompts as long as no more than
  ``max_inflight_gen_batches`` · B prompts are in flight (verl counts prompts, and those that wait for a slot too);
* once B groups are good no more is sent, but what is in flight is waited for to its end ("drain"); then B groups train
  and the rest, good or not, is thrown away.

verl takes the B in no order of its own (they all bear the same step); here it is the order of submission. Its sampler
is the data set's order, its advantage GRPO's. The package's engine has no part in this.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine import PromptStream, Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.ledger import Ledger
from verl_adaptive.policy import Policy, build_policy
from verl_adaptive.stats.table import StatsTable

#: Seconds between two looks: the default of ``ReplayBuffer(poll_interval=…)``, which verl's configuration does not reach.
POLL = 2.0


class VerlFilter:
    """Drives itself as verl's replay buffer does; stands where the package's engine stands.

    Args:
        config: of plain GRPO; only its limits on the run are used.
        table: the statistics, for the account only: nothing is decided by them.
        facts, row_of, source: as for the engine.
        max_inflight: ``algorithm.filter_groups.max_inflight_gen_batches``.
        policy: not bound yet; default: that of ``config``.

    Attributes:
        decided: never: what is in flight is drained.
        flight: prompts that are in flight.
    """

    decided = False

    def __init__(
        self,
        config: AdaptiveConfig,
        table: StatsTable,
        facts: RunFacts,
        row_of: np.ndarray,
        source: PromptStream,
        *,
        max_inflight: int = 1,
        policy: Policy | None = None,
    ) -> None:
        self.config, self.table, self.facts = replace(config, poll_interval=POLL), table, facts
        self.row_of, self.source, self.max_inflight = np.asarray(row_of, dtype=np.int64), source, max_inflight
        self.policy = policy or build_policy(config)
        self.policy.bind(table, facts)
        self.total = Ledger()
        self._submission = 0
        self._spare = np.zeros(0, dtype=np.int64)  # taken from the stream and not sent yet

    @property
    def finished(self) -> bool:
        """The budget is spent."""
        budget = self.config.total_rollouts
        return budget is not None and self.total.rollouts.generated >= budget

    def begin(self, step: int) -> Requests:
        """Send the step's batch."""
        self._step, self._rounds = step, 0
        self.ledger = Ledger()
        self._good: list[Groups] = []
        self._evicted: list[Groups] = []
        self.flight = Requests.none()
        self._credit = 0  # new prompts that may be sent
        return self._send(self.facts.batch)

    def receive(self, results: Groups) -> Requests | None:
        """One look at what is back since the last one; new prompts, or None.

        Raises:
            AdaptiveError: a result was not asked for.
        """
        back = np.isin(self.flight.submission, results.submission)
        if back.sum() != len(results):
            raise AdaptiveError("results do not match the requests in flight")
        self.flight = self.flight.select(~back)
        self._rounds += 1
        self.ledger.rollouts.generated += results.rollouts
        self.ledger.tokens.generated += int(results.tokens.sum())
        # verl does not classify a failed group: it stays sampleable unless trainer.v1.sampler.sync_refill_failed_groups says otherwise.
        flat = results.degenerate() & (results.n > 1) & ~results.failed
        self._good.append(results.select(~flat))
        self._evicted.append(results.select(flat))
        if sum(map(len, self._good)) >= self.facts.batch:
            return None
        self._credit += 2 * int(flat.sum())
        count = min(self._credit, max(0, self.max_inflight * self.facts.batch - len(self.flight)))
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
        groups = Groups.concat([*self._good, *self._evicted])
        outcome = np.full(len(groups), "surplus", dtype=object)
        good = len(groups) - sum(len(g) for g in self._evicted)
        outcome[np.argsort(groups.submission[:good])[: self.facts.batch]] = "trained"
        outcome[good:] = "no_variance"
        order = np.argsort(groups.submission, kind="stable")
        groups, outcome = groups.select(order), outcome[order]
        self.table.observe(groups, self._step, tolerance=self.facts.tolerance)
        trains = groups.rollout_mask(outcome == "trained")
        self._account(groups, outcome)
        zero_row = np.zeros_like(trains)
        return StepResult(groups, outcome, trains, zero_row, self.ledger, False, "", self._rounds)

    def _send(self, count: int) -> Requests:
        if len(self._spare) < count:
            more = np.asarray(self.source.take(count - len(self._spare)), dtype=np.int64)
            self._spare = np.concatenate([self._spare, more])
        index, self._spare = self._spare[:count], self._spare[count:]
        submission = self._submission + np.arange(count, dtype=np.int64)
        self._submission += count
        n = np.full(count, self.facts.n, dtype=np.int64)
        sent = Requests(submission, index, self.row_of[index], n, np.zeros(count, dtype=np.int64))
        self.flight = Requests.join([self.flight, sent])
        return sent

    def _account(self, groups: Groups, outcome: np.ndarray) -> None:
        trained = groups.tokens[groups.rollout_mask(outcome == "trained")]
        self.ledger.rollouts.trained, self.ledger.tokens.trained = len(trained), int(trained.sum())
        for name in ("surplus", "no_variance"):
            self.ledger.drop(name, groups.tokens[groups.rollout_mask(outcome == name)])
        self.total.add(self.ledger)
