"""The memory as baseline: golden traces against slow loops, what it promises, and every trainer mode's before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.reference import SlowBaseline, SlowMemory
from tests.samplers.bound import bound, progress_at, show
from tests.world import Arrivals, World, keys_of, make_async_engine, make_engine, run_step
from verl_adaptive.advantages.memory import MemoryBaseline
from verl_adaptive.config import RunFacts
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.groups import Groups
from verl_adaptive.stats.table import StatsTable

PROMPTS = 12
SOURCES = [("sums", "products", "words")[i % 3] for i in range(PROMPTS)]


def make_baseline(options=None, M: int = PROMPTS, sources=SOURCES, **facts) -> MemoryBaseline:
    return bound(MemoryBaseline(options or {}), M, sources=sources, **facts)


def see(made: MemoryBaseline, groups: Groups, step: int = 1) -> np.ndarray:
    """A step as the engine and the trainer make it: observe, close, compute."""
    show(made, groups, step)
    return made.compute(groups.reward, groups.group_of, groups)


@pytest.mark.parametrize("factor", [1.0, 1e-7, 1e7])
def test_neither_the_size_of_rewards_nor_the_signals_tolerance_changes_an_advantage(factor) -> None:
    """A signal of 0 to 100 has a tolerance of 2; the reward beside it is 0 or 1, or tiny."""
    steps = [[[1, 0, 0, 0], [1, 1, 1, 0]], [[1, 0, 0, 1], [1, 1, 1, 1]]]
    usual, made = make_baseline(), make_baseline()
    made.facts = replace(made.facts, tolerance=2.0)
    for number, rewards in enumerate(steps, 1):
        expected, groups = (
            Groups.from_lists([0, 1], [[r * by for r in group] for group in rewards]) for by in (1.0, factor)
        )
        out = see(made, groups, number)
        np.testing.assert_allclose(out, see(usual, expected, number), rtol=1e-5)
        assert (out != 0).all()
        assert not made.zero(groups, np.ones(8, dtype=bool)).any()


REWARDS = {
    "binary": st.sampled_from([0.0, 1.0]),
    "signed": st.sampled_from([-1.0, 1.0]),
    "shaped": st.sampled_from([0.0, 0.1, 1.0, 1.1, -0.5]),
    "continuous": st.floats(-3, 3).map(lambda x: round(x, 3)),
}


@st.composite
def histories(draw, reward=None):
    """Steps of groups: prompts may come twice in a step, groups have one to four rollouts, some are old."""
    values = draw(st.sampled_from(sorted(REWARDS))) if reward is None else reward
    group = st.tuples(st.integers(0, PROMPTS - 1), st.lists(REWARDS[values], min_size=1, max_size=4), st.integers(0, 2))
    return draw(st.lists(st.lists(group, min_size=1, max_size=6), min_size=1, max_size=6))


def groups_of(step) -> Groups:
    return Groups.from_lists([p for p, _, _ in step], [r for _, r, _ in step], lag=[lag for _, _, lag in step])


OPTIONS = st.fixed_dictionaries(
    {
        "decay": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "strength": st.sampled_from([0.5, 4.0]),
        "prior": st.sampled_from(["source", "all"]),
        "shrink": st.sampled_from([0.0, 0.5, 4.0]),
        "scale": st.sampled_from(["running", "whiten", "none"]),
    }
)


@settings(max_examples=60)
@given(histories(), OPTIONS)
def test_golden_trace(history, options) -> None:
    made = make_baseline(options, stale_discount=0.8)
    memory = SlowMemory(SOURCES, options["decay"], options["strength"], options["prior"] == "source")
    slow = SlowBaseline(memory, options["shrink"], options["scale"])
    for number, step in enumerate(history, 1):
        out = see(made, groups_of(step), number)
        expected = slow.step([(p, rewards, 0.8**lag) for p, rewards, lag in step])
        # A whitened batch of equal surprises is rounding over 1e-8.
        tight = options["scale"] != "whiten" or np.ptp(expected) > 1e-3
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7 if tight else 1e-3)


@settings(max_examples=20)
@given(histories("continuous"), st.floats(0.01, 50), st.floats(-20, 20))
def test_units_of_the_reward_do_not_matter(history, a, b) -> None:
    """r → a r + b with a > 0 changes no advantage: 0/1, ±1 and shaped rewards are one case."""
    one, other = make_baseline(), make_baseline()
    for number, step in enumerate(history, 1):
        moved = [(p, [a * r + b for r in rewards], lag) for p, rewards, lag in step]
        x, y = see(one, groups_of(step), number), see(other, groups_of(moved), number)
        # What counts as rounding is in the units of the reward.
        least = 1e-5 * (1 + abs(a) + abs(b)) / min(1, a)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=least / max(one.metrics()["scale"], 1e-9))


@settings(max_examples=15)
@given(histories("binary"), st.data())
def test_a_reward_does_not_move_its_own_baseline(history, data) -> None:
    """*Before*: whatever the last step's rewards of a prompt are, what is subtracted from a single rollout is the same."""
    options = {"scale": "none"}
    one, other = make_baseline(options), make_baseline(options)
    for number, step in enumerate(history, 1):
        see(one, groups_of(step), number)
        see(other, groups_of(step), number)
    prompts = data.draw(st.lists(st.integers(0, PROMPTS - 1), min_size=1, max_size=6))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(prompts), max_size=len(prompts)))
    first = Groups.from_lists(prompts, [[r] for r in rewards])
    second = Groups.from_lists(prompts, [[1 - r] for r in rewards])
    a, b = see(one, first, 99), see(other, second, 99)
    np.testing.assert_allclose(first.reward - a, second.reward - b, atol=1e-12)


