"""Which changes of a prompt are significant: among thousands of prompts, some change in any way by accident.

Two tests, each exact or nearly so while a prompt's true pass rate stays what it is, and a correction for their number: a
prompt's score is ``-log10`` of the false discovery rate (Benjamini and Hochberg) at which it would be listed. From
:data:`LISTED` on, at most one in twenty of the listed prompts is there by chance; where every rate stays, nearly always
none is.
"""

from __future__ import annotations

import math

import numpy as np

#: Score of a false discovery rate of 5 %.
LISTED = 1.3


def fdr_score(chance: np.ndarray) -> np.ndarray:
    """``-log10`` of the false discovery rate at which each of many tests would be listed; 0 for nan, which is no test.

    Args:
        chance: p-values, ``(k,)``.

    Example:
        >>> fdr_score(np.array([0.001, 0.5, np.nan, 0.9])).round(2).tolist()  # three tests
        [2.52, 0.12, 0.0, 0.05]
    """
    out = np.zeros(len(chance))
    tested = np.flatnonzero(np.isfinite(chance))
    order = tested[np.argsort(-chance[tested], kind="stable")]
    rank = np.arange(len(order), 0, -1)
    rate = np.minimum.accumulate(np.maximum(chance[order], 1e-300) * len(order) / rank)
    out[order] = np.maximum(0.0, -np.log10(rate)) + 0.0  # never -0
    return out


def as_few(right: np.ndarray, drawn: np.ndarray, all_right: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Chance that so few of the drawn rollouts are right, when they are drawn from all of a prompt's (hypergeometric).

    Args:
        right, drawn: of one visit, ``(k,)``, whole numbers.
        all_right, total: of all visits, this one included.

    Returns:
        p-values; nan where the numbers cannot be those of one prompt, as of visits of very different sizes.
    """
    right, drawn, all_right, total = (np.asarray(v, dtype=np.int64) for v in (right, drawn, all_right, total))
    wrong = total - all_right
    possible = (right >= 0) & (right <= np.minimum(drawn, all_right)) & (drawn - right <= wrong) & (drawn > 0)
    fact = np.append(0.0, np.cumsum(np.log(np.arange(1, max(1, int(total.max(initial=0))) + 1))))

    def log_ways(n: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Logarithm of the number of ways to choose k of n."""
        inside = (k >= 0) & (k <= n)
        k = np.where(inside, k, 0)
        return np.where(inside, fact[n] - fact[k] - fact[n - k], -np.inf)

    chance = np.zeros(len(right))
    rows = np.flatnonzero(possible)
    for k in range(int(right[rows].max(initial=-1)) + 1):
        rows = rows[right[rows] >= k]
        a, t, d = all_right[rows], total[rows], drawn[rows]
        chance[rows] += np.exp(log_ways(a, np.full_like(a, k)) + log_ways(t - a, d - k) - log_ways(t, d))
    return np.where(possible, np.minimum(chance, 1.0), np.nan)


def two_rates(a_right: np.ndarray, a: np.ndarray, b_right: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Chance that two visits of one pass rate lie as far apart as these, in either direction (Fisher's exact test, doubled)."""
    lower = as_few(b_right, b, a_right + b_right, a + b)
    upper = as_few(a_right, a, a_right + b_right, a + b)
    return np.minimum(1.0, 2.0 * np.minimum(lower, upper))


def swings(jumps: np.ndarray, visits: np.ndarray, right: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
    """Chance that a prompt's pass rate jumps as much from visit to visit.

    Successive differences rather than the spread of all visits, so that a prompt that is learned, or forgotten, once is
    none that swings. With rates that stay, each term of ``jumps`` has the mean ``p (1 - p)``, neighbours share a visit, and the
    sum is a scaled chi-square (Satterthwaite), whose tail is Wilson and Hilferty's.

    Args:
        jumps: of each prompt, the sum over its visits of ``(r' - r)² / (1/n' + 1/n)``, r the rate and n the size of a visit.
        visits, right, rollouts: of each prompt.

    Returns:
        p-values; nan for fewer than three visits.
    """
    with np.errstate(all="ignore"):
        p = right / rollouts
        each = p * (1 - p) * rollouts / (rollouts - 1)
        scale = (3 * visits - 4) / (2 * (visits - 1))
        free = (visits - 1) / scale
        x = np.where(jumps > 0, jumps / (each * scale), 0.0)
        z = (np.cbrt(x / free) - (1 - 2 / (9 * free))) / np.sqrt(2 / (9 * free))
    return np.where(visits >= 3, upper_tail(z), np.nan)


def upper_tail(z: np.ndarray) -> np.ndarray:
    """Chance that a standard normal is above each; nan stays nan."""
    return np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in z.tolist()])


def fit_beta(n: np.ndarray, successes: np.ndarray) -> tuple[float, float]:
    """``a, b`` of the Beta distribution of pass rates, by moments: the mean rate, and the chance that two rollouts of a
    prompt agree, whose unbiased estimate gives E[p(1 − p)] whatever the group sizes.

    Every prompt weighs the same, not every rollout: a policy may have given some prompts more rollouts because of their pass rates.

    Args:
        n, successes: float64 ``(M,)``, per prompt.

    Returns:
        a + b is kept within [0.05, 1000]; it is 1 if no prompt has two rollouts.
    """
    failures, pairs = n - successes, n * (n - 1.0)
    agree = np.maximum(successes * (successes - 1.0), 0.0) + np.maximum(failures * (failures - 1.0), 0.0)
    agree, pairs = agree / np.maximum(pairs, 1.0), np.minimum(pairs, 1.0)
    n, successes = np.minimum(n, 1.0), successes / np.maximum(n, 1.0)
    total = max(float(n.sum()), 1.0)
    mean = (float(successes.sum()) + 0.5) / (total + 1.0)  # never exactly 0 or 1
    if pairs.sum() <= 0:
        return mean, 1.0 - mean
    value = 0.5 * (1.0 - float(agree.sum() / pairs.sum()))  # E[p(1 − p)]
    share = min(max(value / (mean * (1.0 - mean)), 0.0), 1.0 - 1e-9)
    strength = float(np.clip(share / (1.0 - share), 0.05, 1000.0))
    return mean * strength, (1.0 - mean) * strength
