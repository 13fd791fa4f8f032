"""A journal's observations in their order, a window at a time: what a run did, without holding all of it in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from verl_adaptive.stats.chance import fdr_score, swings
from verl_adaptive.stats.visits import Visits, by_prompt

if TYPE_CHECKING:
    from verl_adaptive.stats.table import StatsTable


@dataclass
class Window(Visits):
    """Groups of a few steps.

    Attributes:
        reward_square: sum of the squares of the training rewards.
        clipped: rollouts as long as the limit; nan where the journal does not know.
        kept: it trained, or was kept for it and is too old.
    """

    reward_square: np.ndarray
    clipped: np.ndarray
    kept: np.ndarray

    @classmethod
    def of(cls, page: pa.Table, row: np.ndarray, tolerance: float) -> Window:
        """A page of observations, whose prompts are in these rows; tolerance as in :meth:`.table.StatsTable.observe`."""
        column = {name: page.column(name).to_numpy() for name in page.column_names if name not in ("key", "source")}
        return cls(
            row=row,
            step=column["step"],
            n=column["n"],
            success=column["successes"],
            signal=column["signal_sum"],
            square=column["signal_sqsum"],
            reward=column["reward_sum"],
            tokens=np.nan_to_num(column["tokens"]),  # verl's rollouts do not say
            flat=column["signal_max"] - column["signal_min"] <= tolerance,
            failed=column["failed"],
            reward_square=column["reward_sqsum"],
            clipped=np.array(column["clipped"], dtype=np.float64),
            kept=np.isin(column["outcome"].astype(str), ("trained", "stale")),
        )


class Flips:
    """Counts how often a prompt's pass rate went from one side of 1/2 to the other, between visits, and how far it jumped."""

    def __init__(self) -> None:
        # Of each prompt: crossings, the latest side; jumps; the latest visit's rate and size.
        self._kept = np.zeros((5, 0))

    @property
    def count(self) -> np.ndarray:
        """float64 ``(prompts,)``: crossings so far."""
        return self._kept[0]

    def flipping(self, table: StatsTable) -> np.ndarray:
        """float64 ``(prompts,)``: the score of the jumps (:func:`verl_adaptive.stats.chance.swings`), by the totals of a table."""
        totals = (table.col(name)[: self._kept.shape[1]] for name in ("visits", "successes", "rollouts"))
        return np.round(fdr_score(swings(self._kept[2], *(total.astype(np.float64) for total in totals))), 6)

    def add(self, row: np.ndarray, rate: np.ndarray, n: np.ndarray, prompts: int) -> None:
        """Take visits of n rollouts in their order; a rate of exactly 1/2 or nan is on neither side.

        Args:
            row, rate, n: of each visit.
            prompts: how many there are by now.
        """
        self._kept = np.pad(self._kept, ((0, 0), (0, prompts - self._kept.shape[1])))
        count, side, jumps, latest, size = self._kept
        order, first = by_prompt(row, np.isfinite(rate))
        at, rates, sizes = row[order], rate[order], n[order].astype(np.float64)
        known = size[at] > 0  # before this batch; within it, all but the first
        known[~first] = True
        before, smaller = _before(latest, at, first, rates), _before(size, at, first, sizes)
        with np.errstate(divide="ignore", invalid="ignore"):
            np.add.at(jumps, at, np.where(known, (rates - before) ** 2 / (1 / sizes + 1 / smaller), 0.0))
        order, first = by_prompt(row, np.isfinite(rate) & (rate != 0.5))
        at, now = row[order], np.sign(rate[order] - 0.5)
        then = _before(side, at, first, now)
        np.add.at(count, at, (then != 0) & (then != now))


def _before(state: np.ndarray, rows: np.ndarray, first: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What each prompt had at the visit before, for visits from :func:`by_prompt`; the state of a prompt becomes its latest."""
    before = np.concatenate([[0.0], values])[:-1]
    before[first] = state[rows[first]]
    state[rows] = values  # of several values for one place, numpy keeps the last
    return before
