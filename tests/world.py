"""A small fake world that stands in for verl in tests: known success rates, rewards that never depend on order.

A rollout's reward is a hash of (seed, ticket, rollout number within the group), so the same decisions meet the same
rewards whatever the order in which requests are answered, and a resumed run sees what the uninterrupted run saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.groups import Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.rng import Draw
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.streaming import StreamEngine, StreamFacts

__all__ = ["Arrivals", "Source", "World", "keys_of", "make_engine", "make_stream_engine", "run", "run_step"]


def keys_of(count: int, seed: int = 0) -> np.ndarray:
    """Keys of ``count`` different prompts, ``KEY_DTYPE``."""
    number = np.arange(count, dtype=np.uint64)
    out = np.empty(count, dtype=KEY_DTYPE)
    out["hi"] = Draw(seed, 0).bits("key.hi", number, number)
    out["lo"] = number
    return out


class Source:
    """A prompt stream: a fresh permutation of ``range(size)`` every epoch.

    Attributes:
        position: prompts given so far; all of its state.
    """

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True) -> None:
        self.size, self.seed, self.shuffle, self.position = size, seed, shuffle, 0

    def _epoch(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng([self.seed, epoch]).permutation(self.size)

    def take(self, count: int) -> np.ndarray:
        """The next ``count`` positions, across epochs where need be."""
        wanted = np.arange(self.position, self.position + count)
        self.position += count
        orders = {int(e): self._epoch(int(e)) for e in np.unique(wanted // self.size)}
        return np.array([orders[int(w // self.size)][w % self.size] for w in wanted], dtype=np.int64)


class World:
    """Prompts with known success rates.

    Args:
        p: success rate of every data-set position, shape ``(M,)``.
        seed: seeds rewards and stream.
        low, high: the reward of a wrong and of a correct rollout.
        failure: chance that a group fails (``failed`` set, some of its rollouts lost).
        shuffle: the stream permutes the data set each epoch; False: data-set order.
    """

    def __init__(
        self,
        p: np.ndarray,
        seed: int = 0,
        *,
        low: float = 0.0,
        high: float = 1.0,
        failure: float = 0.0,
        shuffle: bool = True,
    ) -> None:
        self.p = np.asarray(p, dtype=np.float64)
        self.seed, self.low, self.high, self.failure = seed, low, high, failure
        self.source = Source(len(self.p), seed, shuffle)
        self.asked: dict[int, int] = {}  # rollouts given so far, by ticket

    def roll(self, requests: Requests) -> Groups:
        """Rewards of a round: one group a request, in the order of the requests."""
        rewards, tokens, failed, lost = [], [], [], []
        for ticket, index, n in zip(requests.ticket, requests.index, requests.n, strict=True):
            begin = self.asked.get(int(ticket), 0)
            self.asked[int(ticket)] = begin + int(n)
            number = np.arange(begin, begin + int(n))
            draw, one = Draw(self.seed, int(ticket)), np.ones(int(n), dtype=np.uint64)
            hit = draw.uniform("world.reward", one, one, number) < self.p[index]
            length = 1 + (draw.bits("world.tokens", one, one, number) % np.uint64(50)).astype(np.int64)
            fails = bool(draw.uniform("world.failure", one[:1], one[:1], begin)[0] < self.failure)
            back = number.size // 2 if fails else number.size
            rewards.append(np.where(hit, self.high, self.low)[:back].tolist())
            tokens.append(length[:back].tolist())
            failed.append(fails)
            lost.append(int(n) - back)
        return Groups.from_lists(
            requests.row,
            rewards,
            success=[[float(r == self.high) for r in group] for group in rewards],
            tokens=tokens,
            stage=[[int(s)] * len(r) for s, r in zip(requests.stage, rewards, strict=True)],
            ticket=requests.ticket,
            index=requests.index,
            failed=failed,
            lost=lost,
        )


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
        skip_zero: as :class:`Engine`.
        adaptive: further keys of the ``adaptive`` group.
    """
    parts = {"sampler": sampler, "allocator": allocator, "filter": filter, "advantage": advantage}
    options = {role: {"name": part} if isinstance(part, str) else dict(part) for role, part in parts.items()}
    config = replace(AdaptiveConfig.from_mapping({"seed": seed, **adaptive}), **options)
    config.validate("adaptive")
    if world is None:
        world = World((np.arange(M) + 0.5) / M if p is None else p, seed)
    table = StatsTable() if table is None else table
    keys = keys_of(len(world.p)) if keys is None else keys
    row_of = table.rows_for(keys)
    facts = RunFacts(
        batch=batch, n=n, steps=steps, prompts=len(np.unique(row_of)), seed=seed, tolerance=config.tolerance
    )
    policy = build_policy(config)
    engine = Engine(policy, table, config, facts, row_of, world.source, skip_zero=skip_zero)
    return engine, world


def make_stream_engine(*parts: Any, stream: StreamFacts | None = None, **options: Any) -> tuple[StreamEngine, World]:
    """As :func:`make_engine`, for an asynchronous trainer."""
    engine, world = make_engine(*parts, **options)
    made = StreamEngine(
        build_policy(engine.config),
        engine.table,
        engine.config,
        engine.facts,
        engine.row_of,
        engine.source,
        skip_zero=engine.skip_zero,
        stream=stream,
    )
    return made, world


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

    def step(self, engine: StreamEngine, step: int) -> StepResult:
        """One whole step, mini-steps included."""
        self.send(engine.begin(step))
        for _ in range(engine.stream.parts):
            self.send(engine.revive())
            while not (engine.can_take(engine.count) or engine.starved):
                self.send(engine.receive(self.back()))
                self.send(engine.revive())
            engine.take(engine.count)
        return engine.finish()


def run_step(engine: Engine, world: World, step: int) -> StepResult:
    """One whole step."""
    requests = engine.begin(step)
    while requests is not None:
        requests = engine.receive(world.roll(requests))
    return engine.finish()


def run(engine: Engine, world: World, steps: int, start: int = 1) -> list[StepResult]:
    """Steps ``start`` to ``start + steps - 1``; ends early when the engine is finished."""
    out = []
    for step in range(start, start + steps):
        if engine.finished:
            break
        out.append(run_step(engine, world, step))
    return out
