"""AERO's selective rejection and retention (2602.14338, stage II, strategies 2 and 3).

With u = c/n, c correct rollouts of n:

* u = 0 or u = 1 (no variance): ``keep_degenerate`` rollouts, chosen at random, train on the Beta posterior's advantage
  (:mod:`verl_adaptive.advantages.beta`); 0 drops the group;
* 0 < u < tau, rescued prompts included: all c correct ones and m = min(n − c, max(1, round(k c))) incorrect ones,
  chosen at random;
* u >= tau: everything. ``thin_correct`` thins the correct ones in the same way, as an ablation.

**Why k = 1** (the paper's lemma 4.2 as cited; the derivation is ours, and exact). Let c correct and m = k c incorrect
rollouts remain, rewards 1 and 0. On them μ = c/(c+m) and σ = √(cm)/(c+m), hence the advantages A⁺ = √(m/c) and
A⁻ = −√(c/m). With g⁺ and g⁻ the mean of ∇log π over the correct and the incorrect ones, the group's mean gradient is

    (c A⁺ g⁺ + m A⁻ g⁻) / (c + m) = √(cm)/(c+m) · (g⁺ − g⁻) = √k/(1+k) · (g⁺ − g⁻),

largest at k = 1, where it is 1/2; and the mean |A| is 2√k/(1+k): 1 at k = 1, 0.943 at 2, 0.866 at 3, 0.661 at 7. This
needs a loss that averages over each group's retained rollouts. With a fixed 1/N, or one mean over all rollouts of the
batch, the factor is √(cm) over a constant and grows with m: then use ``adaptive.advantage.group_mean=true``, which
restores the per-group mean. (verl's unbiased standard deviation scales all of this by √((c+m−1)/(c+m)).)

Certainty. tau = 0.5, k = 1, the random choice: a summary of the paper and a third-party reimplementation. Keeping 4 of
a zero-variance group, and leaving u >= 0.5 alone: the reimplementation only. A continuous signal is beyond the
paper: a rollout is correct from success 1/2 on, and a group that has variance but rollouts of one kind only is kept
whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Range, Share, Whole
from verl_adaptive.roles import Filter, Verdict
from verl_adaptive.stats.visits import kind_of


class AeroRejection(Filter):
    """Balances groups of low success and keeps a few rollouts of zero-variance groups."""

    name: ClassVar[str] = "aero"
    needs_groups = True
    reasons = ("all_correct", "all_wrong")

    @dataclass
    class Config:
        """Options.

        Attributes:
            tau: groups of a success rate below this are balanced.
            k: incorrect rollouts kept per correct one.
            keep_degenerate: rollouts kept of a zero-variance group; 0: drop the group.
            thin_correct: ablation: thin the correct rollouts of groups at or above tau to k per incorrect one.
        """

        tau: Share = 0.5
        k: Annotated[float, Range("(0, inf]")] = 1.0
        keep_degenerate: Whole = 4
        thin_correct: bool = False

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.may_leave_one = self.config.keep_degenerate == 1

    def decide(self, groups: Groups, progress: Progress) -> Verdict:
        config = self.config
        hit = groups.correct
        correct = groups.sum(hit).astype(np.int64)
        wrong = groups.n - correct
        flat = groups.degenerate(self.facts.tolerance)
        mixed = ~flat & (correct > 0) & (wrong > 0)
        low = mixed & (groups.mean(hit) < config.tau)

        quota = np.stack([wrong, correct])  # rollouts to keep of each kind: incorrect, correct
        quota[0, low] = np.minimum(wrong, _share(config.k, correct))[low]
        if config.thin_correct:
            high = mixed & ~low
            quota[1, high] = np.minimum(correct, _share(config.k, wrong))[high]
        quota[:, flat] = config.keep_degenerate

        kind = hit & ~groups.rollout_mask(flat)  # a flat group is drawn from as a whole
        keep = ~flat if config.keep_degenerate == 0 else np.ones(len(groups), dtype=bool)
        rollouts = self._rank(groups, kind, progress) < quota[kind.astype(np.int64), groups.group_of]
        return Verdict(keep=keep, reason=np.where(kind_of(flat, groups.pass_rate) > 0, 0, 1), rollouts=rollouts)

    def _rank(self, groups: Groups, kind: np.ndarray, progress: Progress) -> np.ndarray:
        """int64 ``(R,)``: a random rank, from 0, of every rollout among those of its group and kind."""
        home = groups.group_of
        number = np.arange(groups.rollouts) - groups.offsets[:-1][home]
        rows = groups.row[home]
        u = progress.draw.uniform("aero.reject", self.table.key_hi[rows], self.table.key_lo[rows], number)
        segment = 2 * home + kind
        order = np.lexsort((u, segment))
        ordered = segment[order]
        rank = np.empty(groups.rollouts, dtype=np.int64)
        rank[order] = np.arange(groups.rollouts) - np.searchsorted(ordered, ordered)
        return rank


def _share(k: float, count: np.ndarray) -> np.ndarray:
    # A k that means all of them, 1e30 say, would leave the whole numbers of 64 bits, and one rollout.
    return np.maximum(1, np.rint(min(k, 2.0**31) * count)).astype(np.int64)
