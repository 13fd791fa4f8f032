"""What every engine is made of: a prompt source, a tracker, a policy bound to a table, and the step in hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine.group_tracker import GroupTracker, groups_of
from verl_adaptive.engine.prompt_source import PromptSource
from verl_adaptive.engine.steps import Listener, PromptStream, Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.ledger import Ledger
from verl_adaptive.policy import Policy
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.roles.pooled import PooledAllocator
from verl_adaptive.stats.table import StatsTable


class Engine(ABC):
    """Runs a policy; what its kinds share, and what whoever drives one may rely on.

    One step::

        send(engine.begin(step))
        while not engine.decided:
            send(engine.receive(some_results))      # any part of engine.flight
        engine.abandon(rollouts, tokens)            # what was still in flight, if anything
        result = engine.finish()

    Args:
        policy: the four roles, not bound yet.
        table: the statistics; already filled when the run is warm-started.
        config: the ``adaptive`` group.
        facts: what the run is.
        row_of: int64 ``(D,)``, the table row of every data-set position.
        stream: the prompt stream (unused by pool samplers).
        skip_zero: leave rollouts of exactly zero advantage out of training.

    Attributes:
        pooled: the allocator, where its groups share something or wait for one another.
        flight: asked for and not back, in submission order.
        progress: the step in hand, as the roles see it.
        pool: int64 ``(M,)``, table rows of the distinct prompts.
        listener: is told what happens.
    """

    def __init__(
        self,
        policy: Policy,
        table: StatsTable,
        config: AdaptiveConfig,
        facts: RunFacts,
        row_of: np.ndarray,
        stream: PromptStream,
        *,
        skip_zero: bool = True,
    ) -> None:
        self.policy, self.table, self.config, self.facts = policy, table, config, facts
        self.pooled = policy.allocator if isinstance(policy.allocator, PooledAllocator) else None
        self.prompt_source = PromptSource(policy.sampler, facts, row_of, stream)
        self.row_of, self.pool = self.prompt_source.row_of, self.prompt_source.pool
        self.tracker = GroupTracker(policy, table, config, facts, skip_zero=skip_zero)
        self.flight = Requests.none()
        self.listener = Listener()
        self.progress: Progress
        self._submission = 0
        policy.bind(table, facts)

    # -- a step ---------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, step: int) -> Requests | None:
        """Start a step; its first requests, if any."""

    @abstractmethod
    def receive(self, results: Groups) -> Requests | None:
        """Take what has come back; the requests that follow, if any.

        Args:
            results: one group per request that is back, any part of :attr:`flight`, in any order; a group with no
                rollouts and ``failed`` set is one that never came back.

        Raises:
            AdaptiveError: a result was not asked for.
        """

    @property
    @abstractmethod
    def decided(self) -> bool:
        """Nothing more need be waited for: :meth:`finish` may be called."""

    @abstractmethod
    def finish(self) -> StepResult:
        """The step's account, once it is decided.

        Raises:
            Exhausted: the batch is short and ``adaptive.on_exhausted=raise``, or nothing at all came back.
        """

    def abandon(self, rollouts: int, tokens: int) -> None:
        """Count what requests that are given up had generated: it was paid for."""
        self.listener.abandoned(rollouts, tokens)
        for account, amount in ((self.ledger.rollouts, rollouts), (self.ledger.tokens, tokens)):
            account.generated += amount
            account.drop("aborted", amount)

    def never_trains(self) -> Groups:
        """Groups closed in this step that will not train, whatever comes; their rows may go."""
        return self.tracker.never_trains(self.tracker.closed)

    # -- looking --------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """Prompts that the gate turned away in this step."""
        return self.prompt_source.skipped

    @property
    def held(self) -> Groups:
        """Groups kept for a later step."""
        return self.tracker.held

    @property
    def ledger(self) -> Ledger:
        """The step's account."""
        return self.tracker.ledger

    @property
    def total(self) -> Ledger:
        """The run's account."""
        return self.tracker.total

    @property
    def living(self) -> dict[int, int]:
        """Submission → data-set position of the groups that outlive a step."""
        return dict(zip(self.held.submission.tolist(), self.held.index.tolist(), strict=True))

    @property
    def finished(self) -> bool:
        """No further step is wanted: the sampler is done, or ``adaptive.total_rollouts`` is spent."""
        spent = self.config.total_rollouts is not None and self.total.rollouts.generated >= self.config.total_rollouts
        return spent or self.policy.sampler.finished

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State between steps; call it after :meth:`finish`."""
        return {
            "submission": self._submission,
            **self.prompt_source.state_dict(),
            **self.tracker.state_dict(),
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of :meth:`state_dict`, of another kind of engine too; the table is restored separately."""
        self._submission = int(state["submission"])
        self.prompt_source.load_state_dict(state)
        held = state["held"]
        self.tracker.load_state_dict(state, self.prompt_source.found(held["row"], held["index"]))
        self._take_up(state)
        self.policy.load_state_dict(state["policy"])

    def _take_up(self, state: Mapping[str, Any]) -> None:
        """What only some kinds have: here, what an asynchronous engine had in flight is not ours to go on with."""
        mine = state.get("asynchronous")
        if mine is None:
            return
        self.tracker.gone = Groups.concat([self.tracker.gone, groups_of(mine["open"])])
        self.tracker.behind = Groups.concat([self.tracker.behind, groups_of(mine["ready"])])

    @property
    def under_way(self) -> dict[str, int]:
        """How many groups outlive the step that only an asynchronous engine can go on with: in ``flight``, and ``ready``."""
        return {}

    # -- for the kinds --------------------------------------------------------------------------------------

    def _open_step(self, step: int, **more: Any) -> None:
        """A fresh account."""
        self.progress = Progress(
            step=step,
            batch=self.facts.batch,
            cap=self.config.max_rollouts_per_step,
            draw=Draw(self.facts.seed, step),
            epoch=self.prompt_source.epoch(self.total.rollouts.generated),
            **more,
        )
        self.prompt_source.skipped, self.prompt_source.pulled, self.prompt_source.ended = 0, 0, ""
        self.tracker.open_step(self.progress)

    def _close_step(self, result: StepResult) -> None:
        """The account is whole: everybody is told that the step is over."""
        self.tracker.account(result)
        self.progress.epoch = self.prompt_source.epoch(self.total.rollouts.generated)
        self.policy.end_step(self.progress)
        self.listener.finished(result)

    def _landed(self, results: Groups) -> Groups:
        """What came back, out of flight and joined to its groups; AdaptiveError if it was not asked for, or came back twice."""
        back = np.isin(self.flight.submission, results.submission)
        if back.sum() != len(results):
            raise AdaptiveError("results do not match the requests in flight")
        self.listener.received(results)
        self.flight = self.flight.select(~back)
        return self.tracker.join(results)

    def _submissions(self, count: int) -> np.ndarray:
        """int64 ``(count,)``: fresh submissions."""
        submission = self._submission + np.arange(count, dtype=np.int64)
        self._submission += count
        return submission
