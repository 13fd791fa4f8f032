"""MoPPS, Model Predictive Prompt Selection: Thompson sampling of the success rate (2507.04632). An extra.

Each prompt's success rate has a Beta posterior with temporal discount, updated when the prompt is visited:
``α ← λα + (1 − λ)α₀ + s``, ``β ← λβ + (1 − λ)β₀ + (k − s)`` for s successes in k rollouts. A step draws candidates from
the pool, ``p̂ ~ Beta(α, β)`` for each, and takes those nearest to γ* = 0.5. Constants of the official code (also verl's
former ``recipe/mopps``): Beta(1, 1), γ* = 0.5; 16 candidates a prompt and λ = 1 on MATH, 8 and λ = 0.5 on Countdown.

Where we deviate: candidates are drawn afresh each round (the code takes the next stretch of a shuffled epoch); a prompt
is not picked twice in a step; and a share ``recheck`` of the picks goes to the prompts tried longest ago, because a
confident posterior far from γ* would otherwise keep a prompt out for good (0: as published). Groups that failed count as
tries there, or prompts that always fail would take that share.

A warm start's successes and failures count as visits of n rollouts each would, one after the other; α₀ and β₀ stay.

An option of ours: with ``source_prior`` = κ > 0 the prior of a prompt is Beta(κm, κ(1 − m)), m being the mean latest pass
rate of the prompts of its data source. Where sources differ in difficulty, a prompt that was never tried is then no
longer a guess. ``adaptive/sampler=mopps_by_source`` has it (benchmarks/RESULTS.md: ``full``, and ``full-no_prior``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from verl_adaptive.config import RunFacts, check
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Range, Share
from verl_adaptive.roles import Pick
from verl_adaptive.samplers.beta_posterior import draw_beta
from verl_adaptive.samplers.cero_math import best
from verl_adaptive.samplers.rounds import RoundConfig, SizedSampler
from verl_adaptive.stats.running_mean import left_of
from verl_adaptive.stats.table import Column, StatsTable
from verl_adaptive.stats.visits import waves

#: Near 0 both Gamma variates of a Beta variate would underflow, and it would be no number.
Prior = Annotated[float, Range("[0.01, inf)")]


class Mopps(SizedSampler):
    """Picks the prompts whose sampled success rate is nearest to the target."""

    name: ClassVar[str] = "mopps"
    unvisited: ClassVar[str] = "know a prompt by its data source only"
    kind: ClassVar[str] = "pool"
    columns: ClassVar[Mapping[str, Column]] = {"wins": Column("f8", 0.0), "losses": Column("f8", 0.0)}  # α − α₀, β − β₀

    @dataclass
    class Config:
        """Options; the defaults are as published where anything is.

        Attributes:
            target: γ*, the pass rate looked for.
            candidates: prompts drawn for each that is picked.
            decay: λ; 1 forgets nothing.
            a0: α₀ of the prior; with ``source_prior``: right answers that every source starts from.
            b0: β₀ of the prior; with ``source_prior``: wrong answers that every source starts from.
            source_prior: κ, rollouts that the mean pass rate of a prompt's data source counts for; 0: α₀ and β₀ alone.
            recheck: share of the picks that goes to the prompts tried longest ago.
        """

        target: Share = 0.5
        candidates: Annotated[float, Range("[1, inf)")] = 16.0
        decay: Share = 1.0
        a0: Prior = 1.0
        b0: Prior = 1.0
        source_prior: float = 0.0
        recheck: Share = 0.05
        round: RoundConfig = field(default_factory=RoundConfig)

        def validate(self, path: str) -> None:
            strength = self.source_prior  # below 1 the mean of a source may be anything
            ok = strength == 0 or 1 <= strength < np.inf
            check(ok, f"{path}.source_prior", strength, "must be 0, or 1 or greater, and finite")

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._step, self._taken = -1, np.zeros(0, dtype=np.int64)  # picked in the step under way

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        rows = table.brought()
        rows = rows[(self.col("wins")[rows] == 0) & (self.col("losses")[rows] == 0)]
        rollouts = table.col("rollouts")[rows].astype(np.float64)
        rate = np.clip(table.col("successes")[rows] / rollouts, 0.0, 1.0)
        mass = left_of(rollouts, facts.n, self.config.decay)
        self.col("wins")[rows], self.col("losses")[rows] = mass * rate, mass * (1.0 - rate)

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        if progress.step != self._step:
            self._step, self._taken = progress.step, self._taken[:0]
        c, draw = self.config, progress.draw
        free = pool[~np.isin(pool, self._taken)] if len(self._taken) else pool
        hi, lo = self.table.key_hi[free], self.table.key_lo[free]
        shuffle = draw.bits("mopps.candidates", hi, lo, progress.chunk)

        chance = draw.uniform("mopps.recheck", np.zeros(1), np.zeros(1), progress.chunk)[0]
        unseen = -self.table.col("last_try")[free].astype(np.float64)
        overdue = best(unseen, shuffle, int(c.recheck * count + chance), -np.inf)
        few = int(min(len(free), c.candidates * count))
        near = np.argpartition(shuffle, few - 1)[:few] if few < len(free) else np.arange(len(free))
        near = near[~np.isin(near, overdue)]
        rows = free[near]
        rate = draw_beta(*self._posterior(rows), draw, "mopps.rate", hi[near], lo[near])
        order = np.lexsort((shuffle[near], np.abs(rate - c.target)))
        # The last of a pick are what a full batch aborts: that must not be the floor.
        picked = free[np.concatenate([overdue, near[order][: max(0, count - len(overdue))]])]
        self._taken = np.concatenate([self._taken, picked])
        return Pick(picked)

    def _posterior(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """α and β of each row, float64 ``(k,)``."""
        c, table = self.config, self.table
        a0, b0 = c.a0, c.b0
        if c.source_prior:
            latest, source, size = table.col("last_rate"), table.col("source"), len(table.sources)
            seen = np.isfinite(latest)
            visited = np.bincount(source[seen], minlength=size)
            passed = np.bincount(source[seen], latest[seen], minlength=size)
            mean = ((c.a0 + passed) / (c.a0 + c.b0 + visited))[source[rows]]
            a0, b0 = c.source_prior * mean, c.source_prior * (1 - mean)
        return a0 + self.col("wins")[rows], b0 + self.col("losses")[rows]

    def estimate(self, rows: np.ndarray) -> np.ndarray:
        a, b = self._posterior(rows)
        return a / (a + b)

    def observe(self, groups: Groups, progress: Progress) -> None:
        for name, evidence in zip(("wins", "losses"), self.evidence(groups), strict=True):
            column = self.col(name)
            for wave in waves(groups.row, groups.n > 0):
                rows = groups.row[wave]
                column[rows] = self.config.decay * column[rows] + evidence[wave]
