"""The prompt-statistics table: numpy columns in memory, one row a prompt, every operation vectorised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from verl_adaptive.groups import Groups
from verl_adaptive.stats import keys as _keys
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.visits import Visits, extend_streaks, waves


class Column(NamedTuple):
    """What a column holds: a numpy dtype (bool, integer or float) and the value a new prompt starts with."""

    dtype: Any
    default: float = 0

    def normal(self) -> Column:
        """With the dtype resolved and the default a Python scalar of that type.

        Raises:
            ValueError: not a bool, integer or float dtype, or a default that the dtype cannot hold.
        """
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biuf":
            raise ValueError(f"a column is bool, integer or float, not {dtype}")
        try:
            with np.errstate(invalid="raise"):
                default = np.array(self.default).astype(dtype).item()
            fits = dtype.kind == "f" or default == self.default
        except (FloatingPointError, OverflowError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(f"default {self.default!r} does not fit {dtype}")
        return Column(dtype.newbyteorder("="), default)

    def same(self, other: Column) -> bool:
        """Equal dtype and default, nan being equal to itself."""
        both_nan = self.default != self.default and other.default != other.default
        return self.dtype == other.dtype and (both_nan or self.default == other.default)


SHARED_COLUMNS: dict[str, Column] = {
    "visits": Column("u4"),  # finished groups, failed ones left out
    "rollouts": Column("u4"),
    "successes": Column("f8"),
    "signal_sum": Column("f8"),
    "signal_sqsum": Column("f8"),
    "reward_sum": Column("f8"),
    "tokens": Column("u8"),
    "streak": Column("u2"),  # trailing run of zero-variance visits of one kind, saturating
    "streak_kind": Column("i1"),  # +1 easy (all high), -1 hard (all low), 0 none
    "retired": Column("u1"),  # set by policies
    "first_step": Column("i4", -1),
    "last_step": Column("i4", -1),
    "last_try": Column("i4", -1),  # as last_step, groups that said nothing included
    "first_rate": Column("f4", float("nan")),
    "last_rate": Column("f4", float("nan")),
    "last_n": Column("u4"),  # rollouts of the visit with last_rate
    "failures": Column("u2"),  # groups that said nothing, saturating
    "source": Column("u2"),  # position in `StatsTable.sources`
}

_ARROW_META = b"verl_adaptive.table"


def key_words(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Keys of an Arrow column of 16-byte values, as an array of ``KEY_DTYPE``."""
    parts = [np.empty(0, dtype=KEY_DTYPE)]
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        raw = np.frombuffer(chunk.buffers()[1], dtype=">u8", offset=16 * chunk.offset, count=2 * len(chunk))
        parts.append(raw.astype("<u8").view(KEY_DTYPE))
    return np.concatenate(parts)


def key_column(keys: np.ndarray) -> pa.Array:
    """The inverse of :func:`key_words`: keys as an Arrow column of 16-byte values."""
    raw = np.ascontiguousarray(keys).view("<u8").astype(">u8")
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(keys), [None, pa.py_buffer(raw)])


def _first(keys: np.ndarray) -> np.ndarray:
    """The first four bytes of each key."""
    return (keys["hi"] >> np.uint64(32)).astype("u4")


