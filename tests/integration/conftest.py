"""One start-up of Ray and TransferQueue for all tests: each takes ten seconds of processor time or more.

:mod:`tests.conftest` gives all of them to one worker.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def started():
    ray = pytest.importorskip("ray")
    tq = pytest.importorskip("transfer_queue")
    pytest.importorskip("verl")
    from tests.integration.common import composed

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    config = composed("transfer_queue.backend.SimpleStorage.num_data_storage_units=1").transfer_queue
    tq.init(config)
    yield tq
    tq.close()
    ray.shutdown()


@pytest.fixture
def queue(started):
    """A queue that is empty when a test begins."""
    from tests.integration.common import empty

    yield
    empty()
