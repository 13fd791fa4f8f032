"""Command lines, and one run of each task for all that only look at what came of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from verl_adaptive.commands import simulate
from verl_adaptive.simulate.equal_budget import Task, run_task

_ROWS: dict[bytes, dict[str, Any]] = {}


def run_once(task: Task, tick: Callable[[float], None] | None = None) -> dict[str, Any]:
    """The row of a task, which depends on nothing else."""
    key = pickle.dumps(task)
    if key not in _ROWS:
        _ROWS[key] = run_task(task, tick)
    return copy.deepcopy(_ROWS[key])


@pytest.fixture
def runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of the command run once in this process."""
    monkeypatch.setattr(simulate, "run_task", run_once)
