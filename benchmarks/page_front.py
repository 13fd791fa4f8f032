"""The README's tables."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from benchmarks import train_cpu
from benchmarks.cells import interval
from benchmarks.page_cpu import SIZES, cpu_runs, over, shares
from benchmarks.page_torch import torch_runs
from benchmarks.runs import SHOWN, Runs, pm, table

__all__ = ["readme"]

WIDTH = 120
WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def readme(data: dict[str, Any], cells: Sequence[dict[str, Any]]) -> list[str]:
    """The README's part, its sentences wrapped."""
    lines = front(data, cells)
    return [part for line in lines for part in (wrap(line, WIDTH, **WHOLE) if line[:1].isalpha() else [line])]


def front(data: dict[str, Any], cells: Sequence[dict[str, Any]]) -> list[str]:
    """Tables and sentences: each policy at its best learning rate on the tiny model, then the real pipeline's."""
    runs = torch_runs(data)
    base_lr = runs.best_lr("base", "grpo")
    if base_lr is None:
        return []
    rows, counts = [], []
    for preset in (*SHOWN, "oracle+keep_all"):
        lr = runs.best_lr("base", preset)
        if lr is None or preset == "grpo":
            continue
        seeds = runs.paired("base", preset, lr, base_lr)
        counts.append(len(seeds))
        keys, base = ([("base", p, r, s) for s in seeds] for p, r in ((preset, lr), ("grpo", base_lr)))
        needed = [runs.needed(k, runs.final(b) or 0.0) for k, b in zip(keys, base, strict=True)]
        hit = [x for x in needed if x is not None]
        training = [
            runs.spent(k, "tokens_trained") / runs.spent(b, "tokens_trained") for k, b in zip(keys, base, strict=True)
        ]
        rows.append(
            [
                f"`{preset}`",
                pm(runs.gain("base", preset, lr, base_lr), "{:+.3f}"),
                pm(runs.gain("base", preset, lr, base_lr, "updates"), "{:+.3f}"),
                pm(hit, "{:.2f}") + ("" if len(hit) == len(seeds) else f" ({len(hit)} of {len(seeds)})"),
                f"{np.mean([runs.spent(k, 'updates') for k in keys]) / runs.updates['base']:.2f}",
                pm(training, "{:.2f}"),
            ]
        )
    grpo = [runs.final(("base", "grpo", base_lr, s)) for s in runs.seeds("base", "grpo", base_lr)]
    text = [
        f"On a tiny model in one process, at least {min(counts, default=0)} seeds, each policy at the best of "
        f"the learning rates that all its seeds ran at ({', '.join(f'{lr:g}' for lr in runs.lrs('base'))}; RESULTS.md says "
        f"which are missing); held-out accuracy against GRPO's of the same seed (GRPO: {pm(grpo)}), "
        "± half of the 95 % interval ([all of it](benchmarks/RESULTS.md)):",
        "",
        *table(
            [
                *(
                    "preset",
                    "at equal rollouts",
                    "at equal updates",
                    "rollouts to GRPO's final",
                    "updates for equal rollouts",
                ),
                "training, of GRPO's",
            ],
            rows,
        ),
    ]
    text += sparse(runs)
    return text + readme_cpu(cells) if cells else text


def sparse(runs: Runs) -> list[str]:
    """A sentence about the tiny model's pool where few questions are informative."""
    lr, base_lr = (runs.best_lr("sparse", preset) for preset in ("full", "grpo"))
    if lr is None or base_lr is None or not (seeds := runs.paired("sparse", "full", lr, base_lr)):
        return []
    keys, base = ([("sparse", p, r, s) for s in seeds] for p, r in (("full", lr), ("grpo", base_lr)))
    needed = [runs.needed(k, runs.final(b) or 0.0) for k, b in zip(keys, base, strict=True)]
    usual = [key for key in runs.cells if key[:3] == ("base", "grpo", runs.best_lr("base", "grpo"))]
    return [
        f"With a pool where most questions are hopeless or solved ({runs.informative(base):.0%} of GRPO's groups are "
        f"informative; above {runs.informative(usual):.0%}), `full` ends "
        f"{pm(runs.gain('sparse', 'full', lr, base_lr), '{:+.3f}')} from GRPO and reaches GRPO's final accuracy with "
        f"{pm(needed, '{:.2f}')} of its rollouts ({sum(x is not None for x in needed)} of {len(seeds)} seeds).",
        "",
    ]


