"""Epoch order without the prompts that are solved: Pilot-Commit's eviction, made reversible (2605.26606).

A prompt whose last ``after`` visits all had a pass rate of at least ``threshold`` is retired. The paper evicts after
one fully solved pilot (``exclude_threshold_upper = 1``) and for good, although by its own count about a fifth of the
prompts solved in one epoch are not in the next. Here a retired prompt is let through with probability ``recheck`` at
each of its turns, and comes back as soon as it falls short once. ``recheck=0`` is the paper's permanent eviction.

A prompt that a warm start knows to be solved begins retired: with a pass rate of at least ``threshold``, in all and at its
latest visit, over as many rollouts as ``after`` visits have.

How many pilots a step asks for is the allocator's part (:mod:`verl_adaptive.allocators.pilot_commit`); with other
allocators, ``round``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.groups import Groups, at_least
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import PositiveShare, Range, Share
from verl_adaptive.roles import Commits, PolicyParts
from verl_adaptive.samplers.rounds import RoundConfig, SizedSampler
from verl_adaptive.stats.table import Column, StatsTable
from verl_adaptive.stats.visits import waves


class Retire(SizedSampler):
    """Skips solved prompts of verl's stream, for as long as they stay solved."""

    name: ClassVar[str] = "retire"
    unvisited: ClassVar[str] = "retire nothing"
    columns: ClassVar[Mapping[str, Column]] = {"solved": Column("u2", 0)}  # trailing run of solved visits, saturating

    @dataclass
    class Config:
        """Options.

        Attributes:
            after: solved visits in a row that retire a prompt.
            threshold: pass rate from which a visit counts as solved.
            recheck: chance that a retired prompt is rolled out at its turn; 0: never (as published).
            round: how much a step first asks for.
        """

        after: Annotated[int, Range("[1, 65535]")] = 1
        threshold: PositiveShare = 1.0
        recheck: Share = 0.05
        round: RoundConfig = field(default_factory=RoundConfig)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._gate = np.zeros(2, dtype=np.int64)  # this step: retired prompts seen, let through
        self._moved = np.zeros(2, dtype=np.int64)  # this step: prompts retired, brought back
        self._last = np.zeros(4, dtype=np.int64)
        self._pilots: Callable[[int], int] | None = None

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        if isinstance(policy.allocator, Commits):
            self._pilots = policy.allocator.pilots

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        threshold, rows = self.config.threshold, table.brought()
        rows = rows[(self.col("solved")[rows] == 0) & (table.col("retired")[rows] == 0)]
        rollouts = table.col("rollouts")[rows]
        # A warm start's successes are weighed: 7 of 7 may be a rounding below 4 of 4.
        solved = at_least(table.col("successes")[rows], threshold * rollouts)
        solved &= at_least(table.col("last_rate")[rows], threshold)
        # Its pilots tell that a prompt is solved, where an allocator gives it pilots first.
        visit = facts.n if self._pilots is None else self._pilots(facts.n)
        rows, run = rows[solved], np.minimum(rollouts[solved] // visit, 65535)
        self.col("solved")[rows] = run
        table.col("retired")[rows] = run >= self.config.after

    def admit(self, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
        retired = self.table.col("retired")[rows] > 0
        u = progress.draw.uniform("retire.gate", self.table.key_hi[rows], self.table.key_lo[rows], position)
        return ~retired | (u < self.config.recheck)

    def decided(self, rows: np.ndarray, passed: np.ndarray) -> None:
        retired = self.table.col("retired")[rows] > 0
        self._gate += [retired.sum(), (retired & passed).sum()]

    def observe(self, groups: Groups, progress: Progress) -> None:
        solved = at_least(groups.pass_rate, self.config.threshold)
        run, retired = self.col("solved"), self.table.col("retired")
        for wave in waves(groups.row, groups.n > 0):
            rows = groups.row[wave]
            run[rows] = np.where(solved[wave], np.minimum(run[rows].astype(np.int64) + 1, 65535), 0)
            before, after = retired[rows] > 0, run[rows] >= self.config.after
            retired[rows] = after
            self._moved += [(after & ~before).sum(), (before & ~after).sum()]

    def end_step(self, progress: Progress) -> None:
        self._last = np.concatenate([self._gate, self._moved])
        self._gate[:] = self._moved[:] = 0

    def metrics(self) -> dict[str, float]:
        seen, passed, out, back = self._last.tolist()
        return {
            "retired_share": np.count_nonzero(self.table.col("retired")) / max(1, len(self.table)),
            "newly_retired_total": float(out),
            "brought_back_total": float(back),
            "retired_seen_total": float(seen),
            "rechecked_total": float(passed),
        }
