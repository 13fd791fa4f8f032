"""All tables and plots of ``RESULTS.md`` and the table of the README, from the JSON in ``results/``.

    python benchmarks/report.py           # write them
    python benchmarks/report.py --check   # exit with 1 if a page is not what the JSON says; plots are left alone

Each benchmark owns the part of a page between its two markers; what stands outside is left as it is. No number is typed
by hand.
"""

from __future__ import annotations

import difflib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import train_cpu
from cells import Parser, interval, run_script

import runs as tables
from runs import Runs, pm, table

HERE = Path(__file__).resolve().parent

#: Policies that the plots and the README show.
SHOWN = ("grpo", "dapo", "greso", "aero", "cero", "pilot_commit", "full")

#: Seeds that the preset ``full`` was chosen by; later ones are a check.
CHOSEN_BY = 5


# -- the tiny model -----------------------------------------------------------------------------------------------


def torch_runs(data: dict[str, Any]) -> Runs:
    """The cells of ``train_torch.json``."""
    s = data["settings"]
    changed = {name: s | other for name, other in data["variants"].items()}
    return Runs(
        {(c["variant"], c["preset"], c["lr"], c["seed"]): c for c in data["cells"]},
        data["columns"],
        {name: v["steps"] * v["batch"] * v["n"] for name, v in changed.items()},
        {name: v["steps"] * v["updates"] for name, v in changed.items()},
        list(data["presets"]),
    )


def torch_page(data: dict[str, Any]) -> list[str]:
    """The tiny model's part of RESULTS.md."""
    runs, s, presets = torch_runs(data), data["settings"], data["presets"]
    common = 1e-3
    lines = [
        "## A tiny model in one process",
        "",
        f"`verl-adaptive bench torch`: budget {runs.budget['base']:,} generated rollouts (what GRPO generates in "
        f"{s['steps']} steps of {s['batch']} prompts × {s['n']} rollouts), {s['updates']} optimizer updates a step, "
        f"{s['pool']} training prompts, {s['held_out']} held-out ones. The model has {s['layers']} layers of width "
        f"{s['hidden']} and does sums, differences and products; the pass rate of a prompt is exact, from one forward pass, so evaluation "
        "has no sampling noise. Within a seed all policies start from the same weights. The policies, the engine and the "
        "cut into minibatches are the package's own.",
        "",
        "This is a tiny model, without verl, vLLM or asynchrony. It can rank policies by what they do with rollouts; it "
        "says nothing about wall clock, and effects of size are not those of a language model.",
        "",
        *tables.LEGEND,
        "* `oracle+…` sees the exact pass rates and draws prompts in proportion to p (1 − p): a bound, no method.",
        "",
    ]
    if aim := tables.aim(runs, "base"):
        lines += ["### The aim, on the tiny model", "", *aim, *fresh_seeds(runs)]
    lines += ["### Each policy at its best learning rate", ""]
    lines += [
        f"Of {', '.join(f'{lr:g}' for lr in runs.lrs('base'))}, the best that all of a policy's seeds "
        "ran at, chosen by the same numbers (which flatters all a little).",
        "",
    ]
    for part in tables.results(runs, "base", lambda p: runs.best_lr("base", p)):
        lines += part
    lines += [*tables.verdicts(runs, "base"), ""]
    for lr in runs.lrs("base") if len(runs.lrs("base")) > 1 else ():
        lines += [f"### Learning rate {lr:g}, the same for all", ""]
        for part in tables.results(runs, "base", lambda _, lr=lr: lr):
            lines += part
    for variant, other in data["variants"].items():
        if variant != "base" and any(key[0] == variant for key in runs.cells):
            named = ", ".join(f"{name} {value}" for name, value in other.items())
            lines += [f"### Another size: {named} (learning rate {common:g})", ""]
            for part in tables.results(runs, variant, lambda _: common):
                lines += part
    lines += details(runs, common, data["bins"])
    cpu = [c["seconds"]["all"] for c in data["cells"]]
    lines += ["### How it was made", "", *(described(m) for m in data["machines"])]
    lines += [
        f"{len(cpu)} runs, {np.median(cpu):.1f} s of CPU time in the median ({sum(cpu) / 60:.0f} min in all, the "
        "machine being shared; load averages are in the JSON). One cell again, compared with its interval: "
        f"`{data['cells'][0]['command']}`; every cell in the JSON has its own such command. These pages again: "
        "`verl-adaptive bench report`.",
        "",
        "The words behind each name, and the parts that they put together:",
        "",
        *(
            f"* `{name}`: `+adaptive={' '.join(p['words'])}` ("
            + ", ".join(f"{role} {part}" for role, part in p["parts"].items())
            + ")"
            for name, p in presets.items()
        ),
        "",
    ]
    return lines + missing(
        runs,
        [("base", p, lr) for p in presets for lr in runs.lrs("base")],
        tables.ENOUGH,
    )


