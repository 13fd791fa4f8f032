"""The memory as baseline: golden traces against slow loops, what it promises, resume, and every trainer mode's before."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.reference import SlowBaseline, SlowMemory
from tests.world import Arrivals, World, keys_of, make_engine, make_stream_engine, run_step
from verl_adaptive.advantages.memory import MemoryBaseline
from verl_adaptive.config import RunFacts
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.stats import read_snapshot, write_snapshot
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.testing.advantages import AdvantageConformance

PROMPTS = 12
SOURCES = [("sums", "products", "words")[i % 3] for i in range(PROMPTS)]


def bound(options=None, table=None, stale_discount=1.0) -> MemoryBaseline:
    made, table = MemoryBaseline(options or {}), StatsTable() if table is None else table
    table.rows_for(keys_of(PROMPTS), sources=SOURCES)
    made.bind(table, RunFacts(batch=4, n=4, steps=1, prompts=PROMPTS, stale_discount=stale_discount))
    return made


def see(made: MemoryBaseline, groups: Groups, step: int = 1) -> np.ndarray:
    """A step as the engine and the trainer make it: observe, close, compute."""
    progress = Progress(step=step, batch=4, draw=Draw(0, step))
    made.table.observe(groups, step, tolerance=1e-6)
    made.observe(groups, progress)
    made.end_step(progress)
    return made.compute(groups.reward, groups.group_of, groups)


class TestConformance(AdvantageConformance):
    per_group = False  # one scale for all

    def make(self):
        return MemoryBaseline({})


class TestConformanceOfSpo(AdvantageConformance):
    per_group = False

    def make(self):
        return MemoryBaseline(
            {"decay": 0.875, "strength": 8.0, "prior": "all", "fade_prior": True, "shrink": 0.0, "scale": "whiten"}
        )


class TestConformanceWithoutSmall(AdvantageConformance):
    per_group = False

    def make(self):
        return MemoryBaseline({"skip_small": 0.2, "scale": "none"})


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
        "fade_prior": st.booleans(),
        "shrink": st.sampled_from([0.5, 4.0]),
        "scale": st.sampled_from(["running", "whiten", "none"]),
    }
)


@settings(max_examples=60)
@given(histories(), OPTIONS)
def test_golden_trace(history, options) -> None:
    made = bound(options, stale_discount=0.8)
    memory = SlowMemory(
        SOURCES, options["decay"], options["strength"], options["prior"] == "source", options["fade_prior"]
    )
    slow = SlowBaseline(memory, options["shrink"], options["scale"])
    for number, step in enumerate(history, 1):
        out = see(made, groups_of(step), number)
        expected = slow.step([(p, rewards, 0.8**lag) for p, rewards, lag in step])
        # A whitened batch of equal surprises is rounding over 1e-8.
        tight = options["scale"] != "whiten" or np.ptp(expected) > 1e-3
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7 if tight else 1e-3)


@settings(max_examples=40)
@given(histories("continuous"), st.floats(0.01, 50), st.floats(-20, 20))
def test_units_of_the_reward_do_not_matter(history, a, b) -> None:
    """r → a r + b with a > 0 changes no advantage: 0/1, ±1 and shaped rewards are one case."""
    one, other = bound(), bound()
    for number, step in enumerate(history, 1):
        moved = [(p, [a * r + b for r in rewards], lag) for p, rewards, lag in step]
        x, y = see(one, groups_of(step), number), see(other, groups_of(moved), number)
        if one.scale > 1e-3:  # all rewards equal: rounding over rounding
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(histories("binary"), st.data())
def test_a_reward_does_not_move_its_own_baseline(history, data) -> None:
    """*Before*: whatever the last step's rewards of a prompt are, what is subtracted from a single rollout is the same."""
    options = {"scale": "none"}
    one, other = bound(options), bound(options)
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
    made = bound({"decay": 0.5, "strength": 2.0, "scale": "none"})
    # Nothing known: the mean of the other two rollouts.
    out = see(made, Groups.from_lists([0, 1, 3], [[1], [0], [1]]))
    np.testing.assert_allclose(out, [1 - 1 / 2, 0 - 1, 1 - 1 / 2])
    # All: 2/3. Source of prompts 0 and 3: (2 · 2/3 + 2) / 4 = 5/6; of 1: (2 · 2/3 + 0) / 3 = 4/9; of 2: 2/3.
    out = see(made, Groups.from_lists([0, 4, 2], [[0], [1], [1]]), 2)
    np.testing.assert_allclose(out, [0 - (1 + 2 * 5 / 6) / 3, 1 - 4 / 9, 1 - 2 / 3])
    assert (made.memory.col("sum")[0], made.memory.col("count")[0]) == (0.5, 1.5)
    # Two rollouts: the other one, and the value for two more.
    v = (0.5 + 2 * made.memory._prior[made.table.col("source")[0]]) / 3.5
    out = see(bound_like(made, shrink=2.0), Groups.from_lists([0], [[1, 0]]), 3)
    np.testing.assert_allclose(out, [1 - (0 + 2 * v) / 3, 0 - (1 + 2 * v) / 3])


