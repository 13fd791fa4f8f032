"""The value of a prompt (CERO, 2610.09679, section 3), and picking the best of many with ties broken for good."""

from __future__ import annotations

import math

import numpy as np


def value(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``q̂ = E[P(1−P)] = ab / ((a+b)(a+b+1))`` under Beta(a, b); exactly the expected unbiased within-group variance."""
    s = a + b
    return a * b / (s * (s + 1.0))


def best(score: np.ndarray, tie: np.ndarray, count: int, above: float) -> np.ndarray:
    """Positions of the ``count`` largest scores above ``above``, best first, equal ones by ascending ``tie``; O(M).

    Args:
        score: float64 ``(M,)``.
        tie: uint64 ``(M,)``, all different.
        count: how many at most.
        above: only scores greater than this.
    """
    if count <= 0 or not len(score):
        return np.zeros(0, dtype=np.int64)
    cut = -math.inf if count >= len(score) else float(np.partition(score, len(score) - count)[len(score) - count])
    chosen = np.flatnonzero(score > max(cut, above))
    if cut > above:
        edge = np.flatnonzero(score == cut)
        missing = count - len(chosen)
        if missing < len(edge):
            edge = edge[np.argpartition(tie[edge], missing - 1)[:missing]]
        chosen = np.concatenate([chosen, edge])
    return chosen[np.lexsort((tie[chosen], -score[chosen]))]
