"""All runs of a training benchmark, and what its tables ask of them; the same for the tiny model and the real pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cells import Key
from verl_adaptive.report.arms import Trial
from verl_adaptive.significance import interval

GRID = 240
WINDOW = 0.1  # accuracies are means over this share of the budget, up to the point in question

Policy = tuple[str, str, float]  # variant, preset, learning rate


def smoothed(x: np.ndarray, y: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """A curve on an even grid, each point a mean over the window before it.

    Args:
        x: where it was measured, from 0.
        y: what.
        unit: the budget in the unit of ``x``; the window is a share of it.

    Returns:
        Points from 0 to the last measured one, as shares of ``unit``, and the values there.
    """
    points = np.arange(int(np.floor(GRID * x[-1] / unit + 1e-9)) + 1) / GRID
    raw = np.interp(points * unit, x, y)
    total = np.concatenate([[0.0], np.cumsum(raw)])
    end = np.arange(1, len(raw) + 1)
    begin = np.maximum(end - round(WINDOW * GRID), 0)
    return points, (total[end] - total[begin]) / (end - begin)


@dataclass
class Runs:
    """Cells of one benchmark.

    Attributes:
        cells: as in the JSON, by key.
        columns: names of the entries of a curve's points.
        budget: rollouts, by variant.
        presets: all names, in order.
        start: of a cell, what tells the weights that it started from. A supervised start gives other weights on another
            processor, and runs are compared from the same ones only.
    """

    cells: dict[Key, dict[str, Any]]
    columns: Sequence[str]
    budget: dict[str, int]
    presets: Sequence[str]
    start: Callable[[dict[str, Any]], Any]

    def __post_init__(self) -> None:
        self._smooth: dict[Key, tuple[np.ndarray, np.ndarray]] = {}

    def curve(self, key: Key, column: str) -> np.ndarray:
        """One column of a run's curve."""
        at = list(self.columns).index(column)
        return np.array([point[at] for point in self.cells[key]["curve"]], dtype=float)

    def smooth(self, key: Key) -> tuple[np.ndarray, np.ndarray]:
        """A run's held-out accuracy along rollouts, as shares of GRPO's."""
        if key not in self._smooth:
            rollouts, held_out = self.curve(key, "rollouts"), self.curve(key, "held_out")
            self._smooth[key] = smoothed(rollouts, held_out, self.budget[key[0]])
        return self._smooth[key]

    def final(self, key: Key) -> float | None:
        """Accuracy where the budget is spent; None: the run ended long before.

        A sampler that plans its own budget may end a step or two early: within a twentieth counts as there.
        """
        points, values = self.smooth(key)
        return float(values[min(GRID, len(values) - 1)]) if points[-1] >= 0.95 else None

    def spent(self, key: Key, column: str) -> float:
        """A counter's value where the budget is spent."""
        return float(np.interp(self.budget[key[0]], self.curve(key, "rollouts"), self.curve(key, column)))

    def trained(self, key: Key, base: Key) -> float:
        """Tokens trained, as a share of those that another run generated."""
        return self.spent(key, "tokens_trained") / self.spent(base, "tokens_generated")

    def needed(self, key: Key, target: float) -> float | None:
        """Rollouts, as a share of the budget, at which the target is reached for the first time; None: never."""
        return Trial(key[3], *self.smooth(key)).needed(target)

    def seeds(self, variant: str, preset: str, lr: float) -> list[int]:
        """Seeds of a cell that reached the budget."""
        found = sorted(key[3] for key in self.cells if key[:3] == (variant, preset, lr))
        return [s for s in found if self.final((variant, preset, lr, s)) is not None]

    def lrs(self, variant: str) -> list[float]:
        return sorted({key[2] for key in self.cells if key[0] == variant})

    def rates(self, variant: str, preset: str) -> list[float]:
        """Learning rates that a policy ran at."""
        return [lr for lr in self.lrs(variant) if self.seeds(variant, preset, lr)]

    def best_lr(self, variant: str, preset: str) -> float | None:
        """The learning rate of the highest final accuracy; None: not measured.

        Each rate is held against the one that ran most often, over the runs that both have.
        """
        rates = self.rates(variant, preset)
        most = max(rates, key=lambda lr: len(self.seeds(variant, preset, lr)), default=None)
        leads = {lr: self.less((variant, preset, lr), (variant, preset, most)) for lr in rates}
        return max((lr for lr in rates if leads[lr]), key=lambda lr: np.mean(leads[lr]), default=None)

    def pairs(self, one: Policy, other: Policy) -> list[int]:
        """Seeds that both policies have, from the same start."""
        seeds = sorted(set(self.seeds(*one)) & set(self.seeds(*other)))
        return [s for s in seeds if self.start(self.cells[(*one, s)]) == self.start(self.cells[(*other, s)])]

    def less(self, one: Policy, other: Policy) -> list[float]:
        """Final accuracy of one policy less the other's of the same seed and start."""
        return [(self.final((*one, s)) or 0.0) - (self.final((*other, s)) or 0.0) for s in self.pairs(one, other)]

    def measured(self, variant: str) -> list[str]:
        """Presets that have runs."""
        has = {key[1] for key in self.cells if key[0] == variant}
        return [preset for preset in self.presets if preset in has]


def pm(values: Iterable[float | None], form: str = "{:.3f}") -> str:
    """Mean ± half width of the 95 % interval; the mean alone for one value, a dash for none."""
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    mean, half = interval(known)
    return form.format(mean) if len(known) == 1 else f"{form.format(mean)} ± {form.format(half).lstrip('+')}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A Markdown table: the first column to the left, or the first ``left`` of them, the others to the right."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join([":--"] * left + ["--:"] * (len(head) - left)) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
