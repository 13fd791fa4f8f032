"""Snapshots follow verl's checkpoints: copied where verl copies, removed where verl removes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("verl")
from omegaconf import OmegaConf

from tests.world import make_engine, run
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.integration.run_store import RunStore
from verl_adaptive.stats import read_snapshot


class NoGroups:
    """A session without open groups."""

    def state_dict(self) -> dict:
        return {}


def run_store_of(root, keep, remote=None) -> tuple[RunStore, object]:
    engine, world = make_engine(batch=4, n=4, M=40)
    run(engine, world, 2)
    run_store = RunStore.__new__(RunStore)  # the parts that saving and pruning use, without a training set to read
    trainer = {"max_actor_ckpt_to_keep": keep, "default_hdfs_dir": remote}
    run_store.config = OmegaConf.create({"trainer": trainer})
    run_store.adaptive, run_store.table, run_store.fingerprint = AdaptiveConfig(), engine.table, "f"
    return run_store, engine


def test_snapshots_go_with_the_checkpoints_that_verl_removes(tmp_path):
    run_store, engine = run_store_of(tmp_path, keep=1)
    for step in (1, 2):
        run_store.save(str(tmp_path / f"global_step_{step}"), step, engine, NoGroups())
    (tmp_path / "global_step_2" / "actor").mkdir()  # verl kept the newest only
    run_store.prune(str(tmp_path))
    assert not (tmp_path / "global_step_1" / "adaptive").exists()
    assert read_snapshot(tmp_path / "global_step_2" / "adaptive")[2]["meta"]["step"] == 2


def test_a_snapshot_is_copied_where_verl_copies_its_checkpoints(tmp_path):
    run_store, engine = run_store_of(tmp_path, keep=None, remote=str(tmp_path / "remote"))
    run_store.save(str(tmp_path / "local" / "global_step_3"), 3, engine, NoGroups())
    table, _, _ = read_snapshot(tmp_path / "remote" / "global_step_3" / "adaptive")
    assert np.array_equal(table.col("visits"), engine.table.col("visits"))
