"""Recorded traces: what earlier runs or evaluations observed of each prompt.

A source is anything that :data:`READERS` knows, asked in their order:

* the rollouts that verl writes to ``trainer.rollout_data_dir`` (``<step>.jsonl``): a prompt is its ``input`` and ``gts``,
  a rollout its ``score``, with ``step`` and ``uid``. verl writes what trained, so what a policy dropped is not there;
* Parquet or JSON lines with a column ``pass_rate`` in [0, 1], one row a prompt, or several with ``step``. Optional: ``n``
  (rollouts behind the rate; without it the rate counts as exact), ``tokens`` (of these rollouts together; without ``n``
  the mean length), ``data_source`` or ``source``, and the prompt's name in the first that is there of ``key``,
  ``prompt_id``, ``uid``, ``id``, ``prompt``, ``index`` (else the row is the prompt). Every name but ``key`` is one within
  its data source;
* results of an offline evaluation, a journal or a snapshot, as :func:`verl_adaptive.stats.open_run` opens them.

A reader takes the source and returns None if it is not its kind; a new kind of source is one more function.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.groups import at_least
from verl_adaptive.stats.files import StoreError, file_rows
from verl_adaptive.stats.keys import KEY_DTYPE, custom_key, keys_array
from verl_adaptive.stats.run import TABLES, open_run

_VALUES = ("pass_rate", "n", "step", "tokens", "data_source", "source")
_NAMES = ("key", "prompt_id", "uid", "id", "prompt", "index")
_SEEN = {"row": np.int64, "step": np.int64, "n": np.float64, "success": np.float64, "tokens": np.float64}
_TRAINED = "verl dumps the rollouts that trained: prompts and groups that a policy dropped are not in it"
_KINDS = {"results": "results of an evaluation", "snapshot": "snapshot", "journal": "journal"}


@dataclass
class Trace:
    """Observations of prompts, ``(K,)`` of ``M``.

    Attributes:
        keys: ``KEY_DTYPE`` ``(M,)``, the prompts.
        prompt: int64 ``(K,)``, position in ``keys``.
        step: int64 ``(K,)``, the training step; all equal where the source knows no time.
        n, successes: float64 ``(K,)``, rollouts and those that succeeded.
        tokens: float64 ``(M,)``, mean response length; nan where not known.
        exact: ``successes / n`` is the pass rate itself, not a sample of it.
        kind, where: what was read, for people.
        note: what the source leaves out, for people, or an empty string.
        sources: the prompts' data sources ``(M,)``, names; None where not known.
    """

    keys: np.ndarray
    prompt: np.ndarray
    step: np.ndarray
    n: np.ndarray
    successes: np.ndarray
    tokens: np.ndarray
    exact: bool = False
    kind: str = ""
    where: str = ""
    note: str = ""
    sources: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def steps(self) -> int:
        """Different steps."""
        return len(np.unique(self.step))


def read_trace(source: str | os.PathLike[str], *, threshold: float = 0.5) -> Trace:
    """Read a trace.

    Args:
        source: a path; see the module.
        threshold: a rollout of a dump, or of an evaluation, succeeded if its score is at least this.

    Raises:
        StoreError: not there, not readable, without the columns that are needed, or empty; with the file and the line or row.
    """
    text = os.fspath(source)
    for reader in READERS:
        trace = reader(text, threshold)
        if trace is not None:
            if not len(trace) or not (trace.n > 0).any():
                raise StoreError(f"{text} holds no finished rollout: there is nothing to simulate")
            return trace
    raise StoreError(f"{text} is not a trace that could be read")


# -- pass rates -------------------------------------------------------------------------------------------------------


def _columns(path: Path) -> dict[str, list[Any]] | None:
    """Columns of a table of pass rates; None if it has none, or if scores say in some rows how they went."""
    rows = file_rows(path, {*_NAMES, *_VALUES, "score"})
    first = next(rows, {})
    if "pass_rate" not in first:
        return None
    every = [first, *rows]
    names = set().union(*every)  # the first row may lack what others have
    # An export also has prompts that were never visited.
    visited = [row for row in every if row.get("pass_rate") is not None or row.get("n") != 0]
    if "score" in names and any(row.get("pass_rate") is None for row in visited):
        return None
    return {name: [row.get(name) for row in visited] for name in (*_NAMES, *_VALUES) if name in names}


def _numbers(path: Path, name: str, values: list[Any]) -> np.ndarray:
    try:
        out = np.array([math.nan if v is None else v for v in values], dtype=np.float64)
    except (TypeError, ValueError):
        raise StoreError(f"{path}: column {name} holds something that is not a number") from None
    if len(bad := np.flatnonzero(~np.isfinite(out))):
        raise StoreError(
            f"{path}, row {bad[0]}: {name} is {values[bad[0]]}; {len(bad)} of {len(out)} rows are not numbers"
        )
    return out


def _read_rates(source: str, threshold: float) -> Trace | None:
    path = Path(source)
    if path.suffix not in TABLES or not path.is_file():
        return None
    columns = _columns(path)
    if columns is None:
        return None
    rate = _numbers(path, "pass_rate", columns["pass_rate"])
    if len(bad := np.flatnonzero((rate < 0) | (rate > 1))):
        raise StoreError(f"{path}, row {bad[0]}: pass_rate={rate[bad[0]]:g} is not in [0, 1]")
    n = _numbers(path, "n", columns["n"]) if "n" in columns else np.ones(len(rate))
    if len(bad := np.flatnonzero(n < 1)):
        raise StoreError(f"{path}, row {bad[0]}: n={n[bad[0]]:g} rollouts cannot have a pass rate")
    step = _numbers(path, "step", columns["step"]).astype(np.int64) if "step" in columns else np.zeros(len(rate), int)
    name = next((c for c in _NAMES if c in columns), None)
    if name is not None and None in columns[name]:
        raise StoreError(f"{path}, row {columns[name].index(None)}: no {name}, which names the prompt of other rows")
    ids: list[Any] = [_hashable(v) for v in (np.arange(len(rate)) if name is None else columns[name])]
    source_of = columns.get("data_source", columns.get("source"))
    if source_of is not None and name not in (None, "key"):
        # every data source counts its own rows from 0
        ids = [(str(source or ""), v) for source, v in zip(source_of, ids, strict=True)]
    known: dict[Any, int] = {}
    prompt = np.array([known.setdefault(v, len(known)) for v in ids], dtype=np.int64)
    tokens = np.full(len(known), np.nan)
    if "tokens" in columns:
        lengths = _numbers(path, "tokens", columns["tokens"])
        if len(bad := np.flatnonzero(lengths < 0)):
            raise StoreError(f"{path}, row {bad[0]}: tokens={lengths[bad[0]]:g} is less than none")
        tokens = np.bincount(prompt, lengths) / np.bincount(prompt, n)
    first = np.unique(prompt, return_index=True)[1]
    return Trace(
        keys=keys_array([custom_key(v) for v in known]) if known else np.empty(0, dtype=KEY_DTYPE),
        prompt=prompt,
        step=step,
        n=n,
        successes=rate * n,
        tokens=tokens,
        exact="n" not in columns,
        kind="pass rates",
        where=source,
        sources=None if source_of is None else [str(source_of[i] or "") for i in first],
    )


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | bytes) else json.dumps(value, sort_keys=True, default=str)


# -- results, snapshots, journals -------------------------------------------------------------------------------------


def _read_run(source: str, threshold: float) -> Trace | None:
    try:
        run = open_run(source, success=lambda scores: at_least(scores, threshold).astype(np.float64))
        table = run.table
    except StoreError as error:
        hint = "; a table of pass rates has a column pass_rate" if Path(source).is_file() else ""
        raise StoreError(f"{error}{hint}") from None
    if run.has_course:
        seen = [(window, ~window.failed & (window.n > 0)) for window in run.windows()]
        row, step, n, successes, tokens = (
            np.concatenate([np.zeros(0, kind), *(getattr(window, name)[here] for window, here in seen)])
            for name, kind in _SEEN.items()
        )
    else:  # totals only: one observation a prompt
        row = np.flatnonzero(table.col("rollouts") > 0)
        step = np.zeros(len(row), dtype=np.int64)
        n, successes, tokens = (table.col(name)[row].astype(np.float64) for name in ("rollouts", "successes", "tokens"))
    used, prompt = np.unique(row, return_inverse=True)
    length = np.bincount(prompt, tokens)
    dumped = run.kind not in _KINDS
    return Trace(
        keys=table.keys[used].copy(),
        prompt=prompt,
        step=step,
        n=n,
        successes=np.clip(successes, 0.0, n),
        tokens=np.where(length > 0, length / np.bincount(prompt, n), np.nan),
        kind="verl's rollouts" if dumped else _KINDS[run.kind],
        where=run.where,
        note=_TRAINED if dumped else "; ".join(run.missing()),
        sources=table.source_names(used) if len(table.sources) > 1 else None,
    )


#: What can be read, asked in this order.
READERS: list[Callable[[str, float], Trace | None]] = [_read_rates, _read_run]
