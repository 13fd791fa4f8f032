"""Where open groups lie: joined with what comes back, reviewed, topped up or held, closed, and accounted for.

The tracker knows no order and no mode: an engine says which groups to look at, and what becomes of the closed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine.steps import Closed, Requests, StepResult
from verl_adaptive.errors import Exhausted
from verl_adaptive.groups import Groups
from verl_adaptive.ledger import Ledger
from verl_adaptive.policy import Policy
from verl_adaptive.progress import Progress
from verl_adaptive.roles import CLOSE, HOLD, answers
from verl_adaptive.roles.pooled import PooledAllocator
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.text import counted

#: Share of a batch that failed groups may take where every group trains: another generation for them costs more.
FEW_LOST = 0.1


class GroupTracker:
    """Open groups and the accounts of a run; arguments as of :class:`verl_adaptive.engine.Engine`.

    Attributes:
        open: groups that wait for a top-up, or for a decision about one; in submission order.
        held: groups kept for a later step's top-up; in submission order.
        held_since: int64 ``(H,)``, the step each was held in.
        gone: groups open when the run was interrupted, of prompts that have left the data set since, or held where an allocator,
            or a trainer, has come that recalls none.
        behind: groups that another trainer mode had ready when the run was interrupted: reviewed, and learned from.
        closed: what was closed in this step.
        ledger, total: the account of the step and of the run.
        why: why the step's sampling ended early, or an empty string.
    """

    def __init__(
        self, policy: Policy, table: StatsTable, config: AdaptiveConfig, facts: RunFacts, *, skip_zero: bool
    ) -> None:
        self.policy, self.table, self.config, self.facts, self.skip_zero = policy, table, config, facts, skip_zero
        self.open = self.held = self.gone = self.behind = Groups.empty()
        self.held_since = np.zeros(0, dtype=np.int64)
        self.closed: list[Closed] = []
        self.ledger, self.total = Ledger(), Ledger()
        self._cut = np.zeros(0, dtype=np.int64)  # submissions whose top-up has just come back with rollouts missing
        self.why = ""
        self.progress: Progress

    def open_step(self, progress: Progress) -> None:
        """A fresh account; what a resume could not go on with (:attr:`gone`, :attr:`behind`) is closed in it."""
        self.progress, self.ledger, self.why = progress, Ledger(), ""
        gone, self.gone = self.gone, Groups.empty()
        behind, self.behind = self.behind, Groups.empty()
        self.closed = [Closed.of(groups, "gone") for groups in (gone, behind) if len(groups)]
        if len(gone):
            self.learn(gone)
            self.policy.observe(gone, progress)

    # -- open groups ----------------------------------------------------------------------------------------

    def join(self, results: Groups) -> Groups:
        """Count what came back and join it with the open groups it belongs to; in submission order.

        A rollout without a reward that can be used was generated like any other. It is in no group from here on, so that it
        is counted as lost at once, and not when its group is closed.
        """
        results = results.sorted()
        spoilt, spoilt_tokens = int(results.spoilt.sum()), int(results.spoilt_tokens.sum())
        self.ledger.rollouts.generated += results.rollouts + spoilt
        self.ledger.tokens.generated += int(results.tokens.sum()) + spoilt_tokens
        self.ledger.rollouts.drop("lost", spoilt)
        self.ledger.tokens.drop("lost", spoilt_tokens)
        if not len(self.open):  # a simulation asks thousands of times, and most policies never have any
            self._cut = results.submission[:0]
            return results
        known = np.isin(results.submission, self.open.submission)
        self._cut = results.submission[known & (results.lost > 0)]
        waiting = np.isin(self.open.submission, results.submission)
        joined = self.open.select(waiting).merge(results.select(known))
        self.open = self.open.select(~waiting)
        return Groups.concat([joined, results.select(~known)]).sorted()

    def review(self, groups: Groups, asks: np.ndarray | bool = True) -> np.ndarray:
        """int64 ``(G,)``: what the allocator says of groups that are back; one whose top-up lost rollouts closes with what it has."""
        more, asks = np.full(len(groups), CLOSE, dtype=np.int64), asks & ~np.isin(groups.submission, self._cut)
        more[asks] = answers.more(self.policy.allocator, "review", groups.select(asks), self.progress)
        return more

    def reopen(self, groups: Groups) -> None:
        """These groups wait for a top-up, or for a decision about one."""
        if len(groups):
            self.open = Groups.concat([self.open, groups]).sorted()

    def hold(self, groups: Groups) -> None:
        """Keep these for a later step."""
        if len(groups):
            self.held = Groups.concat([self.held, groups])
            since = np.full(len(groups), self.progress.step, dtype=np.int64)
            self.held_since = np.concatenate([self.held_since, since])

    def recall(self) -> Requests:
        """Ask the allocator about held groups: top-ups of those that go on, which are open again; the others expire."""
        self.held.lag = np.maximum(self.held.lag, self.progress.step - self.held_since).astype(np.int32)
        more = answers.more(self.policy.allocator, "recall", self.held, self.held_since, self.progress)
        more = fit(more, self.progress.room, otherwise=HOLD)
        # The others would commit behind a full batch, and be given up although they are finished.
        more[(more > 0) & (np.cumsum(more > 0) > self.facts.batch)] = HOLD
        back, drop = self.held.select(more > 0), self.held.select(more == CLOSE)
        self.held, self.held_since = self.held.select(more == HOLD), self.held_since[more == HOLD]
        if len(drop):
            self.closed.append(Closed.of(drop, "expired"))
            self.learn(drop)
            self.policy.observe(drop, self.progress)
        self.reopen(back)
        return Requests.topups(back, more[more > 0])

    def count_held(self, *ready: Groups) -> None:
        """Count the rollouts that were generated and are not decided about when a step ends."""
        here = Groups.concat([*ready, self.open, self.held, self.gone, self.behind])
        self.ledger.rollouts.held, self.ledger.tokens.held = here.rollouts, int(here.tokens.sum())

    # -- closing --------------------------------------------------------------------------------------------

    def verdict(self, groups: Groups) -> Closed:
        """Keep or drop groups whose rollouts are complete; nothing is learned yet."""
        if not len(groups):
            return Closed.of(groups, "")
        verdict = answers.decide(self.policy.filter, groups, self.progress)
        reasons = np.array([*self.policy.filter.reasons, "trained"], dtype=object)
        outcome = reasons[np.where(verdict.keep, len(reasons) - 1, verdict.reason)]
        keep = verdict.keep & answers.complete(self.policy.allocator, groups)
        outcome[verdict.keep & ~keep] = "incomplete"
        trains = groups.rollout_mask(keep)
        if verdict.rollouts is not None:
            trains &= verdict.rollouts
        return Closed.of(groups, outcome, trains)

    def learn(self, groups: Groups) -> None:
        """Closed groups, failed ones too, into the statistics; each group once."""
        if len(groups):
            self.table.observe(groups, self.progress.step, tolerance=self.facts.tolerance)

    def never_trains(self, closed: Sequence[Closed]) -> Groups:
        """Groups closed in this step on which no batch of it can fall back: of :meth:`spare` ones it may still want as many as a
        batch."""
        every = Closed.concat(closed)
        needed = every.trained
        needed[self.spare(every)[: self.facts.batch]] = True
        return every.groups.select(~needed)

    def spare(self, closed: Closed) -> np.ndarray:
        """int64: positions of dropped groups that a batch could fall back on: those with variance first, the oldest first."""
        at = np.flatnonzero(closed.usable)
        return at[np.lexsort((closed.groups.submission[at], closed.groups.degenerate(self.facts.tolerance)[at]))]

    # -- a step's end ---------------------------------------------------------------------------------------

    def batch(self, closed: Closed) -> StepResult:
        """A step's batch: the first B kept groups in submission order.

        Args:
            closed: all groups of the step, in submission order.

        Raises:
            Exhausted: the batch is short and ``adaptive.on_exhausted=raise``, or nothing at all came back.
        """
        groups, outcome, trains = closed.groups, closed.outcome.copy(), closed.trains.copy()
        kept = int(closed.trained.sum())
        note, falls_back = self.on_exhausted(closed, kept)
        if falls_back:
            fill = self.spare(closed)[: self.facts.batch - kept]
            if not kept and not len(fill):
                raise Exhausted(note)
            outcome[fill] = "trained"
            trains |= groups.rollout_mask(np.isin(np.arange(len(groups)), fill))
            note = self.fallback_note(note, len(fill))
        zero_row = self.zero_rows(groups, outcome == "trained", trains)
        return StepResult(groups, outcome, trains & ~zero_row, zero_row, self.ledger, note, self.progress.rounds)

    def on_exhausted(self, closed: Closed, kept: int) -> tuple[str, bool]:
        """What ``adaptive.on_exhausted`` says of a step that gets no further groups: a note, and whether it falls back on groups
        that it dropped.

        Without refill the filter may leave a batch short: only data or a cap that end the sampling before there are B groups
        are a reason then.

        Args:
            closed: all groups of the step.
            kept: of these, those that the filter kept.

        Raises:
            Exhausted: the batch is short and ``adaptive.on_exhausted=raise``.
        """
        config = self.config
        short = self.wants(kept) if config.refill else bool(self.why) and len(closed) < self.facts.batch
        note = self.shortage_note(closed, kept) if short or not kept else ""
        if short and config.on_exhausted == "raise":
            raise Exhausted(note)
        return note, not kept or (short and config.on_exhausted == "relax")

    @staticmethod
    def fallback_note(note: str, groups: int) -> str:
        """The note of a step that trains on this many groups that it dropped."""
        if not groups:
            return note
        return f"{note.rstrip('.')}. The step trains on {groups} of the groups that it dropped"

    def wants(self, kept: int) -> bool:
        """Whether a batch of ``kept`` groups is short; where every group trains, a few that failed are no reason to wait."""
        return self.facts.batch - kept > (FEW_LOST * self.facts.batch if self.lenient else 0)

    @property
    def lenient(self) -> bool:
        """Whether only a failed group is lost to the batch, so that a few of them are no reason to wait."""
        part = self.policy.allocator
        completes = not isinstance(part, PooledAllocator) or type(part).complete is PooledAllocator.complete
        return self.policy.filter.keeps_all and completes

    def zero_rows(self, groups: Groups, trained: np.ndarray, trains: np.ndarray) -> np.ndarray:
        """bool ``(R,)``: rollouts that stay out of training because their advantage is exactly zero; none without ``skip_zero``."""
        zero_row = np.zeros_like(trains)
        if not self.skip_zero:
            return zero_row
        inside = groups.rollout_mask(trained)  # judged by what the advantage itself will see: the trained groups alone
        zero = answers.zero(self.policy.advantage, groups.select(trained), trains[inside])
        zero_row[inside] = zero & trains[inside]
        if trains.any() and not (trains & ~zero_row).any():
            # Every row has zero advantage: verl still needs one row to carry the (zero) gradient of the step.
            zero_row[np.flatnonzero(trains)[np.argmin(groups.tokens[trains])]] = False
        return zero_row

    def account(self, result: StepResult) -> None:
        """Write a step's result into the ledgers."""
        groups, ledger, tokens = result.groups, self.ledger, result.groups.tokens
        ledger.rollouts.trained, ledger.tokens.trained = int(result.trains.sum()), int(tokens[result.trains].sum())
        ledger.drop("zero_advantage", tokens[result.zero_row])
        in_batch = groups.rollout_mask(result.trained)
        ledger.drop(self.policy.filter.rollout_reason, tokens[in_batch & ~result.trains & ~result.zero_row])
        for reason in sorted(set(result.outcome.tolist()) - {"trained"}):
            ledger.drop(reason, tokens[groups.rollout_mask(result.outcome == reason)])
        self.total.add(ledger)

    def shortage_note(self, closed: Closed, kept: int) -> str:
        """Why a batch is short, for people; arguments as :meth:`on_exhausted`."""
        names, amounts = np.unique(closed.outcome.astype(str), return_counts=True)
        listed = ", ".join(f"{v} {k}" for k, v in zip(names, amounts, strict=True)) or "none finished"
        unasked = (
            "the sampler gave no further prompt" if self.config.refill else "adaptive.refill=false asks for no others"
        )
        limits = (
            f" adaptive.on_exhausted={self.config.on_exhausted}; adaptive.max_rounds, adaptive.max_rollouts_per_step and "
            "the filter set the limits"
        )
        return (
            f"step {self.progress.step}: {kept} of {self.progress.batch} groups after {counted(self.progress.rounds, 'round')} and "
            f"{counted(self.ledger.rollouts.generated, 'rollout')} ({listed}): {self.why or unasked}."
            + (limits if self.config.refill or self.why else "")
        )

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        waiting = {name: arrays_of(getattr(self, name)) for name in ("held", "gone", "behind")}
        return {**waiting, "held_since": self.held_since, "total": self.total.as_dict()}

    def load_state_dict(self, state: Mapping[str, Any], positions: np.ndarray) -> None:
        """Take up a saved state; ``positions`` are the held prompts' places in the data set now, -1 for none."""
        held, gone, self.behind = (groups_of(state[name]) for name in ("held", "gone", "behind"))
        since = np.asarray(state["held_since"], dtype=np.int64)
        held.index = positions
        part = self.policy.allocator
        recalls = isinstance(part, PooledAllocator) and type(part).recall is not PooledAllocator.recall
        here = (held.index >= 0) & recalls  # a prompt that has left the data set cannot be topped up
        self.gone = Groups.concat([gone, held.select(~here)])
        self.held, self.held_since = held.select(here), since[here]
        self.total = Ledger.from_dict(state["total"])


def arrays_of(data: Any) -> dict[str, np.ndarray]:
    """A structure of arrays as plain arrays by name."""
    return {name: np.asarray(value) for name, value in vars(data).items()}


def groups_of(arrays: Mapping[str, Any]) -> Groups:
    """The inverse of :func:`arrays_of`."""
    return Groups(**{name: np.asarray(value) for name, value in arrays.items()})


def fit(more: np.ndarray, room: int, otherwise: int = CLOSE) -> np.ndarray:
    """Cut top-ups that the step's cap has no room for, last ones first."""
    positive = np.maximum(more, 0)
    over = (np.cumsum(positive) > room) & (positive > 0)
    return np.where(over, otherwise, more) if over.any() else more
