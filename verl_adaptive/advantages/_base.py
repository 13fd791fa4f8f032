"""The advantage role: baseline and scale of a group's advantages."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from verl_adaptive._role import Role
from verl_adaptive.groups import Groups

__all__ = ["Advantage"]


class Advantage(Role):
    """Turns rewards into advantages, one number a rollout.

    ``estimator`` is the name that verl's ``algorithm.adv_estimator`` takes: None leaves the user's own choice alone;
    any other name is registered with verl's ``register_adv_est`` and computed by :meth:`compute`.
    """

    role: ClassVar[str] = "advantage"
    estimator: ClassVar[str | None] = None

    def compute(self, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
        """Advantages of the rollouts that train.

        Args:
            reward: float64 ``(R,)``, rewards after verl's own penalties, summed over tokens.
            group_of: int64 ``(R,)``, position of each rollout's group in ``observed``.
            observed: the step's trained groups with *all* their rollouts, those left out of training included.

        Returns:
            float64 ``(R,)``.
        """
        raise NotImplementedError  # abstract: what makes a part a part

    def zero(self, groups: Groups, trains: np.ndarray) -> np.ndarray:
        """Rollouts whose advantage is certain to be exactly zero, so that training can leave them out.

        Args:
            groups: kept groups.
            trains: bool ``(R,)``, the rollouts the filter lets train.

        Returns:
            bool ``(R,)``.
        """
        return np.zeros(groups.rollouts, dtype=bool)
