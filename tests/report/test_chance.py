"""Lists of regressed and flip-flopping prompts, and of prompts that differ between runs: nothing by chance, all that is planted."""

from __future__ import annotations

import itertools
from math import comb

import numpy as np
import pytest

from tests.stats.made import make_keys
from verl_adaptive.groups import Groups
from verl_adaptive.report.common import matched
from verl_adaptive.report.judge import FLIPPING, REGRESSED, SUSPECTED
from verl_adaptive.report.lists import lists_of
from verl_adaptive.simulate import make_simulation, parse_pool
from verl_adaptive.simulate.pools import make_pool
from verl_adaptive.stats import StatsTable
from verl_adaptive.stats.chance import as_few, fdr_score, fit_beta, two_rates
from verl_adaptive.stats.history import Flips
from verl_adaptive.stats.prompts import Prompts

PROMPTS, PLANTED = 1500, 8


def visited(rates: np.ndarray, n: int, seed: int, pilots: int = 0) -> Prompts:
    """A store of prompts whose true pass rates are ``(visits, prompts)``; groups whose ``pilots`` are all alike have no others."""
    rng = np.random.default_rng(seed)
    table, flips = StatsTable(), Flips()
    rows = table.rows_for(make_keys(rates.shape[1]), sources=["s"] * rates.shape[1])
    for step, rate in enumerate(rates, start=1):
        right = (rng.random((rates.shape[1], n)) < rate[:, None]).astype(float)
        alike = pilots > 0 and np.ptp(right[:, : pilots or n], axis=1) == 0
        sizes = np.where(alike, pilots, n) + np.zeros(len(rows), dtype=int)
        groups = Groups.from_lists(rows, [row[:size].tolist() for row, size in zip(right, sizes, strict=True)])
        table.observe(groups, step, tolerance=1e-6)
        flips.add(rows, groups.pass_rate, groups.n, len(rows))
    return Prompts(table, {"flips": flips.count, "flipping": flips.flipping(table)})


def frozen(visits: int, seed: int) -> np.ndarray:
    rate = np.random.default_rng(seed).beta(1, 1, PROMPTS)
    return np.repeat(rate[None], visits, axis=0)


@pytest.mark.parametrize(("visits", "n", "pilots"), [(8, 8, 0), (15, 8, 0), (12, 4, 0), (40, 1, 0), (8, 16, 4)])
def test_rates_that_stay_neither_regress_nor_flip(visits, n, pilots) -> None:
    """A quarter of them crosses one half twice, and some fall by half; it was all listed, with a command that deletes it. Four
    pilots that fail counted as a group of ten that does."""
    prompts = visited(frozen(visits, 1), n, 2, pilots)
    assert (prompts.get("change") <= -0.5).any() and (prompts.get("flips") >= 2).sum() > 0.2 * PROMPTS
    assert len(prompts.where(REGRESSED)) <= 1 and len(prompts.where(FLIPPING)) <= 1
    other = matched(prompts, visited(frozen(visits, 1), n, 3, pilots), 5)
    assert other["clearly_better_in_b"] + other["clearly_worse_in_b"] <= 1


def test_the_standard_error_is_that_of_paired_prompts() -> None:
    """Pairs of runs of one world: the difference is within two standard errors nineteen times of twenty."""
    pairs = itertools.pairwise(visited(frozen(2, 1), 8, seed) for seed in range(9))
    found = [matched(a, b, 5) for a, b in pairs]
    off = [abs(p["mean_rate_b"] - p["mean_rate_a"]) / p["standard_error"] for p in found]
    assert np.mean(np.array(off) < 2) > 0.7 and max(off) < 4


def test_what_is_planted_is_found() -> None:
    rates = frozen(12, 4)
    rates[:, :PLANTED], rates[-1, :PLANTED] = 0.9, 0.02
    rates[:, PLANTED : 2 * PLANTED] = np.where(np.arange(12) % 2, 0.95, 0.05)[:, None]
    prompts = visited(rates, 8, 5)
    fallen, flipping = prompts.where(REGRESSED), prompts.where(FLIPPING)
    assert set(range(PLANTED)) <= set(fallen.tolist()) and len(fallen) <= PLANTED + 2
    assert set(range(PLANTED, 2 * PLANTED)) <= set(flipping.tolist()) and len(flipping) <= PLANTED + 2
    lists = {each.title: each for each in lists_of(prompts, 16, 50)}
    for title, rows in (("Regressed", fallen), ("Flip-flopping", flipping)):
        assert np.array_equal(prompts.where(lists[title].where), rows)
        assert np.array_equal(np.setdiff1d(np.arange(PROMPTS), prompts.where(lists[title].keep)), rows)
    better = rates.copy()
    better[:, 20:30], rates[:, 20:30] = 1.0, 0.0
    found = matched(visited(rates, 8, 6), visited(better, 8, 7), 5)
    assert 10 <= found["clearly_better_in_b"] <= 12 and found["clearly_worse_in_b"] <= 2


