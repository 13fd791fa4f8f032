"""Runs that several tests look at; see :mod:`tests.e2e.starts`."""

from __future__ import annotations

import pytest

from tests.e2e import starts
from tests.e2e.harness import Run


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
