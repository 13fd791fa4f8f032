"""Where each policy ends in each pool, beside GRPO: what every table of accuracies is made of.

Each policy at the learning rate of its own best final accuracy, over the seeds that it shares with GRPO:

* ``of_grpo``: rollouts until GRPO's final held-out accuracy (groups of 8), as a share of the budget;
* ``gains``: final accuracy less GRPO's of the same seed and the same starting weights;
* ``best_grpo``: the best GRPO: groups of 2, 4, 8 or 16 with the same rollouts a step, with a constant or a decayed learning
  rate, chosen by the mean over the seeds that all of these have.

The share is the median seed's. A seed that never gets there counts as more than any other; None: the median never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import pretrained
from benchmarks.cells import key_of
from benchmarks.runs import Policy, Runs
from verl_adaptive.report.arms import median

#: GRPO and its other group sizes, of which the best is named.
GRPO = ("grpo", "grpo-2", "grpo-4")
#: What is shown of variants that train otherwise.
OTHERWISE = (*GRPO, "solo")

#: Pool → variants that train on it in the same number of rollouts a step; the first is the plain one.
POOLS = {
    "pretrained/128": ("128", "epochs2"),
    "pretrained/512": ("512",),
    "pretrained/others": ("others",),
    "pretrained/gemma": ("gemma",),
    "real/base": ("base", "decay", "halved16", "epochs2"),
    "real/sparse": ("sparse", "decay-sparse", "halved16-sparse", "epochs2-sparse"),
    "real/large": ("large", "decay-large", "halved16-large", "epochs2-large"),
    "tiny/base": ("base", "decay", "halved16", "epochs2"),
    "tiny/sparse": ("sparse", "decay-sparse", "halved16-sparse", "epochs2-sparse"),
    "tiny/onepass": ("onepass",),
    "tiny/noise": ("noise",),
    "tiny/offsets": ("offsets",),
    "tiny/pool128": ("pool128",),
    "tiny/batch512": ("batch512",),
    "tiny/zero": ("zero",),
}
#: Pool → what the tables call it.
POOL_NAMES = {
    "pretrained/128": "pretrained, 128 rollouts a step",
    "pretrained/512": "pretrained, 512 rollouts a step",
    "pretrained/others": "pretrained, other tasks",
    "pretrained/gemma": "pretrained, Gemma 3 270M",
    "real/base": "real, natural mix",
    "real/sparse": "real, sparse",
    "real/large": "real, large",
    "tiny/base": "tiny, natural mix",
    "tiny/sparse": "tiny, sparse",
    "tiny/onepass": "tiny, one pass",
    "tiny/noise": "tiny, noisy rewards",
    "tiny/offsets": "tiny, noisy and offset rewards",
    "tiny/pool128": "tiny, 128 prompts",
    "tiny/batch512": "tiny, 4,096 rollouts a step",
    "tiny/zero": "tiny, nothing right at first",
}


@dataclass(frozen=True)
class Standing:
    """A policy in a pool.

    Attributes:
        lr: its best learning rate.
        alone: no other rate has a run of one of its seeds from the same start.
        gains: final accuracy less GRPO's, by seed.
        of_grpo: median share of the rollouts, None: never.
        best_grpo: name of the best GRPO.
        final: mean final accuracy.
        step: rollouts generated for an optimizer update, of GRPO's that trains otherwise alike; mean over seeds.
        trained: tokens trained, of those that verl's GRPO trains (all that it generates); mean over seeds.
        greatest: |advantage| of all its runs; 0 where it was not kept.
    """

    lr: float
    alone: bool
    gains: dict[int, float]
    of_grpo: float | None
    best_grpo: str
    final: float
    step: float
    trained: float
    greatest: float


def standings(runs: Runs, variants: tuple[str, ...]) -> dict[str, Standing]:
    """Every policy's standing in a pool, by name: its preset, and the variant unless it is the plain one.

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
    grpo = (plain, "grpo", at[plain, "grpo"])
    finals = {
        (v, p): {s: f for s, f in finals_of(runs, v, p, lr).items() if s in runs.pairs((v, p, lr), grpo)}
        for (v, p), lr in at.items()
    }
    target = finals[plain, "grpo"]
    rivals = {key: f for key, f in finals.items() if f and key[1] in GRPO and not key[0].startswith("epochs2")}
    common = set.intersection(*(set(f) for f in rivals.values())) or set(target)
    known = {key: f for key, f in rivals.items() if common <= set(f)}
    best = max(known, key=lambda key: np.mean([known[key][seed] for seed in common]))
    out = {}
    for (variant, preset), lr in at.items():
        mine, cell = finals[variant, preset], (variant, preset, lr)
        rival = (variant, "grpo", at[variant, "grpo"]) if (variant, "grpo") in at else grpo
        if seeds := sorted(set(mine) & set(target)):
            out[_name(plain, variant, preset)] = Standing(
                lr,
                not any(runs.pairs(cell, (variant, preset, other)) for other in runs.lrs(variant) if other != lr),
                {s: mine[s] - target[s] for s in seeds},
                share(runs, cell, {s: target[s] for s in seeds}),
                _name(plain, *best),
                float(np.mean([mine[s] for s in seeds])),
                float(
                    np.mean([_rollouts(runs, cell, s) for s in seeds])
                    / np.mean([_rollouts(runs, rival, s) for s in runs.seeds(*rival)])
                ),
                float(np.mean([runs.trained((*cell, s), (*grpo, s)) for s in seeds])),
                max(float(runs.cells[(*cell, s)].get("greatest", 0.0)) for s in seeds),
            )
    return out


