"""The README's table of what a step costs, of plain GRPO's with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import train_cpu
from benchmarks.runs import table

__all__ = ["bill", "trained_rows"]

#: In the README's order: the page, and what the preset does.
PRESETS = {
    "grpo": ("baselines.md", "plain GRPO without its rows of zero advantage: the same gradient"),
    "solo": ("solo.md", "one rollout a prompt, many prompts: the baseline is what the store expects of each"),
    "greso": ("greso.md", "skips prompts, before generation, whose own history says they are uninformative"),
    "aero": ("aero.md", "explores with half a group, rescues all-wrong prompts, thins what is redundant"),
    "cero": ("cero.md", "picks prompts from the whole data set under a budget for the whole run"),
    "pilot_commit": ("pilot_commit.md", "a few pilots of many prompts, full groups only where they are mixed"),
    "dapo": ("baselines.md", "baseline: drops groups without variance, and draws prompts until the batch is full"),
    "spo": ("solo.md#spo", "baseline: SPO as published, as far as it can be had"),
}


def bill(clock: dict[str, Any], cells: Sequence[dict[str, Any]]) -> list[str]:
    """The table: rollouts and seconds in the clock's model, tokens that train on the real pipeline; a dash: not measured.

    Args:
        clock: ``results/clock.json``.
        cells: the lines of ``results/train_cpu.jsonl``.
    """
    found, rows = clock["policies"], []
    for preset, (page, about) in PRESETS.items():
        numbers = ["–"] * 2
        if entry := found.get(preset):
            rollouts = entry["begun"] / found["grpo"]["begun"]
            numbers = [f"{rollouts:.2f}", f"{entry['time']:.2f}"]
        trained = trained_rows(cells, preset)
        numbers.insert(2, "–" if trained is None else f"{trained:.2f}")
        rows.append([f"[`+adaptive={preset}`](docs/{page})", about, *numbers])
    head = ["word", "what it does", "rollouts", "generation time", "tokens trained"]
    first, _, *rest = table(head, rows)
    return [first, "|:--|:--|--:|--:|--:|", *rest]


def trained_rows(cells: Sequence[dict[str, Any]], preset: str) -> float | None:
    """Trained tokens of an update, of those of verl's GRPO, which trains rows of zero advantage too; mean over seeds."""
    column = train_cpu.COLUMNS.index

    def spent(name: str) -> dict[int, np.ndarray]:
        chosen = [c for c in cells if (c["variant"], c["preset"], c["lr"]) == ("base", name, train_cpu.COMMON_LR)]
        return {c["seed"]: np.array(c["curve"][-1], dtype=np.float64) for c in chosen}

    ours, grpo = spent(preset), spent("grpo")
    shares = []
    for seed in sorted(set(ours) & set(grpo)):
        whole = grpo[seed][column("tokens_trained")] + grpo[seed][column("tokens_zero_advantage")]
        theirs = whole / grpo[seed][column("updates")]
        shares.append(ours[seed][column("tokens_trained")] / ours[seed][column("updates")] / theirs)
    return float(np.mean(shares)) if shares else None