def readme_cpu(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Held-out accuracy at every learning rate; the gain on GRPO at the common one, over prompts as they come and sparse."""
    runs, common = cpu_runs(cells), train_cpu.COMMON_LR
    lrs, counts, rates, gains = runs.lrs("base"), [], [], []
    presets = [p for p in runs.measured("base") if p in train_cpu.MAIN]
    base = runs.best_lr("base", "grpo")
    for preset in presets:
        row = [f"`{preset}`"]
        for lr in lrs:
            keys = [("base", preset, lr, s) for s in runs.seeds("base", preset, lr)]
            counts.append(len(keys))
            row.append(pm([runs.final(k) for k in keys]) if keys else "–")
        best = runs.best_lr("base", preset)
        if preset == "grpo" or best is None or base is None:
            rates.append([*row, ""])
            continue
        rates.append([*row, pm(runs.gain("base", preset, best, base), "{:+.3f}")])
        every, sparse = (over(runs, preset, common, variants) for variants in (SIZES, ("sparse",)))
        gains.append([f"`{preset}`", pm(every[0], "{:+.3f}"), every[1], pm(sparse[0], "{:+.3f}"), sparse[1]])
    if not rates:
        return []
    start = np.mean([runs.curve(key, "held_out")[0] for key in runs.cells if key[0] == "base"])
    pairs = [len(over(runs, p, common)[0]) for p in presets if p != "grpo"]
    of = f"{min(pairs)} to {max(pairs)}" if len(set(pairs)) > 1 else f"{max(pairs, default=0)}"
    return [
        f"On real verl and vLLM (CPU, {runs.budget['base']:,} rollouts in every run, {seeds_of(counts)} each), held-out "
        f"accuracy by learning rate (at the start: {start:.3f}):",
        "",
        *table(["preset", *(f"{lr:g}" for lr in lrs), "against GRPO, each at its best"], rates),
        "![held-out accuracy on the real pipeline, by rollouts, tokens and time](benchmarks/figures/train_cpu.svg)",
        "",
        f"Against GRPO of the same seed, all at {common:g}: with prompts as they come, over all group and pool sizes ({of} "
        f"pairs of runs; groups of 16 have {runs.budget['n16']:,} rollouts), and with a sparse pool, where most prompts are "
        f"hopeless or solved{shares(runs, common)}:",
        "",
        *table(
            [
                *("preset", "as they come", "rollouts to GRPO's final"),
                *("sparse pool", "rollouts to GRPO's final"),
            ],
            gains,
        ),
        *significant(runs, presets, common),
    ]


def significant(runs: Runs, presets: Sequence[str], lr: float) -> list[str]:
    """Sentences: which policies' gains are significant, at 95 %."""
    lines = []
    for where, variants in (("With prompts as they come", SIZES), ("In the sparse pool", ("sparse",))):
        gains = {p: over(runs, p, lr, variants)[0] for p in presets if p != "grpo"}
        rated = {p: interval(g) for p, g in gains.items() if len(g) > 1}
        above = [f"`{p}`" for p, (mean, half) in rated.items() if mean > half]
        below = [f"`{p}`" for p, (mean, half) in rated.items() if mean < -half]
        if rated:
            lines += [
                f"{where}, above GRPO: {', '.join(above) or 'none'}; below: {', '.join(below) or 'none'}; no "
                "significant difference: the others.",
                "",
            ]
    return lines


def seeds_of(counts: Sequence[int]) -> str:
    """As "3 seeds" or "1 to 3 seeds"."""
    low, high = min(counts), max(counts)
    return f"{low} to {high} seeds" if low < high else f"{high} seeds"
