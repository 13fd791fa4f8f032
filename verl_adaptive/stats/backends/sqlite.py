"""SQLite: a file with the settings that are safe where it lies, and one writer a run held by a lock beside the file."""

from __future__ import annotations

import json
import logging
import os
import socket
import sqlite3
import sys
import uuid
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Column,
    Connection,
    Dialect,
    Engine,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    insert,
    select,
    text,
)
from sqlalchemy.dialects import sqlite as dialect_of_sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from verl_adaptive.stats import schema
from verl_adaptive.stats.backends import Backend
from verl_adaptive.stats.checkpointer import Checkpointer
from verl_adaptive.stats.filesystem import filesystem_of, wal_is_safe
from verl_adaptive.stats.locks import FileLock, busy, is_running, process_mark
from verl_adaptive.stats.schema import JournalError

__all__ = ["BACKEND", "SQLite"]

_LOG = logging.getLogger(__name__)

WRITER_WAITS = 1.0  # seconds for a lock, before the step goes to the backlog and training goes on
READER_WAITS = 30.0
_LARGEST_VALUE = 1 << 26  # bytes; the largest honest one is a prompt's text or a step's ledger
_ROLLBACK_PAGE = 1_000  # rows; with a rollback journal the writer waits for as long as one page is read

# Who writes which run, beside the lock file, which people delete ("rm *.lock"). Not part of the versioned schema: it says
# nothing about a run, and older versions of this package leave it alone.
_writers = Table(
    "verl_adaptive_writers",
    MetaData(),
    Column("run_id", String(255), primary_key=True),
    Column("token", Text, nullable=False),  # tells this writer from any other, also in this process
    Column("holder", Text, nullable=False),  # JSON: host, pid, mark (see `process_mark`)
)


class SQLite(Backend):
    """A file, read by any number of processes while one a run writes it."""

    name = "sqlite"
    title = "SQLite"
    example = "sqlite:////path/file.sqlite"

    def __init__(self, url: URL, *, read_only: bool, application: str = "verl-adaptive") -> None:
        self._file = _path(url)
        self._lock: FileLock | None = None
        self._token = uuid.uuid4().hex
        self._identity: tuple[int, int] | None = None  # of the file that is written to
        self._log_identity: tuple[int, int] | None = None  # of its write-ahead log
        super().__init__(url, read_only=read_only, application=application)
        self.checkpointer = Checkpointer(self.engine)

    # -- opening --------------------------------------------------------------------------------------------------

    @classmethod
    def normal(cls, url: URL) -> URL:
        if url.host or url.username or url.password or url.port:
            raise JournalError(
                "adaptive.store.url: a SQLite URL has no server; an absolute path takes four slashes, as in "
                "sqlite:////path/adaptive.sqlite"
            )
        if url.database in (None, "", ":memory:"):
            raise JournalError("adaptive.store.url: SQLite needs a file, for example sqlite:////path/adaptive.sqlite")
        return url

    @classmethod
    def path(cls, url: URL) -> Path | None:
        return _path(url)

    def connect(self, application: str) -> Engine:
        path, read_only = self._file, self.read_only
        kind = filesystem_of(path)
        wanted = self.url.query.get("journal_mode")
        mode = str(wanted).lower() if wanted else ("wal" if wal_is_safe(kind) else "delete")
        if mode not in ("wal", "delete"):
            raise JournalError(f"adaptive.store.url: journal_mode is wal or delete, not {wanted!r}")

        def connect() -> sqlite3.Connection:
            return _reader(path) if read_only else _writer(path, mode)

        if not read_only:
            how = "write-ahead log" if mode == "wal" else "rollback journal"
            chosen = " (as adaptive.store.url says)" if wanted else ""
            _LOG.info("journal %s: SQLite, %s, on %s%s", path, how, kind, chosen)
        engine = create_engine(self.url.set(query={}), creator=connect, poolclass=NullPool)
        begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"

        @event.listens_for(engine, "begin")
        def _begin(connection: Any) -> None:
            # sqlite3 would begin only at the first change, after what the change depends on was read.
            connection.exec_driver_sql(begin)

        return engine

    # -- statements -----------------------------------------------------------------------------------------------

    @classmethod
    def insert(
        cls, connection: Connection, table: Table, columns: Mapping[str, list[Any]], unless: tuple[str, ...]
    ) -> None:
        compiled = _statement(connection.dialect, table, tuple(columns), unless)
        rows = list(zip(*(columns[name] for name in compiled.positiontup), strict=True))
        connection.exec_driver_sql(str(compiled), rows)

    @classmethod
    def check(cls, connection: Connection) -> None:
        """Views, triggers and computed columns are code in the file."""
        where = connection.engine.url.render_as_string()
        names = {_writers.name, *(table.name for table in schema.metadata.sorted_tables)}
        for kind, name, table, sql in connection.execute(text("SELECT type, name, tbl_name, sql FROM sqlite_master")):
            if table not in names or kind == "index":
                continue
            if kind != "table" or not str(sql).upper().startswith("CREATE TABLE"):
                raise JournalError(
                    f"{where}: {name} is a {kind} that computes something, where the journal has a table"
                )
            columns = connection.execute(text("SELECT name, hidden FROM pragma_table_xinfo(:table)"), {"table": table})
            computed = [column for column, hidden in columns if hidden]
            if computed:
                raise JournalError(
                    f"{where}: column {table}.{computed[0]} computes something, where the journal has a value"
                )

    def page(self, connection: Connection) -> int:
        wal = connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        return super().page(connection) if wal else _ROLLBACK_PAGE

    # -- one writer a run -----------------------------------------------------------------------------------------

    def lock(self, run_id: str) -> None:
        self._lock = FileLock(self._file, run_id)

    def connected(self, connection: Connection, run_id: str) -> None:
        connection.connection.dbapi_connection  # noqa: B018 - it is made now, and the file with it
        self._identity, self._log_identity = _identity(self._file), None

    def claim(self, connection: Connection, run_id: str) -> None:
        _writers.create(connection, checkfirst=True)
        row = connection.execute(select(_writers).where(_writers.c.run_id == run_id)).first()
        if row is not None and row.token != self._token:
            here, holder = _holder(row.holder)
            if here:
                raise busy(run_id, self._file, holder)
        connection.execute(delete(_writers).where(_writers.c.run_id == run_id))
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "mark": process_mark(os.getpid())}
        connection.execute(insert(_writers).values(run_id=run_id, token=self._token, holder=json.dumps(mine)))

    def still_ours(self, connection: Connection, run_id: str) -> None:
        row = connection.execute(select(_writers).where(_writers.c.run_id == run_id)).first()
        if row is None or row.token != self._token:
            holder = "another process" if row is None else _holder(row.holder)[1]
            raise busy(run_id, self._file, f"{holder}, which has taken it over")

    def intact(self, open_now: bool) -> bool:
        if self._lock is not None:
            self._lock.renew()
        log = _identity(Path(f"{self._file}-wal"))
        if self._log_identity is None:  # made with the first write
            self._log_identity = log
        # The last connection to close takes the log with it.
        return _identity(self._file) == self._identity and (log == self._log_identity or not open_now)

    def committed(self) -> None:
        self.checkpointer.committed()

    def release(self, connection: Connection | None, run_id: str) -> None:
        if connection is not None and self._identity is not None:
            try:
                with connection.begin():
                    mine = (_writers.c.run_id == run_id) & (_writers.c.token == self._token)
                    connection.execute(delete(_writers).where(mine))
            except SQLAlchemyError as error:  # a process that has ended holds nothing either
                _LOG.debug("journal %s: giving run %r back: %s", self._file, run_id, error)
        self.checkpointer.join()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


