"""What a user means by a path or URL: a journal, a snapshot, or a file of results."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats.snapshot import MANIFEST

__all__ = ["DATABASES", "Found", "StoreError", "locate", "refuse_run"]

_SNAPSHOT_FOLDER = "adaptive"  # inside verl's `global_step_N`
_CHECKPOINTS = "checkpoints"  # inside a run's own folder
#: Endings of SQLite files.
DATABASES = (".sqlite", ".sqlite3", ".db")
_TABLES = (".parquet", ".jsonl", ".json", ".ndjson")


class StoreError(AdaptiveError):
    """There is no store where one was looked for, or it does not hold what was asked of it."""


@dataclass(frozen=True)
class Found:
    """What a path or URL leads to.

    Attributes:
        kind: ``journal``, ``snapshot`` or ``results``.
        where: a database URL for a journal, else a path.
        run: the run named after a ``#``, if any.
    """

    kind: Literal["journal", "snapshot", "results"]
    where: str
    run: str | None = None


def _newest_checkpoint(root: Path) -> Path | None:
    """The newest ``global_step_N`` under ``root`` that has a finished snapshot."""
    steps = []
    for path in root.glob("global_step_*"):
        match = re.fullmatch(r"global_step_(\d+)", path.name)
        if match and (path / _SNAPSHOT_FOLDER / MANIFEST).is_file():
            steps.append((int(match[1]), path))
    return max(steps)[1] if steps else None


def _holds_store(folder: Path) -> bool:
    """Whether a folder has a database or a finished snapshot in it."""
    return any(p.suffix in DATABASES for p in folder.iterdir()) or _newest_checkpoint(folder) is not None


def _stores_below(folder: Path, most: int = 4) -> list[str]:
    """The first stores at most three folders down, for the message: verl's default is checkpoints/<project>/<experiment>."""
    found: list[str] = []
    try:
        for pattern in ("*", "*/*", "*/*/*"):
            for path in sorted(folder.glob(pattern)):
                if len(found) >= most:
                    return [*found, "…"]
                if path.is_dir() and not path.name.startswith("global_step_") and _holds_store(path):
                    found.append(str(path))
    except OSError:
        pass  # a folder that may not be read; the message does without
    return found


def _in_password(text: str) -> bool:
    """Whether the last ``#`` of a URL belongs to a password that was not encoded, rather than before a run's name."""
    head, _, tail = text.rpartition("#")
    server, slash, _ = head.partition("://")[2].partition("/")
    password = server.partition(":")[2]
    return "@" in tail and "@" not in head and bool(password) and not (slash and password.isdecimal())


def _is_file(text: str) -> bool:
    """Whether a path, or the URL of a file, is there with the ``#`` in it, which then is before no run's name."""
    if "://" not in text:
        return os.path.exists(text)
    from verl_adaptive.stats.database import local_file

    url, _, settings = text.partition("?")
    try:
        path = None if "#" in settings else local_file(url)
    except AdaptiveError:
        return False  # whoever opens it says what is wrong with it
    return path is not None and os.path.exists(path)


def locate(source: str | os.PathLike[str], *, prefer: Literal["journal", "snapshot"] = "journal") -> Found:
    """Find out what ``source`` is.

    Args:
        source: a database URL; a SQLite, Parquet or JSONL file; a snapshot directory; a checkpoint ``global_step_N``;
            a directory of checkpoints, or one that has it as ``checkpoints``. ``#run`` at the end names one of a journal's runs.
        prefer: which of the two to take from a directory of checkpoints that has both.

    Raises:
        StoreError: nothing there that could be read; the message says what was looked for.
    """
    text = os.fspath(source)
    if not text.strip():
        raise StoreError("the store's name is empty; give a folder of checkpoints, a file or a database URL")
    run = None
    if "#" in text and not _in_password(text) and not _is_file(text):
        text, _, run = text.rpartition("#")
    if "://" in text:
        return Found("journal", text, run)
    if any("\ud800" <= sign <= "\udfff" for sign in text):
        raise StoreError(
            f"{text}: the bytes of this path are not UTF-8, and SQLite opens no such; rename it, or link to it"
        )
    # who names a run means the journal: a snapshot is of one
    found = _find(text, run, prefer if run is None else "journal")
    refuse_run(found, run)
    return found


def refuse_run(found: Found, run: str | None) -> None:
    """Refuse to look for a run where there is no choice of them: the answer would be about another.

    Raises:
        StoreError: a run is named, and what was found is no journal.
    """
    if run is not None and found.kind != "journal":
        kind = "a snapshot, which is of one run" if found.kind == "snapshot" else "a file of results, which has no runs"
        raise StoreError(f"{found.where} is {kind}: leave out the run {run!r}")


def _find(text: str, run: str | None, prefer: Literal["journal", "snapshot"]) -> Found:
    path = Path(text)
    if path.is_file():
        if path.name == MANIFEST:
            return Found("snapshot", str(path.parent))
        if path.suffix in _TABLES:
            return Found("results", text)
        if path.suffix in DATABASES or path.open("rb").read(15) == b"SQLite format 3":
            return Found("journal", text, run)
        raise StoreError(f"{path} is neither a SQLite file nor one of {', '.join(_TABLES)}")
    if not path.is_dir():
        raise StoreError(f"{path} {'is neither a file nor a folder' if path.exists() else 'does not exist'}")
    for folder in (path, path / _SNAPSHOT_FOLDER):
        if (folder / MANIFEST).exists():
            return Found("snapshot", str(folder))
    databases = sorted(p for p in path.iterdir() if p.suffix in DATABASES)
    newest = _newest_checkpoint(path)
    if len(databases) > 1 and (prefer == "journal" or newest is None):
        raise StoreError(f"{path} holds several databases, name one: {', '.join(p.name for p in databases)}")
    if databases and (prefer == "journal" or newest is None):
        return Found("journal", str(databases[0]), run)
    if newest is not None:
        return Found("snapshot", str(newest / _SNAPSHOT_FOLDER))
    if (path / _CHECKPOINTS).is_dir() and _holds_store(path / _CHECKPOINTS):
        return _find(str(path / _CHECKPOINTS), run, prefer)
    below = _stores_below(path)
    hint = f". There are {', '.join(below)}" if below else ""
    raise StoreError(
        f"{path} holds no store: neither {MANIFEST}, nor {_SNAPSHOT_FOLDER}/{MANIFEST}, nor a SQLite file, nor "
        f"global_step_*/{_SNAPSHOT_FOLDER}, nor one of these in {_CHECKPOINTS}{hint}"
    )
