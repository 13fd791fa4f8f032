"""Write a store to a file that other tools read (Parquet, CSV or JSON lines), or the rows of a data set that it judges.

examples:
  verl-adaptive export checkpoints/project/experiment prompts.parquet --where "visits > 0"
  verl-adaptive export checkpoints/project/experiment steps.jsonl --what steps
  verl-adaptive export checkpoints/project/experiment groups.csv --what observations --overwrite
  verl-adaptive export checkpoints/project/experiment kept.parquet --data train.parquet --where "0.1 <= pass_rate <= 0.9"
  verl-adaptive export eval.jsonl kept.parquet --data train.parquet --where "pass_rate < 1" --keep-unseen

Exported prompts can be given to adaptive.warm_start (with --where "visits > 0": it takes evidence only). In CSV, text
that a spreadsheet would take for a formula (it begins with = + - @, perhaps after blanks) gets an apostrophe in front.

With --data, rows of that file keep their order, columns and schema. A row is found in the store as training finds it: by
its data source, messages and ground truth, or by --id-key. A row that the store has no rollouts of satisfies no
comparison of rates and is left out; --keep-unseen keeps it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from verl_adaptive.commands.arguments import add_store_options, condition, identity_from, refuse_overwrite
from verl_adaptive.commands.output import note, note_gaps
from verl_adaptive.errors import AdaptiveError, UsageError
from verl_adaptive.stats import open_run
from verl_adaptive.stats.atomic import write_file
from verl_adaptive.stats.dataset import keys_of
from verl_adaptive.stats.expressions import Expression
from verl_adaptive.stats.files import StoreError, open_parquet
from verl_adaptive.stats.prompts import DERIVED, Prompts
from verl_adaptive.stats.reader import OBSERVATIONS
from verl_adaptive.text import counted, number, plain, share

FORMATS = (".parquet", ".csv", ".jsonl")
_BATCH = 100_000


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="what to read, as for `stats`")
    parser.add_argument("out", metavar="FILE", help="what to write: .parquet, .csv or .jsonl")
    parser.add_argument(
        "--what",
        choices=("prompts", "observations", "steps"),
        default="prompts",
        help="prompts (default); of a journal also its observations, a row for each finished group, or its steps, a row each",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="write this data set's rows that satisfy --where, not statistics: --data train.parquet",
    )
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        type=condition,
        help='prompts that satisfy it only: --where "visits > 0"; `stats --columns` lists what it may name',
    )
    parser.add_argument("--keep-unseen", action="store_true", help="with --data: also rows that were never rolled out")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    add_store_options(parser)


def run(args: argparse.Namespace) -> int:
    suffix = os.path.splitext(args.out)[1].lower()
    if suffix not in FORMATS:
        raise UsageError(f"{args.out}: the file's ending must be one of {', '.join(FORMATS)}")
    if args.what != "prompts" and (args.where is not None or args.data is not None):
        other = "--where" if args.data is None else "--data"
        raise UsageError(f"{other} is about prompts; it has no meaning with --what {args.what}")
    if args.data is None and args.keep_unseen:
        raise UsageError("--keep-unseen needs --data FILE: it is about the rows of a data set")
    if args.data is not None and (args.where is None or suffix != ".parquet"):
        raise UsageError("--data needs --where CONDITION, and a file to write that ends in .parquet")
    wanted = None if args.where is None else Expression(args.where)
    refuse_overwrite(args.out, args.overwrite)
    for read in filter(None, (args.store, args.data)):
        if os.path.exists(args.out) and os.path.exists(read) and os.path.samefile(args.out, read):
            raise UsageError(f"{args.out} is what is read; name another file")
    if args.data is not None:
        open_parquet(args.data).close()
    opened, said = open_run(args.store, identity=identity_from(args)), ""
    note_gaps(opened)
    if args.data is not None and wanted is not None:
        keep, said = _judged(opened, wanted, args)
        pages = _kept(args.data, keep)
    elif args.what == "prompts":
        rows = np.arange(len(opened.prompts))
        if wanted is not None:
            rows = rows[wanted.select(opened.prompts)]
        pages = _prompts(opened.prompts, rows)
    elif args.what == "steps":
        pages = iter([opened.steps])
    else:
        pages = _observations(opened)
    written = write_pages(args.out, suffix, pages)
    note(said or f"{counted(written, args.what[:-1])} written to {args.out}")
    return 0


def _prompts(prompts: Prompts, rows: np.ndarray) -> Iterator[Any]:
    # what follows from all prompts once, not for every page
    prompts = replace(prompts, further={**prompts.further, **{name: prompts.get(name) for name in DERIVED}})
    for begin in [0] if not len(rows) else range(0, len(rows), _BATCH):
        yield prompts.to_arrow(rows[begin : begin + _BATCH])


def _observations(opened: Any) -> Iterator[Any]:
    """A page at a time, an empty one first: a long run's observations need not fit in memory."""
    for page in itertools.chain([OBSERVATIONS.empty_table()], opened.observations()):
        keys = pa.array([key.hex() for key in page.column("key").to_pylist()], pa.string())
        yield page.set_column(page.schema.get_field_index("key"), "key", keys)


