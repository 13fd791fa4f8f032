"""Discounted Beta–Bernoulli reward estimation, DBB (2603.18444, definitions 1 and 2, algorithm 1).

Each prompt keeps a Beta(α, β) that forgets: at every visit, with S successes among N rollouts,

    α ← λ α + S,   β ← λ β + N − S,   starting from (α0, β0) = (1, 1),

and the visit's own rollouts count before they are judged:

    A = (s − p) / √(p (1 − p)),   p = α / (α + β)        (equations 12 and 13: variance αβ / (α + β)²)

s being the rollout's success. p lies strictly between 0 and 1, so a group of equal rewards is still informative, less
and less as the history agrees with it. ``norm_by_std=false`` gives the paper's Dr. GRPO form, s − p (section 5.4).

Certainty: all of it read in the paper's text. λ = 0.75 served its 8B model best, 0.5 its 1.7B one; it has one visit an
epoch and groups of one size, we take visits as they come. A group that the filter drops is learned from all the same. A warm
start's evidence counts as visits of n rollouts each would, one after the other, the prior fading with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_adaptive.advantages.beta import success_of
from verl_adaptive.config import RunFacts
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Positive, PositiveShare
from verl_adaptive.roles import Advantage
from verl_adaptive.stats.running_mean import fade, left_of
from verl_adaptive.stats.table import Column, StatsTable
from verl_adaptive.stats.visits import waves


class DiscountedBeta(Advantage):
    """A prompt's own discounted history as baseline and scale."""

    name: ClassVar[str] = "discounted_beta"
    estimator: ClassVar[str | None] = "adaptive_discounted_beta"
    takes_penalties: ClassVar[bool] = False  # only the success of a rollout enters

    @dataclass
    class Config:
        """Options of the advantage.

        Attributes:
            discount: λ (the paper: 0.75 for its 8B model, 0.5 for its 1.7B model).
            alpha0: successes of the prior.
            beta0: failures of the prior.
            norm_by_std: divide by the standard deviation.
        """

        discount: PositiveShare = 0.75
        alpha0: Positive = 1.0
        beta0: Positive = 1.0
        norm_by_std: bool = True

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        prior = {"alpha": Column("f8", self.config.alpha0), "beta": Column("f8", self.config.beta0)}
        table.declare(self.name, prior)
        self._begin()

    def _begin(self) -> None:
        """Take up what a warm start knows of prompts that have no history here."""
        c, table, rows = self.config, self.table, self.table.brought()
        alpha, beta = self.col("alpha"), self.col("beta")
        rows = rows[(alpha[rows] == c.alpha0) & (beta[rows] == c.beta0)]
        rollouts = table.col("rollouts")[rows].astype(np.float64)
        rate = np.clip(table.col("successes")[rows] / rollouts, 0.0, 1.0)
        mass, prior = left_of(rollouts, self.facts.n, c.discount)
        alpha[rows], beta[rows] = prior * c.alpha0 + mass * rate, prior * c.beta0 + mass * (1.0 - rate)

    def observe(self, groups: Groups, progress: Progress) -> None:
        for name, evidence in zip(("alpha", "beta"), self.evidence(groups), strict=True):
            for wave in waves(groups.row, groups.n > 0):
                fade(self.col(name), groups.row[wave], self.config.discount, evidence[wave])

    def compute(self, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
        # Thousands of visits of one outcome let the other's count underflow; nothing else reaches the floor.
        alpha, beta = (np.maximum(self.col(c)[observed.row], 1e-300) for c in ("alpha", "beta"))
        p = alpha / (alpha + beta)
        out = success_of(reward, group_of, observed) - p[group_of]
        if not self.config.norm_by_std:
            return out
        return out / (np.sqrt(alpha * beta) / (alpha + beta))[group_of]