def details(runs: Runs, lr: float, bins: Sequence[Sequence[float]]) -> list[str]:
    """Accuracy by starting difficulty, where rollouts went, and calibration, at one learning rate; empty without runs."""
    if not runs.measured("base", lr):
        return []
    return [
        f"### Held-out accuracy by pass rate at the start (learning rate {lr:g})",
        "",
        *tables.by_start(runs, "base", lr, bins),
        f"### Where the rollouts went (learning rate {lr:g})",
        "",
        *tables.where(runs, "base", lr),
        f"### How good the statistics are (learning rate {lr:g})",
        "",
        "At the end of a run: estimate less exact pass rate, mean (*bias*) and mean absolute (*error*), over the visited "
        "prompts of the pool. Estimates lag behind a model that learns.",
        "",
        *tables.calibration(runs, "base", lr),
    ]


def fresh_seeds(runs: Runs) -> list[str]:
    """What ``full`` gains on seeds that had no part in choosing it."""
    lr, base_lr = runs.best_lr("base", "full"), runs.best_lr("base", "grpo")
    if lr is None or base_lr is None:
        return []
    seeds = runs.paired("base", "full", lr, base_lr)
    gain = dict(zip(seeds, runs.gain("base", "full", lr, base_lr), strict=True))
    fresh = [gain[s] for s in seeds if s >= CHOSEN_BY]
    if not fresh:
        return []
    return [
        f"The parts of `full` were chosen by seeds 0 to {CHOSEN_BY - 1}, the two options of its sampler by seeds 20 to 31, "
        "which are in no table (`--cell base/full/lr=0.001/seed=20`, and so on, with `--results` naming another file). "
        f"Over the {len(fresh)} seeds after the first {CHOSEN_BY} alone it gains "
        f"{pm(fresh, '{:+.3f}')} on GRPO.",
        "",
    ]


def described(m: dict[str, Any]) -> str:
    """A machine and its software, as a sentence."""
    software = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    return f"On {m['cpu']} ({m['cores']} cores, {m['memory_gib']} GiB), Python {m['python']}, {software}."


def missing(runs: Runs, wanted: Sequence[tuple[str, str, float]], seeds: int) -> list[str]:
    """Cells with fewer seeds than wanted."""
    short: dict[tuple[str, float], list[str]] = {}
    lost = 0
    for variant, preset, lr in wanted:
        have = len([key for key in runs.cells if key[:3] == (variant, preset, lr)])
        if have < seeds:
            lost += seeds - have
            short.setdefault((variant, lr), []).append(f"`{preset}` {have}")
    if not short:
        return []
    listed = "; ".join(f"{variant} at {lr:g}: {', '.join(names)}" for (variant, lr), names in short.items())
    return [
        f"Not run yet, for lack of time: {lost} runs. The same command runs them and leaves the others alone. Cells with "
        f"fewer than {seeds} seeds, and how many they have: {listed}.",
        "",
    ]


# -- the real pipeline --------------------------------------------------------------------------------------------


def cpu_runs(cells: Sequence[dict[str, Any]]) -> Runs:
    """The cells of ``results/train_cpu/``."""
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
        "",
    ]
    for variant, size in train_cpu.VARIANTS.items():
        for lr in runs.lrs(variant):
            lines += [f"### Groups of {size.n}, pool of {size.prompts} prompts, learning rate {lr:g}", ""]
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
    if loads and max(loads) > m["cores"]:
        lines += [
            f"The machine had other work: load averages of {min(loads):.1f} to {max(loads):.1f} on {m['cores']} cores. "
            "Seconds are not to be compared between cells; rollouts, tokens and accuracies are not affected.",
            "",
        ]
    grid = dict.fromkeys(key[:3] for key in train_cpu.grid())
    return lines + missing(runs, list(grid), train_cpu.SEEDS)


