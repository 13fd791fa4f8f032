"""Engines over a world of known success rates that stands in for verl in tests; the world is the simulator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine import AsyncEngine, AsyncFacts, Engine, Requests, StepResult
from verl_adaptive.engine import make_engine as make_engine_of
from verl_adaptive.groups import Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.simulate.worlds import StaticWorld, WorldPrompts, number_keys
from verl_adaptive.stats.table import StatsTable

keys_of = number_keys
ROLES = ("sampler", "allocator", "filter", "advantage")
#: Keys of the ``adaptive`` group, as :func:`config_of` takes them.
POLICIES: dict[str, dict[str, Any]] = {
    "grpo": {"refill": False},
    "dapo": {"filter": "informative"},
    "greso": {"sampler": "greso", "filter": "informative"},
    "aero": {"allocator": "aero", "filter": "aero", "advantage": "beta", "refill": False},
    "pilot_commit": {"sampler": "retire", "allocator": "pilot_commit", "filter": "band"},
    "mopps+aero": {"sampler": "mopps", "allocator": "aero", "filter": "aero", "advantage": "beta", "refill": False},
    "cero": {"sampler": "cero", "refill": False},
}


class World(StaticWorld):
    """The simulator's world of fixed success rates, with its prompt stream.

    Args:
        p: success rate of every data-set position, shape ``(M,)``; tests may move it between steps.
        seed: seeds rewards and stream.
        failure: chance that a group fails (``failed`` set, some of its rollouts lost).
    """

    def __init__(
        self,
        p: np.ndarray,
        seed: int = 0,
        *,
        failure: float = 0.0,
    ) -> None:
        super().__init__(p, seed, tokens=25.0, failure=failure)
        self.source = WorldPrompts(len(self.p), seed)


def make_engine(
    sampler: str | Mapping[str, Any] = "epoch",
    allocator: str | Mapping[str, Any] = "fixed",
    filter: str | Mapping[str, Any] = "keep_all",
    advantage: str | Mapping[str, Any] = "verl",
    *,
    batch: int = 8,
    n: int = 8,
    M: int = 64,
    steps: int = 100,
    seed: int = 0,
    p: np.ndarray | None = None,
    world: World | None = None,
    table: StatsTable | None = None,
    keys: np.ndarray | None = None,
    async_facts: AsyncFacts | None = None,
    skip_zero: bool = True,
    **adaptive: Any,
) -> tuple[Engine, World]:
    """An engine over a fresh table, and its world.

    Args:
        sampler, allocator, filter, advantage: a part's name, or its options with ``name`` among them.
        batch, n, M, steps, seed: the run's facts.
        p: success rates; default: M evenly spread over (0, 1).
        world: use this one instead of making it.
        table: use this one (as after a resume) instead of an empty one.
        keys: prompts' keys, equal ones for duplicates; default: all different.
        async_facts: an asynchronous trainer's.
        skip_zero: as :class:`Engine`.
        adaptive: further keys of the ``adaptive`` group.
    """
    parts = dict(zip(ROLES, (sampler, allocator, filter, advantage), strict=True))
    config = config_of(**parts, seed=seed, **adaptive)
    if world is None:
        world = World((np.arange(M) + 0.5) / M if p is None else p, seed)
    sizes = {"batch": batch, "n": n, "steps": steps}
    return engine_of(
        config, world, **sizes, table=table, keys=keys, async_facts=async_facts, skip_zero=skip_zero
    ), world


def config_of(**adaptive: Any) -> AdaptiveConfig:
    """A configuration; a part is its name, or its options with ``name`` among them."""
    named = {key: {"name": adaptive[key]} for key in {*ROLES} & {*adaptive} if isinstance(adaptive[key], str)}
    config = AdaptiveConfig.from_mapping({**adaptive, **named})
    config.validate("adaptive")
    return config


def engine_of(
    config: AdaptiveConfig,
    world: World,
    *,
    batch: int | None = None,
    n: int | None = None,
    steps: int = 100,
    table: StatsTable | None = None,
    keys: np.ndarray | None = None,
    sources: np.ndarray | None = None,
    **more: Any,
) -> Engine:
    """An engine of a configuration, otherwise as :func:`make_engine` says; by default a step is about 32 rollouts."""
    if batch is None:
        batch, n = (32, 1) if config.batch_unit == "rollouts" else (4, 8)
    table = StatsTable() if table is None else table
    row_of = table.rows_for(keys_of(len(world.p)) if keys is None else keys, sources=sources)
    facts = RunFacts.of(config, batch=batch, n=n, steps=steps, prompts=len(np.unique(row_of)))
    return make_engine_of(build_policy(config), table, config, facts, row_of, world.source, **more)


def make_async_engine(*parts: Any, async_facts: AsyncFacts | None = None, **options: Any) -> tuple[AsyncEngine, World]:
    """As :func:`make_engine`, for an asynchronous trainer."""
    return make_engine(*parts, async_facts=async_facts or AsyncFacts(), **options)


class Arrivals:
    """Answers an asynchronous engine's requests, some at a time, in an order of its own.

    Args:
        world: gives the rewards.
        seed: seeds the order; the rewards do not depend on it.
    """

    def __init__(self, world: World, seed: int = 0) -> None:
        self.world, self.rng = world, np.random.default_rng(seed)
        self.waiting: list[Groups] = []

    def send(self, requests: Requests | None) -> None:
        """Requests on their way."""
        if requests is not None:
            groups = self.world.roll(requests)
            self.waiting += [groups.select(np.array([i])) for i in range(len(groups))]

    def back(self) -> Groups:
        """Some of what is on its way, at least one."""
        self.rng.shuffle(self.waiting)
        count = int(self.rng.integers(1, len(self.waiting) + 1))
        out, self.waiting = self.waiting[:count], self.waiting[count:]
        return Groups.concat(out)

    def step(self, engine: Engine, step: int) -> StepResult:
        """One whole step, mini-steps included, as a trainer takes it; in ``sync`` all that was asked for comes back together."""
        if not isinstance(engine, AsyncEngine):
            return run_step(engine, self.world, step)
        self.send(engine.begin(step))
        for _ in range(engine.async_facts.mini_steps):
            while not engine.can_take(engine.count):
                self.send(engine.revive())
                if engine.starved:
                    break
                self.send(engine.receive(self.back()))
            engine.take()
        return engine.finish()


def run_step(engine: Engine, world: World, step: int) -> StepResult:
    """One whole step."""
    answers = [world.roll(r) for r in (engine.begin(step),) if r is not None]
    while not engine.decided:
        requests = engine.receive(Groups.concat(answers))
        answers = [] if requests is None else [world.roll(requests)]
    return engine.finish()


def run(engine: Engine, world: World, steps: int, start: int = 1) -> list[StepResult]:
    """Steps ``start`` to ``start + steps - 1``; ends early when the engine is finished."""
    out = []
    for step in range(start, start + steps):
        if engine.finished:
            break
        out.append(run_step(engine, world, step))
    return out