class StatsTable:
    """One row a prompt, one numpy array a column.

    Rows are numbered in the order in which their keys were first seen and never move or disappear. Decisions must not
    depend on row numbers, which differ between a data set and the same data set reordered; they depend on keys.

    **Views.** :meth:`col`, :attr:`keys`, :attr:`key_hi` and :attr:`key_lo` are views of the live data: write through
    them freely, but do not keep them across a call that may add rows (:meth:`rows_for`), which may move the data.

    Attributes:
        sources: data sources by name; a prompt's ``source`` is a position in this list. Entry 0 is ``""``: not known.
    """

    def __init__(self) -> None:
        self.sources: list[str] = [""]
        self._source_ids: dict[str, int] = {"": 0}
        self._keys = np.empty(0, dtype=KEY_DTYPE)
        self._order = self._firsts = np.empty(
            0, dtype="u4"
        )  # rows by key, and how each of these keys begins; see _find
        self._columns: dict[str, Column] = {}
        self._data: dict[str, np.ndarray] = {}
        for name, column in SHARED_COLUMNS.items():
            self._add_column(name, column.normal())

    # -- shape ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def columns(self) -> dict[str, Column]:
        """Every column's declaration by its full name (a copy)."""
        return dict(self._columns)

    def _add_column(self, name: str, column: Column) -> None:
        self._columns[name] = column
        self._data[name] = np.full(len(self), column.default, dtype=column.dtype)

    def declare(self, namespace: str, columns: Mapping[str, Column]) -> None:
        """Add a policy's own columns, each as ``namespace.name``; those that exist keep their data.

        Args:
            namespace: the policy's name; not empty.
            columns: by short name.

        Raises:
            ValueError: a column exists with another dtype or default, or a name or declaration is not usable.
        """
        if not namespace:
            raise ValueError("a policy's columns need a namespace")
        wanted: dict[str, Column] = {}
        for name, column in columns.items():
            if not isinstance(column, tuple):  # "f4" would be type f, default 4
                raise ValueError(f'column {name} is {column!r}; write a type and a default: Column("f4", 0.0)')
            try:
                wanted[f"{namespace}.{name}"] = Column(*column).normal()
            except (TypeError, ValueError) as error:
                raise ValueError(f"column {name}: {error}") from error
        for name, column in wanted.items():
            have = self._columns.get(name)
            if have is not None and not have.same(column):
                raise ValueError(
                    f"column {name} is declared as {column.dtype} (default {column.default!r}) "
                    f"but the table has it as {have.dtype} (default {have.default!r})"
                )
        for name, column in wanted.items():
            if name not in self._columns:
                self._add_column(name, column)

    def col(self, name: str) -> np.ndarray:
        """The column's live data, shape ``(len(table),)``, writable; do not keep it while rows are added.

        Raises:
            KeyError: no such column; the message lists those there are.
        """
        try:
            return self._data[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; the table has: {', '.join(self._columns)}") from None

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """While a component is asked: the table's own columns cannot be written, but for ``retired``, which components set."""
        own = [self._data[name] for name in SHARED_COLUMNS if name != "retired"]
        locked = [column for column in own if column.flags.writeable]  # else an outer one unlocks it
        for column in locked:
            column.flags.writeable = False
        try:
            yield
        finally:
            for column in locked:
                column.flags.writeable = True

    @property
    def keys(self) -> np.ndarray:
        """The prompts' keys, :data:`~verl_adaptive.stats.keys.KEY_DTYPE` ``(len(table),)``, read-only."""
        view = self._keys[:]
        view.flags.writeable = False
        return view

    @property
    def key_hi(self) -> np.ndarray:
        """uint64 ``(len(table),)``: the first half of every key."""
        return self.keys["hi"]

    @property
    def key_lo(self) -> np.ndarray:
        """uint64 ``(len(table),)``: the second half of every key."""
        return self.keys["lo"]

    # -- rows -----------------------------------------------------------------------------------------------------

    def source_id(self, name: str) -> int:
        """The number of a data source, given out on first use.

        Raises:
            ValueError: more than 65,535 different sources.
        """
        name = str(name)
        if name not in self._source_ids:
            if len(self.sources) > np.iinfo("u2").max:
                raise ValueError(
                    f"more than 65,535 data sources: {name!r} is one too many; give data_source fewer names"
                )
            self._source_ids[name] = len(self.sources)
            self.sources.append(name)
        return self._source_ids[name]

    def source_names(self, rows: np.ndarray | slice = slice(None)) -> list[str]:
        """The name of each row's data source."""
        return [self.sources[i] for i in self.col("source")[rows].tolist()]

    def _append(self, keys: np.ndarray) -> None:
        """Add rows for keys that are new and different from each other, with default values: copies all, so many at a time."""
        self._keys = np.concatenate([self._keys, keys])
        for name, column in self._columns.items():
            new = np.full(len(keys), column.default, dtype=column.dtype)
            self._data[name] = np.concatenate([self._data[name], new])

    def _find(self, keys: np.ndarray) -> np.ndarray:
        """The row of each key, -1 where unknown; what a search needs is sorted when the table has grown."""
        if len(self._order) < len(self):
            self._order = _keys.sort_order(self.keys)[0].astype("u4")
            self._firsts = _first(self._keys[self._order])
        first, pending = _first(keys), np.argsort(keys["hi"])  # in order, as the processor's cache has it
        rows, at = np.full(len(keys), -1, dtype=np.int64), np.empty(len(keys), dtype=np.int64)
        at[pending] = np.searchsorted(self._firsts, first[pending])
        while len(pending := pending[at[pending] < len(self)]):  # once, but for keys that begin alike
            near = self._firsts[at[pending]] == first[pending]
            row, wanted = self._order[at[pending]], keys[pending]
            there = self._keys[row]
            same = near & (there["hi"] == wanted["hi"]) & (there["lo"] == wanted["lo"])
            rows[pending[same]] = row[same]
            pending = pending[near & ~same]
            at[pending] += 1
        return rows

    def rows_for(
        self,
        keys: np.ndarray,
        create: bool = True,
        sources: Sequence[str] | np.ndarray | None = None,
    ) -> np.ndarray:
        """The row of each key.

        Args:
            keys: :data:`~verl_adaptive.stats.keys.KEY_DTYPE` ``(n,)``; equal keys get the same row.
            create: add rows for unknown keys, in the order of their first appearance.
            sources: the name of each key's data source; recorded for prompts whose source is not known yet.

        Returns:
            int64 ``(n,)``; -1 for unknown keys when ``create`` is false.

        Raises:
            ValueError: ``keys`` are not keys, or ``sources`` has another length.
        """
        keys = np.asarray(keys)
        if keys.dtype != KEY_DTYPE or keys.ndim != 1:
            raise ValueError(f"keys must be a one-dimensional array of KEY_DTYPE, got {keys.dtype} {keys.shape}")
        rows = self._find(keys)
        unknown = np.flatnonzero(rows < 0)
        if create and len(unknown):
            fresh = key_column(keys[unknown]).dictionary_encode()  # in the order of first appearance
            rows[unknown] = len(self) + fresh.indices.to_numpy()
            self._append(key_words(fresh.dictionary))
        if sources is not None:
            self._set_sources(rows, sources)
        return rows

    def _set_sources(self, rows: np.ndarray, sources: Sequence[str] | np.ndarray) -> None:
        if len(sources) != len(rows):
            raise ValueError(f"{len(sources)} sources for {len(rows)} keys")
        numbers = {name: self.source_id(name) for name in sorted(set(sources))}
        ids = np.array([numbers[name] for name in sources], dtype=np.int64)
        column = self.col("source")
        known = rows >= 0
        target, ids = rows[known], ids[known]
        unset = column[target] == 0
        # Backwards, so that the first of several entries for one prompt is the one that stays.
        column[target[unset][::-1]] = ids[unset][::-1]

    def brought(self) -> np.ndarray:
        """int64 ``(k,)``: the rows known from elsewhere only: a warm start brought evidence, and no visit has followed.

        A part that keeps evidence of its own fills its columns for these when it joins the run. Rows that a resume
        brings back have their visits, so it does not fill them again.
        """
        return np.flatnonzero((self.col("rollouts") > 0) & (self.col("last_step") < 0))

    # -- observing ------------------------------------------------------------------------------------------------

    def observe(self, groups: Groups, step: int, *, tolerance: float) -> None:
        """Add a batch of finished groups, exactly as if each were observed alone in the order given.

        A group that failed, has no rollouts, or has a value that is not finite says nothing about difficulty: it adds
        one to ``failures``, moves ``last_try`` and touches nothing else.

        Args:
            groups: finished groups; ``groups.row`` are rows of this table and may repeat.
            step: the training step, recorded in ``first_step``, ``last_step`` and ``last_try``.
            tolerance: a group has zero variance if max − min of its signal is at most this; it is then easy or hard, see
                :func:`~verl_adaptive.stats.visits.kind_of`.

        Raises:
            IndexError: a group's row is not in the table.
        """
        signal = groups.signal
        with np.errstate(invalid="ignore", over="ignore"):  # groups with nan or inf are set aside
            visits = Visits(
                row=groups.row,
                step=np.full(len(groups), step),
                n=groups.n,
                success=groups.successes,
                signal=groups.sum(signal),
                square=groups.sum(signal * signal),
                reward=groups.sum(groups.reward),
                tokens=groups.sum(groups.tokens),
                flat=groups.degenerate(tolerance),
                failed=groups.failed,
            )
        self.observe_visits(visits)

    def observe_visits(self, visits: Visits) -> None:
        """:meth:`observe` for groups of which only the totals are known, as a journal keeps them.

        Raises:
            IndexError: a row is not in the table.
        """
        rows, usable, kind = visits.row, visits.usable, visits.kind
        if not len(rows):
            return
        if rows.min() < 0 or rows.max() >= len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()} in a table of {len(self)} rows")
        failed_rows, counts = np.unique(rows[~usable], return_counts=True)
        failures = self.col("failures")
        failures[failed_rows] = np.minimum(failures[failed_rows] + counts, np.iinfo("u2").max)

        self.col("last_try")[rows] = visits.step
        tokens = np.where(usable, visits.tokens, 0).astype(np.uint64)
        get = self.col
        for wave in waves(rows, usable):
            row, step, rate = rows[wave], visits.step[wave], visits.rate[wave]
            fresh = get("visits")[row] == 0
            get("visits")[row] += 1
            get("rollouts")[row] += visits.n[wave].astype(np.uint32)
            get("successes")[row] += visits.success[wave]
            get("signal_sum")[row] += visits.signal[wave]
            get("signal_sqsum")[row] += visits.square[wave]
            get("reward_sum")[row] += visits.reward[wave]
            get("tokens")[row] += tokens[wave]
            extend_streaks(get("streak"), get("streak_kind"), row, kind[wave])
            new = get("first_step")[row] < 0  # also where a warm start brought an earlier run's visits
            get("first_step")[row[new]] = step[new]
            get("last_step")[row] = step
            get("first_rate")[row[fresh]] = rate[fresh]
            get("last_rate")[row] = rate
            get("last_n")[row] = visits.n[wave]

    # -- reading --------------------------------------------------------------------------------------------------

    def view_by_source(self) -> dict[str, dict[str, float]]:
        """Totals for each data source that has prompts.

        Returns:
            By source name: ``prompts``, ``visited``, ``visits``, ``rollouts``, ``successes``, ``tokens``, ``retired``,
            ``failures``, ``easy`` and ``hard`` (prompts in a zero-variance streak), and ``pass_rate`` (successes per
            rollout; nan before the first rollout).
        """
        source, count = self.col("source"), len(self.sources)
        kind = self.col("streak_kind")

        def total(values: np.ndarray | None) -> np.ndarray:
            return np.bincount(source, weights=values, minlength=count)

        totals = {
            "prompts": total(None),
            "visited": total(self.col("visits") > 0),
            **{c: total(self.col(c)) for c in ("visits", "rollouts", "successes", "tokens", "retired", "failures")},
            "easy": total(kind > 0),
            "hard": total(kind < 0),
        }
        with np.errstate(invalid="ignore"):
            totals["pass_rate"] = totals["successes"] / totals["rollouts"]
        return {
            name: {key: float(values[i]) for key, values in totals.items()}
            for i, name in enumerate(self.sources)
            if totals["prompts"][i]
        }

    # -- Arrow ----------------------------------------------------------------------------------------------------

    def to_arrow(self) -> pa.Table:
        """The table as Arrow: ``key`` (16 bytes) and every column.

        The declarations and source names travel in the schema's metadata. Columns share memory with the table: use them
        before the next change.
        """
        arrays = {"key": key_column(self.keys)}
        arrays |= {name: pa.array(self.col(name), from_pandas=False) for name in self._columns}
        fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
        described = {
            "sources": self.sources,
            "columns": {name: [c.dtype.str, c.default] for name, c in self._columns.items()},
        }
        meta = {_ARROW_META: json.dumps(described).encode()}
        return pa.table(arrays, schema=pa.schema(fields, metadata=meta))

    @classmethod
    def from_arrow(cls, *parts: pa.Table) -> StatsTable:
        """The inverse of :meth:`to_arrow`; several tables are joined in their order.

        Raises:
            ValueError: not such a table, a key occurs twice, or a column is not what its declaration says.
        """
        table = cls()
        described = [json.loads((part.schema.metadata or {}).get(_ARROW_META, b"null")) for part in parts]
        if not parts or None in described:
            raise ValueError("not a statistics table: the Arrow schema lacks its description")
        if any(d != described[0] for d in described):
            raise ValueError("the parts describe different statistics tables")
        for name in described[0]["sources"]:
            table.source_id(name)
        if table.sources != described[0]["sources"]:
            raise ValueError("its data sources are not different names that begin with the unknown one")
        for name, (dtype, default) in described[0]["columns"].items():
            if name not in table._columns:
                table._add_column(name, Column(np.dtype(dtype), default).normal())
        table._fill(pa.concat_tables(parts), described[0]["columns"])
        return table

    def _fill(self, data: pa.Table, names: Mapping[str, Any]) -> None:
        """Copy an Arrow table into this empty one, whose keys must differ."""
        for name in ("key", *names):  # before memory is made for as many rows as the table says it has
            if data.column(name).null_count:
                raise ValueError(f"column {name} has missing values")
        if data.schema.field("key").type != pa.binary(16):
            raise ValueError(f"column key holds {data.schema.field('key').type}, expected 16 bytes")
        self._append(key_words(data.column("key")))
        for name in names:
            values = np.array(data.column(name).to_numpy())  # Arrow's own may be read-only
            if values.dtype != self._columns[name].dtype:
                raise ValueError(f"column {name} holds {values.dtype}, expected {self._columns[name].dtype}")
            self._data[name] = values
        if self.col("source").max(initial=0) >= len(self.sources):
            raise ValueError("a prompt's data source has no name")
        if not _keys.sort_order(self.keys)[1].all():
            raise ValueError("a key occurs twice")
