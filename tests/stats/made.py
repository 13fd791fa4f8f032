"""Keys and groups of no particular meaning, for tests of what is kept of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.stats import Journal
from verl_adaptive.stats.journal import JournalError
from verl_adaptive.stats.keys import KEY_DTYPE


def make_keys(count: int, seed: int = 0, *, alike: bool = False) -> np.ndarray:
    """``count`` different keys, ``KEY_DTYPE``; ``alike``: they share halves, as a user's own may."""
    words = np.random.default_rng(seed).integers(0, 2**64, (count, 2), dtype=np.uint64)
    if alike:
        words[:] = np.stack([np.arange(count) % 3, np.arange(count)[::-1] // 3], axis=1)
    return np.ascontiguousarray(words).view(KEY_DTYPE).reshape(count)


def make_groups(seed: int, count: int = 6, prompts: int = 20) -> Groups:
    """Groups of one to five rollouts on rows of a table of ``prompts``; some rows repeat, some groups failed."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 6, count)
    rewards = [draw.choice([0.0, 0.1, 1.0], size).tolist() for size in sizes]
    return Groups.from_lists(
        draw.integers(0, prompts, count),
        rewards,
        tokens=[draw.integers(1, 5000, size).tolist() for size in sizes],
        submission=np.arange(count) + 1000 * seed,
        failed=draw.random(count) < 0.1,
        lag=draw.integers(0, 3, count),
        lost=draw.integers(0, 2, count),
    )


def journal_of(folder: Path, groups: Groups, keys: np.ndarray, *, source: str = "s", **meta: Any) -> None:
    """A run's journal of one step, in which these groups, each of its key, were finished."""
    with Journal(folder, meta) as journal:
        journal.begin(0)
        count = len(groups)
        journal.commit_step(1, groups, keys, ["trained"] * count, {}, {}, sources=[source] * count, wall_time=1.7e9)


def written(journal: Journal, seconds: float = 30.0) -> bool:
    """Wait until everything is written, at most so long; whether it is."""
    try:
        journal._run_in_turn("written", lambda: None, seconds)
    except JournalError:
        return False
    return not journal._lost
