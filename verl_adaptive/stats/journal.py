"""The journal: an append-only account of every finished group, in Arrow files that people read.

Training never reads it to decide anything (resume reads the snapshot), so nothing waits for it: a thread writes, the queue
before it is bounded, and a disk that is full or does not answer costs a warning and a gap that every reader names.

::

    adaptive/writer.lock                  held by the process that writes
    adaptive/prompts-<digest>.parquet    every prompt of the data set: key and data source
    adaptive/attempt-2/attempt.json       {"id": …, "parent": 1, "after": 40, …}: resumed after step 40 of attempt 1
    adaptive/attempt-2/groups.arrows      an Arrow IPC stream, a record batch a step, a row a finished group
    adaptive/attempt-2/steps.jsonl        a line a step; the step counts once its line is whole
    adaptive/attempt-2/validations.jsonl  a line for each of verl's validations

Each line, and ``attempt.json``, ends with ``crc``, the CRC-32 of what stands before it; ``groups_crc`` in a step's line is that
of the schema and the step's batch. Files are appended to and never changed, so readers need no lock. A resume begins an
attempt by making its folder, which is atomic; the writer of an older attempt notices and stops. Reading is in
:mod:`verl_adaptive.stats.reader`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import socket
import sys
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.stats.atomic import read_file, sync_directory, write_file
from verl_adaptive.stats.snapshot import package_version
from verl_adaptive.stats.table import key_column
from verl_adaptive.text import counted, plain

_LOG = logging.getLogger(__name__)

#: Steps and validations that wait to be written; a step that comes while so many wait is lost.
BACKLOG = 1000
#: Seconds that opening, and closing, wait for the disk.
PATIENCE = 30.0
#: Seconds after which a step that is not written yet is worth a warning.
SLOW = 60.0

GROUPS = pa.schema(
    [
        ("step", pa.int32()),
        ("submission", pa.int64()),
        ("key", pa.binary(16)),
        ("source", pa.string()),
        ("n", pa.int32()),
        ("successes", pa.float64()),
        ("signal_sum", pa.float64()),
        ("signal_sqsum", pa.float64()),
        ("signal_min", pa.float64()),
        ("signal_max", pa.float64()),
        ("reward_sum", pa.float64()),
        ("reward_sqsum", pa.float64()),
        ("outcome", pa.string()),
        ("failed", pa.bool_()),
        ("tokens", pa.int64()),
        ("lag", pa.int32()),
        ("lost", pa.int32()),
        ("clipped", pa.int32()),
    ]
)
"""Columns of ``groups.arrows``. Sums are over the group's rollouts, null where they are not numbers (a failed group's);
``outcome`` is what became of it; ``clipped`` counts the rollouts as long as ``data.max_response_length``."""

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
_GROUPS_FILE, _STEPS_FILE, _VALIDATIONS_FILE = "groups.arrows", "steps.jsonl", "validations.jsonl"
_LOCK = "writer.lock"
#: Lock files that this process holds: POSIX record locks do not exclude their own process. A forked child inherits the set,
#: not the locks.
_HELD: set[tuple[int, str]] = set()


class JournalError(AdaptiveError):
    """The journal cannot be written or read."""


class JournalBusy(JournalError):
    """Another process is writing this run's journal."""