def by_variant(runs: Runs, lr: float) -> list[str]:
    """Every policy's gain on GRPO at one learning rate: by group and pool size, and over all pairs of runs."""
    variants = [v for v in train_cpu.VARIANTS if len(runs.measured(v, lr)) > 1]
    if len(variants) < 2:
        return []
    heads = [f"n = {v.n}, {v.prompts} prompts" for v in (train_cpu.VARIANTS[name] for name in variants)]
    rows = []
    for preset in runs.presets:
        gains = [runs.gain(variant, preset, lr, lr) for variant in variants]
        if preset != "grpo" and any(gains):
            every, target = everywhere(runs, preset, lr)
            rows.append([f"`{preset}`", *(pm(gain, "{:+.3f}") for gain in (*gains, every)), target])
    return [
        "### Against GRPO, by group and pool size",
        "",
        f"Held-out accuracy less GRPO's of the same seed, at equal rollouts and learning rate {lr:g}. *all*: over all pairs "
        "of runs as if they were alike. Every run starts from the same weights; a seed is an order of the data and of the "
        "sampling, and the intervals cover no more than that.",
        "",
        *table(["policy", *heads, "all", "rollouts to target, all"], rows),
    ]


def everywhere(runs: Runs, preset: str, lr: float) -> tuple[list[float], str]:
    """Gains on GRPO over the pairs of runs of every variant, and the rollouts to GRPO's final accuracy, as text."""
    gains, needed = [], []
    for variant in train_cpu.VARIANTS:
        gains += runs.gain(variant, preset, lr, lr)
        for seed in runs.paired(variant, preset, lr, lr):
            target = runs.final((variant, "grpo", lr, seed))
            needed.append(runs.needed((variant, preset, lr, seed), target or 0.0))
    hit = [x for x in needed if x is not None]
    return gains, f"{pm(hit, '{:.2f}')} ({len(hit)} of {len(needed)})"


def collapsed(runs: Runs, lr: float, seed: int) -> bool:
    """Whether GRPO ends below where it began."""
    accuracy = runs.curve(("base", "grpo", lr, seed), "held_out")
    return bool(accuracy[-1] < accuracy[0])


def aim_or_why(runs: Runs) -> list[str]:
    """The aim's table, once there are seeds enough to speak of."""
    lr = runs.best_lr("base", "full")
    if lr is None or len(runs.seeds("base", "full", lr)) < 3:
        return []
    return ["### The aim, on the real pipeline", "", *tables.aim(runs, "base")]


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


# -- the other benchmarks -----------------------------------------------------------------------------------------


def store_page(data: dict[str, Any]) -> list[str]:
    size = max(data["sizes"], key=int)
    got, m = data["sizes"][size], data["machine"]
    rows = [[name, f"{got[name]:.3g}", f"{target:g}"] for name, target in data["targets"].items()]
    real = [[f"{n}", f"{got[n]:.3g}", ""] for n in got if n.endswith("real-valued rewards")]
    load = f"load average {m['load before']:.1f} before and {m['load after']:.1f} after"
    return [
        "## The store",
        "",
        f"`{data['command']}`, at {int(size):,} prompts, on {m['processor']} ({m['cores']} cores, {load}):",
        "",
        *table(["", "measured", "target"], rows + real),
    ]


def decisions_page(data: dict[str, Any]) -> list[str]:
    m = data["machine"]
    rows = [
        [
            b["name"],
            f"{b['prompts']:,}",
            f"{b['ms']:.2f}",
            f"{b['worst']:.2f}",
            "" if b["target"] is None else f"{b['target']:g}",
        ]
        for b in data["benchmarks"]
    ]
    return [
        "## Decisions",
        "",
        f"`{data['command']}`, on {m['cpu']} ({m['cores']} cores, load average {data['load']}):",
        "",
        *table(["", "known prompts", "median, ms", "worst, ms", "target, ms"], rows),
    ]


def step_time_page(data: dict[str, Any]) -> list[str]:
    rows = []
    for mode, pairs in data["pairs"].items():
        for arm in pairs[0]:
            row = [f"`{mode}`: {arm}"]
            for what in ("step", "rest"):
                ratio = [p[arm][what] / p["verl"][what] for p in pairs]
                row += [f"{statistics.median(p[arm][what] for p in pairs):.2f}", pm(ratio, "{:.2f}")]
            rows.append(row)
    return [
        "## A step of ours against verl's",
        "",
        f"`{data['command']}`: plain GRPO on the CPU platform, {len(pairs)} pair{'s' * (len(pairs) > 1)} of runs. *same rows*: "
        "rows of zero advantage train too. Much of verl's step here is its 2 s poll, hence the columns without generation.",
        "",
        *table(["trainer", "step, s", "of verl's", "without generation, s", "of verl's"], rows),
    ]


