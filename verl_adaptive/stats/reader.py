"""Reading a journal: runs, the live line of a run, its steps and observations, in short transactions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from sqlalchemy import Connection, Table, and_, literal, select, tuple_

from verl_adaptive.stats import schema
from verl_adaptive.stats.backends import Backend
from verl_adaptive.stats.schema import JournalError
from verl_adaptive.stats.table import StatsTable, key_words
from verl_adaptive.stats.visits import kind_of

__all__ = ["OBSERVATIONS", "JournalReader", "Segment"]

_PAGE = 20_000
_READ_CEILING = 120.0  # seconds for a page, whatever the database's own limits are

#: What Arrow has for a column of the journal's tables; small integers there are truths.
_ARROW = {
    "BigInteger": pa.int64(),
    "Double": pa.float64(),
    "Integer": pa.int32(),
    "LargeBinary": pa.binary(16),
    "SmallInteger": pa.bool_(),
    "Text": pa.string(),
}


def _columns(table: Table, *without: str) -> list[tuple[str, pa.DataType]]:
    return [(c.name, _ARROW[type(c.type).__name__]) for c in table.columns if c.name not in without]


# The number of the attempt stands for the branch.
OBSERVATIONS = pa.schema([("attempt", pa.int32()), *_columns(schema.observations, "branch_id")])
"""One row a finished group, in the order of review; the columns are those of :data:`verl_adaptive.stats.schema.observations`.
The sums are over the group's rollouts; ``outcome`` is what became of it; ``clipped`` counts the rollouts with an output as long
as ``data.max_response_length``. ``tokens``, ``lag`` and ``lost`` are null in rows written by schema version 1, ``clipped`` in
those of version 2, too."""

_STEPS = pa.schema([("attempt", pa.int32()), *_columns(schema.steps, "branch_id", "commit_id")])


@dataclass(frozen=True)
class Segment:
    """A stretch of a run's line: one branch up to a step.

    Attributes:
        branch_id: the branch.
        attempt: its number within the run, 0 for the first.
        last_step: the last step that counts; ``None`` for all.
    """

    branch_id: int
    attempt: int
    last_step: int | None


class JournalReader:
    """Reads a journal of any released version, while another process may be writing it.

    Everything is read in pages, each in a transaction of its own, so that a writer never waits for long even under
    SQLite's rollback journal. Branches and steps are only ever added, which is why pages fit together.

    Args:
        backend: from :func:`verl_adaptive.stats.database.open_backend`.

    Raises:
        JournalError: the database holds no journal, or a newer one.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._where = backend.engine.url.render_as_string()
        with self._begin() as connection:
            version = schema.read_version(connection, backend)
            self._page = min(_PAGE, backend.page(connection))
        if version is None:
            raise JournalError(f"{self._where} holds no journal of verl-adaptive")
        self.version = version

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        with self._backend.ceiling(_READ_CEILING), self._backend.engine.begin() as connection:
            yield connection

    # -- runs and branches ----------------------------------------------------------------------------------------

    def runs(self) -> list[dict[str, Any]]:
        """``run_id``, ``created_at``, ``package``, ``meta`` and ``attempts`` of every run, oldest first."""
        with self._begin() as connection:
            rows = connection.execute(
                select(schema.runs).order_by(schema.runs.c.created_at, schema.runs.c.run_id)
            ).all()
            attempts: dict[str, int] = {}
            for (run_id,) in connection.execute(select(schema.branches.c.run_id)):
                attempts[run_id] = attempts.get(run_id, 0) + 1
        return [{**r._mapping, "meta": json.loads(r.meta), "attempts": attempts.get(r.run_id, 0)} for r in rows]

    def only_run(self, run: str | None) -> str:
        """``run`` if it is there; without a name, the one run there is.

        Raises:
            JournalError: no such run, or several to choose from; the message lists them.
        """
        known = [r["run_id"] for r in self.runs()]
        where = self._where
        if run is None:
            if len(known) == 1:
                return known[0]
            raise JournalError(f"{where} holds {len(known)} runs, name one: {', '.join(known) or '(none)'}")
        if run not in known:
            raise JournalError(f"{where} holds no run {run!r}; it has: {', '.join(known) or '(none)'}")
        return run

    def live(self, run: str) -> list[Segment]:
        """The live line of a run, oldest stretch first; empty if nothing was ever written."""
        with self._begin() as connection:
            rows = connection.execute(select(schema.branches).where(schema.branches.c.run_id == run)).all()
        known = {row.branch_id: row for row in rows}
        line: list[Segment] = []
        here, cap = max(rows, key=lambda row: row.attempt, default=None), None
        while here is not None:
            line.append(Segment(here.branch_id, here.attempt, cap))
            if here.parent_id is None:
                break
            cap = here.parent_step if cap is None else min(cap, here.parent_step)
            if here.parent_id not in known or here.parent_id >= here.branch_id:
                raise JournalError(
                    f"run {run!r}: branch {here.branch_id} has no parent {here.parent_id}; the journal is damaged"
                )
            here = known[here.parent_id]
        return line[::-1]

    def _segments(self, run: str, abandoned: bool) -> list[Segment]:
        if not abandoned:
            return self.live(run)
        with self._begin() as connection:
            query = select(schema.branches).where(schema.branches.c.run_id == run).order_by(schema.branches.c.attempt)
            return [Segment(row.branch_id, row.attempt, None) for row in connection.execute(query)]

    def gaps(self, run: str) -> list[tuple[int, int, str]]:
        """``(first step, last step, reason)`` of what the live line never got."""
        if self.version < 2:
            return []
        out = []
        for segment in self.live(run):
            query = select(schema.gaps).where(schema.gaps.c.branch_id == segment.branch_id)
            with self._begin() as connection:
                for row in connection.execute(query.order_by(schema.gaps.c.first_step)):
                    last = row.last_step if segment.last_step is None else min(row.last_step, segment.last_step)
                    if row.first_step <= last:
                        out.append((row.first_step, last, row.reason))
        return out

    def validations(self, run: str) -> list[dict[str, Any]]:
        """What verl's validation measured along the live line, in order of steps; empty for a journal before version 3.

        Returns:
            ``step``, ``wall_time`` (seconds since 1970), ``generated`` (training rollouts up to there, or None),
            ``metrics`` (verl's name → value) and ``prompts`` (data source → validation prompts). Where a resumed run
            validated a step once more, the first measurement counts; what an attempt measured that nothing is left
            of, not even its first step, does not.
        """
        if self.version < 3:
            return []
        t = schema.validations
        found: dict[int, dict[str, Any]] = {}
        for segment in self.live(run):
            if segment.last_step == 0:
                continue
            query = select(t).where(t.c.branch_id == segment.branch_id)
            if segment.last_step is not None:
                query = query.where(t.c.step <= segment.last_step)
            with self._begin() as connection:
                for row in connection.execute(query.order_by(t.c.step)):
                    entry = {"step": row.step, "wall_time": row.wall_time, "generated": row.generated}
                    if not all(value is None or type(value) in (int, float) for value in entry.values()):
                        raise ValueError(f"the validation of step {str(row.step)[:40]!r} holds no numbers")
                    entry["metrics"], entry["prompts"] = _numbers(row.metrics), _numbers(row.prompts)
                    found.setdefault(row.step, entry)
        return [found[step] for step in sorted(found)]

    # -- steps and observations -----------------------------------------------------------------------------------

    def _pages(
        self, query: Any, cap: int | None, table: Any, order: list[Any], last: int | None
    ) -> Iterator[Sequence[Any]]:
        after: tuple[Any, ...] | None = None
        bounds = [table.c.step <= bound for bound in (cap, last) if bound is not None]
        while True:
            conditions = list(bounds)
            if after is not None:
                conditions.append(tuple_(*order) > tuple_(*[literal(x) for x in after]))
            with self._begin() as connection:
                rows = connection.execute(query.where(and_(True, *conditions)).order_by(*order).limit(self._page)).all()
            if rows:
                yield rows
            if len(rows) < self._page:
                return
            after = tuple(getattr(rows[-1], column.name) for column in order)

    def steps(self, run: str, *, abandoned: bool = False) -> pa.Table:
        """One row a step of the live line; with ``abandoned`` of every branch. ``ledger``, ``scalars``: JSON text."""
        t = schema.steps
        parts = []
        for segment in self._segments(run, abandoned):
            query = select(*[t.c[name] for name in _STEPS.names[1:]]).where(t.c.branch_id == segment.branch_id)
            for rows in self._pages(query, segment.last_step, t, [t.c.step], None):
                parts.append(_table(rows, _STEPS, segment.attempt))
        return pa.concat_tables(parts) if parts else _STEPS.empty_table()

    def newest(self, run: str, count: int = 2) -> pa.Table:
        """The last steps of the live line, oldest first, as :meth:`steps` has them; without reading the others."""
        t, parts, left = schema.steps, [], count
        for segment in reversed(self.live(run)):
            query = select(*[t.c[name] for name in _STEPS.names[1:]]).where(t.c.branch_id == segment.branch_id)
            if segment.last_step is not None:
                query = query.where(t.c.step <= segment.last_step)
            with self._begin() as connection:
                rows = connection.execute(query.order_by(t.c.step.desc()).limit(left)).all()[::-1]
            if rows:
                parts.append(_table(rows, _STEPS, segment.attempt))
            left -= len(rows)
            if left <= 0:
                break
        return pa.concat_tables(parts[::-1]) if parts else _STEPS.empty_table()

    def observations(
        self, run: str, *, first_step: int | None = None, last_step: int | None = None, abandoned: bool = False
    ) -> Iterator[pa.Table]:
        """Pages of observations (schema :data:`OBSERVATIONS`) along the live line, in order.

        Args:
            run: the run.
            first_step, last_step: both included; ``None`` for no bound.
            abandoned: read every branch instead, those that a resume left behind too.
        """
        t = schema.observations
        columns = [
            literal(None).label(name) if self.version < schema.SINCE.get(name, 1) else t.c[name]
            for name in OBSERVATIONS.names[1:]
        ]
        for segment in self._segments(run, abandoned):
            query = select(*columns).where(t.c.branch_id == segment.branch_id)
            if first_step is not None:
                query = query.where(t.c.step >= first_step)
            for rows in self._pages(query, segment.last_step, t, [t.c.step, t.c.seq], last_step):
                yield _table(rows, OBSERVATIONS, segment.attempt)

    def prompts(self) -> Iterator[pa.Table]:
        """Pages of ``key``, ``source``, ``text`` of every prompt that any run of this journal committed."""
        t, kinds = schema.prompts, pa.schema(_columns(schema.prompts))
        for rows in self._pages(select(t.c.key, t.c.source, t.c.text), None, t, [t.c.key], None):
            yield _table(rows, kinds)

    def replay(self, run: str, *, last_step: int | None = None, tolerance: float = 0.0) -> StatsTable:
        """The statistics table as the live line made it: equal, bit for bit, to the one the run had in memory.

        Columns that policies declare are not in a journal, nor is ``retired``.

        Args:
            run: the run.
            last_step: stop after this step.
            tolerance: as in :meth:`StatsTable.observe`.
        """
        table = StatsTable()
        for page in self.observations(run, last_step=last_step):
            replay_page(table, page, tolerance)
        self.name_sources(table)
        return table

    def name_sources(self, table: StatsTable) -> None:
        """Give the table's prompts the data sources that this journal knows."""
        for page in self.prompts():
            keys = key_words(page.column("key"))
            rows = table.rows_for(keys, create=False)
            names = np.array(page.column("source").to_pylist(), dtype=object)
            if (rows >= 0).any():
                table.rows_for(keys[rows >= 0], create=False, sources=names[rows >= 0])