class Journal:
    """Writes one run; safe to call from several threads.

    Args:
        folder: the journal's own, made if it is missing.
        meta: JSON values that describe the run, kept with each attempt.

    Attributes:
        attempt: the number of the attempt that is written, -1 before :meth:`begin`.
        id: of that attempt, for a snapshot: the number alone may be another journal's.

    Raises:
        JournalBusy: another process writes this run.
        JournalError: the folder cannot be written, or its disk does not answer.
    """

    def __init__(self, folder: str | os.PathLike[str], meta: Mapping[str, Any] | None = None) -> None:
        self.folder, self.meta = Path(folder), dict(meta or {})
        self.attempt, self.id = -1, ""
        self._prompts: tuple[str, pa.Table] | None = None
        self._ready = threading.Condition()
        self._waiting: deque[tuple[int | None, Callable[[], None]]] = deque()  # the first one is being written
        self._since = 0.0  # when the first one came to the front
        self._lost: list[int] = []
        self._missing = self._unwritable = ""  # why steps before the next one that comes, or is written, are not there
        self._said = self._woken = self._closing = self._stopped = False
        self._files: dict[str, int] = {}  # descriptors by name
        self._ends: dict[str, int] = {}  # how far each file is whole
        self._head_crc = 0  # of the schema before the groups
        self._last = 0  # the newest step written
        self._lock: tuple[int, tuple[int, str]] | None = None
        self._thread = threading.Thread(target=self._work, name="verl-adaptive journal", daemon=True)
        self._thread.start()

        def open_it() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            attempts_in(self.folder)  # a damaged one is refused now, and not once a model is loaded
            self._lock = _lock(self.folder)

        self._run_in_turn("opened", open_it, PATIENCE)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_in_turn(self, what: str, work: Callable[[], object], seconds: float) -> None:
        """Run ``work`` in the thread that writes, and wait for it; JournalError if the disk refused, or does not answer."""
        answer: Future[object] = Future()

        def turn() -> None:
            self._recovered()  # all steps before it are written: say so before an answer
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        self._put(None, turn)
        try:
            answer.result(0 if self._stopped else seconds)
        except JournalBusy:
            raise
        except Exception as error:
            why = (
                error
                if answer.done()
                else self._without().lstrip("; ") or f"the disk has not answered for {seconds:g} s"
            )
            raise JournalError(
                f"the journal {self.folder} cannot be {what}: {why}. Choose another place with adaptive.store.dir, or go "
                "without: adaptive.store.enabled=false"
            ) from error

    # -- attempts ---------------------------------------------------------------------------------------------------

    def begin(
        self, step: int, keys: np.ndarray | None = None, sources: Sequence[str] = (), *, parent: str | None = None
    ) -> None:
        """Begin an attempt that goes on after ``step``; what earlier ones have beyond it no longer counts.

        Args:
            step: the last step that counts; 0 starts over.
            keys, sources: the data set's prompts, each once, and their data sources: readers then know those never visited.
            parent: :attr:`id` of the attempt that wrote ``step``; without it, or if it is not in this journal, readers say
                that the steps up to there are missing.

        Raises:
            JournalError: the disk refused or does not answer, or another process begins an attempt at this moment.
        """
        prompts = self._prompts
        if keys is not None:
            names = _clean(sources)
            content = pa.table({"key": key_column(keys), "source": pa.array(names).dictionary_encode()})
            which = hashlib.blake2b(keys.tobytes() + "\0".join(names).encode(), digest_size=8).hexdigest()
            self.meta["prompts_file"] = name = f"prompts-{which}.parquet"
            prompts = name, content

        def begin() -> None:
            self._prompts = prompts
            self._begin(step, parent)

        self._run_in_turn("begun", begin, PATIENCE)

    def _begin(self, step: int, parent: str | None) -> None:
        known = {said["id"]: said["attempt"] for said in attempts_in(self.folder) if isinstance(said.get("id"), str)}
        number = max(attempt_folders(self.folder), default=-1) + 1
        folder = self.folder / f"attempt-{number}"
        folder.mkdir(parents=True)  # fails if another process was quicker
        self.attempt, self._ends = number, {_GROUPS_FILE: sys.maxsize}  # begun again where what follows fails
        if self._prompts is not None and not (self.folder / self._prompts[0]).exists():
            name, content = self._prompts
            how: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
            write_file(self.folder / name, lambda file: pq.write_table(content, file, **how))
        new = uuid.uuid4().hex
        about = {"attempt": number, "id": new, "parent": known.get(parent or ""), "after": step}
        about |= {"began": time.time(), **self.meta}
        said, head = sealed(_json({**about, "package": package_version()})), GROUPS.serialize()
        write_file(folder / _GROUPS_FILE, lambda file: file.write(head))
        write_file(folder / "attempt.json", lambda file: file.write(said))
        sync_directory(folder)
        sync_directory(self.folder)
        self._release()
        self.id, self._last = new, step
        self._ends, self._head_crc = {_GROUPS_FILE: len(head)}, zlib.crc32(head)

    def _release(self) -> None:
        while self._files:
            _close(self._files.popitem()[1])

    def close(self) -> None:
        """Write what waits, for a while; say what could not be written, and let the run go."""
        with self._ready:
            self._closing = self._woken = True
            self._ready.notify()
        self._thread.join(PATIENCE)
        if self._waiting and not self._stopped:
            self._lost += [step for step, _ in tuple(self._waiting) if step is not None]
            _LOG.warning("journal %s: the run has ended, and not all of it is written%s", self.folder, self._without())
        if not self._thread.is_alive():
            self._release()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            _close(self._lock[0])
            _HELD.discard(self._lock[1])
            self._lock = None

    # -- what training calls ----------------------------------------------------------------------------------------

    def commit_step(
        self,
        step: int,
        groups: Groups,
        keys: np.ndarray,
        outcomes: Sequence[str] | np.ndarray,
        ledger: Mapping[str, Any] | None = None,
        scalars: Mapping[str, Any] | None = None,
        *,
        sources: Sequence[str],
        wall_time: float | None = None,
        longest: int | None = None,
    ) -> None:
        """Record a step. Returns at once: whatever the disk does, training goes on.

        Args:
            step: the training step.
            groups: every group that finished in it, kept or not, in the order of review.
            keys: their prompts, ``KEY_DTYPE`` ``(G,)``.
            outcomes: what became of each, one word a group.
            ledger: JSON values, the step's account of rollouts.
            scalars: JSON values, the policy's scalar state for people to look at.
            sources: data-source name of each group's prompt.
            wall_time: seconds since 1970; now by default. For people, never used.
            longest: response tokens at which a rollout was cut (``data.max_response_length``); None: not known.

        Raises:
            ValueError: arguments of different lengths.
        """
        for name, values in (("keys", keys), ("outcomes", outcomes), ("sources", sources)):
            if len(values) != len(groups):
                raise ValueError(f"commit_step: {len(values)} {name} for {len(groups)} groups")
        batch = _message(_batch(step, groups, keys, outcomes, sources, longest))
        when = time.time() if wall_time is None else float(wall_time)
        line = {"step": int(step), "wall_time": when, "groups": len(groups)}
        # no blanks around these two: nothing within them looks the same, and readers need not parse all of it
        accounts = f',"ledger":{_json(ledger or {})},"scalars":{_json(scalars or {})}}}'

        lost, self._missing = self._missing, ""

        def write() -> None:
            missing = {"missing": lost or self._unwritable} if lost or self._unwritable else {}
            crc = zlib.crc32(batch, self._head_crc)
            where = {"offset": self._ends[_GROUPS_FILE], "bytes": len(batch), "groups_crc": crc}
            end = self._append(_GROUPS_FILE, batch)
            said = _json({**line, **where, **missing})[:-1] + accounts
            self._ends[_STEPS_FILE] = self._append(_STEPS_FILE, sealed(said))
            self._unwritable, self._last = "", int(step)
            self._ends[_GROUPS_FILE] = end  # until then the batch is written again

        self._put(step, write)

    def commit_validation(
        self,
        step: int,
        metrics: Mapping[str, Any],
        *,
        generated: int | None = None,
        prompts: Mapping[str, int] | None = None,
        wall_time: float | None = None,
    ) -> None:
        """Record what verl's validation measured; returns at once.

        Args:
            step: training steps taken so far; of several measurements of a step the first one counts.
            metrics: verl's name → value; what is not a finite number is left out.
            generated: training rollouts of the run so far.
            prompts: data source → validation prompts, from which readers get the sampling error.
            wall_time: seconds since 1970; now by default.
        """
        when = time.time() if wall_time is None else float(wall_time)
        line = {"step": int(step), "wall_time": when, "generated": generated}
        said = sealed(_json({**line, "metrics": numbers(metrics), "prompts": dict(prompts or {})}))

        def write() -> None:
            self._ends[_VALIDATIONS_FILE] = self._append(_VALIDATIONS_FILE, said)

        self._put(None, write)

    # -- the thread that writes -------------------------------------------------------------------------------------

    def _put(self, step: int | None, write: Callable[[], None]) -> None:
        with self._ready:
            if self._stopped:
                return
            if step is not None and len(self._waiting) >= BACKLOG:
                self._lost.append(step)
                self._missing = f"more than {BACKLOG} steps were waiting for the disk"
            else:
                if not self._waiting:
                    self._since = time.monotonic()
                self._waiting.append((step, write))
            if time.monotonic() - self._since > SLOW:
                self._warn(f"{self.folder} has not answered for {SLOW:g} s")
            self._woken = True
            self._ready.notify()

    def _work(self) -> None:
        """Write what waits; after a failure again with the next step, or at the end."""
        closing = False
        while not closing:
            with self._ready:
                while not self._woken:
                    self._ready.wait()
                self._woken, closing = False, self._closing
            while self._waiting:
                step, write = self._waiting[0]
                if not self._write(step, write):
                    break
                with self._ready:
                    self._waiting.popleft()
                    self._since = time.monotonic()
            else:
                self._recovered()

    def _write(self, step: int | None, write: Callable[[], None]) -> bool:
        try:
            if not self._is_ours():
                return False
            whole = all(_size(self._path(name)) >= end for name, end in self._ends.items())
            if not whole or (self._prompts is not None and _size(self.folder / self._prompts[0]) < 0):
                _LOG.warning("journal %s: its files were deleted or replaced; going on in a new attempt", self.folder)
                self._begin(self._last, self.id)
            write()
            return True
        except OSError as error:
            self._warn(f"{error}")
        except Exception as error:  # a record that cannot be written must not hold up those after it
            self._lost += [] if step is None else [step]
            self._unwritable = f"{type(error).__name__}: {error}"
            self._warn(self._unwritable)
            return True
        return False

    def _is_ours(self) -> bool:
        """Whether nobody else writes here. A folder that was moved or deleted takes its lock along: then it is locked anew."""
        why = ""
        if self.attempt >= 0 and (self.folder / f"attempt-{self.attempt + 1}").exists():
            why = f"another process has begun attempt {self.attempt + 1} of this run"
        elif self.attempt >= 0 and not (self._lock and _is_lock_of(self.folder, self._lock[0])):
            try:
                self._unlock()
                self._release()  # files of these names may be there again, and be others
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = _lock(self.folder)
            except JournalBusy:
                why = "its folder was moved or deleted, and another process writes in its place"
        if not why:
            return True
        self._stopped = True
        _LOG.warning(
            "journal %s: %s; this one writes no more after step %d. Two trainings may be saving into one folder of checkpoints",
            *(self.folder, why, self._last),
        )
        with self._ready:
            self._waiting.clear()
        return False

    def _path(self, name: str) -> Path:
        return self.folder / f"attempt-{self.attempt}" / name

    def _append(self, name: str, data: Any) -> int:
        """Write behind what is whole of a file; on disk when this returns. Where the data end."""
        if name not in self._files:
            self._files[name] = os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        descriptor, at, left = self._files[name], self._ends.get(name, 0), memoryview(data)
        while left:  # over what is there of the same data, if they could not be written the last time
            written = os.pwrite(descriptor, left, at)
            at, left = at + written, left[written:]
        os.fsync(descriptor)
        return at

    # -- trouble ----------------------------------------------------------------------------------------------------

    def _without(self) -> str:
        steps = sum(step is not None for step, _ in tuple(self._waiting))
        waits = f"; {counted(steps, 'step')} waiting" if steps and not self._closing else ""
        first, last = min(self._lost, default=0), max(self._lost, default=0)
        return waits + (f"; {counted(len(self._lost), 'step')} lost, from {first} to {last}" if self._lost else "")

    def _recovered(self) -> None:
        if self._said and not self._stopped:
            _LOG.warning("journal %s: written again, up to step %d%s", self.folder, self._last, self._without())
            self._said = False

    def _warn(self, why: str) -> None:
        if not self._said:
            self._said = True
            _LOG.warning("journal: training goes on without it: %s%s", why, self._without())


