"""Parametric pools: how hard the prompts are at the start, and whether they learn.

A pool is a mixture: a share of hopeless prompts, a share of solved ones, and the rest between, with logit-normal pass
rates. Named pools are starting points; ``NAME:key=value,key=value`` changes any of their keys.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np

from verl_adaptive.config import build, check
from verl_adaptive.errors import ConfigError, nearest
from verl_adaptive.ranges import Count, NonNegative, Range, Share
from verl_adaptive.simulate.learning import LearningConfig, LearningWorld


@dataclass
class PoolConfig(LearningConfig):
    """A pool of prompts, and how it learns.

    Attributes:
        prompts: M.
        hopeless: share of prompts with logits around −6 (one success in 400).
        solved: share of prompts with logits around +5 (one failure in 150).
        centre, spread: mean and standard deviation of the logits of the rest.
        tokens: mean response length.
        failure: chance that a group's generation fails.
        sources: data sources, equal in size, from hard to easy; 1: none is known.
        told: how much a source says of difficulty: the correlation of a prompt's rank with what its source goes by.
    """

    prompts: Count = 4000
    hopeless: Share = 0.3
    solved: Share = 0.2
    centre: float = 0.0
    spread: NonNegative = 1.5
    tokens: Annotated[float, Range("[1, inf)")] = 512.0
    failure: Share = 0.0
    sources: Count = 1
    told: Share = 0.5

    def validate(self, path: str) -> None:
        check(
            self.hopeless + self.solved <= 1,
            f"{path}.hopeless",
            self.hopeless,
            f"exceeds 1 together with {path}.solved={self.solved}",
        )


#: Named pools.
POOLS: dict[str, PoolConfig] = {
    # Three in ten are hopeless, two in ten solved; training moves all of it.
    "mixed": PoolConfig(),
    # The same, and nothing is learned: what a method does with a pool that stands still.
    "static": PoolConfig(rate=0.0, spill=0.0, forget=0.0),
    # Most prompts are out of reach at the start.
    "hard": PoolConfig(hopeless=0.5, solved=0.05, centre=-1.5),
    # Most prompts are solved at the start, or soon.
    "easy": PoolConfig(hopeless=0.05, solved=0.4, centre=1.0),
    # One pass at the default budget instead of three: methods that learn from earlier visits have few.
    "large": PoolConfig(prompts=12_000),
}


def parse_pool(text: str) -> PoolConfig:
    """The pool that ``NAME`` or ``NAME:key=value,…`` means.

    Raises:
        ConfigError: unknown name or key, or a value that cannot be.
    """
    name, _, rest = text.partition(":")
    if name not in POOLS:
        raise ConfigError("--pool", name, f"no such pool; {nearest(name, POOLS)}")
    values: dict[str, Any] = asdict(POOLS[name])
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError("--pool", word, "must be key=value")
        try:
            values[key] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            raise ConfigError(f"--pool {name}:{key}", value, "must be a number") from None
    return build(PoolConfig, values, f"--pool {name}")


def starting_rates(config: PoolConfig, seed: int) -> np.ndarray:
    """float64 ``(M,)``: pass rates before training."""
    rng = np.random.default_rng([seed, 1])
    kind, normal = rng.random(config.prompts), rng.standard_normal(config.prompts)
    hopeless, solved = kind < config.hopeless, kind >= 1.0 - config.solved
    x = np.where(hopeless, -6.0 + 0.5 * normal, np.where(solved, 5.0 + 0.5 * normal, 0.0))
    between = ~(hopeless | solved)
    x[between] = config.centre + config.spread * normal[between]
    return 1.0 / (1.0 + np.exp(-x))


def source_of(config: PoolConfig, seed: int, rates: np.ndarray) -> np.ndarray:
    """int64 ``(M,)``: the data source of each prompt, 0 the hardest.

    Prompts are ordered by ``told · z + √(1 − told²) · noise`` and cut into equal parts, z being the normal score of their
    rank by ``rates`` (a Gaussian copula). With ``told`` = 1 no source overlaps another, with 0 all are alike.
    """
    size, order = len(rates), np.argsort(rates, kind="stable")
    rng = np.random.default_rng([seed, 4])
    score = np.empty(size)
    score[order] = np.sort(rng.standard_normal(size))
    seen = config.told * score + np.sqrt(1.0 - config.told**2) * rng.standard_normal(size)
    place = np.empty(size, dtype=np.int64)
    place[np.argsort(seen, kind="stable")] = np.arange(size)
    return place * config.sources // size


def make_pool(config: PoolConfig, seed: int) -> LearningWorld:
    """The pool as a world.

    Args:
        config: the pool.
        seed: seeds who is how hard, topics and rewards.
    """
    rates = starting_rates(config, seed)
    names = [f"source {s}" for s in source_of(config, seed, rates)] if config.sources > 1 else None
    return LearningWorld(rates, seed, config, sources=names, tokens=config.tokens, failure=config.failure)