def bound_like(made: MemoryBaseline, **options) -> MemoryBaseline:
    """The same memory under changed options."""
    made.config = type(made.config)(**{**vars(made.config), **options})
    return made


def test_a_prompt_twice_in_a_step_has_one_value() -> None:
    made = bound({"scale": "none"})
    see(made, Groups.from_lists([0, 1], [[1], [0]]))
    value = made.memory.value(np.array([0]))[0]
    progress = Progress(step=2, batch=4, draw=Draw(0, 2))
    one, two = Groups.from_lists([0], [[1]]), Groups.from_lists([0], [[0]], ticket=[1])
    made.observe(one, progress)  # two rounds of one step
    made.observe(two, progress)
    assert made.col("before")[0] == value
    np.testing.assert_allclose(made.compute(two.reward, two.group_of, two), 0 - value)


def test_the_scale_follows_slowly_and_has_a_floor() -> None:
    made = bound()
    rng = np.random.default_rng(0)
    for step in range(1, 40):
        see(made, Groups.from_lists(range(PROMPTS), rng.integers(0, 2, (PROMPTS, 1)).tolist()), step)
    settled = made.scale
    assert 0.4 < settled < 0.7
    for step in range(40, 400):  # from here on all is solved
        out = see(made, Groups.from_lists(range(PROMPTS), [[1]] * PROMPTS), step)
    assert made.scale < 0.2 * settled
    rewards = 12 * 39, 12 * 361
    share = (rewards[0] / 2 + rewards[1]) / sum(rewards)
    assert made.scale == pytest.approx(0.1 * math.sqrt(share * (1 - share)), rel=0.1)
    assert np.abs(out).max() < 0.05  # noise is not blown up


def test_a_step_reviewed_in_many_looks_is_one_step() -> None:
    """Asynchronous trainers review what is back every tenth of a second, often a single group."""

    def told(look: int) -> list[dict[str, float]]:
        draw, made, table = np.random.default_rng(0), MemoryBaseline({}), StatsTable()
        table.rows_for(keys_of(256))
        made.bind(table, RunFacts(batch=256, n=1, steps=3, prompts=256))
        rate, out = draw.beta(1, 1, 256), []
        for step in (1, 2, 3):
            progress = Progress(step=step, batch=256, draw=Draw(0, step))
            reward = (draw.random(256) < rate).astype(float)
            for at in range(0, 256, look):
                rows = np.arange(at, min(at + look, 256))
                made.observe(Groups.from_lists(rows, [[r] for r in reward[rows]]), progress)
            made.end_step(progress)
            out.append(made.metrics())
        return out

    whole = told(256)
    assert whole[2]["explained_share"] > 0.1 and 0.4 < whole[0]["scale"] < 0.6
    for look in (1, 3, 100):
        for mine, all_at_once in zip(told(look), whole, strict=True):
            # in the first step values are means of the others, few of them at first
            assert mine["scale"] == pytest.approx(all_at_once["scale"], rel=0.03)
            assert mine["explained_share"] == pytest.approx(all_at_once["explained_share"], abs=0.03)


