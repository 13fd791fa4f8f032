"""The journal: an append-only account of every finished group, in SQLite or PostgreSQL, that people read.

Training never reads it to decide anything: resume reads the snapshot. That is why the journal may fall behind. A commit
that fails (full disk, lost connection, locked file) is kept in memory and tried again with the next one, and what is
lost for good is known step by step (:meth:`Journal.health`, and the ``gaps`` table once the database is back).
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from verl_adaptive.groups import Groups
from verl_adaptive.redact import redact
from verl_adaptive.stats import schema
from verl_adaptive.stats.backends import Backend
from verl_adaptive.stats.database import open_backend, parse_url
from verl_adaptive.stats.index import KeyIndex
from verl_adaptive.stats.keys import KEY_DTYPE, keys_bytes, sort_order
from verl_adaptive.stats.reader import OBSERVATIONS, JournalReader
from verl_adaptive.stats.schema import JournalBusy, JournalError
from verl_adaptive.stats.snapshot import package_version

__all__ = ["Journal", "JournalBusy", "JournalError", "JournalHealth"]

_LOG = logging.getLogger(__name__)

_KEYS_AT_ONCE = 500  # in one question; SQLite takes 999 parameters at least
_CATCH_UP = 8  # older steps written beside a new one; catching up must not stall training either
_RETRY = 0.05  # seconds between two tries for a lock
# Seconds after which a transaction is given up, whatever the database's own limits are.
_WRITE_CEILING = 10.0
_START_CEILING = 60.0  # opening may upgrade the tables
_CATCH_UP_FOR = 1.0  # seconds after which a commit leaves older steps to the next one
_LONGEST_PAUSE = 60.0  # seconds between two attempts while the database stays away
_SLOW = 9.0  # and no attempt before the last one's duration has passed so many times: a tenth of the time at most

_clock = time.monotonic


@dataclass(frozen=True)
class JournalHealth:
    """What the journal holds and what it does not.

    Attributes:
        ok: everything that was committed is in the database.
        last_step: the newest step in the database, ``None`` if there is none.
        waiting: steps kept in memory, to be written with the next commits.
        missing: ``(first, last)`` steps that were given up and will never be there.
        error: why the last attempt failed; ``None`` after a success.
    """

    ok: bool
    last_step: int | None
    waiting: tuple[int, ...]
    missing: tuple[tuple[int, int], ...]
    error: str | None

    def __str__(self) -> str:
        if self.ok:
            return f"complete up to step {self.last_step}"
        parts = []
        if self.waiting:
            parts.append(f"{len(self.waiting)} steps wait in memory ({self.waiting[0]} to {self.waiting[-1]})")
        if self.missing:
            parts.append("missing: " + ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in self.missing))
        if self.error:
            parts.append(self.error)
        return "; ".join(parts)


@dataclass
class _Record:
    """One step, ready to be written; arrays rather than rows, since a long outage keeps many."""

    step: int
    wall_time: float
    ledger: str
    scalars: str
    columns: dict[str, Any]
    keys: np.ndarray
    sources: Sequence[str] | None
    branch_from: int | None = None
    commit_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def values(self, branch_id: int) -> dict[str, list[Any]]:
        """The observations by column."""
        size = len(self.keys)
        lists = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in self.columns.items()}
        return {"branch_id": [branch_id] * size, "step": [self.step] * size, "seq": list(range(size)), **lists}


@dataclass
class _Validation:
    """What verl's validation measured, ready to be written."""

    step: int
    wall_time: float
    generated: int | None
    metrics: str
    prompts: str


class _TakenOver(JournalError):
    """Another writer has started a newer branch of this run."""


