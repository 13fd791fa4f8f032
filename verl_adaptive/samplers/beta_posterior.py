"""Gamma and Beta variates from counter-based uniforms: a prompt's draw depends on its key, not on its neighbours."""

from __future__ import annotations

import numpy as np

from verl_adaptive.rng import Draw

#: Marsaglia and Tsang's method rejects a try with probability below 0.05, so this many fail with 0.05^24.
TRIES = 24


def draw_gamma(shape: np.ndarray, draw: Draw, purpose: str, key_hi: np.ndarray, key_lo: np.ndarray) -> np.ndarray:
    """Gamma(shape, 1) variates, one per key (Marsaglia and Tsang 2000); shape must be positive."""
    d = np.where(shape < 1.0, shape + 1.0, shape) - 1.0 / 3.0
    out = d.copy()  # the mean, should every try fail
    todo = np.arange(len(d))
    for salt in range(TRIES):
        u, v, w = (draw.uniform(f"{purpose}.{j}", key_hi[todo], key_lo[todo], salt) for j in "uvw")
        x = np.sqrt(-2.0 * np.log1p(-u)) * np.cos(2.0 * np.pi * v)  # Box and Muller
        cube = (1.0 + x / np.sqrt(9.0 * d[todo])) ** 3
        with np.errstate(divide="ignore", invalid="ignore"):  # a cube below 0 has no logarithm, and is not good
            good = np.log1p(-w) < 0.5 * x * x + d[todo] * (1.0 - cube + np.log(cube))
        out[todo[good]] = d[todo[good]] * cube[good]
        todo = todo[~good]
        if not len(todo):
            break
    boost = draw.uniform(f"{purpose}.boost", key_hi, key_lo)
    return np.where(shape < 1.0, out * (1.0 - boost) ** (1.0 / shape), out)


def draw_beta(a: np.ndarray, b: np.ndarray, draw: Draw, purpose: str, hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    """Beta(a, b) variates, one per key."""
    x, y = (draw_gamma(s, draw, f"{purpose}.{k}", hi, lo) for k, s in (("a", a), ("b", b)))
    return x / (x + y)