def replay_page(table: StatsTable, page: pa.Table, tolerance: float) -> None:
    """Observe a page of observations."""

    def column(name: str) -> np.ndarray:
        return page.column(name).to_numpy()

    n, success = column("n"), column("successes")
    flat = column("signal_max") - column("signal_min") <= tolerance
    table.observe_totals(
        table.rows_for(key_words(page.column("key"))),
        column("step"),
        n=n,
        success=success,
        signal=column("signal_sum"),
        signal_sq=column("signal_sqsum"),
        reward=column("reward_sum"),
        tokens=page.column("tokens").fill_null(0).to_numpy(),
        kind=kind_of(flat, success / np.maximum(n, 1)),
        failed=column("failed"),
    )


def _numbers(text: str) -> dict[str, float]:
    """A JSON table of finite numbers; anybody may have written the database.

    Raises:
        ValueError: another thing.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"a validation holds {str(found)[:40]!r} where a table belongs")
    return {name: value for name, value in found.items() if type(value) in (int, float) and math.isfinite(value)}


def _table(rows: Sequence[Any], kinds: pa.Schema, attempt: int | None = None) -> pa.Table:
    """Rows of a query as Arrow, behind the number of the attempt that they are of, if there is one."""
    columns = [*([[attempt] * len(rows)] if attempt is not None else []), *map(list, zip(*rows, strict=True))]
    arrays = []
    for values, kind in zip(columns, kinds, strict=True):
        if pa.types.is_boolean(kind.type):
            values = [bool(v) for v in values]
        arrays.append(pa.array(values, type=kind.type))
    return pa.Table.from_arrays(arrays, schema=kinds)
