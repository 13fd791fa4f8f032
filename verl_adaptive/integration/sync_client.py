"""Runs the ``sync`` trainer's steps: sends what the engine asks for, feeds it whatever is back, makes the batch.

:mod:`.abort` ends what is still in flight once the batch is decided.
"""

from __future__ import annotations

import numpy as np

from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.integration.abort import Abort
from verl_adaptive.integration.dataloader import DataloaderPrompts
from verl_adaptive.integration.polling import DONE, StallTimeout, Stopwatch
from verl_adaptive.integration.queue import Batch
from verl_adaptive.integration.rollout_client import RolloutClient, RolloutHandles
from verl_adaptive.integration.timings import Timings


class SyncRolloutClient(RolloutClient[Engine]):
    """Runs steps of an engine, one batch a step.

    Args:
        engine, stream, handles: as of :class:`.rollout_client.RolloutClient`.
        abort: ends what is still in flight once the batch is decided.
        slots: sequences that all inference engines run at a time; 0: not known.
    """

    def __init__(
        self, engine: Engine, stream: DataloaderPrompts, handles: RolloutHandles, abort: Abort, slots: int = 0
    ) -> None:
        super().__init__(engine, stream, handles)
        self._abort = abort
        self.timings = Timings(slots)
        self._unsent = Requests.none()  # in order, for want of room

    def start(self) -> None:
        """Begin the step and send its first requests, without waiting."""
        self.queue.clear_strays()
        self.timings.begin()
        self.send(self.engine.begin(self.handles.step_of()))

    def send(self, requests: Requests | None) -> None:
        """Send these requests, as many as TransferQueue has room for; the others follow as groups are closed.

        ConfigError: none fits, and none is under way whose rows would be freed.
        """
        waiting = self._unsent if requests is None else Requests.join([self._unsent, requests])
        self._unsent, limit = Requests.none(), self.handles.row_limit
        if limit is not None and not self.handles.late and len(waiting):
            need = np.cumsum(1 + np.ceil(waiting.n * self.queue.outputs))
            fits = int(np.searchsorted(need, limit - self.queue.expected(), side="right"))
            if fits or len(self.engine.flight) > len(waiting):
                waiting, self._unsent = waiting.select(slice(fits)), waiting.select(slice(fits, None))
        super().send(waiting)
        self.timings.load(self.queue.under_way)

    def fetch(self, timeout: StallTimeout) -> Groups | None:
        results = super().fetch(timeout)
        if results is None:
            self.timings.load(self.queue.under_way, self.queue.listed_at)
        elif not self.handles.late:
            self.timings.back(len(results))
            self.timings.load(self.queue.under_way)
        return results

    @property
    def sent(self) -> Requests:
        flight = self.engine.flight
        return flight.select(~np.isin(flight.submission, self._unsent.submission))

    def wait_for_all(self) -> tuple[list[str], list[dict]]:
        """Wait for all rollouts of the step; keys and tags of their rows, which have no rewards yet.

        Where rewards are late this comes before :meth:`complete`.

        AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or no rollout left a row.
        """
        uids, before, timeout = self.queue.uids(self.engine.flight), 0, self.timeout()
        while before < len(uids):
            watch = Stopwatch()
            status = self.queue.look(uids)
            back = sum(s in DONE for s in status.values())
            if back > before:
                self.timings.back(back - before)
                self.timings.load(self.queue.under_way)
                before = back
            if back < len(uids):
                self.timings.load(self.queue.under_way, self.queue.listed_at)
                timeout.rest(status, self.queue.count, watch.seconds)
        self.timings.end()
        keys, tags = self.queue.rows(uids)
        if not keys:
            raise AdaptiveError(
                f"step {self.handles.step_of()}: none of {len(uids)} prompts left a rollout. The agent loop or a rollout "
                "server is broken: look for its error above (verl logs it as `Error in _run_prompt`)"
            )
        return keys, tags

    def complete(self) -> Batch:
        """Give the engine what comes back until the batch is decided, abort the rest, and make the batch.

        AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or group after group failed.
        """
        engine = self.engine
        self.pump(lambda: engine.decided)
        sent, self._unsent = self.sent, Requests.none()
        if len(sent):
            asked = sent.rollouts
            done = self._abort(self.queue.drop(sent))
            engine.abandon(min(done.rollouts, asked), done.tokens)  # one may end between two counts
        if not self.handles.late:
            self.timings.end()
        self.batch = self.queue.take_batch(engine.finish())
        self.end_step()  # with it go groups that were under way or had not committed
        return self.batch

    def finish(self) -> StepResult:
        """The account of the step whose batch has been taken."""
        return self.batch.result
