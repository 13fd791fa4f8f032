"""Every finished group trains: verl's own behaviour."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.roles import Filter, Verdict


class KeepAll(Filter):
    """Every finished group trains: verl's own behaviour."""

    name: ClassVar[str] = "keep_all"
    keeps_all = True

    def decide(self, groups: Groups, progress: Progress) -> Verdict:
        return Verdict(keep=np.ones(len(groups), dtype=bool), reason=np.zeros(len(groups), dtype=np.int64))