def test_by_hand() -> None:
    made = make_baseline({"decay": 0.5, "strength": 2.0, "scale": "none"})
    # Nothing known: the mean of the other two rollouts, and of the same source. Of prompt 0 and 3: (2 · 1/2 + 1) / 3; of 1: 1.
    out = see(made, Groups.from_lists([0, 1, 3], [[1], [0], [1]]))
    np.testing.assert_allclose(out, [1 - 2 / 3, 0 - 1, 1 - 2 / 3])
    # All: 2/3. Source of prompts 0 and 3: (2 · 2/3 + 2) / 4 = 5/6; of 1: (2 · 2/3 + 0) / 3 = 4/9; of 2: 2/3.
    # A visit of prompt 0 has left its source one rollout of the two.
    out = see(made, Groups.from_lists([0, 4, 2], [[0], [1], [1]]), 2)
    np.testing.assert_allclose(out, [0 - (1 + 5 / 6) / 2, 1 - 4 / 9, 1 - 2 / 3])
    assert (made.memory.col("sum")[0], made.memory.col("count")[0]) == (0.5, 1.5)
    # Two rollouts: the other one, and the value for two more.
    v = (0.5 + 0.5 * made.memory._prior[made.table.col("source")[0]]) / 2
    made.config = replace(made.config, shrink=2.0)
    out = see(made, Groups.from_lists([0], [[1, 0]]), 3)
    np.testing.assert_allclose(out, [1 - (0 + 2 * v) / 3, 0 - (1 + 2 * v) / 3])


def test_the_scale_follows_slowly_and_has_a_floor() -> None:
    made = make_baseline()
    rng = np.random.default_rng(0)
    for step in range(1, 40):
        see(made, Groups.from_lists(range(PROMPTS), rng.integers(0, 2, (PROMPTS, 1)).tolist()), step)
    settled = made.metrics()["scale"]
    assert 0.4 < settled < 0.7
    for step in range(40, 400):  # from here on all is solved
        out = see(made, Groups.from_lists(range(PROMPTS), [[1]] * PROMPTS), step)
    assert 0.1 < made.metrics()["scale"] < 0.3 * settled
    assert np.abs(out).max() < 0.05  # noise is not blown up


def run_of(rewards, prompts=2000, n=1, options=None):
    """Advantages of step after step, of prompts drawn at random from one data source.

    Args:
        rewards: the rewards of each step ``(rollouts,)``.
    """
    made, rng, out = make_baseline(options, prompts, sources=None), np.random.default_rng(1), []
    for step, reward in enumerate(rewards, 1):
        rows = rng.permutation(prompts)[: len(reward) // n]
        out.append(see(made, Groups.from_lists(rows, np.reshape(reward, (-1, n)).tolist()), step))
    return np.array(out), made


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x * x).mean()))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 0.9])
def test_equal_rewards_are_uninformative(reward, n) -> None:
    """Differences of 1e-17 were divided by their own root mean square, and trained on at full strength."""
    equal = np.full((30, 128), np.float32(reward)).astype(np.float64)
    assert not run_of(equal, 600, n)[0].any()
    assert not run_of(equal + np.random.default_rng(0).normal(0, 1e-9, equal.shape), 600, n)[0].any()