BACKEND = SQLite


def _path(url: URL) -> Path:
    return Path(os.path.abspath(str(url.database)))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _holder(text_of: str) -> tuple[bool, str]:
    """Whether a writer is known to be alive, and its name for people; the text may be anybody's."""
    try:
        about = json.loads(text_of)
        name = f"process {int(about['pid'])} on {about['host']!s}"
        return about["host"] == socket.gethostname() and is_running(int(about["pid"]), about["mark"]), name
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False, "another process"


def _guarded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """A file may come from anywhere: its schema may call nothing, and no value may be larger than the file would be."""
    connection.execute("PRAGMA trusted_schema=OFF")
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE)
    return connection


_SETTINGS: dict[str, Any] = {"uri": True, "check_same_thread": False, "isolation_level": None}


def _writer(path: Path, mode: str) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = _guarded(sqlite3.connect(f"file:{quote(str(path))}?mode=rwc", timeout=WRITER_WAITS, **_SETTINGS))
    connection.execute(f"PRAGMA journal_mode={mode}")
    # With WAL a power cut can lose the last commits but not damage the file; resume reads the snapshot.
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA wal_autocheckpoint=0")  # a thread does it: see checkpointer.py
    return connection


def _reader(path: Path) -> sqlite3.Connection:
    if not path.is_file():  # a pipe would be waited for
        raise sqlite3.OperationalError(f"no such file: {path}")
    name = f"file:{quote(str(path))}"
    connection = _guarded(sqlite3.connect(f"{name}?mode=ro", timeout=READER_WAITS, **_SETTINGS))
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # A WAL database in a directory that cannot be written has nowhere for its shared memory. Without a `-wal`
        # file nobody is writing either, and it can be read as it lies.
        connection.close()
        if os.path.exists(f"{path}-wal") or os.access(path.parent, os.W_OK):
            raise
        connection = _guarded(sqlite3.connect(f"{name}?mode=ro&immutable=1", timeout=READER_WAITS, **_SETTINGS))
    return connection


@lru_cache(maxsize=64)
def _statement(dialect: Dialect, table: Table, names: tuple[str, ...], unless: tuple[str, ...]) -> Any:
    statement = dialect_of_sqlite.insert(table)
    if unless:
        statement = statement.on_conflict_do_nothing(index_elements=unless)
    return statement.compile(dialect=dialect, column_keys=names)
