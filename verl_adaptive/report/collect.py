"""Everything the report shows, worked out in one pass over a journal and a few over the table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_adaptive.report.history import Flips, Window, windows
from verl_adaptive.report.opened import Opened, reading
from verl_adaptive.report.overview import BINS, REGRESSED, ledger_of, overview
from verl_adaptive.stats import StoreError

__all__ = ["CLASSES", "Collected", "History", "collect", "conflicts"]

#: Points of a curve; more would not be seen.
POINTS = 120
#: Visits with a column of their own in the picture by visit.
VISITS = 10

CLASSES = ("all wrong", "hard", "middle", "easy", "all right", "failed")


@dataclass
class History:
    """A journal's course, steps put together into at most :data:`POINTS` bins.

    Attributes:
        step: last step of each bin.
        steps: steps in each bin; bins differ by one.
        classes: groups, ``(bins, CLASSES)``.
        rollouts: destination → rollouts in each bin.
        cumulative: ``generated`` and ``trained`` → rollouts up to each bin.
        visits: groups by visit number and pass rate, ``(VISITS + 1, BINS)``; the last row is all later visits.
        calibration: predicted sum, observed sum, groups with variance, groups; ``(10, 4)`` by predicted pass rate.
        scalars: name → mean in each bin.
        flips: of every prompt.
        uniform: what uniform allocation would have cost, or why that is not said.
    """

    step: np.ndarray
    steps: np.ndarray
    classes: np.ndarray
    rollouts: dict[str, np.ndarray]
    cumulative: dict[str, np.ndarray]
    visits: np.ndarray
    calibration: np.ndarray
    scalars: dict[str, np.ndarray]
    flips: np.ndarray
    uniform: dict[str, Any]


@dataclass
class Collected:
    """What the page is made of.

    Attributes:
        facts: the overview.
        history: None for a snapshot or results.
        lists: title → (explanation, records).
        then_and_now: prompts by class at the first and at the latest visit, ``(3, 3)``.
        conflicts: prompts of the data set that appear with different answers; None if no data set was given.
        notes: what a reader should know.
    """

    facts: dict[str, Any]
    history: History | None
    lists: dict[str, tuple[str, list[dict[str, Any]]]]
    then_and_now: np.ndarray
    conflicts: list[dict[str, Any]] | None = None
    notes: list[str] = field(default_factory=list)


def collect(
    opened: Opened,
    *,
    tries: int = 16,
    limit: int = 20,
    data: str | None = None,
    prompt_key: str = "prompt",
    id_key: str | None = None,
    media_keys: Mapping[str, str] | None = None,
) -> Collected:
    """Work everything out.

    Args:
        opened: the store.
        tries: rollouts without a success from which a prompt counts as never solved.
        limit: prompts in each list.
        data: the training set; adds texts and the search for conflicting answers.
        prompt_key, id_key, media_keys: as in training.
    """
    facts = overview(opened, tries=tries, history=False)
    history = _history(opened, facts) if opened.kind == "journal" else None
    notes = []
    if history is None:
        notes.append(f"{opened.where} is a {opened.kind}: it has no course over time. Give the journal for that.")
    else:
        opened.prompts.fill("flips", history.flips)
        facts["flip_flopping"] = int((history.flips >= 2).sum())
    for first, last, reason in facts.get("gaps") or []:
        notes.append(f"Steps {first} to {last} are not in the journal: {reason}")
    lists = _lists(opened, tries, limit)
    out = Collected(facts, history, lists, _then_and_now(opened), notes=notes)
    if data is not None:
        from verl_adaptive.report.dataset import texts_of

        wanted = {record["key"] for _, records in lists.values() for record in records}
        texts = texts_of(data, wanted, prompt_key=prompt_key, id_key=id_key, media_keys=media_keys)
        for _, records in lists.values():
            for record in records:
                record["text"] = texts.get(record["key"], "")
        out.conflicts = conflicts(data, prompt_key, limit, media_keys)
    return out


# -- over time --------------------------------------------------------------------------------------------------------


def _history(opened: Opened, facts: dict[str, Any]) -> History:
    with reading(opened.source):
        steps = opened.store.steps_arrow(opened.run)
        facts["gaps"] = [list(gap) for gap in opened.store.gaps(opened.run)]
    numbers = steps.column("step").to_numpy()
    facts["steps"] = len(numbers)
    bins = min(POINTS, max(1, len(numbers)))
    parts = np.array_split(numbers, bins) if len(numbers) else [np.zeros(1, dtype=np.int64)]
    last = np.array([part[-1] for part in parts])
    home = np.searchsorted(last, numbers)
    rollouts, cumulative, scalars = _of_steps(steps, home, bins, facts)
    if len(numbers):
        facts["first_step"], facts["last_step"] = int(numbers[0]), int(numbers[-1])
        wall = steps.column("wall_time").to_numpy()
        facts["hours"] = float(wall[-1] - wall[0]) / 3600
    made = _Course(len(opened.prompts), last)
    for window in windows(opened, steps):
        made.add(window)
    return History(
        step=last,
        steps=np.maximum(np.bincount(home, minlength=bins), 1),
        classes=made.classes,
        rollouts=rollouts,
        cumulative=cumulative,
        visits=made.visits,
        calibration=made.calibration,
        scalars=scalars,
        flips=made.flips.count,
        uniform=made.uniform((facts.get("ledger") or {}).get("rollouts", {}).get("generated", 0)),
    )


def _of_steps(
    steps: Any, home: np.ndarray, bins: int, facts: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Ledgers and scalars by bin."""
    rollouts: dict[str, np.ndarray] = {}
    total = {"generated": np.full(bins, np.nan), "trained": np.full(bins, np.nan)}
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for at, ledger_text, scalars_text in zip(
        home.tolist(), steps.column("ledger").to_pylist(), steps.column("scalars").to_pylist(), strict=True
    ):
        ledger, scalars = ledger_of(ledger_text), _numbers(scalars_text)
        account = ledger.get("step", {}).get("rollouts", {})
        where = {"trained": account.get("trained", 0), "surplus": account.get("surplus", 0)}
        where |= {f"dropped: {reason}": amount for reason, amount in account.get("dropped", {}).items()}
        for name, amount in where.items():
            rollouts.setdefault(name, np.zeros(bins))[at] += amount
        run = ledger.get("run", {}).get("rollouts", {})
        for name in total:
            total[name][at] = run.get(name, np.nan)
        facts["ledger"] = ledger.get("run")
        for name, value in scalars.items():
            sums.setdefault(name, np.zeros(bins))[at] += value
            counts.setdefault(name, np.zeros(bins))[at] += 1
    with np.errstate(invalid="ignore"):
        means = {name: sums[name] / counts[name] for name in sums}
    return rollouts, total, means


