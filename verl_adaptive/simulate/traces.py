"""Recorded traces: what earlier runs or evaluations observed of each prompt, as :func:`verl_adaptive.stats.open_run` reads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_adaptive.groups import at_least
from verl_adaptive.stats.files import StoreError
from verl_adaptive.stats.run import open_run

_SEEN = {"row": np.int64, "step": np.int64, "n": np.float64, "success": np.float64, "tokens": np.float64}
_KINDS = {"results": "results of an evaluation", "rollouts": "verl's rollouts"}


@dataclass
class Trace:
    """Observations of prompts, ``(K,)`` of ``M``.

    Attributes:
        keys: ``KEY_DTYPE`` ``(M,)``, the prompts.
        prompt: int64 ``(K,)``, position in ``keys``.
        step: int64 ``(K,)``, the training step; all equal where the source knows no time.
        n, successes: float64 ``(K,)``, rollouts and those that succeeded.
        tokens: float64 ``(M,)``, mean response length; nan where not known.
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
        source: a path, as :func:`verl_adaptive.stats.open_run` takes it.
        threshold: a rollout of a dump, or of an evaluation, succeeded if its score is at least this.

    Raises:
        StoreError: not there, not readable, without the columns that are needed, or empty; with the file and the line or row.
    """
    run = open_run(os.fspath(source), success=lambda scores: at_least(scores, threshold).astype(np.float64))
    table = run.table
    if run.has_course:
        seen = [(window, window.usable) for window in run.windows()]
        row, step, n, successes, tokens = (
            np.concatenate([np.zeros(0, kind), *(getattr(window, name)[here] for window, here in seen)])
            for name, kind in _SEEN.items()
        )
    else:  # totals only: one observation a prompt
        row = np.flatnonzero(table.col("rollouts") > 0)
        step = np.zeros(len(row), dtype=np.int64)
        n, successes, tokens = (table.col(name)[row].astype(np.float64) for name in ("rollouts", "successes", "tokens"))
    if not (n > 0).any():
        raise StoreError(f"{source} holds no finished rollout: there is nothing to simulate")
    used, prompt = np.unique(row, return_inverse=True)
    length = np.bincount(prompt, tokens)
    return Trace(
        keys=table.keys[used].copy(),
        prompt=prompt,
        step=step,
        n=n,
        successes=np.clip(successes, 0.0, n),
        tokens=np.where(length > 0, length / np.bincount(prompt, n), np.nan),
        kind=_KINDS.get(run.kind, run.kind),
        where=run.where,
        note="; ".join(run.missing()),
        sources=table.source_names(used) if len(table.sources) > 1 else None,
    )
