"""How many rollouts each preset needs for GRPO's final accuracy, from the results of both training benchmarks.

    python -m benchmarks.headline          # writes benchmarks/results/headline.json

Of each pool, learning rate by learning rate chosen by the presets' own final accuracy, and of the seeds that both have:

* ``of_grpo``: rollouts until GRPO's final held-out accuracy, as a share of the budget;
* ``of_best_grpo``: the same until the final accuracy of the best GRPO: groups of 2, 4, 8 or 16 with the same rollouts a
  step, learning rate constant or decayed;
* ``seeds``: how many seeds.

Both are medians over seeds, a seed that never gets there counting as more than any other; null: the median never does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import read_rows, write_whole
from benchmarks.page_cpu import cpu_runs
from benchmarks.page_torch import torch_runs
from benchmarks.runs import Runs

__all__ = ["POOLS", "headline"]

HERE = Path(__file__).resolve().parent
_SMALL = ("grpo", "grpo-2", "grpo-4")

#: Pool → variants that train on it in the same number of rollouts a step; the first is the plain one.
POOLS = {
    "tiny/base": ("base", "decay", "halved16"),
    "tiny/sparse": ("sparse", "decay-sparse", "halved16-sparse"),
    "tiny/onepass": ("onepass",),
    "tiny/noise": ("noise",),
    "real/base": ("base", "decay"),
    "real/sparse": ("sparse", "decay-sparse"),
    "real/large": ("large",),
}


def headline(runs: Runs, variants: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The shares of every preset in a pool.

    Args:
        runs: of one benchmark.
        variants: of one pool, the plain one first.
    """
    plain, at = variants[0], {}
    for variant in variants:
        for preset in runs.measured(variant):
            at[variant, preset] = runs.best_lr(variant, preset)
    if at.get((plain, "grpo")) is None:
        return {}
    finals = {
        (variant, preset): _finals(runs, variant, preset, lr)
        for (variant, preset), lr in at.items()
        if preset in _SMALL and lr is not None
    }
    common = set.intersection(*(set(f) for f in finals.values())) or set(finals[plain, "grpo"])
    known = {name: f for name, f in finals.items() if common <= set(f)}
    best = max(known, key=lambda name: np.mean([known[name][seed] for seed in common]))
    out = {}
    for (variant, preset), lr in at.items():
        if lr is None or (variant != plain and preset not in _SMALL):
            continue
        name = preset if variant == plain else f"{preset} {variant}"
        out[name] = {
            "of_grpo": _share(runs, (variant, preset, lr), finals[plain, "grpo"]),
            "of_best_grpo": _share(runs, (variant, preset, lr), finals[best]),
            "best_grpo": " ".join(dict.fromkeys((best[1], *(() if best[0] == plain else (best[0],))))),
            "seeds": len(set(_finals(runs, variant, preset, lr)) & set(finals[plain, "grpo"])),
        }
    return out


def _finals(runs: Runs, variant: str, preset: str, lr: float) -> dict[int, float]:
    """Final accuracy by seed."""
    return {seed: runs.final((variant, preset, lr, seed)) or 0.0 for seed in runs.seeds(variant, preset, lr)}


def _share(runs: Runs, cell: tuple[str, str, float], target: dict[int, float]) -> float | None:
    seeds = sorted(set(runs.seeds(*cell)) & set(target))
    needed = [runs.needed((*cell, seed), target[seed]) for seed in seeds]
    median = float(np.median([np.inf if x is None else x for x in needed])) if needed else np.inf
    return round(median, 3) if np.isfinite(median) else None


def main() -> None:
    """Read both benchmarks' results and write the shares."""
    tiny = torch_runs(json.loads((HERE / "results" / "train_torch.json").read_text()))
    real = cpu_runs(read_rows(HERE / "results" / "train_cpu.jsonl"))
    made = {pool: headline(tiny if pool.startswith("tiny/") else real, names) for pool, names in POOLS.items()}
    text = json.dumps({pool: shares for pool, shares in made.items() if shares}, indent=1) + "\n"
    write_whole(HERE / "results" / "headline.json", text)
    for pool, shares in made.items():
        for name, share in shares.items():
            print(f"{pool:12} {name:28} {share}")


if __name__ == "__main__":
    main()