def test_steps_without_a_difference_say_nothing_about_the_scale() -> None:
    rng = np.random.default_rng(0)
    rewards = [np.zeros(512)] * 10 + [(rng.random(512) < 0.1).astype(float) for _ in range(20)]
    out, _ = run_of(rewards)
    assert not out[:10].any()
    assert all(0.8 < rms(step) < 1.2 for step in out[10:])  # it was 3.2, 2.3, 2.0, …


@pytest.mark.parametrize("first", [1, 11])
@pytest.mark.parametrize("rollouts", [256, 8192])
def test_a_rare_success_weighs_no_more_than_in_a_group_of_64(rollouts, first) -> None:
    rewards = np.zeros((first + 5, rollouts))
    rewards[first - 1, 0] = 1
    out, _ = run_of(rewards, 2 * rollouts)
    assert 2.4 < out[first - 1, 0] <= 8.0  # it was 51, 101 and 286; GRPO: 2.5 in a group of 8, 7.9 in one of 64
    assert np.abs(out[first - 1, 1:]).max() < 0.04  # the others are not pushed down for it
    assert rms(out[first:]) < 0.12


@pytest.mark.parametrize("at", [0, 10])
@pytest.mark.parametrize("rogue", [-100.0, 1e4])
def test_a_rogue_reward_costs_one_rollout(rogue, at) -> None:
    """One −100 among 512 left the others a third of their advantages, for a hundred steps."""
    rewards = (np.random.default_rng(0).random((40, 512)) < 0.4).astype(float)
    clean, _ = run_of(rewards)
    rewards[at, 0] = rogue
    out, made = run_of(rewards)
    assert abs(out[at, 0]) == 8.0
    for step in range(at, 40):
        assert rms(out[step, 1:]) > (0.8 if step < 3 else 0.95) * rms(clean[step, 1:])
    assert np.abs(made.memory._prior - rewards[20:].mean()).max() < 0.05  # nor the source's mean


@pytest.mark.parametrize("at", [0, 19])
@pytest.mark.parametrize("n", [2, 8])
def test_a_rogue_reward_does_not_make_its_group_right(n, at) -> None:
    """All others of its group had an advantage of 8, right or wrong."""
    rewards = (np.random.default_rng(0).random((20, 512)) < 0.4).astype(float)
    rewards[at, 0] = -100
    out, _ = run_of(rewards, n=n)
    assert out[at, 0] == -8 and np.abs(out[at, 1:n]).max() < (3 if at else 4)


@pytest.mark.parametrize(("sources", "apart"), [(2, 10.0), (2, 100.0), (10, -5.0)])
def test_data_sources_may_have_rewards_of_their_own_size(sources, apart) -> None:
    """In the first step every reward was off by the sources' distance: RMS .15, .04 and .24 in the second, for 20 to 200 steps."""
    made = make_baseline(M=600, sources=[f"{row % sources}" for row in range(600)])
    rng = np.random.default_rng(0)
    for step in range(1, 30):
        rows = rng.permutation(600)[:128]
        rewards = apart * (rows % sources) + rng.integers(0, 2, 128)
        assert rms(see(made, Groups.from_lists(rows, rewards[:, None].tolist()), step)) > 0.4


def test_the_jump_of_the_scale_is_said() -> None:
    rewards = (np.random.default_rng(0).random((12, 512)) < 0.4).astype(float)
    assert run_of(rewards)[1].metrics()["jump"] == pytest.approx(1, abs=0.1)
    rewards[-1, 0] = -100
    assert run_of(rewards)[1].metrics()["jump"] > 8


def test_a_step_reviewed_in_many_looks_is_one_step() -> None:
    """Asynchronous trainers review what is back every tenth of a second, often a single group."""

    def told(look: int) -> list[dict[str, float]]:
        draw, made, out = np.random.default_rng(0), make_baseline(M=256, sources=None), []
        rate = draw.beta(1, 1, 256)
        for step in (1, 2, 3):
            progress = progress_at(step, batch=256)
            reward = (draw.random(256) < rate).astype(float)
            for at in range(0, 256, look):
                rows = np.arange(at, min(at + look, 256))
                made.observe(Groups.from_lists(rows, [[r] for r in reward[rows]]), progress)
            made.end_step(progress)
            out.append(made.metrics())
        return out

    whole = told(256)
    assert whole[2]["explained_share"] > 0.1 and 0.4 < whole[0]["scale"] < 0.6 and 0.4 < whole[2]["value_mean"] < 0.6
    for look in (1, 3, 100):
        for mine, all_at_once in zip(told(look), whole, strict=True):
            # in the first step values are means of the others, few of them at first
            assert mine["scale"] == pytest.approx(all_at_once["scale"], rel=0.03)
            assert mine["explained_share"] == pytest.approx(all_at_once["explained_share"], abs=0.03)


