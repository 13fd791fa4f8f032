"""The prompts of a store as columns: those of the statistics table, and a few that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from verl_adaptive.stats.chance import as_few, surprise
from verl_adaptive.stats.expressions import Expression, Words
from verl_adaptive.stats.keys import key_hex
from verl_adaptive.stats.table import StatsTable


def _ratio(top: str, bottom: str) -> Callable[[Prompts], np.ndarray]:
    def divide(prompts: Prompts) -> np.ndarray:
        with np.errstate(all="ignore"):
            return prompts.number(top) / prompts.number(bottom)

    return divide


def _regression(prompts: Prompts) -> np.ndarray:
    """Surprise at the latest visit, among all of a prompt's rollouts; a visit's size is taken as the prompt's mean."""
    visits, total, successes = (prompts.number(name) for name in ("visits", "rollouts", "successes"))
    with np.errstate(all="ignore"):
        drawn = np.where(visits > 1, np.maximum(1.0, np.round(total / visits)), np.nan)
        right = np.round(prompts.number("last_rate") * drawn)
    known = np.isfinite(right)
    chance = np.full(len(visits), np.nan)
    chance[known] = as_few(right[known], drawn[known], np.round(successes[known]), total[known])
    return np.round(surprise(chance), 6)


#: Columns that follow from the table's: name → (what it is, how it is computed).
DERIVED: dict[str, tuple[str, Callable[[Prompts], np.ndarray]]] = {
    "pass_rate": ("successes / rollouts over all visits", _ratio("successes", "rollouts")),
    "mean_reward": ("mean training reward of a rollout", _ratio("reward_sum", "rollouts")),
    "mean_signal": ("mean difficulty signal of a rollout", _ratio("signal_sum", "rollouts")),
    "tokens_per_rollout": ("mean response tokens", _ratio("tokens", "rollouts")),
    "change": (
        "pass rate of the latest visit minus that of the first, to six decimals",
        lambda p: np.round(p.number("last_rate") - p.number("first_rate"), 6),
    ),
    "regression": (
        "surprise at how low the latest visit is: -log10 of the false discovery rate; 1.3 is 5 %",
        _regression,
    ),
}


#: Columns of one visit's pass rate.
_RATES = ("first_rate", "last_rate")

_ABOUT = {
    "key": "the prompt's identity, 32 hex digits; 8 or more of its first ones find it too",
    "source": "data source",
    "visits": "groups that said something",
    "rollouts": "rollouts in them",
    "successes": "evidence of success in them",
    "signal_sum": "sum of the difficulty signal",
    "signal_sqsum": "sum of its squares",
    "reward_sum": "sum of the training reward",
    "tokens": "response tokens",
    "streak": "visits in a row without variance",
    "streak_kind": "of that streak: 1 all right, -1 all wrong, 0 none",
    "retired": "1: at rest (from the newest snapshot)",
    "first_step": "step of the first visit, -1 if there was none",
    "last_step": "step of the latest visit, -1 if there was none",
    "last_try": "as last_step, groups that failed included",
    "first_rate": "pass rate of the first visit, to six decimals",
    "last_rate": "pass rate of the latest visit, to six decimals",
    "failures": "groups that failed and say nothing",
    "flips": "crossings of one half from visit to visit (journals only)",
    "flipping": "surprise at the jumps from visit to visit, as of regression (journals only)",
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
        further: columns that take their time, by name: functions that give float64, worked out when first asked for.
    """

    table: StatsTable
    further: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    _found: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def names(self) -> list[str]:
        """Every column a condition may name."""
        return ["key", "source", *(c for c in self.table.columns if c != "source"), *DERIVED, *self.further]

    def fill(self, name: str, values: np.ndarray) -> None:
        """Give a further column that was worked out on the way to something else; float64, a value a row so far."""
        self._found[name] = values.astype(np.float64)

    @property
    def flips(self) -> np.ndarray:
        """The column ``flips``, which journals have."""
        return self._further("flips")

    def _further(self, name: str) -> np.ndarray:
        if name not in self._found:
            self.fill(name, self.further[name]())
        known = self._found[name]  # prompts that the table got since have no value
        return np.append(known, np.full(len(self) - len(known), np.nan))

    def number(self, name: str) -> np.ndarray:
        """A column of the table as float64, so that differences of unsigned columns do not wrap."""
        values = self.table.col(name).astype(np.float64)
        # The rates of visits are float32: unrounded, 7/10 is 0.69999999, which is neither 0.7 nor above it.
        return np.round(values, 6) if name in _RATES else values

    def get(self, name: str) -> np.ndarray | Words:
        """A column by any of :meth:`names`."""
        if name == "key":
            return self.table.keys
        if name == "source":
            return Words(self.table.col("source"), self.table.sources)
        if name in self.further:
            return self._further(name)
        return DERIVED[name][1](self) if name in DERIVED else self.number(name)

    def values(self, name: str, rows: np.ndarray) -> list[Any]:
        """Some rows of a column as Python values, for printing."""
        if name == "key":
            return key_hex(self.table.keys[rows])
        if name == "source":
            return [self.table.sources[i] for i in self.table.col("source")[rows].tolist()]
        if name in self.further or name in DERIVED or name in _RATES:
            return self.get(name)[rows].tolist()  # type: ignore[index]
        return self.table.col(name)[rows].tolist()

    def records(self, names: Iterable[str], rows: np.ndarray) -> list[dict[str, Any]]:
        """Some rows as dicts of these columns."""
        columns = {name: self.values(name, rows) for name in names}
        return [{name: column[i] for name, column in columns.items()} for i in range(len(rows))]

    def to_arrow(self, rows: np.ndarray | None = None) -> pa.Table:
        """All columns (of some rows) as Arrow: ``key`` as 32 hex digits, ``source`` by name; null where nothing is known."""
        rows = np.arange(len(self)) if rows is None else rows
        columns: dict[str, pa.Array] = {
            "key": pa.array(self.values("key", rows), pa.string()),
            "source": pa.array(self.values("source", rows), pa.string()),
            "n": pa.array(self.table.col("rollouts")[rows]),  # what adaptive.warm_start calls it
        }
        for name in self.names():
            if name not in columns:
                values = self.table.col(name)[rows] if name in self.table.columns else self.get(name)[rows]  # type: ignore[index]
                columns[name] = pa.array(values, from_pandas=True)
        return pa.table(columns)

    def where(self, condition: str) -> np.ndarray:
        """int64: the rows that satisfy a condition, as for ``stats --where``."""
        return np.flatnonzero(Expression(condition).select(self))

    def order(self, name: str, rows: np.ndarray, descending: bool = False) -> np.ndarray:
        """``rows`` sorted by a column; what has no value comes last, ties in the order of the keys."""
        column = self.get(name)
        by_key = self.table.key_lo[rows], self.table.key_hi[rows]
        if isinstance(column, Words):
            rank = np.argsort(np.argsort(np.array(column.words, dtype=object)))
            value = rank[column.code[rows]].astype(np.float64)
        elif column.dtype.names is not None:
            order = np.lexsort(by_key)
            return rows[order[::-1] if descending else order]
        else:
            value = column[rows]
        value = np.where(np.isnan(value), np.inf, -value if descending else value)
        return rows[np.lexsort((*by_key, value))]
