"""One start-up of Ray and TransferQueue for all tests: each takes ten seconds of processor time or more.

:mod:`tests.conftest` gives all of them to one worker.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("verl") is None:  # only these can be imported
    names = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    collect_ignore = sorted(names - {"test_layout.py", "test_timings.py"})


@pytest.fixture(scope="session")
def started():
    import ray
    import transfer_queue as tq

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