def _batch(
    step: int, groups: Groups, keys: np.ndarray, outcomes: Any, sources: Sequence[str], longest: int | None
) -> pa.RecordBatch:
    signal, size = groups.signal, len(groups)
    with np.errstate(invalid="ignore", over="ignore"):
        columns = {
            "step": np.full(size, step, dtype=np.int32),
            "submission": groups.submission,
            "source": _clean(sources),
            "n": groups.n,
            "successes": groups.successes,
            "signal_sum": groups.sum(signal),
            "signal_sqsum": groups.sum(signal * signal),
            "signal_min": groups.reduce(np.minimum, signal),
            "signal_max": groups.reduce(np.maximum, signal),
            "reward_sum": groups.sum(groups.reward),
            "reward_sqsum": groups.sum(groups.reward**2),
            "outcome": _clean(outcomes),
            "failed": groups.failed,
            "tokens": groups.sum(groups.tokens),
            "lag": groups.lag,
            "lost": groups.lost,
            "clipped": [None] * size if longest is None else groups.sum(groups.cut(longest)),
        }
    arrays = [
        key_column(keys) if f.name == "key" else pa.array(columns[f.name], from_pandas=True).cast(f.type)
        for f in GROUPS
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=GROUPS)


def _message(batch: pa.RecordBatch) -> memoryview:
    """A batch as it stands in a stream behind the schema and other batches."""
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, GROUPS, options=_OPTIONS).write_batch(batch)
    return memoryview(sink.getvalue())[len(GROUPS.serialize()) :]


