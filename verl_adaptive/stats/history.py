"""A journal's observations in their order, a window at a time: what a run did, without holding all of it in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from verl_adaptive.stats.chance import surprise, swings
from verl_adaptive.stats.table import key_words

if TYPE_CHECKING:
    from verl_adaptive.stats.run import Run


@dataclass
class Window:
    """Groups of a few steps, in the order of review; arrays of shape ``(G,)``.

    Attributes:
        step: the training step.
        row: the prompt's row in the store's table.
        n: rollouts.
        rate: pass rate; nan for a group that says nothing.
        flat: no variance.
        usable: neither failed nor empty.
        outcome: what became of it, text.
        tokens: response tokens.
        reward: mean training reward; nan for a group that says nothing.
        square: sum of the squares of the difficulty signal.
        clipped: rollouts as long as the limit; nan where the journal does not know.
    """

    step: np.ndarray
    row: np.ndarray
    n: np.ndarray
    rate: np.ndarray
    flat: np.ndarray
    usable: np.ndarray
    outcome: np.ndarray
    tokens: np.ndarray
    reward: np.ndarray
    square: np.ndarray
    clipped: np.ndarray


def windows(run: Run) -> Iterator[Window]:
    """The live line's observations of a journal."""
    for page in run.observations():
        yield _window(run, page)


def _window(run: Run, page: pa.Table) -> Window:
    def column(name: str) -> np.ndarray:
        return page.column(name).to_numpy()

    rows = run.table.rows_for(key_words(page.column("key")), create=False)
    known = rows >= 0  # a step committed since the table was read may bring new prompts
    n, failed = column("n"), column("failed")
    with np.errstate(all="ignore"):
        rate, reward = column("successes") / n, column("reward_sum") / n
    usable = ~failed & (n > 0) & np.isfinite(rate) & np.isfinite(reward) & np.isfinite(column("signal_sum"))
    flat = (column("signal_max") - column("signal_min") <= run.tolerance) & usable
    parts = {
        "step": column("step"),
        "row": rows,
        "n": n,
        "rate": np.where(usable, rate, np.nan),
        "flat": flat,
        "usable": usable,
        "outcome": np.array(page.column("outcome").to_pylist(), dtype=object),
        "tokens": column("tokens"),
        "reward": np.where(usable, reward, np.nan),
        "square": column("signal_sqsum"),
        "clipped": np.array(column("clipped"), dtype=np.float64),
    }
    return Window(**{name: values[known] for name, values in parts.items()})


class Flips:
    """Counts how often a prompt's pass rate went from one side of 1/2 to the other, between visits, and how far it jumped.

    Args:
        prompts: rows of the table.

    Attributes:
        count: int64 ``(prompts,)``.
    """

    def __init__(self, prompts: int) -> None:
        self.count = np.zeros(prompts, dtype=np.int64)
        self._last = np.zeros(prompts, dtype=np.int8)
        self._jumps, self._right, self._rollouts = np.zeros((3, prompts))
        self._visits = np.zeros(prompts, dtype=np.int64)
        self._rate, self._n = np.full((2, prompts), np.nan)  # of the latest visit

    def surprise(self) -> np.ndarray:
        """float64 ``(prompts,)``: how surprising the jumps are (:func:`verl_adaptive.stats.chance.swings`)."""
        return np.round(surprise(swings(self._jumps, self._visits, self._right, self._rollouts)), 6)

    def add(self, row: np.ndarray, rate: np.ndarray, n: np.ndarray) -> None:
        """Take visits of n rollouts in their order; a rate of exactly 1/2 or nan is on neither side."""
        self._jump(row, rate, n)
        with np.errstate(invalid="ignore"):
            side = np.sign(rate - 0.5)
        taken = np.isfinite(side) & (side != 0)
        order = np.argsort(row[taken], kind="stable")
        rows, sides = row[taken][order], side[taken][order].astype(np.int8)
        if not len(rows):
            return
        first = np.ones(len(rows), dtype=bool)
        first[1:] = rows[1:] != rows[:-1]
        before = np.empty(len(rows), dtype=np.int8)
        before[1:] = sides[:-1]
        before[first] = self._last[rows[first]]
        np.add.at(self.count, rows, (before != 0) & (before != sides))
        last = np.append(np.flatnonzero(first)[1:] - 1, len(rows) - 1)
        self._last[rows[last]] = sides[last]

    def _jump(self, row: np.ndarray, rate: np.ndarray, n: np.ndarray) -> None:
        said = np.flatnonzero(np.isfinite(rate))
        said = said[np.argsort(row[said], kind="stable")]
        if not len(said):
            return
        rows, rates, sizes = row[said], rate[said], n[said].astype(np.float64)
        first = np.ones(len(rows), dtype=bool)
        first[1:] = rows[1:] != rows[:-1]
        before, size = np.append(np.nan, rates[:-1]), np.append(np.nan, sizes[:-1])
        before[first], size[first] = self._rate[rows[first]], self._n[rows[first]]
        np.add.at(self._jumps, rows, np.nan_to_num((rates - before) ** 2 / (1 / sizes + 1 / size)))
        np.add.at(self._right, rows, rates * sizes)
        np.add.at(self._rollouts, rows, sizes)
        np.add.at(self._visits, rows, 1)
        last = np.append(np.flatnonzero(first)[1:] - 1, len(rows) - 1)
        self._rate[rows[last]], self._n[rows[last]] = rates[last], sizes[last]


def flips_of(run: Run, prompts: int) -> Flips:
    """The flips of the first ``prompts`` rows of a journal's table."""
    flips = Flips(prompts)
    for window in windows(run):
        known = window.row < prompts
        flips.add(window.row[known], window.rate[known], window.n[known])
    return flips
