"""Runs that several tests look at; see :mod:`tests.e2e.starts`."""

from __future__ import annotations

import pytest

from tests.e2e import starts
from tests.e2e.harness import ProcessRun


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory) -> starts.OneRank:
    return starts.one_rank(tmp_path_factory.mktemp("one-rank"))


@pytest.fixture(scope="session")
def greedy(one_rank) -> dict[str, ProcessRun]:
    return one_rank.greedy


@pytest.fixture(scope="session")
def usual(one_rank) -> starts.Usual:
    return one_rank.usual


@pytest.fixture(scope="session")
def colocated(one_rank) -> starts.Colocated:
    return one_rank.colocated


@pytest.fixture(scope="session")
def faulty(one_rank) -> dict[str, ProcessRun]:
    return one_rank.faulty


@pytest.fixture(scope="session")
def short(tmp_path_factory) -> dict[str, ProcessRun]:
    return starts.short(tmp_path_factory.mktemp("short"))
