"""Rewards, streams and the learning pool against slow, obvious references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptive.advantages.verl import group_relative
from verl_adaptive.engine import Requests
from verl_adaptive.errors import ConfigError
from verl_adaptive.rng import Draw
from verl_adaptive.simulate import PoolConfig, make_simulation, parse_pool
from verl_adaptive.simulate.learning import LIMIT, LearningConfig, LearningWorld, advantages
from verl_adaptive.simulate.pools import make_pool, source_of, starting_rates
from verl_adaptive.simulate.worlds import StaticWorld, WorldPrompts, draw_groups


def requests(submission, n, stage=0, index=None) -> Requests:
    submission = np.asarray(submission, dtype=np.int64)
    index = np.arange(len(submission)) if index is None else np.asarray(index)
    return Requests(
        submission, index, index, np.asarray(n, dtype=np.int64), np.full(len(submission), stage, dtype=np.int64)
    )


# -- rewards ----------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    stage=st.integers(0, 5),
    seed=st.integers(0, 2**40),
    p=st.floats(0, 1),
)
@settings(max_examples=60)
def test_rewards_equal_a_loop_over_rollouts(sizes, stage, seed, p) -> None:
    asked = requests(np.arange(len(sizes)) * 7 + 3, sizes, stage)
    made = draw_groups(asked, np.full(len(sizes), p), seed, tokens=100.0)
    at = 0
    for g, n in enumerate(sizes):
        for k in range(n):
            bits = int(Draw(seed, 0).bits("world.reward", asked.submission[g], np.uint64(stage * 2**20 + k)))
            right = (bits >> 11) * 2.0**-53 < p
            assert made.reward[at] == made.success[at] == float(right)
            assert made.tokens[at] == int(100 * (0.5 + (bits % 2048) / 2048))
            at += 1
    assert at == made.rollouts and made.n.tolist() == sizes


def test_a_failed_group_loses_half_of_its_rollouts() -> None:
    made = draw_groups(requests(np.arange(4_000), np.full(4_000, 7)), np.full(4_000, 0.5), 1, failure=0.1)
    assert made.failed.mean() == pytest.approx(0.1, abs=0.02)
    assert set(made.n[made.failed]) == {3} and set(made.lost[made.failed]) == {4}
    assert set(made.n[~made.failed]) == {7} and not made.lost[~made.failed].any()


def test_a_failed_topup_leaves_its_group_what_it_has() -> None:
    """As in training: what was explored stays, and the group closes."""
    world = StaticWorld(np.full(400, 0.05), 0, failure=0.3)
    outcomes = set()
    for result in make_simulation("aero", world, batch=64, n=8, steps=4):
        groups = result.groups
        topped = groups.reduce(np.maximum, groups.stage) > 0
        assert not (groups.failed & topped).any()
        outcomes |= set(result.outcome[topped & (groups.lost > 0)].tolist())
    assert "trained" in outcomes


def test_a_stream_goes_through_the_data_once_an_epoch_however_it_is_cut() -> None:
    whole = WorldPrompts(37, 4).take(37 * 3)
    for epoch in np.split(whole, 3):
        assert sorted(epoch) == list(range(37))
    cut, rng = WorldPrompts(37, 4), np.random.default_rng(0)
    parts: list[int] = []
    while len(parts) < len(whole):
        parts += cut.take(int(min(rng.integers(1, 60), len(whole) - len(parts)))).tolist()
    assert parts == whole.tolist() and cut.position == len(whole)
    resumed = WorldPrompts(37, 4)
    resumed.position = 50
    assert resumed.take(20).tolist() == whole[50:70].tolist()


# -- learning ---------------------------------------------------------------------------------------------------------


class SlowLearner:
    """The equations of the module, one rollout and one step at a time; fading is applied in every step."""

    def __init__(self, world: LearningWorld) -> None:
        self.config, self.start = world.config, world.start.tolist()
        self.topic_of, self.follows = world.topic_of.tolist(), world.follows.tolist()
        self.own, self.topic = [0.0] * len(self.start), [0.0] * world.config.topics

    def rate(self, i: int) -> float:
        x = self.start[i] + self.own[i] + self.follows[i] * self.topic[self.topic_of[i]]
        return 1 / (1 + math.exp(-min(max(x, -LIMIT), LIMIT)))

    def learn(self, result, policy, batch: int) -> None:
        c, groups = self.config, result.groups
        rate = [self.rate(i) for i in range(len(self.start))]
        self.own = [x * math.exp(-c.forget) for x in self.own]
        rows = sum(bool(t or g) for t, g in zip(result.trains, result.zero_row, strict=True))
        weight = advantages(result, policy)
        for g in range(len(groups)):
            if not result.trained[g]:
                continue
            i, pull = int(groups.index[g]), 0.0
            for j in range(groups.offsets[g], groups.offsets[g + 1]):
                pull += weight[j] * (groups.success[j] - rate[i])
            self.own[i] += c.rate * batch / rows * pull
            self.topic[self.topic_of[i]] += c.spill * c.topics / batch * batch / rows * pull


@pytest.mark.parametrize(
    "preset", ["grpo", "greso", "aero", "dapo adaptive/sampler=mopps_by_source adaptive/allocator=aero", "pilot_commit"]
)
def test_the_pool_learns_as_the_slow_reference(preset) -> None:
    config = LearningConfig(rate=0.7, spill=0.3, topics=3, forget=0.05)
    p = np.random.default_rng(0).random(60)
    p[:10] = 0.0  # hopeless: such a prompt moves by its topic only
    world = LearningWorld(p, 0, config)
    assert world.rates() == pytest.approx(p, abs=1e-3)
    slow = SlowLearner(world)
    simulation = make_simulation(preset, world, batch=8, n=8, steps=12)
    while not simulation.finished:
        learn = world.learn
        world.learn = lambda *a: None  # type: ignore[method-assign]
        result = simulation.run_step()
        world.learn = learn  # type: ignore[method-assign]
        slow.learn(result, simulation.engine.policy, 8)
        world.learn(result, advantages(result, simulation.engine.policy), simulation.step)
        assert world.rates() == pytest.approx([slow.rate(i) for i in range(60)], abs=1e-12)
    assert world.rates().mean() > p.mean() + 0.02


def test_a_whole_group_pulls_with_its_deviation() -> None:
    """Under GRPO the gradient on a prompt's own logit is the deviation of its rewards: 0 without variance."""
    reward, home = np.array([1.0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]), np.repeat([0, 1, 2], 4)
    weight = group_relative(reward, home, 3)
    for p in (0.1, 0.6):
        pull = np.bincount(home, weight * (reward - p)) / 4
        unbiased = [np.std(reward[home == g], ddof=1) for g in range(3)]
        exact = [np.var(reward[home == g]) / (s + 1e-6) for g, s in enumerate(unbiased)]
        assert pull == pytest.approx(exact, abs=1e-12)
    assert group_relative(np.array([0.7]), np.array([0]), 1).tolist() == [0.7]


