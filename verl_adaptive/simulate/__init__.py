"""The simulator: policies against pools whose pass rates are known, through the package's own engine.

    >>> from verl_adaptive.simulate import PoolConfig, Setting, run_task, summarise, tasks
    >>> setting = Setting(batch=8, n=8, steps=10, budget=640)
    >>> rows = [run_task(t) for t in tasks(["grpo", "greso", "oracle_best"], [0], setting, PoolConfig(prompts=100))]
    >>> [entry["preset"] for entry in summarise(rows)]
    ['grpo', 'greso', 'oracle_best']

Rows are flat dictionaries: ``pandas.DataFrame(rows)``.
"""

from __future__ import annotations

from verl_adaptive.simulate.clock import Clock, ClockConfig, Timing
from verl_adaptive.simulate.driver import Simulation, make_simulation
from verl_adaptive.simulate.equal_budget import CLOCK_LIMITS, LIMITS, Setting, Task, run_task, summarise, tasks
from verl_adaptive.simulate.expected import expected_waiting
from verl_adaptive.simulate.learning import LearningConfig, LearningWorld
from verl_adaptive.simulate.lengths import LengthConfig, Lengths
from verl_adaptive.simulate.measure import Measure
from verl_adaptive.simulate.pools import PoolConfig, make_pool, parse_pool
from verl_adaptive.simulate.presets import PEERS, REFERENCES, compose_preset, preset_names
from verl_adaptive.simulate.queueing import Machine, ServerQueue
from verl_adaptive.simulate.replayed import ReplayedWorld, make_replayed
from verl_adaptive.simulate.traces import Trace, read_trace
from verl_adaptive.simulate.worlds import StaticWorld, World, WorldPrompts

__all__ = [
    "CLOCK_LIMITS",
    "LIMITS",
    "PEERS",
    "REFERENCES",
    "Clock",
    "ClockConfig",
    "LearningConfig",
    "LearningWorld",
    "LengthConfig",
    "Lengths",
    "Machine",
    "Measure",
    "PoolConfig",
    "ReplayedWorld",
    "ServerQueue",
    "Setting",
    "Simulation",
    "StaticWorld",
    "Task",
    "Timing",
    "Trace",
    "World",
    "WorldPrompts",
    "compose_preset",
    "expected_waiting",
    "make_pool",
    "make_replayed",
    "make_simulation",
    "parse_pool",
    "preset_names",
    "read_trace",
    "run_task",
    "summarise",
    "tasks",
]