def test_equal_rewards_from_the_start_are_uninformative() -> None:
    made = bound()
    for step in range(1, 4):
        out = see(made, Groups.from_lists([0, 1, 2], [[0.3], [0.3, 0.3], [0.3]]), step)
        np.testing.assert_allclose(out, 0, atol=1e-6)
    assert see(bound(), Groups.from_lists([0], [[1.0]])).tolist() == [0.0]


def test_a_flat_group_is_a_lesson_where_it_is_a_surprise() -> None:
    made = bound({"scale": "none"})
    for step in range(1, 20):
        see(made, Groups.from_lists([0, 1], [[1, 1], [0, 0]]), step)
    surprise = see(made, Groups.from_lists([0, 1], [[0, 0], [0, 0]]), 20)
    assert (surprise[:2] < -0.5).all() and np.abs(surprise[2:]).max() < 0.1


def test_small_advantages_are_zero_and_say_so() -> None:
    made = bound({"skip_small": 0.3})
    for step in range(1, 30):
        see(made, Groups.from_lists([0, 1, 2], [[1], [0], [step % 2]]), step)
    groups = Groups.from_lists([0, 1, 2], [[1], [0], [1]])
    out = see(made, groups, 30)
    zero = made.zero(groups, np.ones(3, dtype=bool))
    assert zero.tolist() == [True, True, False] == (out == 0).tolist()
    assert not bound().zero(groups, np.ones(3, dtype=bool)).any()


def test_skipped_rows_leave_training_and_are_accounted() -> None:
    p = np.concatenate([np.ones(30), np.zeros(30), np.full(4, 0.5)])
    engine, world = make_engine(advantage={"name": "memory", "skip_small": 0.25}, n=1, batch=32, p=p)
    for step in range(1, 30):
        result = run_step(engine, world, step)
        assert result.ledger.rollouts.balanced()
    assert result.ghost.sum() > 20 and result.trained.all()
    assert result.ledger.rollouts.dropped == {"zero_advantage": int(result.ghost.sum())}
    everything, world = make_engine(
        advantage={"name": "memory", "skip_small": 0.25}, n=1, batch=32, p=p, skip_zero=False
    )
    for step in range(1, 30):
        result = run_step(everything, world, step)
    assert result.trains.all()  # where such rows must stay, they do


@pytest.mark.parametrize("scale", ["running", "none", "whiten"])
@pytest.mark.parametrize("kept", ["keep_all", "aero"])
def test_leaving_rows_out_changes_no_other_rows_advantage(scale, kept) -> None:
    """Of a group some rollouts may be small, and not others: their rewards stay in the others' baseline."""
    options = {"name": "memory", "skip_small": 0.3, "scale": scale}
    engine, world = make_engine("epoch", "fixed", kept, options, n=4, batch=8, rounds=False)
    left_out = 0
    for step in range(1, 10):
        result = run_step(engine, world, step)
        inside = result.groups.rollout_mask(result.trained)
        groups, trains, ghost = result.groups.select(result.trained), result.trains[inside], result.ghost[inside]
        role, every = engine.policy.advantage, trains | ghost
        whole, some = np.zeros(groups.rollouts), np.zeros(groups.rollouts)
        whole[every] = role.compute(groups.reward[every], groups.group_of[every], groups)
        some[trains] = role.compute(groups.reward[trains], groups.group_of[trains], groups)
        np.testing.assert_allclose(some[trains], whole[trains], rtol=1e-12, atol=1e-12)
        assert not whole[ghost].any()
        left_out += int(ghost.sum())
    assert (left_out > 0) == (scale != "whiten")


