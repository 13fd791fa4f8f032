"""MoPPS: the posterior, the variates, and that it finds prompts of medium difficulty."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.samplers.bound import bound, groups_of, known, progress_at
from tests.world import make_engine
from verl_adaptive.rng import Draw
from verl_adaptive.samplers.beta_posterior import draw_beta
from verl_adaptive.samplers.mopps import Mopps


def make_mopps(M: int = 200, **options) -> Mopps:
    return bound(Mopps(options), M)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.5, 0.5), (3.0, 7.0), (40.0, 2.0), (0.3, 250.0)])
def test_beta_variates_have_the_distribution(a, b):
    """Kolmogorov-Smirnov distance to numpy's own variates, at the 0.1 % level."""
    n = 20_000
    key = np.arange(n, dtype=np.uint64)
    ours = np.sort(draw_beta(np.full(n, a), np.full(n, b), Draw(0, 1), "t", key, key + np.uint64(7)))
    theirs = np.sort(np.random.default_rng(1).beta(a, b, n))
    every = np.concatenate([ours, theirs])
    gap = np.searchsorted(ours, every, "right") / n - np.searchsorted(theirs, every, "right") / n
    assert np.abs(gap).max() < 1.95 * math.sqrt(2 / n)


def test_posterior_follows_the_discounted_update():
    part = make_mopps(3, decay=0.5, a0=2.0, b0=3.0)
    a, b = 2.0, 3.0
    for step, won in enumerate([8, 2, 5], 1):
        part.observe(groups_of([1], [won], [8]), progress_at(step))
        a, b = 0.5 * a + 0.5 * 2.0 + won, 0.5 * b + 0.5 * 3.0 + (8 - won)
        assert 2.0 + part.col("wins")[1] == pytest.approx(a) and 3.0 + part.col("losses")[1] == pytest.approx(b)
    assert not part.col("wins")[[0, 2]].any()


def test_a_prompt_that_always_fails_does_not_take_the_re_check_share():
    """Three prompts of a pool of 60 never come back; the others must all be seen again and again."""
    p = np.where(np.arange(60) % 2, 0.5, 1.0)
    engine, world = make_engine({"name": "mopps", "recheck": 0.25, "candidates": 3.0}, p=p, batch=8, n=4, steps=400)
    broken = np.arange(60) < 3
    asked = np.zeros(60, dtype=int)
    for step in range(1, 201):
        requests = engine.begin(step)
        while requests is not None:
            back = world.roll(requests)
            back.failed |= broken[back.index]
            asked[requests.index] += 1
            requests = engine.receive(back)
        engine.finish()
    assert engine.table.col("visits")[broken].tolist() == [0, 0, 0]
    solved = (p == 1.0) & ~broken
    assert asked[broken].max() < 3 * np.median(asked[solved])
    assert engine.table.col("last_step")[~broken].min() > 150


def test_the_re_check_share_is_not_what_a_full_batch_aborts() -> None:
    """The last submissions of a step are asked for in case: the prompts tried longest ago must not be those, step after step."""
    part = make_mopps(200, recheck=0.1)
    part.table.col("last_try")[:] = np.arange(200)
    rows = part.pick(np.arange(200), 40, progress_at(200)).rows
    assert set(rows[:4].tolist()) == {0, 1, 2, 3}


def test_picks_the_sampled_rates_nearest_to_the_target():
    part = make_mopps(300, recheck=0.0, candidates=1000.0)
    rng = np.random.default_rng(0)
    part.col("wins")[:], part.col("losses")[:] = rng.integers(0, 30, 300), rng.integers(0, 30, 300)
    pick = part.pick(np.arange(300), 20, progress_at(5))
    key_hi, key_lo = part.table.key_hi, part.table.key_lo
    rate = draw_beta(1 + part.col("wins"), 1 + part.col("losses"), Draw(0, 5), "mopps.rate", key_hi, key_lo)
    assert pick.rows.tolist() == np.argsort(np.abs(rate - 0.5), kind="stable")[:20].tolist()
    assert pick.n is None


def test_candidates_are_a_uniform_sample():
    part = make_mopps(400, recheck=0.0, candidates=1.0)  # as many candidates as picks: no preference at all
    counts = np.zeros(400)
    for step in range(1, 401):
        counts[part.pick(np.arange(400), 40, progress_at(step)).rows] += 1
    assert counts.mean() == 40 and counts.var() == pytest.approx(36, rel=0.25)


def test_the_prior_of_a_source_is_its_mean_latest_rate():
    part = bound(Mopps({"source_prior": 6.0, "a0": 1.0, "b0": 2.0}), 5, sources=["a", "a", "a", "b", "c"])
    part.table.col("visits")[[0, 1, 3]] = [1, 5, 2]
    part.table.col("last_rate")[[0, 1, 3]] = [0.25, 0.75, 0.0]
    a, b = part._posterior(np.arange(5))
    mean = [(1 + 1.0) / (3 + 2)] * 3 + [1 / (3 + 1), 1 / 3]
    assert a == pytest.approx(6 * np.array(mean)) and a + b == pytest.approx(np.full(5, 6.0))


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_a_warm_start_counts_as_the_visits_it_is_worth(decay):
    table = known(rollouts=[32, 0, 4], successes=[16.0, 0.0, 3.0])
    part, replayed = bound(Mopps({"decay": decay}), 3, table=table), make_mopps(3, decay=decay)
    for _ in range(4):
        replayed.observe(groups_of([0], [4], [8]), progress_at(1))
    replayed.observe(groups_of([2], [3], [4]), progress_at(1))
    for name in ("wins", "losses"):
        np.testing.assert_allclose(part.col(name), replayed.col(name))


def test_a_resume_does_not_take_the_warm_start_again():
    table = known(rollouts=[32, 32], successes=[16.0, 16.0])
    first = bound(Mopps(), 2, table=table)
    visit = groups_of([0], [8], [8])
    table.observe(visit, 1, tolerance=1e-6)
    first.observe(visit, progress_at(1))
    before = first.col("wins").copy()
    assert before.tolist() == [24.0, 16.0]
    bound(Mopps(), 2, table=table)
    assert table.col("mopps.wins").tolist() == before.tolist()


def test_any_number_of_candidates_is_the_whole_pool_at_most():
    part = make_mopps(8, candidates=1e308)
    assert len(part.pick(np.arange(8), 10, progress_at(1)).rows) == 8
