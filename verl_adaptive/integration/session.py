"""Runs a trainer's steps: sends what the engine asks for, feeds it whatever is back, makes the batch. Here: ``sync``.

:mod:`.rollout_client` carries requests out and results back, :mod:`.queue` knows the rows, :mod:`.abort` ends what is still in
flight once the batch is decided. :mod:`.stream_session` is made of the same parts.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.abort import Abort
from verl_adaptive.integration.dataloader import DataloaderPrompts
from verl_adaptive.integration.queue import Batch
from verl_adaptive.integration.rollout_client import RolloutClient, RolloutHandles
from verl_adaptive.integration.timings import Timings

__all__ = ["BaseSession", "Batch", "Session"]

E = TypeVar("E", bound=Engine)


class BaseSession(Generic[E]):
    """An engine on verl's rollout workers.

    Args:
        engine: the policy's engine.
        stream: the prompts.
        handles: what leads to the workers.
    """

    def __init__(self, engine: E, stream: DataloaderPrompts, handles: RolloutHandles) -> None:
        self.engine = engine
        self.client = RolloutClient(engine, stream, handles)
        self.queue = self.client.queue

    def wait_for_partition(self, partition: str, count: int) -> None:
        """Wait for validation; see :meth:`.rollout_client.RolloutClient.wait_for_partition`."""
        self.client.wait_for_partition(partition, count)

    def state_dict(self) -> dict:
        """Which rows belong to groups that outlive a step; the rows themselves are in TransferQueue's own checkpoint."""
        return self.queue.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Take these groups up after a restart; see :meth:`.queue.Queue.load_state_dict`."""
        self.client.take_up(self.engine.living, state)


class Session(BaseSession[Engine]):
    """Runs steps of an engine, one batch a step.

    Args:
        engine, stream, handles: as of :class:`BaseSession`.
        abort: ends what is still in flight once the batch is decided.
        slots: sequences that all inference engines run at a time; 0: not known.
    """

    def __init__(
        self, engine: Engine, stream: DataloaderPrompts, handles: RolloutHandles, abort: Abort, slots: int = 0
    ) -> None:
        super().__init__(engine, stream, handles)
        self._abort = abort
        self.timings = Timings(slots)
        self._finished: StepResult  # with the step's batch

    def start(self) -> None:
        """Begin the step and send its first requests, without waiting."""
        self._abort.sweep()
        self.timings.begin()
        self._send(self.engine.begin(self.client.handles.step_of()))

    def _send(self, requests: Requests | None) -> None:
        self.client.send(requests)
        self.timings.load(self.queue.under_way)

    @property
    def late(self) -> bool:
        """Rewards come when all rollouts are there: :meth:`generated` has to come before :meth:`complete`."""
        return self.client.handles.late

    def generated(self) -> tuple[list[str], list[dict]]:
        """Wait for all rollouts of the step; keys and tags of their rows, which have no rewards yet.

        Raises:
            AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or no rollout left a row.
        """

        def seen(count: int) -> None:
            self.timings.back(count)
            self.timings.load(self.queue.under_way)

        uids = self.client.wait(self.engine.flight, self.client.timeout(), seen)
        self.timings.end()
        keys, tags = self.queue.rows(uids)
        if not keys:
            raise AdaptiveError(
                f"step {self.client.handles.step_of()}: none of {len(uids)} prompts left a rollout. The agent loop or a rollout "
                "server is broken: look for its error above (verl logs it as `Error in _run_prompt`)"
            )
        return keys, tags

    def complete(self) -> Batch:
        """Give the engine what comes back until the batch is decided, abort the rest, and make the batch.

        Raises:
            AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or group after group failed.
        """
        engine, client = self.engine, self.client
        timeout = client.timeout()
        while not engine.decided:
            results = client.fetch(engine.flight, timeout)
            if results is None:
                continue
            if not self.late:
                self.timings.back(len(results))
                self.timings.load(self.queue.under_way)
            self._send(engine.receive(results))
            client.close(engine.never_trains().tolist())
            if not engine.decided:
                client.pause()
        if len(engine.flight):
            asked = int(engine.flight.n.sum())
            done = self._abort(self.queue.drop(engine.flight))
            engine.abandon(min(done.rollouts, asked), done.tokens)  # one may end between two counts
        if not self.late:
            self.timings.end()
        self._finished = engine.finish()
        batch = self.queue.take_batch(self._finished)
        # Groups that were under way or had not committed are gone with the step, but for those held for a later one.
        living = engine.living
        client.close([t for t in [*self.queue.submissions, *client.prompts] if t not in living])
        client.stream.forget()
        return batch

    def finish(self) -> StepResult:
        """The account of the step whose batch has been taken."""
        return self._finished
