"""Runs the ``sync`` trainer's steps: sends what the engine asks for, feeds it whatever is back, makes the batch.

:mod:`.courier` carries requests out and results back, :mod:`.queue` knows the rows, :mod:`.abort` ends what is still in
flight once the batch is decided. :mod:`.stream_session` is made of the same parts.
"""

from __future__ import annotations

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.abort import Abort
from verl_adaptive.integration.courier import Courier, Road
from verl_adaptive.integration.prompts import Stream
from verl_adaptive.integration.queue import Batch, Queue
from verl_adaptive.integration.times import Times

__all__ = ["Batch", "Session"]


class Session:
    """Runs steps of an engine on verl's rollout workers, one batch a step.

    Args:
        engine: the policy's engine.
        stream: the prompts.
        config: the ``adaptive`` group.
        road: what leads to the workers.
        abort: ends what is still in flight once the batch is decided.
        slots: sequences that all inference engines run at a time; 0: not known.
    """

    def __init__(
        self, engine: Engine, stream: Stream, config: AdaptiveConfig, road: Road, abort: Abort, slots: int = 0
    ) -> None:
        self.engine = engine
        advantage = engine.policy.advantage
        self.queue = Queue(config, alone=not (advantage.needs_groups or advantage.centres), late=road.late)
        self.courier = Courier(self.queue, stream, road, config, engine.facts.batch)
        self._abort = abort
        self.times = Times(slots)

    def start(self) -> None:
        """Begin the step and send its first requests, without waiting."""
        self._abort.sweep()
        self.times.begin()
        self._send(self.engine.begin(self.courier.road.step_of()))

    def _send(self, requests: Requests | None) -> None:
        self.courier.send(requests)
        self.times.load(self.queue.under_way)

    @property
    def late(self) -> bool:
        """Rewards come when all rollouts are there: :meth:`generated` has to come before :meth:`complete`."""
        return self.courier.road.late

    def generated(self) -> tuple[list[str], list[dict]]:
        """Wait for all rollouts of the step; keys and tags of their rows, which have no rewards yet.

        Raises:
            AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or no rollout left a row.
        """

        def seen(count: int) -> None:
            self.times.back(count)
            self.times.load(self.queue.under_way)

        uids = self.courier.wait(self.engine.flight, self.courier.timeout(), seen)
        self.times.end()
        keys, tags = self.queue.rows(uids)
        if not keys:
            raise AdaptiveError(
                f"step {self.courier.road.step_of()}: none of {len(uids)} prompts left a rollout. The agent loop or a rollout "
                "server is broken: look for its error above (verl logs it as `Error in _run_prompt`)"
            )
        return keys, tags

    def complete(self) -> Batch:
        """Feed the engine until the batch is decided, abort the rest, and make the batch.

        Raises:
            AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or group after group failed.
        """
        engine, courier = self.engine, self.courier
        timeout = courier.timeout()
        while not engine.settled:
            results = courier.fetch(engine.flight, timeout)
            if results is None:
                continue
            if not self.late:
                self.times.back(len(results))
                self.times.load(self.queue.under_way)
            self._send(engine.receive(results))
            courier.close(engine.never_trains().tolist())
            if not engine.settled:
                courier.pause()
        if len(engine.flight):
            done = self._abort(self.queue.drop(engine.flight))
            engine.abandon(done.rollouts, done.tokens)
        if not self.late:
            self.times.end()
        self._finished = engine.finish()
        batch = self.queue.settle(self._finished)
        # Groups that were under way or had not committed are gone with the step, but for those held for a later one.
        living = engine.living
        courier.close([t for t in [*self.queue.tickets, *courier.prompts] if t not in living])
        courier.stream.forget()
        return batch

    def finish(self) -> StepResult:
        """The account of the step whose batch has been taken."""
        return self._finished

    def wait_for_partition(self, partition: str, count: int) -> None:
        """Wait for validation; see :meth:`.courier.Courier.wait_for_partition`."""
        self.courier.wait_for_partition(partition, count)

    # -- groups that outlive a step, across a restart --------------------------------------------------------

    def state_dict(self) -> dict:
        """Which rows belong to held groups; the rows themselves are in TransferQueue's own checkpoint."""
        return self.queue.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Take up held groups; see :meth:`.queue.Queue.load_state_dict`."""
        self.courier.take_up(self.engine.living, state)
