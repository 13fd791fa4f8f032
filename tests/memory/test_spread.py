"""The draw by spread: its distribution, the race's shortcut, priors, failures, warm start and resume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.reference import SlowMemory
from tests.samplers.bound import bound, known, progress_at, show
from tests.world import make_engine, run
from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.rng import Draw
from verl_adaptive.samplers.spread import Spread
from verl_adaptive.stats.running_mean import PSEUDO, Memory
from verl_adaptive.stats.table import StatsTable


def make_spread(M: int, table: StatsTable | None = None, sources=None, n: int = 8, **options) -> Spread:
    return bound(Spread(options), M, n=n, table=table, sources=sources)


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 8), st.lists(st.sampled_from([0.0, 1.0]), min_size=1)), min_size=1, max_size=5
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["source", "all"]),
)
def test_the_expected_share_of_successes(history, prior) -> None:
    sources = ["a", "b", "c"] * 3
    options = {"decay": 0.8, "strength": 3.0, "prior": prior, "floor": 0.1}
    made = make_spread(9, sources=sources, weight="success", **options)
    slow = SlowMemory(sources, 0.8, 3.0, prior == "source", centre=0.5)
    for step, groups in enumerate(history, 1):
        v = np.array([slow.value(p) for p, _ in groups])
        show(made, Groups.from_lists([p for p, _ in groups], [r for _, r in groups]), step)
        assert made.metrics()["expected_spread"] == pytest.approx(np.sqrt(v * (1 - v)).mean())
        for prompt, rewards in groups:
            slow.visit(prompt, rewards)
        slow.end_step()
        v = np.array([slow.value(p) for p in range(9)])
        np.testing.assert_allclose(made.memory.value(np.arange(9)), v, rtol=1e-9)
        np.testing.assert_allclose(made._weight(np.arange(9)), np.sqrt(v * (1 - v)) + 0.1, rtol=1e-9)


def test_settled_prompts_of_a_mixed_source_are_let_go() -> None:
    """One source, 45 % of it always solved, 45 % never: its mean kept settled prompts at .8 of an even one's draws."""
    rate = np.repeat([0.0, 1.0, 0.5], [90, 90, 20])
    made, rng = make_spread(200, sources=["a"] * 200), np.random.default_rng(0)
    for step in range(1, 61):
        show(made, Groups.from_lists(range(200), (rng.random((200, 1)) < rate[:, None]).astype(float).tolist()), step)
    weight = made._weight(np.arange(200))
    assert weight[:180].max() < 0.1 * weight[180:].min()


def test_rewards_of_0_and_1_are_drawn_by_the_spread_of_successes() -> None:
    """E[r²] − E[r]² is v (1 − v) there, for prompts that were never visited, too; the floor keeps its meaning."""
    made, rng, rate = make_spread(200, sources=["a", "b"] * 100), np.random.default_rng(0), np.linspace(0, 1, 200) ** 2
    for step in range(1, 60):
        rows = rng.permutation(150)[:40]
        show(made, Groups.from_lists(rows, [[float(rng.random() < rate[r])] for r in rows]), step)
    rows = np.arange(200)
    v = made.memory.value(rows)
    assert 0.85 < made._scale.unit < 1.15
    np.testing.assert_allclose(made._weight(rows), np.sqrt(v * (1 - v)) / made._scale.unit + 0.0125, rtol=1e-9)


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.0), (2.0, -1.0), (1.0, 0.5), (0.1, 10.0)])
def test_units_of_the_reward_do_not_matter(a, b) -> None:
    """Rewards in [0, .3] were drawn evenly, and .5 + correct hardly at all: every answer was a failure, or a success."""
    one, other, rng = make_spread(60), make_spread(60), np.random.default_rng(0)
    for step in range(1, 30):
        rows = rng.permutation(60)[:20]
        reward = np.clip(rng.normal(rows / 60, 0.01 * rows / 60)[:, None], 0, 1).round(3)
        for made, values in ((one, reward), (other, a * reward + b)):
            show(made, Groups.from_lists(rows, values.tolist()), step)
    np.testing.assert_allclose(one._weight(np.arange(60)), other._weight(np.arange(60)), rtol=1e-4)


