"""AERO's exploration and iterative rescue (2602.14338, stages I and II, strategy 1).

Every prompt gets ``n_explore`` rollouts. A prompt whose success rate is at most ``u_res`` then gets ``n_extra`` more per
round until its first correct rollout, or until its limits or the budget are reached. All rollouts of a round stay
candidates for training.

    R = {q : c_q / n_q <= u_res}                      after exploration
    while R and pool >= n_extra:
        every q of R, in random order: n_extra more while the pool has them
        R = {q in R : c_q = 0, n_q < limit, fewer than ``rounds`` top-ups}

Certainty. Structure, u_res = 0 and n_extra = 2: read in a summary of the paper. n_explore = 8 of N = 16: read in a
third-party reimplementation only. What the *budget* is could not be settled, so both readings are here: ``pooled``
shares what exploration left of N rollouts per prompt among the unsolved ones ("allocates the remaining rollout budget
dynamically within N_budget"; its simulated effect brackets the paper's figures); ``per_prompt`` gives each prompt at
most N (the reimplementation; its simulated effect falls short of the paper's).

Where we deviate, and why:

* A pooled prompt may take at most 4 N rollouts, and a prompt at most ``rounds`` top-ups: otherwise
  a few hopeless prompts would eat the pool, one after the other.
* One top-up of N/2 instead of a chain of twos: each top-up waits for the one before, and those prompts have the longest
  answers. The chain is ``n_extra=2 rounds=8``.
* The pool is shared out in the order of submission, which is random as the data set is shuffled, not in an order drawn anew
  each time.
* The reimplementation throws away what follows the first success within a top-up; that wastes rollouts and biases the
  success rate upward, so we keep it.
* With ``adaptive.refill`` further prompts join the step, each bringing its own N to the pool.
* In an asynchronous trainer there is no step's batch to share a budget: the pool is a running account, into which each
  prompt pays N − n_explore when it is sent, and which at a step's end keeps at most what the groups under way have paid:
  what the step itself has not used is gone, as in the ``sync`` trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, check
from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Count, Range, Whole
from verl_adaptive.roles import CLOSE, PolicyParts
from verl_adaptive.roles.pooled import PooledAllocator
from verl_adaptive.stats.table import StatsTable


class AeroRescue(PooledAllocator):
    """Explores with few rollouts, then tops up the prompts without a correct one.

    A rollout is correct when its success is at least 1/2; with a binary signal that is the signal itself.
    """

    name: ClassVar[str] = "aero"
    follows_plan: ClassVar[bool] = True
    least_key: ClassVar[str] = "n_explore"

    @dataclass
    class Config:
        """Options; the defaults are as published where anything is.

        Attributes:
            n: N, rollouts per prompt that the budget counts; null: ``actor_rollout_ref.rollout.n``.
            n_explore: rollouts of the exploration; null: N / 2 (published: 8 of N = 16).
            n_extra: rollouts of one top-up; null: N / 2 (a summary of the paper: 2).
            u_res: prompts of at most this success rate are rescued.
            budget: ``pooled``: N per prompt, shared, at most 4 N for one; ``per_prompt``: N for each prompt by itself.
            rounds: most top-ups of one prompt; each waits for the one before, so latency grows with it.
        """

        n: Count | None = None
        n_explore: Count | None = None
        n_extra: Count | None = None
        u_res: Annotated[float, Range("[0, 1)")] = 0.0
        budget: Literal["pooled", "per_prompt"] = "pooled"
        rounds: Whole = 1

    _counts = _last = (0, 0, 0)  # this and the last step: top-ups, their rollouts, prompts that a top-up solved

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        if policy.sampler.plans_rollouts and self.config.budget == "per_prompt":
            raise ConfigError(
                "adaptive.allocator.budget",
                "per_prompt",
                "CERO plans how many rollouts each prompt gets, and a rescue up to N apiece would overrun its budget; "
                "take adaptive.allocator.budget=pooled, which only shares out what exploration left of the plan",
            )

    def group_size(self, n: int) -> int:
        return self.config.n or n

    def least(self, n: int) -> int:
        return self.config.n_explore or max(1, self.group_size(n) // 2)

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        c = self.config
        self.n: int = self.group_size(facts.n)
        self.n_explore = self.least(facts.n)
        self.n_extra: int = c.n_extra or max(1, self.n // 2)
        self.limit: int = 4 * self.n if c.budget == "pooled" else self.n
        hint = f"must be at most the group size N={self.n}"
        check(self.n_explore <= self.n, "adaptive.allocator.n_explore", self.n_explore, hint)

    def first(self, rows: np.ndarray, planned: np.ndarray | None, progress: Progress) -> np.ndarray:
        whole = np.full(len(rows), self.n, dtype=np.int64) if planned is None else planned.astype(np.int64)
        return np.minimum(whole, self.n_explore)

    def fund(self, n: np.ndarray, planned: np.ndarray | None) -> np.ndarray | None:
        if self.config.budget != "pooled":
            return None
        return (self.n if planned is None else planned.astype(np.int64)) - n

    def most(self, n: np.ndarray, stage: np.ndarray) -> np.ndarray:
        topups = np.maximum(self.config.rounds - stage, 0)
        return np.minimum(topups * self.n_extra, np.maximum(self.limit - n, 0))

    def review(self, groups: Groups, progress: Progress) -> np.ndarray:
        c = self.config
        rate = groups.mean(groups.correct)
        topups = groups.reduce(np.maximum, groups.stage)
        unsolved = np.where(topups == 0, rate <= c.u_res, rate == 0)
        more = np.minimum(self.n_extra, np.maximum(self.limit - groups.n, 0))
        more[~unsolved | (topups >= c.rounds)] = CLOSE
        return more

    def observe(self, groups: Groups, progress: Progress) -> None:
        topups = groups.reduce(np.maximum, groups.stage)
        extra = groups.stage > 0
        correct = groups.correct
        # With u_res > 0 some had a correct one before: the top-up did not rescue these.
        solved = (groups.sum(correct & extra) > 0) & (groups.sum(correct & ~extra) == 0)
        self._counts = tuple(np.add(self._counts, [int(topups.sum()), int(extra.sum()), int(solved.sum())]).tolist())

    def end_step(self, progress: Progress) -> None:
        self._last, self._counts = self._counts, (0, 0, 0)

    def metrics(self) -> dict[str, float]:
        topups, rollouts, solved = (float(count) for count in self._last)
        return {"rescue_topups_total": topups, "rescue_rollouts_total": rollouts, "rescued_total": solved}
