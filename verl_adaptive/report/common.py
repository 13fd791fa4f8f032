"""Two runs at the same bill: both cut where they had generated the same number of rollouts, and what chance explains.

Standard errors are of prompts: a validation of m prompts with accuracy p has at most ``sqrt(p (1 - p) / m)``, whatever its
samples; the prompts that both runs visited are compared one by one, so what makes a prompt easy drops out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_adaptive.report.learning import curves
from verl_adaptive.report.opened import TOLERANCE, Opened, reading
from verl_adaptive.report.overview import ledger_of
from verl_adaptive.report.prompts import Prompts

__all__ = ["Cut", "Measured", "cut_at_common", "matched", "validated", "verdict"]

#: Standard errors that are called more than chance.
CHANCE = 2.0
#: Standard errors from which a single prompt is called better or worse: there are many of them.
_PROMPT = 3.0


@dataclass(frozen=True)
class Cut:
    """Where a run was cut.

    Attributes:
        step: the last step that counts; None for a store without a course.
        steps: steps up to there.
        rollouts, tokens: the run's accounts up to there, as the ledger has them; None if not known.
        hours: since the first step was written; None if not known.
        whole: nothing was cut off.
    """

    step: int | None
    steps: int | None
    rollouts: dict[str, Any] | None
    tokens: dict[str, Any] | None
    hours: float | None
    whole: bool


@dataclass(frozen=True)
class Measured:
    """Something that both runs measured.

    Attributes:
        name: for people.
        a, b: the values.
        error: standard error of ``b - a``; None if not known.
        count: prompts behind each.
    """

    name: str
    a: float
    b: float
    error: float | None
    count: int

    @property
    def beyond(self) -> bool:
        """Whether the difference is more than chance explains."""
        return self.error is not None and abs(self.b - self.a) > CHANCE * self.error


def cut_at_common(
    opened: list[Opened], *, whole: bool = False, tolerance: float = TOLERANCE
) -> tuple[list[Opened], list[Cut]]:
    """Both runs up to the last step at which neither had generated more than the other generated in all.

    Args:
        opened: two stores; a store without a course is taken as it is, and then so is the other.
        whole: take both as they are.
        tolerance: as for :func:`verl_adaptive.report.opening.open_prompts`.
    """
    courses = [_course(o) for o in opened]
    if whole or any(course is None for course in courses):
        return opened, [_cut(course, None) for course in courses]
    limit = min(float(course["generated"][-1]) for course in courses if course is not None)
    cuts, out = [], []
    for one, course in zip(opened, courses, strict=True):
        assert course is not None
        at = max(0, int(np.searchsorted(course["generated"], limit, side="right")) - 1)
        cut = _cut(course, at)
        cuts.append(cut)
        if cut.whole:
            out.append(one)
            continue
        with reading(one.source):
            table = one.store.table(one.run, tolerance=tolerance, last_step=cut.step)
        out.append(replace(one, prompts=Prompts(table), retired=None))
    return out, cuts


def _course(opened: Opened) -> dict[str, Any] | None:
    """Steps, rollouts generated so far, and times of a journal that has some."""
    if opened.kind != "journal":
        return None
    with reading(opened.source):
        steps = opened.store.steps_arrow(opened.run)
    ledgers = [ledger_of(text).get("run") for text in steps.column("ledger").to_pylist()]
    if not ledgers or any(ledger is None for ledger in ledgers):
        return None
    return {
        "step": steps.column("step").to_numpy(),
        "wall": steps.column("wall_time").to_numpy(),
        "ledger": ledgers,
        "generated": np.array([ledger["rollouts"]["generated"] for ledger in ledgers if ledger], dtype=np.float64),
    }


def _cut(course: dict[str, Any] | None, at: int | None) -> Cut:
    if course is None:
        return Cut(None, None, None, None, None, True)
    last = len(course["step"]) - 1
    at = last if at is None else at
    ledger = course["ledger"][at]
    hours = float(course["wall"][at] - course["wall"][0]) / 3600
    return Cut(int(course["step"][at]), at + 1, ledger["rollouts"], ledger["tokens"], hours, at == last)


def validated(opened: list[Opened], cuts: list[Cut]) -> list[Measured]:
    """verl's validation of both, the last one up to the cut; sources that both have, the mean over sources last."""
    both = []
    for one, cut in zip(opened, cuts, strict=True):
        if one.kind != "journal":
            return []
        with reading(one.source):
            found = one.store.validations(one.run)
        found = [v for v in found if cut.step is None or v["step"] <= cut.step]
        both.append(curves(found))
    out = []
    for metric in both[0]:
        theirs = {c.name: c for c in both[1].get(metric, [])}
        for a in both[0][metric]:
            b = theirs.get(a.name)
            if b is None:
                continue
            known = a.prompts and b.prompts
            error = float(np.hypot(a.error(-1), b.error(-1))) if known else None
            values = float(a.values[-1]), float(b.values[-1])
            out.append(Measured(f"{metric}, {a.name}", *values, error, min(a.prompts, b.prompts)))
    return out


