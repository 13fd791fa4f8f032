"""The real pipeline's part of ``RESULTS.md``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import runs as tables
from benchmarks import train_cpu
from benchmarks.runs import Runs, details, ends_page, missing, pm, table

__all__ = ["cpu_page", "cpu_runs", "over", "ranks", "shares"]

#: Variants of the real pipeline whose pools are prompts as they come, and the other one.
SIZES = tuple(
    name for name, variant in train_cpu.VARIANTS.items() if not (variant.flat or variant.training or variant.fewer > 1)
)
SPARSE = train_cpu.VARIANTS["sparse"]


def cpu_runs(cells: Sequence[dict[str, Any]]) -> Runs:
    """The cells of ``results/train_cpu.jsonl``."""
    settings = train_cpu.Settings(**cells[0]["settings"])
    return Runs(
        {(c["variant"], c["preset"], c["lr"], c["seed"]): c for c in cells},
        train_cpu.COLUMNS,
        {name: settings.budget(variant) for name, variant in train_cpu.VARIANTS.items()},
        dict.fromkeys(train_cpu.VARIANTS, settings.steps * settings.updates),
        list(train_cpu.PRESETS),
    )


def cpu_page(cells: Sequence[dict[str, Any]], tiny: Runs | None) -> list[str]:
    """The real pipeline's part of RESULTS.md."""
    runs, settings = cpu_runs(cells), train_cpu.Settings(**cells[0]["settings"])
    common = train_cpu.COMMON_LR
    lines = [
        "## Real verl and vLLM, on CPU",
        "",
        f"`verl-adaptive bench cpu`: budget {runs.budget['base']:,} generated rollouts in every run (GRPO's {settings.steps} "
        f"steps of {settings.batch} prompts × 8 rollouts), {settings.updates} optimizer updates a step, a model of two "
        "layers and 0.12 million parameters, nine reasoning-gym tasks from hopeless to solved. Accuracies are exact pass "
        "rates, from the weights of every step.",
        "",
        *tables.LEGEND,
        "* `oracle`: `grpo` with a sampler that reads the exact pass rates from each step's weights; a bound, no method.",
        f"* *sparse pool*: {SPARSE.flat} of its {SPARSE.prompts} prompts are those of all 610 that the starting model answers "
        f"most surely, right or wrong, the rest is spread over the others{shares(runs, common)}.",
        "",
    ]
    for variant, size in train_cpu.VARIANTS.items():
        for lr in runs.lrs(variant):
            lines += [f"### {size.title[0].upper()}{size.title[1:]}, learning rate {lr:g}", ""]
            if size.flat and lr == common:
                lines += ["![accuracy](figures/train_cpu_sparse.svg)", ""]
                if more := [p for p in runs.measured(variant) if len(runs.seeds(variant, p, lr)) > train_cpu.SEEDS]:
                    lines += [
                        f"Seeds {train_cpu.SEEDS} and up ({', '.join(f'`{p}`' for p in more)}) were added after the others "
                        "had been seen.",
                        "",
                    ]
            for part in tables.results(runs, variant, lambda _, lr=lr: lr):
                lines += part
    if len(runs.lrs("base")) > 1:
        lines += ["### Each policy at its best learning rate", ""]
        for part in tables.results(runs, "base", lambda p: runs.best_lr("base", p)):
            lines += part
    below = [lr for lr in runs.lrs("base") for s in runs.seeds("base", "grpo", lr)[:1] if collapsed(runs, lr, s)]
    if below:
        lines += [
            f"At learning rate {', '.join(f'{lr:g}' for lr in below)} GRPO ends below its start: shares of its rollouts to "
            "that accuracy mean nothing there.",
            "",
        ]
    lines += [*tables.verdicts(runs, "base"), "", *by_variant(runs, common), *aim_or_why(runs)]
    lines += details(runs, common, train_cpu.BINS)
    lines += ends_page(runs, list(train_cpu.VARIANTS), "on the real pipeline")
    lines += [*step_times(runs, common), *agreement(runs, tiny, common)]
    m, loads = cells[0]["machine"], [x for c in cells for x in c["load"] if x is not None]
    lines += [
        "### How it was made",
        "",
        f"On {m['cpu']} ({m['cores']} cores, {m['memory_gib']} GiB), Python {m['python']}, "
        + ", ".join(f"{k} {v}" for k, v in cells[0]["versions"].items())
        + f". A run took {statistics.median(c['seconds'] for c in cells):.0f} s in the median, start-up included. One cell "
        f"again, compared with its interval: `{cells[0]['command']}`; every cell's JSON has its own such command.",
        "",
    ]
    if shared := sum(c.get("together", 1) > 1 for c in cells):
        lines += [
            f"{shared} of the {len(cells)} runs shared a start-up of verl with others of the same learning rate (`--together`): "
            "processes and inference engine are the same, everything else is begun anew. Runs of before are of an engine that "
            "generated in rounds; now groups commit in the order in which they were submitted. Runs without `ends` in the JSON are "
            "of then. It changes how long a step takes, and which surplus a step of `full` has.",
            "",
        ]
    if loads and max(loads) > m["cores"]:
        lines += [
            f"The machine had other work: load averages of {min(loads):.1f} to {max(loads):.1f} on {m['cores']} cores. "
            "Seconds are not to be compared between cells; rollouts, tokens and accuracies are not affected.",
            "",
        ]
    if not any(preset in train_cpu.INGREDIENTS for preset in runs.measured("base")):
        lines += [
            "The papers' ingredients one at a time are measured on the tiny model only, for a run here takes minutes. "
            '`verl-adaptive bench cpu --presets "greso-gate;aero-rescue"` runs such cells by the names that they have there.',
            "",
        ]
    grid = dict.fromkeys(key[:3] for key in train_cpu.grid())
    return lines + missing(runs, list(grid), train_cpu.SEEDS)


