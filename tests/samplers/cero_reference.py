"""CERO written the slow and obvious way: one prompt at a time, plain floats, the formulas as the paper has them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class SlowCero:
    """``tie[i]`` orders prompts of equal surplus; units are what the paper counts in."""

    tie: list[int]
    budget: int
    rounds: int
    capacity: int
    n_max: int
    g: int
    lam: float = 1.0
    rho: float = 1.0
    forget: str = "round"
    a0: float = 1.0
    b0: float = 1.0
    nu: float = 0.5
    gamma: float | None = None
    recheck: float = 0.0
    k: int = 1
    spent: int = 0
    zero_rounds: int = 0
    forced_rounds: int = 0

    def __post_init__(self) -> None:
        self.M = len(self.tie)
        self.a = [self.a0] * self.M
        self.b = [self.b0] * self.M
        self.theta = [4 * self.q(i) for i in range(self.M)]
        self.seen = [0] * self.M
        self.gamma = self.gamma or 1 / math.sqrt(self.rounds)
        self.least = math.ceil(2 / self.g)

    def q(self, i: int) -> float:
        a, b = self.a[i], self.b[i]
        return a * b / ((a + b) * (a + b + 1))

    def exposure(self, i: int) -> float:
        """ẑ* by its three cases, in units."""
        R, Z = self.budget / self.M, self.rounds * self.n_max
        c, theta = 4 * self.lam * self.q(i) / R, self.lam / R * self.theta[i]
        if theta >= c:
            return 0.0
        if theta <= c * math.exp(-c * Z):
            return float(Z)
        return (R / (4 * self.lam * self.q(i))) * (math.log(4 * self.q(i)) - math.log(self.theta[i]))

    @property
    def over(self) -> bool:
        return self.budget - self.spent < self.least or self.k > self.rounds

    def virtual(self) -> list[tuple[int, int]]:
        forced = self.budget - self.spent >= self.capacity * (self.rounds - self.k + 1)
        order = sorted(range(self.M), key=lambda i: (-self.theta[i], self.tie[i]))
        if not forced:
            order = [i for i in order if self.theta[i] - self.nu > 0]
        count = math.ceil(self.capacity / self.n_max)
        order = order[:count]
        if order and self.recheck:
            limit = math.ceil(self.recheck * self.M * self.n_max / (self.budget / self.rounds))
            late = [i for i in range(self.M) if self.k > limit and self.seen[i] < self.k - limit]
            late.sort(key=lambda i: (self.seen[i], self.tie[i]))
            late = late[: max(1, count // 8)]
            order = (late + [i for i in order if i not in late])[:count]
        self.forced_rounds += forced
        given, out = 0, []
        for i in order:
            units = min(self.n_max, self.capacity - given)
            given += units
            out.append((i, units))
        return out

    def next_pick(self) -> list[tuple[int, int]] | None:
        """(prompt, units) to execute; None at the end of the run."""
        while not self.over:
            self.plan = self.virtual()
            if not self.plan:
                self.zero_rounds += 1
                self.close({}, 0)
                continue
            left, out = self.budget - self.spent, []
            for i, units in self.plan:
                units = min(units, left)
                if units >= self.least:
                    out.append((i, units))
                    left -= units
                    self.seen[i] = self.k
            return out
        return None

    def finish(self, picked: list[tuple[int, int]], outcome: dict[int, tuple[float, float]]) -> None:
        """``outcome``: successes and failures of the prompts that came back."""
        self.close(outcome, sum(units for _, units in picked))

    def close(self, outcome: dict[int, tuple[float, float]], executed: int) -> None:
        virtual = dict(self.plan)
        for i in range(self.M):
            won, lost = outcome.get(i, (0.0, 0.0))
            rho = self.rho if self.forget == "round" or i in outcome else 1.0
            self.a[i] = self.a0 + rho * (self.a[i] - self.a0) + won
            self.b[i] = self.b0 + rho * (self.b[i] - self.b0) + lost
            gradient = (virtual.get(i, 0) - self.exposure(i) / self.rounds) / self.n_max
            self.theta[i] = min(1.0, max(0.0, self.theta[i] - self.gamma * gradient))
        pace = self.budget / self.rounds
        widest = max(pace, self.capacity - pace)
        self.nu = min(1.0, max(0.0, self.nu - self.gamma * (pace - sum(virtual.values())) / widest))
        self.spent += executed
        self.k += 1