def _clean(words: Sequence[object] | np.ndarray) -> list[str]:
    """Text that Arrow stores: one odd character must not cost a step."""
    clean = {word: str(word).encode("utf-8", "backslashreplace").decode() for word in set(words)}
    return [clean[word] for word in words]


def _json(value: Any) -> str:
    return json.dumps(plain(value))


def sealed(said: str) -> bytes:
    """A line of what is said in JSON, with a checksum of it: no blanks around the name, so nothing within looks the same."""
    content = said[:-1].encode()
    return b'%s,"crc":%d}\n' % (content, zlib.crc32(content))


def unsealed(line: bytes) -> bytes:
    """What :func:`sealed` was given, of a line without its end.

    Raises:
        ValueError: not what was written.
    """
    content, _, crc = line.rpartition(b',"crc":')
    if crc != b"%d}" % zlib.crc32(content):
        raise ValueError(f"its checksum does not fit: {line[:40].decode(errors='replace')!r}")
    return content + b"}"


def numbers(found: Any) -> dict[str, float]:
    """The finite numbers of a table; a file is not trusted: ValueError if it is no table."""
    if not isinstance(found, Mapping):
        raise ValueError(f"a validation holds {str(found)[:40]!r} where a table belongs")
    kinds = (int, float, np.number)
    return {n: float(v) for n, v in found.items() if isinstance(v, kinds) and type(v) is not bool and math.isfinite(v)}


