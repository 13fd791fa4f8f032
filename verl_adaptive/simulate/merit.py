"""One figure of merit of a simulated preset, and the sentence that answers which one to take.

At the same number of generated rollouts, and as a ratio to GRPO's, seed by seed:

* where the pool learns, what it learned: the rise of its mean true pass rate;
* where it does not (a trace by itself), the signal of the trained groups, ``4cm/(c + m)`` of each;
* with a clock, either of them for each second of generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_adaptive.significance import interval, significant
from verl_adaptive.simulate.driver import ENDS
from verl_adaptive.simulate.equal_budget import BASELINE, by_preset
from verl_adaptive.simulate.presets import REFERENCES


@dataclass(frozen=True)
class Merit:
    """How a preset did, as a multiple of GRPO.

    Attributes:
        ratios: one a seed; empty where nothing can be said (the baseline is not the group's mean), or where a
            run ended with an error.
        single: nothing can be said for want of a signal, as of single rollouts.
    """

    ratios: tuple[float, ...] = ()
    single: bool = False

    @property
    def value(self) -> float | None:
        """Mean over the seeds."""
        return interval(self.ratios)[0] if self.ratios else None

    @property
    def half(self) -> float | None:
        """Half of the mean's 95 % interval; None with one seed."""
        return interval(self.ratios)[1] if len(self.ratios) > 1 else None


def merits(rows: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Merit]]:
    """What is measured, in words, and the merit of every preset; an empty dict without GRPO beside.

    Args:
        rows: of :func:`verl_adaptive.simulate.equal_budget.run_task`.
    """
    by = by_preset(rows)
    base = by.get(BASELINE, {})
    learns = bool(base) and all(row["learns"] for row in base.values())
    timed = all("time" in row for row in rows)

    def value(row: dict[str, Any]) -> float:
        worth = row["pool_end"] - row["pool_start"] if learns else row["signal"] * row["generated"]
        return worth / (row["time"] * row["steps"] if timed else row["generated"])

    what = "learned" if learns else "signal"
    name = f"{what} per {'second' if timed else 'rollout'}"
    out = {}
    for preset, runs in by.items():
        seeds = sorted(set(runs) & set(base))
        if not seeds:
            continue
        # training would end with an error there: nobody should take it
        fails = any(runs[seed]["ended"] not in ENDS for seed in seeds)
        single = not fails and not learns and all(runs[seed]["signal"] == 0 for seed in seeds)
        known = not fails and not single and all(value(base[seed]) for seed in seeds)
        ratios = tuple(value(runs[seed]) / value(base[seed]) for seed in seeds) if known else ()
        out[preset] = Merit(ratios if all(map(math.isfinite, ratios)) else (), single)
    return name, out


def ranked(found: dict[str, Merit], order: Sequence[str]) -> list[str]:
    """The presets, best first; what has no merit and the references that see the true pass rates come last."""

    def place(preset: str) -> tuple[bool, bool, float]:
        merit = found.get(preset)
        known = merit is not None and merit.value is not None
        return preset.split()[0] in REFERENCES, not known, -(merit.value or 0.0) if merit else 0.0

    return sorted(order, key=place)


def answer(name: str, found: dict[str, Merit]) -> str:
    """Which preset for these prompts, in a sentence or two."""
    real = {p: m for p, m in found.items() if p.split()[0] not in REFERENCES and p != BASELINE and m.value is not None}
    silent = [p for p, m in found.items() if m.single] if name.startswith("signal") else []
    told = f" {', '.join(silent)}: not ranked, because the baseline is not the group's mean; --pool ranks by what the pool learns."
    return f"{_best(name, real)}{told if silent else ''}".lstrip()


def _best(name: str, real: dict[str, Merit]) -> str:
    """The sentence about those that have a figure."""
    if not real:
        return ""
    order = sorted(real, key=lambda p: -(real[p].value or 0.0))
    first = order[0]
    best = real[first]
    assert best.value is not None
    what, _, unit = name.partition(" per ")
    times = f"{best.value:.2f}{'' if best.half is None else f' ± {best.half:.2f}'} times"
    said = (
        f"learns {times} as much per {unit} as GRPO" if what == "learned" else f"has {times} GRPO's {what} per {unit}"
    )
    if best.value <= 1:
        return f"For these prompts: plain grpo. The best preset, {first}, {said}."
    if best.half is None:
        return f"For these prompts: {first}, which {said}. One seed has no interval: name at least three with --seeds."
    if not significant([ratio - 1 for ratio in best.ratios]):
        return f"For these prompts: plain grpo. The best preset, {first}, {said}: not significantly more."
    level = [p for p in order[1:] if not _better(best, real[p])]
    beside = f" Not significantly behind it: {', '.join(level)}." if level else ""
    return f"For these prompts: {first}, which {said}.{beside}"


def _better(best: Merit, other: Merit) -> bool:
    """Whether a preset is significantly better than another, in the seeds that both have."""
    return len(best.ratios) == len(other.ratios) and significant(
        [a - b for a, b in zip(best.ratios, other.ratios, strict=True)]
    )
