"""A pool that learns: pass rates that move with what is trained on.

Prompt i has the logit ``x_i = start_i + own_i + s_i · topic_{t(i)}``, floored and capped at ``±LIMIT``, and passes with
probability ``p_i = 1/(1 + e^{−x_i})``; s_i, uniform in [0, 1], is how much it follows its topic. After a step, with A_j the policy's own advantage of rollout j, y_j its success,
R the rows in the loss's denominator and B the batch::

    g_i         = B/R · Σ_{j of i} A_j (y_j − p_i)        the loss's gradient on i's own logit
    own_i      += rate · g_i                              what is trained moves
    topic_t    += spill · T/B · Σ_{i in t} g_i            and carries its topic along (T topics)
    own_i      ← own_i · e^{−forget · steps since}        what is not trained again fades

``(y − p)`` is the exact derivative of the log-probability of a rollout's outcome by the logit. For a whole group under
GRPO's advantage, g_i is the standard deviation of its rewards: 0 where it is zero-variance, ½ for a half-solved prompt. So what
is hopeless or solved is not informative, and a hopeless prompt becomes possible only through its topic, if at all. Gradient noise,
the optimizer, clipping, entropy and everything else about a real model are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from verl_adaptive.advantages.verl import group_relative, unseen_advantages
from verl_adaptive.ranges import NonNegative, Range
from verl_adaptive.roles.answers import compute
from verl_adaptive.simulate.worlds import StaticWorld

if TYPE_CHECKING:
    from verl_adaptive.engine import StepResult
    from verl_adaptive.policy import Policy

#: Greatest logit either way: a pass rate between 0.0003 and 0.9997.
LIMIT = 8.0


@dataclass
class LearningConfig:
    """How a pool learns; the equations are this module's.

    Attributes:
        rate: own movement, in logits per unit of gradient; 0 with ``spill`` 0: a pool that stays as it is.
        spill: movement of the topic, likewise.
        topics: T, among which prompts are divided at random.
        forget: each step multiplies a prompt's own movement by exp(-forget).
    """

    rate: NonNegative = 1.0
    spill: NonNegative = 0.06
    topics: Annotated[int, Range("[1, 65535]")] = 8
    forget: NonNegative = 0.001


def logit(p: np.ndarray) -> np.ndarray:
    """ln(p / (1 − p)), within ``±LIMIT``."""
    edge = 1.0 / (1.0 + np.exp(LIMIT))
    p = np.clip(p, edge, 1.0 - edge)
    return np.log(p) - np.log1p(-p)


def advantages(result: StepResult, policy: Policy) -> np.ndarray:
    """float64 ``(R,)``: the advantage of every rollout of the step, 0 for those that do not train.

    The policy's own estimator where it has one, else GRPO's as training has it.
    """
    out = np.zeros(result.groups.rollouts)
    inside = result.groups.rollout_mask(result.trained)
    groups, trains, zero_row = result.groups.select(result.trained), result.trains[inside], result.zero_row[inside]
    if not trains.any():
        return out
    reward, home = groups.reward[trains], groups.group_of[trains]
    if policy.advantage.estimator is None:
        own = group_relative(reward, home, len(groups))
        role = policy.advantage
        at, unseen = unseen_advantages(groups, trains, zero_row, role, estimator="grpo", by_std=True)
        own[np.isin(home, at)] = unseen
    else:
        own = compute(policy.advantage, reward, home, groups)
    out[result.trains] = own
    return out


def learns(world: StaticWorld) -> bool:
    """Whether pass rates move by what a policy trains; those of a trace move whatever it trains."""
    return isinstance(world, LearningWorld) and bool(world.config.rate or world.config.spill)


class LearningWorld(StaticWorld):
    """Prompts that get better as they are trained; see the module.

    Args:
        start: pass rates before training, ``(M,)``.
        seed: seeds rewards and topics.
        config: how it learns.
        more: as :class:`StaticWorld`.
    """

    def __init__(self, start: np.ndarray, seed: int = 0, config: LearningConfig | None = None, **more: Any) -> None:
        super().__init__(start, seed, **more)
        self.config = config or LearningConfig()
        self.start = logit(self.p)
        rng = np.random.default_rng([seed, 3])
        self.topic_of = rng.integers(0, self.config.topics, self.size).astype(np.uint16)
        self.follows = rng.random(self.size)
        self.topic = np.zeros(self.config.topics)
        self.own = np.zeros(self.size)
        self.touched = np.zeros(self.size, dtype=np.int32)
        self.batch = 0  # groups of a step of plain GRPO, as the simulation says
        self.step = 0

    def rates(self, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        x = self.start[index] + self._own(index) + self.follows[index] * self.topic[self.topic_of[index]]
        return 1.0 / (1.0 + np.exp(-np.clip(x, -LIMIT, LIMIT)))

    def _own(self, index: np.ndarray | slice) -> np.ndarray:
        return self.own[index] * np.exp(-self.config.forget * (self.step - self.touched[index]))

    def learn(self, result: StepResult, advantage: np.ndarray, step: int) -> None:
        c, groups = self.config, result.groups
        rows = max(1, int((result.trains | result.zero_row).sum()))
        pull = advantage * (groups.success - np.repeat(self.rates(groups.index), groups.n))
        self.step = step  # from here on, what was learned before has faded by one more step
        moved = result.trained
        gain = groups.sum(pull)[moved] * self.batch / rows
        index = groups.index[moved]
        some = np.unique(index)
        self.own[some] = self._own(some)
        self.touched[some] = step
        np.add.at(self.own, index, c.rate * gain)
        np.add.at(self.topic, self.topic_of[index], c.spill * c.topics / self.batch * gain)
