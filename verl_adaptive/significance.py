"""The project's one rule of significance: differences paired by seed, Student's t, 95 %.

A difference is significant when there are at least three seeds and the interval of its mean excludes zero. The report, the
commands, the quickstart and the benchmarks all use these functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: The normal distribution's two-sided 95 % quantile.
_NORMAL95 = 1.96
#: Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1; beyond, the normal one and two terms in 1/df.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
LEAST_SEEDS = 3


def t95(count: int) -> float:
    """Student's t at 95 % for ``count`` values, at least 2."""
    freedom = count - 1
    return _T95[freedom - 1] if freedom <= len(_T95) else _NORMAL95 + 2.372 / freedom + 2.82 / freedom**2


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval; an infinite half width for one value.

    >>> mean, half = interval([0.01, 0.02, 0.03])
    >>> f"{mean:.3f} ± {half:.3f}"
    '0.020 ± 0.025'
    """
    if len(values) < 2:
        return float(np.mean(values)), float("inf")
    return float(np.mean(values)), float(t95(len(values)) * np.std(values, ddof=1) / np.sqrt(len(values)))


def sampling(error: float) -> float:
    """Half width of the 95 % interval of a mean of many values, prompts not seeds, by its standard error."""
    return _NORMAL95 * error


def significant(values: Sequence[float]) -> bool:
    """Whether paired differences, one per seed, are significant.

    >>> significant([0.03, 0.04, 0.035]), significant([0.039, -0.004, 0.029]), significant([0.03, 0.03])
    (True, False, False)
    """
    mean, half = interval(values)
    return len(values) >= LEAST_SEEDS and abs(mean) > half


def difference(values: Sequence[float]) -> str:
    """Differences, one a seed, in words.

    >>> difference([0.039, -0.004, 0.029])
    '+0.021 ± 0.056 (3 seeds, not significant)'
    >>> difference([0.03125, 0.03542])
    '+0.033 ± 0.026 (2 seeds, not significant: that takes 3 seeds)'
    """
    mean, half = interval(values)
    if len(values) < 2:
        return f"{mean:+.3f} (1 seed: no interval)"
    told = "significant" if significant(values) else "not significant"
    if len(values) < LEAST_SEEDS and abs(mean) > half:  # the interval alone would say so
        told = f"not significant: that takes {LEAST_SEEDS} seeds"
    return f"{mean:+.3f} ± {half:.3f} ({len(values)} seeds, {told})"
