"""Several filters as one: a group trains if all of them keep it, and of its rollouts those that all of them keep.

    adaptive/filter=stack adaptive.filter.filters=[informative,my_filters.py:Short]
    adaptive/filter=stack 'adaptive.filter.filters=[{name: informative, low: 0.2}, aero]'

Each judges whole groups, whatever the others said. A group is dropped for the reason of the first that drops it; one of
which they leave no rollout, or only one where that has nothing to be compared with, for ``none_left``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, check
from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.policy import make_part
from verl_adaptive.progress import Progress
from verl_adaptive.roles import Filter, PolicyParts, Verdict, answers
from verl_adaptive.roles.answers import ask
from verl_adaptive.stats.table import StatsTable

#: Each filter left rollouts, and all together leave too few.
_NONE_LEFT = "none_left"


class Stack(Filter):
    """Keeps what all of its filters keep."""

    name: ClassVar[str] = "stack"

    @dataclass
    class Config:
        """Options.

        Attributes:
            filters: each a name, as in ``adaptive.filter.name``, or a name and that filter's options, as
                ``{name: informative, low: 0.2}``.
        """

        filters: list[Any] = field(default_factory=lambda: ["informative"])

        def validate(self, path: str) -> None:
            named = [isinstance(one, str) or (isinstance(one, Mapping) and "name" in one) for one in self.filters]
            hint = "must be a list of filters, as [informative,aero] or [{name: informative, low: 0.2}, aero]"
            check(bool(named) and all(named), f"{path}.filters", self.filters, hint)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        chosen = [dict(one) if isinstance(one, Mapping) else {"name": one} for one in self.config.filters]
        self.filters: tuple[Filter, ...] = tuple(_at(i, make_part, "filter", one) for i, one in enumerate(chosen))
        names = [part.name for part in self.filters]
        hint = "names a filter twice; each keeps its own columns under its name"
        check(len(set(names)) == len(names), "adaptive.filter.filters", self.config.filters, hint)
        self.reasons = tuple(dict.fromkeys([*(r for part in self.filters for r in part.reasons), _NONE_LEFT]))
        self.keeps_all = all(part.keeps_all for part in self.filters)
        self.needs_groups = any(part.needs_groups for part in self.filters)
        self.may_leave_one = any(part.may_leave_one for part in self.filters)

    def decide(self, groups: Groups, progress: Progress) -> Verdict:
        keep, reason = np.ones(len(groups), dtype=bool), np.zeros(len(groups), dtype=np.int64)
        rollouts = np.ones(groups.rollouts, dtype=bool)
        for part in self.filters:
            said = answers.decide(part, groups, progress)
            lost = keep & ~said.keep
            number = np.array([self.reasons.index(name) for name in part.reasons], dtype=np.int64)
            reason[lost] = number[said.reason[lost]]
            keep &= said.keep
            if said.rollouts is not None:
                rollouts &= said.rollouts
        # one filter may leave a rollout that another one drops; one that is left of several has nothing to be compared with
        least = 1 if self.may_leave_one else np.minimum(groups.n, 2)
        empty = keep & (groups.sum(rollouts.astype(np.float64)) < least)
        reason[empty] = self.reasons.index(_NONE_LEFT)
        return Verdict(keep & ~empty, reason, None if rollouts.all() else rollouts)

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        for i, part in enumerate(self.filters):
            _at(i, ask, part, "check_policy", policy, config)

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        for i, part in enumerate(self.filters):
            _at(i, ask, part, "bind", table, facts)

    def observe(self, groups: Groups, progress: Progress) -> None:
        for part in self.filters:
            ask(part, "observe", groups, progress)

    def end_step(self, progress: Progress) -> None:
        for part in self.filters:
            ask(part, "end_step", progress)

    def metrics(self) -> dict[str, float]:
        return {f"{part.name}/{key}": value for part in self.filters for key, value in ask(part, "metrics").items()}

    def state_dict(self) -> dict[str, Any]:
        return {part.name: ask(part, "state_dict") for part in self.filters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part in self.filters:
            if part.name in state:
                ask(part, "load_state_dict", state[part.name])


def _at(i: int, call: Callable[..., Any], *about: Any) -> Any:
    """What a call for the filter at place ``i`` gives; an error names its options where they stand."""
    try:
        return call(*about)
    except ConfigError as error:
        key, hint = (x.replace("adaptive.filter.", f"adaptive.filter.filters[{i}].") for x in (error.key, error.hint))
        raise ConfigError(key, error.value, hint) from error
