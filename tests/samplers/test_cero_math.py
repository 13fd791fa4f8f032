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