def matched(one: Prompts, other: Prompts, limit: int, least: int = 1) -> dict[str, Any]:
    """Prompts that both visited often enough.

    Args:
        one, other: A's prompts and B's.
        limit: prompts in each list.
        least: visits that both need.

    Returns:
        Counts, mean latest pass rates with the standard error of their difference, how many prompts differ at all and by
        more than chance explains (and how many would by chance), and those that differ most, in both directions.
    """
    rows = other.table.rows_for(one.table.keys, create=False)
    seen = one.table.col("visits") >= least
    both = (rows >= 0) & seen
    both[both] = other.table.col("visits")[rows[both]] >= least
    mine = np.flatnonzero(both)
    theirs = rows[mine]
    a, b = one.number("last_rate")[mine], other.number("last_rate")[theirs]
    difference = b - a
    score = difference / np.maximum(_errors(one, mine, a, other, theirs, b), 1e-12)
    order = np.lexsort((one.table.key_lo[mine], one.table.key_hi[mine], difference))
    beyond = np.abs(score) > _PROMPT
    count = len(mine)

    def listed(chosen: np.ndarray) -> list[dict[str, Any]]:
        keys, sources = one.values("key", mine[chosen]), one.values("source", mine[chosen])
        return [
            {"key": k, "source": s, "a": float(a[i]), "b": float(b[i])}
            for k, s, i in zip(keys, sources, chosen.tolist(), strict=True)
        ]

    error = float(difference.std(ddof=1) / np.sqrt(count)) if count > 1 else None
    return {
        "prompts": count,
        "least_visits": least,
        "only_a": int(seen.sum()) - count,
        "only_b": int((other.table.col("visits") >= least).sum()) - count,
        "mean_rate_a": float(a.mean()) if count else None,
        "mean_rate_b": float(b.mean()) if count else None,
        "standard_error": error,
        "better_in_b": int((difference > 0).sum()),
        "worse_in_b": int((difference < 0).sum()),
        "clearly_better_in_b": int((beyond & (difference > 0)).sum()),
        "clearly_worse_in_b": int((beyond & (difference < 0)).sum()),
        "clearly_by_chance": round(0.0027 * count, 1),
        "largest_gains_in_b": listed(np.array([i for i in order[::-1][:limit] if difference[i] > 0], dtype=np.int64)),
        "largest_losses_in_b": listed(np.array([i for i in order[:limit] if difference[i] < 0], dtype=np.int64)),
    }


def _errors(
    one: Prompts, mine: np.ndarray, a: np.ndarray, other: Prompts, theirs: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """Standard error of each prompt's difference; a group's size is the mean of the prompt's."""
    n = one.number("rollouts")[mine] / np.maximum(one.number("visits")[mine], 1)
    m = other.number("rollouts")[theirs] / np.maximum(other.number("visits")[theirs], 1)
    # one success and one failure more: 0 of 8 against 1 of 8 is nothing
    p = (a * n + b * m + 1) / (n + m + 2)
    return np.sqrt(p * (1 - p) * (1 / np.maximum(n, 1) + 1 / np.maximum(m, 1)))


def verdict(measures: list[Measured], prompts: Measured | None) -> str:
    """One sentence: who is ahead, by what, and whether chance explains it.

    Args:
        measures: validations, see :func:`validated`.
        prompts: the latest pass rates of the prompts that both visited.
    """
    mean = [m for m in measures if "mean of" in m.name] or measures
    chosen = mean[0] if mean else prompts
    if chosen is None:
        return "Nothing was measured in both runs."
    what = f"validation {chosen.name}" if mean else "the prompts that both visited"
    said = f"{chosen.a:.3f} and {chosen.b:.3f}"
    if chosen.error is None:
        return f"{what}: {said}; how many prompts were validated is not known, so nothing is said of chance."
    band = f"±{CHANCE * chosen.error:.3f} by chance"
    if not chosen.beyond:
        return f"No difference that chance does not explain: {what} {said} ({band})."
    ahead = "B" if chosen.b > chosen.a else "A"
    return f"{ahead} is ahead: {what} {said}, a difference of {chosen.b - chosen.a:+.3f} ({band})."
