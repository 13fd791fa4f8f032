"""One writer a run: an advisory lock that the system releases when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
from pathlib import Path

from sqlalchemy import Connection, text

from verl_adaptive.stats.schema import JournalError

__all__ = ["FileLock", "JournalBusy", "lock_number", "lock_postgres"]

_LOG = logging.getLogger(__name__)

# POSIX record locks do not exclude the process that holds them; this set does. The process id is part of an entry
# because a forked child inherits the set but not the locks.
_HELD: set[tuple[int, str]] = set()


class JournalBusy(JournalError):
    """Another process is writing this run's journal."""


def _busy(run_id: str, where: str, holder: str) -> JournalBusy:
    return JournalBusy(
        f"run {run_id!r} is already being written to {where} by {holder}. Two writers would mix two trainings: stop "
        "the other one, or give this run a name of its own (adaptive.store.run_id)"
    )


class FileLock:
    """A lock on ``<database>.<run>.lock`` beside a SQLite file.

    POSIX record locks (``lockf``), not ``flock``: they work over NFS, and a child that was forked while the lock was
    held (a data-loader worker) does not keep it alive after the driver was killed.

    Args:
        database: path of the SQLite file.
        run_id: the run.

    Raises:
        JournalBusy: another process, or another journal in this one, holds it; the message says who.
        OSError: the lock file cannot be made.
    """

    def __init__(self, database: Path, run_id: str) -> None:
        tag = hashlib.blake2b(run_id.encode(), digest_size=4).hexdigest()
        self.path = Path(f"{os.path.realpath(database)}.{tag}.lock")
        entry = (os.getpid(), str(self.path))
        if entry in _HELD:
            raise _busy(run_id, str(database), "this very process")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = self._holder()
                os.close(self._descriptor)
                raise _busy(run_id, str(database), holder) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                os.close(self._descriptor)
                raise
            _LOG.warning(
                "%s: this file system has no locks (%s); make sure that only one process writes", self.path, error
            )
        self._entry: tuple[int, str] | None = entry
        _HELD.add(entry)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(
            self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "run": run_id}).encode(), 0
        )

    def _holder(self) -> str:
        try:
            about = json.loads(os.pread(self._descriptor, 4096, 0))
            return f"process {about['pid']} on {about['host']}"
        except (ValueError, KeyError, TypeError, OSError):
            return "another process"

    def release(self) -> None:
        """Give the lock back; the file stays, since removing it would race with the next holder."""
        if self._entry is not None:
            os.close(self._descriptor)
            _HELD.discard(self._entry)
            self._entry = None


def lock_number(run_id: str) -> int:
    """The signed 64-bit number under which PostgreSQL knows a run's lock."""
    digest = hashlib.blake2b(run_id.encode(), digest_size=8, person=b"verl-adaptive.l1").digest()
    return int.from_bytes(digest, "big", signed=True)


def lock_postgres(connection: Connection, run_id: str, previous: int | None = None) -> int:
    """Take the run's advisory lock for the life of ``connection``: the server releases it when the session ends.

    The journal writes through this very connection, so it can never write without the lock.

    Args:
        connection: within a transaction.
        run_id: the run.
        previous: number of the server process of this writer's own earlier connection. After a network failure the
            server may believe in that one for minutes; if it holds the lock, it is ended.

    Returns:
        The number of the server process behind ``connection``.

    Raises:
        JournalBusy: another session holds the lock; the message says which.
    """
    number = lock_number(run_id)
    if connection.execute(text("SELECT pg_try_advisory_lock(:n)"), {"n": number}).scalar():
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
    unsigned = number & 0xFFFFFFFFFFFFFFFF
    row = connection.execute(
        text(
            "SELECT a.pid, a.application_name, a.client_addr FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
            "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
            "AND l.classid = CAST(:hi AS oid) AND l.objid = CAST(:lo AS oid) "
            "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        ),
        {"hi": unsigned >> 32, "lo": unsigned & 0xFFFFFFFF},
    ).first()
    if row is not None and row.pid == previous:
        connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": previous})
    where = connection.engine.url.render_as_string()
    name = (
        f"{row[1] or 'a session'} (server process {row[0]}, client {row[2] or 'local'})" if row else "another session"
    )
    raise _busy(run_id, where, name)
