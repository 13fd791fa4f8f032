"""Rewards at a bound: verl has them in float32, and the bounds are a command line's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.samplers.bound import bound, progress_at
from tests.world import make_engine
from verl_adaptive.allocators.pilot_commit import band_side
from verl_adaptive.config import SuccessConfig
from verl_adaptive.filters.informative import Informative
from verl_adaptive.groups import Groups, success_by_default

BOUNDS = [-1.0, -0.7, 0.0, 0.1, 0.3, 0.55, 0.7, 0.9, 0.95, 0.99, 1.0, 12.7]


def in_verl(reward: float) -> np.ndarray:
    return np.full(4, np.float32(reward)).astype(np.float64)


@pytest.mark.parametrize("at", BOUNDS)
def test_a_reward_at_the_threshold_succeeds(at) -> None:
    config = SuccessConfig(threshold=at)
    assert config.of(in_verl(at)).tolist() == [1.0] * 4
    below = at - 1e-5 * max(abs(at), 1.0)
    assert config.of(in_verl(below)).tolist() == [0.0] * 4


@pytest.mark.parametrize("config", [SuccessConfig(threshold=0.3), SuccessConfig(mode="value", low=0.0, high=10.0)])
def test_the_least_signal_of_a_correct_rollout(config) -> None:
    """Of rewards up to 10, those from the unused threshold of 0.5 on were called right."""
    signal = np.array([config.least - 0.01, config.least])
    assert Groups.from_lists([0], [config.of(signal)]).correct.tolist() == [False, True]


def test_a_prompt_at_the_bound_retires() -> None:
    """Rewards of 0.9 all along, and 0.9 is what retires."""
    engine, _ = make_engine({"name": "retire", "threshold": 0.9}, success={"mode": "value"}, M=4)
    reward = in_verl(0.9)
    groups = Groups.from_lists([0], [reward], success=[engine.config.success.of(reward)])
    engine.policy.observe(groups, progress_at(1))
    assert engine.table.col("retired")[0] == 1


@pytest.mark.parametrize(
    "rewards", [[0.6, 0.8], [0.7, 0.7, 0.6, 0.8], [0.5, 0.9], [0.1, 0.3], [0.1, 0.2, 0.3]], ids=str
)
def test_a_group_at_the_bound_of_a_band_is_in_it(rewards) -> None:
    """Pass rates of 0.7 and of 0.2 in float32 are a little more or less; they are kept where the band begins or ends there."""
    made = np.array(rewards, dtype=np.float32).astype(np.float64)
    groups, at = Groups.from_lists([0], [made]), round(float(made.mean()), 3)
    for band in ({"low": at}, {"high": at}):
        assert bound(Informative(band), 1).decide(groups, progress_at(1)).keep.tolist() == [True]
    assert band_side(groups.successes, groups.n, at, 0.0).tolist() == [0]
    assert band_side(groups.successes, groups.n, 0.0, 1 - at).tolist() == [0]


def test_a_rollout_at_half_a_success_is_correct() -> None:
    """Rewards from 0.4 to 1: 0.7 lies in the middle, and a little below it in float32."""
    success = SuccessConfig(mode="value", low=0.4).of(in_verl(0.7))
    assert (success < 0.5).all() and Groups.from_lists([0], [success]).correct.all()
    below = np.nextafter(np.float32(0.5), np.float32(0)).astype(np.float64)
    assert success_by_default(below) == SuccessConfig().of(below) == 1
