"""A journal's course: what a run rolled out, judged and trained, step by step, in at most :data:`POINTS` bins."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_adaptive.ledger import Ledger
from verl_adaptive.report.accounts import ledgers_of, plan_of, scalars_of
from verl_adaptive.report.judge import Hearing
from verl_adaptive.report.overview import BINS, bins_of
from verl_adaptive.stats import Run
from verl_adaptive.stats.history import Window
from verl_adaptive.stats.visits import by_prompt, difficulty
from verl_adaptive.text import counted

#: Points of a curve; more would not be seen.
POINTS = 120
#: Steps from which savings are estimated.
SETTLED = 10
#: Visits with a column of their own in the picture by visit.
VISITS = 10
#: Data sources with a curve of their own, the largest; one more is all the others.
SOURCES = 20
#: What is summed for every bin and source.
SUMS = ("judged", "rollouts", "successes", "reward", "known", "clipped", "tokens")

CLASSES = ("all wrong", "hard", "middle", "easy", "all right", "failed")

_NEVER = np.iinfo(np.int64).max


class History:
    """A journal's course, steps put together into at most :data:`POINTS` bins; made in one pass over its groups.

    Args:
        run: with a journal, or verl's rollouts.

    Attributes:
        step: last step of each bin.
        steps: steps in each bin; bins differ by one.
        hours: of training, at the end of each bin, pauses between attempts left out.
        pace: seconds a step over the latest steps; nan if not known.
        classes: groups, ``(bins, CLASSES)``.
        sources: names, at most :data:`SOURCES` and the last one for the others where there are more.
        first_solved: data source → the step of its first success; a source without a success is left out.
        sums: name of :data:`SUMS` → float64 ``(bins, sources)``; ``judged`` are groups that did not fail, ``rollouts``,
            ``successes``, ``reward`` and ``tokens`` are of these, and so are ``known``, those whose length was compared with the
            limit, and ``clipped``.
        rollouts: destination → rollouts in each bin.
        generated: rollouts up to each bin; nan if a step of the journal does not say.
        visits: groups by visit number and pass rate, ``(VISITS + 1, BINS)``; the last row is all later visits.
        calibration: predicted sum, observed sum, groups; ``(10, 3)`` by predicted pass rate.
        scalars: name → mean in each bin.
        hearing: what the judge found.
        uniform: what uniform allocation would have cost, or why that is not said; empty of verl's rollouts.
        validations: as :meth:`verl_adaptive.stats.reader.JournalReader.validations`, :func:`priced`.
        plan: ``steps`` and ``rollouts`` planned, as far as the run said.
    """

    def __init__(self, run: Run) -> None:
        steps = run.steps
        numbers, wall, attempt = (steps.column(name).to_numpy() for name in ("step", "wall_time", "attempt"))
        bins = min(POINTS, max(1, len(numbers)))
        parts = np.array_split(numbers, bins) if len(numbers) else [np.zeros(1, dtype=np.int64)]
        self.step = np.array([part[-1] for part in parts])
        home = np.searchsorted(self.step, numbers)
        self.steps = np.maximum(np.bincount(home, minlength=bins), 1)
        paid, last = spent(run), np.searchsorted(numbers, self.step)
        self.pace = hours_of(numbers, wall, attempt)[1]
        self.hours = paid["hours"][last] if paid else np.zeros(bins)
        self.generated = paid["rollouts"][last] if "rollouts" in paid else np.full(bins, np.nan)
        self.rollouts, scalars = _of_steps(steps, home, bins)
        self.scalars = {name: values for name, values in scalars.items() if not name.startswith("adaptive/plan/")}
        self.plan = plan_of(steps.column("scalars")[-1].as_py()) if len(numbers) else {}
        self.validations = priced(run.validations(), paid)
        self.sources, self._source_of = _largest(run)
        self.classes = np.zeros((bins, len(CLASSES)), dtype=np.int64)
        self.sums = {name: np.zeros((bins, len(self.sources))) for name in SUMS}
        self._code = run.table.col("source").astype(np.int64)
        self._first = np.full(len(run.table.sources), _NEVER)
        self.visits = np.zeros((VISITS + 1, len(BINS)), dtype=np.int64)
        self.calibration = np.zeros((10, 3))
        self.hearing = Hearing(run)
        self._seen, self._won, self._tried, self._mixed = np.zeros((4, len(run.table)))  # of each prompt so far
        self._sizes, self._all_sizes = Counter[int](), Counter[int]()  # of kept groups, of all
        self._kept = 0
        for window in run.windows():
            self._add(window)
            self.hearing.add(window)
        self.hearing.end()
        solved = zip(run.table.sources, self._first.tolist(), strict=True)
        self.first_solved = {name: first for name, first in solved if first < _NEVER}
        self.uniform = {} if run.kind == "rollouts" else self._uniform(run.gaps(), len(numbers))

    def rate(self, top: str, bottom: str, axis: bool = True) -> np.ndarray:
        """``top / bottom`` of :data:`SUMS` in each bin, over all sources (or, ``axis=False``, for each)."""
        a, b = self.sums[top], self.sums[bottom]
        if axis:
            a, b = a.sum(axis=1), b.sum(axis=1)
        with np.errstate(all="ignore"):
            return a / b

    def _add(self, w: Window) -> None:
        """Take a window's groups."""
        home = np.minimum(np.searchsorted(self.step, w.step), len(self.step) - 1)
        place = np.select([~w.usable, w.kind < 0, w.kind > 0], [5, 0, 4], default=1 + difficulty(w.rate))
        np.add.at(self.classes, (home, place), 1)
        self._sum(w, home)
        good = w.usable
        self._visit(w.row[good], w.rate[good], w.n[good].astype(np.float64), w.flat[good])
        kept = good & w.kept
        self._kept += int((kept & ~w.flat).sum())
        for sizes, chosen in ((self._sizes, kept), (self._all_sizes, good)):
            sizes.update(w.n[chosen].tolist())

    def _sum(self, w: Window, home: np.ndarray) -> None:
        bins, sources = self.sums["judged"].shape
        cell = home * sources + self._source_of[w.row]
        solved = w.usable & (w.rate > 0)
        np.minimum.at(self._first, self._code[w.row[solved]], w.step[solved])
        judged = w.usable.astype(np.float64)
        values = {
            "judged": judged,
            "rollouts": judged * w.n,
            "successes": np.where(w.usable, w.success, 0.0),
            "reward": np.where(w.usable, w.reward, 0.0),
            "known": judged * w.n * np.isfinite(w.clipped),
            "clipped": judged * np.nan_to_num(w.clipped),
            "tokens": judged * w.tokens,
        }
        for name, value in values.items():
            self.sums[name] += np.bincount(cell, value, minlength=bins * sources).reshape(bins, sources)

    def _visit(self, row: np.ndarray, rate: np.ndarray, n: np.ndarray, flat: np.ndarray) -> None:
        """What each visit's number was, and what the earlier ones predicted; a prompt may come several times."""
        order, first = by_prompt(row)
        row, rate, n, flat = row[order], rate[order], n[order], flat[order]
        start = np.maximum.accumulate(np.where(first, np.arange(len(row)), 0))
        occurrence = np.arange(len(row)) - start

        def before(values: np.ndarray, state: np.ndarray) -> np.ndarray:
            running = np.cumsum(values) - values
            return running - running[start] + state[row]

        won, tried = before(rate * n, self._won), before(n, self._tried)
        visit = np.minimum(self._seen[row].astype(np.int64) + occurrence, VISITS)
        np.add.at(self.visits, (visit, bins_of(rate)), 1)
        known = tried > 0
        predicted = (won + 1) / (tried + 2)
        at = np.clip((predicted * 10).astype(np.int64), 0, 9)[known]
        for column, values in enumerate((predicted, rate, np.ones(len(row)))):
            np.add.at(self.calibration[:, column], at, values[known].astype(np.float64))
        np.add.at(self._seen, row, 1)
        np.add.at(self._won, row, rate * n)
        np.add.at(self._tried, row, n)
        np.add.at(self._mixed, row, ~flat)

    def _uniform(self, gaps: list[tuple[int, int, str]], steps: int) -> dict[str, Any]:
        """Rollouts that uniform allocation with refills would need for the same informative groups.

        Uniform meets a prompt's variance as often as the prompt showed it here, every visited prompt with the same
        weight. That is only fair if groups were of one size; larger ones show variance more often. What was aborted, failed
        or lost is on neither side, and a stale group counts as kept: uniform allocation would have these, too. ``gaps`` are those of
        the run.
        """
        if gaps:
            # The run's account has these steps, the groups do not; nor do the steps that are left know the prompts that
            # were put to rest before, so comparing only those would not be fair either.
            lost = sum(last - first + 1 for first, last, _ in gaps)
            return {"why": f"the journal lacks {counted(lost, 'step')}, and what trained there is not known"}
        seen = self._seen > 0
        if not self._sizes:
            return {"why": "no group has trained yet"}
        if steps < SETTLED:  # few prompts have shown their variance, and no step knew the yield of those before
            return {"why": f"it takes {SETTLED} steps, and the run has {steps}"}
        ((n, _),) = self._sizes.most_common(1)
        if n == 1:
            return {"why": "it compares informative groups, and a single rollout has no variance"}
        other = 1.0 - self._all_sizes[n] / self._all_sizes.total()
        if other > 0.05:
            return {"why": f"groups are of different sizes ({other:.0%} not of {n}), which cannot be compared fairly"}
        share = float((self._mixed[seen] / self._seen[seen]).mean())
        if not self._kept:
            return {"why": "no group was informative"}
        judged, needed = sum(size * count for size, count in self._all_sizes.items()), self._kept * n / share
        return {
            "n": n,
            "share": share,
            "groups": self._kept,
            "needed": needed,
            "judged": judged,
            "saved": 1 - judged / needed,
        }