def less(one: Standing, other: Standing) -> list[float]:
    """Final accuracy of one less another's, of the seeds that both have."""
    return [gain - other.gains[seed] for seed, gain in one.gains.items() if seed in other.gains]


def _name(plain: str, variant: str, preset: str) -> str:
    return preset if variant == plain else f"{preset} {variant.partition('-')[0]}"


def finals_of(runs: Runs, variant: str, preset: str, lr: float) -> dict[int, float]:
    """Final accuracy by seed."""
    return {seed: runs.final((variant, preset, lr, seed)) or 0.0 for seed in runs.seeds(variant, preset, lr)}


def share(runs: Runs, cell: Policy, target: dict[int, float]) -> float | None:
    """Rollouts until each seed's target, as a share of the budget: the median seed's; None: never."""
    seeds = sorted(set(runs.seeds(*cell)) & set(target))
    needed = [runs.needed((*cell, seed), target[seed]) for seed in seeds]
    return median([np.inf if x is None else x for x in needed])


def _rollouts(runs: Runs, cell: Policy, seed: int) -> float:
    """Rollouts generated for an optimizer update."""
    return runs.budget[cell[0]] / runs.spent((*cell, seed), "updates")


def pretrained_runs(cells: Sequence[dict[str, Any]]) -> Runs:
    """The cells of ``results/pretrained.jsonl``."""
    return Runs(
        {key_of(cell): cell for cell in cells},
        pretrained.COLUMNS,
        {name: size.budget for name, size in pretrained.VARIANTS.items()},
        list(pretrained.PRESETS),
        # cells of before the digest was kept: by processor, which is where the weights differed
        lambda cell: cell.get("start") or cell["machine"]["cpu"],
    )


def grid_runs(data: dict[str, Any]) -> Runs:
    """The cells of ``results/train_torch.json``, ``train_cpu.json`` and their like."""
    changed = {name: data["settings"] | other for name, other in data["variants"].items()}
    held_out = list(data["columns"]).index("held_out")
    return Runs(
        {key_of(cell): cell for cell in data["cells"]},
        data["columns"],
        {name: v["steps"] * v["batch"] * v["n"] for name, v in changed.items()},
        list(data["presets"]),
        lambda cell: cell["curve"][0][held_out],  # exact
    )


def all_standings(runs: dict[str, Runs]) -> dict[str, dict[str, Standing]]:
    """Of every pool that has runs: policies' standings by name.

    Args:
        runs: by the first half of a pool's name.
    """
    found = {pool: standings(runs[pool.partition("/")[0]], variants) for pool, variants in POOLS.items()}
    return {pool: made for pool, made in found.items() if made}  # of a pool without runs of GRPO there are none
