"""AERO's Bayesian stabilisation: a Beta posterior where a group's rewards are all equal (2602.14338, stage II, strategy 2).

A group of equal rewards has no group-relative advantage. With prior Beta(α0, β0), and c successes among *all* n
rollouts of the group (rescue and rejected ones included), its success rate is taken to be the posterior mean

    p = (c + α0) / (n + α0 + β0).

``variant`` says what becomes of it, s being a rollout's own success:

| variant | advantage of a rollout in such a group | with Beta(1, 1), all correct |
|---|---|---|
| ``predictive`` (default) | (s − p) / √(p (1 − p)) | 1/√(n+1): 0.447 at n = 4, 0.333 at 8, 0.243 at 16 |
| ``unnormalised`` | s − p, for losses without division by the std (Dr. GRPO) | 1/(n+2) |
| ``off`` | 0 | 0 |

All wrong is the mirror image, times ``w_neg``. Mixed groups get GRPO's (r − mean) / (std + 1e-6), as verl computes it
(unbiased std), on the rollouts that train.

Certainty. That a posterior prevents dead zones: the abstract. Beta(1, 1) and n: a third-party reimplementation, whose
*code* for this step gives exactly zero and is not followed. The formula was not found; the default normalises by the
predictive standard deviation, which cannot vanish, so no floor is needed. All-wrong groups push every sampled answer down without a contrast: watch
entropy and length, and lower ``w_neg``.

Rewards of any scale. The posterior counts evidence of success in [0, 1] (``adaptive.success``: threshold or scaled
value), so ±1, shaped and continuous rewards need no care. A row's success is read off the rollout of its group with the
nearest observed reward: verl hands over rewards in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from verl_adaptive.advantages.verl import EPSILON
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.groups import ROUNDING, Groups
from verl_adaptive.ranges import Positive, Share
from verl_adaptive.roles import Advantage, PolicyParts


class BetaPosterior(Advantage):
    """GRPO's advantage for mixed groups, the posterior's for groups of equal rewards.

    Where this differs from verl's GRPO: a group of which one rollout trains counts as one of equal rewards (verl takes
    its reward itself for the advantage).
    """

    name: ClassVar[str] = "beta"
    estimator: ClassVar[str | None] = "adaptive_beta"
    # Penalties differ from rollout to rollout, so no group of them is one of equal rewards.
    takes_penalties: ClassVar[bool] = False
    _of_rewards = True

    @dataclass
    class Config:
        """Options.

        Attributes:
            variant: the advantage in groups of equal rewards, for success s and posterior mean p: ``predictive``: (s − p) /
                √(p (1 − p)); ``unnormalised``: s − p, for losses without division by the std (Dr. GRPO); ``off``: 0.
            alpha0: successes of the prior.
            beta0: failures of the prior.
            w_neg: weight of negative posterior advantages, in [0, 1]; 1 is faithful.
            norm_by_std: divide the advantages of mixed groups by their std; false: Dr. GRPO.
            baseline: mean and std of the rollouts that train (``retained``), or of all observed (``full``: then the
                lemma of :mod:`verl_adaptive.filters.aero_rejection` does not hold; it is Reinforce-Ada's choice).
            group_mean: weigh rows by (mean group size) / (size of their group), of rollouts that train, so that under
                a mean over rollouts every group weighs the same: the condition of that lemma. Rows of zero advantage then
                stay in training.
        """

        variant: Literal["predictive", "unnormalised", "off"] = "predictive"
        alpha0: Positive = 1.0
        beta0: Positive = 1.0
        w_neg: Share = 1.0
        norm_by_std: bool = True
        baseline: Literal["retained", "full"] = "retained"
        group_mean: bool = False

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        self._of_rewards = config.signal == "reward"  # adaptive.tolerance is of the signal

    def compute(self, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
        config = self.config
        flat, mean, std = self._moments(reward, group_of, observed)
        out = reward - mean[group_of]
        if config.norm_by_std:
            out = out / (std[group_of] + EPSILON)
        rows = np.flatnonzero(flat[group_of])
        out[rows] = self._posterior(reward[rows], group_of[rows], observed)
        if config.group_mean and len(out):
            sizes = np.bincount(group_of, minlength=len(observed))
            out = out * (sizes[sizes > 0].mean() / sizes[group_of])
        return out

    def _posterior(self, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
        config = self.config
        if config.variant == "off":
            return np.zeros(len(reward))
        count = (observed.n + config.alpha0 + config.beta0)[group_of]
        p = (observed.successes + config.alpha0)[group_of] / count
        failures = (observed.n - observed.successes + config.beta0)[group_of]
        q = failures / count  # 1 − p, which may be below a rounding of p
        success = success_of(reward, group_of, observed)
        out = success * q - (1 - success) * p
        if config.variant == "predictive":
            out = out / np.sqrt(p * q)
        return np.where(out < 0, config.w_neg * out, out)

    def zero(self, groups: Groups, trains: np.ndarray) -> np.ndarray:
        zero = np.zeros(groups.rollouts, dtype=bool)
        # With group_mean the weights of all rows have the mean size of the groups that train in them.
        some = (self.config.variant == "off" or self.config.w_neg == 0) and not self.config.group_mean
        if some and trains.any():
            rows, home = np.flatnonzero(trains), groups.group_of[trains]
            flat, _, _ = self._moments(groups.reward[rows], home, groups)
            zero[rows] = flat[home] & (self.compute(groups.reward[rows], home, groups) == 0)
        return zero

    def _moments(
        self, values: np.ndarray, group_of: np.ndarray, groups: Groups
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per group: whether these rewards are equal, their mean, and their unbiased standard deviation; of a full baseline
        those of all that were observed."""
        if self.config.baseline == "full":
            values, group_of = groups.reward, groups.group_of
        count = len(groups)
        high, low = np.full(count, -np.inf), np.full(count, np.inf)
        np.maximum.at(high, group_of, values)
        np.minimum.at(low, group_of, values)
        n = np.bincount(group_of, minlength=count)
        mean = np.bincount(group_of, values, minlength=count) / np.maximum(n, 1)
        square = np.bincount(group_of, (values - mean[group_of]) ** 2, minlength=count)
        least = np.maximum(self.facts.tolerance * self._of_rewards, ROUNDING * np.maximum(np.abs(high), np.abs(low)))
        return high - low <= least, mean, np.sqrt(square / np.maximum(n - 1, 1))


def success_of(reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
    """Success in [0, 1] of rollouts known by their rewards only.

    Args:
        reward: float64 ``(R,)``.
        group_of: int64 ``(R,)``, positions in ``observed``.
        observed: groups that hold these rollouts, among others.

    Returns:
        float64 ``(R,)``: the mean success of the rollouts in the same group that have the nearest reward; of two
        rewards equally near, the lower one.
    """
    # Every row beside every rollout of its group, pair after pair; rows of one group and reward are looked up once.
    alike, back = np.unique(group_of + 1j * reward, return_inverse=True)
    group_of, reward = alike.real.astype(np.int64), alike.imag
    pair, row = observed.rollouts_of(group_of), np.repeat(np.arange(len(reward)), observed.n[group_of])
    known, far = observed.reward[pair], np.abs(reward[row] - observed.reward[pair])
    nearest, lower = np.full(len(reward), np.inf), np.full(len(reward), np.inf)
    np.minimum.at(nearest, row, far)
    near = far == nearest[row]
    np.minimum.at(lower, row[near], known[near])
    near &= known == lower[row]
    row, success = row[near], observed.success[pair[near]]
    return (np.bincount(row, success, minlength=len(reward)) / np.bincount(row, minlength=len(reward)))[back]
