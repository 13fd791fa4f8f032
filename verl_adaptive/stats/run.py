"""What a run knows: one door to a journal, a snapshot or a file of results, for every command, the report and the simulator.

run = open_run("checkpoints/project/experiment")
run.prompts.to_arrow()      # a row a prompt, those never visited too
run.steps                   # a row a step
for page in run.observations():
    ...                     # a row a finished group, in the order of review
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import success_by_default
from verl_adaptive.stats.dataset import Row, keys_of, rows_of
from verl_adaptive.stats.dumps import DumpReader, Said, dump_files, said_of
from verl_adaptive.stats.files import StoreError
from verl_adaptive.stats.history import Flips, Window
from verl_adaptive.stats.journal import attempt_folders, is_time
from verl_adaptive.stats.keys import CONTENT, Identity
from verl_adaptive.stats.reader import JournalReader
from verl_adaptive.stats.results import read_results
from verl_adaptive.stats.snapshot import FOLDER, MANIFEST, MARKER, read_manifest, read_snapshot
from verl_adaptive.stats.table import StatsTable, key_words
from verl_adaptive.text import step_range

if TYPE_CHECKING:
    from verl_adaptive.stats.prompts import Prompts

#: adaptive.tolerance's default, for stores that do not say what their run used.
TOLERANCE = 1e-6
_CHECKPOINTS = "checkpoints"  # inside a run's own folder
#: Endings of files with results of an evaluation, or pass rates.
TABLES = (".parquet", ".jsonl", ".json", ".ndjson")
_DEPTH, _DEEP = 4, 8  # levels of folders that are searched, the one that is named included; for `serve`
_MOST = 500  # runs that are looked at
Kind = Literal["journal", "rollouts", "snapshot", "results"]
#: What a training needs so that a store of its kind has validations; the other kinds never have any.
VALIDATE: dict[str, str] = {
    "journal": "set trainer.test_freq",
    "rollouts": "set trainer.test_freq, have file in trainer.logger, and let VERL_FILE_LOGGER_PATH name metrics.jsonl in "
    "this folder",
}
#: Source, kind and where of a :class:`Run`.
Place = tuple[str, Kind, str]


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn what damaged or vanished files cause into one error that names ``source``.

    Raises:
        StoreError: instead of Arrow's, Python's and the system's errors.
    """
    try:
        yield
    except AdaptiveError:
        raise
    except OSError as error:
        raise StoreError(f"{source} cannot be read: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise StoreError(f"{source} cannot be read: {error}") from error
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError, RecursionError) as error:
        # what is in a file need not be what a run wrote there
        raise StoreError(f"{source} cannot be read, it is damaged: {type(error).__name__}: {error}") from error


