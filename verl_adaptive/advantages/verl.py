"""The advantage that ``algorithm.adv_estimator`` names, computed by verl itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.roles import Advantage

#: Estimators that give a group of equal rewards advantages of exactly zero (up to rounding): reward minus group mean.
GROUP_RELATIVE = frozenset({"grpo", "grpo_vectorized", "rloo", "rloo_vectorized"})

#: Estimators whose baseline is a prompt's other rollouts: a single one has its bare reward for advantage, or (rloo_vectorized)
#: none, or (grpo_passk) ends the run. Those that whiten over the batch besides (gdpo, reinforce_plus_plus_baseline) are not
#: among them.
COMPARING = GROUP_RELATIVE | {"gpg", "grpo_passk", "opo", "optimal_token_baseline", "tir_optimal_token_baseline"}

#: Estimators that subtract the mean of a prompt's rollouts where there are several: one that is alone among such groups would have
#: its bare reward beside their differences.
CENTRING = COMPARING | {"gdpo", "reinforce_plus_plus_baseline"}


#: What verl's estimators add to a standard deviation that they divide by.
EPSILON = 1e-6


class Verl(Advantage):
    """Leaves ``algorithm.adv_estimator`` to the user.

    With an estimator that subtracts the group's mean, a group whose *rewards* are all equal has advantages of zero:
    its rows add nothing to a pure policy gradient and may be left out of training (``adaptive.skip_zero_advantage``).
    A group of one is not among them: verl's GRPO takes mean 0 and std 1 there.
    """

    name: ClassVar[str] = "verl"
    estimator: ClassVar[str | None] = None

    @dataclass
    class Config:
        """No options: they are verl's."""

    def zero(self, groups: Groups, trains: np.ndarray) -> np.ndarray:
        if not self.group_relative:
            return np.zeros(groups.rollouts, dtype=bool)
        sizes = groups.sum(trains.astype(np.float64))
        high = groups.reduce(np.maximum, np.where(trains, groups.reward, -np.inf))
        low = groups.reduce(np.minimum, np.where(trains, groups.reward, np.inf))
        flat = (high == low) & (sizes > 1)
        return groups.rollout_mask(flat) & trains
