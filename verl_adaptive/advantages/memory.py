"""A prompt's expected reward as the baseline: the store replaces the group (SPO, 2509.13232, and what we measured).

GRPO needs a group only to know what to expect of a prompt. A store that remembers every prompt knows that already, so a
group may be small, down to a single rollout, and no rollout of a prompt that is not settled is without a lesson:

    one rollout      A = r − v
    n rollouts       A_i = r_i − b_i,   b_i = (Σ_{j≠i} r_j + κ' v) / (n − 1 + κ')      (leave one out, shrunk to v)

v is :class:`~verl_adaptive.stats.memory.Memory`'s value of the prompt: its own rewards, fading, shrunk to its data source's.

*Before.* v must not know the rewards that it is subtracted from, or the baseline is biased. It is the value **at the
beginning of the step in which the group is reviewed**, in every trainer mode: of a prompt that comes twice in a step
both visits have that value, and the source's mean stands still within the step. In asynchronous trainers that may be
steps after the group was submitted and before it trains; the prompt has no other group in between, so the value has lost
nothing but the source's latest move.

*Scale.* Advantages are divided by the running root mean square of r − b (weight .1 for each step), not by a prompt's own
deviation √(v (1 − v)), which costs accuracy (docs/solo.md), and never by less than a tenth of the rewards' standard
deviation over the run, lest a solved data set become noise. ``scale=whiten`` is SPO's: less the batch's mean, divided by
its deviation. Either is one number for all prompts, so Dr. GRPO's ``algorithm.norm_adv_by_std_in_grpo=false``, which is
about a group's own deviation, has nothing to turn off here.

*Any reward.* v is in units of the training reward itself, so 0/1, ±1, shaped and continuous rewards are served by one
formula: r → a r + b (a > 0) changes no advantage. Until anything is known, in the first step of a run without warm
start, the mean of the batch's other rollouts stands for v. ``adaptive.signal`` may be something else than the reward;
it is what samplers and filters judge by and does not enter here. verl's own penalties (KL in the reward) are in r and
not in v: the baseline is then a little high, and not biased by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_adaptive.config import RunFacts, check
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.roles import Advantage
from verl_adaptive.stats.memory import Memory
from verl_adaptive.stats.table import Column, StatsTable

__all__ = ["MemoryBaseline"]

#: Weight of a step in the running mean square.
RATE = 0.1
#: Least scale, in standard deviations of the run's rewards.
FLOOR = 0.1


class MemoryBaseline(Advantage):
    """The reward less what the store expects of the prompt."""

    name: ClassVar[str] = "memory"
    estimator: ClassVar[str | None] = "adaptive_memory"
    needs_groups: bool = False
    columns: ClassVar[Mapping[str, Column]] = {"before": Column("f8", float("nan"))}

    @dataclass
    class Config:
        """Options.

        Attributes:
            decay: ρ, what a visit leaves of a prompt's earlier evidence.
            strength: κ, rollouts that the prior counts for.
            prior: what an unknown prompt is expected to give: the mean of its data source (``source``) or of ``all``.
            fade_prior: a visit leaves ρ of the prior's strength, too (SPO).
            shrink: κ', rollouts that the value counts for beside the other rollouts of a group.
            scale: divide by the running root mean square (``running``), ``whiten`` over the batch (SPO), or ``none``.
            skip_small: advantages of |r − b| below this, in units of the reward, are zero, and their rows leave training
                where rows of zero advantage may (with ``whiten`` they stay: its mean is every row's); 0: none are.
        """

        decay: float = 0.9
        strength: float = 4.0
        prior: Literal["source", "all"] = "source"
        fade_prior: bool = False
        shrink: float = 4.0
        scale: Literal["running", "whiten", "none"] = "running"
        skip_small: float = 0.0

        def validate(self, path: str) -> None:
            check(0 <= self.decay <= 1, f"{path}.decay", self.decay, "must be in [0, 1]")
            check(0 < self.strength < math.inf, f"{path}.strength", self.strength, "must be above 0 and finite")
            check(0 <= self.shrink < math.inf, f"{path}.shrink", self.shrink, "must be 0 or greater, and finite")
            check(0 <= self.skip_small < math.inf, f"{path}.skip_small", self.skip_small, "must be 0 or greater")

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._visited = np.zeros(0, dtype=np.int64)  # rows reviewed in the step under way
        self._step = np.zeros(5)  # of the step: Σ (r − b)², rollouts in it; rollouts, mean, Σ (r − mean)²
        self._square = math.nan  # running mean of (r − b)²
        self._rewards = np.zeros(3)  # of the run: rollouts, mean, Σ (r − mean)²
        self._last = {"explained_share": 0.0, "value_mean": 0.0}

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        c = self.config
        self.memory = Memory(
            table,
            self.name,
            decay=c.decay,
            strength=c.strength,
            by_source=c.prior == "source",
            fade_prior=c.fade_prior,
            centre=None,
        )
        self.memory.begin_with("reward_sum")

    def observe(self, groups: Groups, progress: Progress) -> None:
        groups = groups.select(groups.n > 0)
        if not len(groups):
            return
        rows, n, total = groups.row, groups.n.astype(np.float64), groups.sum(groups.reward)
        new = ~np.isin(rows, self._visited)
        self.col("before")[rows[new]] = self.memory.value(rows[new])
        self._visited = np.concatenate([self._visited, rows[new]])
        self._remember(groups)
        weight = self.facts.stale_discount ** groups.lag.astype(np.float64)
        self.memory.observe(rows, weight * total, weight * n, total / n)

    def _remember(self, groups: Groups) -> None:
        """Count rewards and surprises."""
        reward = groups.reward
        # Asynchronous trainers review a group now, another then: what stands for an unknown value is the step's so far.
        earlier = self._step[2], self._step[2] * self._step[3]
        off = self._off(reward, groups.group_of, groups, earlier)
        off = off[np.isfinite(off)]
        self._step[:2] += [float((off * off).sum()), len(off)]
        for spread in (self._step[2:], self._rewards):
            _spread(spread, reward)

    def end_step(self, progress: Progress) -> None:
        value = self.col("before")[self._visited]
        self._last["value_mean"] = float(np.nan_to_num(value).mean()) if len(value) else 0.0
        off, judged, count, _, spread = self._step.tolist()
        self._last["explained_share"] = 1.0 - (off / judged) / (spread / count) if judged and spread > 0 else 0.0
        self._square = self._blended()
        self._step[:] = 0.0
        self._visited = self._visited[:0]
        self.memory.settle()

    def _blended(self) -> float:
        """The running mean square with what the step under way has shown."""
        off, count = self._step[:2].tolist()
        if not count:
            return self._square
        return off / count if math.isnan(self._square) else (1 - RATE) * self._square + RATE * off / count

    @property
    def scale(self) -> float:
        """What advantages are divided by; 0 while every reward of the run was the same."""
        rollouts, _, square = self._rewards.tolist()
        least = FLOOR * math.sqrt(square / rollouts) if rollouts else 0.0
        now = self._blended()
        return max(math.sqrt(now), least) if math.isfinite(now) else least

    def _off(
        self, reward: np.ndarray, group_of: np.ndarray, groups: Groups, earlier: tuple[float, float] = (0.0, 0.0)
    ) -> np.ndarray:
        """r − b of each rollout; of one without a value the others' mean stands for it, ``earlier`` ones (number, sum)
        among them, and where there is no other it is nan.

        The others are all of the group, also those that are left out of training: leaving one out changes nobody's baseline.
        """
        whole = np.bincount(group_of, minlength=len(groups)) == groups.n
        value = self.col("before")[groups.row][group_of]
        unknown = np.isnan(value)
        if unknown.any():
            every = reward if whole.all() else groups.reward
            others = len(every) - 1 + earlier[0]
            mean = (every.sum() - reward + earlier[1]) / others if others else np.full(len(reward), np.nan)
            value[unknown] = mean[unknown]
        n = groups.n[group_of]
        # Of a whole group, the rewards at hand: they may have penalties that the group's own do not.
        total = np.bincount(group_of, reward, minlength=len(groups))
        if not whole.all():
            total = np.where(whole, total, groups.sum(groups.reward))
        rest = total[group_of] - reward
        shrink = self.config.shrink
        with np.errstate(invalid="ignore", divide="ignore"):
            return reward - np.where(n > 1, (rest + shrink * value) / (n - 1 + shrink), value)

    def compute(self, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
        off = np.nan_to_num(self._off(reward, group_of, observed))
        small = np.abs(off) < self.config.skip_small
        if self.config.scale == "whiten" and len(off):
            off, scale = off - off.mean(), float(off.std()) + 1e-8
        else:
            scale = self.scale if self.config.scale == "running" else 1.0
        return np.where(small, 0.0, off / scale if scale > 0 else 0.0)

    def zero(self, groups: Groups, trains: np.ndarray) -> np.ndarray:
        zero = np.zeros(groups.rollouts, dtype=bool)
        # Whitening takes the mean and the deviation of every row of the batch.
        if self.config.skip_small > 0 and self.config.scale != "whiten" and trains.any():
            off = np.nan_to_num(self._off(groups.reward[trains], groups.group_of[trains], groups))
            zero[trains] = np.abs(off) < self.config.skip_small
        return zero

    def metrics(self) -> dict[str, float]:
        return {"scale": self.scale, **self._last}

    def state_dict(self) -> dict[str, Any]:
        return {
            "memory": self.memory.state_dict(),
            "square": self._square,
            "rewards": self._rewards,
            "step": self._step,
            "visited": self._visited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory.load_state_dict(state["memory"])
        self._square = float(state["square"])
        self._rewards, step = (np.asarray(state[k], dtype=np.float64).copy() for k in ("rewards", "step"))
        self._step = step if len(step) == len(self._step) else np.zeros_like(self._step)
        self._visited = np.asarray(state["visited"], dtype=np.int64).copy()


def _spread(of: np.ndarray, more: np.ndarray) -> None:
    """Count ``more`` in ``(number, mean, sum of squared differences from it)``, in place."""
    n, mean, square = of.tolist()
    count, shift = n + len(more), more.mean() - mean
    of[:] = (
        count,
        mean + shift * len(more) / count,
        square + float(((more - more.mean()) ** 2).sum()) + shift * shift * n * len(more) / count,
    )
