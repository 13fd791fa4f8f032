"""Order and time of the pipeline's tests.

``VERL_ADAPTIVE_E2E_MINUTES``: begin no test of the pipeline after so many minutes; those left over are skipped and say
so. CI sets it (``.ci/run``): on a machine with a slow disk a run takes three times as long, and CI ends after 90 minutes.
"""

from __future__ import annotations

import os
import time

import pytest

_BEGUN = time.monotonic()
_MINUTES = os.environ.get("VERL_ADAPTIVE_E2E_MINUTES")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The usual trainer first: what is skipped for lack of time are faults and asynchronous trainers."""
    items.sort(key=lambda item: "tests/e2e/" in item.nodeid and "test_pipeline" not in item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, which may be a run of minutes."""
    if _MINUTES and item.get_closest_marker("e2e") and time.monotonic() - _BEGUN >= 60 * float(_MINUTES):
        pytest.skip(f"VERL_ADAPTIVE_E2E_MINUTES={_MINUTES} are over; bash tests/run.sh -m e2e runs it")
