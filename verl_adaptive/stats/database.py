"""Opening the journal's database: SQLite with the settings that are safe where it lies, PostgreSQL by URL."""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from verl_adaptive.redact import redact
from verl_adaptive.stats.filesystem import filesystem_of, wal_is_safe
from verl_adaptive.stats.schema import JournalError

__all__ = ["make_engine", "parse_url", "shown", "sqlite_path"]

_LOG = logging.getLogger(__name__)

WRITER_WAITS = 1.0  # seconds for a lock, before the step goes to the backlog and training goes on
READER_WAITS = 30.0
_LARGEST_VALUE = 1 << 26  # bytes; the largest honest one is a prompt's text or a step's ledger
_POSTGRES: dict[str, Any] = {
    "connect_timeout": 3,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 5000,
}


def parse_url(url: str | os.PathLike[str] | URL) -> URL:
    """A database URL from a URL or the path of a SQLite file.

    ``?journal_mode=wal`` or ``delete`` on a SQLite URL overrides what the file system suggests.

    Raises:
        JournalError: not a URL, not one of the two databases, or SQLite in memory (which nobody else could read).
    """
    if isinstance(url, os.PathLike) or (isinstance(url, str) and "://" not in url):
        url = URL.create("sqlite", database=os.fspath(url))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # `from None`: what SQLAlchemy says may hold the URL, and the URL a password.
        raise JournalError(f"adaptive.store.url={shown(url)!r} is not a database URL") from None
    backend = parsed.get_backend_name()
    if "@" in (parsed.host or ""):  # a piece of the password, which the server's name would be shown with
        raise JournalError(f"adaptive.store.url={shown(url)!r}: write an @ in the password as %40")
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise JournalError(
            f"adaptive.store.url={shown(parsed)!r}: only SQLite (sqlite:////path/file.sqlite) and "
            "PostgreSQL (postgresql+psycopg://user@host/database) are supported"
        )
    if parsed.host or parsed.username or parsed.password or parsed.port:
        raise JournalError(
            f"adaptive.store.url={shown(parsed)!r}: a SQLite URL has no server; an absolute path takes four slashes, as "
            "in sqlite:////path/adaptive.sqlite"
        )
    if parsed.database in (None, "", ":memory:"):
        raise JournalError("adaptive.store.url: SQLite needs a file, for example sqlite:////path/adaptive.sqlite")
    return parsed


def shown(url: str | os.PathLike[str] | URL) -> str:
    """A database URL for people: without a password, wherever in the URL it stands."""
    if not isinstance(url, URL):
        if "://" not in str(url):
            return str(url)
        try:
            url = make_url(str(url))
        except (ArgumentError, ValueError):
            return str(url).split("://", 1)[0] + "://…"  # which part is the password cannot be told
        if "@" in (url.host or ""):
            url = url.set(host="…")
    return redact(url.render_as_string())


def sqlite_path(url: URL) -> Path:
    """The absolute path of a SQLite URL's file."""
    return Path(os.path.abspath(str(url.database)))


def _guarded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """A file may come from anywhere: its schema may call nothing, and no value may be larger than the file would be."""
    connection.execute("PRAGMA trusted_schema=OFF")
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE)
    return connection


def _sqlite_engine(url: URL, read_only: bool) -> Engine:
    path = sqlite_path(url)
    kind = filesystem_of(path)
    wanted = url.query.get("journal_mode")
    mode = str(wanted).lower() if wanted else ("wal" if wal_is_safe(kind) else "delete")
    if mode not in ("wal", "delete"):
        raise JournalError(f"adaptive.store.url: journal_mode is wal or delete, not {wanted!r}")

    def connect() -> sqlite3.Connection:
        name = f"file:{quote(str(path))}"
        settings: dict[str, Any] = {"uri": True, "check_same_thread": False, "isolation_level": None}
        if not read_only:
            connection = _guarded(sqlite3.connect(f"{name}?mode=rwc", timeout=WRITER_WAITS, **settings))
            connection.execute(f"PRAGMA journal_mode={mode}")
            # With WAL a power cut can lose the last commits but not damage the file; resume reads the snapshot.
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("PRAGMA wal_autocheckpoint=0")  # a thread does it: see checkpointer.py
            return connection
        if not path.is_file():  # a pipe would be waited for
            raise sqlite3.OperationalError(f"no such file: {path}")
        connection = _guarded(sqlite3.connect(f"{name}?mode=ro", timeout=READER_WAITS, **settings))
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            # A WAL database in a directory that cannot be written has nowhere for its shared memory. Without a `-wal`
            # file nobody is writing either, and it can be read as it lies.
            connection.close()
            if os.path.exists(f"{path}-wal") or os.access(path.parent, os.W_OK):
                raise
            connection = _guarded(sqlite3.connect(f"{name}?mode=ro&immutable=1", timeout=READER_WAITS, **settings))
        return connection

    if not read_only:
        path.parent.mkdir(parents=True, exist_ok=True)
        _LOG.info(
            "journal %s: SQLite, %s, on %s%s",
            path,
            "write-ahead log" if mode == "wal" else "rollback journal",
            kind,
            " (as adaptive.store.url says)" if wanted else "",
        )
    engine = create_engine(url.set(query={}), creator=connect, poolclass=NullPool)
    begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # sqlite3 would begin only at the first change, after what the change depends on was read.
        connection.exec_driver_sql(begin)

    return engine


def _postgres_engine(url: URL, read_only: bool, application: str) -> Engine:
    options = ["-c lock_timeout=2000", "-c idle_in_transaction_session_timeout=60000"]
    if read_only:
        options.append("-c default_transaction_read_only=on")
    else:
        options.append("-c statement_timeout=10000")
    settings = {name: value for name, value in _POSTGRES.items() if name not in url.query}
    settings |= {"options": " ".join(options)} if "options" not in url.query else {}
    settings |= {"application_name": application[:63]} if "application_name" not in url.query else {}
    try:
        return create_engine(url, poolclass=NullPool, connect_args=settings)
    except ModuleNotFoundError as error:
        raise JournalError("adaptive.store.url: PostgreSQL needs psycopg: pip install 'psycopg[binary]'") from error


def make_engine(url: str | os.PathLike[str] | URL, *, read_only: bool, application: str = "verl-adaptive") -> Engine:
    """An engine whose connections are not pooled: a writer keeps its one, a reader closes each.

    Args:
        url: see :func:`parse_url`.
        read_only: connections that cannot write, and on SQLite never block the writer under WAL.
        application: what PostgreSQL shows as the session's name.

    Raises:
        JournalError: the URL cannot be used.
        OSError: a SQLite file's directory cannot be made.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed, read_only)
    return _postgres_engine(parsed, read_only, application)
