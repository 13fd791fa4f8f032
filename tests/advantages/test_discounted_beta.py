"""DBB: definition 2 and algorithm 1 of the paper, against a prompt-by-prompt reference."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from tests.world import keys_of, make_engine, run_step
from verl_adaptive.advantages.discounted_beta import DiscountedBeta
from verl_adaptive.config import RunFacts
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.testing.advantages import AdvantageConformance


def bound(prompts: int = 4, **options) -> DiscountedBeta:
    made, table = DiscountedBeta(options), StatsTable()
    table.rows_for(keys_of(prompts))
    made.bind(table, RunFacts(batch=4, n=4, steps=1, prompts=prompts))
    return made


def see(made: DiscountedBeta, groups: Groups) -> np.ndarray:
    made.observe(groups, Progress(step=1, batch=4, draw=Draw(0, 1)))
    return made.compute(groups.reward, groups.group_of, groups)


class TestConformance(AdvantageConformance):
    def make(self):
        return DiscountedBeta({"discount": 0.5})


def test_the_sum_of_the_papers_equation_16() -> None:
    made = bound(discount=0.75)
    for visit in range(1, 7):
        see(made, Groups.from_lists([2], [[1, 1, 0, 0, 0]]))
        mass = made.col("alpha")[2] + made.col("beta")[2]
        assert math.isclose(mass, 0.75**visit * 2 + 5 * sum(0.75**k for k in range(visit)))
    assert made.col("alpha")[[0, 1, 3]].tolist() == [1, 1, 1]


def test_equal_rewards_weigh_less_and_less_as_history_agrees() -> None:
    made = bound()
    sizes = [abs(see(made, Groups.from_lists([0], [[0] * 8]))[0]) for _ in range(30)]
    assert all(a > b > 0 for a, b in pairwise(sizes))
    surprise = see(made, Groups.from_lists([0], [[1] * 8]))
    assert surprise[0] > 1 > sizes[0]


def test_a_run_equals_slow_loops() -> None:
    options = {"name": "discounted_beta", "discount": 0.6, "alpha0": 0.5, "beta0": 2.0}
    engine, world = make_engine(
        "greso", filter="informative", advantage=options, batch=6, n=4, M=12, p=np.linspace(0, 1, 12)
    )
    state: dict[int, tuple[float, float]] = {}
    for step in range(1, 26):
        result = run_step(engine, world, step)
        groups = result.groups
        for g in range(len(groups)):  # dropped groups, too
            own = groups.success[groups.offsets[g] : groups.offsets[g + 1]]
            a, b = state.get(int(groups.row[g]), (0.5, 2.0))
            state[int(groups.row[g])] = (0.6 * a + own.sum(), 0.6 * b + len(own) - own.sum())
        rows = np.flatnonzero(result.trains)
        expected = []
        for row in rows:
            a, b = state[int(groups.row[groups.group_of[row]])]
            expected.append((groups.success[row] - a / (a + b)) / math.sqrt(a * b / (a + b) ** 2))
        out = engine.policy.advantage.compute(groups.reward[rows], groups.group_of[rows], groups)
        np.testing.assert_allclose(out, expected, rtol=1e-9)
    assert len(state) == 12


def test_dr_grpo_form() -> None:
    groups = Groups.from_lists([0], [[1, 0, 0, 0]])
    np.testing.assert_allclose(see(bound(discount=1.0, norm_by_std=False), groups), np.array([1, 0, 0, 0]) - 2 / 6)


def test_thousands_of_visits_do_not_break_it() -> None:
    made = bound(discount=0.1)
    for _ in range(400):
        out = see(made, Groups.from_lists([0], [[0] * 8]))
    assert np.isfinite(out).all() and made.col("alpha")[0] >= 0


def test_a_warm_start_counts_as_visits_of_a_group_each() -> None:
    table = StatsTable()
    table.rows_for(keys_of(3))
    table.col("rollouts")[:2], table.col("successes")[:2] = [12, 2], [9.0, 1.0]
    made, facts, replayed = (
        DiscountedBeta({"discount": 0.5}),
        RunFacts(batch=4, n=4, steps=1, prompts=3),
        bound(3, discount=0.5),
    )
    made.bind(table, facts)
    for _ in range(3):
        see(replayed, Groups.from_lists([0], [[1, 1, 1, 0]]))
    see(replayed, Groups.from_lists([1], [[1, 0]]))
    visit = Groups.from_lists([1], [[1, 1, 1, 1]])
    for name in ("alpha", "beta"):
        np.testing.assert_allclose(made.col(name), replayed.col(name))
    table.observe(visit, 1, tolerance=0.0)
    see(made, visit)
    before = made.col("alpha").tolist()
    DiscountedBeta({"discount": 0.5}).bind(table, facts)  # a resume
    assert made.col("alpha").tolist() == before