def _judged(opened: Any, wanted: Expression, args: argparse.Namespace) -> tuple[np.ndarray, str]:
    """Which rows of the data set are wanted, and how many these are, in words.

    AdaptiveError: the store knows none of the rows, or none is wanted.
    """
    opened.beside(args.data)
    prompts = opened.prompts
    keys, sources = keys_of(args.data, opened.identity)
    known = prompts.table.rows_for(keys, create=False) >= 0
    # Rows that the store lacks become prompts without a visit, so that a condition treats both alike.
    rows = prompts.table.rows_for(keys, sources=sources)
    keep = wanted.select(prompts)[rows]
    unseen = prompts.table.col("visits")[rows] == 0
    if args.keep_unseen:
        keep |= unseen
    if not known.any():
        raise AdaptiveError(
            f"none of the {len(keys)} rows of {args.data} is in {opened.where}. A row is found by its data source, "
            "messages and ground truth together, or by --id-key; in verl's rollouts by its text and expected answer. Is this the "
            "run's data set?"
        )
    if not keep.any():
        raise AdaptiveError(
            f"none of the {number(len(keys))} rows of {args.data} satisfies {args.where!r}: nothing was written, since "
            "training refuses an empty data set"
        )
    return keep, (
        f"{number(int(keep.sum()))} of {counted(len(keep), 'row')} kept ({share(float(keep.sum()), len(keep))}) in {args.out}; "
        f"in the store: {number(int(known.sum()))}, never rolled out: {number(int(unseen.sum()))}"
        f"{' (kept)' if args.keep_unseen and unseen.any() else ''}"
    )


def _kept(path: str, keep: np.ndarray) -> Iterator[Any]:
    """The marked rows of a data set, a row group at a time, with the file's own schema."""
    file, start = open_parquet(path), 0
    try:
        for place in range(file.metadata.num_row_groups):
            group = file.read_row_group(place)
            mask = keep[start : start + group.num_rows]
            start += group.num_rows
            if mask.any():
                yield group.filter(pa.array(mask)).cast(file.schema_arrow)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def write_pages(path: str, suffix: str, pages: Iterator[Any]) -> int:
    """Write the pages to a file; how many rows they were."""
    write = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}[suffix]
    written = 0

    def passing() -> Iterator[Any]:
        nonlocal written
        for page in pages:
            written += page.num_rows
            yield page

    write_file(Path(path), lambda file: write(file, passing()))
    return written


def _parquet(file: BinaryIO, pages: Iterator[Any]) -> None:
    _table(pages, lambda schema: pq.ParquetWriter(file, schema, compression="zstd"))


def _csv(file: BinaryIO, pages: Iterator[Any]) -> None:
    _table(map(_tame, pages), lambda schema: csv.CSVWriter(file, schema))


def _table(pages: Iterator[Any], writer_of: Callable[[Any], Any]) -> None:
    first = next(pages)
    with writer_of(first.schema) as writer:
        for page in itertools.chain([first], pages):
            writer.write_table(page)


def _tame(page: Any) -> Any:
    """Text that a spreadsheet would run as a formula gets an apostrophe in front; CSV has no other way to say "text".

    Spreadsheets skip blanks, line ends and control characters before a formula, and take full-width signs for plain ones.
    """

    def tamed(texts: Any) -> Any:
        risky = pc.match_substring_regex(texts, r"^[\pZ\pC]*[=+\-@＝＋－＠]|^[\t\r\n]")
        return pc.if_else(risky, pc.binary_join_element_wise("'", texts, ""), texts)

    for at, column in enumerate(page.columns):
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            page = page.set_column(at, page.schema.field(at), tamed(column))
    return page.rename_columns(tamed(pa.array(page.column_names, pa.string())).to_pylist())


def _jsonl(file: BinaryIO, pages: Iterator[Any]) -> None:
    for page in pages:
        for batch in page.to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                for name in ("ledger", "scalars"):
                    if isinstance(row.get(name), str):
                        row[name] = _parsed(row[name])
                file.write(json.dumps(plain(row)).encode() + b"\n")


def _parsed(text: str) -> Any:
    """JSON from a journal; text that is none stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