def by_variant(runs: Runs, lr: float) -> list[str]:
    """Every policy's gain on GRPO at one learning rate: by group and pool size, and over all pairs of runs."""
    variants = [v for v in SIZES if len(runs.measured(v, lr)) > 1]
    if len(variants) < 2:
        return []
    heads = [f"n = {v.n}, {v.prompts} prompts" for v in (train_cpu.VARIANTS[name] for name in variants)]
    rows = []
    for preset in runs.presets:
        if preset != "grpo" and any(gains := [runs.gain(variant, preset, lr, lr) for variant in variants]):
            every, target = over(runs, preset, lr)
            rows.append([f"`{preset}`", *(pm(gain, "{:+.3f}") for gain in (*gains, every)), target])
    return [
        "### Against GRPO, by group and pool size",
        "",
        f"Held-out accuracy less GRPO's of the same seed, at equal rollouts and learning rate {lr:g}. *all*: over all pairs "
        "of runs as if they were alike; the sparse pool is not among them. Every run starts from the same weights; a seed is an order of the data and of the "
        "sampling, and the intervals cover no more than that.",
        "",
        *table(["policy", *heads, "all", "rollouts to target, all"], rows),
    ]


def over(runs: Runs, preset: str, lr: float, variants: Sequence[str] = SIZES) -> tuple[list[float], str]:
    """Gains on GRPO over the pairs of runs of some variants, and the rollouts to GRPO's final accuracy, as text."""
    gains, needed = [], []
    for variant in variants:
        gains += runs.gain(variant, preset, lr, lr)
        for seed in runs.paired(variant, preset, lr, lr):
            target = runs.final((variant, "grpo", lr, seed))
            needed.append(runs.needed((variant, preset, lr, seed), target or 0.0))
    hit = [x for x in needed if x is not None]
    return gains, f"{pm(hit, '{:.2f}')} ({len(hit)} of {len(needed)})" if needed else "–"


