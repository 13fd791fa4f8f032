"""Several policies and seeds side by side, and how far each is from the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_adaptive.config import check
from verl_adaptive.errors import ConfigError, UsageError
from verl_adaptive.significance import interval
from verl_adaptive.simulate.clock import Clock, ClockConfig
from verl_adaptive.simulate.driver import Simulation, make_simulation
from verl_adaptive.simulate.lengths import Lengths
from verl_adaptive.simulate.measure import Measure
from verl_adaptive.simulate.pools import PoolConfig, make_pool
from verl_adaptive.simulate.replayed import make_replayed
from verl_adaptive.simulate.traces import Trace
from verl_adaptive.simulate.worlds import StaticWorld

#: What a simulation cannot tell; printed with every result.
LIMITS = (
    "Rewards are drawn from pass rates and the pool's learning is a formula: nothing here is an accuracy. A simulation "
    "counts what a policy does with rollouts; it cannot tell a model's final accuracy, nor wall clock, nor the effect of "
    "response lengths, optimizer, clipping and off-policy data."
)

#: The same where a clock counts seconds.
CLOCK_LIMITS = (
    "Rewards are drawn from pass rates and the pool's learning is a formula: nothing here is an accuracy. Seconds are those "
    "of generation in a queueing model: replicas with slots, a decode step that grows with the sequences in it, and drawn "
    "lengths; prefill, rewards, training and weight updates take no time in it. It cannot tell a model's final accuracy, "
    "nor the effect of optimizer, clipping and off-policy data."
)

#: What the others are measured against.
BASELINE = "grpo"


@dataclass(frozen=True)
class Setting:
    """What is equal for all runs.

    Attributes:
        batch, n: B and N.
        steps: steps planned for; GRPO's, under a budget.
        budget: rollouts of every run; None: exactly ``steps`` steps.
    """

    batch: int = 64
    n: int = 8
    steps: int = 200
    budget: int | None = 200 * 64 * 8

    def __post_init__(self) -> None:
        # GRPO runs beside all, and compares the rollouts of a group
        for key, least in (("batch", 1), ("n", 2), ("steps", 1)):
            check(getattr(self, key) >= least, f"--{key}", getattr(self, key), f"must be {least} or greater")
        step = self.batch * self.n
        short = f"is less than one step of {self.batch} prompts x {self.n} rollouts = {step}"
        check(self.budget is None or self.budget >= step, "--budget", self.budget, short)


@dataclass(frozen=True)
class Task:
    """One run to make; everything it depends on.

    Attributes:
        preset: as :func:`~verl_adaptive.simulate.driver.make_simulation` takes it.
        seed: of pool, rewards, stream and policy.
        setting: batch, n, budget.
        pool: the pool; None: the trace takes its own course.
        trace: recorded pass rates, with which the pool begins; or None.
        overrides: Hydra's syntax, for every preset.
        clock: what generation takes; None: nobody counts seconds.
    """

    preset: str
    seed: int
    setting: Setting
    pool: PoolConfig | None
    trace: Trace | None = None
    overrides: tuple[str, ...] = ()
    clock: ClockConfig | None = None

    def world(self) -> StaticWorld:
        """A fresh world; with a clock, one whose answers have its lengths (or those that the trace recorded)."""
        if self.trace is not None:
            world = make_replayed(self.trace, self.pool, self.seed)
        else:
            world = make_pool(self.pool or PoolConfig(), self.seed)
        if self.clock is not None:
            recorded = self.trace is not None and bool(np.isfinite(self.trace.tokens).any())
            means = world.tokens if recorded else None
            world.lengths = Lengths(self.clock.lengths, world.size, self.seed, means)
        return world

    def simulation(self, world: StaticWorld, clock: Clock | None = None) -> Simulation:
        """The run, in this world."""
        s = self.setting
        size: dict[str, Any] = {"batch": s.batch, "n": s.n, "steps": s.steps, "budget": s.budget}
        return make_simulation(self.preset, world, **size, seed=self.seed, overrides=self.overrides, clock=clock)


def tasks(
    presets: Sequence[str],
    seeds: Iterable[int],
    setting: Setting,
    pool: PoolConfig | None,
    trace: Trace | None = None,
    clock: ClockConfig | None = None,
) -> list[Task]:
    """One task for each preset and seed, ordered by seed."""
    return [Task(p, s, setting, pool, trace, clock=clock) for s in seeds for p in presets]


def check_task(task: Task, prompts: int) -> None:
    """Refuse what cannot run, without running it.

    Args:
        task: a run.
        prompts: how many its pool has.

    Raises:
        AdaptiveError: the preset, an override, or the two with these settings make no sense; names the preset.
    """
    try:
        task.simulation(StaticWorld(np.zeros(prompts)))
    except ConfigError as error:
        raise error if error.key.startswith("--") else UsageError(f"{task.preset}: {error}") from None


def run_task(task: Task, tick: Callable[[float], None] | None = None) -> dict[str, Any]:
    """Make a run.

    Args:
        task: which.
        tick: called after each step with the share of the run that is done.

    Returns:
        A flat row (:meth:`Measure.row` and ``preset``, ``seed``, ``seconds``; with a clock also
        :meth:`~verl_adaptive.simulate.clock.Clock.row` and ``course``, the pool's mean pass rate by seconds of generation).

    Raises:
        ConfigError, AdaptiveError: the preset makes no sense, or not with this pool.
    """
    s = task.setting
    begun = time.process_time()
    world = task.world()
    clock = None if task.clock is None else Clock(task.clock)
    simulation = task.simulation(world, clock)
    measure = Measure(simulation, s.steps)
    while not simulation.finished:
        measure.look()
        result = simulation.try_step()
        if result is None:
            break
        measure.count(result)
        if tick is not None:
            done = simulation.engine.total.rollouts.generated / s.budget if s.budget else simulation.step / s.steps
            tick(min(1.0, done))
    seconds = time.process_time() - begun
    timed = {} if clock is None else {**clock.row(), "course": clock.course}
    return {"preset": task.preset, "seed": task.seed, **measure.row(), **timed, "seconds": round(seconds, 3)}


def by_preset(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Preset → seed → row."""
    by: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["preset"], {})[row["seed"]] = row
    return by


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means of all numbers over seeds, half of their 95 % interval (``…_half``), and each preset's share of the oracle's gain.

    ``efficiency_<x>`` is ``(preset − grpo) / (oracle_best − grpo)`` of the means over seeds, for ``signal`` (per
    generated rollout) and ``pool_end`` (what the pool learned); its interval is of the differences, paired by seed. None
    without the references, or where the oracle gains nothing.

    Of rows with a clock also ``time_ratio`` and ``time_per_informative_ratio``, shares of GRPO's paired by seed, and
    ``to_baseline``: seconds of generation until the pool's mean pass rate is where GRPO's run ended, as a share of what
    GRPO took to get there, over the seeds (``to_baseline_seeds``) in which it gets there at all.

    Args:
        rows: of :func:`run_task`.
    """
    by, out = by_preset(rows), []
    for preset, runs in by.items():
        entry: dict[str, Any] = {"preset": preset, "seeds": len(runs)}
        for key, value in next(iter(runs.values())).items():
            if key != "seed" and type(value) in (int, float):
                entry[key], entry[f"{key}_half"] = mean_of([run[key] for run in runs.values()])
        for reason in sorted({r for run in runs.values() for r in run["dropped"]}):
            entry[f"dropped_{reason}"] = float(np.mean([r["dropped"].get(reason, 0) for r in runs.values()]))
        for key in ("signal", "pool_end"):
            entry[f"efficiency_{key}"], entry[f"efficiency_{key}_half"] = _efficiency(by, preset, key)
        entry["compute_ratio"], entry["compute_ratio_half"] = _ratio(by, preset, "compute")
        if all("time" in run for run in runs.values()):
            for key in ("time", "time_per_informative"):
                entry[f"{key}_ratio"], entry[f"{key}_ratio_half"] = _ratio(by, preset, key)
            reached = to_baseline(by, preset)
            entry["to_baseline"], entry["to_baseline_half"] = mean_of(reached) if reached else (None, None)
            entry["to_baseline_seeds"] = len(reached)
        entry["ended"] = sorted({run["ended"] for run in runs.values()})
        out.append(entry)
    return out


def mean_of(values: Sequence[float] | np.ndarray) -> tuple[float, float | None]:
    """Mean, and half of its 95 % interval, which one value does not have."""
    mean, half = interval(list(values))
    return mean, half if len(values) > 1 else None


def _paired(by: dict, presets: Sequence[str], key: str) -> list[np.ndarray]:
    """A key of several presets, over the seeds that all of them have; empty: they have none."""
    seeds = sorted(set.intersection(*(set(by.get(p, ())) for p in presets)))
    return [np.array([by[p][s][key] for s in seeds], dtype=np.float64) for p in presets] if seeds else []


def _efficiency(by: dict, preset: str, key: str) -> tuple[float | None, float | None]:
    found = _paired(by, (preset, BASELINE, "oracle_best"), key)
    if not found:
        return None, None
    ours, theirs, top = found
    gap = float((top - theirs).mean())
    if gap <= 0:
        return None, None
    share = float((ours - theirs).mean()) / gap
    # Linearised: the spread of what is left of the difference at this share.
    left = (ours - theirs) - share * (top - theirs)
    return share, interval(list(left))[1] / gap if len(left) > 1 else None


def _ratio(by: dict, preset: str, key: str) -> tuple[float | None, float | None]:
    found = _paired(by, (preset, BASELINE), key)
    return mean_of(found[0] / found[1]) if found and found[1].all() else (None, None)


def to_baseline(by: dict[str, dict[int, dict[str, Any]]], preset: str) -> list[float]:
    """Time to GRPO's final pool, of GRPO's own, in the seeds in which both have a pool that learns and get there."""
    out = []
    for seed, run in by[preset].items():
        base = by.get(BASELINE, {}).get(seed)
        if base is None or not base["learns"]:
            continue
        target = base["course"][-1][1]
        ours, theirs = (next((s for s, rate in r["course"] if rate >= target), None) for r in (run, base))
        if ours is not None and theirs:
            out.append(ours / theirs)
    return out
