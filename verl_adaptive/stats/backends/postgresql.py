"""PostgreSQL: a server that several runs share, one session a writer, and no wait for it without an end."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from sqlalchemy import URL, Connection, Dialect, Engine, Table, create_engine, event, text
from sqlalchemy.pool import NullPool

from verl_adaptive.stats.backends import Backend
from verl_adaptive.stats.locks import busy
from verl_adaptive.stats.schema import JournalError

__all__ = ["BACKEND", "PostgreSQL", "lock_number"]

_SETTINGS: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 5000,
}
_OPTIONS = ["-c lock_timeout=2000", "-c idle_in_transaction_session_timeout=60000"]

# Ceilings of the calls in progress, a stack for each thread: connections that are made inside belong to the innermost.
_CEILINGS = threading.local()


class PostgreSQL(Backend):
    """A database on a server.

    The server's own limits (``statement_timeout``, ``lock_timeout``) and the network's (keepalives) are of no use
    against a server process that is stopped, swapped out or waiting for a dead disk: its kernel goes on answering for
    it. Therefore :meth:`ceiling`, from this side.
    """

    name = "postgresql"
    title = "PostgreSQL"
    example = "postgresql+psycopg://user@host/database"

    def __init__(self, url: URL, *, read_only: bool, application: str = "verl-adaptive") -> None:
        self.session: int | None = None  # number of the server process behind the writer's connection
        super().__init__(url, read_only=read_only, application=application)

    # -- opening --------------------------------------------------------------------------------------------------

    @classmethod
    def normal(cls, url: URL) -> URL:
        if "@" in (url.database or ""):  # more likely a piece of the password, which errors would show
            raise JournalError(
                "adaptive.store.url: write an @ in the password as %40 (and a / as %2F); a database whose name has an @ "
                "goes into ?dbname="
            )
        return url.set(drivername="postgresql+psycopg")

    def connect(self, application: str) -> Engine:
        options = [*_OPTIONS, "-c default_transaction_read_only=on" if self.read_only else "-c statement_timeout=10000"]
        settings = {**_SETTINGS, "options": " ".join(options), "application_name": application[:63]}
        settings = {name: value for name, value in settings.items() if name not in self.url.query}
        try:
            engine = create_engine(self.url, poolclass=NullPool, connect_args=settings)
        except ModuleNotFoundError as error:
            raise JournalError("adaptive.store.url: PostgreSQL needs psycopg: pip install 'psycopg[binary]'") from error

        @event.listens_for(engine, "do_connect")
        def _connect(dialect: Any, record: Any, args: Any, options: Any) -> Any:
            stack = getattr(_CEILINGS, "stack", [])
            if not stack:
                return None  # as SQLAlchemy does
            own = str(options.get("connect_timeout", ""))
            if not own or own.isdecimal():  # anything else is for the driver to refuse
                left = max(2, math.ceil(stack[-1].left()))  # psycopg waits for two seconds at least
                options = {**options, "connect_timeout": min(int(own or 0) or left, left)}
            connection = dialect.connect(*args, **options)
            # SQLAlchemy asks a new connection several questions before anybody gets to see it.
            stack[-1].watch(connection.fileno())
            return connection

        return engine

    # -- statements -----------------------------------------------------------------------------------------------

    @classmethod
    def insert(
        cls, connection: Connection, table: Table, columns: Mapping[str, list[Any]], unless: tuple[str, ...]
    ) -> None:
        statement = _statement(connection.dialect, table, tuple(columns), unless)
        connection.exec_driver_sql(statement, dict(columns))

    @classmethod
    def begin_upgrade(cls, connection: Connection) -> None:
        # Several runs may open one new database at once; the lock ends with the transaction.
        connection.execute(text("SELECT pg_advisory_xact_lock(8243671230956)"))

    @contextmanager
    def ceiling(self, seconds: float, connection: Connection | None = None) -> Iterator[None]:
        ceiling = _Ceiling(seconds)
        stack = _CEILINGS.__dict__.setdefault("stack", [])
        stack.append(ceiling)
        try:
            if connection is not None:
                ceiling.watch(connection.connection.dbapi_connection.fileno())  # type: ignore[union-attr]
            yield
        except Exception as error:
            if ceiling.hit:
                raise TimeoutError(f"the server gave no answer for {seconds:g} seconds") from error
            raise
        finally:
            stack.remove(ceiling)
            ceiling.end()

    # -- one writer a run -----------------------------------------------------------------------------------------

    def connected(self, connection: Connection, run_id: str) -> None:
        """Take the run's advisory lock for the life of ``connection``: the server releases it when the session ends.

        The journal writes through this very connection, so it can never write without the lock. After a network failure
        the server may believe in this writer's own earlier session for minutes; if that one holds the lock, it is ended.
        """
        number = lock_number(run_id)
        with connection.begin():
            if connection.execute(text("SELECT pg_try_advisory_lock(:n)"), {"n": number}).scalar():
                self.session = int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
                return
            unsigned = number & 0xFFFFFFFFFFFFFFFF
            row = connection.execute(
                text(
                    "SELECT a.pid, a.application_name, a.client_addr FROM pg_locks l JOIN pg_stat_activity a "
                    "ON a.pid = l.pid WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
                    "AND l.classid = CAST(:hi AS oid) AND l.objid = CAST(:lo AS oid) "
                    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                ),
                {"hi": unsigned >> 32, "lo": unsigned & 0xFFFFFFFF},
            ).first()
            if row is not None and row.pid == self.session:
                connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": self.session})
        name = "another session"
        if row is not None:
            name = f"{row[1] or 'a session'} (server process {row[0]}, client {row[2] or 'local'})"
        raise busy(run_id, self.url.render_as_string(), name)


BACKEND = PostgreSQL


class _Ceiling:
    """Shuts sockets down when time is up: whoever waits for an answer on one gets an error at once."""

    def __init__(self, seconds: float) -> None:
        self.hit = False
        self._end = time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._mutex = threading.Lock()
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def left(self) -> float:
        """Seconds until it is hit."""
        return self._end - time.monotonic()

    def watch(self, descriptor: int) -> None:
        # A duplicate: should the connection be closed meanwhile, its number may soon be another file's.
        with self._mutex:
            self._sockets.append(socket.socket(fileno=os.dup(descriptor)))
        if self.hit:
            self._cut()

    def _cut(self) -> None:
        with self._mutex:
            self.hit = True
            for one in self._sockets:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:  # closed by the other side already
                    continue

    def end(self) -> None:
        self._timer.cancel()
        self._timer.join()
        with self._mutex:
            for one in self._sockets:
                one.close()
            self._sockets.clear()


def lock_number(run_id: str) -> int:
    """The signed 64-bit number under which PostgreSQL knows a run's lock."""
    digest = hashlib.blake2b(run_id.encode(), digest_size=8, person=b"verl-adaptive.l1").digest()
    return int.from_bytes(digest, "big", signed=True)


@lru_cache(maxsize=64)
def _statement(dialect: Dialect, table: Table, names: tuple[str, ...], unless: tuple[str, ...]) -> str:
    """One statement whose parameters are whole columns; values are bound, names are the schema's own."""
    quote = dialect.identifier_preparer.quote
    columns = ", ".join(quote(name) for name in names)
    # `b` sends binary arrays, which cost the driver and the server half of what text does.
    arrays = ", ".join(f"%({name})b::{table.c[name].type.compile(dialect=dialect)}[]" for name in names)
    tail = f" ON CONFLICT ({', '.join(quote(name) for name in unless)}) DO NOTHING" if unless else ""
    return f"INSERT INTO {quote(table.name)} ({columns}) SELECT {columns} FROM unnest({arrays}) AS v ({columns}){tail}"
