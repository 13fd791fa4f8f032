"""Open a journal, a snapshot, a folder of checkpoints or a file of results, and read its prompts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.report.history import flips_of
from verl_adaptive.report.opened import TOLERANCE, Opened, reading
from verl_adaptive.report.prompts import Prompts
from verl_adaptive.stats import SnapshotMissing, StatsTable, Store, StoreError, read_manifest, read_snapshot
from verl_adaptive.stats.locate import locate, refuse_run

__all__ = ["open_prompts"]


def open_prompts(source: str, *, run: str | None = None, tolerance: float | None = None, **results: Any) -> Opened:
    """Open whatever ``source`` is and read its prompts.

    Args:
        source: a journal, a snapshot, a directory of checkpoints, or a file of results.
        run: one of a journal's runs.
        tolerance: a group has zero variance if max − min of its signal is at most this (journals and results); None: as
            the run itself had it, where it says so.
        results: how to read a file of results: further arguments of
            :func:`verl_adaptive.stats.results.read_results`.

    Raises:
        StoreError, JournalError, SnapshotError: not there, or not readable.
    """
    with reading(source):
        found = locate(source)
        refuse_run(found, run)
        if found.kind == "results":
            from verl_adaptive.stats.results import read_results

            used = TOLERANCE if tolerance is None else tolerance
            table = read_results(Path(found.where), tolerance=used, **results)
            return Opened(source, found.where, "results", None, None, Prompts(table), {}, tolerance=used)
        store = Store(found)
        if found.kind == "snapshot":
            about = _plain(read_manifest(found.where).get("meta", {}))
            table = store.table()
            resting = (int((table.col("retired") > 0).sum()), about.get("step"))
            return Opened(source, store.where, "snapshot", None, store, Prompts(table), about, resting)
        runs = store.run_list()
        if not runs:
            raise StoreError(f"{store.where} holds no run yet; a run appears with its first step")
        name = store.run_name(run)
        row = next(r for r in runs if r["run_id"] == name)
        about = {**_plain(row["meta"]), "attempts": row["attempts"], "package": row["package"]}
        used = float(about.get("tolerance", TOLERANCE)) if tolerance is None else tolerance
        table = store.table(name, tolerance=used)
        steps = store.steps_arrow(name).column("step").to_numpy()
        retired = _retired(_checkpoints(about, found.where, len(runs)), int(steps.max(initial=0)), table)
        opened = Opened(source, store.where, "journal", name, store, Prompts(table), about, retired, used)
        flips = cache(partial(flips_of, opened, len(table)))
        opened.prompts.further["flips"] = lambda: flips().count
        opened.prompts.further["flipping"] = lambda: flips().surprise()
        return opened


def _plain(meta: dict[str, Any]) -> dict[str, Any]:
    """What a run says of itself, as far as it is text or a number: the store may be anybody's."""
    known = ("preset", "policy", "package", "step", "checkpoints", "success", "tolerance", "rollouts", "longest")
    return {name: meta[name] for name in known if isinstance(meta.get(name), str | int | float)}


def _checkpoints(about: dict[str, Any], where: str, runs: int) -> str | None:
    """The folder of a run's snapshots: as the run says or, of a journal that was moved with them, beside the file.

    Beside the file of several runs may be anybody's, and a folder that is there without snapshots is an answer.
    """
    from verl_adaptive.stats.database import local_file

    folder = about.get("checkpoints")
    if isinstance(folder, str) and os.path.isdir(folder):
        return folder
    path = local_file(where)
    return str(path.parent) if path and runs == 1 else None


def _snapshots(folder: str, last_step: int) -> Iterator[str]:
    """Snapshots in a folder up to a step, the newest first; later ones are not (or no longer) this run's."""
    beside = locate(folder, prefer="snapshot")
    if beside.kind != "snapshot":
        return
    newest = Path(beside.where)
    if not re.fullmatch(r"global_step_\d+", newest.parent.name):
        yield beside.where
        return
    found = []
    for path in newest.parent.parent.glob(f"global_step_*/{newest.name}"):
        match = re.fullmatch(r"global_step_(\d+)", path.parent.name)
        if match and int(match[1]) <= last_step:
            found.append((int(match[1]), str(path)))
    yield from (path for _, path in sorted(found, reverse=True))


def _retired(folder: str | None, last_step: int, table: StatsTable) -> tuple[int, int | None] | None:
    """A journal does not record what is retired; the newest snapshot of the run does."""
    if folder is None or not os.path.isdir(folder):
        return None
    try:
        for path in _snapshots(folder, last_step):
            try:
                theirs, _, manifest = read_snapshot(path)
            except SnapshotMissing:
                continue  # verl's checkpoint, its snapshot not yet written
            step = manifest.get("meta", {}).get("step")
            if isinstance(step, int) and step > last_step:
                continue
            rows = table.rows_for(theirs.keys, create=False)
            marked = (rows >= 0) & (theirs.col("retired") > 0)
            table.col("retired")[rows[marked]] = 1
            # a warm start puts prompts to rest that this run has not visited, so that its journal has no groups of them
            return int((theirs.col("retired") > 0).sum()), step
    except (AdaptiveError, OSError, ValueError):
        pass  # being written or damaged: that is for `stats` on the snapshot itself to say
    return None