def is_time(value: Any) -> bool:
    """Whether these may be seconds since 1970."""
    return type(value) in (int, float) and 0 <= value < 1e11


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def attempt_folders(folder: Path) -> dict[int, Path]:
    """The folders ``attempt-N`` by number, oldest first; others, as of a copy that somebody made, are none."""
    found = {int(p.name[8:]): p for p in folder.glob("attempt-*") if p.name[8:].isdecimal()}
    return dict(sorted(found.items()))


def attempts_in(folder: Path) -> list[dict[str, Any]]:
    """What each attempt says of itself, oldest first; one whose folder has only just been made is none yet.

    Raises:
        JournalError: what is there is no attempt.
    """
    found = []
    for number, path in attempt_folders(folder).items():
        try:
            said = json.loads(unsealed(read_file(path / "attempt.json", 1 << 20)[:-1]))
            place = [said["attempt"], said["after"], said["parent"]]
            if place[0] != number or not all(type(x) is int for x in place if x is not None):
                raise ValueError(f"it says {place}")
        except (FileNotFoundError, NotADirectoryError):
            if (path / _STEPS_FILE).exists():
                raise JournalError(f"{path / 'attempt.json'} is gone, and the attempt has steps") from None
            continue
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise JournalError(f"{path / 'attempt.json'} is damaged: {error}") from error
        found.append(said)
    return found


def _busy(folder: Path, holder: str) -> JournalBusy:
    return JournalBusy(
        f"{folder} is being written by {holder}. Two writers would mix two trainings: stop the other one, or give this run its "
        "own trainer.experiment_name"
    )


def _is_lock_of(folder: Path, descriptor: int) -> bool:
    """Whether this open file is still the folder's lock."""
    try:
        return os.path.samestat(os.stat(folder / _LOCK), os.fstat(descriptor))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # stale: another client of the NFS has deleted it
            return False
        raise


def _lock(folder: Path) -> tuple[int, tuple[int, str]]:
    """Hold the folder's lock; the system gives it back when this process ends.

    A file system without locks is left to attempts: the older of two writers stops (:meth:`Journal._is_ours`).
    """
    path = folder / _LOCK
    entry = (os.getpid(), os.path.realpath(path))
    if entry in _HELD:  # before the file is opened: closing any descriptor of it would give back the lock that is held
        raise _busy(folder, "this very process")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    for left in range(30, -1, -1):  # a killed writer's lock may outlive it by a moment
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                break
            if left and error.errno in (errno.EACCES, errno.EAGAIN):
                time.sleep(0.1)
                continue
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise _busy(folder, holder or "another process") from None
    with contextlib.suppress(OSError):  # for people to read; the lock is held, also on a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    _HELD.add(entry)
    return descriptor, entry


def _close(descriptor: int) -> None:
    """Close what is synced already; a full NFS may refuse that too, and the descriptor is gone all the same."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
