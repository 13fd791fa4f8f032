"""The allocator role: how many rollouts a prompt gets, first and after each review."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from verl_adaptive._role import Role
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress

__all__ = ["CLOSE", "HOLD", "Allocator"]

CLOSE = 0  #: the group is done
HOLD = -1  #: keep the group for a later step (pipelined allocators only)


class Allocator(Role):
    """Gives each prompt its rollouts.

    Attributes:
        can_hold: the allocator may answer ``HOLD``; the engine then offers held groups to :meth:`recall`.
    """

    role: ClassVar[str] = "allocator"
    can_hold: ClassVar[bool] = False

    def cap(self, progress: Progress) -> int | None:
        """Rollouts this step may generate at most, or None; asked once, when the step begins."""
        return None

    def first(self, rows: np.ndarray, planned: np.ndarray | None, progress: Progress) -> np.ndarray:
        """First rollouts of new prompts.

        Args:
            rows: int64 ``(k,)``.
            planned: int64 ``(k,)``, a pool sampler's own plan, or None.

        Returns:
            int64 ``(k,)``, each at least 1.
        """
        raise NotImplementedError  # abstract: what makes a part a part

    def prompts(self, wanted: int, progress: Progress) -> int:
        """The last word on how many new prompts the next round takes.

        Args:
            wanted: what the sampler asks for.
            progress: the step; asked after :meth:`recall`.
        """
        return wanted

    def complete(self, groups: Groups) -> np.ndarray:
        """bool ``(G,)``: closed groups that may train; the others are dropped whatever the filter says."""
        return np.ones(len(groups), dtype=bool)

    def review(self, groups: Groups, progress: Progress) -> np.ndarray:
        """Decide on the open groups once all their rollouts are back.

        Args:
            groups: the open groups that got new rollouts this round, all their rollouts so far, in ticket order;
                failed groups are not among them.
            progress: the step; ``progress.room`` bounds the sum of the answer.

        Returns:
            int64 ``(G,)``: k > 0 more rollouts under the same weights, ``CLOSE``, or ``HOLD``.
        """
        return np.zeros(len(groups), dtype=np.int64)

    def recall(self, held: Groups, since: np.ndarray, progress: Progress) -> np.ndarray:
        """Decide on groups held from earlier steps, before a round's new prompts are drawn.

        Args:
            held: the groups, in ticket order.
            since: int64 ``(G,)``, the step each was held in.

        Returns:
            int64 ``(G,)``: k > 0 rollouts now, ``CLOSE`` to give it up, ``HOLD`` to keep it.
        """
        return np.full(len(held), HOLD, dtype=np.int64)