class Run:
    """A run's statistics, read-only; made by :func:`open_run`. What it has is read when it is first asked for, and kept:
    of a run that is being written, all that it says is of the same steps.

    Args:
        source: as the user wrote it.
        kind: ``journal``, ``rollouts`` (verl's ``trainer.rollout_data_dir``), ``snapshot`` or ``results``; the first two have
            a course: steps and observations, a journal also validations and gaps.
        where: the folder, or the file.
        tolerance: a group has zero variance if max − min of its signal is at most this (journals and results); None: as the
            run itself had it, where it says so.
        identity: which columns of a data set, or of a file of results, say which prompt a row is.
        success: what a score in a file of results says of success, as in :func:`verl_adaptive.stats.results.read_results`.

    Attributes:
        about: what the run said of itself: preset, package, step …
        last: the last step that counts, where the run was cut (:meth:`until`).
    """

    def __init__(
        self,
        source: str,
        kind: Kind,
        where: str,
        tolerance: float | None = None,
        *,
        identity: Identity = CONTENT,
        success: Callable[[np.ndarray], np.ndarray] = success_by_default,
    ) -> None:
        self.source, self.kind, self.where = source, kind, where
        self.last = math.inf
        self.identity, self._success = identity, success
        self.about: dict[str, Any] = {}
        with reading(source):
            if self.has_course:
                self.about = {**_plain(self._journal.about), "attempts": len(self._journal.attempts)}
            elif kind == "snapshot":
                self.about = _plain(read_manifest(where)["meta"])
        said = self.about.get("tolerance") if kind == "journal" else None
        self.tolerance = float(said if isinstance(said, int | float) else TOLERANCE) if tolerance is None else tolerance

    @property
    def name(self) -> str | None:
        """The run's name, as its journal has it."""
        return str(self.about.get("run") or self.where) if self.has_course else None

    @property
    def has_course(self) -> bool:
        """Whether it has steps and observations."""
        return self.kind in ("journal", "rollouts")

    @property
    def id(self) -> str:
        """16 hex digits, equal however it was found; the only thing that a browser can name a run by."""
        return hashlib.sha256(os.path.realpath(self.where).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    @cached_property
    def _journal(self) -> JournalReader:
        if not self.has_course:
            raise StoreError(f"{self.where} ({self.kind}) has prompts, but no steps or observations")
        if self.kind == "rollouts":
            return DumpReader(self.where, self._success)
        return JournalReader(self.where)

    @cached_property
    def table(self) -> StatsTable:
        """The statistics table, one row a prompt; of a journal the one that its live line adds up to."""
        return self._read[0]

    @property
    def retired(self) -> tuple[int, int | None] | None:
        """``(prompts, step)`` known to be retired, for a journal from the newest snapshot beside it; None if not known."""
        return self._read[1]

    @property
    def pool(self) -> int:
        """Rows of :attr:`table`, the first ones, that are the data set's; the others were in it before a resume changed it."""
        return self._read[3]

    @cached_property
    def _read(self) -> tuple[StatsTable, tuple[int, int | None] | None, Flips | None, int]:
        with reading(self.source):
            if self.kind == "results":
                how: dict[str, Any] = {"identity": self.identity, "success": self._success, "tolerance": self.tolerance}
                table = read_results(Path(self.where), **how)
                return table, None, None, len(table)
            if self.kind == "snapshot":
                table = read_snapshot(self.where)[0]
                return table, (int((table.col("retired") > 0).sum()), self.about.get("step")), None, len(table)
            table, flips, pool = self._journal.replay(tolerance=self.tolerance, last_step=self.last)
            if self.last < math.inf or self.kind == "rollouts":
                return table, None, flips, pool
            steps = self.steps.column("step").to_numpy()
            last, live = int(steps.max(initial=0)), self._journal.live
            return table, _retired(self._checkpoints(), last, live, table), flips, pool

    @cached_property
    def prompts(self) -> Prompts:
        """The prompts as columns: the table's, and those that follow from them."""
        from verl_adaptive.stats.prompts import Prompts  # conditions need pyarrow.compute, which is slow to import

        table, retired, flips, _ = self._read
        unknown = {"retired"} if retired is None else set()
        unknown |= set() if self.kind in ("journal", "snapshot") else {"failures"}
        further = {} if flips is None else {"flips": flips.count, "flipping": flips.flipping(table)}
        return Prompts(table, further, frozenset(unknown))

    @cached_property
    def steps(self) -> pa.Table:
        """One row a step: ``attempt``, ``step``, ``wall_time``, ``groups``, and ``ledger`` and ``scalars`` as JSON text."""
        with reading(self.source):
            steps = self._journal.steps()
            return steps.slice(0, int((steps.column("step").to_numpy() <= self.last).sum()))

    def observations(self, first_step: float = 0, last_step: float = math.inf) -> Iterator[pa.Table]:
        """Pages of :data:`verl_adaptive.stats.reader.OBSERVATIONS`, a row a finished group; bounds are included."""
        with reading(self.source):
            yield from self._journal.observations(first_step, min(last_step, self.last))

    def windows(self) -> Iterator[Window]:
        """All observations, as arrays about rows of :attr:`table`."""
        for page in self.observations():
            yield Window.of(page, self.table.rows_for(key_words(page.column("key")), create=False), self.tolerance)

    def newest(self, count: int = 2) -> list[dict[str, Any]]:
        """The last steps, as :attr:`steps` has them; quick however long the run is."""
        with reading(self.source):
            return self._journal.newest(count)

    def validations(self) -> list[dict[str, Any]]:
        """verl's validation metrics, see :meth:`verl_adaptive.stats.reader.JournalReader.validations`."""
        with reading(self.source):
            return self._journal.validations()

    def gaps(self) -> list[tuple[int, int, str]]:
        """``(first step, last step, reason)`` of steps that the journal never got."""
        with reading(self.source):
            found = self._journal.gaps()
            return found if self.kind == "rollouts" else found + self._behind(found)

    def _behind(self, gaps: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
        """Steps behind the journal's last one that are in a checkpoint: its disk has been full since, or does not answer."""
        newest = _newest(Path(self._checkpoints()))
        if newest is None or self.last < math.inf:
            return []
        try:
            meta = read_manifest(newest / FOLDER)["meta"]
        except (AdaptiveError, OSError):
            return []  # being written or damaged: that is for `stats` on the snapshot itself to say
        last = max([end for _, end, _ in gaps] + [line["step"] for line in self._journal.lines()[-1:]], default=0)
        step = meta.get("step")
        if not isinstance(step, int) or step <= last or meta.get("attempt") != self._journal.about.get("id"):
            return []
        if any(line["step"] >= step for line in self.again().newest(1)):
            return []  # this reading is older than the checkpoint
        return [(last + 1, step, f"not written when {newest.name} was saved")]

    def missing(self) -> list[str]:
        """What the course leaves out, in words, for people: :meth:`gaps`; of verl's rollouts, those that did not train."""
        if self.kind == "rollouts":
            return [
                f"{self.name}: verl writes down the rollouts that trained; dropped prompts and groups are not in it"
            ]
        gaps = self.gaps() if self.has_course else []
        return [f"{self.name}: the journal lacks {step_range(first, last)}: {why}" for first, last, why in gaps]

    def beside(self, data: str) -> None:
        """Find the training set's prompts in verl's rollouts; of other stores name the data sources that they lack.

        Before anything else is asked for: lists, figures and conditions then judge a prompt among those of its source.
        """
        if self.kind == "rollouts":
            assert isinstance(self._journal, DumpReader)
            self._journal.beside(rows_of(data, None, self.identity))
        elif not self.table.col("source").all():
            keys, sources = keys_of(data, self.identity)
            self.table.rows_for(keys, create=False, sources=sources)

    def texts(self, wanted: set[str], *, data: str | None = None, rollouts: str | None = None) -> dict[str, Row]:
        """Texts of prompts by key in hex digits: from a data set, and from what verl wrote down of the rollouts.

        Args:
            wanted: the keys; of verl's rollouts themselves the texts are known without a data set (or :meth:`beside` one).
            data: the training set.
            rollouts: ``trainer.rollout_data_dir``; with ``data``.
        """
        made = self._journal if self.has_course else None
        if isinstance(
            made, DumpReader
        ):  # whose prompts have been through the chat template: no data set has their keys
            return {key: replace(made.rows[key], said=made.said.get(key)) for key in wanted & set(made.rows)}
        if data is None:
            return {}
        # a rollout belongs to one of all prompts, not of those that are listed
        rows = rows_of(data, wanted if rollouts is None else None, self.identity)
        said: dict[str, Said] = {}
        if rollouts is not None:
            known, signal = self.about.get("success"), self.about.get("signal", "reward")
            threshold = float(known) if isinstance(known, int | float) else 0.5
            if signal != "reward":  # verl writes down the reward, which says nothing of another signal's successes
                threshold = math.inf
            with reading(rollouts):
                said = said_of(rollouts, rows, threshold=threshold)
        return {key: replace(row, said=said.get(key)) for key, row in rows.items() if key in wanted}

    def again(self) -> Run:
        """The same store, to be read anew."""
        return Run(*(self.source, self.kind, self.where, self.tolerance), identity=self.identity, success=self._success)

    def until(self, step: int) -> Run:
        """The same journal up to a step: its prompts as they were then."""
        run = self.again()
        run.last = step
        return run

    def _checkpoints(self) -> str:
        """The folder of a run's snapshots: the one that its journal is in, which may be a copy's, or as the run says."""
        here, said = os.path.dirname(self.where), self.about.get("checkpoints")
        return said if isinstance(said, str) and _newest(Path(here)) is None else here


def _plain(meta: dict[str, Any]) -> dict[str, Any]:
    """What a run says of itself, as far as it is text, a number or numbers by name: the files may be anybody's."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and value == value

    return {
        name: value
        for name, value in meta.items()
        if (isinstance(value, str) or number(value) or (isinstance(value, dict) and all(map(number, value.values()))))
        and (name != "began" or is_time(value))
    }


# -- finding ------------------------------------------------------------------------------------------------------------


def open_run(source: str | os.PathLike[str], **how: Any) -> Run:
    """Open whatever ``source`` is.

    Args:
        source: a run's folder, its checkpoints or one checkpoint ``global_step_N``, a journal, a snapshot, a folder of verl's
            rollouts (``trainer.rollout_data_dir``), a Parquet or JSONL file of results, or a folder or pattern (``runs/*``) that leads to one run.
        how: ``tolerance``, ``identity`` and ``success``, as :class:`Run`.

    Raises:
        StoreError: nothing there, or several runs; the message says what was looked for, or names them.

    Example:
        >>> run = open_run("checkpoints/project/experiment")  # doctest: +SKIP
        >>> run.prompts.to_arrow().to_pandas().sort_values("pass_rate").head()  # doctest: +SKIP
    """
    runs = open_runs(source, **how)
    if len(runs) > 1:
        there = ", ".join(run.source for run in runs[:4]) + (", …" if len(runs) > 4 else "")
        raise StoreError(f"{os.fspath(source)} leads to {len(runs)} runs, name one: {there}")
    return runs[0]


def open_runs(
    source: str | os.PathLike[str],
    *,
    prefer: Literal["journal", "snapshot"] = "journal",
    damaged: Callable[[str], None] | None = None,
    **how: Any,
) -> list[Run]:
    """Open every run that ``source`` leads to, oldest first: as :func:`open_run`, but a folder or pattern may have several.

    Args:
        source, how: as :func:`open_run`.
        prefer: what to take from a folder of checkpoints that has both.
        damaged: is told of each run that cannot be read beside others that can; None: one is an error.
    """
    text = os.fspath(source)
    if not text.strip():
        raise StoreError("the store's name is empty; give a run's folder or a file")
    with reading(text):
        places = list(_places(_named(text), prefer))
        # beside runs there are tables (a plan), and the runs' own rollouts, which would count twice: meant where alone
        for kinds in (("journal", "snapshot"), ("rollouts",)):
            places = [place for place in places if place[1] in kinds] or places
        if not places:
            raise StoreError(
                f"{text} holds no run: it is not one of {', '.join(TABLES)}, nor a folder with {FOLDER}/attempt-*, {MANIFEST}, "
                f"{FOLDER}/{MANIFEST}, global_step_*/{FOLDER}, one of these in {_CHECKPOINTS} or in a folder below, or "
                "<step>.jsonl of verl's trainer.rollout_data_dir"
            )
        found, errors = _runs(places, **how)
    if errors and (damaged is None or not found):
        raise errors[0]
    for error in errors:
        assert damaged is not None
        damaged(str(error))
    return sorted(found, key=lambda run: (run.about.get("began", 0.0), run.where))


def _runs(places: Iterable[Place], **how: Any) -> tuple[list[Run], list[AdaptiveError]]:
    """The runs in these places, each once, by the first path that leads to it; and why others cannot be read."""
    found: dict[str, Run] = {}
    errors: list[AdaptiveError] = []
    for place in places:
        try:
            run = Run(*place, **how)
            found.setdefault(run.id, run)
        except AdaptiveError as error:
            errors.append(error)
    return list(found.values()), errors


def _named(text: str) -> list[str]:
    """The files and folders that a name or pattern stands for; StoreError if there are none."""
    names = sorted(glob.glob(text)) if glob.has_magic(text) and not os.path.exists(text) else [text]
    if not any(map(os.path.exists, names)):
        raise StoreError(f"{text} does not exist")
    return names


def _held(path: Path, prefer: str) -> tuple[Kind, str] | None:
    """What a file is, or what is in a folder itself."""
    if not path.is_file():
        return _in_folder(path, prefer) or _in_folder(path / _CHECKPOINTS, prefer)
    if path.name == MANIFEST:
        return "snapshot", str(path.parent)
    if dump_files(path):
        return "rollouts", str(path)
    return ("results", str(path)) if path.suffix in TABLES else None


def _in_folder(path: Path, prefer: str) -> tuple[Kind, str] | None:
    """The journal or snapshot that is in a folder itself."""
    for folder in (path, path / FOLDER):
        if (folder / MANIFEST).exists():
            return "snapshot", str(folder)
    journal = next((folder for folder in (path, path / FOLDER) if _is_journal(folder)), None)
    newest = _newest(path)
    if journal is None and newest is None and dump_files(path):
        return "rollouts", str(path)
    if journal is not None and (prefer == "journal" or newest is None):
        return "journal", str(journal)
    return None if newest is None else ("snapshot", str(newest / FOLDER))


def _is_journal(folder: Path) -> bool:
    return any((path / "attempt.json").exists() for path in attempt_folders(folder).values())


def _newest(root: Path) -> Path | None:
    """The checkpoint that verl would resume from, which need not be the highest number; without verl's word for it, that."""
    there = dict(_checkpoints(root))
    try:
        said = int((root / MARKER).read_text())
    except (OSError, ValueError):
        said = -1
    return there.get(said) or there.get(max(there, default=-1))


def _checkpoints(root: Path) -> Iterator[tuple[int, Path]]:
    """Every ``global_step_N`` that has a finished snapshot, and N."""
    for path in root.glob("global_step_*"):
        match = re.fullmatch(r"global_step_(\d+)", path.name)
        if match and (path / FOLDER / MANIFEST).is_file():
            yield int(match[1]), path


def find_runs(source: str) -> tuple[list[Run], list[str]]:
    """All runs with a journal that there are now, for ``serve``, and what could not be read.

    Args:
        source: a folder (searched eight levels deep, through links too), or a pattern.

    Raises:
        StoreError: there is no such folder.
    """
    below = (place for place in _places(_named(source), "journal", _DEEP) if place[1] == "journal")
    found, errors = _runs(itertools.islice(below, _MOST))
    more = [f"only the first {_MOST} runs below {source} are shown"] if next(below, None) else []
    return found, [*map(str, errors), *more]


def _places(names: list[str], prefer: str, most: int = _DEPTH) -> Iterator[Place]:
    """What files and folders hold, and the folders below those that hold nothing themselves, at most so many levels, nearest
    first; checkpoints' own contents are left alone.

    Links to folders are followed, after what is there itself: a run keeps its own path, and its id, beside a `latest`.
    """
    here, linked = deque[tuple[str, int]](), deque[tuple[str, int]]()
    for name in names:
        (linked if os.path.islink(name) else here).append((name, 1))
    seen: set[str] = set()  # links may lead in circles
    while here or linked:
        place, depth = (here or linked).popleft()
        if (real := os.path.realpath(place)) in seen:
            continue
        seen.add(real)
        try:
            found = _held(Path(place), prefer)
            closed = found or depth == most or not os.path.isdir(place)
            entries = [] if closed else sorted(os.scandir(place), key=lambda entry: entry.name)
        except OSError:
            if [place] == names:
                raise
            continue  # not ours to read
        if found:
            yield place, *found
        for entry in entries:
            if _may_hold_runs(entry):
                (linked if entry.is_symlink() else here).append((entry.path, depth + 1))


def _may_hold_runs(entry: os.DirEntry[str]) -> bool:
    linked = entry.is_symlink()
    names = {entry.name, os.path.basename(os.path.realpath(entry.path))} if linked else {entry.name}
    folder = os.path.isdir(entry.path) if linked else entry.is_dir()  # a link may lead to itself
    return folder and not any(name.startswith((".", "global_step_")) for name in names)


def _retired(folder: str, last_step: int, live: list[Any], table: StatsTable) -> tuple[int, int | None] | None:
    """A journal does not record what is retired; the newest snapshot of its live line up to the last step does, and is marked."""
    try:
        for number, path in sorted(((s, p) for s, p in _checkpoints(Path(folder)) if s <= last_step), reverse=True):
            meta = read_manifest(path / FOLDER)["meta"]
            if not any(meta.get("attempt") == here.about.get("id") and number <= here.last for here in live):
                continue  # an abandoned stretch's, or another run's in the same place
            theirs = read_snapshot(path / FOLDER)[0]
            rows = table.rows_for(theirs.keys, create=False)
            marked = (rows >= 0) & (theirs.col("retired") > 0)
            table.col("retired")[rows[marked]] = 1
            # a warm start puts prompts to rest that this run has not visited
            return int((theirs.col("retired") > 0).sum()), meta.get("step")
    except (AdaptiveError, OSError, ValueError):
        pass  # being written or damaged: that is for `stats` on the snapshot itself to say
    return None
