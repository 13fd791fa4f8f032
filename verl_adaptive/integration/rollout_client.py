"""An engine on verl's rollout workers: carries its requests there and brings back what is done.

:mod:`.queue` knows the rows. :mod:`.sync_client` and :mod:`.async_client` run the steps.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from verl_adaptive.engine import Engine, Requests
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.integration.bulk import stacked, without_gc
from verl_adaptive.integration.dataloader import DataloaderPrompts, refuse_own_numbers
from verl_adaptive.integration.facts import SINGLE_TURN, check_room
from verl_adaptive.integration.polling import DONE, StallTimeout, Stopwatch, pause
from verl_adaptive.integration.queue import Batch, Queue
from verl_adaptive.text import counted

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Engine)


@dataclass(frozen=True)
class RolloutHandles:
    """What leads to verl's rollout workers.

    Attributes:
        submit: sends a batch of prompts to the agent loop (verl's ``_submit_batch_to_rollout``).
        step_of: the trainer's current global step.
        dead: names of rollout workers that have died; asked now and then while waiting.
        busy: what the servers are busy with, for the error that ends a run.
        stall: seconds without any rollout coming back after which the run ends with an error.
        row_limit: rows that TransferQueue can hold, or None.
        workers: number of agent-loop workers that share what is sent.
        single_turn: prompts that name no agent loop go to verl's own of one turn.
        late: rewards come when all rollouts of the step are there (a colocated reward model).
    """

    submit: Callable[[TensorDict], int]
    step_of: Callable[[], int]
    dead: Callable[[], list[str]] = list
    busy: Callable[[], str] = str
    stall: float = 1800.0
    row_limit: int | None = None
    workers: Callable[[], int] = lambda: 1
    single_turn: bool = False
    late: bool = False


def deal(count: int, workers: int) -> np.ndarray:
    """int64 ``(count,)``: an order in which ``workers`` contiguous shares each begin with what was to come first.

    verl's ``generate_sequences`` gives each agent-loop worker one contiguous share of the prompts, and all begin at once.
    A manager of somebody's own may show no workers: one share.
    """
    order, shares = np.arange(count, dtype=np.int64), max(1, workers)
    return np.concatenate([order[first::shares] for first in range(shares)])


class RolloutClient(Generic[E]):
    """Sends an engine's requests, waits, and reads what is back; what every trainer mode has in common.

    Attributes:
        queue: what TransferQueue holds.
        batch: of the step, or of the mini-step, that trains.
    """

    def __init__(self, engine: E, stream: DataloaderPrompts, handles: RolloutHandles) -> None:
        self.engine, self.stream, self.handles, self.config = engine, stream, handles, engine.config
        advantage = engine.policy.advantage
        alone = not (advantage.needs_groups or advantage.centres)
        self.queue = Queue(engine.config, alone=alone, late=handles.late)
        self.batch: Batch  # once it is complete
        self._looked = 0.0  # what the latest look that found something cost
        self._all_failed: list[int] = []  # groups of the latest looks in which every group failed

    @without_gc()
    def send(self, requests: Requests | None) -> None:
        """Send these requests; ConfigError if the queue could not hold their rows."""
        if requests is None or not len(requests):
            return
        requests = requests.select(deal(len(requests), self.handles.workers()))
        items, uids = [], []
        for submission, index, n, stage in zip(
            requests.submission.tolist(),
            requests.index.tolist(),
            requests.n.tolist(),
            requests.stage.tolist(),
            strict=True,
        ):
            item = self.stream.item(index)
            items.append(item)
            whole = self.handles.single_turn and item.get("agent_name", SINGLE_TURN) == SINGLE_TURN
            uids.append(self.queue.ask(submission, str(uuid.uuid4()), n, stage, whole=whole))
        check_room(self.handles.row_limit, self.queue.expected(), f"step {self.handles.step_of()}")
        refuse_own_numbers(items[0])  # a data set of a class of one's own may add it to its items
        columns = {**collate_fn(items), "uid": uids, "__rollout_n__": requests.n.tolist()}
        batch = tu.get_tensordict({k: v if isinstance(v, torch.Tensor) else stacked(v) for k, v in columns.items()})
        tu.assign_non_tensor_data(batch, "global_steps", self.handles.step_of())
        self.handles.submit(batch)

    @property
    def sent(self) -> Requests:
        """The requests in flight that have been sent."""
        return self.engine.flight

    def timeout(self) -> StallTimeout:
        """A wait that begins now."""
        handles = self.handles
        return StallTimeout(self.config.poll_interval, handles.stall, handles.step_of(), handles.dead, handles.busy)

    def fetch(self, timeout: StallTimeout) -> Groups | None:
        """Look once: what has come back of the requests in flight, or None after a rest.

        AdaptiveError: nothing has come back for too long, a worker died, or group after group failed. ConfigError: no rollout has
        the field that ``adaptive.signal`` names.
        """
        watch, flight = Stopwatch(), self.sent
        uids = self.queue.uids(flight)
        status = self.queue.look(uids)
        back = np.array([status[uid] in DONE for uid in uids], dtype=bool)
        if not back.any():
            timeout.rest(status, self.queue.count, watch.seconds)
            return None
        results = self.queue.collect(flight.select(back), self.handles.step_of())
        self._note_failures(results)
        self._looked = watch.seconds
        timeout.restart()
        return results

    def pump(self, enough: Callable[[], bool]) -> None:
        """Give the engine what comes back, and send what it asks for, until there is enough."""
        timeout, found = self.timeout(), False
        while not enough():
            if found:
                self.pause()
            results = self.fetch(timeout)
            found = results is not None
            if results is not None:
                requests = self.engine.receive(results)
                self.clear_dropped()
                self.send(requests)

    def clear_dropped(self) -> None:
        """Groups that will not train leave nothing behind, in a long step neither: their rollouts, and their prompts' images."""
        gone = self.engine.never_trains()
        self.queue.close(gone.submission.tolist())
        self.stream.drop(gone.index.tolist())

    def end_step(self) -> None:
        """Let go what no group needs that outlives the step; what was read ahead stays."""
        living = self.engine.living
        self.queue.close([submission for submission in self.queue.submissions if submission not in living])
        self.stream.forget([*living.values(), *self.engine.prompt_source.ahead.tolist()])

    def state_dict(self) -> dict:
        """Which rows belong to groups that outlive a step; the rows themselves are in TransferQueue's own checkpoint."""
        return self.queue.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Take these groups up after a restart; see :meth:`.queue.Queue.load_state_dict`."""
        self.queue.load_state_dict(state, self.engine.living)

    def pause(self) -> None:
        """Pause between two polls that both found results, so that a trickle of results does not keep the driver busy."""
        pause(self.config.poll_interval, self._looked)

    def wait_for_partition(self, partition: str, count: int) -> None:
        """Wait until ``count`` prompts of another partition (validation) are back, with the same ceiling as everywhere."""
        timeout = self.timeout()
        while True:
            watch = Stopwatch()
            rows = (tq.kv_list(partition) or {}).get(partition, {})
            status = {key: tag.get("status") for key, tag in rows.items() if tag.get("is_prompt", False)}
            if sum(s in DONE for s in status.values()) >= count:
                return
            timeout.rest(status, len(rows), watch.seconds)

    # -- checks ---------------------------------------------------------------------------------------------

    def _note_failures(self, results: Groups) -> None:
        step, failures, lost = self.handles.step_of(), int(results.failed.sum()), int(results.lost.sum())
        if lost:
            logger.warning(
                "step %d: %d of %d rollouts of %s were lost (a session raised or returned nothing, or its reward or "
                "adaptive.signal is missing or not finite). %s",
                step,
                lost,
                lost + results.rollouts,
                counted(len(results), "prompt"),
                f"{counted(failures, 'group')} failed, with less than adaptive.min_sessions={self.config.min_sessions:g} of the rollouts "
                "left, and not counted in the statistics; of the others, the rest is the group"
                if failures
                else "The rest of each group is the group",
            )
        self._all_failed = [*self._all_failed, failures] if failures == len(results) else []
        # A look may see one group: a small batch's worth of single failures can be bad luck.
        if sum(self._all_failed) >= max(16, 2 * self.engine.facts.batch):
            self.queue.miss_signal()
            busy = self.handles.busy()
            raise AdaptiveError(
                f"step {step}: the last {sum(self._all_failed)} groups all failed. The reward function, the agent loop or a "
                "rollout server is broken: look for its error above (verl logs it as `Error in _run_prompt`), or for a reward "
                f"that is NaN or infinite{f' (open requests: {busy})' if busy else ''}"
            )