def test_the_commands_of_a_list_name_all_of_it() -> None:
    """Those of wrong labels named sixty keys, and said that it was all of them."""
    rates = np.full((4, PROMPTS), 0.8)
    rates[:, :100] = 0.0
    prompts = visited(rates, 8, 5)
    found = {each.title: each for each in lists_of(prompts, 16, 50)}
    for each in (found["Likely wrong labels"], found["Never solved"]):
        assert len(each.records) == 50 and set(range(100)) <= set(prompts.where(each.where).tolist())
        assert len(prompts.where(each.where)) == each.total == PROMPTS - len(prompts.where(each.keep))


@pytest.mark.parametrize("n", [1, 8])
def test_a_prompt_that_fell_and_stays_low_has_regressed(n) -> None:
    """Only the latest visit was looked at: after as many low visits as high ones nothing was surprising, with n = 1 never."""
    rates = frozen(40, 4)
    rates[:20, :100], rates[20:, :100] = 0.99, 0.01
    found = visited(rates, n, 2).where(REGRESSED)
    assert (found < 100).sum() >= 70 and (found >= 100).sum() <= 5


def test_a_prompt_that_is_learned_does_not_flip() -> None:
    """It crosses one half, more than once where the noise is; it goes one way."""
    rates = np.repeat(np.linspace(0.05, 0.95, 15)[:, None], PROMPTS, axis=1)
    prompts = visited(rates, 8, 8)
    assert (prompts.get("flips") >= 2).sum() > 0.2 * PROMPTS and len(prompts.where(FLIPPING)) <= 1


def test_the_tests_by_hand() -> None:
    chance = as_few(np.array([1, 0, 5]), np.array([4, 4, 4]), np.array([5, 2, 5]), np.array([12, 12, 12]))
    one = sum(comb(5, k) * comb(7, 4 - k) for k in (0, 1)) / comb(12, 4)
    assert chance[:2] == pytest.approx([one, comb(10, 4) / comb(12, 4)]) and np.isnan(chance[2])
    assert two_rates(np.array([8]), np.array([8]), np.array([0]), np.array([8]))[0] == pytest.approx(2 / comb(16, 8))
    assert not np.signbit(fdr_score(np.array([1.0, 1.0]))).any()  # a list showed -0
    assert fdr_score(np.array([np.nan, np.nan])).tolist() == [0, 0] and len(fdr_score(np.array([]))) == 0


@pytest.mark.parametrize("shape", [(0.3, 0.5), (1.0, 1.0), (4.0, 2.0)])
@pytest.mark.parametrize("n", [2, 8])
def test_the_prior_is_found_whatever_the_group_size(shape, n) -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(*shape, 40_000)
    tried, right = np.full(40_000, float(n)), rng.binomial(n, p).astype(float)
    assert fit_beta(tried, right) == pytest.approx(shape, rel=0.1)


def test_what_a_sampler_skips_is_not_suspected() -> None:
    """`greso` rolls out most what is half solved: by rollouts the source looked so, and 81 hopeless prompts of 1200 surprised."""
    world = make_pool(parse_pool("mixed:prompts=1200,sources=3,told=0.8"), 1)
    simulation = make_simulation("greso", world, batch=64, n=8, steps=80, seed=0)
    assert len(list(simulation)) == 80
    assert len(Prompts(simulation.engine.table).where(SUSPECTED)) <= 12  # one in two hundred is six


def test_the_prior_of_extreme_traces_is_proper() -> None:
    for successes in (0.0, 8.0):
        a, b = fit_beta(np.full(10, 8.0), np.full(10, successes))
        assert a > 0 and b > 0
    assert sum(fit_beta(np.ones(10), np.ones(10))) == pytest.approx(1.0)
