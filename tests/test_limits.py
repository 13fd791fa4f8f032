"""Options at their limits: each works as its documentation says, or is refused with its key."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest

from tests.samplers.bound import bound, progress_at
from verl_adaptive.advantages.beta import BetaPosterior
from verl_adaptive.errors import ConfigError
from verl_adaptive.filters.aero_rejection import AeroRejection
from verl_adaptive.groups import Groups
from verl_adaptive.policy import make_part

INF = math.inf
#: Part → options that it refuses, each with the key that the message is about, where that is not the only one.
REFUSED: dict[tuple[str, str], list] = {
    ("sampler", "epoch"): [
        ({"round": {"prompts": 0}}, "round.prompts"),
        ({"round": {"safety": 0.5}}, "round.safety"),
        ({"round": {"prompt": 3}}, "round.prompt"),
    ],
    ("sampler", "greso"): [
        *({"floor_easy": 0.0}, {"p_hard": 1.5}, {"warmup_epochs": -1}, {"p_esay": 0.3}),
        ({"p_min": 0.9, "p_max": 0.1}, "p_min"),
        # the controller's first move went to the bound: a p of 1 fell where it should rise, even with delta=0
        *({"p_hard": 1.0, "delta": 0.0}, {"p_easy": 0.01}),
        ({"round": {"adaptve": True}}, "round.adaptve"),
        ({"round": {"safety": INF}}, "round.safety"),
    ],
    ("sampler", "mopps"): [
        *({key: -0.1} for key in ("target", "decay", "recheck", "candidates", "a0", "b0", "source_prior")),
        *({"candidates": INF}, {"a0": INF}, {"source_prior": INF}),
        {"b0": 1e-3},  # half of the draws were no number, and those prompts were never picked
    ],
    ("sampler", "retire"): [{"after": 0}, {"threshold": 0.0}, {"recheck": 2}, {"p": 1}],
    ("sampler", "spread"): [{"floor": 0.0}, {"decay": 2.0}, {"weight": "x"}],
    ("sampler", "cero"): [
        *({"rho": 0.0}, {"rho": 1.5}, {"nu0": 1.5}, {"lam": 0.0}, {"a0": 0.0}, {"recheck": -1.0}, {"recheck": INF}),
        *({"capacity": 0}, {"gamma": 0.0}, {"gamma": INF}, {"variant": "may"}, {"n_mx": 2}),
    ],
    ("allocator", "pilot_commit"): [
        *({"n_pilot": 0}, {"upper": 1.0}, {"max_age": 0}, {"max_age": 10**30}, {"factor": 0.0}, {"factor": INF}),
        *({"choose": "newest"}, {"safety": INF}),
    ],
    ("allocator", "aero"): [
        *({"n_explore": 0}, {"n_extra": 0}, {"u_res": 1.0}, {"rounds": -1}, {"budget": "shared"}, {"n_explor": 4})
    ],
    ("advantage", "beta"): [
        *({"alpha0": 0.0}, {"beta0": -1.0}, {"w_neg": 1.5}, {"variant": "s2-a"}, {"baseline": "group"}, {"alpha": 1.0})
    ],
    ("advantage", "memory"): [
        *({"decay": 1.5}, {"strength": 0.0}, {"shrink": -1.0}, {"scale": "x"}, {"thin": -1.0}),
        ({"thin": 0.5, "scale": "whiten"}, "thin"),
    ],
}


@pytest.mark.parametrize(("role", "name"), REFUSED)
def test_what_cannot_work_is_refused(role, name) -> None:
    for case in REFUSED[role, name]:
        options, key = case if isinstance(case, tuple) else (case, next(iter(case)))
        with pytest.raises(ConfigError, match=rf"^adaptive\.{role}\.{re.escape(key)}="):
            make_part(role, {"name": name, **options})


#: Part → group size of a run, options that this run refuses, and the key (and value) that the message is about.
IN_A_RUN: dict[tuple[str, str], list] = {
    ("sampler", "cero"): [
        (8, dict(capacity=81), "capacity="),
        (8, dict(budget=10_000, capacity=32), "budget="),
        (8, dict(g=1, n_max=1), "n_max="),
        (8, dict(g=1, n_max=4, capacity=1, budget=3), "capacity="),
        (8, dict(capacity=15), "capacity=15"),
        (8, dict(n_max=3), "n_max=3"),
    ],
    ("allocator", "aero"): [
        (8, {"n_explore": 9}, "n_explore="),
    ],
    ("allocator", "reinforce_ada"): [
        # all groups had 32, one round after another
        (32, {}, r"rounds=4: .* takes 32 rollouts, and a round has 8; use 5 or more, .* smaller k_pos and k_neg"),
        (8, {"variant": "pos", "k_pos": 25}, "rounds="),
    ],
    ("allocator", "pilot_commit"): [
        (64, {"n_pilot": 64}, "n_pilot="),
        (2, {}, "n_pilot="),
        (64, {"n_pilot": 1}, "n_pilot="),
        (64, {"n_pilot": 2, "lower": 0.6, "upper": 0.3}, "n_pilot="),
        (64, {"lower": 0.5, "upper": 0.6}, r"lower=0\.5: .*use at most 0\.4$"),
        (64, {"choose": "max_variance"}, "choose="),
    ],
}


@pytest.mark.parametrize(("role", "name"), IN_A_RUN)
def test_what_cannot_work_in_a_run_is_refused(role, name) -> None:
    for n, options, key in IN_A_RUN[role, name]:
        with pytest.raises(ConfigError, match=rf"^adaptive\.{role}\.{key}"):
            bound(make_part(role, {"name": name, **options}), 40, batch=8, n=n, steps=50)


@pytest.mark.parametrize("k", [1e9, 1e19, 1e300, math.inf])
def test_a_k_for_all_keeps_all(k) -> None:
    """From 1e19 on it overflowed, and kept one wrong rollout for a right one."""
    part = bound(AeroRejection({"k": k}), 1)
    groups = Groups.from_lists([0], [[1.0] + [0.0] * 7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert part.decide(groups, progress_at(1)).rollouts.all()


@pytest.mark.parametrize("variant", ["predictive", "unnormalised"])
@pytest.mark.parametrize("prior", [{"alpha0": 1e-17}, {"beta0": 1e-17}, {"alpha0": 1e-17, "beta0": 1e-17}])
def test_a_prior_of_next_to_nothing_gives_numbers(variant, prior) -> None:
    """1 − p was rounded to 0, and a solved group's advantage was 0 / 0."""
    part = bound(BetaPosterior({"variant": variant, **prior}), 2)
    groups = Groups.from_lists([0, 1], [[1.0] * 4, [0.0] * 4])
    found = part.compute(groups.reward, groups.group_of, groups)
    assert np.isfinite(found).all() and (found[:4] >= 0).all() and (found[4:] <= 0).all()
