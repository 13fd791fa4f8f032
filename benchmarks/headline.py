"""How many rollouts each preset needs for GRPO's final accuracy, from the results of both training benchmarks.

    python -m benchmarks.headline          # writes benchmarks/results/headline.json

Of each pool, learning rate by learning rate chosen by the presets' own final accuracy, and of the seeds that both have:

* ``of_grpo``: rollouts until GRPO's final held-out accuracy, as a share of the budget;
* ``of_best_grpo``: the same until the final accuracy of the best GRPO: groups of 2, 4, 8 or 16 with the same rollouts a
  step, learning rate constant or decayed;
* ``gain``: final accuracy less GRPO's of the same seed, and half of the 95 % interval;
* ``seeds``: how many seeds.

Both shares are medians over seeds, a seed that never gets there counting as more than any other; null: the median never
does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import interval, read_rows, write_whole
from benchmarks.page_cpu import cpu_runs
from benchmarks.page_torch import torch_runs
from benchmarks.runs import Runs

__all__ = ["POOLS", "Standing", "headline", "less", "standings"]

HERE = Path(__file__).resolve().parent
#: GRPO by another group size; the best of them, also with a decayed learning rate, is what the second share is of.
GRPO = ("grpo", "grpo-2", "grpo-4")
#: What is shown of variants that train otherwise.
OTHERWISE = (*GRPO, "solo")

#: Pool → variants that train on it in the same number of rollouts a step; the first is the plain one.
POOLS = {
    "real/base": ("base", "decay", "halved16", "epochs2"),
    "real/sparse": ("sparse", "decay-sparse", "halved16-sparse", "epochs2-sparse"),
    "real/large": ("large", "decay-large", "halved16-large", "epochs2-large"),
    "tiny/base": ("base", "decay", "halved16", "epochs2"),
    "tiny/sparse": ("sparse", "decay-sparse", "halved16-sparse", "epochs2-sparse"),
    "tiny/onepass": ("onepass",),
    "tiny/noise": ("noise",),
}


@dataclass(frozen=True)
class Standing:
    """A policy in a pool.

    Attributes:
        name: its preset, and the variant unless it is the plain one.
        lr: its best learning rate.
        gains: final accuracy less GRPO's, by seed.
        of_grpo, of_best_grpo: median share of the rollouts, None: never.
        best_grpo: name of the best GRPO.
    """

    name: str
    preset: str
    lr: float
    gains: dict[int, float]
    of_grpo: float | None
    of_best_grpo: float | None
    best_grpo: str


def standings(runs: Runs, variants: tuple[str, ...]) -> dict[str, Standing]:
    """Every policy's standing in a pool, by name.

    Args:
        runs: of one benchmark.
        variants: of one pool, the plain one first.
    """
    plain, at = variants[0], {}
    for variant in variants:
        for preset in runs.measured(variant):
            if (lr := runs.best_lr(variant, preset)) is not None and (variant == plain or preset in OTHERWISE):
                at[variant, preset] = lr
    if (plain, "grpo") not in at:
        return {}
    finals = {(v, p): _finals(runs, v, p, lr) for (v, p), lr in at.items()}
    target = finals[plain, "grpo"]
    rivals = {key: f for key, f in finals.items() if key[1] in GRPO and not key[0].startswith("epochs2")}
    common = set.intersection(*(set(f) for f in rivals.values())) or set(target)
    known = {key: f for key, f in rivals.items() if common <= set(f)}
    best = max(known, key=lambda key: np.mean([known[key][seed] for seed in common]))
    out = {}
    for (variant, preset), lr in at.items():
        mine, cell = finals[variant, preset], (variant, preset, lr)
        if seeds := sorted(set(mine) & set(target)):
            out[_name(plain, variant, preset)] = Standing(
                _name(plain, variant, preset),
                preset,
                lr,
                {s: mine[s] - target[s] for s in seeds},
                _share(runs, cell, target),
                _share(runs, cell, finals[best]),
                _name(plain, *best),
            )
    return out


def less(one: Standing, other: Standing) -> list[float]:
    """Final accuracy of one less another's, of the seeds that both have."""
    return [gain - other.gains[seed] for seed, gain in one.gains.items() if seed in other.gains]


def headline(runs: Runs, variants: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The shares of every preset in a pool, for the JSON."""
    out = {}
    for name, standing in standings(runs, variants).items():
        mean, half = interval(list(standing.gains.values()))
        out[name] = {
            "of_grpo": standing.of_grpo,
            "of_best_grpo": standing.of_best_grpo,
            "best_grpo": standing.best_grpo,
            "gain": [round(mean, 4), round(half, 4) if np.isfinite(half) else None],
            "lr": standing.lr,
            "seeds": len(standing.gains),
        }
    return out


def _name(plain: str, variant: str, preset: str) -> str:
    return preset if variant == plain else f"{preset} {variant.partition('-')[0]}"


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
