"""The prompts of a store as columns: those of the statistics table, and a few that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from verl_adaptive.stats.chance import as_few, fdr_score
from verl_adaptive.stats.expressions import Expression
from verl_adaptive.stats.keys import key_hex
from verl_adaptive.stats.suspects import surprises
from verl_adaptive.stats.table import StatsTable


def _ratio(top: str, bottom: str) -> Callable[[Prompts], np.ndarray]:
    def divide(prompts: Prompts) -> np.ndarray:
        with np.errstate(all="ignore"):
            return prompts.get(top) / prompts.get(bottom)

    return divide


def _regression(prompts: Prompts) -> np.ndarray:
    """Score of the latest visit, among all of a prompt's rollouts.

    Where it is all wrong, those before it that are all wrong, too, count with it, as visits of its size: a prompt that fell
    stays low.
    """
    visits, total, successes = (prompts.get(name) for name in ("visits", "rollouts", "successes"))
    drawn = np.where(visits > 1, prompts.get("last_n"), np.nan)
    right = np.round(prompts.get("last_rate") * drawn)
    alike = np.where((right == 0) & (prompts.get("streak_kind") < 0), prompts.get("streak"), 1)
    drawn = np.where(alike > 1, np.minimum(alike * drawn, total - np.round(successes)), drawn)
    known = np.isfinite(right)
    chance = np.full(len(visits), np.nan)
    chance[known] = as_few(right[known], drawn[known], np.round(successes[known]), total[known])
    return np.round(fdr_score(chance), 6)


#: Columns that follow from the table's: name → (what it is, how it is computed).
DERIVED: dict[str, tuple[str, Callable[[Prompts], np.ndarray]]] = {
    "pass_rate": ("successes / rollouts over all visits", _ratio("successes", "rollouts")),
    "mean_reward": ("mean training reward of a rollout", _ratio("reward_sum", "rollouts")),
    "mean_signal": ("mean difficulty signal of a rollout", _ratio("signal_sum", "rollouts")),
    "tokens_per_rollout": ("mean response tokens", _ratio("tokens", "rollouts")),
    "change": (
        "pass rate of the latest visit minus that of the first, to six decimals",
        lambda p: np.round(p.get("last_rate") - p.get("first_rate"), 6),
    ),
    "regression": (
        "-log10 of the false discovery rate of a fall of the pass rate; 1.3 is 5 %",
        _regression,
    ),
    "surprise": (
        "of a prompt that hardly ever succeeds: -log10 of the chance that one of its data source does as badly",
        lambda p: np.round(surprises(p.table), 6),
    ),
}


#: Columns of one visit's pass rate.
_RATES = ("first_rate", "last_rate")

_ABOUT = {
    "key": "the prompt's identity, 32 hex digits; 8 or more of its first ones find it too",
    "source": "data source",
    "visits": "finished groups, failed ones left out",
    "rollouts": "rollouts of these groups",
    "successes": "successes among these rollouts",
    "signal_sum": "sum of the difficulty signal",
    "signal_sqsum": "sum of its squares",
    "reward_sum": "sum of the training reward",
    "tokens": "response tokens",
    "streak": "latest visits in a row that had zero variance",
    "streak_kind": "of that streak: 1 all right, -1 all wrong, 0 none",
    "retired": "1: retired by the sampler (from the newest snapshot)",
    "first_step": "step of the first visit, -1 if there was none",
    "last_step": "step of the latest visit, -1 if there was none",
    "last_try": "as last_step, groups that failed included",
    "first_rate": "pass rate of the first visit, to six decimals",
    "last_rate": "pass rate of the latest visit, to six decimals",
    "last_n": "rollouts of the latest visit",
    "failures": "groups that failed",
    "flips": "crossings of one half from visit to visit (journals only)",
    "flipping": "-log10 of the false discovery rate of jumps between visits; 1.3 is 5 % (journals only)",
}


def about_column(name: str) -> str:
    """What a column is, in a few words."""
    if name in DERIVED:
        return DERIVED[name][0]
    return _ABOUT.get(name) or f"a column of {name.split('.')[0]}'s own"


@dataclass
class Prompts:
    """Columns over the prompts of a table; what conditions and lists look at.

    Attributes:
        table: the statistics.
        further: columns that the table does not have, by name: float64, a value for each of its first rows.
        unknown: columns of the table that the store says nothing about.
    """

    table: StatsTable
    further: Mapping[str, np.ndarray] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.table)

    def names(self) -> list[str]:
        """Every column a condition may name."""
        return ["key", "source", *(c for c in self.table.columns if c != "source"), *DERIVED, *self.further]

    def get(self, name: str) -> np.ndarray:
        """float64: a column of numbers, by any of :meth:`names` but ``key`` and ``source``; nan where nothing is known."""
        if name in self.further:
            known = self.further[name]  # prompts that the table got since have had no visit
            return np.append(known, np.zeros(len(self) - len(known)))
        if name in DERIVED:
            return DERIVED[name][1](self)
        column = self.table.col(name).astype(np.float64)
        if (unsaid := self._unsaid(name)) is not None:
            column[unsaid] = np.nan
        # The rates of visits are float32: unrounded, 7/10 is 0.69999999, which is neither 0.7 nor above it.
        return np.round(column, 6) if name in _RATES else column

    def values(self, name: str, rows: np.ndarray | slice = slice(None)) -> list[Any]:
        """Some rows of a column as Python values, None where nothing is known: ``key`` as 32 hex digits, ``source`` by name."""
        if name == "key":
            return key_hex(self.table.keys[rows])
        if name == "source":
            return self.table.source_names(rows)
        return self.column(name, rows).to_pylist()

    def column(self, name: str, rows: np.ndarray | slice = slice(None)) -> pa.Array:
        """:meth:`values` as Arrow."""
        if name in ("key", "source"):
            return pa.array(self.values(name, rows), pa.string())
        stored = name in self.table.columns and name not in _RATES
        values = (self.table.col(name) if stored else self.get(name))[rows]
        return pa.array(values, mask=self._unsaid(name, rows), from_pandas=True)

    def _unsaid(self, name: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray | None:
        """Where a column of the table is not known; None: nowhere. An answer has one token at least, and a store that does not
        count them has 0."""
        if name == "tokens":
            return (self.table.col("tokens")[rows] == 0) & (self.table.col("rollouts")[rows] > 0)
        return np.ones(len(self.table.keys[rows]), dtype=bool) if name in self.unknown else None

    def records(self, names: Iterable[str], rows: np.ndarray) -> list[dict[str, Any]]:
        """Some rows as dicts of these columns."""
        columns = {name: self.values(name, rows) for name in names}
        return [{name: column[i] for name, column in columns.items()} for i in range(len(rows))]

    def to_arrow(self, rows: np.ndarray | slice = slice(None)) -> pa.Table:
        """All columns (of some rows), as :meth:`column` has them."""
        columns = {name: self.column(name, rows) for name in ("key", "source")}
        columns["n"] = self.column("rollouts", rows)  # what adaptive.warm_start calls it
        columns |= {name: self.column(name, rows) for name in self.names() if name not in columns}
        return pa.table(columns)

    def where(self, condition: str) -> np.ndarray:
        """int64: the rows that satisfy a condition, as for ``stats --where``."""
        return np.flatnonzero(Expression(condition).select(self))

    def order(self, name: str, rows: np.ndarray, descending: bool = False) -> np.ndarray:
        """``rows`` sorted by a column; what has no value comes last, ties in the order of the keys."""
        rows = rows[np.lexsort((self.table.key_lo[rows], self.table.key_hi[rows]))]
        if name == "key":
            return rows[::-1] if descending else rows
        if name == "source":
            rank = np.argsort(np.argsort(np.array(self.table.sources, dtype=object)))
            value = rank[self.table.col("source")[rows]].astype(np.float64)
        else:
            value = self.get(name)[rows]
        return rows[np.argsort(np.where(np.isnan(value), np.inf, -value if descending else value), kind="stable")]
