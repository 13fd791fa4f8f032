"""Parts bound to a table, and what they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tests.world import keys_of
from verl_adaptive.config import RunFacts
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.roles import Role
from verl_adaptive.stats.table import StatsTable

P = TypeVar("P", bound=Role)


def bound(
    part: P,
    M: int,
    *,
    batch: int = 8,
    n: int = 8,
    steps: int = 100,
    table: StatsTable | None = None,
    sources: Sequence[str] | None = None,
    **facts,
) -> P:
    """A part of a run over ``M`` prompts, bound to a new table unless one is given."""
    table = StatsTable() if table is None else table
    if not len(table):
        table.rows_for(keys_of(M), sources=sources)
    part.bind(table, RunFacts(batch=batch, n=n, steps=steps, prompts=M, **facts))
    return part


def known(**columns: list[float]) -> StatsTable:
    """A table that a warm start has filled."""
    table = StatsTable()
    table.rows_for(keys_of(len(columns["rollouts"])))
    for name, values in columns.items():
        table.col(name)[:] = values
    return table


def progress_at(step: int, batch: int = 8, seed: int = 0, **more) -> Progress:
    return Progress(step=step, batch=batch, draw=Draw(seed, step), **more)


def show(part: Role, groups: Groups, step: int) -> None:
    """A step's groups go into the table and to the part, and the step ends."""
    part.table.observe(groups, step, tolerance=1e-6)
    part.observe(groups, progress_at(step))
    part.end_step(progress_at(step))


def groups_of(rows: np.ndarray, correct: np.ndarray, n: np.ndarray) -> Groups:
    """Groups with ``correct`` right answers out of ``n``."""
    return Groups.from_lists(rows, [[1.0] * int(c) + [0.0] * int(k - c) for c, k in zip(correct, n, strict=True)])
