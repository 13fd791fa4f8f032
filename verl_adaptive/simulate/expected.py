"""What a step of a policy costs before anything is known of the prompts: rollouts and waiting, of plain GRPO's.

    >>> from verl_adaptive.simulate import compose_preset, expected_waiting
    >>> found = expected_waiting(compose_preset(["greso"]), batch=16, n=4, share=0.5, passes=1.0)
    >>> found.rollouts > 1.0 and found.informative > 1.5
    True

A short simulation with a clock (:mod:`verl_adaptive.simulate.clock`) of the very policy, through the package's own
engine, on a pool in which a given share of GRPO's groups has variance. It answers "about how much", in a second or two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_type_hints

import numpy as np

from verl_adaptive.config import AdaptiveConfig, check
from verl_adaptive.engine.shape import step_shape
from verl_adaptive.policy import PARTS, find_part
from verl_adaptive.simulate.clock import Clock, ClockConfig
from verl_adaptive.simulate.driver import Simulation
from verl_adaptive.simulate.lengths import Lengths
from verl_adaptive.simulate.presets import compose_preset
from verl_adaptive.simulate.queueing import Machine
from verl_adaptive.simulate.worlds import StaticWorld

#: GRPO's steps in one pass over the simulated pool, at least and at most: four times what a step needs to find its
#: informative groups, so that the pool's end does not pass for a method's thrift. Below a share of .1 it may, a little.
_STEPS, _MOST_STEPS = 8, 40
_ENOUGH = 4
#: Steps that are simulated in all, unless two passes are more.
_ALL_STEPS = 64
#: Groups of a simulated step, at least, if the batch has them.
_GROUPS = 8
#: Rollouts of a GRPO step from which on batch and machine are made smaller together.
_MOST = 2048
#: Of GRPO's zero-variance groups, the share that is all wrong, where nothing is known.
HOPELESS = 0.6


@dataclass(frozen=True)
class Waiting:
    """A step's cost; shares are of plain GRPO's with the same batch and n.

    Attributes:
        rollouts: rollouts that begin in a step, of GRPO's; mean over the run's passes.
        seconds: of generation in a step, of GRPO's; likewise.
        first: both in the first pass over the data, in which no prompt has a history.
        later: both in the last pass that was simulated; None: there is one pass.
        informative: trained groups with variance in a step, of GRPO's.
        seconds_per_informative: of generation for each of them, of GRPO's; None where there are none, as in groups of one.
        waves: times in a step that requests met an empty machine; 1: no round waits for another.
        share: share of GRPO's groups with variance, as simulated.
    """

    rollouts: float
    seconds: float
    first: tuple[float, float]
    later: tuple[float, float] | None
    informative: float
    seconds_per_informative: float | None
    waves: float
    share: float


def expected_waiting(
    config: AdaptiveConfig,
    *,
    batch: int,
    n: int,
    share: float = 0.5,
    hopeless: float = HOPELESS,
    passes: float = 2.0,
    clock: ClockConfig | None = None,
    most: int = _MOST,
    run: int | None = None,
) -> Waiting:
    """Simulate a policy and GRPO for a moment; ``doctor`` does it with a run's settings (:meth:`.ClockConfig.guess`).

    Args:
        config: the policy; its limits on the run and its warm start play no part.
        batch, n: B and N.
        share: yield: share of GRPO's groups that have variance, in (0, 1]; as much of it as groups of n allow.
        hopeless: share of the others that is all wrong, in [0, 1]; what rescues those groups alone depends on it.
        passes: over the data set that the run makes with GRPO's batch; methods that learn from a prompt's earlier visits have
            none in the first. At least ½ are simulated and two to four at most; further ones cost what the last does.
        clock: what generation takes; default: the model of the documentation.
        most: rollouts of a GRPO step from which on batch, machine and the options that count prompts or rollouts of a step
            (:data:`verl_adaptive.config.PER_STEP`) are made smaller together.
        run: steps of the run, for options that count over all of them; None: not known, and those stay as they are.

    Raises:
        ConfigError: the share or the policy's options make no sense with this batch and n.
        Exhausted: the policy cannot fill a batch with ``adaptive.on_exhausted=raise``.
    """
    check(0 < share <= 1, "share", share, "must be in (0, 1]: the share of groups that have variance")
    clock = clock or ClockConfig()
    # A pass over the pool is as many steps of GRPO as it takes for a step to find its prompts: smaller steps, then.
    a_pass = max(_STEPS, min(_MOST_STEPS, round(_ENOUGH / share)), step_shape(config, 1, n, n).groups)
    factor = max(1, math.ceil(batch * n * a_pass / (most * _STEPS)))
    smaller = min(batch, max(_GROUPS, round(batch / factor)))
    m, scale = clock.machine, batch / smaller
    # As many sequences for each slot as before, and as long a step with all slots taken.
    slots = max(1, round(m.replicas * m.slots / scale))
    clock = replace(clock, machine=Machine(1, slots, m.base, m.each * m.slots / slots))
    simulated = min(4.0, max(0.5, passes), max(2.0, _ALL_STEPS / a_pass))
    steps = max(1, round(a_pass * simulated))
    p = _pool(max(a_pass * smaller, 64), n, share, hopeless)
    config = _scaled(config, smaller / batch, steps / run if run else 1.0)
    plain = replace(compose_preset(["grpo"]), poll_interval=config.poll_interval)
    base, run_of = (_run(policy, p, clock, smaller, n, steps) for policy in (plain, config))

    def ratio(key: str, part: slice = slice(None)) -> float:
        return float(run_of.row(part)[key] / base.row(part)[key])

    def over(key: str) -> float:
        """Mean over the run's passes: those after the simulated ones are like the last."""
        rest = max(0.0, passes - simulated) if simulated > 1 else 0.0
        return (simulated * ratio(key) + (rest * ratio(key, last) if rest else 0.0)) / (simulated + rest)

    last = slice(-a_pass, None)
    ours, theirs = run_of.row(), base.row()
    mixed = ours["informative"] > 0 and theirs["informative"] > 0
    return Waiting(
        rollouts=over("begun"),
        seconds=over("time"),
        first=(ratio("begun", slice(a_pass)), ratio("time", slice(a_pass))),
        later=(ratio("begun", last), ratio("time", last)) if simulated > 1 else None,
        informative=ours["informative"] / max(theirs["informative"], 1e-9),
        seconds_per_informative=ours["time_per_informative"] / theirs["time_per_informative"] if mixed else None,
        waves=ours["waves"],
        share=theirs["informative"] / smaller,
    )


