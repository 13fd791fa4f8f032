"""Rewards at a bound: verl has them in float32, and the bounds are a command line's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.samplers.bound import bound, progress_at
from tests.world import make_engine
from verl_adaptive.config import SuccessConfig
from verl_adaptive.groups import Groups
from verl_adaptive.samplers.greso import Greso

BOUNDS = [-1.0, -0.7, 0.0, 0.1, 0.3, 0.55, 0.7, 0.9, 0.95, 0.99, 1.0, 12.7]


def in_verl(reward: float) -> np.ndarray:
    return np.full(4, np.float32(reward)).astype(np.float64)


@pytest.mark.parametrize("at", BOUNDS)
def test_a_reward_at_the_threshold_succeeds(at) -> None:
    config = SuccessConfig(threshold=at)
    assert config.of(in_verl(at)).tolist() == [1.0] * 4
    below = at - 1e-5 * max(abs(at), 1.0)
    assert config.of(in_verl(below)).tolist() == [0.0] * 4


@pytest.mark.parametrize("at", [0.1, 0.3, 0.7, 0.9, 0.95])
def test_means_at_a_band_are_in_it(at) -> None:
    part = bound(Greso({"classify": "mean", "easy_mean": at, "hard_mean": -5.0}), 1)
    assert part._band(np.array([in_verl(at).mean()])).tolist() == [1]
    part.config.easy_mean, part.config.hard_mean = 5.0, at
    assert part._band(np.array([in_verl(at).mean()])).tolist() == [-1]


def test_a_prompt_at_the_bound_retires() -> None:
    """Rewards of 0.9 all along, and 0.9 is what retires."""
    engine, _ = make_engine({"name": "retire", "threshold": 0.9}, success={"mode": "value"}, M=4)
    reward = in_verl(0.9)
    groups = Groups.from_lists([0], [reward], success=[engine.config.success.of(reward)])
    engine.policy.observe(groups, progress_at(1))
    assert engine.table.col("retired")[0] == 1
