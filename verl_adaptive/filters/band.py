"""Pilot-Commit's filter (2605.26606): groups that got their commit train, pilots alone never do.

A group without a commit is dropped for what its pilots said: ``too_hard`` (the paper: deferred, it comes round again),
``too_easy`` (skipped), or ``surplus_pilot``: in the band, but the batch had no place for it. Pilots that waited too
long for a commit are closed by the engine as ``expired``. Where pilots in the band need not be mixed (a signal that differs
from success, a margin of 0), a stack of this and ``informative`` drops committed groups without variance, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from verl_adaptive.allocators.pilot_commit import is_pilot
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.roles import Commits, Filter, PolicyParts, Verdict


class Band(Filter):
    """Keeps committed groups; its band is that of ``adaptive/allocator=pilot_commit``."""

    name: ClassVar[str] = "band"
    needs_groups = True
    reasons = ("too_easy", "too_hard", "surplus_pilot")

    judge: Callable[[Groups], np.ndarray]  # the allocator's: −1 too hard, 0 in the band, +1 too easy

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        allocator = policy.allocator
        if not isinstance(allocator, Commits):
            raise ConfigError(
                "adaptive.filter.name",
                self.name,
                f"keeps only groups that got a commit, and adaptive/allocator={allocator.name} makes none; for "
                "a band on the pass rate take adaptive/filter=informative with adaptive.filter.low and high",
            )
        self.judge = allocator.side

    def decide(self, groups: Groups, progress: Progress) -> Verdict:
        side = self.judge(groups)
        return Verdict(keep=~is_pilot(groups), reason=np.select([side > 0, side < 0], [0, 1], default=2))
