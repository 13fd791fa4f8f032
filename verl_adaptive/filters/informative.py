"""Informative groups only: dynamic sampling (DAPO, 2503.14476), the filter of GRESO too.

A group whose signals are all equal has no advantage to learn from, so it is dropped and replaced. ``low`` and ``high``
widen that to a band on the pass rate, as users of verl ask for (verl issue 2791).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from verl_adaptive.config import check
from verl_adaptive.groups import Groups, at_least, at_most
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Range, Share
from verl_adaptive.roles import Filter, Verdict
from verl_adaptive.stats.visits import kind_of


class Informative(Filter):
    """Keeps groups with variance, inside a band of pass rates."""

    name: ClassVar[str] = "informative"
    needs_groups = True
    reasons = ("all_correct", "all_wrong", "too_easy", "too_hard")

    @dataclass
    class Config:
        """Options of the filter.

        Attributes:
            low: least pass rate of a group that is kept; 0 asks for variance alone.
            high: highest pass rate of a group that is kept; 1 asks for variance alone.
        """

        low: Annotated[float, Range("[0, 1)")] = 0.0
        high: Share = 1.0

        def validate(self, path: str) -> None:
            check(self.low < self.high, f"{path}.high", self.high, f"must be above {path}.low={self.low}")

    def decide(self, groups: Groups, progress: Progress) -> Verdict:
        rate = groups.pass_rate
        flat = groups.degenerate(self.facts.tolerance)
        low, high = ~at_least(rate, self.config.low), ~at_most(rate, self.config.high)
        kind = kind_of(flat, rate)
        reason = np.select([kind > 0, kind < 0, high], [0, 1, 2], default=3)
        return Verdict(keep=~(flat | low | high), reason=reason)
