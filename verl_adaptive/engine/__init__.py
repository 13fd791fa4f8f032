"""The engines: they run the four roles through a step, and know neither verl nor a clock.

Two drivers, composed of one :mod:`prompt_source <verl_adaptive.engine.prompt_source>` (which prompts come next) and one
:mod:`tracker <verl_adaptive.engine.group_tracker>` (open groups), behind one interface (:class:`~verl_adaptive.engine.base.Engine`):

* :class:`OrderedEngine`: a group is reviewed when it is back, and commits when all before it have; of the ``sync`` trainer;
* :class:`AsyncEngine`: for trainers that generate all the time.
"""

from __future__ import annotations

from typing import Any

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine.asynchronous import AsyncEngine, AsyncFacts
from verl_adaptive.engine.base import Engine
from verl_adaptive.engine.ordered import OrderedEngine
from verl_adaptive.engine.steps import Closed, Listener, PromptStream, Requests, StepResult
from verl_adaptive.policy import Policy
from verl_adaptive.stats.table import StatsTable

__all__ = [
    "AsyncEngine",
    "AsyncFacts",
    "Closed",
    "Engine",
    "Listener",
    "OrderedEngine",
    "PromptStream",
    "Requests",
    "StepResult",
    "make_engine",
]


def make_engine(
    policy: Policy,
    table: StatsTable,
    config: AdaptiveConfig,
    *parts: Any,
    async_facts: AsyncFacts | None = None,
    **more: Any,
) -> Engine:
    """The engine of a trainer mode.

    Args:
        policy, table, config, parts, more: as :class:`Engine`.
        async_facts: how an asynchronous trainer takes its batches; None: verl's ``sync`` trainer, or a simulation of it.
    """
    if async_facts is not None:
        return AsyncEngine(policy, table, config, *parts, async_facts=async_facts, **more)
    return OrderedEngine(policy, table, config, *parts, **more)
