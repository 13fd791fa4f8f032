"""The simulator: policies against pools whose pass rates are known, through the package's own engine.

    >>> from verl_adaptive.simulate import PoolConfig, Setting, run_task, summarise, tasks
    >>> setting = Setting(batch=8, n=8, steps=10, budget=640)
    >>> rows = [run_task(t) for t in tasks(["grpo", "greso", "oracle_best"], [0], setting, PoolConfig(prompts=100))]
    >>> [entry["preset"] for entry in summarise(rows)]
    ['grpo', 'greso', 'oracle_best']

Rows are flat dictionaries: ``pandas.DataFrame(rows)``.
"""

from __future__ import annotations

from verl_adaptive.simulate.clock import ClockConfig
from verl_adaptive.simulate.driver import make_simulation
from verl_adaptive.simulate.equal_budget import CLOCK_LIMITS, LIMITS, Setting, Task, run_task, summarise, tasks
from verl_adaptive.simulate.expected import expected_waiting
from verl_adaptive.simulate.lengths import LengthConfig
from verl_adaptive.simulate.pools import PoolConfig, parse_pool
from verl_adaptive.simulate.presets import PEERS, REFERENCES, compose_preset, preset_names
from verl_adaptive.simulate.queueing import Machine
from verl_adaptive.simulate.traces import read_trace
from verl_adaptive.simulate.worlds import StaticWorld

__all__ = [
    "CLOCK_LIMITS",
    "LIMITS",
    "PEERS",
    "REFERENCES",
    "ClockConfig",
    "LengthConfig",
    "Machine",
    "PoolConfig",
    "Setting",
    "StaticWorld",
    "Task",
    "compose_preset",
    "expected_waiting",
    "make_simulation",
    "parse_pool",
    "preset_names",
    "read_trace",
    "run_task",
    "summarise",
    "tasks",
]