def test_graded_rewards_are_drawn_by_their_spread() -> None:
    spread = np.array([0.0, 0.02, 0.05, 0.1])
    made, rng = make_spread(80, strength=1.0), np.random.default_rng(0)
    for step in range(1, 200):
        rows = rng.permutation(80)[:40]
        show(made, Groups.from_lists(rows, [[0.15 + spread[r % 4] * rng.choice([-1, 1])] for r in rows]), step)
    mean = made._weight(np.arange(80)).reshape(-1, 4).mean(0)
    assert mean[0] < 0.5 * mean[2] and mean[1] < 0.7 * mean[2] < 0.6 * mean[3]


def test_a_reward_for_the_format_takes_no_draws_away() -> None:
    """One data source of four gives .5 for the format; its share of the draws had fallen from a quarter to a fifteenth."""
    p = np.tile(np.repeat([0.1, 0.3, 0.5, 0.7, 0.9], 4), 20)  # of the sources in turn
    source, drawn = np.arange(400) % 4, np.zeros(4)
    made, rng = make_spread(400, sources=[f"s{i}" for i in source]), np.random.default_rng(0)
    for step in range(1, 150):
        rows = made.pick(np.arange(400), 64, progress_at(step)).rows
        reward = (rng.random(64) < p[rows]) + np.where(source[rows] == 0, 0.5, 0.0)
        show(made, Groups.from_lists(rows, reward[:, None].tolist(), success=(reward[:, None] >= 0.5).tolist()), step)
        drawn += np.bincount(source[rows], minlength=4) * (step > 50)
    np.testing.assert_allclose(drawn / drawn.sum(), 0.25, atol=0.02)


@pytest.mark.parametrize("bonus", [0.1, 0.3])
def test_successes_count_whole_after_equal_rewards(bonus) -> None:
    """While every answer got the same reward for its format, the differences were roundings, and they the scale that clips."""
    one, other = make_spread(60), make_spread(60)
    for step in range(1, 16):
        rows = np.random.default_rng(step).permutation(60)[:30]
        reward = ((rows < 20) & (step > 5) & (rows % 2 == step % 2))[:, None].astype(float)
        for made, values in ((one, reward), (other, reward + bonus)):
            show(made, Groups.from_lists(rows, values.tolist()), step)
    np.testing.assert_allclose(one._weight(np.arange(60)), other._weight(np.arange(60)), rtol=1e-6)


def test_a_rogue_reward_draws_no_prompt_for_ever() -> None:
    made, rng = make_spread(100), np.random.default_rng(0)
    for step in range(1, 60):
        rows = rng.permutation(100)[:50]
        reward = (rng.random(50) < 0.5).astype(float)
        if step == 20:
            reward[0], rogue = -1e4, rows[0]
        show(made, Groups.from_lists(rows, reward[:, None].tolist()), step)
        weight = made._weight(np.arange(100))
        assert 0.3 < weight.mean() < 0.7
    assert weight[rogue] < 1.5 * weight.mean()


def test_what_a_prompt_said_is_forgotten_whole_when_it_says_something_else() -> None:
    """Also where it was so large that adding it to the others and taking it away again would leave a rounding error."""
    memory, one = Memory(known(rollouts=[0, 0, 0]), "m", decay=0.9, strength=4.0), np.ones(3)
    for latest in (np.array([1e20, 0.3, 0.4]), np.array([0.2, 0.3, 0.4])):
        memory.observe(np.arange(3), latest, one, latest)
        memory.end_step()
    assert memory._prior[0] == pytest.approx((PSEUDO * (PSEUDO * 0.5 + 0.9) / (PSEUDO + 3) + 0.9) / (PSEUDO + 3))


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(0, 10_000), st.sampled_from(["reward", "success", "mixed"]), st.integers(0, 3))
def test_the_shortcut_changes_nothing(count, seed, weight, before) -> None:
    """Looking at the likely winners alone gives what sorting the whole pool gives: exponential times of a race, of which the
    first is a prompt with chance weight / Σ weights."""
    M = 3000
    made = make_spread(M, weight=weight)
    rng = np.random.default_rng(seed)
    made.memory.col("sum")[:] = made.memory.col("count") * rng.random(M)
    made.memory.col("count")[:] = rng.integers(0, 50, M)
    if weight == "reward":
        made._squares.col("sum")[:], made._squares.col("count")[:] = made.memory.col("sum"), made.memory.col("count")
        made._scale.observe(rng.random((2, 100)), rng.random(100))
        made._scale.end_step()
    pool = np.arange(M)
    for _ in range(before):
        made.pick(pool, int(rng.integers(0, 300)), progress_at(5, seed=seed))
    taken = made._taken.copy()
    keyed = Draw(seed, 0).bits("spread.race", made.table.key_hi, made.table.key_lo)
    u = (progress_at(5, seed=seed).draw.again("spread.race", keyed) >> np.uint64(11)) * 2.0**-53
    arrival = -np.log1p(-u) / made._weight(pool)
    arrival[taken] = np.inf
    got = made.pick(pool, count, progress_at(5, seed=seed)).rows
    assert got.tolist() == np.argsort(arrival, kind="stable")[:count].tolist()


