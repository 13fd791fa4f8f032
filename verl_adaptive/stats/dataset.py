"""verl-format Parquet files: the key and the text of every row, and what rollouts of it answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from verl_adaptive.stats.files import StoreError, open_parquet, parquet_rows
from verl_adaptive.stats.keys import CONTENT, Identity, dataset_identity, dataset_keys, dig, keys_array, keys_bytes


def _keyed(path: str, identity: Identity, *, question: bool = False) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """Every row's number, the row, and its key (``question``: with the answer left out)."""
    there, name = open_parquet(path).schema_arrow.names, identity.id_key or identity.prompt_key
    if not {name, name.split(".")[0]} & set(there):
        option = "data.prompt_key or --prompt-key" if identity.id_key is None else "adaptive.id_key or --id-key"
        raise StoreError(f"{path} has no column {name!r} ({option} names another); it has: {', '.join(there)}")
    start = 0
    for rows in parquet_rows(path, identity.columns):
        try:
            keys = dataset_identity(rows, identity)[1] if question else dataset_keys(rows, identity)
        except (ValueError, TypeError) as error:
            raise StoreError(f"{path}, counted from row {start}: {error}") from error
        yield from zip(range(start, start + len(rows)), rows, keys_bytes(keys), strict=True)
        start += len(rows)


def keys_of(path: str, identity: Identity = CONTENT) -> tuple[np.ndarray, list[str]]:
    """The key and the data source of every row, as training makes them.

    Args:
        path: the file.
        identity: as in training.

    Raises:
        StoreError: unreadable, or a row lacks what its key is made of.
    """
    keys, sources = [], []
    for _, row, key in _keyed(path, identity):
        keys.append(key)
        sources.append(str(row.get("data_source") or ""))
    return keys_array(keys), sources


def text_of(row: Mapping[str, Any], prompt_key: str) -> str:
    """A prompt as one text: its last message, or the text itself."""
    value = row.get(prompt_key)
    if isinstance(value, list | tuple) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if isinstance(value, list | tuple):  # multimodal: parts of a message
        value = " ".join(
            str(part.get("text") or f"<{part.get('type')}>") for part in value if isinstance(part, Mapping)
        )
    return "" if value is None else str(value)


@dataclass
class Said:
    """What rollouts of a prompt answered.

    Attributes:
        wrong: answer → times, of rollouts that are not known to be right.
        rollouts: found in all.
    """

    wrong: Counter[str] = field(default_factory=Counter)
    rollouts: int = 0

    @property
    def answers(self) -> str:
        """The five commonest wrong answers and how many are right, as shares of the rollouts found."""
        wrong = sorted(self.wrong.items(), key=lambda item: (-item[1], item[0]))[:5]
        told = [f"{answer} {times / self.rollouts:.0%}" for answer, times in wrong]
        right = self.rollouts - self.wrong.total()
        return " · ".join([*told, f"right {right / self.rollouts:.0%}"] if right else told)


@dataclass(frozen=True)
class Row:
    """What a prompt says: its row in the data set, from 0, its text, the expected answer, its data source, and what rollouts
    answered, if known."""

    row: int | None
    text: str
    answer: str
    source: str = ""
    said: Said | None = None


def expected(answer: object) -> str:
    """An expected answer as text; where a reward model judges, there is none, and verl's dumps say null."""
    return "" if answer is None else str(answer)


def rows_of(path: str, wanted: set[str] | None, identity: Identity = CONTENT) -> dict[str, Row]:
    """The first rows of some prompts, by key in hex digits; prompts that are not in the file are left out.

    Args:
        path: the file.
        wanted: the keys; None: all.
        identity: as in training.
    """
    found: dict[str, Row] = {}
    for number, row, raw in _keyed(path, identity):
        if (key := raw.hex()) not in found and (wanted is None or key in wanted):
            said = expected(dig(row, "reward_model.ground_truth"))
            found[key] = Row(number, text_of(row, identity.prompt_key), said, str(row.get("data_source") or ""))
    return found


def conflicts(path: str, limit: int, identity: Identity = CONTENT) -> list[dict[str, Any]]:
    """Questions that a data set holds with different answers, whatever the user's own identifiers; arguments as :func:`rows_of`.

    Returns:
        ``text``, ``answers`` and ``rows`` of the first ``limit``; the total is in ``of`` of each.
    """
    rows: dict[bytes, list[int]] = {}
    answers: list[str] = []
    for number, row, key in _keyed(path, replace(identity, id_key=None), question=True):
        rows.setdefault(key, []).append(number)
        answers.append(expected(dig(row, "reward_model.ground_truth")))
    found = [r for r in rows.values() if len({answers[i] for i in r}) > 1]
    shown = {r[0] for r in found[:limit]}
    name = identity.prompt_key
    every = enumerate(chain.from_iterable(parquet_rows(path, {name})))
    texts = {number: text_of(row, name) for number, row in every if number in shown} if shown else {}
    return [
        {"text": texts[r[0]], "answers": sorted({answers[i] for i in r}), "rows": r, "of": len(found)}
        for r in found[:limit]
    ]
