"""What the four roles share: columns, and the verbs observe, metrics, state_dict, load_state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, build
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.stats.table import Column, StatsTable

if TYPE_CHECKING:
    from verl_adaptive.policy import Policy

__all__ = ["Role"]


class Role:
    """Base of samplers, allocators, filters and advantages.

    Contract. A role is pure decision code: its decisions depend on its config, the statistics table, its own state and
    the :class:`~verl_adaptive.progress.Progress` it is given, never on a clock, on arrival order or on global
    randomness. All per-prompt state lives in table columns that it declares in :attr:`columns`; the rest goes through
    :meth:`state_dict`, whose values are JSON scalars, lists, dicts or numpy arrays. After ``load_state_dict`` of a
    saved state (and of the table) every later decision is the same, bit for bit.

    Attributes:
        role: ``sampler``, ``allocator``, ``filter`` or ``advantage``.
        name: the part's name in the configuration; also the namespace of its columns.
        columns: per-prompt columns, without the namespace.
    """

    role: ClassVar[str]
    name: ClassVar[str]
    columns: ClassVar[Mapping[str, Column]] = {}

    @dataclass
    class Config:
        """Options of the part; every field is a key of ``adaptive.<role>``."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """Build from the keys of ``adaptive.<role>``, ``name`` left out.

        Raises:
            ConfigError: unknown key or bad value.
        """
        self.config: Any = build(self.Config, options, f"adaptive.{self.role}")
        self.table: StatsTable
        self.facts: RunFacts

    def check_policy(self, policy: Policy, config: AdaptiveConfig) -> None:
        """Refuse companions and settings that make no sense with this part.

        Raises:
            ConfigError: with the reason and what to choose instead.
        """

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        """Join a run: declare columns, check the options against the run's facts.

        Raises:
            ConfigError: the options cannot work in this run.
        """
        self.table, self.facts = table, facts
        if self.columns:
            table.declare(self.name, dict(self.columns))

    def col(self, name: str) -> np.ndarray:
        """The part's own column ``name``: a writable view of the table, valid until the table grows."""
        return self.table.col(f"{self.name}.{name}")

    def evidence(self, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        """float64 ``(G,)`` twice: successes and failures as evidence of what the policy can do *now*.

        A group that was generated k weight updates ago counts ``stale_discount ** k``.
        """
        weight = self.facts.stale_discount ** groups.lag.astype(np.float64)
        return weight * groups.successes, weight * (groups.n - groups.successes)

    def observe(self, groups: Groups, progress: Progress) -> None:
        """Learn from closed groups, kept or dropped alike; each group comes exactly once, failed ones never."""

    def end_step(self, progress: Progress) -> None:
        """The step's batch is complete; called once, before the weights change."""

    def metrics(self) -> dict[str, float]:
        """Values to log, named ``adaptive/<role>/…`` by the caller; the names follow verl's reduction rule."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything beyond the table that later decisions depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
