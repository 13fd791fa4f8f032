"""CERO's closed forms against what defines them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