def _numbers(text: str) -> dict[str, float]:
    """The numbers among a step's scalars; the text may be anybody's."""
    try:
        data = json.loads(text)
        return {name: float(v) for name, v in data.items() if isinstance(v, int | float) and abs(v) < 1e300}
    except (ValueError, AttributeError, RecursionError) as error:
        raise StoreError(f"the journal is damaged: a step's scalars are {text[:60]!r}: {error}") from error


class _Course:
    """Takes groups in their order and keeps sums only."""

    def __init__(self, prompts: int, last: np.ndarray) -> None:
        self._last = last
        self.classes = np.zeros((len(last), len(CLASSES)), dtype=np.int64)
        self.visits = np.zeros((VISITS + 1, len(BINS)), dtype=np.int64)
        self.calibration = np.zeros((10, 4))
        self.flips = Flips(prompts)
        self._seen = np.zeros(prompts, dtype=np.int64)
        self._won = np.zeros(prompts)
        self._tried = np.zeros(prompts)
        self._mixed = np.zeros(prompts)
        self._sizes: dict[int, int] = {}  # of trained groups
        self._all_sizes: dict[int, int] = {}
        self._trained = 0

    def add(self, w: Window) -> None:
        home = np.minimum(np.searchsorted(self._last, w.step), len(self._last) - 1)
        kind = np.select(
            [~w.usable, w.flat & (w.rate <= 0.5), w.flat, w.rate < 0.25, w.rate <= 0.75], [5, 0, 4, 1, 2], default=3
        )
        np.add.at(self.classes, (home, kind), 1)
        self.flips.add(w.row, w.rate)
        good = w.usable
        self._visit(w.row[good], w.rate[good], w.n[good].astype(np.float64), w.flat[good])
        trained = good & (w.outcome == "trained")
        self._trained += int((trained & ~w.flat).sum())
        for sizes, chosen in ((self._sizes, trained), (self._all_sizes, good)):
            for n, count in zip(*np.unique(w.n[chosen], return_counts=True), strict=True):
                sizes[int(n)] = sizes.get(int(n), 0) + int(count)

    def _visit(self, row: np.ndarray, rate: np.ndarray, n: np.ndarray, flat: np.ndarray) -> None:
        """What each visit's number was, and what the earlier ones predicted; a prompt may come several times."""
        if not len(row):
            return
        order = np.argsort(row, kind="stable")
        row, rate, n, flat = row[order], rate[order], n[order], flat[order]
        first = np.ones(len(row), dtype=bool)
        first[1:] = row[1:] != row[:-1]
        start = np.maximum.accumulate(np.where(first, np.arange(len(row)), 0))
        occurrence = np.arange(len(row)) - start

        def before(values: np.ndarray, state: np.ndarray) -> np.ndarray:
            running = np.cumsum(values) - values
            return running - running[start] + state[row]

        won, tried = before(rate * n, self._won), before(n, self._tried)
        visit = np.minimum(self._seen[row] + occurrence, VISITS)
        inner = 1 + np.clip(np.floor(np.round(rate * 10, 9)), 0, 9).astype(np.int64)
        bin_of = np.where(rate <= 0, 0, np.where(rate >= 1, len(BINS) - 1, inner))
        np.add.at(self.visits, (visit, bin_of), 1)
        known = tried > 0
        predicted = (won + 1) / (tried + 2)
        at = np.clip((predicted * 10).astype(np.int64), 0, 9)[known]
        for column, values in enumerate((predicted, rate, ~flat, np.ones(len(row)))):
            np.add.at(self.calibration[:, column], at, values[known].astype(np.float64))
        np.add.at(self._seen, row, 1)
        np.add.at(self._won, row, rate * n)
        np.add.at(self._tried, row, n)
        np.add.at(self._mixed, row, ~flat)

    def uniform(self, generated: int) -> dict[str, Any]:
        """Rollouts that uniform allocation with refills would need for the same informative groups.

        Uniform meets a prompt's variance as often as the prompt showed it here, every visited prompt with the same
        weight. That is only fair if groups were of full size; small ones show variance less often.
        """
        seen = self._seen > 0
        if not self._sizes or not seen.any():
            return {"why": "no group has trained yet"}
        n = max(self._sizes, key=lambda size: self._sizes[size])
        small = sum(count for size, count in self._all_sizes.items() if size < n)
        whole = sum(self._all_sizes.values())
        if small > 0.05 * whole:
            return {
                "why": f"groups are of different sizes ({small / whole:.0%} below {n}), which cannot be compared fairly"
            }
        share = float((self._mixed[seen] / self._seen[seen]).mean())
        if share <= 0 or not self._trained:
            return {"why": "no group had variance"}
        needed = self._trained * n / share
        return {
            "n": n,
            "share": share,
            "groups": self._trained,
            "needed": needed,
            "generated": generated,
            "saved": 1 - generated / needed,
        }


