"""For all tests and the processes that they start."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

from tests.forks import forks
from verl_adaptive import simulate
from verl_adaptive.cli import main
from verl_adaptive.config import ResumeConfig, StoreConfig
from verl_adaptive.simulate import expected

# An example takes as long as the machine is busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Ray's own is 15: beside two busy test processes its workers would hardly run, and a start-up would take minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# A worker holds a million objects of torch's, verl's and vLLM's, which stay: looking for cycles among them at Python's usual
# pace is a seventh of the time in which it imports them, and a fifth of composing a configuration.
gc.set_threshold(100_000, 50, 100)

# Composing verl's configuration reads thirty files of YAML, in Python a quarter of its time.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@pytest.fixture(scope="session")
def below_verl():
    """Programs that import verl, in forks of a process that has imported all but verl."""
    with forks() as python:
        yield python


@pytest.fixture
def call(capsys):
    """Run a command line: (status, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(w) for w in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def refusal(call):
    """Run a command line that must fail with one line; the line."""

    def run(*words: object, status: int = 1) -> str:
        got, out, err = call(*words)
        assert (got, out, err.count("\n")) == (status, "", 1), (got, out, err)
        return err

    return run


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


#: Files of tests that share a start-up of many seconds; one that is missing here makes a start-up of its own.
TOGETHER = {
    "queue": """
        integration/test_abort integration/test_arrivals integration/test_checkpoints integration/test_monitor
        integration/test_passes integration/test_sync_client integration/test_status_messages integration/test_async_client
    """,
    "below_verl": """
        cli/test_doctor integration/test_guard test_cpu_platform upstream/test_upstream
    """,
}
GROUP_OF = {f"tests/{name}.py": group for group, names in TOGETHER.items() for name in names.split()}


def pytest_collection_modifyitems(items):
    """The fixture that starts Ray marks the tests that it is for."""
    for item in items:
        if "started" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests go to one worker, with those of others that need its start-up: neither makes it twice, nor waits for it.

    Not ``--dist loadgroup``: pytest-xdist 3.8 writes its groups where pytest 9.2 no longer reads them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return GROUP_OF.get(file, file)

    return Together(config, log)
