"""The filter role: which finished groups, and which of their rollouts, train; a reason for every drop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_adaptive._role import Role
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress

__all__ = ["Filter", "Verdict"]


@dataclass
class Verdict:
    """A filter's word on ``G`` groups with ``R`` rollouts.

    Attributes:
        keep: bool ``(G,)``.
        reason: int64 ``(G,)``, index into :attr:`Filter.reasons` for dropped groups; ignored for kept ones.
        rollouts: bool ``(R,)``, rollouts of kept groups that train, or None for all.
    """

    keep: np.ndarray
    reason: np.ndarray
    rollouts: np.ndarray | None = None


class Filter(Role):
    """Keeps or drops closed groups.

    Attributes:
        reasons: names of the reasons a group may be dropped for, in the order of ``Verdict.reason``.
        rollout_reason: the ledger's name for rollouts left out of kept groups.
    """

    role: ClassVar[str] = "filter"
    reasons: ClassVar[tuple[str, ...]] = ()
    rollout_reason: ClassVar[str] = "rejected"

    def decide(self, groups: Groups, progress: Progress) -> Verdict:
        """Judge closed groups; failed ones are dropped before and do not come here."""
        raise NotImplementedError
