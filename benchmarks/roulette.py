"""Roulette on length, in the clock's model: beyond a marker an answer goes on with probability ρ, and weighs 1/ρ then.

    python -m benchmarks.roulette

The marker is a quantile of the lengths of successes. Prompts are drawn as by `solo`, in proportion to √(p (1 − p)) + floor, one
rollout each; a rollout's advantage is its reward less p, so the noise of an update is the mean of its square, and the figure that
counts is tokens (or seconds) × noise, as a ratio to the same rollouts without roulette: below 1 it pays.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from verl_adaptive.simulate.lengths import LengthConfig
from verl_adaptive.simulate.queueing import Machine, ServerQueue

STEPS, ROLLOUTS, FLOOR = 40, 2048, 0.0125
OUT = Path(__file__).parent / "results" / "roulette.json"


def run(sigma: float, longer: float, seed: int, quantile: float, rho: float) -> np.ndarray:
    """Tokens, seconds and noise, with roulette over without."""
    c, rng = LengthConfig(sigma=sigma), np.random.default_rng([seed, 1])
    p = 1 / (1 + np.exp(-1.5 * rng.standard_normal(4000)))
    p[:800] = 0.0
    own, within = rng.standard_normal(len(p)), c.sigma * np.sqrt(1 - c.shared)
    weight = np.sqrt(p * (1 - p)) + FLOOR
    sums = np.zeros((2, 3))
    marker = float(c.cap)
    for step in range(STEPS):
        rows = rng.choice(len(p), ROLLOUTS, replace=False, p=weight / weight.sum())
        good = rng.random(ROLLOUTS) < p[rows]
        centre = np.log(c.median) + c.harder * (0.5 - p[rows]) + c.sigma * np.sqrt(c.shared) * own[rows]
        length = np.exp(centre + longer * ~good + within * rng.standard_normal(ROLLOUTS))
        good &= length <= c.cap
        length = np.clip(np.rint(length), 1, c.cap)
        advantage = good - p[rows]
        stays = rng.random(ROLLOUTS) < rho
        beyond = length > marker
        if step:  # the first step says where the marker lies
            for i, (made, weighs) in enumerate(
                (
                    (np.where(beyond & ~stays, marker, length), np.where(beyond, stays / rho, 1.0)),
                    (length, np.ones(ROLLOUTS)),
                )
            ):
                queue = ServerQueue(Machine())
                queue.add(made.astype(int).tolist(), 0)
                while queue.busy:
                    queue.pop()
                sums[i] += made.sum(), queue.now, ((weighs * advantage) ** 2).mean()
        else:
            marker = float(np.quantile(length[good], quantile))
    return sums[0] / sums[1]


def main() -> None:
    rows = []
    for sigma in (0.9, 0.6):
        for longer in (1, 2, 4, 8):
            for quantile in (0.5, 0.9):
                for rho in (0.5, 0.25):
                    ratios = np.array([run(sigma, np.log(longer), seed, quantile, rho) for seed in range(3)])
                    tokens, seconds, noise = ratios.mean(axis=0)
                    rows.append(
                        {
                            **{"sigma": sigma, "longer": longer, "quantile": quantile, "rho": rho},
                            **{"tokens": round(tokens, 3), "seconds": round(seconds, 3), "noise": round(noise, 3)},
                            **{"tokens_noise": round(tokens * noise, 3), "seconds_noise": round(seconds * noise, 3)},
                        }
                    )
                    print(rows[-1], flush=True)
    OUT.write_text(json.dumps({"command": "python -m benchmarks.roulette", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
