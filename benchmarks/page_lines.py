"""The part of ``RESULTS.md`` about verl's own example command lines."""

from __future__ import annotations

from typing import Any

from benchmarks.runs import table

__all__ = ["lines_page"]

#: Classes of ``benchmarks.example_lines``, and what they mean.
CLASSES = {
    "priced": "priced",
    "no price": "accepted, without a price",
    "refused": "refused by the preset",
    "verl refuses": "refused by this verl, preset or not",
    "another program": "not `main_ppo`",
    "crashed": "crashed",
}


def lines_page(data: dict[str, Any]) -> list[str]:
    """How many of verl's lines ``doctor`` prices, and what the presets refuse."""
    counts = data["counts"]
    shown = [
        name for name in CLASSES if name in ("priced", "refused", "crashed") or any(name in c for c in counts.values())
    ]
    rows = [[f"`+adaptive={p}`", *(str(c.get(name, 0)) for name in shown)] for p, c in counts.items()]
    refused: dict[str, list[str]] = {}
    for line in data["lines"]:
        for preset in counts:
            if line[preset]["class"] in ("refused", "crashed", "no price"):
                refused.setdefault(line["script"].removeprefix("examples/"), []).append(preset)
    names = ", ".join(f"`{script}` ({', '.join(presets)})" for script, presets in refused.items())
    return [
        "## verl's example command lines",
        "",
        f"`{data['command']}`: what `doctor` of verl {data['versions']['verl']} says of the {len(data['lines'])} lines that the "
        f"scripts in verl's `examples` run by their defaults, with the preset added. Reasons are in "
        "`results/example_lines.json`.",
        "",
        *table(["preset", *(CLASSES[name] for name in shown)], rows),
        *(["", f"By the presets: {names}."] if names else []),
    ]