def test_without_replacement_within_a_step_and_anew_in_the_next() -> None:
    made, pool = make_spread(40), np.arange(40)
    first, second = made.pick(pool, 25, progress_at(1)).rows, made.pick(pool, 25, progress_at(1, chunk=1)).rows
    assert len(first) == 25 and len(second) == 15 and not np.isin(first, second).any()
    assert len(made.pick(pool, 10, progress_at(1, chunk=2)).rows) == 0
    assert len(made.pick(pool, 40, progress_at(2)).rows) == 40


def test_prompts_that_fail_count_as_visited() -> None:
    made = make_spread(3)
    for step in range(1, 21):
        made.table.observe(Groups.from_lists([0], [[]], failed=[True]), step, tolerance=1e-6)
    made.table.col("visits")[2], made.table.col("failures")[2] = 18, 2
    weight = made._weight(np.arange(3))
    assert weight[0] == pytest.approx((weight[1] - 0.0125) / 21 + 0.0125)
    assert weight[2] == pytest.approx((weight[1] - 0.0125) * 19 / 21 + 0.0125)
    engine, world = make_engine("spread", n=1, batch=10, M=100)
    world.failure = 0.0
    engine.table.col("failures")[:50] = 1000
    seen = np.concatenate([result.groups.index for result in run(engine, world, 40)])
    assert 0 < (seen < 50).mean() < 0.2


def test_the_chance_that_a_group_is_mixed() -> None:
    """Against the Beta distribution's integral."""
    made = make_spread(4, weight="mixed", n=8, strength=2.0, prior="all", floor=0.001)
    made.memory.col("count")[:], made.memory.col("sum")[:] = [0, 4, 10, 40], [0, 0, 5, 39]
    grid = (np.arange(400_000) + 0.5) / 400_000
    mass, value = made.memory.mass(np.arange(4)), made.memory.value(np.arange(4))
    for row in range(4):
        a, b = mass[row] * value[row], mass[row] * (1 - value[row])
        density = np.exp((a - 1) * np.log(grid) + (b - 1) * np.log1p(-grid))
        expected = ((1 - grid**8 - (1 - grid) ** 8) * density).sum() / density.sum()
        assert made._weight(np.array([row]))[0] == pytest.approx(expected + 0.001, rel=1e-3)
    with pytest.raises(ConfigError, match=r"adaptive\.sampler\.weight='mixed': a group of 1"):
        make_spread(4, weight="mixed", n=1)


#: Three of four prompts are known from elsewhere.
WARM = {"rollouts": [8, 8, 8, 0]} | {
    name: [0, 4, 8, 0] for name in ("successes", "reward_sum", "signal_sum", "signal_sqsum")
}


def test_a_warm_start_counts_once_where_a_run_is_joined_twice() -> None:
    """As it is where a run goes on from a checkpoint without statistics."""
    made = make_spread(4, known(**WARM))
    once = made.state_dict()["scale"]
    made.bind(made.table, made.facts)
    np.testing.assert_equal(made.state_dict()["scale"], once)
    assert once["sums"].any()


@pytest.mark.parametrize("weight", ["reward", "success"])
def test_warm_start_is_evidence(weight) -> None:
    made = make_spread(4, known(**WARM), weight=weight)
    weight = made._weight(np.arange(3))
    assert weight[1] > 1.3 * weight[0] and weight[1] > 1.3 * weight[2]
    assert made.memory.col("count").tolist() == [8, 8, 8, 0]
