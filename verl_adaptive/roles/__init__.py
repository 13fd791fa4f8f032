"""The four roles of a policy: all that the author of a part imports (docs/custom_parts.md).

* a :class:`Sampler` decides which prompts are rolled out next,
* an :class:`Allocator` how many rollouts each gets, first and after each review,
* a :class:`Filter` which finished groups, and which of their rollouts, train,
* an :class:`Advantage` what baseline and scale their advantages have.

What a part looks at is in :class:`~verl_adaptive.groups.Groups` and :class:`~verl_adaptive.progress.Progress`. Whoever deals
with a part asks what it can do (``keeps_all``, ``fixed_size``), never for its name; a part does not know which trainer it
serves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, build
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.stats.table import Column, StatsTable

CLOSE = 0  #: review: the group is done
HOLD = -1  #: review: keep the group for a later step (:class:`verl_adaptive.roles.pooled.PooledAllocator` only)


class Role(ABC):
    """Base of samplers, allocators, filters and advantages.

    Contract. A role is pure decision code: its decisions depend on its config, the statistics table, its own state and
    the :class:`~verl_adaptive.progress.Progress` it is given, never on a clock, on arrival order or on global
    randomness. All per-prompt state lives in table columns that it declares in :attr:`columns`; the rest goes through
    :meth:`state_dict`, whose values are JSON scalars, lists, dicts or numpy arrays. After ``load_state_dict`` of a
    saved state (and of the table) every later decision is the same, bit for bit.

    Attributes:
        role: ``sampler``, ``allocator``, ``filter`` or ``advantage``.
        name: the part's name in the configuration; also the namespace of its columns.
        columns: per-prompt columns, without the namespace.
    """

    role: ClassVar[str]
    name: ClassVar[str]
    columns: ClassVar[Mapping[str, Column]] = {}

    @dataclass
    class Config:
        """Options of the part; every field is a key of ``adaptive.<role>``."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """Build from the keys of ``adaptive.<role>``, ``name`` left out.

        Raises:
            ConfigError: unknown key or bad value.
        """
        self.config: Any = build(self.Config, options, f"adaptive.{self.role}")
        self.table: StatsTable
        self.facts: RunFacts

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        """Refuse companions and settings that make no sense with this part.

        Raises:
            ConfigError: with the reason and what to choose instead.
        """

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        """Join a run: declare columns, check the options against the run's facts.

        Comes once more with the table of a checkpoint, if the run resumes from one, before anything is decided.

        Raises:
            ConfigError: the options cannot work in this run.
        """
        self.table, self.facts = table, facts
        if self.columns:
            table.declare(self.name, dict(self.columns))

    def option(self, name: str) -> Any:
        """An option's value; None if the part has no such option, for callers that do not know which part they have."""
        return getattr(self.config, name, None)

    def col(self, name: str) -> np.ndarray:
        """The part's own column ``name``: a writable view of the table, valid until the table grows."""
        return self.table.col(f"{self.name}.{name}")

    def evidence_weight(self, groups: Groups) -> np.ndarray:
        """float64 ``(G,)``: what a rollout counts for as evidence of what the policy can do *now*: of a group that was generated
        k weight updates ago, ``stale_discount ** k``."""
        return self.facts.stale_discount ** groups.lag.astype(np.float64)

    def evidence(self, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        """float64 ``(G,)`` twice: successes and failures as such evidence."""
        weight = self.evidence_weight(groups)
        return weight * groups.successes, weight * (groups.n - groups.successes)

    def observe(self, groups: Groups, progress: Progress) -> None:
        """Learn from closed groups, kept or dropped alike; each group comes exactly once, failed ones never."""

    def end_step(self, progress: Progress) -> None:
        """The step's batch is complete; called once, before the weights change."""

    def metrics(self) -> dict[str, float]:
        """Values to log, named ``adaptive/<role>/…`` by the caller; the names follow verl's reduction rule.

        Asked several times after each :meth:`end_step`, by the journal and by verl's logger: it changes nothing. A part that counts
        by step keeps the step's count in :meth:`end_step` and starts a new one there.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything beyond the table that later decisions depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""


@dataclass
class Pick:
    """What a pool sampler chose.

    Attributes:
        rows: int64 ``(k,)``, table rows, in the order to submit.
        n: int64 ``(k,)``, rollouts planned for each, of a sampler with ``plans_rollouts``; None leaves that to the allocator.
    """

    rows: np.ndarray
    n: np.ndarray | None = None


class Sampler(Role):
    """Gates verl's prompt stream (``kind = "stream"``) or picks from the whole pool (``kind = "pool"``).

    Attributes:
        kind: which of :meth:`admit` and :meth:`pick` the engine calls.
        whole_batches: keep verl's own batching of the stream (drop_last included); plain epoch order does.
        plans_rollouts: a pool sampler whose picks say how many rollouts each prompt gets (``Pick.n``).
        plans_steps: plans a step's prompts at once, from the results of all steps before it; an asynchronous trainer
            must then not run ahead (``num_warmup_batches=0``).
        unvisited: what a sampler that decides by a prompt's earlier visits does while there are none, as words after "will"
            (``skip nothing``); empty: it does not decide by them.
    """

    role: ClassVar[str] = "sampler"
    kind: ClassVar[str] = "stream"
    whole_batches: ClassVar[bool] = False
    plans_rollouts: ClassVar[bool] = False
    plans_steps: ClassVar[bool] = False
    unvisited: ClassVar[str] = ""

    def round_size(self, progress: Progress) -> int:
        """Prompts wanted next; groups waiting for a top-up may yet fill the batch, so they count."""
        return progress.wanted()

    def admit(self, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
        """Decide on prompts of the stream, in its order.

        Args:
            rows: int64 ``(k,)``, table rows.
            position: int64 ``(k,)``, their positions in the stream since the run began (the draw's salt).
            progress: the step.

        Returns:
            bool ``(k,)``: True to roll the prompt out.
        """
        raise TypeError(f"{type(self).__name__} is a pool sampler")

    def decided(self, rows: np.ndarray, passed: np.ndarray) -> None:
        """The stream has passed these prompts, with these answers of :meth:`admit`: where a gate counts.

        Where groups commit in order, :meth:`admit` is asked about more prompts than a step uses, and about the rest once
        more in the next. This comes once for each place of the stream, and before anything of the step is learned there.

        Args:
            rows: int64 ``(k,)``, table rows.
            passed: bool ``(k,)``.
        """

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        """Choose from the pool.

        Args:
            pool: int64 ``(M,)``, table rows of the data set's distinct prompts.
            count: prompts wanted (``round_size``'s answer).
            progress: the step.
        """
        raise TypeError(f"{type(self).__name__} is a stream sampler")

    def estimate(self, rows: np.ndarray) -> np.ndarray:
        """Pass rates as the sampler knows them, float64 ``(k,)``, for people; here the mean of Beta(1, 1) after all rollouts."""
        return (1.0 + self.table.col("successes")[rows]) / (2.0 + self.table.col("rollouts")[rows])

    @property
    def finished(self) -> bool:
        """True when the sampler will never give another prompt: training ends after the current step."""
        return False


class Allocator(Role):
    """Gives each prompt its rollouts.

    This is all that most allocators need. One whose groups share something (a pool of rollouts, the places of the batch) or
    wait for a later step derives from :class:`~verl_adaptive.roles.pooled.PooledAllocator`; only that one may
    set ``can_hold``.

    Attributes:
        can_hold: :meth:`review` may answer ``HOLD``; the engine then offers held groups to ``recall`` in later steps.
        follows_plan: a prompt gets what a sampler with ``plans_rollouts`` planned for it; where it is false, a run says so.
        least_key: the option below ``adaptive.allocator`` that :meth:`least` comes from.
    """

    role: ClassVar[str] = "allocator"
    can_hold: bool = False
    follows_plan: ClassVar[bool] = False
    least_key: ClassVar[str] = "n"

    @abstractmethod
    def first(self, rows: np.ndarray, planned: np.ndarray | None, progress: Progress) -> np.ndarray:
        """First rollouts of new prompts.

        Args:
            rows: int64 ``(k,)``.
            planned: int64 ``(k,)``, a pool sampler's own plan, or None.

        Returns:
            int64 ``(k,)``, each at least 1.
        """

    def review(self, groups: Groups, progress: Progress) -> np.ndarray:
        """Decide on groups whose rollouts are all back.

        The answer depends on a group's own rollouts and on the state at the step's start, and changes nothing: groups come
        in any order and in batches of any size, and some are never committed. The engine keeps the step's cap.

        Returns:
            int64 ``(G,)``: k > 0 more rollouts under the same weights, or ``CLOSE``.
        """
        return np.zeros(len(groups), dtype=np.int64)

    def most(self, n: np.ndarray, stage: np.ndarray) -> np.ndarray:
        """int64 ``(k,)``: the most further rollouts that groups of ``n`` rollouts after ``stage`` top-ups may ask for.

        It falls by at least what :meth:`review` asks for, so that every group ends. The tighter the bound, the sooner other groups
        can be sure of their share of a pool or a cap. By default none, as there is no review.
        """
        return np.zeros(len(n), dtype=np.int64)

    def fixed_size(self, n: int) -> int | None:
        """Rollouts that every group gets under ``actor_rollout_ref.rollout.n=n``, if all get the same at once (or what a
        sampler planned, where there is a plan); None where that is decided as the run goes. Asked before :meth:`bind`."""
        return None

    def group_size(self, n: int) -> int:
        """Rollouts that a group counts for in the run's budget; asked before :meth:`bind`."""
        return self.fixed_size(n) or n

    def least(self, n: int) -> int:
        """Fewest rollouts that a group may close with; asked before :meth:`bind`."""
        return self.group_size(n)

    @property
    def tops_up(self) -> bool:
        """Whether groups may get more once their first rollouts are back."""
        return type(self).review is not Allocator.review


@runtime_checkable
class Commits(Protocol):
    """An allocator that gives each prompt pilots, and those that :meth:`side` puts into its band a commit (a top-up)."""

    def pilots(self, n: int) -> int:
        """Pilots of a prompt under ``actor_rollout_ref.rollout.n=n``."""

    def side(self, groups: Groups) -> np.ndarray:
        """int8 ``(G,)``: −1 too hard, 0 in the band, +1 too easy."""


@dataclass
class Verdict:
    """A filter's word on ``G`` groups with ``R`` rollouts.

    Attributes:
        keep: bool ``(G,)``.
        reason: int64 ``(G,)``, index into :attr:`Filter.reasons` for dropped groups; ignored for kept ones.
        rollouts: bool ``(R,)``, rollouts of kept groups that train, or None for all.
    """

    keep: np.ndarray
    reason: np.ndarray
    rollouts: np.ndarray | None = None


class Filter(Role):
    """Keeps or drops closed groups.

    Attributes:
        reasons: names of the reasons a group may be dropped for, in the order of ``Verdict.reason``.
        rollout_reason: the ledger's name for rollouts left out of kept groups.
        keeps_all: every group that did not fail trains.
        needs_groups: judges by differences within a group, so that a group of one never trains.
        may_leave_one: may let a single rollout of a group train; where it is false, an answer that does is an error.
    """

    role: ClassVar[str] = "filter"
    keeps_all: bool = False
    needs_groups: bool = False
    may_leave_one: bool = False
    reasons: tuple[str, ...] = ()
    rollout_reason: str = "rejected"

    @abstractmethod
    def decide(self, groups: Groups, progress: Progress) -> Verdict:
        """Judge closed groups; failed ones are dropped before and do not come here."""


class Advantage(Role):
    """Turns rewards into advantages, one number a rollout.

    ``estimator`` is the name that verl's ``algorithm.adv_estimator`` takes: None leaves the user's own choice alone;
    any other name is registered with verl's ``register_adv_est`` and computed by :meth:`compute`.

    Attributes:
        group_relative: verl's estimator gives a group of equal rewards advantages of zero; told by the trainer to parts
            that leave the advantage to verl.
        needs_groups: the baseline is the group's own, so that a group of one is never informative; False: one rollout a prompt
            is enough. Told by the trainer, too, to parts that leave the advantage to verl.
        centres: verl's estimator subtracts the mean of a prompt's rollouts where there are several, so that none may be left alone
            of its group; told by the trainer to parts that leave the advantage to verl.
        takes_penalties: :meth:`compute` is right about rewards that verl's KL penalty was taken off; False: with
            ``algorithm.use_kl_in_reward`` the run is refused.
    """

    role: ClassVar[str] = "advantage"
    estimator: ClassVar[str | None] = None
    takes_penalties: ClassVar[bool] = True
    group_relative: bool = True
    needs_groups: bool = True
    centres: bool = False

    def compute(self, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
        """Advantages of the rollouts that train.

        Args:
            reward: float64 ``(R,)``, rewards after verl's own penalties, summed over tokens.
            group_of: int64 ``(R,)``, position of each rollout's group in ``observed``.
            observed: the step's trained groups with *all* their rollouts, those left out of training included.

        Returns:
            float64 ``(R,)``.

        Raises:
            TypeError: the part leaves the advantage to verl (``estimator`` is None).
        """
        raise TypeError(f"{type(self).__name__} leaves the advantage to verl")

    @property
    def zero_rows(self) -> str:
        """What becomes of rows of zero advantage where they may leave training, as words after "rows of zero advantage"; empty:
        those of zero-variance groups are left out."""
        if self.estimator is None or self.needs_groups:
            return ""
        return "are few, since the baseline is not the group's; they are left out of training (same gradient)"

    def zero(self, groups: Groups, trains: np.ndarray) -> np.ndarray:
        """Rollouts whose advantage is certain to be exactly zero, so that training can leave them out.

        :meth:`compute` is then not shown them, and must give the others what they had with them.

        Args:
            groups: kept groups.
            trains: bool ``(R,)``, the rollouts the filter lets train.

        Returns:
            bool ``(R,)``.
        """
        return np.zeros(groups.rollouts, dtype=bool)


@dataclass
class PolicyParts:
    """The parts of a policy, one of each role."""

    sampler: Sampler
    allocator: Allocator
    filter: Filter
    advantage: Advantage

    def __iter__(self) -> Iterator[Role]:
        return iter((self.sampler, self.allocator, self.filter, self.advantage))
