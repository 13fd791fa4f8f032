"""Response lengths: lognormal with a cap, longer for prompts that are harder.

The length of a rollout of prompt i is ``min(cap, exp(μ_i + σ √(1 − shared) z))`` with a fresh normal z, and::

    μ_i = ln(median) + harder · (½ − p_i) + σ √shared · z_i        without recorded lengths
    μ_i = ln(tokens_i) − σ² (1 − shared) / 2                       with the prompt's mean length, as a journal has it

p_i is the prompt's pass rate at the moment, so a pool that learns also answers more shortly; z_i is the prompt's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.rng import Draw

#: Most rollouts of one request: a rollout's salt is its request's stage times this, plus its number in the request.
STRIDE = 1 << 20


@dataclass
class LengthConfig:
    """How long answers are; the module has the formula.

    Attributes:
        median: tokens of the median answer to a half-solved prompt.
        sigma: standard deviation of the logarithm.
        cap: most tokens of an answer (``data.max_response_length``).
        harder: how much longer, in the logarithm, a hopeless prompt's answers are than a solved one's.
        shared: share of the logarithm's variance that is between prompts rather than between answers to one prompt.
    """

    median: float = 4000.0
    sigma: float = 0.9
    cap: int = 32768
    harder: float = 0.8
    shared: float = 0.25


class Lengths:
    """Draws lengths that depend on the rollout alone: whoever asks for the same rollout gets the same length.

    Args:
        config: the distribution.
        size: prompts.
        seed: seeds what is each prompt's own, and each rollout's.
        means: float64 ``(size,)``, recorded mean lengths; None: the distribution says.
    """

    def __init__(self, config: LengthConfig, size: int, seed: int = 0, means: np.ndarray | None = None) -> None:
        self.config, self.seed = config, seed
        self.within = config.sigma * np.sqrt(1.0 - config.shared)
        if means is None:
            own = np.random.default_rng([seed, 6]).standard_normal(size)
            self.centre = np.log(config.median) + config.sigma * np.sqrt(config.shared) * own
            self.harder = config.harder
        else:
            self.centre = np.log(np.maximum(means, 1.0)) - 0.5 * self.within**2
            self.harder = 0.0  # a recorded length knows how hard the prompt is

    def draw(self, groups: Groups, rates: np.ndarray) -> np.ndarray:
        """Lengths of all rollouts of groups that hold one request's results each.

        Args:
            groups: results, ``G`` groups with ``R`` rollouts.
            rates: float64 ``(G,)``, pass rates of their prompts now.

        Returns:
            int64 ``(R,)``, each at least 1 and at most the cap.
        """
        home = groups.group_of
        number = np.arange(groups.rollouts) - groups.offsets[:-1][home]
        salt = groups.stage.astype(np.int64) * STRIDE + number
        draw, submission = Draw(self.seed, 0), groups.submission[home]
        radius = np.sqrt(-2.0 * np.log1p(-draw.uniform("clock.length.radius", submission, salt)))
        normal = radius * np.cos(2.0 * np.pi * draw.uniform("clock.length.angle", submission, salt))
        centre = self.centre[groups.index] + self.harder * (0.5 - rates)
        tokens = np.exp(centre[home] + self.within * normal)
        return np.clip(np.rint(tokens), 1, self.config.cap).astype(np.int64)
