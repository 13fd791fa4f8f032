"""How far rewards usually are from what was expected: one number for all prompts, in the units of the reward.

The running scale of differences d = r − b is

    S = max( √(Σ ω_t q_t / Σ ω_t),  ¼ · Σ d² / Σ |d| )

* q_t is the mean square of a step's differences, ω_t falls by a tenth with every later step (``RATE``). A step in which
  every difference is 0 has no q: it says nothing about the scale. One of at most 1e-6 of its reward, or of S, is 0.
* Σ d² / Σ |d| is over the run, and falls by a hundredth with every step that has a difference (``KEPT``). Of a reward
  of two values it is half of their distance, whether one in two answers is right or one in ten thousand. So S does not
  vanish where successes are rare: the advantage of a success is at most 8, as in a GRPO group of 64.
* A difference counts for at most 8 S (``CLIP``), S being the scale at the beginning of the step: one rogue reward does not
  move it. While there is no scale, the median distance of the step's other rewards from their median stands for S.

Every term is in the units of the reward, so r → a r + b (a > 0) multiplies S by a.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_adaptive.groups import ROUNDING
from verl_adaptive.stats.running_mean import PSEUDO

#: A difference counts for at most so many scales.
CLIP = 8.0
#: Weight of a step in the running mean square.
RATE = 0.1
#: What a step with differences leaves of the run's sums.
KEPT = 0.99
#: Least scale, in Σ d² / Σ |d|: two values then differ by 8 scales.
LEAST = 2.0 / CLIP


def typical_distance(values: np.ndarray) -> tuple[float, float]:
    """The median, and the median distance from it of the values that differ from it; infinite if none does."""
    if not len(values):
        return math.nan, math.inf
    centre = float(np.median(values))
    away = np.abs(values - centre)
    away = away[away > 0]
    return centre, float(np.median(away)) if len(away) else math.inf


def within(reward: np.ndarray, centre: np.ndarray, limit: np.ndarray | float) -> np.ndarray:
    """float64 ``(k,)``: rewards farther from the centre than the limit are moved to the limit; the others stay, bit for bit."""
    return np.where(np.abs(reward - centre) > limit, centre + np.clip(reward - centre, -limit, limit), reward)


def beyond_rounding(off: np.ndarray, reward: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """float64 ``(k,)``: the differences, 0 where one is rounding beside its reward or the scale."""
    return np.where(np.abs(off) <= ROUNDING * np.maximum(np.abs(reward), scale), 0.0, off)


def others_mean(mine: np.ndarray, every: np.ndarray) -> np.ndarray:
    """The mean of the other rewards of the same data source, shrunk to that of all others as a prompt's prior is; a rogue
    reward counts as in the scale. nan where there is no other.

    Args:
        mine: float64 ``(2, k)``, data sources and rewards, some of ``every``.
        every: float64 ``(2, R)``.
    """
    if every.shape[1] < 2:
        return np.full(mine.shape[1], np.nan)
    centre, distance = typical_distance(every[1])
    off, own = (np.clip(x[1] - centre, -CLIP * distance, CLIP * distance) for x in (every, mine))
    mean = (off.sum() - own) / (len(off) - 1)
    for source in np.unique(mine[0]):
        here, others = mine[0] == source, off[every[0] == source]
        count = len(others) - 1
        if count:
            mean[here] += count / (PSEUDO + count) * ((others.sum() - own[here]) / count - mean[here])
    return centre + mean


class RunningScale:
    """The scale of a run's differences, step by step.

    Attributes:
        before: the scale at the beginning of the step; 0: not known.
        jump: root mean square of the last step's differences, unclipped, in scales of the step's beginning; 0: not known.
    """

    def __init__(self) -> None:
        self._square = np.zeros(2)  # Σ ω q, Σ ω
        self._sums = np.zeros(2)  # Σ |d|, Σ d²
        self._seen = np.zeros((3, 0))  # of the step under way: data sources, rewards, differences
        self.before = self.jump = 0.0

    def observe(self, rewards: np.ndarray, off: np.ndarray) -> None:
        """Take data sources and rewards of the step under way, ``(2, k)``, and their differences; nan: not known."""
        off = beyond_rounding(off, rewards[1], self.before)
        self._seen = np.concatenate([self._seen, [*rewards, off]], axis=1)

    @property
    def rewards(self) -> np.ndarray:
        """float64 ``(2, k)``: data sources and rewards of the step under way."""
        return self._seen[:2]

    @property
    def limit(self) -> float:
        """What a difference counts for at most."""
        return CLIP * (self.before or typical_distance(self._seen[1])[1])

    @property
    def value(self) -> float:
        """The scale with what the step under way has shown; 0 while every difference was 0."""
        return _scale(*self._with_step())

    @property
    def unit(self) -> float:
        """The distance of two values that give such differences, at the beginning of the step; 0: not known."""
        return 2.0 * float(self._sums[1] / self._sums[0]) if self._sums[0] else 0.0

    def counted(self, reward: np.ndarray, value: np.ndarray) -> np.ndarray:
        """float64 ``(k,)``: rewards of the step under way as they count beside the values expected; nan: not known."""
        limit, unknown = self.limit, np.isnan(value)
        centre = np.where(unknown, typical_distance(self._seen[1])[0], value) if unknown.any() else value
        return within(reward, centre, limit)

    @property
    def explained(self) -> float:
        """Share of the variance of the step's rewards that was expected; rogue rewards as they count."""
        reward, off = self._known()
        counted = np.clip(off, -self.limit, self.limit)
        spread = float(np.var(reward - off + counted)) if len(off) else 0.0
        return 1.0 - float((counted * counted).mean()) / spread if spread > 0 else 0.0

    def _known(self) -> np.ndarray:
        """float64 ``(2, k)``: rewards and differences that are known, in an order that is not that of arrival."""
        known = self._seen[1:, np.isfinite(self._seen[2])]
        return known[:, np.lexsort(known)]

    def _with_step(self) -> tuple[np.ndarray, np.ndarray]:
        off = np.clip(self._known()[1], -self.limit, self.limit)
        if not off.any():
            return self._square, self._sums
        square = off * off
        step = np.array([RATE * square.mean(), RATE])
        return (1 - RATE) * self._square + step, KEPT * self._sums + [np.abs(off).sum(), square.sum()]

    def end_step(self) -> None:
        """The step is over: its scale is the next one's beginning."""
        off = self._known()[1]
        known = len(off) and self.before
        self.jump = math.sqrt(float((off * off).mean())) / self.before if known else 0.0
        self._square, self._sums = self._with_step()
        self.before = _scale(self._square, self._sums)
        self._seen = self._seen[:, :0]

    def state_dict(self) -> dict[str, Any]:
        return {"square": self._square, "sums": self._sums, "jump": self.jump}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._square, self._sums = (np.asarray(state[k], dtype=np.float64).copy() for k in ("square", "sums"))
        self.before, self.jump = _scale(self._square, self._sums), float(state["jump"])


def _scale(square: np.ndarray, sums: np.ndarray) -> float:
    if not sums[0]:
        return 0.0
    return max(math.sqrt(square[0] / square[1]), LEAST * float(sums[1] / sums[0]))
