"""One writer a run: a lock on a file that the system releases when its holder dies, and a name for a living process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
from pathlib import Path

from verl_adaptive.stats.schema import JournalBusy

__all__ = ["FileLock", "JournalBusy", "busy", "is_running", "process_mark"]

_LOG = logging.getLogger(__name__)

# POSIX record locks do not exclude the process that holds them; this set does. The process id is part of an entry
# because a forked child inherits the set but not the locks.
_HELD: set[tuple[int, str]] = set()


def busy(run_id: str, where: object, holder: str) -> JournalBusy:
    """The error that a second writer gets."""
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
        self._run_id, self._database = run_id, database
        entry = (os.getpid(), str(self.path))
        if entry in _HELD:
            raise busy(run_id, database, "this very process")
        self._descriptor = self._take()
        self._entry: tuple[int, str] | None = entry
        _HELD.add(entry)

    def _take(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = _holder(descriptor)
                os.close(descriptor)
                raise busy(self._run_id, self._database, holder) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                os.close(descriptor)
                raise
            _LOG.warning(
                "%s: this file system has no locks (%s); make sure that only one process writes", self.path, error
            )
        os.ftruncate(descriptor, 0)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "run": self._run_id}
        os.pwrite(descriptor, json.dumps(about).encode(), 0)
        return descriptor

    def renew(self) -> None:
        """Make the file again if it was deleted: a lock on a file without a name keeps nobody out.

        Raises:
            JournalBusy: another process was quicker.
        """
        try:
            there = os.stat(self.path)
        except OSError:
            there = None
        mine = os.fstat(self._descriptor)
        if there is not None and (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
            return
        descriptor = self._take()
        os.close(self._descriptor)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; the file stays, since removing it would race with the next holder."""
        if self._entry is not None:
            os.close(self._descriptor)
            _HELD.discard(self._entry)
            self._entry = None


def _holder(descriptor: int) -> str:
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {about['pid']} on {about['host']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"


def process_mark(pid: int) -> str | None:
    """What no other process ever has: when it began, and in which life of the machine. None if there is no such process.

    Linux; elsewhere a process has no mark, and ``""`` stands for one that runs.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    try:
        # After the name, which may hold anything but ends with the last parenthesis: state, …, start time (22nd field).
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else f"{boot} {fields[19]}"


def is_running(pid: int, mark: str | None) -> bool:
    """Whether the process that had ``mark`` (see :func:`process_mark`) is alive on this machine."""
    return pid > 0 and mark is not None and process_mark(pid) == mark
