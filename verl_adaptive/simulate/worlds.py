"""The simulated world: prompts with known pass rates, and rewards that are drawn from them.

A world stands in for the model and the verifier. The driver (:mod:`verl_adaptive.simulate.driver`) asks it for rewards
and tells it what was trained on; a world ignores that (:class:`StaticWorld`), learns from it
(:mod:`verl_adaptive.simulate.learning`), or follows a recorded run (:mod:`verl_adaptive.simulate.replayed`).
A prompt is known by its position in the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.rng import Draw
from verl_adaptive.simulate.lengths import STRIDE, Lengths
from verl_adaptive.stats.keys import KEY_DTYPE

if TYPE_CHECKING:
    from verl_adaptive.engine import Requests, StepResult


def number_keys(count: int) -> np.ndarray:
    """Keys of ``count`` different prompts that have no content, ``KEY_DTYPE``."""
    number = np.arange(count, dtype=np.uint64)
    out = np.empty(count, dtype=KEY_DTYPE)
    out["hi"] = Draw(0, 0).bits("key.hi", number, number)
    out["lo"] = number
    return out


def draw_groups(
    requests: Requests,
    p: np.ndarray,
    seed: int,
    *,
    tokens: np.ndarray | float = 512.0,
    failure: float = 0.0,
) -> Groups:
    """Draw rewards of 0 and 1.

    A rollout's reward and length are hashes of (seed, submission, stage, number in the request): the same requests meet the
    same rewards in whatever order they are answered, and a resumed run meets those of the uninterrupted one.

    Args:
        requests: the round, ``(k,)``.
        p: float64 ``(k,)``, chance of a correct rollout of each request's prompt.
        seed: the world's seed.
        tokens: mean response length, of each request or of all; lengths are uniform within half of it, either way.
        failure: chance that a request fails: half of its rollouts are lost. Of first rollouts, the group says nothing then; a
            top-up leaves its group what it has, as in training.
    """
    draw, sizes = Draw(seed, 0), requests.n.astype(np.int64)
    salt = requests.stage.astype(np.int64) * STRIDE
    failed, lost = np.zeros(len(requests), dtype=bool), np.zeros(len(requests), dtype=np.int32)
    if failure > 0:
        fails = draw.uniform("world.failure", requests.submission, salt) < failure
        lost = np.where(fails, sizes - sizes // 2, 0).astype(np.int32)
        failed = fails & (requests.stage == 0)
        sizes = sizes - lost
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    home = np.repeat(np.arange(len(requests)), sizes)
    number = np.arange(offsets[-1]) - offsets[:-1][home]
    bits = draw.bits("world.reward", requests.submission[home], (salt[home] + number))
    right = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 < p[home]
    reward = right.astype(np.float64)
    mean = np.broadcast_to(np.asarray(tokens, dtype=np.float64), len(requests))[home]
    spread = 0.5 + (bits & np.uint64(2047)).astype(np.float64) / 2048.0  # the bits that the reward does not use
    return Groups(
        submission=requests.submission,
        row=requests.row,
        index=requests.index,
        failed=failed,
        lag=np.zeros(len(requests), dtype=np.int32),
        offsets=offsets,
        reward=reward,
        signal=reward,
        success=right.astype(np.float64),
        tokens=np.maximum(1, (mean * spread).astype(np.int64)),
        stage=requests.stage[home].astype(np.int16),
        lost=lost,
        spoilt=np.zeros(len(requests), dtype=np.int64),
        spoilt_tokens=np.zeros(len(requests), dtype=np.int64),
        shorter=np.zeros(len(home), dtype=np.int64),
    )


class StaticWorld:
    """Prompts whose pass rates never change.

    Args:
        p: pass rates, ``(M,)``; the array is kept, so a caller may move it between steps.
        seed: seeds the rewards.
        keys: ``KEY_DTYPE`` ``(M,)``; default: numbered.
        sources: data sources by name, ``(M,)``; default: not known.
        tokens, failure: as :func:`draw_groups`; ``tokens`` may be an array over the prompts.
        lengths: how long answers are, in place of ``tokens``.
    """

    def __init__(
        self,
        p: np.ndarray,
        seed: int = 0,
        *,
        keys: np.ndarray | None = None,
        sources: Sequence[str] | None = None,
        tokens: np.ndarray | float = 512.0,
        failure: float = 0.0,
        lengths: Lengths | None = None,
    ) -> None:
        self.p = np.asarray(p, dtype=np.float64)
        self.size, self.seed, self.failure = len(self.p), seed, failure
        self.keys = number_keys(self.size) if keys is None else keys
        self.sources = sources
        self.tokens = np.broadcast_to(np.asarray(tokens, dtype=np.float64), self.size)
        self.lengths = lengths

    def rates(self, index: np.ndarray | slice = slice(None)) -> np.ndarray:
        """True pass rates now, float64, of these positions or of all."""
        return self.p[index]

    def roll(self, requests: Requests) -> Groups:
        """A round's rewards: one group a request, in the order of the requests."""
        rates = self.rates(requests.index)
        tokens = self.tokens[requests.index]
        groups = draw_groups(requests, rates, self.seed, tokens=tokens, failure=self.failure)
        if self.lengths is not None:
            groups.tokens = self.lengths.draw(groups, rates)
        return groups

    def learn(self, result: StepResult, advantage: np.ndarray, step: int) -> None:
        """The weights change: the step's batch was trained on, with these advantages ``(R,)``. Here nothing is learned."""


class WorldPrompts:
    """A prompt stream: a fresh permutation of ``range(size)`` every epoch, cut anywhere.

    Attributes:
        position: prompts given so far; all of its state.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed, self.position = size, seed, 0
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def take(self, count: int) -> np.ndarray:
        """The next ``count`` positions, across epochs where need be."""
        parts = []
        while count > 0:
            epoch, at = divmod(self.position, self.size)
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            parts.append(self._order[at : at + count])
            self.position += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
