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
    from hydra import compose, initialize_config_module

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer", overrides=["transfer_queue.backend.SimpleStorage.num_data_storage_units=1"]
        ).transfer_queue
    tq.init(config)
    yield tq
    tq.close()
    ray.shutdown()


@pytest.fixture(scope="module")
def queue(started):
    """A queue that is empty when a module begins."""
    yield
    left = list((started.kv_list("train") or {}).get("train", {}))
    if left:
        started.kv_clear(keys=left, partition_id="train")
