"""Runs the asynchronous trainers' steps: whatever is back is reviewed, and work in flight outlives the step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import transfer_queue as tq

from verl_adaptive.engine import AsyncEngine, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.polling import PARTITION
from verl_adaptive.integration.queue import Batch
from verl_adaptive.integration.rollout_client import RolloutClient


class NothingLeft(AdaptiveError):
    """A mini-step after the step's first has no group to train on; the trainer goes on without it."""


class AsyncRolloutClient(RolloutClient[AsyncEngine]):
    """Runs steps of an :class:`~verl_adaptive.engine.AsyncEngine`; nothing waits for anything to be whole."""

    def start(self) -> None:
        """Begin the step: fill the window, without waiting."""
        self.send(self.engine.begin(self.handles.step_of()))

    def complete(self) -> Batch:
        """Wait until the next mini-step's groups are ready, and make their batch.

        AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or group after group failed. NothingLeft: the
        step has trained on all that there was.
        """
        self._wait(lambda: self.engine.count)
        result = self.engine.take()
        if not len(result.groups):
            raise NothingLeft(result.note)
        self.batch = self.queue.take_batch(result)
        return self.batch

    def finish(self) -> StepResult:
        """The account of the step whose batches have been taken."""
        result = self.engine.finish()
        self.end_step()
        return result

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` groups are ready, or no more will be."""
        self._wait(lambda: count)

    def sampleable(self) -> int:
        """Groups that are ready or back unreviewed; decides nothing, so it may be asked between steps."""
        status = self.queue.look(self.queue.uids(self.engine.flight))
        return len(self.engine.ready) + sum(s == "finished" for s in status.values())

    def resend(self) -> int:
        """Send requests again that a checkpoint knows and the restored queue does not; how many.

        Groups whose first request is under way anew, sent by verl or by us, count as begun now, as verl counts them.
        """
        step, flight = self.handles.step_of(), self.engine.flight
        uids = self.queue.uids(flight)
        status = self.queue.look(uids)
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        lost = np.array([status[uid] is None for uid in uids], dtype=bool)
        anew = np.array([rows.get(uid, {}).get("global_steps") == step for uid in uids], dtype=bool)
        self.engine.reissued(flight.submission[(lost | anew) & (flight.stage == 0)], step)
        requests = flight.select(lost)
        for submission in requests.submission.tolist():
            self.queue.forget_last(submission)
        self.send(requests)
        return len(requests)

    def _wait(self, count: Callable[[], int]) -> None:
        """Review what comes back until there are so many groups, or nothing more can come."""

        def enough() -> bool:
            if self.engine.can_take(count()):
                return True
            self.send(self.engine.revive())
            return self.engine.starved

        self.pump(enough)