def _json(value: Any) -> str:
    def plain(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return item.tolist()
        if isinstance(item, np.generic):
            return item.item()
        return str(item)

    return json.dumps(value, default=plain)


def _folder_of(meta: str | None) -> str | None:
    """Where a run's checkpoints are, as it said; None where what is stored does not say, whatever it is."""
    try:
        said = json.loads(meta or "null")
    except ValueError:
        return None
    folder = said.get("checkpoints") if isinstance(said, dict) else None
    return folder if isinstance(folder, str) else None


def _clean(text: object) -> str:
    """Text that both databases store; one odd character must not cost a step."""
    return str(text).replace("\0", "").encode("utf-8", "backslashreplace").decode()


def _clean_all(words: Iterable[object]) -> list[str]:
    words = list(words)
    clean = {word: _clean(word) for word in set(words)}
    return [clean[word] for word in words]


def _null_nan(values: np.ndarray) -> list[float | None]:
    return values.tolist() if not np.isnan(values).any() else [None if math.isnan(v) else v for v in values.tolist()]


class Journal:
    """Writes one run's account to a database; made by :meth:`open`. :class:`JournalReader` reads it.

    It holds an advisory lock on its run for as long as it is open, and is safe to call from several threads.

    Attributes:
        run_id: the run.
        branch_id, attempt: the branch that is written to; ``attempt`` counts a run's branches from 0.
        elsewhere: where a run of this name, which has steps, keeps its checkpoints, if not where ``meta`` says; what it
            says of itself stays until :meth:`rewind`.
    """

    def __init__(self, backend: Backend, run_id: str, backlog: int, meta: Mapping[str, Any]) -> None:
        self.run_id = run_id
        self.branch_id = -1
        self.attempt = -1
        self.elsewhere: str | None = None
        self._backend = backend
        self._engine = backend.engine
        self._limit = backlog
        self._meta = dict(meta)
        self._mutex = threading.RLock()
        self._connection: Connection | None = None
        self._queue: deque[_Record] = deque()
        self._measured: deque[_Validation] = deque()
        self._lost: list[tuple[int, int]] = []  # given up, in this process's life
        self._unsaid: list[tuple[int, int, str]] = []  # of those, not yet in the `gaps` table
        self._error: str | None = None
        self._failures = 0
        self._not_before = -math.inf  # of the next attempt, on `_clock`
        self._gone = False  # the database that was written to is not where it was
        self._written: int | None = None
        self._newest: int | None = None  # the last step written or waiting
        self._known = KeyIndex()  # prompts this process has registered
        self._known_keys = np.empty(0, dtype=KEY_DTYPE)
        self._own_ids = False  # until a prompt was found that has another run's data source

    # -- opening and closing --------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        url: str,
        *,
        run_id: str,
        meta: Mapping[str, Any] | None = None,
        backlog: int = 1000,
        patience: float = 3.0,
        own_ids: bool = False,
    ) -> Journal:
        """Open a run's journal; what is missing is created, an older schema upgraded.

        A run that exists goes on where its live line ends; call :meth:`rewind` after reading a snapshot.

        Args:
            url: ``sqlite:////path/file.sqlite``, the path of a SQLite file, or ``postgresql+psycopg://…``.
            run_id: names the run in a database that several share; at most 255 characters.
            meta: JSON values that describe the run, stored when it is new.
            backlog: steps, and validations, kept in memory while the database is away; the oldest are given up beyond that,
                and the log says so.
            patience: seconds to wait for a lock that another writer holds; after a crash the system may need a moment
                to notice.
            own_ids: keys are of the user's own ids, which may be another run's in the same database; a warning says so.

        Raises:
            JournalBusy: another process writes this run.
            JournalError: unreachable, not writable, damaged, or newer than this package.
        """
        if not run_id or len(run_id) > 255:
            raise JournalError(f"adaptive.store.run_id={run_id!r}: 1 to 255 characters are needed")
        where = parse_url(url).render_as_string()
        journal = None
        try:
            backend = open_backend(url, read_only=False, application=f"verl-adaptive {run_id}")
            journal = cls(backend, run_id, backlog, meta or {})
            journal._own_ids = own_ids
            _patiently(patience, lambda: backend.lock(run_id))
            journal._start(patience)
            return journal
        except BaseException as error:
            if journal is not None:
                journal._abandon()
            if not isinstance(error, SQLAlchemyError | OSError):
                raise
            raise JournalError(
                f"the journal {where} cannot be opened: {_cause(error)}. Check adaptive.store.url; statistics for "
                "resume are in the checkpoints, so a damaged journal file can be moved away"
            ) from error

    @contextmanager
    def _transaction(self, connection: Connection, seconds: float | None = None) -> Iterator[None]:
        """Every transaction of a writer: one that the database does not answer ends all the same.

        Raises:
            TimeoutError: no answer within ``seconds`` (those of a step's commit by default).
        """
        with self._backend.ceiling(_WRITE_CEILING if seconds is None else seconds, connection), connection.begin():
            yield

    def _connect(self, patience: float = 0.2) -> Connection:
        if self.branch_id >= 0 and not self._gone and not self._backend.intact(self._connection is not None):
            _LOG.warning(
                "journal of run %r: %s was deleted, moved or replaced while it was being written; going on in a new one",
                self.run_id,
                self._engine.url.render_as_string(),
            )
            self._drop()
            self._gone = True
        if self._connection is None:
            with self._backend.ceiling(_WRITE_CEILING):
                connection = self._engine.connect()
                try:
                    # A session that has ended may hold the lock until its server process notices.
                    _patiently(patience, lambda: self._backend.connected(connection, self.run_id))
                except BaseException:
                    connection.close()
                    raise
            self._connection = connection
            if self.branch_id >= 0 and (self._gone or not self._known_here(connection)):
                self._begin_again(connection)
        return self._connection

    def _start(self, patience: float) -> None:
        connection = self._connect(patience)

        def start() -> None:
            with self._transaction(connection, _START_CEILING):
                self._find_run(connection)
                self._written = self._newest = self._last_step(connection)
                if self._written is None:
                    self._describe(connection)

        _patiently(patience, start)

    def _find_run(self, connection: Connection) -> None:
        """Within a transaction: the run's newest branch, made if it is not there."""
        found = schema.migrate(connection, self._backend)
        if found is not None and found != schema.SCHEMA_VERSION:
            _LOG.info("journal upgraded from schema %d to %d", found, schema.SCHEMA_VERSION)
        self._backend.claim(connection, self.run_id)
        r = schema.runs
        stored = connection.execute(select(r.c.meta).where(r.c.run_id == self.run_id)).first()
        self.elsewhere = None
        if stored is None:
            row = {"run_id": self.run_id, "created_at": time.time(), "package": package_version()}
            connection.execute(insert(r), {**row, "meta": _json(self._meta)})
        elif self._meta:
            folder, here = _folder_of(stored.meta), self._meta.get("checkpoints")
            if folder and here and folder != here:
                self.elsewhere = folder
            else:
                self._describe(connection)
        self.attempt = -1
        self.branch_id, self.attempt = self._newest_branch(connection) or self._branch(connection, None, None)

    def _describe(self, connection: Connection) -> None:
        """Within a transaction: the name is the same; what the run says of itself may be new."""
        if self._meta:
            now = {"package": package_version(), "meta": _json(self._meta)}
            connection.execute(update(schema.runs).where(schema.runs.c.run_id == self.run_id), now)
        self.elsewhere = None

    def _known_here(self, connection: Connection) -> bool:
        """Whether a new connection leads to a database that has this run."""
        b = schema.branches
        with self._transaction(connection):
            if schema.read_version(connection, self._backend) is None:
                return False
            mine = select(b.c.branch_id).where(b.c.branch_id == self.branch_id, b.c.run_id == self.run_id)
            return connection.execute(mine).first() is not None

    def _begin_again(self, connection: Connection) -> None:
        """Go on in a database that lacks what was written: a new file, or an older copy that was put in its place."""
        with self._transaction(connection, _START_CEILING):
            self._find_run(connection)
        self._known, self._known_keys = KeyIndex(), np.empty(0, dtype=KEY_DTYPE)
        newest, written = self._newest, self._written
        reason = "the journal was deleted, moved or replaced while training wrote to it"
        self._rewind(connection, written or 0, reason)
        self._newest, self._gone = newest, False

    def _newest_branch(self, connection: Connection) -> tuple[int, int] | None:
        """``(branch_id, attempt)``."""
        b = schema.branches
        query = select(b.c.branch_id, b.c.attempt).where(b.c.run_id == self.run_id).order_by(b.c.attempt.desc())
        row = connection.execute(query.limit(1)).first()
        return None if row is None else (row.branch_id, row.attempt)

    def _branch(self, connection: Connection, parent: int | None, step: int | None) -> tuple[int, int]:
        attempt = self.attempt + 1
        row = {"run_id": self.run_id, "attempt": attempt, "parent_id": parent, "parent_step": step}
        result = connection.execute(insert(schema.branches).values(**row, created_at=time.time()))
        assert result.inserted_primary_key is not None
        return int(result.inserted_primary_key[0]), attempt

    def _last_step(self, connection: Connection) -> int | None:
        """The newest step of the live line, within the caller's transaction."""
        b, s = schema.branches, schema.steps
        here, cap, best = self.branch_id, None, None
        while True:
            query = select(func.max(s.c.step)).where(s.c.branch_id == here)
            last = connection.execute(query if cap is None else query.where(s.c.step <= cap)).scalar()
            best = last if best is None or (last is not None and last > best) else best
            if best is not None:
                return int(best)
            row = connection.execute(select(b.c.parent_id, b.c.parent_step).where(b.c.branch_id == here)).one()
            if row.parent_id is None:
                return None
            here, cap = row.parent_id, row.parent_step if cap is None else min(cap, row.parent_step)

    def _drop(self) -> None:
        """Close the connection, whatever state it is in; the next attempt makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.invalidate()
                connection.close()
            except SQLAlchemyError as error:
                _LOG.debug("closing a broken connection: %s", error)

    def _abandon(self) -> None:
        """Let go of everything after a failed start."""
        self._drop()
        self._backend.release(None, self.run_id)

    def close(self) -> None:
        """Write what is waiting, say what cannot be written, and give the lock back."""
        with self._mutex:
            if (self._queue or self._measured) and not self.flush():
                _LOG.warning("journal of run %r closed incomplete: %s", self.run_id, self.health())
            self._backend.release(self._connection, self.run_id)
            if self._connection is not None:
                try:
                    self._connection.close()
                except SQLAlchemyError as error:
                    _LOG.warning("journal of run %r: closing: %s", self.run_id, _cause(error))
                self._connection = None
            self._engine.dispose()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing --------------------------------------------------------------------------------------------------

    def commit_step(
        self,
        step: int,
        groups: Groups,
        keys: np.ndarray,
        outcomes: Sequence[str] | np.ndarray,
        ledger: Mapping[str, Any] | None = None,
        scalars: Mapping[str, Any] | None = None,
        *,
        sources: Sequence[str] | None = None,
        wall_time: float | None = None,
        longest: int | None = None,
    ) -> bool:
        """Record a step: one transaction. Trouble with the database never raises here; see :meth:`health`.

        A step that the live line already has starts a new branch, as :meth:`rewind` does, with a warning.

        Args:
            step: the training step.
            groups: every group that finished in it, kept or not, in the order of review.
            keys: their prompts, ``KEY_DTYPE`` ``(G,)``.
            outcomes: what became of each, one word a group.
            ledger: JSON values, the step's account of rollouts.
            scalars: JSON values, the policy's scalar state for people to look at.
            sources: data-source name of each group's prompt, to register prompts that are new to the journal.
            wall_time: seconds since 1970; now by default. For people, never used.
            longest: response tokens at which a rollout was cut (``data.max_response_length``); None: not known.

        Returns:
            Whether everything committed so far is in the database.

        Raises:
            ValueError: arguments of different lengths.
        """
        record = _record(step, groups, keys, outcomes, ledger, scalars, sources, wall_time, longest)
        with self._mutex:
            if self._newest is not None and step <= self._newest:
                _LOG.warning("journal: step %d is there up to %d; going on in a new branch", step, self._newest)
                record.branch_from = step - 1
            self._newest = step
            self._queue.append(record)
            return self._write_now()

    def commit_validation(
        self,
        step: int,
        metrics: Mapping[str, Any],
        *,
        generated: int | None = None,
        prompts: Mapping[str, int] | None = None,
        wall_time: float | None = None,
    ) -> bool:
        """Record what verl's validation measured; trouble with the database never raises here.

        Args:
            step: training steps taken so far; a step that the branch has already keeps its first measurement.
            metrics: verl's name → value; what is not a finite number is left out.
            generated: training rollouts of the run so far.
            prompts: data source → validation prompts, from which readers judge what chance explains.
            wall_time: seconds since 1970; now by default.

        Returns:
            Whether everything committed so far is in the database.
        """
        numbers = {}
        for name, value in metrics.items():
            if isinstance(value, int | float | np.number) and math.isfinite(value):
                numbers[_clean(name)] = float(value)
        counts = {_clean(name): int(count) for name, count in (prompts or {}).items()}
        now = time.time() if wall_time is None else float(wall_time)
        with self._mutex:
            self._measured.append(_Validation(int(step), now, generated, _json(numbers), _json(counts)))
            return self._write_now()

    def flush(self) -> bool:
        """Try to write everything that is waiting now; ``True`` if nothing is left. Never raises."""
        with self._mutex:
            return self._write_queue(limit=None)

    def _write_now(self) -> bool:
        """Make room for what has come, and write unless it is too early for another attempt."""
        while len(self._queue) > self._limit:
            self._give_up(f"more than {self._limit} steps were waiting for the database")
        while len(self._measured) > self._limit:
            _LOG.warning(
                "journal of run %r: the validation of step %d is lost: more than %d were waiting for the database",
                self.run_id,
                self._measured.popleft().step,
                self._limit,
            )
        return _clock() >= self._not_before and self._write_queue(limit=1 + _CATCH_UP)

    def _give_up(self, reason: str) -> None:
        """The step that has waited longest will never be written."""
        gone = self._queue.popleft()
        if gone.branch_from is not None and self._queue:  # the next one has to make the branch
            self._queue[0].branch_from = gone.branch_from
        step = gone.step
        _LOG.warning("journal of run %r: step %d is lost: %s", self.run_id, step, reason)
        self._lost = _merged([*self._lost, (step, step)])
        if self._unsaid and self._unsaid[-1][1] == step - 1 and self._unsaid[-1][2] == reason:
            self._unsaid[-1] = (self._unsaid[-1][0], step, reason)
        else:
            self._unsaid.append((step, step, reason))

    def _write_queue(self, limit: int | None) -> bool:
        written, began = 0, _clock()
        while self._queue and (
            limit is None or (written < limit and (not written or _clock() < began + _CATCH_UP_FOR))
        ):
            record = self._queue[0]
            tried = _clock()
            try:
                self._write(self._connect(), record)
            except (IntegrityError, DataError) as error:
                # Trying again would fail for ever and hold up every later step.
                self._give_up(_cause(error))
                continue
            except (SQLAlchemyError, JournalError, OSError) as error:
                self._failed(error, _clock() - tried)
                return False
            written += 1
            self._backend.committed()
            self._queue.popleft()
            self._written = record.step
        if not self._queue and not self._write_measured():
            return False
        self._error = None
        if self._failures and not self._queue:
            _LOG.warning("journal of run %r has caught up: %s", self.run_id, self.health())
            self._failures, self._not_before = 0, -math.inf
        return not self._queue and not self._measured

    def _write_measured(self) -> bool:
        """Write the validations that wait, once no step does: they belong to the branch of the steps before them."""
        while self._measured:
            one, tried = self._measured[0], _clock()
            try:
                connection = self._connect()
                with self._transaction(connection):
                    self._check_ours(connection)
                    row = {"branch_id": [self.branch_id], **{name: [value] for name, value in vars(one).items()}}
                    self._backend.insert_columns(connection, schema.validations, row, unless=("branch_id", "step"))
            except (IntegrityError, DataError) as error:
                _LOG.warning(
                    "journal of run %r: the validation of step %d is lost: %s", self.run_id, one.step, _cause(error)
                )
            except (SQLAlchemyError, JournalError, OSError) as error:
                self._failed(error, _clock() - tried)
                return False
            self._backend.committed()
            self._measured.popleft()
        return True

    def _failed(self, error: Exception, took: float) -> None:
        self._drop()
        self._error = _cause(error)
        self._failures += 1
        # The first failure may be a connection that has ended: again with the next commit, unless it cost time.
        pause = min(2.0 ** min(self._failures, 10) - 2, _LONGEST_PAUSE)
        self._not_before = _clock() + max(pause, _SLOW * took if took > 1 else 0)
        if self._failures & (self._failures - 1) == 0:  # 1st, 2nd, 4th, 8th … failure in a row
            _LOG.warning("journal of run %r: training goes on without it for now: %s", self.run_id, self.health())

    def _write(self, connection: Connection, record: _Record) -> None:
        with self._transaction(connection):
            self._backend.still_ours(connection, self.run_id)
            branch_id, attempt = self._own_branch(connection, record)
            s = schema.steps
            done = connection.execute(
                select(s.c.commit_id).where(s.c.branch_id == branch_id, s.c.step == record.step)
            ).scalar()
            if done != record.commit_id:  # equal: an earlier attempt did arrive, only its answer was lost
                connection.execute(
                    insert(s),
                    {
                        "branch_id": branch_id,
                        "step": record.step,
                        "wall_time": record.wall_time,
                        "commit_id": record.commit_id,
                        "groups": len(record.keys),
                        "ledger": record.ledger,
                        "scalars": record.scalars,
                    },
                )
                self._backend.insert_columns(connection, schema.observations, record.values(branch_id))
            fresh = self._fresh_prompts(record)
            self._backend.insert_columns(connection, schema.prompts, fresh, unless=("key",))
            if self._own_ids:
                self._compare_sources(connection, fresh)
            for first, last, reason in self._unsaid:
                row = {"branch_id": branch_id, "first_step": first, "last_step": last, "reason": reason}
                self._note_gap(connection, row)
        self.branch_id, self.attempt = branch_id, attempt
        self._unsaid.clear()
        if record.sources is not None:
            self._remember(record.keys)

    def _own_branch(self, connection: Connection, record: _Record) -> tuple[int, int]:
        """The branch to write to, made now if the record starts one.

        Raises:
            _TakenOver: the run has a newer branch that is not ours.
        """
        s = schema.steps
        newest = self._newest_branch(connection)
        if newest is None:
            raise _TakenOver(f"run {self.run_id!r} has disappeared from the journal")
        if newest[0] != self.branch_id:
            ours = select(s.c.step).where(s.c.branch_id == newest[0], s.c.commit_id == record.commit_id)
            if connection.execute(ours).first() is None:
                raise _TakenOver(f"another process has continued run {self.run_id!r} as attempt {newest[1]}")
            return newest
        if record.branch_from is None:
            return self.branch_id, self.attempt
        return self._branch(connection, self.branch_id, record.branch_from)

    def _check_ours(self, connection: Connection) -> None:
        """Within a transaction: no other process has begun to write this run."""
        self._backend.still_ours(connection, self.run_id)
        newest = self._newest_branch(connection)
        if newest is None or newest[0] != self.branch_id:
            raise _TakenOver(f"another process has continued run {self.run_id!r}")

    def rewind(self, step: int) -> None:
        """Go on after ``step``, as a run does that resumed from the snapshot of ``step``.

        A resume begins a branch, so that the pause before it is nobody's training. If the journal has later steps, they
        stay in the file for people to look at, no longer part of the run's line. If it lacks steps up to ``step`` (it
        fell behind, or it is new), the gap is noted.

        Args:
            step: the last step that counts; 0 starts over.

        Raises:
            JournalError: the database cannot be reached, or another process has continued this run.
        """
        with self._mutex:
            self._queue = deque(r for r in self._queue if r.step <= step)
            self._measured = deque(m for m in self._measured if m.step <= step)
            if (self._queue or self._measured) and not self.flush():
                raise JournalError(f"the journal cannot be rewound to step {step}: {self._error}")
            try:
                reason = f"not in the journal when training resumed after step {step}"
                self._rewind(self._connect(), step, reason, resumed=step > 0)
            except (SQLAlchemyError, OSError, JournalError) as error:
                self._drop()
                raise JournalError(f"the journal cannot be rewound to step {step}: {_cause(error)}") from error
            self._lost = [(first, min(last, step)) for first, last in self._lost if first <= step]
            self._unsaid = [(first, min(last, step), why) for first, last, why in self._unsaid if first <= step]
            self._error, self._failures, self._not_before = None, 0, -math.inf

    def _rewind(self, connection: Connection, step: int, reason: str, *, resumed: bool = False) -> None:
        branch_id, attempt = self.branch_id, self.attempt
        with self._transaction(connection):
            self._check_ours(connection)
            self._describe(connection)
            last = self._last_step(connection)
            if last is not None and (resumed or last > step):
                branch_id, attempt = self._branch(connection, self.branch_id, min(last, step))
            if last is None:  # an earlier resume went on in this branch, too, and its gap may have ended elsewhere
                connection.execute(delete(schema.gaps).where(schema.gaps.c.branch_id == branch_id))
            if last is not None and last > step:
                _LOG.info("journal: resuming after step %d; steps up to %d are kept aside", step, last)
            elif step > 0 and last != step:
                first = 1 if last is None else last + 1
                self._lost = _merged([*self._lost, (first, step)])
                _LOG.warning("journal of run %r lacks steps %d to %d: %s", self.run_id, first, step, reason)
                row = {"branch_id": branch_id, "first_step": first, "last_step": step, "reason": reason}
                self._note_gap(connection, row)
        self.branch_id, self.attempt = branch_id, attempt
        self._newest = step
        self._written = step if last is not None and last >= step else last

    # -- prompts --------------------------------------------------------------------------------------------------

    def _fresh_prompts(self, record: _Record) -> dict[str, list[Any]]:
        if record.sources is None:
            return {"key": []}
        unknown = np.flatnonzero(self._known.lookup(self._known_keys, record.keys) < 0)
        order, first = sort_order(record.keys[unknown])
        chosen = unknown[order[first]]
        sources = [record.sources[i] for i in chosen.tolist()]
        return {"key": keys_bytes(record.keys[chosen]), "source": sources, "text": [None] * len(chosen)}

    def _compare_sources(self, connection: Connection, prompts: Mapping[str, list[Any]]) -> None:
        """Within a transaction: a database has one data source for a key, that of the run which came first."""
        p = schema.prompts
        for begin in range(0, len(prompts["key"]), _KEYS_AT_ONCE):
            mine = dict(zip(*(prompts[name][begin : begin + _KEYS_AT_ONCE] for name in ("key", "source")), strict=True))
            for key, stored in connection.execute(select(p.c.key, p.c.source).where(p.c.key.in_(list(mine)))):
                if stored != mine[bytes(key)]:
                    _LOG.warning(
                        "journal of run %r: adaptive.id_key gives a prompt of data source %r the id that another run in %s "
                        "gave one of %r. Decisions do not depend on it, but stats, report and compare name the other run's "
                        "data sources; use a database of its own (adaptive.store.url), or ids that differ",
                        *(self.run_id, mine[bytes(key)], self._engine.url.render_as_string(), stored),
                    )
                    self._own_ids = False  # once is enough
                    return

    def _remember(self, keys: np.ndarray) -> None:
        unknown = keys[self._known.lookup(self._known_keys, keys) < 0]
        order, first = sort_order(unknown)
        unknown = unknown[order[first]]
        room = len(self._known) + len(unknown)
        if room > len(self._known_keys):
            larger = np.empty(max(room, 2 * len(self._known_keys)), dtype=KEY_DTYPE)
            larger[: len(self._known)] = self._known_keys[: len(self._known)]
            self._known_keys = larger
        self._known_keys[len(self._known) : room] = unknown
        self._known.append(self._known_keys[:room])

    def _note_gap(self, connection: Connection, gap: dict[str, Any]) -> None:
        columns = {name: [value] for name, value in gap.items()}
        self._backend.insert_columns(connection, schema.gaps, columns, unless=("branch_id", "first_step"))

    # -- reading --------------------------------------------------------------------------------------------------

    def health(self) -> JournalHealth:
        """What is in the database, what waits, and what is lost."""
        with self._mutex:
            waiting = tuple(record.step for record in self._queue)
            return JournalHealth(
                ok=not waiting and not self._measured and not self._lost and self._error is None,
                last_step=self._written,
                waiting=waiting,
                missing=tuple(self._lost),
                error=self._error,
            )

    def reader(self) -> JournalReader:
        """Read-only access to the whole database, on connections of its own."""
        return JournalReader(open_backend(self._backend.url, read_only=True))

    def history(
        self, run: str | None = None, *, first_step: int | None = None, last_step: int | None = None
    ) -> pa.Table:
        """Observations along a run's live line (this one's by default), in order; nothing of abandoned branches.

        Returns:
            Schema :data:`verl_adaptive.stats.reader.OBSERVATIONS`.
        """
        pages = list(self.reader().observations(run or self.run_id, first_step=first_step, last_step=last_step))
        return pa.concat_tables(pages) if pages else OBSERVATIONS.empty_table()


def _record(
    step: int,
    groups: Groups,
    keys: np.ndarray,
    outcomes: Sequence[str] | np.ndarray,
    ledger: Mapping[str, Any] | None,
    scalars: Mapping[str, Any] | None,
    sources: Sequence[str] | None,
    wall_time: float | None,
    longest: int | None,
) -> _Record:
    for name, values in (("keys", keys), ("outcomes", outcomes), ("sources", sources)):
        if values is not None and len(values) != len(groups):
            raise ValueError(f"commit_step: {len(values)} {name} for {len(groups)} groups")
    signal = groups.signal
    with np.errstate(invalid="ignore", over="ignore"):
        columns = {
            "ticket": groups.ticket.copy(),
            "key": keys_bytes(keys),
            "n": groups.n,
            "successes": _null_nan(groups.successes),
            "signal_sum": _null_nan(groups.sum(signal)),
            "signal_sqsum": _null_nan(groups.sum(signal * signal)),
            "signal_min": _null_nan(groups.reduce(np.minimum, signal)),
            "signal_max": _null_nan(groups.reduce(np.maximum, signal)),
            "reward_sum": _null_nan(groups.sum(groups.reward)),
            "outcome": _clean_all(outcomes),
            "failed": groups.failed.astype(np.int16),
            "tokens": groups.sum(groups.tokens).astype(np.int64),
            "lag": groups.lag.copy(),
            "lost": groups.lost.copy(),
            "clipped": [None] * len(groups)
            if longest is None
            else groups.sum((groups.longest >= longest).astype(np.float64)).astype(np.int64),
        }
    return _Record(
        step=int(step),
        wall_time=time.time() if wall_time is None else float(wall_time),
        ledger=_json(dict(ledger or {})),
        scalars=_json(dict(scalars or {})),
        columns=columns,
        keys=keys.copy(),
        sources=None if sources is None else _clean_all(sources),
    )


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out


def _patiently(patience: float, action: Callable[[], None]) -> None:
    """Do something that another writer may be in the way of, again and again for ``patience`` seconds.

    A killed writer's lock may outlive it by a moment; somebody else's does not go away by waiting.
    """
    while True:
        try:
            return action()
        except JournalBusy:
            if patience <= 0:
                raise
            patience -= _RETRY
            time.sleep(_RETRY)


def _cause(error: BaseException) -> str:
    """The database's own words, without SQLAlchemy's frame around them and without secrets."""
    original = getattr(error, "orig", None) or error
    text = redact(original).strip().splitlines()
    said = text[0] if text else "(no message)"
    return said if isinstance(original, JournalError) else f"{type(original).__name__}: {said}"