def hours_of(step: np.ndarray, wall: np.ndarray, attempt: np.ndarray) -> tuple[np.ndarray, float]:
    """Hours of training at each step, and the latest pace in seconds a step.

    The time between the last step of one attempt and the first of the next is nobody's training: usual steps are
    counted for it, and for the first; where no attempt has two steps, nan. Between two steps of a journal may lie those that
    it never got.
    """
    if not len(wall):
        return np.zeros(0), float("nan")
    took, apart = np.diff(wall), np.diff(step)
    inside = attempt[1:] == attempt[:-1]
    usual = float(np.median(took[inside] / apart[inside])) if inside.any() else math.nan
    took = np.where(inside, np.maximum(took, 0.0), usual * apart)
    late = -max(5, len(took) // 5)
    pace = float(took[late:].sum() / apart[late:].sum()) if inside.any() else float("nan")
    return np.cumsum([usual * step[0], *took]) / 3600, pace  # when the first one began nobody wrote down


@dataclass(frozen=True)
class Forecast:
    """The end of a run; nan where it is not known.

    Attributes:
        steps: the last step.
        left: steps to go.
        rollouts: generated in all by then.
        hours: of training in all by then.
        hours_left: to go.
        pace: seconds a step, of the latest steps.
        per_step: rollouts a step, of the latest steps.
        by: what ends the run: ``steps`` or ``rollouts``.
    """

    steps: float
    left: float
    rollouts: float
    hours: float
    hours_left: float
    pace: float
    per_step: float
    by: str


def forecast(history: History) -> Forecast | None:
    """From the latest fifth of the run; None if the run never said what it plans, or has hardly begun."""
    plan, done, generated = history.plan, int(history.step[-1]), history.generated
    if not plan or not np.isfinite(generated).all():
        return None
    # the account has the steps that the journal lacks, too
    so_far, at = np.append(0.0, generated), np.append(0, history.step)
    early = -max(1, len(generated) // 5) - 1
    per_step = float(so_far[-1] - so_far[early]) / float(at[-1] - at[early])
    left, by = plan.get("steps", math.inf) - done, "steps"
    if "rollouts" in plan and per_step > 0:
        by_budget = math.ceil(max(0.0, plan["rollouts"] - float(generated[-1])) / per_step)
        if by_budget < left:
            left, by = by_budget, "rollouts"
    if not math.isfinite(left):
        return None
    left = max(0.0, left)
    hours_left = left * history.pace / 3600
    return Forecast(
        steps=done + left,
        left=left,
        rollouts=float(generated[-1]) + left * per_step,
        hours=float(history.hours[-1]) + hours_left,
        hours_left=hours_left,
        pace=history.pace,
        per_step=per_step,
        by=by,
    )


def _largest(run: Run) -> tuple[list[str], np.ndarray]:
    """Names of the largest sources, and the place of each row of the table among them."""
    table = run.table
    code = table.col("source").astype(np.int64)
    count = np.bincount(code, minlength=len(table.sources))
    order = [i for i in np.argsort(-count, kind="stable").tolist() if count[i]]
    shown = order if len(order) <= SOURCES + 1 else order[:SOURCES]
    place = np.full(max(1, len(table.sources)), len(shown), dtype=np.int64)
    place[shown] = np.arange(len(shown))
    names = [table.sources[i] or "(unknown)" for i in shown]
    if len(order) > len(shown):
        names.append(f"{len(order) - len(shown)} others")
    return names or ["(none)"], place[code]


def spent(run: Run) -> dict[str, np.ndarray]:
    """What a run had cost after each step: ``step``, ``hours`` and, where they are known, ``rollouts`` and ``tokens``; empty
    for a run without steps."""
    if not run.has_course or not run.steps.num_rows:
        return {}
    step, wall, attempt = (run.steps.column(name).to_numpy() for name in ("step", "wall_time", "attempt"))
    paid = {"step": step, "hours": hours_of(step, wall, attempt)[0]}
    ledgers = [ledgers_of(text)[1] for text in run.steps.column("ledger").to_pylist()]
    known = [ledger for ledger in ledgers if ledger is not None]
    if len(known) == len(ledgers):
        costs = {u: np.array([getattr(one, u).generated for one in known], float) for u in ("rollouts", "tokens")}
        paid |= {unit: cost for unit, cost in costs.items() if cost.any()}  # verl's rollouts do not say their tokens
    return paid


def priced(validations: list[dict[str, Any]], paid: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Validations with what the run had :func:`spent` before each: ``rollouts`` as the validation says itself, ``tokens`` and
    ``hours``; nan: not known."""
    at = [one["step"] for one in validations]
    for name in ("rollouts", "tokens", "hours"):
        known = np.interp(at, [0, *paid["step"]], [0.0, *paid[name]]) if name in paid else np.full(len(at), np.nan)
        for one, amount in zip(validations, known.tolist(), strict=True):
            one[name] = one["generated"] if name == "rollouts" and one["generated"] is not None else amount
    return validations


def _of_steps(steps: Any, home: np.ndarray, bins: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Ledgers and scalars by bin: what became of rollouts, and means."""
    rollouts: dict[str, np.ndarray] = {}
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for at, ledger_text, scalars_text in zip(
        home.tolist(), steps.column("ledger").to_pylist(), steps.column("scalars").to_pylist(), strict=True
    ):
        account = (ledgers_of(ledger_text)[0] or Ledger()).rollouts
        where = {"trained": account.trained} | {f"dropped: {reason}": n for reason, n in account.dropped.items()}
        for name, amount in where.items():
            rollouts.setdefault(name, np.zeros(bins))[at] += amount
        for name, value in scalars_of(scalars_text).items():
            sums.setdefault(name, np.zeros(bins))[at] += value
            counts.setdefault(name, np.zeros(bins))[at] += 1
    with np.errstate(invalid="ignore"):
        means = {name: sums[name] / counts[name] for name in sums}
    return rollouts, means
