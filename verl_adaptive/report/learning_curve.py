"""verl's validation metrics as curves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Curves in one picture.
CURVES = 8
_NAME = re.compile(r"val-(core|aux)/(.+)/([^/]+)/((?:mean|best|maj|worst)@\d+(?:/mean)?)")  # spreads are no accuracy


@dataclass
class Curve:
    """One metric of one data source over the validations that have it.

    Attributes:
        name: the data source, or ``mean of N sources``.
        metric: ``acc/mean@8`` and the like.
        at: int ``(k,)``, positions among the validations.
        values: float64 ``(k,)``.
        prompts: validation prompts behind each value; 0 if not known.
        parts: the curves that it is the mean of, at the same validations; empty for a single source.
    """

    name: str
    metric: str
    at: np.ndarray
    values: np.ndarray
    prompts: int = 0
    parts: tuple[Curve, ...] = ()

    @property
    def sources(self) -> set[str]:
        """The data sources that it is of."""
        return {part.name for part in self.parts} or {self.name}

    @property
    def shares(self) -> bool:
        """Whether the values can be shares of right answers; what leaves [0, 1] is a reward."""
        return bool((self.values >= 0).all() and (self.values <= 1).all())

    def error(self, i: int) -> float | None:
        """At most this is the standard error of a value; None where that is not known.

        That is so of prompts that nobody counted, and of rewards: how far those of single prompts lie apart nobody wrote
        down.
        """
        if self.parts:  # each source weighs the same, however few prompts it has
            known = [error for part in self.parts if (error := part.error(i)) is not None]
            return float(np.linalg.norm(known)) / len(known) if len(known) == len(self.parts) else None
        if not self.prompts or not self.shares:
            return None
        p = float(self.values[i])
        return float(np.sqrt(p * (1 - p) / self.prompts))

    def of_rewards(self, spread: float) -> float:
        """At most this is the standard error of a mean reward, if single rewards have this deviation; 0 where not known."""
        if self.parts:  # as for shares, each source weighs the same
            return float(np.linalg.norm([part.of_rewards(spread) for part in self.parts])) / len(self.parts)
        return spread / float(np.sqrt(self.prompts)) if self.prompts else 0.0


def curves(validations: Sequence[dict[str, Any]]) -> dict[str, list[Curve]]:
    """Metric → its curves, one a source; verl's core metrics only, or the others where there is none of them.

    The metric that people call accuracy, the mean over rollouts, comes first; what is no metric of verl's is left out.
    """
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for at, one in enumerate(validations):
        for name, value in one["metrics"].items():
            match = _NAME.fullmatch(name)
            if match:
                found.setdefault((match[1], f"{match[3]}/{match[4]}", match[2]), []).append((at, float(value)))
    section = "core" if any(kind == "core" for kind, _, _ in found) else "aux"
    prompts: dict[str, int] = next((one["prompts"] for one in reversed(validations) if one["prompts"]), {})
    out: dict[str, list[Curve]] = {}
    for (kind, metric, source), points in found.items():
        if kind == section:
            where, values = np.array([p[0] for p in points]), np.array([p[1] for p in points])
            out.setdefault(metric, []).append(Curve(source, metric, where, values, max(0, int(prompts.get(source, 0)))))
    order = sorted(out, key=lambda m: ("/mean@" not in m or m.count("/") > 1, not m.startswith("acc"), m))
    return {metric: _shown(out[metric]) for metric in order}


def _shown(found: list[Curve]) -> list[Curve]:
    """The largest sources; last, for it stands for the run, the mean over all that every validation has, or the largest."""
    found = sorted(found, key=lambda c: (-c.prompts, c.name))
    times = np.unique(np.concatenate([c.at for c in found]))
    whole = [c for c in found if len(c.at) == len(times)]
    out = found[: CURVES - 1] if len(found) > 1 else found
    if len(whole) > 1:
        values = np.mean([c.values for c in whole], axis=0)
        name = f"mean of {len(whole)} sources"
        return [*out, Curve(name, whole[0].metric, whole[0].at, values, sum(c.prompts for c in whole), tuple(whole))]
    last = (whole or found)[0]
    return [*(c for c in out if c is not last), last]


def headline(validations: Sequence[dict[str, Any]]) -> list[Curve]:
    """The curves of the first metric; empty if nothing was validated."""
    return next(iter(curves(validations).values()), [])


def smooth(values: np.ndarray, weights: np.ndarray, width: int) -> np.ndarray:
    """Weighted mean over ``width`` neighbours around each value, fewer at the ends; nan where nothing weighs.

    Args:
        values: float64 ``(k,)``; nan weighs nothing.
        weights: float64 ``(k,)``.
        width: odd, at most k; 1 leaves the values.
    """
    weight = np.where(np.isfinite(values), weights, 0.0)
    kernel = np.ones(width)
    top = np.convolve(np.nan_to_num(values) * weight, kernel, mode="same")
    bottom = np.convolve(weight, kernel, mode="same")
    with np.errstate(all="ignore"):
        return top / bottom