def test_thinning_is_right_in_the_mean() -> None:
    """Over many draws the mean of what is kept is what was there, and no more rows are kept than |r − b| says."""
    made, plain = (make_baseline({"scale": "none", "shrink": 1.0, **more}) for more in ({"thin": 1.0}, {}))
    rng = np.random.default_rng(0)
    for step in range(1, 30):
        groups = Groups.from_lists(range(PROMPTS), rng.random((PROMPTS, 2)).round(2).tolist())
        out, whole = see(made, groups, step), see(plain, groups, step)
    every = np.ones(groups.rollouts, dtype=bool)
    least = made.col("scale")[0]
    assert 0.1 < least < 1
    total, kept, draws = np.zeros(len(whole)), np.zeros(len(whole)), 40_000
    many, copies = 1000, Groups.concat([groups] * 1000)
    for lap in range(draws // many):
        copies.submission = np.repeat(lap * many + np.arange(many), PROMPTS)
        out = made.compute(copies.reward, copies.group_of, copies).reshape(many, -1)
        assert ((out == 0) == made.zero(copies, np.tile(every, many)).reshape(many, -1)).all()
        total, kept = total + out.sum(0), kept + (out != 0).sum(0)
    q = np.minimum(1, np.abs(whole) / least)
    error = np.maximum(np.abs(whole), least) * np.sqrt(q * (1 - q) / draws)
    assert (np.abs(total / draws - whole) <= 4.5 * error + 1e-12).all()
    assert (np.abs(kept / draws - q) <= 4.5 * np.sqrt(q * (1 - q) / draws) + 1e-12).all()
    assert (q < 1).any() and (q == 1).any()


def test_thinned_rows_leave_training_and_are_accounted() -> None:
    p = np.concatenate([np.ones(30), np.zeros(30), np.full(40, 0.5)])
    runs = [
        make_engine(advantage={"name": "memory", "thin": thin}, n=1, batch=32, p=p, skip_zero=skip)
        for thin, skip in ((1.0, True), (1.0, False), (0.0, True))
    ]
    left_out = 0
    for step in range(1, 30):
        thinned, kept, plain = (run_step(engine, world, step) for engine, world in runs)
        assert thinned.ledger.rollouts.balanced() and thinned.trained.all()
        assert thinned.ledger.rollouts.dropped.get("zero_advantage", 0) == thinned.zero_row.sum()
        assert kept.trains.all()  # where such rows must stay, they do
        assert plain.groups.row.tolist() == thinned.groups.row.tolist()
        memories = [engine.table.col("memory.sum").tolist() for engine, _ in runs]
        assert memories[0] == memories[1] == memories[2]  # memory sees every rollout
        left_out += int(thinned.zero_row.sum())
    assert left_out > 29 * 32 / 5


@pytest.mark.parametrize("scale", ["running", "none", "whiten"])
@pytest.mark.parametrize("kept", ["keep_all", "aero"])
def test_leaving_rows_out_changes_no_other_rows_advantage(scale, kept) -> None:
    """Of a group some rollouts may be small, and not others: their rewards stay in the others' baseline."""
    options = {"name": "memory", "thin": 0.0 if scale == "whiten" else 0.8, "scale": scale}
    engine, world = make_engine("epoch", "fixed", kept, options, n=4, batch=8)
    left_out = 0
    for step in range(1, 10):
        result = run_step(engine, world, step)
        inside = result.groups.rollout_mask(result.trained)
        groups, trains, zero_row = result.groups.select(result.trained), result.trains[inside], result.zero_row[inside]
        role, every = engine.policy.advantage, trains | zero_row
        whole, some = np.zeros(groups.rollouts), np.zeros(groups.rollouts)
        whole[every] = role.compute(groups.reward[every], groups.group_of[every], groups)
        some[trains] = role.compute(groups.reward[trains], groups.group_of[trains], groups)
        np.testing.assert_allclose(some[trains], whole[trains], rtol=1e-12, atol=1e-12)
        assert not whole[zero_row].any()
        left_out += int(zero_row.sum())
    assert (left_out > 0) == (scale != "whiten")


def test_the_signal_is_not_the_reward() -> None:
    """``adaptive.signal=acc`` decides difficulty; what is subtracted from a reward is in the reward's units."""
    made = make_baseline({"scale": "none"})
    for step in range(1, 60):
        groups = Groups.from_lists([0, 1], [[-2.0], [2.0]], signal=[[1.0], [0.0]], success=[[1.0], [0.0]])
        out = see(made, groups, step)
    np.testing.assert_allclose(out, [0, 0], atol=1.0)
    value = made.memory.value(np.array([0, 1]))
    assert value[0] < -1 and value[1] > 1


def test_failed_groups_leave_no_trace() -> None:
    engine, world = make_engine(advantage="memory", n=2, batch=16, world=World(np.full(400, 0.5), failure=0.4))
    for step in range(1, 20):
        result = run_step(engine, world, step)
        good = result.groups.select(result.trained)
        assert np.isfinite(engine.policy.advantage.compute(good.reward, good.group_of, good)).all()
    visited = engine.table.col("visits") > 0
    assert ((engine.table.col("memory.count") > 0) == visited).all()


def test_warm_start_is_evidence() -> None:
    table = StatsTable()
    table.rows_for(keys_of(PROMPTS), sources=SOURCES)
    table.col("rollouts")[:4], table.col("reward_sum")[:4] = 8, [0, 8, 2, 8]
    made = make_baseline({"scale": "none"}, table=table)
    np.testing.assert_allclose(made.memory.col("count")[:5], [8, 8, 8, 8, 0])
    value = made.memory.value(np.arange(PROMPTS))
    assert value[0] < 0.4 < value[1] and np.isfinite(value).all()
    assert value[4] == pytest.approx((2 * 0.5625 + 1) / 3)  # not seen: its source, in which prompt 1 is all right
    out = see(made, Groups.from_lists([1, 0], [[0], [1]]))  # no need of the batch's mean
    np.testing.assert_allclose(out, [-value[1], 1 - value[0]])
    heavy = make_baseline({"decay": 0.5})
    heavy.table.col("rollouts")[0], heavy.table.col("reward_sum")[0] = 100, 50
    heavy.bind(heavy.table, heavy.facts)
    assert heavy.memory.col("count")[0] == 2  # no more than visits would have left


def test_spo_starts_from_eight_offline_rollouts_of_a_prompt() -> None:
    """What docs/solo.md says of it; the paper has (s + 1/2) / 9 with a mass of 8."""
    table = StatsTable()
    table.rows_for(keys_of(9))
    table.col("rollouts")[:], table.col("reward_sum")[:] = 8, np.arange(9)
    made = MemoryBaseline({"decay": 0.875, "strength": 8.0, "prior": "all", "shrink": 0.0, "scale": "whiten"})
    made.bind(table, RunFacts(batch=9, n=1, steps=1, prompts=9))
    mass = made.memory.mass(np.arange(9))
    np.testing.assert_allclose(mass, 10.75, atol=0.005)
    np.testing.assert_allclose(made.memory.value(np.arange(9)), (np.arange(9) + 0.5 * (mass - 8)) / mass)


# -- asynchronous trainers ----------------------------------------------------------------------------------


def test_before_is_the_beginning_of_the_step_of_the_review() -> None:
    """Groups that are reviewed steps before they train keep the value that stood when they were reviewed."""
    engine, world = make_async_engine(
        "spread", advantage={"name": "memory", "scale": "none"}, n=1, batch=8, M=60, async_facts=AsyncFacts(warmup=16)
    )
    arrivals, memory = Arrivals(world, 5), engine.policy.advantage.memory
    value = {}  # by submission
    observe = engine.policy.advantage.observe

    def overheard(groups, progress):
        value.update(zip(groups.submission.tolist(), at_begin[groups.row].tolist(), strict=True))
        observe(groups, progress)

    engine.policy.advantage.observe = overheard
    older = 0
    for step in range(1, 30):
        at_begin = memory.value(np.arange(60))
        reviewed = set(engine.ready.groups.submission.tolist())
        groups = arrivals.step(engine, step)
        done = groups.groups.select(groups.trained)
        older += len(reviewed & set(done.submission.tolist()))
        out = engine.policy.advantage.compute(done.reward, done.group_of, done)
        known = np.array([value[t] for t in done.submission.tolist()])
        sure = np.isfinite(known)
        np.testing.assert_allclose((done.reward - out)[sure], known[sure])
    assert older > 50
