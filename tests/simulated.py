"""What a policy costs is simulated once or not at all, where a test is about something else than that number."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from verl_adaptive import simulate
from verl_adaptive.config import ResumeConfig, StoreConfig
from verl_adaptive.simulate import expected


@pytest.fixture(scope="session")
def simulated_once() -> Iterator[None]:
    """The same policy in the same world costs the same: most command lines differ in nothing that a simulation knows."""
    known: dict[bytes, Any] = {}

    def run(config: Any, *arguments: Any) -> Any:
        # a run's limit, past and folder play no part in a simulation
        plain = replace(config, total_rollouts=None, warm_start=None, resume=ResumeConfig(), store=StoreConfig())
        key = pickle.dumps((plain, arguments))
        if key not in known:
            known[key] = real(config, *arguments)
        return known[key]

    real = expected._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected, "_run", run)
        yield


@pytest.fixture
def not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy costs a fifth more than GRPO."""
    found = expected.Waiting(1.2, 1.2, 1.2, None, 1.0, None, 1.0, 0.5)
    monkeypatch.setattr(simulate, "expected_waiting", lambda *_, **__: found)
