"""The conformance suite on every database that is supported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stats.postgres import PostgresServer
from verl_adaptive.testing.stores import JournalSuite


class TestSQLite(JournalSuite):
    @pytest.fixture(params=["wal", "delete"])
    def make_url(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
        return lambda: f"sqlite:///{tmp_path}/journal.sqlite?journal_mode={request.param}"


class TestPostgreSQL(JournalSuite):
    @pytest.fixture
    def make_url(self, postgres: PostgresServer) -> Callable[[], str]:
        url = postgres.new_database()
        return lambda: url
