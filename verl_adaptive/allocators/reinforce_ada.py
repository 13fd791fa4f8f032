"""Reinforce-Ada: sample a prompt in rounds until it has shown enough (2510.04996, section 3.2, algorithm 2, "Seq").

Every prompt gets M rollouts a round and leaves as soon as its exit condition holds, or after ``rounds`` rounds:

* ``pos``: at least ``k_pos`` correct rollouts; the number drawn is then about k_pos/p, so hard prompts get more;
* ``balance`` (the better one in the paper's table 2): besides, at least ``k_neg`` incorrect ones.

Certainty. The algorithm, both conditions and N_max = 32 at an update group of n = 4: the paper. M = 8, four rounds,
``k_pos = 1`` for ``pos`` and n/2 of each kind for ``balance``: the authors' code. (The paper's running example has
M = 16, K_pos = 16, K_pos = K_neg = 8 and N_max = 128.) The authors call a reward above 0.7 positive; here
``adaptive.success`` decides. Their baseline is the mean of *all* rollouts drawn, which
``adaptive/advantage=beta adaptive.advantage.baseline=full`` gives. They train on n rollouts of each prompt, about half
of them correct; an allocator does not choose what trains: ``adaptive/filter=aero adaptive.filter.thin_correct=true``
balances both sides, without fixing their number. Their weight 1/p on the loss is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, check
from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Count
from verl_adaptive.roles import CLOSE, Allocator, PolicyParts
from verl_adaptive.stats.table import StatsTable


class ReinforceAda(Allocator):
    """Sequential sampling with an exit condition; a rollout is correct when its success is at least 1/2."""

    name: ClassVar[str] = "reinforce_ada"
    least_key: ClassVar[str] = "per_round"

    @dataclass
    class Config:
        """Options.

        Attributes:
            variant: the exit condition.
            per_round: M, rollouts a prompt gets in a round.
            rounds: most rounds for a prompt, the first included.
            k_pos: correct rollouts to collect; null: 1 (``pos``) or n/2 rounded down, at least 1 (``balance``).
            k_neg: incorrect ones, ``balance`` only; null: the rest of n, at least 1.
        """

        variant: Literal["pos", "balance"] = "balance"
        per_round: Count = 8
        rounds: Count = 4
        k_pos: Count | None = None
        k_neg: Count | None = None

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        if policy.sampler.plans_rollouts:
            raise ConfigError(
                "adaptive.allocator.name",
                self.name,
                "CERO plans how many rollouts each prompt gets, and sampling until an exit condition would ignore the "
                "plan; take adaptive/allocator=fixed, or another sampler",
            )

    def least(self, n: int) -> int:
        c = self.config
        return max(c.per_round, 2 if c.variant == "balance" and c.rounds > 1 else 1)

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        c, balance = self.config, self.config.variant == "balance"
        self.k_pos: int = c.k_pos or (max(1, facts.n // 2) if balance else 1)
        self.k_neg: int = (c.k_neg or max(1, facts.n - self.k_pos)) if balance else 0
        wanted = self.k_pos + self.k_neg
        least = 1 - (-wanted // c.per_round)
        hint = (
            f"lets no prompt leave before its last round: that takes {wanted} rollouts, and a round has {c.per_round}; use "
            f"{least} or more, a larger adaptive.allocator.per_round, or smaller {'k_pos and k_neg' if balance else 'k_pos'}"
        )
        check(c.rounds == 1 or c.rounds >= least, "adaptive.allocator.rounds", c.rounds, hint)

    def first(self, rows: np.ndarray, planned: np.ndarray | None, progress: Progress) -> np.ndarray:
        return np.full(len(rows), self.config.per_round, dtype=np.int64)

    def most(self, n: np.ndarray, stage: np.ndarray) -> np.ndarray:
        return self.config.per_round * np.maximum(self.config.rounds - 1 - stage, 0)

    def review(self, groups: Groups, progress: Progress) -> np.ndarray:
        correct = groups.sum(groups.correct)
        done = (correct >= self.k_pos) & (groups.n - correct >= self.k_neg)
        done |= groups.reduce(np.maximum, groups.stage) + 1 >= self.config.rounds
        return np.where(done, CLOSE, self.config.per_round)
