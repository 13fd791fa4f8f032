"""CERO's theory as pure functions (2610.09679, sections 3 to 6): utility, oracle, bound.

Notation of the paper: ``q`` value of a prompt in [0, 1/4]; ``z`` units given to it over the whole run; ``R = B/M`` its
equal share; ``Z = K·N_max`` the most it can get; ``c = 4λq/R``; ``θ`` its dual in [0, λ/R]. The supporting exposure's
range and the oracle's constraints are garbled in the text at hand; both are restored from the closed forms.
"""

from __future__ import annotations

import math

import numpy as np


def utility(c: np.ndarray | float, z: np.ndarray | float) -> np.ndarray:
    """``U(z) = 1 − exp(−c z)``, concave and saturating in cumulative exposure."""
    return -np.expm1(-np.asarray(c) * z)


def supporting_exposure(theta: np.ndarray | float, c: np.ndarray | float, most: float) -> np.ndarray:
    """``ẑ* = argmin_{0≤s≤Z} θs − U(s)``: 0 if θ ≥ c or c = 0, Z if ``θ ≤ c·e^{−cZ}``, else ``ln(c/θ)/c``; in units."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inner = np.log(np.asarray(c) / theta) / c
    return np.where(np.asarray(c) > 0, np.clip(inner, 0.0, most), 0.0)


def oracle(c: np.ndarray, budget: float, most: float) -> np.ndarray:
    """Best exposures in hindsight for fixed values: water-filling ``z_i = clip(ln(c_i/ξ)/c_i, 0, Z)``, ``Σ z = B``.

    Args:
        c: float64 ``(M,)``, ``4λq/R`` per prompt.
        budget: B, units in all.
        most: Z, units for one prompt.

    Returns:
        float64 ``(M,)``, units; sums to ``min(budget, Z · number of prompts with c > 0)``.
    """
    c = np.asarray(c, dtype=np.float64)
    if budget >= most * np.count_nonzero(c > 0):
        return np.where(c > 0, most, 0.0)
    low, high = -most * float(c.max()) + math.log(float(c[c > 0].min())), math.log(float(c.max()))
    for _ in range(200):  # bisection on ln ξ, to float64's last digit
        middle = 0.5 * (low + high)
        if supporting_exposure(math.exp(middle), c, most).sum() > budget:
            low = middle
        else:
            high = middle
    return supporting_exposure(math.exp(high), c, most)


def regret_bound(
    lam: float, n_max: int, budget: int, rounds: int, capacity: int, prompts: int, error: float = 0.0
) -> float:
    """Theorem 1: ``Reg/M ≤ min{1, λ(N_max + G_B/M)/(N̄√K) + 8λ(N_max/N̄)·ē_K}`` for values that do not change.

    ``N̄ = B/(MK)``, ``G_B = max(B/K, C − B/K)``; ``error`` is ``ē_K``, the mean of ``|q̂_{i,k+1} − q_i|``. Holds on every
    path, for any proxies, with ``γ = 1/√K``.
    """
    pace = budget / rounds
    mean = pace / prompts
    widest = max(pace, capacity - pace)
    return min(1.0, lam * (n_max + widest / prompts) / (mean * math.sqrt(rounds)) + 8 * lam * n_max / mean * error)
