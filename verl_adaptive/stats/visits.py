"""A prompt may come twice in one batch of groups: its visits then count one after the other, in the order given.

Everything that learns from groups by prompt goes through :func:`waves`, so that showing groups together, or one by one,
comes to the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass
class Visits:
    """Finished groups by their totals, in the order of review; arrays of shape ``(G,)``.

    Attributes:
        row: the prompt's row in the table; may repeat.
        step: the training step.
        n: rollouts.
        success, signal, square, reward: sums of the evidence of success, of the difficulty signal, of its squares, and of the
            training reward; nan where they are not known.
        tokens: response tokens.
        flat: no variance; has a meaning where the group is usable.
        failed: says nothing about difficulty.
    """

    row: np.ndarray
    step: np.ndarray
    n: np.ndarray
    success: np.ndarray
    signal: np.ndarray
    square: np.ndarray
    reward: np.ndarray
    tokens: np.ndarray
    flat: np.ndarray
    failed: np.ndarray

    @cached_property
    def usable(self) -> np.ndarray:
        """Neither failed nor empty, and the sums are numbers."""
        finite = np.isfinite(self.success) & np.isfinite(self.signal) & np.isfinite(self.reward)
        return ~self.failed & (self.n > 0) & finite

    @cached_property
    def rate(self) -> np.ndarray:
        """Pass rate; nan for a group that is not usable."""
        return np.where(self.usable, self.success / np.maximum(self.n, 1), np.nan)

    @property
    def kind(self) -> np.ndarray:
        """:func:`kind_of` each."""
        return kind_of(self.flat, self.rate)


def waves(rows: np.ndarray, which: np.ndarray | None = None) -> list[np.ndarray]:
    """Split positions into waves in which no row occurs twice, keeping each row's order across waves.

    Args:
        rows: int64 ``(G,)``, the prompt of each group.
        which: bool ``(G,)``, groups that count; None: all.

    Returns:
        int64 positions in ``rows``, a wave each; as many waves as visits of the most visited prompt.
    """
    ranked, first = by_prompt(rows, which)
    if not len(ranked):
        return []
    starts = np.flatnonzero(first)
    sizes = np.diff(np.append(starts, len(ranked)))
    occurrence = np.arange(len(ranked)) - np.repeat(starts, sizes)
    return np.split(ranked[np.argsort(occurrence, kind="stable")], np.cumsum(np.bincount(occurrence))[:-1])


def by_prompt(rows: np.ndarray, which: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Positions prompt after prompt, each one's visits in their order; and bool: the prompt's first in that order.

    Args:
        rows, which: as in :func:`waves`.
    """
    positions = np.arange(len(rows)) if which is None else np.flatnonzero(which)
    ranked = positions[np.argsort(rows[positions], kind="stable")]
    return ranked, np.diff(rows[ranked], prepend=-1) != 0


def kind_of(flat: np.ndarray, pass_rate: np.ndarray) -> np.ndarray:
    """What visits say: 0 with variance; without (bool ``flat``), 1 (easy) if the pass rate is above 1/2, else -1."""
    return np.where(flat, np.where(pass_rate > 0.5, 1, -1), 0)


def difficulty(rate: np.ndarray) -> np.ndarray:
    """int64: of pass rates, 0 hard (below 0.25), 1 middle, 2 easy (above 0.75)."""
    return np.where(rate < 0.25, 0, np.where(rate <= 0.75, 1, 2))


def extend_streaks(streak: np.ndarray, kind: np.ndarray, rows: np.ndarray, now: np.ndarray) -> None:
    """Count one visit of each prompt towards its trailing run of visits of one kind, in place.

    Args:
        streak: length of the run, an unsigned column; saturates.
        kind: its kind: +1, -1, or 0 for none; a column.
        rows: prompts visited, each once.
        now: kind of the visit ``(len(rows),)``: 0 ends the run, the other kind begins a new one.
    """
    longer = np.minimum(streak[rows].astype(np.int64) + 1, np.iinfo(streak.dtype).max)
    streak[rows] = np.where(now == 0, 0, np.where(now == kind[rows], longer, 1))
    kind[rows] = now
