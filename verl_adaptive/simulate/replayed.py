"""A world made from a trace: each prompt's pass rate, over time where the trace has time.

Estimation. Successes of one prompt are binomial; the prompts' pass rates come from one Beta(a, b), fitted by moments
(:func:`~verl_adaptive.stats.chance.fit_beta`), in which every prompt weighs the same: the run's policy may have given those of
middling rates most of its rollouts. A prompt's rate is then *drawn* from its posterior, not set to its mean:
eight failures of eight leave open how hopeless a prompt is, and means would make all such prompts alike and the pool too
narrow.

Time. At up to eight points from the trace's first step to its last, a prompt's evidence counts with weight
``2^{−|t − step|/half-life}``, and the prior's mean is the mean of the prompts' rates, so weighted. The draws at all knots use
the same random bits, so that a prompt's path moves as its evidence does. Between knots rates are linear, and after the last
they stay. Simulated step s is the trace's step ``first + s − 1``: the pool moves as it did in the recorded run, *whatever the
simulated policy trains on*. To let the policy's own choices move it, take the trace as the start of a learning pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from verl_adaptive.rng import Draw
from verl_adaptive.samplers.beta_posterior import draw_beta
from verl_adaptive.simulate.learning import LearningWorld
from verl_adaptive.simulate.pools import PoolConfig
from verl_adaptive.simulate.traces import Trace
from verl_adaptive.simulate.worlds import StaticWorld
from verl_adaptive.stats.chance import fit_beta

if TYPE_CHECKING:
    from verl_adaptive.engine import StepResult

#: Points in time, at most.
_KNOTS = 8
#: Half-life of evidence, as a share of the trace's steps.
_HALF_LIFE = 0.125


def knot_rates(trace: Trace, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Times of the knots ``(T,)`` and pass rates there, float32 ``(T, M)``; see the module."""
    count = len(trace)
    first, last = int(trace.step.min()), int(trace.step.max())
    times = np.linspace(first, last, min(_KNOTS, trace.steps))
    n, wins = (np.bincount(trace.prompt, v, minlength=count) for v in (trace.n, trace.successes))
    strength = sum(fit_beta(n, wins))
    half = max(_HALF_LIFE * (last - first), 1e-9)
    draw, hi, lo = Draw(seed, 0), trace.keys["hi"], trace.keys["lo"]
    out = np.empty((len(times), count), dtype=np.float32)
    for k, time in enumerate(times):
        weight = np.exp2(-np.abs(trace.step - time) / half)
        seen, won = (np.bincount(trace.prompt, weight * v, minlength=count) for v in (trace.n, trace.successes))
        prior = np.array(fit_beta(seen, won))
        prior *= strength / prior.sum()
        out[k] = draw_beta(prior[0] + won, prior[1] + np.maximum(seen - won, 0.0), draw, "replay.rate", hi, lo)
    return times, out


class ReplayedWorld(StaticWorld):
    """Prompts whose pass rates take the recorded course, whatever is trained.

    Args:
        times, knots: of :func:`knot_rates`.
        seed: seeds the rewards.
        more: as :class:`StaticWorld`.
    """

    def __init__(self, times: np.ndarray, knots: np.ndarray, seed: int = 0, **more: Any) -> None:
        super().__init__(knots[0], seed, **more)
        self.times, self.knots = times, knots
        self._now = float(times[0])

    def rates(self, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        if len(self.times) == 1:
            return self.knots[0, index].astype(np.float64)
        after = max(1, int(np.searchsorted(self.times, self._now)))
        low, high = self.times[after - 1], self.times[after]
        share = (self._now - low) / (high - low)
        before, then = self.knots[after - 1, index].astype(np.float64), self.knots[after, index].astype(np.float64)
        return before + share * (then - before)

    def learn(self, result: StepResult, advantage: np.ndarray, step: int) -> None:
        """The recorded run's next step."""
        self._now = float(min(self.times[0] + step, self.times[-1]))


def make_replayed(trace: Trace, pool: PoolConfig | None, seed: int) -> StaticWorld:
    """The trace as a world.

    Args:
        trace: what was recorded.
        pool: how prompts learn from where the trace starts; None: they take its course.
        seed: seeds the rates, as far as the trace leaves them open, and the rewards.
    """
    times, knots = knot_rates(trace, seed)
    known = np.isfinite(trace.tokens)
    usual = float(trace.tokens[known].mean()) if known.any() else (pool or PoolConfig()).tokens
    prompts = {"keys": trace.keys, "sources": trace.sources, "tokens": np.where(known, trace.tokens, usual)}
    if pool is not None:
        return LearningWorld(knots[0], seed, pool, failure=pool.failure, **prompts)
    return ReplayedWorld(times, knots, seed, **prompts)
