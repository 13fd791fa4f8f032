"""Length limits from memory, in the clock's model: does a limit at 1.25 times the 0.99 quantile of successes save tokens?

    python -m benchmarks.length_cap

A limit for each source is set from the lengths of its successes; one rollout in twenty has no limit, so that the quantile
stays honest. Failures are as long as successes, or so many times longer.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from verl_adaptive.simulate.lengths import LengthConfig
from verl_adaptive.simulate.queueing import Machine, Queue

STEPS, ROLLOUTS, FREE, SKIP = 60, 2048, 0.05, 10
OUT = Path(__file__).parent / "results" / "length_cap.json"


def run(sigma: float, longer: float, seed: int, limited: bool) -> np.ndarray:
    """Tokens, right answers and seconds after the first steps, share of answers at the user's cap, and the last limit."""
    c, rng = LengthConfig(sigma=sigma), np.random.default_rng([seed, 1])
    p = 1 / (1 + np.exp(-1.5 * rng.standard_normal(4000)))
    p[:800] = 0.0
    own, within = rng.standard_normal(len(p)), c.sigma * np.sqrt(1 - c.shared)
    lengths, weights = np.zeros(0), np.zeros(0)
    sums, limit = np.zeros(4), float(c.cap)
    for step in range(STEPS):
        rows = rng.choice(len(p), ROLLOUTS, replace=False)
        good = rng.random(ROLLOUTS) < p[rows]
        centre = np.log(c.median) + c.harder * (0.5 - p[rows]) + c.sigma * np.sqrt(c.shared) * own[rows]
        length = np.exp(centre + longer * ~good + within * rng.standard_normal(ROLLOUTS))
        good &= length <= c.cap
        length = np.clip(np.rint(length), 1, c.cap)
        free = rng.random(ROLLOUTS) < FREE
        most = np.where(free | (not limited), c.cap, limit)
        won, made = good & (length <= most), np.minimum(length, most)
        # beyond the limit successes are seen among the free ones alone
        lengths = np.concatenate([lengths, length[won]])
        weights = np.concatenate([weights, np.where(length > limit, 1 / FREE, 1.0)[won]])
        if step >= SKIP:
            queue = Queue(Machine())
            queue.add(made.astype(int).tolist(), 0)
            while queue.busy:
                queue.pop()
            sums += made.sum(), won.sum(), queue.now, (length >= c.cap).mean()
        order = np.argsort(lengths)
        share = np.cumsum(weights[order])
        limit = min(c.cap, 1.25 * lengths[order][np.searchsorted(share, 0.99 * share[-1])])
    return np.array([*sums[:3], sums[3] / (STEPS - SKIP), limit])


def main() -> None:
    rows = []
    for sigma in (0.9, 0.6):
        for longer in (1, 2, 4, 8):
            pairs = [[run(sigma, np.log(longer), seed, on) for on in (True, False)] for seed in range(3)]
            ratio = np.mean([mine / theirs for mine, theirs in pairs], axis=0).round(4).tolist()
            at_cap, limit = float(np.mean([b[3] for _, b in pairs])), float(np.mean([a[4] for a, _ in pairs]))
            found = dict(zip(("tokens", "right", "seconds"), ratio, strict=False))
            rows.append({"sigma": sigma, "longer": longer, "at_cap": round(at_cap, 4), "limit": round(limit), **found})
            print(rows[-1], flush=True)
    OUT.write_text(json.dumps({"command": "python -m benchmarks.length_cap", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