def shares(runs: Runs, lr: float) -> str:
    """How many of GRPO's groups are informative in the sparse pool and in the usual one, in brackets; empty without runs."""
    keys = {v: [(v, "grpo", lr, s) for s in runs.seeds(v, "grpo", lr)] for v in ("sparse", "base")}
    if not all(keys.values()):
        return ""
    first = {}
    for variant, of in keys.items():
        counts = np.sum([(runs.curve(k, "informative")[1], runs.curve(k, "groups")[1]) for k in of], axis=0)
        first[variant] = counts[0] / counts[1]
    return (
        f" (of GRPO's groups {first['sparse']:.0%} are informative in the first step, {runs.informative(keys['sparse']):.0%} "
        f"over the run; as they come {first['base']:.0%} and {runs.informative(keys['base']):.0%})"
    )


def collapsed(runs: Runs, lr: float, seed: int) -> bool:
    """Whether GRPO ends below where it began."""
    accuracy = runs.curve(("base", "grpo", lr, seed), "held_out")
    return bool(accuracy[-1] < accuracy[0])


def aim_or_why(runs: Runs) -> list[str]:
    """The aim's table, once there are seeds enough to speak of."""
    lines = []
    for variant, where in (("base", ""), ("sparse", ", sparse pool")):
        lr = runs.best_lr(variant, "full")
        if lr is not None and len(runs.seeds(variant, "full", lr)) >= 3:
            lines += [f"### The aim, on the real pipeline{where}", "", *tables.aim(runs, variant)]
    return lines


def step_times(runs: Runs, lr: float) -> list[str]:
    """Median seconds of a step's parts, and the load they were measured under."""
    rows = []
    names = [t for t in train_cpu.TIMERS if t != "step"]
    for preset in runs.measured("base", lr):
        cells = [runs.cells["base", preset, lr, s] for s in runs.seeds("base", preset, lr)]
        if cells:
            load = [x for c in cells for x in c["load"] if x is not None]
            rows.append(
                [
                    f"`{preset}`",
                    *(f"{statistics.median(c['step_seconds'][n] for c in cells):.2f}" for n in ("step", *names)),
                    pm([c["curve"][-1][-1] for c in cells], "{:.0f}"),
                    f"{min(load):.1f}–{max(load):.1f}" if load else "",
                ]
            )
    head = ["policy", "a step, s", *(n.replace("_", " ") for n in names), "all steps, s", "load average"]
    return ["### Where a step's time goes", "", *table(head, rows)] if rows else []


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0; values that are exactly equal share the mean of theirs."""
    array = np.asarray(values)
    return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])


def agreement(runs: Runs, tiny: Runs | None, lr: float) -> list[str]:
    """Spearman's rank correlation of final accuracies, over the policies that both benchmarks have."""
    if tiny is None:
        return []
    names = {"oracle": "oracle+keep_all"}
    pairs = []
    for preset in runs.measured("base", lr):
        mine, theirs = names.get(preset, preset), runs.seeds("base", preset, lr)
        other = tiny.seeds("base", mine, lr)
        if theirs and other:
            real = np.mean([runs.final(("base", preset, lr, s)) for s in theirs])
            pairs.append((preset, float(real), float(np.mean([tiny.final(("base", mine, lr, s)) for s in other]))))
    if len(pairs) < 3:
        return []
    rho = np.corrcoef(ranks([p[1] for p in pairs]), ranks([p[2] for p in pairs]))[0, 1]
    return [
        "### Does the tiny model rank policies as the real pipeline does?",
        "",
        f"Spearman's ρ of the mean held-out accuracies at equal rollouts, learning rate {lr:g} in both: {rho:+.2f}, over n = "
        f"{len(pairs)} policies ({', '.join(f'`{p[0]}`' for p in pairs)}). With so few policies only a value near ±1 means "
        "something.",
        "",
    ]
