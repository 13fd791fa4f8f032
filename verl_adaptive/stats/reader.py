"""Reads a journal, while another process may be writing it: the steps whose line is whole.

The *live line* of a run is its newest attempt, before it the parent up to the step that it resumed from, and so on.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_adaptive.stats.atomic import read_file
from verl_adaptive.stats.history import Flips, Window
from verl_adaptive.stats.journal import GROUPS, JournalError, attempts_in, is_time, numbers, unsealed
from verl_adaptive.stats.table import StatsTable, key_words
from verl_adaptive.text import step_range

OBSERVATIONS = pa.schema([("attempt", pa.int32()), *GROUPS])
"""One row a finished group, in the order of review; see :data:`verl_adaptive.stats.journal.GROUPS`."""

_STEPS = pa.schema(
    [("attempt", pa.int32()), ("step", pa.int32()), ("wall_time", pa.float64()), ("groups", pa.int64())]
    + [("ledger", pa.string()), ("scalars", pa.string())]
)
_PAGE = 200_000  # groups in memory at once
_TAIL = 1 << 18
_LARGEST = 1 << 36
_LARGEST_SCHEMA = 1 << 16  # bytes


@dataclass(frozen=True)
class _Stretch:
    """An attempt of the live line: its folder, and the steps of it that count (first excluded)."""

    about: dict[str, Any]
    folder: Path
    first: int
    last: float

    def keep(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line for line in lines if self.first < line["step"] <= self.last]


class JournalReader:
    """A run's journal, read once, so that all it says is of the same steps.

    Args:
        folder: the journal's own.

    Raises:
        JournalError: there is none, or it is damaged; also of every method.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.attempts = attempts_in(self.folder)
        if not self.attempts:
            raise JournalError(f"{self.folder} holds no run yet; a run appears when its training begins")

    @property
    def about(self) -> dict[str, Any]:
        """What the newest attempt says of the run."""
        return self.attempts[-1]

    @cached_property
    def live(self) -> list[_Stretch]:
        """The live line, oldest stretch first."""
        line: list[_Stretch] = []
        wanted, cap = self.about["attempt"], math.inf
        for here in reversed(self.attempts):
            if here["attempt"] == wanted:
                line.append(_Stretch(here, self.folder / f"attempt-{wanted}", here["after"], cap))
                wanted, cap = here["parent"], min(cap, here["after"])
        if wanted is not None:
            raise JournalError(f"{self.folder}: attempt {line[-1].about['attempt']} has no parent {wanted}")
        return line[::-1]

    def lines(self) -> list[dict[str, Any]]:
        """The steps of the live line: each line of ``steps.jsonl`` with its ``attempt``; ``ledger`` and ``scalars`` as text."""
        return [line for _, _, there in self._steps for line in there]

    @cached_property
    def _steps(self) -> list[tuple[_Stretch, list[dict[str, Any]], list[dict[str, Any]]]]:
        """Of each stretch its steps, and those of them whose groups are there."""
        _ = self._validated  # first: a validation is written behind its step
        steps = [(stretch, stretch.keep(_lines(stretch.folder))) for stretch in self.live]
        return [(stretch, lines, _there(stretch.folder, lines)) for stretch, lines in steps]

    def newest(self, count: int = 2) -> list[dict[str, Any]]:
        """The last of :meth:`lines`; quick, however long the run is."""
        last = self.live[-1]
        found = last.keep(_there(last.folder, _lines(last.folder, _TAIL)))
        return found[-count:] if len(found) >= count else self.lines()[-count:]

    def steps(self) -> pa.Table:
        """:meth:`lines` as Arrow; ``ledger`` and ``scalars`` are JSON text."""
        lines = self.lines()
        return pa.table([pa.array([line[f.name] for line in lines], f.type) for f in _STEPS], schema=_STEPS)

    def gaps(self) -> list[tuple[int, int, str]]:
        """``(first step, last step, reason)`` of what the live line lacks."""
        before, cut, last = max(self.live[0].first, 0), 0, self.about
        out = [(1, before, "the attempt that wrote them is not in this journal")] if before else []
        for stretch, lines, there in self._steps:
            for line in there:
                if line["step"] > before + 1:
                    why = (
                        line.get("missing")
                        or f"not written when attempt {line['attempt']} began after step {stretch.first}"
                    )
                    out.append((before + 1, line["step"] - 1, str(why)))
                before = line["step"]
            cut = lines[-1]["step"] if lines else 0
        if last["after"] > before:
            out.append((before + 1, last["after"], "not written when training resumed after it"))
            before = last["after"]
        validated = max((one["step"] for one in self._validated), default=0)
        for name, end in (("groups.arrows", cut), ("steps.jsonl", validated)):
            if end > before:
                out.append((before + 1, end, f"{name} of attempt {last['attempt']} ends before them"))
                before = end
        return out

    def validations(self) -> list[dict[str, Any]]:
        """What verl's validation measured along the live line, in order of steps.

        Returns:
            ``step``, ``wall_time`` (seconds since 1970), ``generated`` (training rollouts up to there, or None),
            ``metrics`` (verl's name → value) and ``prompts`` (data source → validation prompts). Where a resumed run
            validated a step once more, the first measurement counts.
        """
        return [dict(one) for one in self._validated]

    @cached_property
    def _validated(self) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for stretch in self.live:
            path = stretch.folder / "validations.jsonl"
            for line in _parsed(path, list(_whole(path))):
                if not is_time(line["wall_time"]) or type(line["generated"]) not in (int, float, type(None)):
                    raise ValueError(f"the validation of step {str(line['step'])[:40]!r} holds no numbers")
                if line["step"] <= stretch.last:
                    known = {"metrics": numbers(line["metrics"]), "prompts": numbers(line["prompts"])}
                    found.setdefault(line["step"], {**line, **known})
        return [found[step] for step in sorted(found)]

    def observations(self, first_step: float = 0, last_step: float = math.inf) -> Iterator[pa.Table]:
        """Pages of observations along the live line, in order (schema :data:`OBSERVATIONS`); bounds are included."""
        for stretch, _, there in self._steps:
            lines = [line for line in there if first_step <= line["step"] <= last_step]
            begin = 0
            while begin < len(lines):
                end, size = begin + 1, lines[begin]["groups"]
                while (
                    end < len(lines)
                    and lines[end]["offset"] == lines[end - 1]["offset"] + lines[end - 1]["bytes"]
                    and size + lines[end]["groups"] <= _PAGE
                ):
                    size += lines[end]["groups"]
                    end += 1
                yield _page(stretch.folder, lines[begin:end])
                begin = end

    def dataset(self) -> tuple[np.ndarray, list[str]] | None:
        """Keys and data sources of the newest attempt's data set; None if it names none."""
        name = self.about.get("prompts_file")
        if name is None:
            return None
        try:
            if os.path.basename(name) != name:
                raise ValueError("a folder belongs to the name")
            raw = pa.BufferReader(read_file(self.folder / name, _LARGEST))
            with pq.ParquetFile(raw, pre_buffer=False, page_checksum_verification=True) as file:
                table = file.read(use_threads=False)
            return key_words(table.column("key")), table.column("source").to_pylist()
        except (OSError, ValueError, TypeError, LookupError, pa.ArrowException) as error:
            raise JournalError(
                f"{self.folder / str(name)} cannot be read: {getattr(error, 'strerror', None) or error}. Without it the prompts "
                "that were never visited are not known: restore it from a copy"
            ) from error

    def replay(self, *, last_step: float, tolerance: float) -> tuple[StatsTable, Flips, int]:
        """The statistics as the live line made them, over every prompt of the data set.

        In the sync mode they equal the run's, bit for bit. In the asynchronous modes ``first_step``, ``last_step`` and
        ``last_try`` may be later: the journal has the step in which a group left the engine, the run's table that in which it
        was reviewed. Columns that policies declare are not in a journal, nor is ``retired``.

        Args:
            last_step: stop after this step.
            tolerance: as in :meth:`StatsTable.observe`.

        Returns:
            The table, how the prompts' pass rates went to and fro, and how many rows are of the newest attempt's data set:
            the first ones; all, if it names none.
        """
        table = StatsTable()
        known = self.dataset()
        if known is not None:
            table.rows_for(known[0], sources=known[1])
        pool, flips = len(table), Flips()
        for page in self.observations(last_step=last_step):
            rows = table.rows_for(key_words(page.column("key")), sources=page.column("source").to_pylist())
            w = Window.of(page, rows, tolerance)
            table.observe_visits(w)
            flips.add(rows, w.rate, w.n, len(table))
        return table, flips, len(table) if known is None else pool


