"""The Beta posterior's advantages: numbers, a slow reference, verl's own GRPO, conformance."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from tests.samplers.bound import bound
from verl_adaptive.advantages.beta import BetaPosterior, success_of
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.groups import Groups

VARIANTS = ["predictive", "unnormalised", "off"]


def beta(**options) -> BetaPosterior:
    return bound(BetaPosterior(options), 1)


def whole(made: BetaPosterior, *rewards) -> list[np.ndarray]:
    """Advantages when every rollout trains, a list a group."""
    groups = Groups.from_lists(range(len(rewards)), rewards, success=[[float(r >= 0.5) for r in g] for g in rewards])
    out = made.compute(groups.reward, groups.group_of, groups)
    return np.split(out, groups.offsets[1:-1])


# -- numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "value"), [(4, 0.447), (8, 0.333), (10, 0.302), (16, 0.243)])
def test_the_default_in_a_group_without_variance(n, value) -> None:
    right, wrong = whole(beta(), [1] * n, [0] * n)
    assert round(right[0], 3) == value and (right == right[0]).all()
    np.testing.assert_allclose(right, 1 / math.sqrt(n + 1))
    np.testing.assert_allclose(wrong, -right)


@pytest.mark.parametrize("signal", ["acc", "reward"])
def test_the_signals_tolerance_is_of_rewards_where_they_are_the_signal(signal) -> None:
    made = beta()
    made.facts = replace(made.facts, tolerance=2.0)
    made.check_policy(None, AdaptiveConfig(signal=signal))
    rewards = [1, 0, 0, 0]
    assert np.allclose(whole(made, rewards), whole(beta(), rewards)) == (signal == "acc")


# -- against slow loops ---------------------------------------------------------------------------------------


def slow(options: dict, rewards: list[list[float]], success: list[list[float]], kept: list[list[int]]) -> list[float]:
    out, sizes = [], [len(k) for k in kept if k]
    for r, s, chosen in zip(rewards, success, kept, strict=True):
        if not chosen:  # none of its rows is in the batch
            continue
        n, c = len(r), sum(s)
        mine = [r[j] for j in chosen]
        base = mine if options["baseline"] == "retained" else r
        mean = sum(base) / len(base)
        std = math.sqrt(sum((x - mean) ** 2 for x in base) / max(len(base) - 1, 1))
        p = (c + options["alpha0"]) / (n + options["alpha0"] + options["beta0"])
        for j in chosen:
            if max(base) - min(base) > 1e-6:
                a = (r[j] - mean) / (std + 1e-6) if options["norm_by_std"] else r[j] - mean
            elif options["variant"] == "off":
                a = 0.0
            else:
                x = s[j] - p
                a = x / math.sqrt(p * (1 - p)) if options["variant"] == "predictive" else x
                a *= options["w_neg"] if a < 0 else 1.0
            out.append(a * (sum(sizes) / len(sizes) / len(chosen) if options["group_mean"] else 1.0))
    return out


@pytest.mark.parametrize("seed", range(60))
def test_equals_slow_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = {
        "variant": VARIANTS[seed % 3],
        "alpha0": float(rng.choice([1.0, 0.3, 4.0])),
        "beta0": float(rng.choice([1.0, 2.0])),
        "w_neg": float(rng.choice([1.0, 0.5, 0.0])),
        "norm_by_std": bool(rng.integers(2)),
        "baseline": str(rng.choice(["retained", "full"])),
        "group_mean": bool(rng.integers(2)),
    }
    rewards, success, kept = [], [], []
    for _ in range(50):
        n = int(rng.integers(1, 12))
        levels = rng.choice([0.0, 1.0, -1.0, 0.25, 0.8], size=rng.integers(1, 4), replace=False)
        rewards.append(rng.choice(levels, n).tolist())
        success.append([min(max(r, 0.0), 1.0) for r in rewards[-1]])
        kept.append(sorted(rng.permutation(n)[: rng.integers(0, n + 1)].tolist()))
    groups = Groups.from_lists(range(50), rewards, success=success)
    rows = np.concatenate([groups.offsets[g] + np.array(k, dtype=np.int64) for g, k in enumerate(kept)])
    order = rng.permutation(len(rows))  # verl balances the batch
    made = beta(**options)
    out = made.compute(groups.reward[rows[order]], groups.group_of[rows[order]], groups)
    np.testing.assert_allclose(out, np.array(slow(options, rewards, success, kept))[order], rtol=1e-9, atol=1e-12)


def test_mixed_groups_are_verls_own_grpo() -> None:
    torch = pytest.importorskip("torch")
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    rng = np.random.default_rng(0)
    rewards = [np.r_[0.0, 1.0, rng.choice([0.0, 1.0, 0.5], rng.integers(0, 9))].tolist() for _ in range(30)]
    groups = Groups.from_lists(range(30), rewards)
    for norm in (True, False):
        theirs, _ = core.compute_grpo_outcome_advantage(
            torch.tensor(groups.reward)[:, None],
            torch.ones(groups.rollouts, 1),
            np.array([f"uid{g}" for g in groups.group_of]),
            norm_adv_by_std_in_grpo=norm,
        )
        ours = beta(norm_by_std=norm).compute(groups.reward, groups.group_of, groups)
        np.testing.assert_allclose(ours, theirs[:, 0].numpy(), rtol=1e-6, atol=1e-9)


# -- success from rewards -------------------------------------------------------------------------------------


def test_success_is_read_off_the_nearest_reward_of_the_own_group() -> None:
    groups = Groups.from_lists(
        [0, 1, 2], [[0.0, 1.0, 1.0, 0.4], [-1.0, 1.0], [5.0]], success=[[0.0, 1.0, 0.0, 0.2], [0.0, 1.0], [0.7]]
    )
    reward = np.array([0.1, 0.9, 0.41, 0.7, -3.0, 0.2, -0.2, 0.0, -9.0, 9.0])
    home = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
    assert success_of(reward, home, groups).tolist() == [0, 0.5, 0.2, 0.2, 0, 1, 0, 0, 0.7, 0.7]


def test_success_of_large_groups_takes_no_room_for_their_pairs() -> None:
    """64 groups of 512 took 1 GB and 5 s."""
    groups = Groups.from_lists(range(4), [[float(i % 2)] * 512 for i in range(4)])
    tracemalloc.start()
    found = success_of(groups.reward, groups.group_of, groups)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000 and (found == groups.success).all()


def test_penalties_do_not_turn_a_success_into_a_failure() -> None:
    """verl may take a KL or length penalty off the reward; the row is still the success that was observed."""
    groups = Groups.from_lists([0], [[1.0] * 8])
    out = beta().compute(np.array([0.93, 0.93]), np.zeros(2, dtype=int), groups)
    np.testing.assert_allclose(out, 1 / 3)


# -- leaving rows out of training -----------------------------------------------------------------------------


def test_zeros() -> None:
    groups = Groups.from_lists(range(4), [[1, 1, 1], [0, 0, 0], [1, 0, 0], [1]])
    trains = np.ones(10, dtype=bool)
    trains[1] = False
    assert not beta().zero(groups, trains).any()
    assert beta(variant="off").zero(groups, trains).tolist() == [True, False, True] + [True] * 3 + [False] * 3 + [True]
    assert beta(w_neg=0.0).zero(groups, trains).tolist() == [False] * 3 + [True] * 3 + [False] * 4
