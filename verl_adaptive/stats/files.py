"""Rows of other people's files: Parquet, and JSON with an object a line."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_adaptive.errors import AdaptiveError

_BATCH = 1000  # rows at a time: they may have images


class StoreError(AdaptiveError):
    """There is no run, data set or evaluation where one was looked for, or it does not hold what was asked of it."""


def json_lines(path: Path, *, growing: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one a line, and their lines' numbers; empty lines are passed over.

    Args:
        path: the file.
        growing: it may be being written: a last line that is not whole is passed over.

    Raises:
        StoreError: a line is something else; with its number.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if growing and not line.endswith(b"\n"):
                    return
                raise StoreError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise StoreError(f"{path}, line {number}: not an object; one JSON object a line is expected")
            yield number, row


def open_parquet(path: str | Path) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        StoreError: not there, not Parquet, or without rows.
    """
    if not Path(path).is_file():
        raise StoreError(f"{path} is not a file")
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        made = "; datasets.load_dataset('json', data_files=…)['train'].to_parquet(…) makes one, with the same keys"
        hint = made if str(path).endswith((".json", ".jsonl")) else ""
        raise StoreError(f"{path} is not a Parquet file: {error}{hint}") from error
    if not file.metadata.num_rows:
        raise StoreError(f"{path} has no rows")
    return file


def parquet_rows(path: str | Path, columns: Collection[str] | None = None) -> Iterator[list[dict[str, Any]]]:
    """A Parquet file's rows, some thousands at a time: those columns of them that there are, or all.

    Raises:
        StoreError: as :func:`open_parquet`, or what is in it cannot be read.
    """
    file = open_parquet(path)
    names = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
    try:
        for batch in file.iter_batches(batch_size=_BATCH, columns=names):
            yield batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def file_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file, or of one with a JSON object a line.

    Raises:
        StoreError: as :func:`parquet_rows`, or as :func:`json_lines`.
    """
    if path.suffix == ".parquet":
        yield from chain.from_iterable(parquet_rows(path))
    else:
        yield from (row for _, row in json_lines(path))
