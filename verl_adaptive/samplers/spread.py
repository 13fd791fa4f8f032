"""Draws prompts in proportion to the standard deviation that is expected of their next reward.

    weight=reward   √(E[r²] − E[r]²) / unit + floor              of the training reward
    weight=success  √(v (1 − v)) + floor                         (SPO, 2509.13232: floor .05)
    weight=mixed    E[1 − pⁿ − (1 − p)ⁿ] + floor                 under Beta(w + κ s, m − w + κ (1 − s))

E[r] and E[r²] are what :class:`~verl_adaptive.stats.running_mean.Memory` expects of a prompt's rewards and of their squares; v is
what it expects of its successes (``adaptive.signal`` through ``adaptive.success``). With rewards 0/1 the first two are the
same. The first needs no threshold: its unit is 2 · Σ d² / Σ |d| over the run, d being what rewards were off what was
expected: the distance of two values, however rare one of them is (:mod:`verl_adaptive.stats.scale`). So r → a r + b changes no
weight, and the floor keeps its meaning. What a reward counts for is clipped as there, so a rogue one draws no prompt for ever.

The first two are the standard deviation of one rollout, for advantages that learn from every rollout; the third is the chance
that a group of n has variance, for advantages and filters that need it. Prompts are drawn without replacement within a step,
by an exponential race: log(u) / weight, u a counter-based uniform of the prompt's key, the greatest first. A prompt's
place in the race depends on nothing but its own key and evidence.

The floor gives every prompt a chance. Groups that failed to generate say nothing of difficulty but count as visits: a
prompt's weight beyond the floor is multiplied by (1 + visits) / (1 + visits + failures), so that one that always fails
is drawn as rarely as one that is solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_adaptive.config import RunFacts, check
from verl_adaptive.groups import ROUNDING, Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Floor, Positive, Share
from verl_adaptive.rng import Draw, unit
from verl_adaptive.roles import Pick, Sampler
from verl_adaptive.stats.running_mean import Memory
from verl_adaptive.stats.scale import RunningScale, others_mean
from verl_adaptive.stats.table import StatsTable

#: The greatest float64 below 2^64.
_MOST = 2.0**64 - 2.0**11


class Spread(Sampler):
    """Draws prompts in proportion to the spread expected of their rewards."""

    name: ClassVar[str] = "spread"
    unvisited: ClassVar[str] = "know a prompt by its data source only"
    kind: ClassVar[str] = "pool"

    @dataclass
    class Config:
        """Options.

        Attributes:
            weight: the standard deviation of one rollout's ``reward`` or ``success``, or the chance that a group of n is ``mixed``.
            floor: what every prompt's weight is at least.
            decay: ρ, what a visit leaves of a prompt's earlier evidence.
            strength: κ, rollouts that the prior counts for before the first visit; it fades with the evidence.
            prior: what an unknown prompt is expected to show: the mean of its data source (``source``) or of ``all``.
        """

        weight: Literal["reward", "success", "mixed"] = "reward"
        floor: Floor = 0.0125
        decay: Share = 0.9
        strength: Positive = 4.0
        prior: Literal["source", "all"] = "source"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._drawn_in, self._taken = -1, np.zeros(0, dtype=np.int64)  # picked in the step under way
        self._pool: np.ndarray | None = None  # the last pool, and its prompts' bits that stay the same
        self._keyed = np.zeros(0, dtype=np.uint64)
        self._spread = np.zeros(2)  # of the prompts visited in the step: Σ of their spreads, how many
        self._last = 0.0

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        c = self.config
        hint = f"a group of {facts.n} is never mixed; take adaptive.sampler.weight=reward"
        check(c.weight != "mixed" or facts.n >= 2, "adaptive.sampler.weight", c.weight, hint)
        kind = {"decay": c.decay, "strength": c.strength, "by_source": c.prior == "source"}
        self._scale = RunningScale()  # of the rewards less what was expected of them
        if c.weight != "reward":
            self.memory = Memory(table, f"{self.name}_success", **kind)
            self.memory.begin_with(table.col("successes"))
            return
        self.memory = Memory(table, self.name, **kind, centre=None)
        self._squares = Memory(table, f"{self.name}_square", **kind, centre=None)
        self._begin()

    def _begin(self) -> None:
        """Take up what a warm start knows of the rewards: of their squares, as far as the difficulty signal tells."""
        total, signal, square = (self.table.col(c) for c in ("reward_sum", "signal_sum", "signal_sqsum"))
        n = np.maximum(self.table.col("rollouts").astype(np.float64), 1.0)
        within = np.maximum(square - signal * signal / n, 0.0)
        rows = self.table.brought()
        rows = rows[np.isfinite(total[rows])]
        if len(rows):
            self._scale.observe(self.memory.rewards(rows, total[rows] / n[rows]), np.sqrt(within[rows] / n[rows]))
            self._scale.end_step()
        self.memory.begin_with(total)
        self._squares.begin_with(total * total / n + within)

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        if progress.step != self._drawn_in:
            self._drawn_in, self._taken = progress.step, self._taken[:0]
        rows = self._race(pool, count, progress)
        self._taken = np.concatenate([self._taken, rows])
        return Pick(rows)

    def _race(self, pool: np.ndarray, count: int, progress: Progress) -> np.ndarray:
        """The ``count`` prompts that are first at an exponential race at the speed of their weights.

        Of a large pool most cannot win: with u below ``limit`` a prompt arrives by −log(1 − limit) / (its weight), so
        once enough have arrived by −log(1 − limit) / (the greatest weight), those of greater u need not be looked at.
        """
        bits = self._bits(pool, progress)
        greatest = (0.5 if self.config.weight == "success" else 1.0) + self.config.floor
        limit = min(1.0, 8.0 * (count + len(self._taken)) / max(1, len(pool)))
        while True:
            near = np.flatnonzero(bits <= np.uint64(limit * _MOST))
            rows = pool[near]
            if len(self._taken):
                free = ~np.isin(rows, self._taken)
                near, rows = near[free], rows[free]
            arrival = -np.log1p(-unit(bits[near])) / self._weight(rows)
            if limit >= 1.0 or int((arrival <= -np.log1p(-limit) / greatest).sum()) >= count:
                return rows[np.argsort(arrival, kind="stable")[:count]]
            limit = min(1.0, 4.0 * limit)

    def _bits(self, pool: np.ndarray, progress: Progress) -> np.ndarray:
        """uint64 ``(M,)``, random bits of every prompt, this step's and round's."""
        if self._pool is not pool:
            keys = self.table.key_hi[pool], self.table.key_lo[pool]
            self._pool, self._keyed = pool, Draw(progress.draw.seed, 0).bits("spread.race", *keys)
        return progress.draw.again("spread.race", self._keyed, progress.chunk)

    def estimate(self, rows: np.ndarray) -> np.ndarray:
        return self.memory.value(rows)

    def _weight(self, rows: np.ndarray) -> np.ndarray:
        """float64 ``(k,)``, each at least the floor."""
        weight = self._expected(rows)
        visits, failures = (self.table.col(c)[rows].astype(np.float64) for c in ("visits", "failures"))
        return weight * (1 + visits) / (1 + visits + failures) + self.config.floor

    def _expected(self, rows: np.ndarray) -> np.ndarray:
        """float64 ``(k,)``, in [0, 1]: the weight without floor and failures."""
        value = self.memory.value(rows)
        if self.config.weight == "reward":
            return self._deviation(rows, value)
        value = np.clip(value, 0.0, 1.0)
        return np.sqrt(value * (1 - value)) if self.config.weight == "success" else self._mixed(rows, value)

    def _deviation(self, rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
        """Standard deviation of the next reward, in units, as far as 1; a half while nothing is known."""
        spread = np.sqrt(np.maximum(self._squares.value(rows) - mean * mean, 0.0))
        unit = self._scale.unit
        if not unit:
            return np.full(len(rows), 0.5)
        spread = np.where(spread <= ROUNDING * np.abs(mean), 0.0, spread / unit)
        return np.where(np.isnan(spread), 0.5, np.minimum(spread, 1.0))

    def _mixed(self, rows: np.ndarray, value: np.ndarray) -> np.ndarray:
        """E[1 − pⁿ − (1 − p)ⁿ] under the Beta distribution of mean v and of as much evidence as there is."""
        mass = self.memory.mass(rows)
        a, b = value * mass, (1 - value) * mass
        right, wrong = np.ones(len(rows)), np.ones(len(rows))
        for j in range(self.facts.n):
            right *= (a + j) / (mass + j)
            wrong *= (b + j) / (mass + j)
        return 1 - right - wrong

    def observe(self, groups: Groups, progress: Progress) -> None:
        # Not of those picked: how many these are depends on who is back first.
        self._spread += [float(self._expected(groups.row).sum()), len(groups)]
        if self.config.weight == "reward":
            self._observe_rewards(groups.select(groups.n > 0))
            return
        good, bad = self.evidence(groups)
        self.memory.observe(groups.row, good, good + bad, groups.pass_rate)

    def _observe_rewards(self, groups: Groups) -> None:
        """The rewards, none farther from what was expected than the running scale lets it count."""
        self.memory.note(groups.row)
        value = self.memory.col("before")[groups.row][groups.group_of]
        unknown = np.isnan(value)
        mine = self.memory.rewards(groups.row[groups.group_of], groups.reward)
        stands_in = others_mean(mine, np.concatenate([mine, self._scale.rewards], axis=1)) if unknown.any() else value
        self._scale.observe(mine, groups.reward - np.where(unknown, stands_in, value))
        reward = self._scale.counted(groups.reward, value)
        weight, n = self.evidence_weight(groups), groups.n.astype(np.float64)
        for memory, values in ((self.memory, reward), (self._squares, reward * reward)):
            total = groups.sum(values)
            memory.observe(groups.row, weight * total, weight * n, total / n)

    def end_step(self, progress: Progress) -> None:
        self._last = float(self._spread[0] / self._spread[1]) if self._spread[1] else 0.0
        self._spread[:] = 0.0
        self._scale.end_step()
        for memory in self._memories():
            memory.end_step()

    def _memories(self) -> list[Memory]:
        return [self.memory, self._squares] if self.config.weight == "reward" else [self.memory]

    def metrics(self) -> dict[str, float]:
        return {"expected_spread": self._last}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale.state_dict()} if self.config.weight == "reward" else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for memory in self._memories():
            memory.end_step()
        if "scale" in state:  # another weight has none
            self._scale.load_state_dict(state["scale"])
