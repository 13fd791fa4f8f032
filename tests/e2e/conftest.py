"""Runs that several tests look at; see :mod:`tests.e2e.starts`. Tests that look at the same run in one process."""

from __future__ import annotations

import pytest

from tests.e2e import starts
from tests.e2e.harness import Run

#: Start-ups whose tests are one half of all, by time; the other half runs beside it (tests/run.sh).
FIRST = ("usual", "greedy")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the first half; a test that takes one of these start-ups by name only says so itself."""
    if any(name in getattr(item, "fixturenames", ()) for name in FIRST):
        item.add_marker(pytest.mark.first)


@pytest.fixture(scope="session")
def usual(tmp_path_factory) -> starts.Usual:
    return starts.usual(tmp_path_factory.mktemp("usual"))


@pytest.fixture(scope="session")
def colocated(tmp_path_factory) -> starts.Colocated:
    return starts.colocated(tmp_path_factory.mktemp("colocated"))


@pytest.fixture(scope="session")
def short(tmp_path_factory) -> dict[str, Run]:
    return starts.short(tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="session")
def greedy(tmp_path_factory) -> dict[str, Run]:
    return starts.greedy(tmp_path_factory.mktemp("greedy"))


@pytest.fixture(scope="session")
def faulty(tmp_path_factory) -> dict[str, Run]:
    return starts.faulty(tmp_path_factory.mktemp("faulty"))
