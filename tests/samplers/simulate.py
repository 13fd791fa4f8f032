"""Vectorised stand-in for generation, for runs of a few hundred large steps."""

from __future__ import annotations

import numpy as np

from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw

__all__ = ["groups_of", "play", "progress_at", "roll"]


def progress_at(step: int, batch: int = 8, seed: int = 0, **more) -> Progress:
    return Progress(step=step, batch=batch, draw=Draw(seed, step), **more)


def roll(requests: Requests, p: np.ndarray, seed: int = 0) -> Groups:
    """Binary rewards with success rate ``p[index]``; a rollout's reward depends on its ticket and number only."""
    sizes = requests.n.astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes) + 1000 * np.repeat(requests.stage, sizes)
    u = Draw(seed, 0).uniform("reward", np.repeat(requests.ticket, sizes), number)
    reward = (u < np.repeat(p[requests.index], sizes)).astype(np.float64)
    none = np.zeros(len(requests), dtype=np.int32)
    return Groups(
        ticket=requests.ticket,
        row=requests.row,
        index=requests.index,
        failed=none.astype(bool),
        lag=none,
        offsets=offsets,
        reward=reward,
        signal=reward,
        success=reward,
        tokens=np.ones(len(reward), dtype=np.int64),
        stage=np.repeat(requests.stage, sizes).astype(np.int16),
        lost=none,
    )


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