def test_the_signal_is_not_the_reward() -> None:
    """``adaptive.signal=acc`` decides difficulty; what is subtracted from a reward is in the reward's units."""
    made = bound({"scale": "none"})
    for step in range(1, 60):
        groups = Groups.from_lists([0, 1], [[-2.0], [2.0]], signal=[[1.0], [0.0]], success=[[1.0], [0.0]])
        out = see(made, groups, step)
    np.testing.assert_allclose(out, [0, 0], atol=1.0)
    value = made.memory.value(np.array([0, 1]))
    assert value[0] < -1 and value[1] > 1


def test_old_evidence_counts_less() -> None:
    fresh, stale = bound(stale_discount=0.5), bound(stale_discount=0.5)
    see(fresh, Groups.from_lists([0], [[1]], lag=[0]))
    see(stale, Groups.from_lists([0], [[1]], lag=[2]))
    assert fresh.memory.col("count")[0] == 1 and stale.memory.col("count")[0] == 0.25


def test_failed_groups_leave_no_trace() -> None:
    engine, world = make_engine(advantage="memory", n=1, batch=16, world=World(np.full(40, 0.5), failure=0.4))
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
    made = bound({"scale": "none"}, table)
    np.testing.assert_allclose(made.memory.col("count")[:5], [8, 8, 8, 8, 0])
    value = made.memory.value(np.arange(PROMPTS))
    assert value[0] < 0.4 < value[1] and np.isfinite(value).all()
    assert value[4] == pytest.approx((2 * 0.5625 + 1) / 3)  # not seen: its source, in which prompt 1 is all right
    out = see(made, Groups.from_lists([1, 0], [[0], [1]]))  # no need of the batch's mean
    np.testing.assert_allclose(out, [-value[1], 1 - value[0]])
    heavy = bound({"decay": 0.5}, None)
    heavy.table.col("rollouts")[0], heavy.table.col("reward_sum")[0] = 100, 50
    heavy.bind(heavy.table, heavy.facts)
    assert heavy.memory.col("count")[0] == 2  # no more than visits would have left


# -- resume -------------------------------------------------------------------------------------------------


def decisions(engine, world, first, last):
    out = []
    for step in range(first, last + 1):
        result = run_step(engine, world, step)
        groups = result.groups.select(result.trained)
        value = engine.policy.advantage.compute(groups.reward, groups.group_of, groups)
        out.append((groups.index.tolist(), groups.reward.tolist(), value.tolist()))
    return out


@pytest.mark.parametrize("rounds", [True, False], ids=["rounds", "ordered"])
@pytest.mark.parametrize("n", [1, 2])
def test_resume_through_a_snapshot_is_bit_exact(n, rounds, tmp_path) -> None:
    options = {"sampler": "spread", "advantage": "memory", "n": n, "batch": 12, "rounds": rounds}
    options["p"] = np.linspace(0, 1, 50) ** 0.7

    def fresh(table=None):
        world = World(options["p"], 3, low=-1.0, high=2.5)
        table = StatsTable() if table is None else table
        table.rows_for(keys_of(50), sources=[f"s{i % 4}" for i in range(50)])
        parts = {k: v for k, v in options.items() if k != "p"}
        return make_engine(**parts, world=world, table=table)

    whole, world = fresh()
    expected = decisions(whole, world, 1, 20)
    engine, world = fresh()
    got = decisions(engine, world, 1, 11)
    write_snapshot(tmp_path / "adaptive", engine.table, {"engine": engine.state_dict()}, meta={"step": 11})
    table, state, _ = read_snapshot(tmp_path / "adaptive")
    again, _ = fresh(table)
    again.load_state_dict(state["engine"])
    got += decisions(again, world, 12, 20)
    assert got == expected
    assert again.policy.metrics() == whole.policy.metrics()


# -- asynchronous trainers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [True, False], ids=["rounds", "ordered"])
def test_before_is_the_beginning_of_the_step(rounds) -> None:
    engine, world = make_engine(
        "spread", advantage={"name": "memory", "scale": "none"}, n=1, batch=8, M=60, rounds=rounds
    )
    world.failure = 0.3  # failed groups are replaced in the same step
    for step in range(1, 40):
        value = engine.policy.advantage.memory.value(np.arange(60))
        result = run_step(engine, world, step)
        done = result.groups.select(result.trained)
        assert len(done) == 8
        out = engine.policy.advantage.compute(done.reward, done.group_of, done)
        if step > 1:
            np.testing.assert_allclose(done.reward - out, value[done.row])