# -- prompts ----------------------------------------------------------------------------------------------------------


def _then_and_now(opened: Opened) -> np.ndarray:
    first, last = opened.prompts.number("first_rate"), opened.prompts.number("last_rate")
    known = np.isfinite(first) & np.isfinite(last)

    def kind(rate: np.ndarray) -> np.ndarray:
        return np.where(rate <= 0.25, 0, np.where(rate < 0.75, 1, 2))

    out = np.zeros((3, 3), dtype=np.int64)
    np.add.at(out, (kind(first[known]), kind(last[known])), 1)
    return out


def _lists(opened: Opened, tries: int, limit: int) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    prompts, table = opened.prompts, opened.prompts.table
    rollouts, successes = table.col("rollouts"), table.col("successes")
    change = prompts.get("change")
    assert isinstance(change, np.ndarray)

    def records(rows: np.ndarray, column: str, descending: bool) -> list[dict[str, Any]]:
        chosen = prompts.order(column, rows, descending)[:limit]
        names = ["key", "source", "visits", "rollouts", "first_rate", "last_rate", "last_step"]
        names += ["flips"] if "flips" in prompts.further else []
        columns = {name: prompts.values(name, chosen) for name in names}
        return [{name: columns[name][i] for name in names} for i in range(len(chosen))]

    never = np.flatnonzero((rollouts >= tries) & (successes <= 0))
    out = {
        "Never solved": (
            f"{len(never):,} prompts without a success in {tries} rollouts or more: too hard, or a wrong label.",
            records(never, "rollouts", True),
        )
    }
    worse = np.flatnonzero(change <= -REGRESSED)
    out["Regressed"] = (
        f"{len(worse):,} prompts whose latest pass rate is lower than the first by {REGRESSED:g} or more.",
        records(worse, "change", False),
    )
    if "flips" in prompts.further:
        flipping = np.flatnonzero(prompts.flips >= 2)
        out["Flip-flopping"] = (
            f"{len(flipping):,} prompts whose pass rate crossed one half at least twice: noisy, or a fragile verifier.",
            records(flipping, "flips", True),
        )
    return out


def conflicts(
    path: str, prompt_key: str, limit: int, media_keys: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Questions that a data set holds with different answers.

    Returns:
        ``text``, ``answers`` and ``rows`` of the first ``limit``; the total is in ``of`` of each.
    """
    from verl_adaptive.report.dataset import answers_of, texts_at

    rows: dict[bytes, list[int]] = {}
    answers: list[str] = []
    for number, (key, answer) in enumerate(answers_of(path, prompt_key=prompt_key, media_keys=media_keys)):
        rows.setdefault(key, []).append(number)
        answers.append(answer)
    found = [r for r in rows.values() if len({answers[i] for i in r}) > 1]
    texts = texts_at(path, {r[0] for r in found[:limit]}, prompt_key=prompt_key)
    return [
        {"text": texts[r[0]], "answers": sorted({answers[i] for i in r}), "rows": r, "of": len(found)}
        for r in found[:limit]
    ]
