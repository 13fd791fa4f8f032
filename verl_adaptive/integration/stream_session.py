"""The session of the asynchronous trainers: whatever is back is reviewed, nothing waits for a round."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import transfer_queue as tq

from verl_adaptive.engine import AsyncEngine, StepResult
from verl_adaptive.integration.session import Batch, Session
from verl_adaptive.integration.waiting import DONE, PARTITION, StallTimeout

__all__ = ["StreamSession"]


class StreamSession(Session):
    """Runs steps of a :class:`~verl_adaptive.streaming.AsyncEngine`: whatever is back is reviewed, nothing waits for a round."""

    engine: AsyncEngine

    def start(self) -> None:
        """Begin the step: fill the window, without waiting."""
        self._send(self.engine.begin(self._step_of()))

    def complete(self) -> Batch:
        """Wait until the next mini-step's groups are ready, and make their batch.

        Raises:
            AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or group after group failed.
        """
        engine = self.engine
        self._pump(lambda: engine.can_take(engine.count))
        return self._settle(engine.take(engine.count))

    def finish(self) -> StepResult:
        result = self.engine.finish()
        self._clear(result.groups.ticket[~result.trained].tolist(), keep=set())
        self.stream.forget()
        return result

    def wait_for(self, count: int) -> int:
        """Wait until ``count`` groups are ready, or no more will be; how many there are."""
        self._pump(lambda: self.engine.can_take(count))
        return len(self.engine.ready)

    def sampleable(self) -> int:
        """Groups that are ready or back unreviewed; decides nothing, so it may be asked between steps."""
        status = self._look(self._uids())
        return len(self.engine.ready) + sum(s == "finished" for s in status.values())

    def resend(self) -> int:
        """Send requests again that a checkpoint knows and the restored queue does not; how many.

        Groups whose first request is under way anew, sent by verl or by us, count as begun now, as verl counts them.
        """
        step, flight = self._step_of(), self.engine.flight
        uids = self._uids()
        status = self._look(uids)
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        lost = np.array([status[uid] is None for uid in uids], dtype=bool)
        anew = np.array([rows.get(uid, {}).get("global_steps") == step for uid in uids], dtype=bool)
        self.engine.reissued(flight.ticket[(lost | anew) & (flight.stage == 0)], step)
        requests = flight.select(lost)
        for ticket in requests.ticket.tolist():
            self._parts[ticket].pop()
            if not self._parts[ticket]:
                del self._parts[ticket]
        self._send(requests if len(requests) else None)
        return len(requests)

    def _uids(self) -> list[str]:
        return [self._parts[ticket][-1].uid for ticket in self.engine.flight.ticket.tolist()]

    def _pump(self, enough: Callable[[], bool]) -> None:
        """Review what comes back until there is enough, or nothing more can come."""
        timeout = StallTimeout(self.config, self._step_of(), self._dead)
        while not enough():
            self._send(self.engine.revive())
            if self.engine.starved:
                return
            uids = self._uids()
            status = self._look(uids)
            back = np.array([status[uid] in DONE for uid in uids], dtype=bool)
            if not back.any():
                timeout.rest(status, self._tags)
                continue
            results = self._collect(self.engine.flight.select(back))
            self._note_failures(results)
            self._send(self.engine.receive(results))
            timeout = StallTimeout(self.config, self._step_of(), self._dead)
            if not enough():  # results that trickle in must not turn this into a busy loop
                time.sleep(self.config.poll_interval)

    def _failures_that_tell(self) -> int:
        # A look may see one group: a small batch's worth of single failures can be bad luck.
        return max(16, 2 * self.engine.facts.batch)