# -- README -------------------------------------------------------------------------------------------------------


def readme(data: dict[str, Any], cells: Sequence[dict[str, Any]]) -> list[str]:
    """The README's part: one table, each policy at its best learning rate."""
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
    return text + readme_cpu(cells) if cells else text


def readme_cpu(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Held-out accuracy at every learning rate, and the gain on GRPO at the best of each."""
    runs = cpu_runs(cells)
    lrs, rows, counts, pairs, common = runs.lrs("base"), [], [], [], train_cpu.COMMON_LR
    presets = list(dict.fromkeys(p for lr in lrs for p in runs.measured("base", lr)))
    for preset in presets:
        row = [f"`{preset}`"]
        for lr in lrs:
            keys = [("base", preset, lr, s) for s in runs.seeds("base", preset, lr)]
            counts.append(len(keys))
            row.append(pm([runs.final(k) for k in keys]) if keys else "–")
        best, base = runs.best_lr("base", preset), runs.best_lr("base", "grpo")
        known = preset != "grpo" and best is not None and base is not None
        gains, target = everywhere(runs, preset, common)
        pairs.append(len(gains))
        rows.append(
            [
                *row,
                pm(runs.gain("base", preset, best, base), "{:+.3f}") if known else "",
                *((pm(gains, "{:+.3f}"), target) if known else ("", "")),
            ]
        )
    if not rows:
        return []
    low, high = min(pairs), max(pairs)
    of = f"{low} to {high}" if low < high else f"{high}"
    last = f"at {common:g}, over all group and pool sizes ({of} pairs)"
    start = np.mean([runs.curve(key, "held_out")[0] for key in runs.cells if key[0] == "base"])
    return [
        f"On real verl and vLLM (CPU, {runs.budget['base']:,} rollouts in every run, {runs.budget['n16']:,} with groups of 16, "
        f"{seeds_of(counts)} each),",
        f"held-out accuracy by learning rate (at the start: {start:.3f}):",
        "",
        *table(
            [
                "preset",
                *(f"{lr:g}" for lr in lrs),
                "against GRPO, each at its best",
                last,
                "rollouts to GRPO's final there",
            ],
            rows,
        ),
        *told_apart(runs, presets, common, of),
    ]


def told_apart(runs: Runs, presets: Sequence[str], lr: float, of: str) -> list[str]:
    """A sentence: which policies' gains over all pairs have an interval that leaves out zero."""
    gains = {p: everywhere(runs, p, lr)[0] for p in presets if p != "grpo"}
    rated = {p: interval(g) for p, g in gains.items() if len(g) > 1}
    above = [f"`{p}`" for p, (mean, half) in rated.items() if mean > half]
    below = [f"`{p}`" for p, (mean, half) in rated.items() if mean < -half]
    return [
        f"Over the {of} pairs at {lr:g}, above GRPO: {', '.join(above) or 'none'}; below: {', '.join(below) or 'none'}; the "
        "others are not told apart from it.",
        "",
    ]


def seeds_of(counts: Sequence[int]) -> str:
    """As "3 seeds" or "1 to 3 seeds"."""
    low, high = min(counts), max(counts)
    return f"{low} to {high} seeds" if low < high else f"{high} seeds"


# -- pages --------------------------------------------------------------------------------------------------------


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """A page with one benchmark's part replaced, or appended if it has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    if not found:
        head = head.rstrip("\n") + "\n\n"
    body = "\n".join(lines).strip("\n")
    return f"{head}{begin}\n{body}\n{end}{tail or chr(10)}"


def figure(path: Path, runs: Runs, lr_of: Callable[[str], float | None], along: Sequence[tuple[str, str]]) -> None:
    """Held-out accuracy, means and 95 % bands over seeds, against each of some counters.

    Args:
        along: columns of the curves, and the labels of their axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "verl-adaptive", "svg.fonttype": "none", "font.size": 9})
    shown = [p for p in (*SHOWN, "oracle", "oracle+keep_all") if p in runs.measured("base")]
    drawing, axes = plt.subplots(1, len(along), figsize=(3.4 * len(along), 3.4), layout="constrained", sharey=True)
    for axis, (column, label) in zip(np.atleast_1d(axes), along, strict=True):
        for number, preset in enumerate(shown):
            lr = lr_of(preset)
            keys = [("base", preset, lr, s) for s in runs.seeds("base", preset, lr)] if lr is not None else []
            if not keys:
                continue
            end = min(runs.curve(k, column)[-1] for k in keys)
            if column == "rollouts":
                end = min(end, runs.budget["base"])
            x = np.linspace(0, end, 40)
            y = np.array([np.interp(x, runs.curve(k, column), runs.curve(k, "held_out")) for k in keys])
            colour = "black" if preset.startswith("oracle") else f"C{number}"
            axis.plot(x, y.mean(0), label=preset, color=colour, lw=1.3, ls=":" if preset.startswith("oracle") else "-")
            if len(keys) > 1:
                half = np.array([interval(column_)[1] for column_ in y.T.tolist()])
                axis.fill_between(x, y.mean(0) - half, y.mean(0) + half, color=colour, alpha=0.1, lw=0)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("held-out accuracy")
    np.atleast_1d(axes)[-1].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def pages(results: Path, results_page: Path, readme_page: Path) -> dict[Path, str]:
    """What the pages should say.

    Raises:
        SystemExit: a marker is missing in the README.
    """

    def read(name: str) -> Any:
        path = results / name
        return json.loads(path.read_text()) if path.exists() else None

    cells = [json.loads(path.read_text()) for path in sorted((results / "train_cpu").glob("*.json"))]
    text = results_page.read_text() if results_page.exists() else "# Results\n"
    tiny = read("train_torch.json")
    if cells:
        part = cpu_page(cells, torch_runs(tiny) if tiny else None)
        drawn = ["![accuracy](figures/train_cpu.svg)"]
        drawn = drawn if cpu_runs(cells).measured("base", train_cpu.COMMON_LR) else []
        text = put(text, "train_cpu", [part[0], "", *drawn, *part[1:]])
    if tiny:
        part = torch_page(tiny)
        text = put(text, "train_torch", [part[0], "", "![accuracy](figures/train_torch.svg)", *part[1:]])
    for name, page in (("store", store_page), ("decisions", decisions_page), ("step_time", step_time_page)):
        if data := read(f"{name}.json"):
            text = put(text, name, page(data))
    out = {results_page: text}
    if tiny and readme_page.exists():
        front = readme_page.read_text()
        if "<!-- benchmark: begin -->" not in front:
            raise SystemExit(f"{readme_page} has no <!-- benchmark: begin --> marker to put the table at")
        out[readme_page] = put(front, "benchmark", readme(tiny, cells))
    return out


