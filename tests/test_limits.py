"""Options at their limits: each works as its documentation says, or is refused with its key."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from tests.world import keys_of
from verl_adaptive.advantages.beta import BetaPosterior
from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.errors import ConfigError
from verl_adaptive.filters.aero_rejection import AeroRejection
from verl_adaptive.groups import Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.stats.table import StatsTable


@pytest.mark.parametrize(
    ("role", "name", "key", "value"),
    [
        ("sampler", "greso", "round.safety", math.inf),
        ("sampler", "mopps", "candidates", math.inf),
        ("sampler", "mopps", "a0", math.inf),
        ("sampler", "mopps", "b0", 1e-3),  # half of the draws were no number, and those prompts were never picked
        ("sampler", "mopps", "source_prior", math.inf),
        ("sampler", "cero", "gamma", math.inf),
        ("sampler", "cero", "recheck", math.inf),
        ("allocator", "pilot_commit", "factor", math.inf),
        ("allocator", "pilot_commit", "safety", math.inf),
        ("allocator", "pilot_commit", "max_age", 10**30),
    ],
)
def test_what_cannot_work_is_refused(role, name, key, value) -> None:
    first, _, second = key.partition(".")
    options = {"name": name, first: {second: value} if second else value}
    with pytest.raises(ConfigError, match=rf"^adaptive\.{role}\.{key}="):
        build_policy(AdaptiveConfig.from_mapping({role: options, "refill": False}))


@pytest.mark.parametrize("k", [1e9, 1e19, 1e300, math.inf])
def test_a_k_for_all_keeps_all(k) -> None:
    """From 1e19 on it overflowed, and kept one wrong rollout for a right one."""
    part, table = AeroRejection({"k": k}), StatsTable()
    table.rows_for(keys_of(1))
    part.bind(table, RunFacts(batch=1, n=8, steps=1, prompts=1))
    groups = Groups.from_lists([0], [[1.0] + [0.0] * 7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert part.decide(groups, Progress(step=1, batch=1, draw=Draw(0, 1))).rollouts.all()


@pytest.mark.parametrize("variant", ["predictive", "unnormalised", "certainty", "beta_sd", "shrinkage"])
@pytest.mark.parametrize("prior", [{"alpha0": 1e-17}, {"beta0": 1e-17}, {"alpha0": 1e-17, "beta0": 1e-17}])
def test_a_prior_of_next_to_nothing_gives_numbers(variant, prior) -> None:
    """1 − p was rounded to 0, and a solved group's advantage was 0 / 0."""
    part, table = BetaPosterior({"variant": variant, **prior}), StatsTable()
    table.rows_for(keys_of(2))
    part.bind(table, RunFacts(batch=2, n=4, steps=1, prompts=2))
    groups = Groups.from_lists([0, 1], [[1.0] * 4, [0.0] * 4])
    found = part.compute(groups.reward, groups.group_of, groups)
    assert np.isfinite(found).all() and (found[:4] >= 0).all() and (found[4:] <= 0).all()
