"""Runs that several tests look at; see :mod:`tests.e2e.starts`. Tests that look at the same stay on one worker."""

from __future__ import annotations

import pytest

from tests.e2e import starts
from tests.e2e.harness import Run

#: Fixtures that are start-ups of the pipeline.
STARTS = ("usual", "colocated", "short", "greedy", "faulty")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Name the group of a test by the start-up that it takes; one that takes it by name only says so itself.

    When a test is collected: once all are, pytest-xdist reads the groups, whoever's turn it is before.
    """
    for name in STARTS:
        if name in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(name))


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
