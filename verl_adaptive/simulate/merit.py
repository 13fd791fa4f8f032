"""One figure of merit of a simulated preset, and the sentence that answers which one to take.

At the same number of generated rollouts, and as a ratio to GRPO's, seed by seed:

* where the pool learns, what it learned: the rise of its mean true pass rate;
* where it does not (a trace by itself), the signal of the trained groups, ``4cm/(c + m)`` of each;
* with a clock, either of them for each second of generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_adaptive.significance import LEAST_SEEDS, significant
from verl_adaptive.simulate.driver import ENDS
from verl_adaptive.simulate.equal_budget import BASELINE, by_preset, mean_of
from verl_adaptive.simulate.presets import PEERS, REFERENCES
from verl_adaptive.text import counted


@dataclass
class Merits:
    """How presets did, as multiples of GRPO.

    Attributes:
        what: what they did: ``learned`` or ``signal``.
        unit: of what that cost: ``rollout`` or ``second``.
        ratios: preset → one a seed; empty where nothing can be said, as where a run ended with an error.
        silent: presets of which nothing can be said for want of a signal: their baseline is not the group's mean.
        foreign: preset → verl's own estimator that it trains with, which is not simulated.
    """

    what: str
    unit: str
    ratios: dict[str, list[float]] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    foreign: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What is measured, in words."""
        return f"{self.what} per {self.unit}"

    def mean(self, preset: str) -> tuple[float | None, float | None]:
        """Mean over the seeds, and half of its 95 % interval, which one seed does not have; None where nothing can be said."""
        ratios = self.ratios.get(preset)
        return mean_of(ratios) if ratios else (None, None)

    def ranked(self, presets: Iterable[str]) -> list[str]:
        """Presets, best first; what has no merit and the references that see the true pass rates come last."""

        def place(preset: str) -> tuple[bool, bool, float]:
            mean = self.mean(preset)[0]
            return preset.split()[0] in REFERENCES, mean is None, -(mean or 0.0)

        return sorted(presets, key=place)

    def answer(self) -> str:
        """Which preset for these prompts, in a sentence or two."""
        if BASELINE in self.silent:
            return f"Nothing is ranked: no group of {BASELINE} is informative here."
        told = ", because the baseline is not the group's mean; --pool ranks by what the pool learns."
        silent = f" {', '.join(self.silent)}: not ranked{told}" if self.silent else ""
        for preset, estimator in self.foreign.items():
            silent += f" {preset}: not ranked, because verl's {estimator} is not simulated."
        return f"{self._best()}{silent}".lstrip()

    def _best(self) -> str:
        """The sentence about the presets with a figure."""
        known = (p for p in self.ranked(self.ratios) if self.ratios[p])
        real = [p for p in known if p.split()[0] not in (*PEERS, *REFERENCES) and p != BASELINE]
        if not real:
            return ""
        first, *others = real
        ours = self.ratios[first]
        mean, half = mean_of(ours)
        times = f"{mean:.2f}{'' if half is None else f' ± {half:.2f}'} times"
        said = f"has {times} GRPO's signal per {self.unit}"
        if self.what == "learned":
            said = f"learns {times} as much per {self.unit} as GRPO"
        if len(ours) < LEAST_SEEDS:
            seeds = counted(len(ours), "seed")
            return f"Not told by {seeds}, in which {first} {said}: name {LEAST_SEEDS} or more, as --seeds 0,1,2."
        if mean <= 1:
            return f"For these prompts: plain grpo. The best preset, {first}, {said}."
        if not significant([ratio - 1 for ratio in ours]):
            return f"For these prompts: plain grpo. The best preset, {first}, {said}: not significantly more."
        level = [p for p in others if not significant([a - b for a, b in zip(ours, self.ratios[p], strict=True)])]
        beside = f" Not significantly behind it: {', '.join(level)}." if level else ""
        return f"For these prompts: {first}, which {said}.{beside}"


def merits(rows: Sequence[dict[str, Any]]) -> Merits:
    """The merit of every preset; none without GRPO beside.

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

    out = Merits("learned" if learns else "signal", "second" if timed else "rollout")
    for preset, runs in by.items():
        seeds = sorted(set(runs) & set(base))
        out.ratios[preset] = []
        # training would end with an error there: nobody should take it
        if not seeds or any(runs[seed]["ended"] not in ENDS for seed in seeds):
            continue
        if estimator := runs[seeds[0]].get("foreign_estimator"):
            out.foreign[preset] = estimator
        elif not learns and all(runs[seed]["signal"] == 0 for seed in seeds):
            out.silent.append(preset)
        elif all(value(base[seed]) for seed in seeds):
            ratios = [value(runs[seed]) / value(base[seed]) for seed in seeds]
            out.ratios[preset] = ratios if all(map(math.isfinite, ratios)) else []
    return out