def _whole(path: Path, tail: int | None = None) -> Iterator[bytes]:
    """The lines of a file, or the last ones, as they were written; one that is not whole yet (or that a kill has left) is none."""
    try:
        raw = read_file(path, _LARGEST, tail)
    except (FileNotFoundError, NotADirectoryError):
        return
    lines = io.BytesIO(raw)
    if tail is not None and len(raw) == tail:
        next(lines, None)
    try:
        for line in lines:
            if line.endswith(b"\n"):
                yield unsealed(line[:-1])
    except ValueError as error:
        raise JournalError(f"{path} is damaged: {error}") from error


def _parsed(path: Path, lines: list[bytes]) -> list[dict[str, Any]]:
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")
        if len(found) != len(lines) or not all(type(one["step"]) is int for one in found):
            raise ValueError("a line is no step")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise JournalError(f"{path} is damaged: {error}") from error
    return found


def _there(folder: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of an attempt's steps whose groups are there: a copy of a run that is being written may lack the last."""
    try:
        size = (folder / "groups.arrows").stat().st_size
    except FileNotFoundError:
        size = 0
    return list(itertools.takewhile(lambda line: line["offset"] + line["bytes"] <= size, lines))


def _lines(folder: Path, tail: int | None = None) -> list[dict[str, Any]]:
    """An attempt's steps, each with its ``attempt``."""
    path, attempt, before = folder / "steps.jsonl", int(folder.name[8:]), -1
    heads, accounts = [], []
    for whole in _whole(path, tail):
        head, _, rest = whole.partition(b',"ledger":')
        heads.append(head + b"}")
        accounts.append(rest.decode().partition(',"scalars":'))
    out = _parsed(path, heads)
    for line, (ledger, found, scalars) in zip(out, accounts, strict=True):
        numbers = [line.get(name) for name in ("step", "groups", "offset", "bytes", "groups_crc")]
        sound = all(type(x) is int and 0 <= x < 2**53 for x in numbers) and line["step"] > before
        if not (sound and found and is_time(line.get("wall_time"))):
            raise JournalError(f"{path} is damaged: a line behind step {before} is no step")
        before = line["step"]
        line |= {"attempt": attempt, "ledger": ledger, "scalars": scalars[:-1]}
    return out


def _page(folder: Path, lines: list[dict[str, Any]]) -> pa.Table:
    """The groups of steps that lie one behind the other; a column that was not written yet when the attempt began is null."""
    path = folder / "groups.arrows"
    begin, end = lines[0]["offset"], lines[-1]["offset"] + lines[-1]["bytes"]
    with path.open("rb") as file:
        schema = file.read(_LARGEST_SCHEMA)
        file.seek(begin)
        raw = memoryview(file.read(end - begin))
    try:
        head = pa.BufferReader(schema)
        pa.ipc.read_message(head)
        schema = schema[: head.tell()]
        head_crc = zlib.crc32(schema)
        for line in lines:
            at = line["offset"] - begin
            if zlib.crc32(raw[at : at + line["bytes"]], head_crc) != line["groups_crc"]:
                raise ValueError(f"the checksum of step {line['step']} does not fit")
        alone = pa.ipc.IpcReadOptions(use_threads=False)  # threads take longer than a step's few buffers
        table = pa.ipc.open_stream(pa.py_buffer(schema + raw), options=alone).read_all()
        table.validate(full=True)
        if table.num_rows != sum(line["groups"] for line in lines):
            raise ValueError(f"{table.num_rows} groups instead of {sum(line['groups'] for line in lines)}")
        for field in GROUPS:
            if field.name not in table.column_names:
                table = table.append_column(field, pa.nulls(len(table), field.type))
        table = table.select(GROUPS.names).cast(GROUPS)
    except (pa.ArrowException, EOFError, OSError, ValueError) as error:
        at = step_range(lines[0]["step"], lines[-1]["step"])
        raise JournalError(f"{path} is damaged, {at}: {error}") from error
    return table.add_column(0, OBSERVATIONS.field(0), pa.array(np.full(len(table), lines[0]["attempt"], np.int32)))
