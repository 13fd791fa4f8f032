"""A reference that knows the true pass rates: what choosing prompts could reach, not a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from verl_adaptive.progress import Progress
from verl_adaptive.roles import Pick, Sampler
from verl_adaptive.samplers.cero_math import best


class OracleBest(Sampler):
    """Takes the prompts of the largest p (1 − p): the most gradient signal that groups of n can have.

    Args:
        rates: called with table rows, answers their true pass rates at this moment.
    """

    name: ClassVar[str] = "oracle_best"
    kind: ClassVar[str] = "pool"

    def __init__(self, rates: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__()
        self.rates = rates

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        p = self.rates(pool)
        tie = progress.draw.bits(f"{self.name}.{progress.chunk}", self.table.key_hi[pool], self.table.key_lo[pool])
        return Pick(pool[best(p * (1.0 - p), tie, count, -np.inf)])
