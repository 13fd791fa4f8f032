"""For all tests and the processes that they start."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# An example takes as long as the machine is busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Ray's own is 15: beside two busy test processes its workers would hardly run, and a start-up would take minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# A worker holds a million objects of torch's, verl's and vLLM's, which stay: looking for cycles among them at Python's usual
# pace is a seventh of the time in which it imports them, and a fifth of composing a configuration.
gc.set_threshold(100_000, 50, 100)

#: Files of tests that share a start-up of many seconds; one that is missing here makes a start-up of its own.
TOGETHER = {
    "queue": ("abort", "arrivals", "checkpoints", "passes", "session", "stream_session", "monitor"),
    "upstream": ("upstream",),
}
GROUP_OF = {f"test_{name}.py": group for group, names in TOGETHER.items() for name in names}


def pytest_collection_modifyitems(items):
    """The fixture that starts Ray marks the tests that it is for."""
    for item in items:
        if "started" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker makes a shared start-up and runs what needs it; neither makes it twice, nor waits for the other's.

    Not ``--dist loadgroup``: pytest-xdist 3.8 writes its groups where pytest 9.2 no longer reads them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder, _, name = nodeid.partition("::")[0].rpartition("/")
            shared = folder in ("tests/integration", "tests/upstream")
            return GROUP_OF.get(name, nodeid) if shared else nodeid

    return Together(config, log)
