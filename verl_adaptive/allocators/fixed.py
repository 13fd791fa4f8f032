"""verl's own allocation: every prompt gets the group size n, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Count
from verl_adaptive.roles import Allocator


class Fixed(Allocator):
    """n rollouts a prompt, or the number that a pool sampler planned for it."""

    name: ClassVar[str] = "fixed"
    follows_plan: ClassVar[bool] = True

    @dataclass
    class Config:
        """Options of the allocator.

        Attributes:
            n: rollouts a prompt, once (null: ``actor_rollout_ref.rollout.n``).
        """

        n: Count | None = None

    def fixed_size(self, n: int) -> int:
        return self.config.n or n

    def first(self, rows: np.ndarray, planned: np.ndarray | None, progress: Progress) -> np.ndarray:
        if planned is not None:
            return planned.astype(np.int64)
        return np.full(len(rows), self.fixed_size(self.facts.n), dtype=np.int64)
