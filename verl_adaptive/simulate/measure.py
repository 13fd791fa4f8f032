"""What is measured of a simulated run.

*Signal.* A trained group with c correct and m incorrect rollouts estimates its gradient, the difference between what
right and wrong answers have in common, from samples of c and m: their effective number is ``cm/(c + m)``. The signal
is the sum of ``4cm/(c + m)`` over the trained groups: 1 a rollout where half are right, 0 in a zero-variance one, and in
expectation ``4p(1 − p)(n − 1)`` for a whole group of n. Divided by the generated rollouts it is a share in [0, 1].

*Regret.* The value of a rollout is ``4p(1 − p)`` at the true pass rate when it is generated. Regret is the share of the
value that was missed by not rolling out, in groups of N, the best prompts of that moment. It is measured in about fifty
steps of a run (each looks at the whole pool), at the run's own state of the pool: a method is not blamed for prompts
that it has solved already.

*Calibration.* The sampler's estimates of the prompts it has seen (:meth:`~verl_adaptive.roles.Sampler.estimate`), against
their true pass rates at the end.

*Gaps.* A prompt's longest gap is the longest stretch between two of its visits, start and end of the run included, in
passes: rollouts generated meanwhile over N times the pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_adaptive.engine import StepResult
from verl_adaptive.simulate.driver import Simulation
from verl_adaptive.simulate.learning import learns

_LOOKS = 50


class Measure:
    """Watches one run: :meth:`look` before a step, :meth:`count` after it, :meth:`row` at the end.

    Args:
        simulation: before its first step.
        expected_steps: about as many as there will be.
    """

    def __init__(self, simulation: Simulation, expected_steps: int) -> None:
        self.simulation, self.world = simulation, simulation.world
        self.every = max(1, expected_steps // _LOOKS)
        self.start = np.array(self.world.rates())
        self.scale = simulation.n * self.world.size
        self.last = np.zeros(self.world.size)  # passes at the latest visit
        self.gap = np.zeros(self.world.size)
        self.seen = np.zeros(self.world.size, dtype=bool)
        self.signal = self.looked = self.best = 0.0
        self.informative = 0
        self._before: np.ndarray | None = None

    @property
    def passes(self) -> float:
        """Rollouts generated so far, over N times the pool."""
        return self.simulation.engine.total.rollouts.generated / self.scale

    def look(self) -> None:
        """Before a step: now and then, at the whole pool."""
        due = self.simulation.step % self.every == 0
        self._before = self.world.rates() if due else None
        self._passes = self.passes

    def count(self, result: StepResult) -> None:
        """After a step."""
        asked = self.simulation.requests
        index, n = (np.concatenate([getattr(r, key) for r in asked]) for key in ("index", "n"))
        if self._before is not None:
            p = np.concatenate(self.simulation.truth)
            self.looked += float((4.0 * p * (1.0 - p) * n).sum())
            q = 4.0 * self._before * (1.0 - self._before)
            self.best += _best(q, self.simulation.n, int(n.sum()))
        visited = np.unique(index)
        self.gap[visited] = np.maximum(self.gap[visited], self._passes - self.last[visited])
        self.last[visited] = self._passes
        self.seen[visited] = True
        groups = result.groups
        mixed = ~groups.degenerate(self.simulation.engine.facts.tolerance) & ~groups.failed
        self.informative += int((mixed & result.trained).sum())
        self.signal += float(signal(groups.sum(groups.success * result.trains), groups.sum(result.trains)).sum())

    def row(self) -> dict[str, Any]:
        """The run in numbers, flat but for ``dropped``."""
        engine, world = self.simulation.engine, self.world
        rollouts, tokens = engine.total.rollouts, engine.total.tokens
        now = np.array(world.rates())
        gap = np.maximum(self.gap, self.passes - self.last)
        generated = max(1, rollouts.generated)
        return {
            "steps": self.simulation.step,
            "generated": rollouts.generated,
            "trained": rollouts.trained,
            "held": rollouts.held,
            "dropped": dict(sorted(rollouts.dropped.items())),
            "informative_groups": self.informative,
            "rollouts_per_informative": generated / self.informative if self.informative else float("nan"),
            "wasted": 1.0 - rollouts.trained / generated,
            # another baseline than the group's mean finds a signal in groups that show none: not known, as of single rollouts
            "signal": self.signal / generated if engine.policy.advantage.needs_groups else 0.0,
            "regret": 1.0 - self.looked / self.best if self.best else float("nan"),
            "trained_tokens": tokens.trained,
            "compute": 2 * tokens.generated + 6 * tokens.trained,
            "foreign_estimator": self.simulation.foreign_estimator,
            "learns": learns(self.world),
            "pool_start": float(self.start.mean()),
            "pool_end": float(now.mean()),
            "coverage": float(self.seen.mean()),
            "gap_longest": float(gap.max()),
            **_calibration(engine.policy.sampler.estimate(engine.row_of[self.seen]), now[self.seen]),
            "ended": self.simulation.ended,
        }


def signal(correct: np.ndarray, n: np.ndarray) -> np.ndarray:
    """``4cm/(c + m)`` of groups with c correct of n trained rollouts, m = n − c; 0 for groups of none."""
    return 4.0 * correct * (n - correct) / np.maximum(n, 1)


def _best(q: np.ndarray, n: int, rollouts: int) -> float:
    """The greatest value that ``rollouts`` rollouts can have in groups of n of different prompts, all if need be."""
    groups = min(len(q), -(-rollouts // n))
    top = np.partition(q, len(q) - groups)[len(q) - groups :]
    return float(top.mean()) * rollouts


def _calibration(estimate: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    off = estimate - truth
    if not len(off):
        return {"estimate_error": float("nan"), "estimate_bias": float("nan")}
    return {"estimate_error": float(np.sqrt((off**2).mean())), "estimate_bias": float(off.mean())}
