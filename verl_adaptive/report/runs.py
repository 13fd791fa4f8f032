"""The runs of a folder or of a database, and what is new of them, without reading much."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.report.learning import headline
from verl_adaptive.report.opened import reading
from verl_adaptive.report.overview import ledger_of
from verl_adaptive.stats import StoreError, open_store
from verl_adaptive.stats.locate import DATABASES, locate

__all__ = ["Run", "find_runs", "state_of"]

#: Folders below the one that is named.
_DEPTH = 8
#: Databases that are looked at.
_MOST = 500


@dataclass(frozen=True)
class Run:
    """One run of one journal.

    Attributes:
        id: of 16 hex digits; the only thing that a browser can name it by.
        source: path or URL, as :func:`verl_adaptive.report.opening.open_prompts` takes it.
        name: in its journal.
        preset: what it said of itself.
        began: seconds since 1970.
    """

    id: str
    source: str
    name: str
    preset: str
    began: float


def find_runs(source: str) -> tuple[list[Run], list[str]]:
    """All runs there are now, and what could not be read.

    Args:
        source: a folder (searched eight levels deep, through links too), a SQLite file, or a database URL; ``#run`` at a
            URL's end names the one of its runs.

    Raises:
        StoreError: there is no such folder or file.
    """
    if "://" not in source and not os.path.exists(source):
        raise StoreError(f"{source} does not exist")
    found: list[Run] = []
    trouble: list[str] = []
    databases = _databases(Path(source)) if "://" not in source and os.path.isdir(source) else [source]
    for number, database in enumerate(databases):
        if number >= _MOST:
            trouble.append(f"only the first {_MOST} databases below {source} are shown")
            break
        try:
            with reading(database):
                asked = locate(database)
                for row in open_store(database).run_list():
                    name = str(row["run_id"])
                    if asked.run not in (None, name):
                        continue
                    digest = hashlib.sha256(f"{database}\n{name}".encode()).hexdigest()[:16]
                    preset = row["meta"].get("preset") if isinstance(row["meta"], dict) else None
                    found.append(Run(digest, asked.where, name, str(preset or "-"), float(row["created_at"])))
        except AdaptiveError as error:
            trouble.append(str(error))
    return found, trouble


def _databases(folder: Path) -> Iterator[str]:
    """SQLite files below a folder, nearest first; checkpoints' own contents are left alone.

    Links to folders are followed, after what is there itself: a run keeps its own path, and its id, beside a `latest`.
    """
    here, linked = deque([(str(folder), 1)]), deque[tuple[str, int]]()
    seen: set[tuple[int, int]] = set()  # links may lead in circles
    while here or linked:
        place, depth = (here or linked).popleft()
        try:
            about = os.stat(place)
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            entries = sorted(os.scandir(place), key=lambda e: e.name)
        except OSError:
            continue  # not ours to read
        for entry in entries:
            if _is_folder(entry):
                if depth < _DEPTH and _may_hold_runs(entry):
                    (linked if entry.is_symlink() else here).append((entry.path, depth + 1))
            elif entry.name.endswith(DATABASES) and _is_sqlite(entry.path):
                yield entry.path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _may_hold_runs(entry: os.DirEntry[str]) -> bool:
    names = {entry.name, os.path.basename(os.path.realpath(entry.path))} if entry.is_symlink() else {entry.name}
    return not any(name.startswith((".", "global_step_")) for name in names)


def _is_sqlite(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(15) == b"SQLite format 3"
    except OSError:
        return False


def state_of(run: Run) -> dict[str, Any]:
    """What is new of a run, quickly.

    Returns:
        ``version`` (changes with every step and validation), ``step``, ``plan``, ``generated``, ``validation`` and
        ``best`` (of the mean over sources), ``metric``, ``updated`` (seconds since 1970, or None) and ``running``.
    """
    with reading(run.source):
        store = open_store(run.source)
        newest = store.newest_arrow(run.name)
        validations = store.validations(run.name)
    step = wall = plan = generated = None
    pace = 0.0
    if newest.num_rows:
        steps, walls = newest.column("step").to_pylist(), newest.column("wall_time").to_pylist()
        step, wall = steps[-1], walls[-1]
        if len(set(newest.column("attempt").to_pylist())) == 1:  # a pause between attempts is no pace
            pace = max(0.0, walls[-1] - walls[0])
        ledger = ledger_of(newest.column("ledger")[-1].as_py())
        generated = ledger.get("run", {}).get("rollouts", {}).get("generated")
        plan = _plan(newest.column("scalars")[-1].as_py())
    curve = next(iter(headline(validations)[-1:]), None)
    updated = max(
        [w for w in (wall, validations[-1]["wall_time"] if validations else None) if w is not None], default=None
    )
    attempt = newest.column("attempt")[-1].as_py() if newest.num_rows else 0
    return {
        "version": f"{attempt}.{step}.{len(validations)}",
        "step": step,
        "plan": plan,
        "generated": generated,
        "validation": None if curve is None else float(curve.values[-1]),
        "best": None if curve is None else float(curve.values.max()),
        "metric": None if curve is None else curve.metric,
        "updated": updated,
        "running": updated is not None and time.time() - updated < max(180.0, 5 * pace),
    }


def _plan(scalars: str) -> int | None:
    try:
        value = json.loads(scalars).get("adaptive/plan/steps")
        return int(value) if isinstance(value, int | float) and 0 < value < 1e15 else None
    except (ValueError, AttributeError, RecursionError):
        return None
