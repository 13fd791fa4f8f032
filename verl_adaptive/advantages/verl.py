"""The advantage that ``algorithm.adv_estimator`` names, computed by verl itself but for rows that it sees alone."""

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


def group_relative(reward: np.ndarray, home: np.ndarray, groups: int) -> np.ndarray:
    """GRPO's advantage as verl has it: unbiased deviation, 1e-6 added; a group of one has mean 0 and deviation 1.

    Args:
        reward: float ``(R,)``.
        home: int64 ``(R,)``, the group of each row, below ``groups``.
    """
    n = np.bincount(home, minlength=groups)
    mean = np.bincount(home, reward, minlength=groups) / np.maximum(n, 1)
    square = np.bincount(home, (reward - mean[home]) ** 2, minlength=groups)
    deviation = np.sqrt(square / np.maximum(n - 1, 1))
    one = (n == 1)[home]
    return np.where(one, reward, (reward - mean[home]) / (deviation[home] + EPSILON))


def unseen_advantages(
    groups: Groups, trains: np.ndarray, zero_row: np.ndarray, role: Advantage, *, estimator: str, by_std: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Trained groups whose advantage verl cannot see in the rows that it gets, and what it is.

    Two kinds. A batch of which every row has zero advantage keeps one row all the same, for verl to have a step:
    that row's advantage is 0. And where one rollout trains of a group that was observed with more, verl's
    group-relative estimators would take its reward itself for the advantage (mean 0, std 1); it gets what the whole
    group implies, as GRPO (verl's unbiased std) or RLOO define it. A KL penalty in the reward is not in it: these two
    compare penalties, too, and the rows left out have none. Estimators of ours see the whole group anyway.

    Args:
        groups: the trained groups of a step, or of a mini-step.
        trains, zero_row: bool ``(R,)`` of their rollouts, as :class:`~verl_adaptive.engine.StepResult` has them.
        role: the policy's advantage.
        estimator: ``algorithm.adv_estimator``.
        by_std: ``algorithm.norm_adv_by_std_in_grpo``.

    Returns:
        int64 ``(k,)`` positions among the groups; float64 ``(k,)`` the advantage of the one row that trains of each.
    """
    count = groups.sum(trains.astype(np.float64))
    if zero_row.any() and not (trains & ~role.zero(groups, trains | zero_row)).any():
        at = np.flatnonzero(count > 0)
        return at, np.zeros(len(at))
    if estimator not in GROUP_RELATIVE:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    at = np.flatnonzero((count == 1) & (groups.n > 1))
    if by_std and not estimator.startswith("rloo"):
        own = group_relative(groups.reward, groups.group_of, len(groups))
    else:
        own = groups.reward - groups.mean(groups.reward)[groups.group_of]
        if estimator.startswith("rloo"):
            own = own * (groups.n / np.maximum(groups.n - 1, 1))[groups.group_of]
    own = groups.sum(np.where(trains, own, 0.0))[at]
    return at, np.where(groups.spread(groups.reward)[at] == 0, 0.0, own)
