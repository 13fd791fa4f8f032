"""CERO's closed forms against what defines them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samplers import cero_theory as theory
from verl_adaptive.samplers import cero_math as cm

positive = st.floats(0.01, 50.0)


@given(a=positive, b=positive, size=st.integers(2, 12))
@settings(max_examples=60)
def test_value_is_the_expected_group_variance_for_any_group_size(a, b, size):
    """Proposition 1, by enumerating the Beta-binomial."""

    def log_beta(x, y):
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    expected = 0.0
    for k in range(size + 1):
        chance = math.comb(size, k) * math.exp(log_beta(a + k, b + size - k) - log_beta(a, b))
        expected += chance * k * (size - k) / (size * (size - 1))
    assert cm.value(np.array([a]), np.array([b]))[0] == pytest.approx(expected, rel=1e-9)


def test_value_is_mean_times_complement_less_variance():
    a, b = np.array([1.0, 3.0, 9.5]), np.array([1.0, 8.0, 0.5])
    m = a / (a + b)
    variance = a * b / ((a + b) ** 2 * (a + b + 1))
    assert cm.value(a, b) == pytest.approx(m * (1 - m) - variance, rel=1e-12)
    assert 4 * cm.value(np.array([1.0]), np.array([1.0]))[0] == pytest.approx(2 / 3, rel=1e-15)  # the duals' start


@given(c=st.floats(0.01, 5.0), theta=st.floats(0.0, 6.0), most=st.floats(0.5, 60.0))
@settings(max_examples=200)
def test_conjugate_and_supporting_exposure_are_the_minimum_and_the_minimiser(c, theta, most):
    s = np.linspace(0.0, most, 200_001)
    objective = theta * s - theory.utility(c, s)
    closed = float(theory.conjugate(theta, c, most))
    assert closed <= objective.min() + 1e-9
    assert closed == pytest.approx(objective.min(), abs=1e-6)
    z = float(theory.supporting_exposure(theta, c, most))
    assert 0.0 <= z <= most
    assert theta * z - theory.utility(c, z) == pytest.approx(closed, abs=1e-9)


def test_no_value_means_no_exposure_and_zero_conjugate():
    assert theory.supporting_exposure(np.array([0.0, 0.3]), np.array([0.0, 0.0]), 10.0).tolist() == [0.0, 0.0]
    assert theory.conjugate(np.array([0.0, 0.3]), np.array([0.0, 0.0]), 10.0).tolist() == [0.0, 0.0]


def test_zero_dual_wants_everything():
    assert theory.supporting_exposure(np.array([0.0]), np.array([0.2]), 12.0)[0] == 12.0


@pytest.mark.parametrize("lam", [0.3, 1.0, 4.0])
def test_utility_is_the_biconjugate_on_the_restricted_domain(lam):
    share, most = 7.0, 30.0
    theta = np.linspace(0.0, lam / share, 400_001)
    for q in (0.02, 0.1, 0.25):
        c = 4 * lam * q / share
        for z in (0.0, 1.0, 5.5, 29.0):
            assert (theta * z - theory.conjugate(theta, c, most)).min() == pytest.approx(theory.utility(c, z), abs=1e-7)


def test_dual_value_bounds_the_optimum_at_any_dual():
    """Weak duality: OPT ≤ K · L(θ, μ) with the round's best feasible allocation inside."""
    rng = np.random.default_rng(0)
    prompts, rounds, n_max, capacity, budget = 30, 40, 2, 12, 300
    share, most = budget / prompts, float(rounds * n_max)
    for _ in range(50):
        c = 4 * rng.uniform(0, 0.25, prompts) / share
        opt = theory.utility(c, theory.oracle(c, budget, most)).sum()
        theta, mu = rng.uniform(0, 1 / share, prompts), rng.uniform(0, 1 / share)
        gain = np.sort(np.maximum(theta - mu, 0))[::-1][: capacity // n_max]
        dual = budget / rounds * mu + n_max * gain.sum() - theory.conjugate(theta, c, most).sum() / rounds
        assert opt <= rounds * dual + 1e-9


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 400))
@settings(max_examples=60)
def test_oracle_water_filling_is_at_least_as_good_as_greedy_units_and_barely_better(seed, budget):
    rng = np.random.default_rng(seed)
    c = rng.uniform(0.001, 0.4, 20)
    most = 15
    z = theory.oracle(c, budget, most)
    assert z.sum() == pytest.approx(min(budget, 20 * most), rel=1e-6)
    assert (z >= 0).all() and (z <= most).all()
    units = np.zeros(20)
    for _ in range(min(budget, 20 * most)):  # greedy on marginal gains, optimal in whole units
        gain = np.where(units < most, theory.utility(c, units + 1) - theory.utility(c, units), -1.0)
        units[np.argmax(gain)] += 1
    greedy, filled = theory.utility(c, units).sum(), theory.utility(c, z).sum()
    assert greedy <= filled + 1e-9
    assert filled - greedy <= 0.15
    inside = (z > 1e-6) & (z < most - 1e-6)
    marginal = c * np.exp(-c * z)
    if inside.sum() > 1:
        assert np.ptp(marginal[inside]) < 1e-6  # one water level


def test_bound_is_capped_and_falls_with_the_square_root_of_the_rounds():
    assert (
        theory.regret_bound(1.0, 2, 64_000, 500, 132, 8_958) == 1.0
    )  # the published run: the theorem says nothing there
    few = theory.regret_bound(1.0, 2, 10 * 10_000, 10_000, 12, 20)
    many = theory.regret_bound(1.0, 2, 10 * 40_000, 40_000, 12, 20)
    assert few == pytest.approx((2 + 10 / 20) / (0.5 * 100))
    assert few / many == pytest.approx(2.0)
    assert theory.regret_bound(1.0, 2, 100_000, 10_000, 12, 20, error=0.001) == pytest.approx(few + 8 * 2 / 0.5 * 0.001)


@given(
    score=st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5]), min_size=1, max_size=40),
    count=st.integers(0, 45),
    above=st.sampled_from([-math.inf, 0.0, 0.15, 0.2, 0.5, 0.9]),
    seed=st.integers(0, 99),
)
@settings(max_examples=400)
def test_best_equals_a_full_sort_ties_at_the_boundary_included(score, count, above, seed):
    tie = np.random.default_rng(seed).permutation(len(score)).astype(np.uint64)
    slow = sorted((i for i in range(len(score)) if score[i] > above), key=lambda i: (-score[i], tie[i]))[:count]
    assert cm.best(np.array(score), tie, count, above).tolist() == slow