def figures(results: Path, folder: Path) -> None:
    """Draw the plots again."""
    path = results / "train_torch.json"
    if path.exists():
        runs = torch_runs(json.loads(path.read_text()))
        along = [("rollouts", "rollouts"), ("updates", "updates"), ("tokens_trained", "trained tokens")]
        figure(folder / "train_torch.svg", runs, lambda p: runs.best_lr("base", p), along)
    cells = [json.loads(p.read_text()) for p in sorted((results / "train_cpu").glob("*.json"))]
    if cells:
        real = cpu_runs(cells)
        along = [
            ("rollouts", "rollouts"),
            ("tokens_generated", "generated tokens"),
            ("tokens_trained", "trained tokens"),
        ]
        along.append(("seconds", "seconds of steps (machine shared)"))
        if real.measured("base", train_cpu.COMMON_LR):
            figure(folder / "train_cpu.svg", real, lambda _: train_cpu.COMMON_LR, along)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(prog="report.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    options = parser.parse_args(arguments)
    stale = False
    for page, text in pages(options.results, options.page, options.readme).items():
        old = page.read_text() if page.exists() else ""
        if options.check and text != old:
            stale = True
            sys.stdout.writelines(
                difflib.unified_diff(old.splitlines(True), text.splitlines(True), str(page), "from the JSON", n=0)
            )
        elif not options.check:
            page.write_text(text)
    if options.check:
        sys.exit(int(stale))
    figures(options.results, options.page.parent / "figures")


if __name__ == "__main__":
    run_script(main)
