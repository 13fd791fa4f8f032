"""AERO, slowly: the listing of the specification, one query at a time.

It shares nothing with the package but the random numbers (which are named by what they decide) and verl's convention
of an unbiased standard deviation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl_adaptive.rng import Draw


@dataclass
class Query:
    """One query of the batch; ``reward(j)`` is the reward of its j-th rollout."""

    submission: int
    hi: int
    lo: int
    reward: object
    rewards: list[float] = field(default_factory=list)
    topups: int = 0

    def roll(self, count: int) -> None:
        for _ in range(count):
            self.rewards.append(self.reward(len(self.rewards)))

    @property
    def n(self) -> int:
        return len(self.rewards)

    @property
    def c(self) -> int:
        return sum(r == 1.0 for r in self.rewards)


def uniform(draw: Draw, purpose: str, query: Query, salt: int) -> float:
    return float(draw.uniform(purpose, query.hi, query.lo, salt))


def explore_and_rescue(
    queries: list[Query], *, N: int, n_explore: int, n_extra: int, u_res: float, pooled: bool, limit: int, rounds: int
) -> None:
    """Stages I and II, strategy 1."""
    for q in queries:
        q.roll(n_explore)
    pool = len(queries) * (N - n_explore) if pooled else math.inf
    for q in queries:  # in the order of submission: each has its whole rescue before the next
        if q.c / q.n > u_res:
            continue
        while q.topups < rounds and (q.topups == 0 or q.c == 0):
            extra = min(n_extra, limit - q.n)
            if extra <= 0 or extra > pool:
                break
            q.roll(extra)
            q.topups += 1
            pool -= extra


def retained(q: Query, draw: Draw, *, tau: float, k: float, keep_degenerate: int, thin_correct: bool) -> set[int]:
    """Strategies 2 and 3: numbers of the rollouts that train."""

    def some(numbers: list[int], count: int) -> set[int]:
        return set(sorted(numbers, key=lambda j: uniform(draw, "aero.reject", q, j))[:count])

    right = [j for j, r in enumerate(q.rewards) if r == 1.0]
    wrong = [j for j, r in enumerate(q.rewards) if r != 1.0]
    if not right or not wrong:
        return some(right + wrong, min(keep_degenerate, q.n))
    if q.c / q.n < tau:
        return set(right) | some(wrong, min(q.n - q.c, max(1, round(k * q.c))))
    if thin_correct:
        return set(wrong) | some(right, min(q.c, max(1, round(k * (q.n - q.c)))))
    return set(right + wrong)


def advantages(q: Query, kept: set[int], *, alpha0: float = 1.0, beta0: float = 1.0) -> dict[int, float]:
    """The posterior's (variant S2-A) in groups without variance, GRPO's on the kept rollouts otherwise."""
    if q.c in (0, q.n):
        p = (q.c + alpha0) / (q.n + alpha0 + beta0)
        return {j: (float(q.rewards[j] == 1.0) - p) / math.sqrt(p * (1 - p)) for j in kept}
    mean = sum(q.rewards[j] for j in kept) / len(kept)
    std = math.sqrt(sum((q.rewards[j] - mean) ** 2 for j in kept) / (len(kept) - 1))
    return {j: (q.rewards[j] - mean) / (std + 1e-6) for j in kept}
