"""The parts of ``RESULTS.md`` about speed: the store, decisions, a step beside verl's."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.page_time import on_machine
from benchmarks.runs import pm, table

__all__ = ["decisions_page", "step_time_page", "store_page"]


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
        f"`{data['command']}`: milliseconds of processor time, on {m['cpu']} ({m['cores']} cores, load average {data['load']}):",
        "",
        *table(["", "known prompts", "median, ms", "worst, ms", "target, ms"], rows),
    ]


def step_time_page(data: dict[str, Any]) -> list[str]:
    rows: list[list[str]] = []
    said: dict[str, list[str]] = {}  # how it was measured → the modes that were measured so
    for mode, found in data["modes"].items():
        pairs = found["pairs"]
        how = f"`{found['command']}` ({len(pairs)} pair{'s' * (len(pairs) > 1)}, {on_machine(found)})"
        said.setdefault(how, []).append(f"`{mode}`")
        for arm in pairs[0]:
            row = [f"`{mode}`: {arm}"]
            for what in ("step", "rest"):
                ratio = [p[arm][what] / p["verl"][what] for p in pairs]
                row += [f"{statistics.median(p[arm][what] for p in pairs):.2f}", pm(ratio, "{:.2f}")]
            rows.append(row)
    measured = "; ".join(f"{', '.join(modes)} by {how}" for how, modes in said.items())
    return [
        "## A step of ours against verl's",
        "",
        "Plain GRPO on the CPU platform in pairs of runs. *Same rows*: rows of zero advantage train too. Much of verl's step "
        f"here is its 2 s poll, hence the columns without generation. {measured}.",
        "",
        *table(["trainer", "step, s", "of verl's", "without generation, s", "of verl's"], rows),
    ]