def _scaled(config: AdaptiveConfig, step: float, steps: float) -> AdaptiveConfig:
    """The policy for a batch and a run that are smaller by these factors: options say by their metadata what they count."""
    by = {"step": step, "run": step * steps, "steps": steps}

    def shrink(options: Mapping[str, Any], of: type) -> dict[str, Any]:
        out, hints = dict(options), get_type_hints(of)
        for field in fields(of):
            value, counts = out.get(field.name), field.metadata.get("counts")
            if counts is not None and isinstance(value, int):
                out[field.name] = max(1, round(value * by[counts]))
            elif isinstance(value, Mapping) and is_dataclass(hints[field.name]):
                out[field.name] = shrink(value, hints[field.name])
        return out

    parts = {
        role: shrink(options, find_part(role, options["name"]).Config)
        for role in PARTS
        for options in [getattr(config, role)]
    }
    return replace(config, **(shrink(vars(config), AdaptiveConfig) | parts))


def _pool(size: int, n: int, share: float, hopeless: float = HOPELESS) -> np.ndarray:
    """Pass rates of which groups of n have variance with about this share, and so many of the others none right."""
    rng = np.random.default_rng([0, 8])
    p = 1.0 / (1.0 + np.exp(-rng.standard_normal(size)))
    mixed = float((1.0 - p**n - (1.0 - p) ** n).mean())
    flat = 1.0 - min(1.0, share / mixed) if mixed else 0.0
    kind = rng.permutation(size) / size
    return np.where(kind < flat * hopeless, 0.0, np.where(kind < flat, 1.0, p))


def _run(config: AdaptiveConfig, p: np.ndarray, clock: ClockConfig, batch: int, n: int, steps: int) -> Clock:
    config = replace(config, seed=0, total_rollouts=None, skip_zero_advantage=None)
    watch, world = Clock(clock), StaticWorld(p, lengths=Lengths(clock.lengths, len(p)))
    simulation = Simulation(config, world, batch=batch, n=n, steps=steps, clock=watch)
    while not simulation.finished:
        simulation.run_step()
    return watch