def test_before_is_the_beginning_of_the_step_of_the_review() -> None:
    """Groups that are reviewed steps before they train keep the value that stood when they were reviewed."""
    engine, world = make_stream_engine(
        "spread", advantage={"name": "memory", "scale": "none"}, n=1, batch=8, M=60, stream=AsyncFacts(warmup=16)
    )
    arrivals, memory = Arrivals(world, 5), engine.policy.advantage.memory
    value = {}  # by ticket
    observe = engine.policy.advantage.observe

    def overheard(groups, progress):
        value.update(zip(groups.ticket.tolist(), at_begin[groups.row].tolist(), strict=True))
        observe(groups, progress)

    engine.policy.advantage.observe = overheard
    older = 0
    for step in range(1, 30):
        at_begin = memory.value(np.arange(60))
        reviewed = set(engine.ready.groups.ticket.tolist())
        groups = arrivals.step(engine, step)
        done = groups.groups.select(groups.trained)
        older += len(reviewed & set(done.ticket.tolist()))
        out = engine.policy.advantage.compute(done.reward, done.group_of, done)
        known = np.array([value[t] for t in done.ticket.tolist()])
        sure = np.isfinite(known)
        np.testing.assert_allclose((done.reward - out)[sure], known[sure])
    assert older > 50


def test_resume_of_an_asynchronous_run(tmp_path) -> None:
    def fresh(table=None):
        return make_stream_engine(
            "spread", advantage="memory", n=1, batch=8, M=60, table=table, stream=AsyncFacts(warmup=16)
        )

    engine, world = fresh()
    arrivals = Arrivals(world, 5)
    step = 0
    while step < 8 or not len(engine.ready.groups):
        step += 1
        arrivals.step(engine, step)
    write_snapshot(tmp_path / "adaptive", engine.table, {"engine": engine.state_dict()}, meta={"step": step})
    table, state, _ = read_snapshot(tmp_path / "adaptive")
    again, _ = fresh(table)
    again.load_state_dict(state["engine"])
    for name in engine.table.columns:
        np.testing.assert_array_equal(engine.table.col(name), table.col(name), err_msg=name)
    ready = engine.ready.groups
    a, b = (e.policy.advantage.compute(ready.reward, ready.group_of, ready) for e in (engine, again))
    assert a.tolist() == b.tolist() and np.abs(a).max() > 0


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"decay": 1.5}, "decay"),
        ({"strength": 0.0}, "strength"),
        ({"shrink": -1.0}, "shrink"),
        ({"scale": "x"}, "scale"),
    ],
)
def test_settings_that_cannot_work(options, key) -> None:
    with pytest.raises(ConfigError, match=rf"^adaptive\.advantage\.{key}="):
        MemoryBaseline(options)


@pytest.mark.parametrize("rounds", [True, False])
def test_rows_left_out_of_the_first_step_have_zero_advantage_beside_failed_groups(rounds) -> None:
    """Where nothing is known yet the batch's mean stands for the value: the mean of what trains, in either place."""
    left_out = 0
    for seed in range(10):
        engine, world = make_engine(
            advantage={"name": "memory", "skip_small": 0.25}, n=2, batch=16, M=64, seed=seed, rounds=rounds
        )
        requests = engine.begin(1)
        while requests is not None:
            groups = world.roll(requests)
            groups.failed[1::3] = requests.stage[1::3] == 0
            groups.reward[groups.rollout_mask(groups.failed)] = 5.0
            requests = engine.receive(groups)
        result = engine.finish()
        trained = result.groups.select(result.trained)
        ghost = result.ghost[result.groups.rollout_mask(result.trained)]
        advantage = engine.policy.advantage.compute(trained.reward, trained.group_of, trained)
        left_out += ghost.sum()
        assert (advantage[ghost] == 0).all()
    assert left_out
