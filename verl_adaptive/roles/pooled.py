"""Allocators whose groups share something: a pool of rollouts, places of the batch; or wait for a later step."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.roles import HOLD, Allocator


class PooledAllocator(Allocator):
    """An allocator whose top-ups depend on more than the group's own rollouts.

    :meth:`review` still says what a group would get by itself. What groups share, the engine gives out in the order of
    submission, by what the allocator says here.

    Attributes:
        needs_place: a top-up pays only if the batch has a place for the group. It is sent as soon as the place is certain; a
            group that certainly gets none is held or closed.
        on_policy: the option below ``adaptive.allocator``, and its value, with which no group is held; None: there is none.
    """

    needs_place: ClassVar[bool] = False
    on_policy: ClassVar[tuple[str, str] | None] = None

    def fund(self, n: np.ndarray, planned: np.ndarray | None) -> np.ndarray | None:
        """Rollouts that new prompts pay into the pool from which all top-ups are taken.

        Args:
            n: int64 ``(k,)``, first rollouts of new prompts.
            planned: int64 ``(k,)``, a pool sampler's own plan for them, or None.

        Returns:
            int64 ``(k,)``, or None: top-ups are not limited in common.
        """
        return None

    def prompts(self, wanted: int, progress: Progress) -> int:
        """New prompts that a step first asks for; ``wanted`` is the sampler's word. Asked after :meth:`recall`."""
        return wanted

    def affordable(self, wanted: int, progress: Progress) -> int:
        """Of ``wanted`` new prompts, as many as have their top-ups beside them under the step's cap on rollouts."""
        return wanted

    def complete(self, groups: Groups) -> np.ndarray:
        """bool ``(G,)``: closed groups that may train; the others are dropped whatever the filter says."""
        return np.ones(len(groups), dtype=bool)

    def reserve(self, progress: Progress) -> int:
        """Groups that should be held when a step ends: it waits for them in its first request, up to a group that the batch has
        no place for."""
        return 0

    def recall(self, held: Groups, since: np.ndarray, progress: Progress) -> np.ndarray:
        """Decide on groups held from earlier steps, before a step's new prompts are drawn.

        Args:
            held: the groups, in the order of submission.
            since: int64 ``(G,)``, the step each was held in.

        Returns:
            int64 ``(G,)``: k > 0 rollouts now, ``CLOSE`` to give it up, ``HOLD`` to keep it. A step goes on with a batch of
            groups at most; the others are kept.
        """
        return np.full(len(held), HOLD, dtype=np.int64)
