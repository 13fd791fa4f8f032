"""Pilot-Commit: a few pilots of every prompt, the rest of the group only where they fall in a band (2605.26606).

Every new prompt gets n_p *pilot* rollouts. With c successes among them the prompt is informative when

    ⌈lower · n_p⌉  ≤  c  ≤  ⌊(1 − upper) · n_p⌋

and only then gets its *commit*: n_c = n − n_p further rollouts, pilots and commit training as one group of n. Below the
band a prompt is deferred (it comes round again), above it it is skipped; retiring the fully solved is the sampler's
part (:mod:`verl_adaptive.samplers.retire`). Defaults 0.125, 0.25 and n_p = n/4 (16 of 64, 32 of 128) are those of the
authors' scripts, read in their code; the paper's method section was not at hand, so paper-side statements rest on its
abstract and the authors' README. The asymmetric margins keep near-frontier hard prompts.

``form=pipelined`` is the published form: pilots of new prompts and commits of buffered ones share one generation, so a
prompt's commit comes a generation after its pilots, up to ``max_age`` steps later. A step costs R · G · n_p + B · n_c
rollouts (R rounds of G prompts): 12,288 for B = 128, n = 16 + 48, G = 3 B, where GRPO takes 8,192. Pilots older than
the step are off-policy, and verl's ``algorithm.rollout_correction`` corrects for that when asked.
``form=on_policy`` commits within the step, under the weights that made the pilots, at the cost of a second generation's
tail. ``form=auto``, the default, is the published form wherever a group can wait for a later step: in the ``sync`` trainer,
but not beside a sampler that plans whole steps (CERO), nor in the asynchronous trainers, where a commit follows its pilots
at once. Which of the two a run has is settled when it starts (:func:`verl_adaptive.policy.settle`).

Where we differ from the official code, and why:

* the band is decided by counts, not by comparing a float mean: 2..12 for n_p = 16, 4..24 for 32, 1..6 for 8;
* no commit has a negative or zero size: where the official code cuts the number of commits for divisibility by the
  number of GPUs, down to zero, verl pads;
* ``max_age`` is the age of the oldest pilot that trains; the official flush runs after the step's sampling and lets
  pilots of max_off_steps + 1 through;
* the buffer outlives epochs and checkpoints; the official one is emptied at each epoch's end and never saved;
* commits stop when the batch is full, and a round's pilots are not drawn for groups that commits already supply
  (``on_policy``); under a cap on the step's rollouts, pilots leave room for the commits they lead to;
* signals of many values (a judge's score, a length penalty) have no 0.5 that means success, and hardly any pilots would
  lie in the band: ``judge``. The official code compares the mean reward itself, for rewards of 0 and 1;
* random choice is keyed by prompt, step and round; the official code uses the unseeded global generator.

Known bias: pilots enter the group *because* their mean lies in the band, so they regress towards the prompt's true rate
against the commit, and the group baseline moves with them. It grows with n_p / n; the metrics ``pilot_rate`` and
``commit_rate`` show it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, SuccessConfig, check
from verl_adaptive.groups import Groups
from verl_adaptive.progress import OVER_ASK, Progress
from verl_adaptive.roles import CLOSE, HOLD, Allocator
from verl_adaptive.stats.table import StatsTable

if TYPE_CHECKING:
    from verl_adaptive.roles import Policy

__all__ = ["PilotCommit", "band_side"]

logger = logging.getLogger(__name__)

PUBLISHED = 3.0  # G / B
_EPS = 1e-9  # 0.07 · 100 is 7.000000000000001: a bound that is a whole number must not move by rounding
_FIRST_SHARE = 1 / 3  # in-band share that is assumed before any pilot was judged: what G = 3 B is sized for
_GRADES = 8  # a signal of more different values than this is graded: correctness, with a format bonus or two, has fewer
_ENDS = (
    0.05,
    0.95,
)  # quantiles of the pilots' signals that become 0 and 1, so that an outlier does not squeeze the rest
_MEMORY = 0.8  # weight of the past in the recent in-band share, per step: about the last five steps


def band_side(successes: np.ndarray, n: np.ndarray, lower: float, upper: float) -> np.ndarray:
    """Where pilots lie: −1 too hard, 0 in the band, +1 too easy.

    For whole successes, c ≥ lower·n − ε is c ≥ ⌈lower·n − ε⌉, and likewise above; expected successes (a fraction, with
    ``adaptive.success.mode=value``) are compared with the same bounds.
    """
    hard = successes < lower * n - _EPS
    easy = successes > (1.0 - upper) * n + _EPS
    return easy.astype(np.int8) - hard.astype(np.int8)


def is_pilot(groups: Groups) -> np.ndarray:
    """bool ``(G,)``: the group has its pilots and no commit."""
    return groups.reduce(np.maximum, groups.stage) == 0


class PilotCommit(Allocator):
    """Pilots first; the rest of the group for prompts whose pilots are neither too easy nor too hard."""

    name: ClassVar[str] = "pilot_commit"
    needs_place: ClassVar[bool] = True
    makes_commits: ClassVar[bool] = True

    @dataclass
    class Config:
        """Options; the defaults are those of the authors' scripts.

        Attributes:
            n_pilot: n_p, pilots of a prompt; null: a quarter of n (``actor_rollout_ref.rollout.n``), at least 2. The
                commit is the rest: n_c = n − n_p.
            lower, upper: margins of the band, as shares of the pilots.
            choose: with ``adaptive.rounds``, which in-band prompts commit when there are more than the batch needs (in
                order, the first of the shuffled stream do, and held groups by this): ``random`` (published for
                4B and larger), ``max_variance`` (published for 1.5B: nearest to half solved, the newest first), or
                ``first`` (submission order).
            form: ``pipelined``: commit at a later generation, as published; ``on_policy``: in the same step. ``auto``:
                ``pipelined`` in the ``sync`` trainer; ``on_policy`` in the asynchronous ones, which hold nothing back, beside
                a sampler that plans whole steps (``cero``), and with ``hold_surplus``.
            max_age: steps that in-band pilots may wait for their commit; older ones are given up.
            hold_surplus: with ``on_policy``: keep in-band pilots that the batch had no place for, up to ``max_age``
                steps, instead of giving them up.
            factor: prompts piloted in a round, as a multiple of B (published: G = 3 B); null: what the sampler asks for.
            sized_to_need: pilot no more prompts than the recent in-band share calls for. Null: false, but where groups commit
                in order and ``factor`` is the published one, as many as the share calls for and a tenth more, even if those
                are more than 3 B: pilots that are sent later because 3 B were too few end a step late.
            safety: over-ask of ``sized_to_need=true``, which makes another round unlikely.
            judge: what pilots are judged by. ``success``: what ``adaptive.success`` counts. ``auto``: that too, but where
                it is left at its default and the signal takes more than 8 different values, from the second step on the
                signal itself, scaled to the range that the pilots of recent steps covered.
        """

        n_pilot: int | None = None
        lower: float = 0.125
        upper: float = 0.25
        choose: Literal["random", "max_variance", "first"] = "random"
        form: Literal["auto", "on_policy", "pipelined"] = field(
            default="auto", metadata={"stands_for": ("on_policy", "pipelined")}
        )
        max_age: int = 4
        hold_surplus: bool = False
        factor: float | None = PUBLISHED
        sized_to_need: bool | None = field(default=None, metadata={"was": False})
        safety: float = 1.25
        judge: Literal["auto", "success"] = field(default="auto", metadata={"since": "0.2.0"})

        def validate(self, path: str) -> None:
            check(self.n_pilot is None or self.n_pilot >= 1, f"{path}.n_pilot", self.n_pilot, "must be 1 or greater")
            for key in ("lower", "upper"):
                value = getattr(self, key)
                check(0 <= value < 1, f"{path}.{key}", value, "must be in [0, 1)")
            check(
                self.lower + self.upper <= 1,
                f"{path}.lower",
                self.lower,
                f"leaves no band below 1 - {path}.upper={self.upper}",
            )
            check(0 <= self.max_age <= 65535, f"{path}.max_age", self.max_age, "must be 0 to 65535")
            factor, safety = self.factor, self.safety
            check(
                factor is None or 0 < factor < math.inf, f"{path}.factor", factor, "must be above 0 and finite, or null"
            )
            check(1 <= safety < math.inf, f"{path}.safety", safety, "must be 1 or greater, and finite")

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        c = self.config
        form = self.settled(vars(c), holds=True).get("form", c.form)  # of a part that is made by itself
        self.pipelined = form == "pipelined"
        self.can_hold = self.pipelined or c.hold_surplus  # type: ignore[misc]
        if c.choose == "max_variance" or c.hold_surplus:
            self.needs_rounds = "hold_surplus=true" if c.hold_surplus else "choose=max_variance"
        self._recent = np.zeros(2)  # pilots judged and found in the band, past steps discounted
        self._recalled = (0, 0, 0, 0)  # step, round: commits of held groups in it, groups still held
        self._counts: dict[str, int] = {}
        self._ages = np.zeros(c.max_age + 1, dtype=np.int64)
        self._default_success = True
        self._range: tuple[float, float] | None = None  # of a graded signal: what counts as 0 and as 1
        self._signals: list[np.ndarray] = []  # of this step's pilots
        self._rates = np.zeros(4)  # of committed groups: pilot successes, pilots, commit successes, commits
        self._logged: dict[str, float] = {}

    @classmethod
    def settled(cls, options: Mapping[str, Any], *, holds: bool) -> dict[str, Any]:
        if options.get("form", "auto") != "auto":
            return {}
        return {"form": "pipelined" if holds and not options.get("hold_surplus") else "on_policy"}

    def check_policy(self, policy: Policy, config: AdaptiveConfig) -> None:
        self._default_success = config.success == SuccessConfig()

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        c, path = self.config, "adaptive.allocator"
        self.n_pilot: int = c.n_pilot or max(2, facts.n // 4)
        check(
            self.n_pilot < facts.n,
            f"{path}.n_pilot",
            c.n_pilot,
            f"{self.n_pilot} pilots leave no commit: must be below actor_rollout_ref.rollout.n={facts.n}",
        )
        n = np.int64(self.n_pilot)
        check(
            bool((band_side(np.arange(n + 1), n, c.lower, c.upper) == 0).any()),
            f"{path}.n_pilot",
            c.n_pilot,
            f"no number of successes among {n} pilots lies in the band [{c.lower}, {1 - c.upper}]; take more pilots, or "
            f"smaller {path}.lower and {path}.upper",
        )

    # -- decision -------------------------------------------------------------------------------------------

    def first(self, rows: np.ndarray, planned: np.ndarray | None, progress: Progress) -> np.ndarray:
        return np.full(len(rows), self.n_pilot, dtype=np.int64)

    def side(self, groups: Groups) -> np.ndarray:
        """int8 ``(G,)``: −1 too hard, 0 in the band, +1 too easy, over all rollouts of the groups."""
        return band_side(groups.sum(self._success(groups)), groups.n, self.config.lower, self.config.upper)

    def _success(self, groups: Groups) -> np.ndarray:
        """float64 ``(R,)``: what each rollout counts for in the band; of a graded signal its place in the recent range.

        The range moves between steps only, so that a review does not depend on who came back before.
        """
        if self._range is None:
            return groups.success
        low, high = self._range
        return np.clip((groups.signal - low) / (high - low), 0.0, 1.0)

    def review(self, groups: Groups, progress: Progress) -> np.ndarray:
        answer = np.full(len(groups), CLOSE, dtype=np.int64)
        pilot, side = is_pilot(groups), self.side(groups)
        inside = pilot & (side == 0)
        self._judged(side[pilot])
        if self.pipelined:
            answer[inside] = HOLD
            return answer
        # Groups that got their commit in this round are complete, but the filter has not counted them yet.
        places = progress.need - int((~pilot).sum())
        if self.config.hold_surplus:
            answer[inside] = HOLD
        self._commit(answer, groups, np.flatnonzero(inside), places, progress)
        return answer

    def ask(self, groups: Groups, progress: Progress) -> np.ndarray:
        inside = is_pilot(groups) & (self.side(groups) == 0)
        return np.where(inside, self.facts.n - groups.n, CLOSE)

    def most(self, n: np.ndarray, stage: np.ndarray) -> np.ndarray:
        return np.where(stage == 0, np.maximum(self.facts.n - n, 0), 0)

    def reserve(self, progress: Progress) -> int:
        return progress.batch if self.pipelined else 0

    def _judged(self, side: np.ndarray) -> None:
        """Pilots that were looked at lie on these sides of the band."""
        judged, found = len(side), int((side == 0).sum())
        self._recent += [judged, found]
        self._count(piloted=judged, in_band=found, too_easy=int((side > 0).sum()), too_hard=int((side < 0).sum()))

    def recall(self, held: Groups, since: np.ndarray, progress: Progress) -> np.ndarray:
        age = progress.step - since
        answer = np.where(age > self.config.max_age, CLOSE, HOLD)
        self._count(expired=int((answer == CLOSE).sum()))
        places = progress.need - progress.open
        chosen = self._commit(answer, held, np.flatnonzero(answer == HOLD), places, progress, age)
        self._recalled = (progress.step, progress.round, len(chosen), int((answer == HOLD).sum()))
        return answer

    def _commit(
        self,
        answer: np.ndarray,
        groups: Groups,
        candidates: np.ndarray,
        places: int,
        progress: Progress,
        age: np.ndarray | None = None,
    ) -> np.ndarray:
        """Write the commits of the chosen candidates into ``answer``; as many as there are places and room for."""
        places = max(0, min(places, progress.room // (self.facts.n - self.n_pilot)))
        chosen = self._chosen(groups, candidates, age, progress)[:places]
        answer[chosen] = self.facts.n - groups.n[chosen]
        ages = np.zeros(len(chosen), dtype=np.int64) if age is None else age[chosen]
        self._ages += np.bincount(ages, minlength=len(self._ages))
        self._count(committed=len(chosen))
        return chosen

    def _chosen(self, groups: Groups, candidates: np.ndarray, age: np.ndarray | None, progress: Progress) -> np.ndarray:
        """The candidates in the order in which they get a commit."""
        if self.config.choose == "first":
            return candidates
        if self.config.choose == "random":
            row = groups.row[candidates]
            purpose = f"pilot_commit.choose.{progress.round}"  # a group passed over must not stay behind new ones
            ticket = groups.ticket[candidates]
            u = progress.draw.bits(purpose, self.table.key_hi[row], self.table.key_lo[row], ticket)
            return candidates[np.lexsort((ticket, u))]
        # n·Σx² − (Σx)² is n² times the variance, and exact for 0/1, so that ties are ties.
        success = self._success(groups)
        n, total, squares = groups.n, groups.sum(success), groups.sum(success**2)
        variance = (n * squares - total**2) / np.maximum(n, 1) ** 2
        waited = np.zeros(len(groups)) if age is None else age
        return candidates[np.lexsort((groups.ticket[candidates], waited[candidates], -variance[candidates]))]

    def complete(self, groups: Groups) -> np.ndarray:
        return ~is_pilot(groups)

    def prompts(self, wanted: int, progress: Progress) -> int:
        c = self.config
        if progress.streaming:  # the window says how many; a cap, how many of them can have their commits
            return wanted if progress.cap is None else min(wanted, self._affordable_beside(progress))
        now = (progress.step, progress.round)
        committed, waiting = self._recalled[2:] if self._recalled[:2] == now else (0, 0)
        missing = max(0, progress.need - progress.open - committed)
        # Without rounds a step goes on piloting as soon as that is needed, so this is a matter of time, and of no batch.
        by_yield = progress.ordered and c.sized_to_need is None and c.factor == PUBLISHED
        sized = by_yield or bool(c.sized_to_need)
        if self.pipelined:  # this round's pilots are for the steps to come
            missing = missing + max(0, progress.batch - waiting) if sized else progress.batch
        if missing == 0 or wanted == 0:
            return 0
        if c.factor is not None:
            wanted = max(1, round(c.factor * progress.batch))
        judged, found = self._recent
        if by_yield and found > 0:
            wanted = math.ceil(OVER_ASK * missing * judged / found)
        elif sized and found > 0:
            wanted = min(wanted, math.ceil(c.safety * missing * judged / found))
        if progress.cap is not None and not self.pipelined:
            wanted = min(wanted, self._affordable(progress.room, missing))
        return wanted

    def _affordable(self, room: int, missing: int) -> int:
        """Prompts that may be piloted so that a capped step still has room for the commits they lead to."""
        n_commit = self.facts.n - self.n_pilot
        judged, found = self._recent
        share = found / judged if found > 0 else _FIRST_SHARE
        every_place = (room - missing * n_commit) // self.n_pilot  # all missing groups commit
        expected = int(room / (self.n_pilot + share * n_commit))  # as many commit as these pilots will find
        return max(0, every_place, expected)

    def _affordable_beside(self, progress: Progress) -> int:
        """The same where groups under way, any of them pilots, have commits to come."""
        judged, found = self._recent
        commit = (self.facts.n - self.n_pilot) * (found / judged if found > 0 else _FIRST_SHARE)
        return max(0, int((progress.room - progress.open * commit) / (self.n_pilot + commit)))

    # -- learning -------------------------------------------------------------------------------------------

    def observe(self, groups: Groups, progress: Progress) -> None:
        if self.config.judge == "auto" and self._default_success:
            self._signals.append(groups.signal[groups.stage == 0])
        whole = groups.rollout_mask(~is_pilot(groups))
        pilots = whole & (groups.stage == 0)
        commit = whole & (groups.stage > 0)
        if progress.ordered:  # reviews of single groups change nothing: pilots are counted when their group closes
            first = groups.stage == 0
            successes, n = groups.sum(self._success(groups) * first), groups.sum(first)
            self._judged(band_side(successes, n, self.config.lower, self.config.upper))
            at_once = int((~is_pilot(groups) & (groups.lag == 0)).sum())  # the others were counted by recall
            self._count(committed=at_once)
            self._ages[0] += at_once
        self._rates += [groups.success[pilots].sum(), pilots.sum(), groups.success[commit].sum(), commit.sum()]

    def _grade(self) -> None:
        """Learn the range of a graded signal from the step's pilots."""
        signals, self._signals = np.concatenate([*self._signals, np.zeros(0)]), []
        if self._range is None and len(np.unique(signals)) <= _GRADES:
            return
        if not len(signals):
            return
        low, high = (float(end) for end in np.quantile(signals, _ENDS))
        if self._range is not None:
            low, high = (_MEMORY * old + (1 - _MEMORY) * new for old, new in zip(self._range, (low, high), strict=True))
        elif high > low:
            logger.warning(
                "pilot_commit: the signal takes more than %d different values, and adaptive.success is left at its default: "
                "from now on pilots are judged by the signal itself, scaled from [%.4g, %.4g] to [0, 1]. To choose: "
                "adaptive.success.mode=value with adaptive.success.low and high, another adaptive.success.threshold, or "
                "adaptive.allocator.judge=success",
                _GRADES,
                low,
                high,
            )
        self._range = (low, high) if high > low else self._range

    def end_step(self, progress: Progress) -> None:
        self._grade()
        judged, found = self._recent
        ages = np.arange(len(self._ages))
        self._logged = {
            **{f"{key}_total": float(value) for key, value in self._counts.items()},
            "judged_by_signal": float(self._range is not None),
            "in_band_share": found / max(judged, 1e-12),  # recent
            "pilot_rate": self._rates[0] / max(self._rates[1], 1.0),
            "commit_rate": self._rates[2] / max(self._rates[3], 1.0),
        }
        if self.can_hold:
            self._logged["age"] = float((ages * self._ages).sum() / max(self._ages.sum(), 1))
            self._logged |= {f"age_{a}_total": float(count) for a, count in enumerate(self._ages)}
        self._recent *= _MEMORY
        self._counts = {}
        self._ages[:] = 0
        self._rates[:] = 0.0

    def _count(self, **amounts: int) -> None:
        for key, amount in amounts.items():
            self._counts[key] = self._counts.get(key, 0) + amount

    # -- state ----------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        return dict(self._logged)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self._recent.tolist(), "range": None if self._range is None else list(self._range)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent[:] = state["recent"]
        ends = state.get("range")
        self._range = None if ends is None else (float(ends[0]), float(ends[1]))
