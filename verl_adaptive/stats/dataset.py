"""verl-format Parquet files: the key and the text of every row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats.keys import KEY_DTYPE, MEDIA_FIELDS, dataset_keys, dig, key_hex, keys_bytes

if TYPE_CHECKING:
    from verl_adaptive.stats.dumps import Said

_BATCH = 8192


class DatasetError(AdaptiveError):
    """A data set that cannot be read, or is not in verl's format."""


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises:
        DatasetError: not there, not Parquet, or without rows.
    """
    if not Path(path).is_file():
        raise DatasetError(f"{path} is not a file")
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DatasetError(f"{path} is not a Parquet file: {error}") from error
    if not file.metadata.num_rows:
        raise DatasetError(f"{path} has no rows; give the training set, one prompt a row")
    return file


def _rows(path: str, columns: set[str]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Those columns of a file's rows, some thousands at a time, and the number of the first of them."""
    file, start = open_parquet(path), 0
    names = [name for name in file.schema_arrow.names if name in columns]
    try:
        for batch in file.iter_batches(batch_size=_BATCH, columns=names):
            yield start, batch.to_pylist()
            start += len(batch)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


def _keyed(
    path: str,
    *,
    prompt_key: str = "prompt",
    id_key: str | None = None,
    with_answer: bool = True,
    media_keys: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, list[dict[str, Any]], np.ndarray]]:
    """:func:`_rows` with their keys; further arguments as :func:`verl_adaptive.stats.keys.dataset_keys`."""
    columns = {"data_source", prompt_key, "reward_model", *MEDIA_FIELDS, *(media_keys or {}).values()}
    if id_key is not None:
        columns |= {id_key, id_key.split(".")[0]}
    how: dict[str, Any] = {"prompt_key": prompt_key, "id_key": id_key, "media_keys": media_keys}
    for start, rows in _rows(path, columns):
        try:
            keys = dataset_keys(rows, with_answer=with_answer, **how)
        except (ValueError, TypeError) as error:
            raise DatasetError(f"{path}, rows from {start}: {error}") from error
        yield start, rows, keys


def keys_of(path: str, **how: Any) -> tuple[np.ndarray, list[str]]:
    """The key and the data source of every row, as training makes them.

    Args:
        path: the file.
        how: ``prompt_key``, ``id_key`` and ``media_keys``, as in training.

    Raises:
        DatasetError: unreadable, or a row lacks what its key is made of.
    """
    parts, sources = [np.empty(0, dtype=KEY_DTYPE)], []
    for _, rows, keys in _keyed(path, **how):
        parts.append(keys)
        sources += [str(row.get("data_source") or "") for row in rows]
    return np.concatenate(parts), sources


def text_of(row: Mapping[str, Any], prompt_key: str = "prompt") -> str:
    """A prompt as one text: its last message, or the text itself."""
    value = row.get(prompt_key)
    if isinstance(value, list | tuple) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if isinstance(value, list | tuple):  # multimodal: parts of a message
        value = " ".join(
            str(part.get("text") or f"<{part.get('type')}>") for part in value if isinstance(part, Mapping)
        )
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Row:
    """What a prompt says: its row in the data set, from 0, its text, the expected answer, and what rollouts answered, if known."""

    row: int | None
    text: str
    answer: str
    said: Said | None = None


def rows_of(path: str, wanted: set[str], *, prompt_key: str = "prompt", **how: Any) -> dict[str, Row]:
    """The first rows of some prompts, by key in hex digits; prompts that are not in the file are left out.

    Args:
        path: the file.
        wanted: the keys.
        prompt_key, how: as :func:`keys_of`.
    """
    found: dict[str, Row] = {}
    for start, rows, keys in _keyed(path, prompt_key=prompt_key, **how):
        for at, key in enumerate(key_hex(keys)):
            if key in wanted and key not in found:
                answer = dig(rows[at], "reward_model.ground_truth")
                text = text_of(rows[at], prompt_key)
                found[key] = Row(start + at, text, "" if answer is None else str(answer))
    return found


def texts_at(path: str, wanted: set[int], *, prompt_key: str = "prompt") -> dict[int, str]:
    """Texts of some rows, by their number in the file."""
    found: dict[int, str] = {}
    for start, rows in _rows(path, {prompt_key}):
        found.update({start + i: text_of(row, prompt_key) for i, row in enumerate(rows) if start + i in wanted})
    return found


def answers_of(path: str, **how: Any) -> Iterator[tuple[bytes, str]]:
    """The key of every row's question, its answer left out, and that answer as text; ``how`` as :func:`keys_of`."""
    for _, rows, keys in _keyed(path, with_answer=False, **how):
        for key, row in zip(keys_bytes(keys), rows, strict=True):
            yield key, str(dig(row, "reward_model.ground_truth"))
