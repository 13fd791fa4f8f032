"""Likely wrong labels: prompts that the model fails although it solves their data source's others.

A prompt with ``s`` successes in ``r`` rollouts is surprising by how unlikely it is that a prompt of its source does so
badly. The source's prompts have pass rates of Beta(a, b), fitted by moments, so that ``P(S <= s)`` is the beta-binomial's; the
surprise is ``-log10`` of it. A hard source has many prompts that nobody solves, and none of them is surprising; an easy
one has few, and each of them is.
"""

from __future__ import annotations

import math

import numpy as np

from verl_adaptive.stats.chance import fit_beta
from verl_adaptive.stats.table import StatsTable

#: Surprise from which a prompt is listed: one prompt in two hundred of its source does as badly by chance.
SURPRISING = 2.3
#: Success share up to which a label is suspected at all: a wrong label may match a lucky wrong answer now and then.
_LUCKY = 0.05
#: Rollouts below which nothing is said of a prompt.
_LEAST = 8
#: Prompts of a source from which it is known what is usual.
_USUAL = 20
#: Successes up to which the tail is added up one by one.
_TERMS = 64


def surprise(successes: np.ndarray, rollouts: np.ndarray, a: float, b: float) -> np.ndarray:
    """``-log10 P(S <= successes)`` of the beta-binomial, float64 ``(k,)``.

    Args:
        successes: whole numbers up to 64 (parts of a success are rounded up).
        rollouts: of each prompt.
        a, b: of the source.
    """
    s = np.minimum(np.ceil(successes), _TERMS).astype(np.int64)
    both, home = np.unique(rollouts.astype(np.int64) * (_TERMS + 1) + s, return_inverse=True)  # few different ones
    tails = [_tail(one % (_TERMS + 1), one // (_TERMS + 1), a, b) for one in both.tolist()]
    return np.array(tails, dtype=np.float64)[home]


def _tail(most: int, n: int, a: float, b: float) -> float:
    """``-log10`` of the beta-binomial's ``P(S <= most)``."""
    lg = math.lgamma
    base = lg(a + b) - lg(a) - lg(b) - lg(a + b + n) + lg(n + 1)
    terms = [base - lg(k + 1) - lg(n - k + 1) + lg(a + k) + lg(b + n - k) for k in range(min(most, n) + 1)]
    top = max(terms)
    return max(0.0, -(top + math.log(sum(math.exp(t - top) for t in terms))) / math.log(10))


def surprises(table: StatsTable) -> np.ndarray:
    """float64, one a row: the surprise of each suspected prompt, 0 of the others."""
    rollouts, successes = (table.col(name).astype(np.float64) for name in ("rollouts", "successes"))
    code = table.col("source").astype(np.int64)
    value = np.zeros(len(table))
    doubtful = (rollouts >= _LEAST) & (successes <= _LUCKY * rollouts)
    tried = np.flatnonzero(rollouts > 0)
    tried = tried[np.argsort(code[tried], kind="stable")]  # source after source: there may be thousands
    for inside in np.split(tried, np.flatnonzero(np.diff(code[tried])) + 1):
        rows = inside[doubtful[inside]]
        if len(inside) < _USUAL or not len(rows):
            continue  # too few prompts to know what is usual
        # by prompt: samplers give most rollouts to what is half solved
        a, b = fit_beta(rollouts[inside], successes[inside])
        value[rows] = surprise(successes[rows], rollouts[rows], a, b)
    return value
