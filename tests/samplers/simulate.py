"""Runs of a few hundred large steps, on the simulator's rewards."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from tests.world import keys_of
from verl_adaptive.config import RunFacts
from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.roles import Sampler
from verl_adaptive.simulate.worlds import draw_groups
from verl_adaptive.stats.table import StatsTable

P = TypeVar("P", bound=Sampler)


def bound(
    part: P, M: int, *, batch: int = 8, n: int = 8, steps: int = 100, seed: int = 0, table: StatsTable | None = None
) -> P:
    """A sampler over ``M`` prompts, of a new table unless one is given."""
    table = StatsTable() if table is None else table
    if not len(table):
        table.rows_for(keys_of(M))
    part.bind(table, RunFacts(batch=batch, n=n, steps=steps, prompts=M, seed=seed))
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


def roll(requests: Requests, p: np.ndarray, seed: int = 0) -> Groups:
    """Binary rewards with success rate ``p[index]``, drawn by the simulator."""
    return draw_groups(requests, p[requests.index], seed)


def play(engine: Engine, p: np.ndarray, steps: int, start: int = 1, seed: int = 0) -> list[StepResult]:
    """Steps ``start`` to ``start + steps − 1``, fewer if the engine is finished."""
    results = []
    for step in range(start, start + steps):
        if engine.finished:
            break
        requests = engine.begin(step)
        while requests is not None:
            requests = engine.receive(roll(requests, p, seed))
        results.append(engine.finish())
    return results


def groups_of(rows: np.ndarray, correct: np.ndarray, n: np.ndarray) -> Groups:
    """Groups with ``correct`` right answers out of ``n``."""
    return Groups.from_lists(rows, [[1.0] * int(c) + [0.0] * int(k - c) for c, k in zip(correct, n, strict=True)])
