"""For all tests and the processes that they start."""

from __future__ import annotations

import gc
import os

import pytest
import yaml
from hypothesis import HealthCheck, settings

from tests.forks import forks

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
