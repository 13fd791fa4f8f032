from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def postgres() -> Iterator[object]:
    """A running server; see :mod:`tests.stats.postgres`."""
    if os.environ.get("VERL_ADAPTIVE_SKIP_POSTGRES") == "1":
        pytest.skip("VERL_ADAPTIVE_SKIP_POSTGRES=1")
    from tests.stats.postgres import HOW_TO, PostgresServer, find_binaries

    if find_binaries() is None:
        pytest.fail(HOW_TO, pytrace=False)
    with PostgresServer() as server:
        yield server
