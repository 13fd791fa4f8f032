"""The tiny model's part of ``RESULTS.md``."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import runs as tables
from benchmarks.runs import Runs, details, ends_page, missing, pm, table

__all__ = ["chosen_page", "torch_page", "torch_runs"]

#: Seeds that the parts of ``full`` were chosen by; later ones are a check.
CHOSEN_BY = 5


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
        if variant == "base" or not runs.lrs(variant):
            continue
        named = ", ".join(f"{name} {value}" for name, value in other.items())
        best = runs.lrs(variant) != [common]
        rate = "each policy at its best learning rate" if best else f"learning rate {common:g}"
        lines += [f"### Another pool or size: {variant} ({named}; {rate})", ""]
        if other.get("flat"):
            lines += [
                f"{other['flat']:.0%} of the pool are the questions that the starting model answers most surely, right or "
                "wrong, of twice as many; the rest is spread over the others.",
                "",
            ]
            lines += tables.aim(runs, variant)
        for part in tables.results(runs, variant, lambda p, v=variant, b=best: runs.best_lr(v, p) if b else common):
            lines += part
    lines += details(runs, common, data["bins"])
    lines += ends_page(runs, [v for v in data["variants"] if runs.lrs(v)], "in one process")
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


def chosen_page(data: dict[str, Any]) -> list[str]:
    """By what the options of ``solo`` were chosen: other seeds than those of the tables."""
    runs = torch_runs(data)
    lines = [
        "## How the options of `solo` were chosen",
        "",
        "In one process, by seeds that no other table shows. Held-out accuracy at the end less that of `solo-1` (one rollout a "
        "prompt, options as in the presets' files) and of GRPO at its best learning rate, of the same seed, and rollouts to GRPO's "
        "final accuracy. What is not told apart is left as simple as it was.",
        "",
    ]
    for variant in (v for v in data["variants"] if runs.lrs(v)):
        base_lr = runs.best_lr(variant, "grpo") or 0.0
        for lr in runs.lrs(variant):
            base = {s: runs.final((variant, "solo-1", lr, s)) for s in runs.seeds(variant, "solo-1", lr)}
            rows = []
            for preset in runs.measured(variant, lr):
                finals = {s: runs.final((variant, preset, lr, s)) or 0.0 for s in runs.seeds(variant, preset, lr)}
                grpo = runs.paired(variant, preset, lr, base_lr)
                needed = [
                    runs.needed((variant, preset, lr, s), runs.final((variant, "grpo", base_lr, s)) or 0.0)
                    for s in grpo
                ]
                hit = [x for x in needed if x is not None]
                rows.append(
                    [
                        f"`{preset}`",
                        str(len(finals)),
                        ""
                        if preset == "solo-1"
                        else pm([f - (base[s] or 0.0) for s, f in finals.items() if s in base], "{:+.3f}"),
                        "" if preset == "grpo" else pm(runs.gain(variant, preset, lr, base_lr), "{:+.3f}"),
                        f"{pm(hit, '{:.2f}')}{'' if len(hit) == len(needed) else f' ({len(hit)} of {len(needed)})'}",
                        pm([runs.final((variant, preset, lr, s), "pool") for s in finals]),
                    ]
                )
            seeds = sorted({key[3] for key in runs.cells if key[0] == variant and key[2] == lr})
            lines += [f"### Pool: {variant}, learning rate {lr:g}, seeds {', '.join(map(str, seeds))}", ""]
            lines += table(["policy", "seeds", "less `solo-1`", "less GRPO", "to GRPO's final", "pool"], rows)
    words = (f"* `{name}`: `+adaptive={' '.join(p['words'])}`" for name, p in data["presets"].items())
    return [*lines, "The words behind the names:", "", *words]


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
