"""Pilot-Commit: a few pilots of every prompt, the rest of the group only where they fall in a band (2605.26606).

Every new prompt gets n_p *pilot* rollouts. With c successes among them the prompt is informative when

    ⌈lower · n_p⌉  ≤  c  ≤  ⌊(1 − upper) · n_p⌋

and only then gets its *commit*: n_c = n − n_p further rollouts, pilots and commit training as one group of n. Below the
band a prompt is deferred (it comes round again), above it it is skipped; retiring the fully solved is the sampler's
part (:mod:`verl_adaptive.samplers.retire`). Defaults 0.125, 0.25 and n_p = n/4 (16 of 64, 32 of 128) are those of the
authors' scripts, read in their code; the paper's method section was not at hand, so paper-side statements rest on its
abstract and the authors' README. The asymmetric margins keep near-frontier hard prompts.

``form=on_policy``, the default, commits within the step, under the weights that made the pilots, in every trainer and beside
every sampler; a step then waits for a commit after its pilots.
``form=pipelined`` is the published form, of the ``sync`` trainer only: pilots of new prompts and commits of buffered ones share
one generation, so a prompt's commit comes a generation after its pilots, up to ``max_age`` steps later. A step costs
G · n_p + B · n_c rollouts (G prompts piloted): 12,288 for B = 128, n = 16 + 48, G = 3 B, where GRPO takes 8,192. Pilots older
than the step are off-policy, and verl's ``algorithm.rollout_correction`` corrects for that when asked.

Where we differ from the official code, and why:

* the band is decided by counts, not by comparing a float mean: 2..12 for n_p = 16, 4..24 for 32, 1..6 for 8;
* no commit has a negative or zero size: where the official code cuts the number of commits for divisibility by the
  number of GPUs, down to zero, verl pads;
* ``max_age`` is the age of the oldest pilot that trains; the official flush runs after the step's sampling and lets
  pilots of max_off_steps + 1 through;
* the buffer outlives epochs and checkpoints; the official one is emptied at each epoch's end and never saved;
* commits stop when the batch is full (``on_policy``), and as many prompts are piloted as the share of recent pilots in the
  band calls for, not 3 B whatever it is; under a cap on the step's rollouts, pilots leave room for their commits;
* signals of many values (a judge's score, a length penalty) have no 0.5 that means success, and hardly any pilots would
  lie in the band: ``judge``. The official code compares the mean reward itself, for rewards of 0 and 1;
* random choice is keyed by prompt and step; the official code uses the unseeded global generator.

Known bias: pilots enter the group *because* their mean lies in the band, so they regress towards the prompt's true rate
against the commit, and the group baseline moves with them. It grows with n_p / n; the metrics ``pilot_rate`` and
``commit_rate`` show it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, SuccessConfig, check
from verl_adaptive.groups import Groups, at_least, at_most
from verl_adaptive.progress import LEAST_YIELD, OVER_ASK, Progress
from verl_adaptive.ranges import Count, Positive, Range
from verl_adaptive.roles import CLOSE, HOLD, PolicyParts
from verl_adaptive.roles.pooled import PooledAllocator
from verl_adaptive.stats.table import StatsTable

logger = logging.getLogger(__name__)

PUBLISHED = 3.0  # G / B, of a run's first step
_FIRST_SHARE = 1 / 3  # in-band share that is assumed before any pilot was judged: what G = 3 B is sized for
_GRADES = 8  # a signal of more different values than this is graded: correctness, with a format bonus or two, has fewer
_ENDS = (0.05, 0.95)  # quantiles of the pilots' signals that become 0 and 1: an outlier does not squeeze the rest
_MEMORY = 0.8  # weight of the past in the recent in-band share, per step: about the last five steps
_COUNTED = ("piloted", "in_band", "too_easy", "too_hard", "committed")


def band_side(successes: np.ndarray, n: np.ndarray, lower: float, upper: float) -> np.ndarray:
    """Where pilots lie: −1 too hard, 0 in the band, +1 too easy.

    A bound that is a whole number does not move by rounding (0.07 · 100 is 7.000000000000001). Expected successes (a
    fraction, with ``adaptive.success.mode=value``) are compared with the same bounds.
    """
    hard, easy = ~at_least(successes, lower * n), ~at_most(successes, (1.0 - upper) * n)
    return easy.astype(np.int8) - hard.astype(np.int8)


def is_pilot(groups: Groups) -> np.ndarray:
    """bool ``(G,)``: the group has its pilots and no commit."""
    return groups.reduce(np.maximum, groups.stage) == 0


class PilotCommit(PooledAllocator):
    """Pilots first; the rest of the group for prompts whose pilots are neither too easy nor too hard."""

    name: ClassVar[str] = "pilot_commit"
    needs_place: ClassVar[bool] = True
    on_policy: ClassVar[tuple[str, str]] = ("form", "on_policy")

    @dataclass
    class Config:
        """Options; the defaults are those of the authors' scripts.

        Attributes:
            n_pilot: n_p, pilots of a prompt; null: a quarter of n (``actor_rollout_ref.rollout.n``), at least 2. The
                commit is the rest: n_c = n − n_p.
            lower: lower margin of the band, as a share of the pilots.
            upper: upper margin of the band, as a share of the pilots.
            form: ``on_policy``: commit within the step; ``pipelined``: at a later step's generation, as published (``sync``
                trainer only).
            choose: with ``pipelined``, which held groups commit when there are more than the batch needs: ``random``
                (published for 4B and larger) or ``max_variance`` (published for 1.5B: nearest to half solved, the newest first).
            max_age: steps that in-band pilots may wait for their commit; older ones are given up.
            factor: prompts piloted at first, as a multiple of B (published: G = 3 B); null: 3 B until one is in the band,
                then as many as the recent in-band share calls for and a tenth more.
            judge: what pilots are judged by. ``success``: what ``adaptive.success`` counts. ``auto``: that too, but where
                it is left at its default and the signal takes more than 8 different values, from the second step on the
                signal itself, scaled to the range that the pilots of recent steps covered.
        """

        n_pilot: Annotated[int, Range("[2, inf)")] | None = None
        lower: Annotated[float, Range("[0, 1)")] = 0.125
        upper: Annotated[float, Range("[0, 1)")] = 0.25
        form: Literal["on_policy", "pipelined"] = "on_policy"
        choose: Literal["random", "max_variance"] = "random"
        max_age: Count = 4
        factor: Positive | None = None
        judge: Literal["auto", "success"] = "auto"

        def validate(self, path: str) -> None:
            hint = f"leaves no band beside {path}.upper={self.upper}; use at most {1 - self.upper:g}"
            check(self.lower + self.upper <= 1, f"{path}.lower", self.lower, hint)
            hint = (
                f"chooses among held groups, which only {path}.form=pipelined has; on-policy, the first in order commit"
            )
            check(self.form == "pipelined" or self.choose == "random", f"{path}.choose", self.choose, hint)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.can_hold = self.config.form == "pipelined"
        self._recent = np.zeros(2)  # pilots judged and found in the band, past steps discounted
        self._recalled = (0, 0, 0)  # step: commits of held groups in it, groups still held
        self._counts: Counter[str] = Counter()
        self._default_success = True
        self._range: tuple[float, float] | None = None  # of a graded signal: what counts as 0 and as 1
        self._signals: list[np.ndarray] = []  # of this step's pilots
        self._rates = np.zeros(4)  # of committed groups: pilot successes, pilots, commit successes, commits
        self._logged: dict[str, float] = {}

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        self._default_success = config.success == SuccessConfig()
        prompts = getattr(policy.sampler.option("round"), "prompts", None)
        hint = "adaptive/allocator=pilot_commit decides how many prompts a step pilots; set adaptive.allocator.factor instead"
        check(prompts is None, "adaptive.sampler.round.prompts", prompts, hint)

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        c, path = self.config, "adaptive.allocator"
        self.n_pilot = self.pilots(facts.n)
        hint = f"{self.n_pilot} pilots leave no commit; take fewer, or more than actor_rollout_ref.rollout.n={facts.n}"
        check(self.n_pilot < facts.n, f"{path}.n_pilot", c.n_pilot, hint)
        n = np.int64(self.n_pilot)
        inside = band_side(np.arange(n + 1), n, c.lower, c.upper) == 0
        hint = (
            f"no number of successes among {n} pilots lies in the band [{c.lower}, {1 - c.upper}]; take more pilots, or "
            f"smaller {path}.lower and {path}.upper"
        )
        check(bool(inside.any()), f"{path}.n_pilot", c.n_pilot, hint)

    # -- decision -------------------------------------------------------------------------------------------

    def pilots(self, n: int) -> int:
        return self.config.n_pilot or max(2, n // 4)

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
        inside = is_pilot(groups) & (self.side(groups) == 0)
        return np.where(inside, self._commit(groups.n), CLOSE)  # if pipelined, what has no place is held

    def _commit(self, n: np.ndarray) -> np.ndarray:
        """int64 ``(k,)``: the rest of groups of ``n``; none where a resume has lowered the group size."""
        return np.maximum(self.facts.n - n, 0)

    def most(self, n: np.ndarray, stage: np.ndarray) -> np.ndarray:
        return np.where(stage == 0, self._commit(n), 0)

    def reserve(self, progress: Progress) -> int:
        return progress.batch if self.can_hold else 0

    def recall(self, held: Groups, since: np.ndarray, progress: Progress) -> np.ndarray:
        age = progress.step - since
        answer = np.where((age > self.config.max_age) | (self._commit(held.n) == 0), CLOSE, HOLD)
        self._counts.update(expired=int((answer == CLOSE).sum()))
        places = max(0, min(progress.need, progress.room // (self.facts.n - self.n_pilot)))
        chosen = self._chosen(held, np.flatnonzero(answer == HOLD), age, progress)[:places]
        answer[chosen] = self._commit(held.n[chosen])
        self._recalled = (progress.step, len(chosen), int((answer == HOLD).sum()))
        return answer

    def _chosen(self, groups: Groups, candidates: np.ndarray, age: np.ndarray, progress: Progress) -> np.ndarray:
        """The candidates in the order in which they get a commit."""
        if self.config.choose == "random":
            row = groups.row[candidates]
            submission = groups.submission[candidates]
            u = progress.draw.bits("pilot_commit.choose.0", self.table.key_hi[row], self.table.key_lo[row], submission)
            return candidates[np.lexsort((submission, u))]
        # n·Σx² − (Σx)² is n² times the variance, and exact for 0/1, so that ties are ties.
        success = self._success(groups)
        n, total, squares = groups.n, groups.sum(success), groups.sum(success**2)
        variance = (n * squares - total**2) / np.maximum(n, 1) ** 2
        return candidates[np.lexsort((groups.submission[candidates], age[candidates], -variance[candidates]))]

    def complete(self, groups: Groups) -> np.ndarray:
        return ~is_pilot(groups)

    def prompts(self, wanted: int, progress: Progress) -> int:
        committed, waiting = self._recalled[1:] if self._recalled[0] == progress.step else (0, 0)
        missing = max(0, progress.need - progress.open - committed)
        judged, found = self._recent
        sized = self.config.factor is None and found > 0
        if self.can_hold:  # the pilots are for the steps to come
            missing = progress.batch if self.config.factor else missing + max(0, progress.batch - waiting)
        if missing == 0 or wanted == 0:
            return 0
        if sized:
            return math.ceil(OVER_ASK * missing * judged / max(found, LEAST_YIELD * judged))
        return max(1, round((self.config.factor or PUBLISHED) * progress.batch))

    def affordable(self, wanted: int, progress: Progress) -> int:
        if self.can_hold or progress.cap is None:
            return wanted
        judged, found = self._recent
        n_commit = self.facts.n - self.n_pilot
        share = found / judged if found > 0 else _FIRST_SHARE
        every_place = (progress.room - progress.need * n_commit) // self.n_pilot  # all missing groups commit
        # as many commit as these pilots, and those under way, will find
        expected = int((progress.room - progress.open * share * n_commit) / (self.n_pilot + share * n_commit))
        return min(wanted, max(0, every_place, expected))

    # -- learning -------------------------------------------------------------------------------------------

    def observe(self, groups: Groups, progress: Progress) -> None:
        if self.config.judge == "auto" and self._default_success:
            self._signals.append(groups.signal[groups.stage == 0])
        # A review changes nothing: pilots and commits are counted when their group closes.
        done, first = ~is_pilot(groups), groups.stage == 0
        pilots, commit = groups.rollout_mask(done) & first, ~first
        right = groups.sum(self._success(groups) * first)
        side = band_side(right, groups.sum(first), self.config.lower, self.config.upper)
        judged, found = len(side), int((side == 0).sum())
        self._recent += [judged, found]
        easy, hard, committed = (int(which.sum()) for which in (side > 0, side < 0, done))
        self._counts.update(piloted=judged, in_band=found, too_easy=easy, too_hard=hard, committed=committed)
        self._rates += [groups.success[pilots].sum(), pilots.sum(), groups.success[commit].sum(), commit.sum()]

    def _grade(self) -> None:
        """Learn the range of a graded signal from the step's pilots."""
        signals, self._signals = np.concatenate([*self._signals, np.zeros(0)]), []
        if not len(signals) or (self._range is None and len(np.unique(signals)) <= _GRADES):
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
        self._logged = {
            **{f"{key}_total": float(self._counts[key]) for key in _COUNTED},
            "judged_by_signal": float(self._range is not None),
            "in_band_share": found / max(judged, 1e-12),  # recent
        }
        pilots, commits = self._rates.reshape(2, 2)
        if pilots[1]:  # of a step without a commit there is no rate
            self._logged |= {"pilot_rate": pilots[0] / pilots[1], "commit_rate": commits[0] / commits[1]}
        if self.can_hold:
            self._logged["expired_total"] = float(self._counts["expired"])
        self._recent *= _MEMORY
        self._counts.clear()
        self._rates[:] = 0.0

    # -- state ----------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        return dict(self._logged)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self._recent.tolist(), "range": None if self._range is None else list(self._range)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent[:] = state["recent"]
        ends = state.get("range")
        self._range = None if ends is None else (float(ends[0]), float(ends[1]))
