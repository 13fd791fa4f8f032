"""The four roles of a policy: all that the author of a part imports (docs/custom_parts.md).

A policy is one object of each role:

* a :class:`Sampler` decides which prompts are rolled out next,
* an :class:`Allocator` how many rollouts each gets, first and after each review,
* a :class:`Filter` which finished groups, and which of their rollouts, train,
* an :class:`Advantage` what baseline and scale their advantages have.

What a part looks at is in :class:`~verl_adaptive.groups.Groups` and :class:`~verl_adaptive.progress.Progress`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, build
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.stats.state import split_state
from verl_adaptive.stats.table import Column, StatsTable

__all__ = [
    "CLOSE",
    "HOLD",
    "OUTCOMES",
    "Advantage",
    "Allocator",
    "Filter",
    "Pick",
    "Policy",
    "Role",
    "Sampler",
    "Verdict",
    "ask",
    "who",
]


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

    def check_policy(self, policy: Policy, config: AdaptiveConfig) -> None:
        """Refuse companions and settings that make no sense with this part.

        Raises:
            ConfigError: with the reason and what to choose instead.
        """

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        """Join a run: declare columns, check the options against the run's facts.

        Raises:
            ConfigError: the options cannot work in this run.
        """
        self.table, self.facts = table, facts
        if self.columns:
            table.declare(self.name, dict(self.columns))

    def col(self, name: str) -> np.ndarray:
        """The part's own column ``name``: a writable view of the table, valid until the table grows."""
        return self.table.col(f"{self.name}.{name}")

    def evidence(self, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        """float64 ``(G,)`` twice: successes and failures as evidence of what the policy can do *now*.

        A group that was generated k weight updates ago counts ``stale_discount ** k``.
        """
        weight = self.facts.stale_discount ** groups.lag.astype(np.float64)
        return weight * groups.successes, weight * (groups.n - groups.successes)

    def observe(self, groups: Groups, progress: Progress) -> None:
        """Learn from closed groups, kept or dropped alike; each group comes exactly once, failed ones never."""

    def end_step(self, progress: Progress) -> None:
        """The step's batch is complete; called once, before the weights change."""

    def metrics(self) -> dict[str, float]:
        """Values to log, named ``adaptive/<role>/…`` by the caller; the names follow verl's reduction rule."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything beyond the table that later decisions depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""


def who(part: Role) -> str:
    """A part, for messages: its role, name and class."""
    return f"{part.role} {part.name} ({type(part).__module__}.{type(part).__qualname__})"


def ask(part: Role, method: str, *about: Any) -> Any:
    """What a part answers.

    Raises:
        AdaptiveError: it fails; says which part, and where.
    """
    try:
        return getattr(part, method)(*about)
    except (AdaptiveError, AssertionError):  # an assertion is a test's, and speaks for itself
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = getattr(sys.modules.get(type(part).__module__), "__file__", None)
        at = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        raise AdaptiveError(
            f"{who(part)}.{method} fails: {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        ) from error


@dataclass
class Pick:
    """What a pool sampler chose.

    Attributes:
        rows: int64 ``(k,)``, table rows, in the order to submit.
        n: int64 ``(k,)``, rollouts planned for each, or None to leave that to the allocator.
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
    """

    role: ClassVar[str] = "sampler"
    kind: ClassVar[str] = "stream"
    whole_batches: ClassVar[bool] = False
    plans_rollouts: ClassVar[bool] = False
    plans_steps: ClassVar[bool] = False

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
        return np.ones(len(rows), dtype=bool)

    def decided(self, rows: np.ndarray, passed: np.ndarray) -> None:
        """These prompts have had their turn in the stream, with these answers of :meth:`admit`: where a gate counts.

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

    @property
    def finished(self) -> bool:
        """True when the sampler will never give another prompt: training ends after the current step."""
        return False


#: What becomes of groups and rollouts, in the engine's words; a filter's reasons are others.
OUTCOMES = (
    "trained",
    "surplus",
    "failed",
    "lost",
    "zero_advantage",
    "aborted",
    "expired",
    "stale",
    "gone",
    "incomplete",
)

CLOSE = 0  #: the group is done
HOLD = -1  #: keep the group for a later step (pipelined allocators only)


class Allocator(Role):
    """Gives each prompt its rollouts.

    Attributes:
        can_hold: the allocator may answer ``HOLD``; the engine then offers held groups to :meth:`recall`.
        needs_place: a top-up is worth its rollouts only if the batch has a place for the group. Where groups commit in
            order, it goes out as soon as that is sure, and a group for which there is surely none is held or closed.
        needs_rounds: the option, ``key=value`` below ``adaptive.allocator``, that compares the groups of a round and so
            needs ``adaptive.rounds`` in the ``sync`` trainer; empty: none.
        least_key: the option below ``adaptive.allocator`` that :meth:`least` comes from.
        follows_plan: gives each prompt just the rollouts that a sampler planned for it.
        makes_commits: gives each prompt pilots, and those that :meth:`side` puts into its band a commit (a top-up).
    """

    role: ClassVar[str] = "allocator"
    can_hold: ClassVar[bool] = False
    needs_place: ClassVar[bool] = False
    needs_rounds: str = ""
    least_key: ClassVar[str] = "n"
    follows_plan: ClassVar[bool] = False
    makes_commits: ClassVar[bool] = False

    @classmethod
    def settled(cls, options: Mapping[str, Any], *, holds: bool) -> dict[str, Any]:
        """Options that are left to the run (as ``form=auto`` is), as they are in it; asked before the part is made.

        Args:
            options: the keys of ``adaptive.allocator``, ``name`` left out; not checked yet.
            holds: groups may be held for a later step: the ``sync`` trainer's may, unless the sampler plans whole steps.
        """
        return {}

    def cap(self, progress: Progress) -> int | None:
        """Rollouts this step may generate at most, or None; asked once, when the step begins."""
        return None

    @abstractmethod
    def first(self, rows: np.ndarray, planned: np.ndarray | None, progress: Progress) -> np.ndarray:
        """First rollouts of new prompts.

        Args:
            rows: int64 ``(k,)``.
            planned: int64 ``(k,)``, a pool sampler's own plan, or None.

        Returns:
            int64 ``(k,)``, each at least 1.
        """

    def least(self, n: int) -> int:
        """Fewest rollouts that a group may close with under ``actor_rollout_ref.rollout.n=n``; asked before :meth:`bind`."""
        return n

    def prompts(self, wanted: int, progress: Progress) -> int:
        """The last word on how many new prompts the next round takes; in asynchronous trainers, are asked for now.

        Args:
            wanted: what the sampler asks for, or what the window has room for.
            progress: the step; asked after :meth:`recall`.
        """
        return wanted

    def complete(self, groups: Groups) -> np.ndarray:
        """bool ``(G,)``: closed groups that may train; the others are dropped whatever the filter says."""
        return np.ones(len(groups), dtype=bool)

    def review(self, groups: Groups, progress: Progress) -> np.ndarray:
        """Decide on the open groups once all their rollouts are back.

        Args:
            groups: the open groups that got new rollouts this round, all their rollouts so far, in ticket order;
                failed groups are not among them.
            progress: the step; ``progress.room`` bounds the sum of the answer.

        Returns:
            int64 ``(G,)``: k > 0 more rollouts under the same weights, ``CLOSE``, or ``HOLD``.
        """
        return np.zeros(len(groups), dtype=np.int64)

    def ask(self, groups: Groups, progress: Progress) -> np.ndarray:
        """As :meth:`review`, where groups are reviewed one by one, when each is back.

        The answer must depend on a group's own rollouts and on the state at the step's start, and change nothing: groups
        come in any order, and some that come never commit. What groups share is the engine's to settle: see
        :meth:`fund`, :meth:`most`, :attr:`needs_place`. By default :meth:`review`.
        """
        return self.review(groups, progress)

    def most(self, n: np.ndarray, stage: np.ndarray) -> np.ndarray:
        """int64 ``(k,)``: the most further rollouts that groups of ``n`` rollouts after ``stage`` top-ups may ask for.

        The tighter the bound, the sooner other groups can be sure of their share of a pool or a cap. By default no bound,
        but 0 of an allocator with neither :meth:`review` nor :meth:`ask` of its own, which tops up nothing.
        """
        return np.full(len(n), 2**31 if self.tops_up else 0, dtype=np.int64)

    @property
    def tops_up(self) -> bool:
        """Whether groups may ask for more once their first rollouts are back: it has a :meth:`review` or :meth:`ask`."""
        return type(self).review is not Allocator.review or type(self).ask is not Allocator.ask

    def fund(self, n: np.ndarray, planned: np.ndarray | None) -> np.ndarray | None:
        """Rollouts that new prompts pay into the step's pool, from which all top-ups are taken in ticket order.

        Args:
            n: int64 ``(k,)``, first rollouts of new prompts.
            planned: int64 ``(k,)``, a pool sampler's own plan for them, or None.

        Returns:
            int64 ``(k,)``, or None: top-ups are not limited in common.
        """
        return None

    def reserve(self, progress: Progress) -> int:
        """Groups that should be held when a step of committing in order ends: it waits for them in its first request."""
        return 0

    def side(self, groups: Groups) -> np.ndarray:
        """int8 ``(G,)``: −1 too hard, 0 in the band, +1 too easy; of allocators that make commits."""
        raise TypeError(f"{type(self).__name__} makes no commits")

    def recall(self, held: Groups, since: np.ndarray, progress: Progress) -> np.ndarray:
        """Decide on groups held from earlier steps, before a round's new prompts are drawn.

        Args:
            held: the groups, in ticket order.
            since: int64 ``(G,)``, the step each was held in.

        Returns:
            int64 ``(G,)``: k > 0 rollouts now, ``CLOSE`` to give it up, ``HOLD`` to keep it.
        """
        return np.full(len(held), HOLD, dtype=np.int64)


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
    """

    role: ClassVar[str] = "filter"
    keeps_all: ClassVar[bool] = False
    reasons: ClassVar[tuple[str, ...]] = ()
    rollout_reason: ClassVar[str] = "rejected"

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
class Policy:
    """The four roles as one object; what the trainers and the simulator drive (through the engine)."""

    sampler: Sampler
    allocator: Allocator
    filter: Filter
    advantage: Advantage
    _ended: bool = field(default=False, init=False, repr=False)

    def __iter__(self) -> Iterator[Role]:
        return iter((self.sampler, self.allocator, self.filter, self.advantage))

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        """Join a run; see :meth:`Role.bind`."""
        for part in self:
            ask(part, "bind", table, facts)

    def observe(self, groups: Groups, progress: Progress) -> None:
        """Show closed groups to every role."""
        for part in self:
            ask(part, "observe", groups, progress)

    def end_step(self, progress: Progress) -> None:
        """Tell every role that the step is complete."""
        for part in self:
            ask(part, "end_step", progress)
        if not self._ended:  # else what no checkpoint can hold shows at the first one, hours later
            self.state_dict()
            self.metrics()
        self._ended = True

    def metrics(self) -> dict[str, float]:
        """All roles' metrics, ``adaptive/<role>/<name>``.

        Raises:
            AdaptiveError: a value is no number, which loggers would choke on or pass over.
        """
        out: dict[str, Any] = {}
        for part in self:
            for key, value in ask(part, "metrics").items():
                if not isinstance(value, Real | np.bool_):
                    kind = type(value).__name__
                    raise AdaptiveError(f"{who(part)}.metrics gives {key!r} as a {kind}: a metric is one number")
                out[f"adaptive/{part.role}/{key}"] = value
        return out

    def state_dict(self) -> dict[str, Any]:
        """Every role's state.

        Raises:
            AdaptiveError: a checkpoint cannot hold it.
        """
        out = {}
        for part in self:
            state = ask(part, "state_dict")
            try:
                split_state(state)
            except TypeError as error:
                raise AdaptiveError(
                    f"{who(part)}.state_dict: {error}; numbers, text, lists, dicts with text as keys, and numpy arrays can"
                ) from error
            out[part.role] = {"name": part.name, "state": state}
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part in self:
            saved = state.get(part.role, {})
            if saved.get("name") == part.name:  # another part's state means nothing here: start afresh
                ask(part, "load_state_dict", saved["state"])

    def digest(self) -> str:
        """Short hash of the parts and their options, to notice a resume under another policy."""
        text = json.dumps({p.role: [p.name, _plain(p.config)] for p in self}, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(config: Any) -> Any:
    """Options by name; those that came later (``metadata={"since": …}``) only where they are set, and a default that changed
    as it was (``metadata={"was": …}``), so that a snapshot of before is not another policy's."""
    later = {f.name: f.default for f in fields(config) if "since" in f.metadata}
    was = {f.name: f.metadata["was"] for f in fields(config) if "was" in f.metadata}
    defaults = {f.name: f.default for f in fields(config)}
    return {
        k: was[k] if k in was and v == defaults[k] else _plain(v) if hasattr(v, "__dict__") else v
        for k, v in vars(config).items()
        if k not in later or v != later[k]
    }
