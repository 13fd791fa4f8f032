"""References that know the true pass rates: what a method could reach, not a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from verl_adaptive.progress import Progress
from verl_adaptive.roles import Pick, Sampler
from verl_adaptive.samplers.cero_math import best


class Oracle(Sampler):
    """Picks prompts at random in proportion to p (1 − p), p being the true pass rate at this moment.

    Attributes:
        rates: called with table rows, answers their true pass rates; set by the driver.
    """

    name: ClassVar[str] = "oracle"
    kind: ClassVar[str] = "pool"
    rates: Callable[[np.ndarray], np.ndarray]

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        """``count`` different prompts; weighted reservoir keys (Efraimidis and Spirakis 2006)."""
        p = self.rates(pool)
        hi, lo = self.table.key_hi[pool], self.table.key_lo[pool]
        u = progress.draw.uniform(f"{self.name}.{progress.round}", hi, lo)
        score = np.log(np.maximum(u, 1e-300)) / np.maximum(p * (1.0 - p), 1e-9)
        tie = progress.draw.bits(f"{self.name}.tie", hi, lo)
        return Pick(pool[best(score, tie, count, -np.inf)])


class OracleBest(Oracle):
    """Takes the prompts of the largest p (1 − p): the most gradient signal that groups of n can have."""

    name: ClassVar[str] = "oracle_best"

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        p = self.rates(pool)
        tie = progress.draw.bits(f"{self.name}.{progress.round}", self.table.key_hi[pool], self.table.key_lo[pool])
        return Pick(pool[best(p * (1.0 - p), tie, count, -np.inf)])
