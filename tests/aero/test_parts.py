"""AERO's allocator and filter by themselves: correctness, budgets, the choice and its bounds; Reinforce-Ada."""

from __future__ import annotations

import numpy as np
import pytest

from tests.samplers.bound import bound, progress_at
from tests.world import make_engine, run_step
from verl_adaptive.allocators.aero_rescue import AeroRescue
from verl_adaptive.groups import Groups

# -- rescue ---------------------------------------------------------------------------------------------------


def test_continuous_rewards_count_as_correct_from_one_half() -> None:
    parts = ("epoch", {"name": "aero", "n_explore": 2, "n_extra": 2}, "aero", "beta")
    engine, _ = make_engine(*parts, batch=1, n=8, M=1, refill=False, success={"mode": "value"})
    requests = engine.begin(1)
    results = Groups.from_lists(requests.row, [[0.1, 0.4]], submission=requests.submission)
    requests = engine.receive(results)
    assert requests.n.tolist() == [2]  # neither was correct
    results = Groups.from_lists(requests.row, [[0.2, 0.7]], submission=requests.submission, stage=[[1, 1]])
    assert engine.receive(results) is None
    result = engine.finish()
    assert result.trains.sum() == 2 and result.trains[3]  # the correct one and one of the others


def test_no_prompt_gets_more_than_four_times_its_budget() -> None:
    part = bound(AeroRescue({"rounds": 100, "n_extra": 1}), 4, n=4)
    assert part.most(np.array([4, 15, 16]), np.zeros(3, dtype=np.int64)).tolist() == [12, 1, 0]


def test_refill_lets_each_further_prompt_bring_its_own_budget() -> None:
    p = np.r_[np.zeros(30), np.full(30, 0.7)]
    engine, world = make_engine("epoch", {"name": "aero", "rounds": 100}, "informative", batch=6, n=8, seed=3, p=p)
    result = run_step(engine, world, 1)
    assert result.trained.sum() == 6 and len(result.groups) > 6
    assert result.groups.rollouts <= 8 * len(result.groups)
    assert result.groups.n[result.groups.successes == 0].max() > 8


def test_a_pool_samplers_plan_is_each_prompts_budget() -> None:
    allocator = bound(AeroRescue({"n_explore": 4}), 4)
    planned = np.array([2, 4, 20])
    first = allocator.first(np.arange(3), planned, progress_at(1))
    assert first.tolist() == [2, 4, 4] and allocator.fund(first, planned).tolist() == [0, 0, 16]


# -- rejection ------------------------------------------------------------------------------------------------


def test_the_choice_is_uniform() -> None:
    engine, _ = make_engine(filter="aero", M=8, refill=False)
    groups = Groups.from_lists([3], [[1, 0, 0, 0, 0, 0]])
    times = np.zeros(6)
    for step in range(1, 1001):
        times += engine.policy.filter.decide(groups, progress_at(step)).rollouts
    assert times[0] == 1000 and times[1:].sum() == 1000
    assert times[1:].min() >= 150 and times[1:].max() <= 250  # 200 expected, standard deviation 12.6


# -- Reinforce-Ada --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k_pos", "right", "wrong"), [(None, 2, 2), (3, 3, 1)])
def test_reinforce_ada_samples_until_both_kinds_are_there(k_pos, right, wrong) -> None:
    """Of n = 4 the incorrect ones are the rest; beside a k_pos of 3 two were asked for."""
    allocator = {"name": "reinforce_ada", "k_pos": k_pos}
    engine, world = make_engine(allocator=allocator, batch=60, n=4, p=np.linspace(0, 1, 60), refill=False)
    groups = run_step(engine, world, 1).groups
    assert set(groups.n.tolist()) <= {8, 16, 24, 32}
    enough = (groups.successes >= right) & (groups.n - groups.successes >= wrong)
    assert enough[groups.n < 32].all() and not enough[groups.index == 0].any()
    for g in np.flatnonzero(groups.n > 8):  # nobody was sampled longer than needed
        before = groups.success[groups.offsets[g] : groups.offsets[g + 1] - 8]
        assert before.sum() < right or (1 - before).sum() < wrong


def test_reinforce_ada_pos_draws_in_proportion_to_one_over_p() -> None:
    p = np.repeat([0.1, 0.2, 0.4], 400)
    allocator = {"name": "reinforce_ada", "variant": "pos", "k_pos": 1, "per_round": 1, "rounds": 200}
    engine, world = make_engine(allocator=allocator, batch=1200, n=4, p=p, refill=False, max_rounds=300)
    groups = run_step(engine, world, 1).groups
    drawn = np.bincount((groups.index // 400).astype(int), groups.n) / 400
    np.testing.assert_allclose(drawn, [10, 5, 2.5], rtol=0.1)


def test_a_rate_that_is_a_bound_is_not_beyond_it() -> None:
    """0.28 · 25 is a little more than 7, and 0.58 · 50 a little less than 29."""
    seven = Groups.from_lists([0], [[1.0] * 7 + [0.0] * 18])
    engine, _ = make_engine(filter={"name": "aero", "tau": 0.28}, n=25, M=1, batch=1)
    assert engine.policy.filter.decide(seven, progress_at(1)).rollouts.all()
    many = Groups.from_lists([0], [[1.0] * 29 + [0.0] * 21])
    engine, _ = make_engine(allocator={"name": "aero", "u_res": 0.58, "n_explore": 50}, n=100, M=1, batch=1)
    assert engine.policy.allocator.review(many, progress_at(1))[0] > 0