def test_a_step_of_equal_rewards_teaches_nothing() -> None:
    """Of such a step one row trains, and had its bare reward for advantage; in training it has none."""
    world = LearningWorld(np.repeat([0.0, 1.0], 30), 0)
    simulation = make_simulation("grpo", world, batch=4, n=8, steps=3)
    while not simulation.finished:
        result = simulation.run_step()
        assert result.trains.sum() == 1 and not advantages(result, simulation.engine.policy).any()


# -- pools ------------------------------------------------------------------------------------------------------------


def test_a_pool_is_the_mixture_it_says() -> None:
    p = starting_rates(PoolConfig(prompts=50_000, hopeless=0.3, solved=0.2, centre=0.0), 0)
    assert (p < 0.012).mean() == pytest.approx(0.3, abs=0.01)
    assert (p > 0.97).mean() == pytest.approx(0.2 + 0.5 * 0.0103, abs=0.01)
    assert np.median(p[(p > 0.012) & (p < 0.97)]) == pytest.approx(0.5, abs=0.02)
    assert not np.array_equal(p, starting_rates(PoolConfig(prompts=50_000), 1))


@pytest.mark.parametrize("told", [0.0, 0.5, 0.9, 1.0])
def test_sources_say_as_much_of_difficulty_as_they_are_told(told) -> None:
    config = PoolConfig(prompts=20_000, sources=10, told=told)
    rates = starting_rates(config, 0)
    source = source_of(config, 0, rates)
    assert np.bincount(source).tolist() == [2_000] * 10
    score = np.empty(20_000)
    score[np.argsort(rates, kind="stable")] = np.sort(np.random.default_rng(0).standard_normal(20_000))
    between = np.array([score[source == k].mean() for k in range(10)])[source]
    assert np.sqrt(between.var() / score.var()) == pytest.approx(told, abs=0.05)
    assert make_pool(config, 0).sources[7] == f"source {source[7]}" and make_pool(PoolConfig(), 0).sources is None


def test_a_pool_is_named_and_changed_in_words() -> None:
    pool = parse_pool("hard:prompts=100,spill=0.5,topics=3")
    assert (pool.prompts, pool.hopeless, pool.spill, pool.topics) == (100, 0.5, 0.5, 3)
    assert make_pool(pool, 0).size == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixd", "did you mean mixed"),
        ("zzz", "there are mixed"),
        ("mixed:hopless=1", "did you mean --pool mixed.hopeless"),
        ("mixed:spill", "key=value"),
        ("mixed:spill=x", "must be a number"),
        ("mixed:hopeless=0.9", "exceeds 1"),
        ("mixed:prompts=0", "1 or greater"),
        ("mixed:forget=-1", "0 or greater"),
        ("mixed:sources=0", "1 or greater"),
        ("mixed:told=2", r"must be in \[0, 1\]"),
        ("mixed:spread=nan", "must be a number"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_pool(text)
