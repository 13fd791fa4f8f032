"""Snapshots follow verl's checkpoints: copied where verl copies, removed where verl removes, whole at any moment.

On a real TransferQueue, whose rows of groups that wait for more rollouts are part of a snapshot.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from torch.utils.data import SequentialSampler
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils import tensordict_utils as tu

from tests.integration.common import composed, empty, left
from tests.world import World, engine_of, run
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine import Engine
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration.compared_settings import IRRELEVANT, LOGGED, is_policy
from verl_adaptive.integration.dataloader import DataloaderPrompts
from verl_adaptive.integration.monitor import Monitor
from verl_adaptive.integration.resume import check_resume
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.integration.run_store import RunStore
from verl_adaptive.stats import Journal, read_snapshot
from verl_adaptive.stats.reader import JournalReader
from verl_adaptive.stats.snapshot import MARKER, SnapshotError, read_manifest, write_snapshot

COMMON = (
    "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=grpo adaptive.store.enabled=false"
)
PILOT = "+adaptive=pilot_commit adaptive.allocator.n_pilot=2 adaptive.allocator.form=pipelined"
ROWS = [
    {"data_source": "s", "prompt": [{"role": "user", "content": f"question {i}"}], "extra_info": {"id": i}}
    for i in range(40)
]


class NoGroups:
    """A rollout client without open groups, or a monitor that has seen nothing."""

    def state_dict(self) -> dict:
        return {}


def run_store_of(root, *words: str, preset: str = "+adaptive=grpo") -> tuple[RunStore, Engine]:
    """The store and the engine of a run that has taken two steps."""
    config = composed(preset, COMMON, f"trainer.default_local_dir={root}", *words)
    run_store = RunStore(config, RunPlan.of(config), ROWS)
    world = World((np.arange(40) + 0.5) / 40)
    engine = engine_of(run_store.adaptive, world, batch=4, n=4, table=run_store.table, keys=run_store.keys)
    run(engine, world, 2)
    return run_store, engine


def save(run_store, engine, checkpoint, step=2, monitor: object = NoGroups()) -> None:
    """As verl's loop does: our files, and once verl's are there, that both are of one save."""
    run_store.save(str(checkpoint), step, engine, NoGroups(), monitor)
    run_store.saved(str(checkpoint), step)


# -- removing and copying ---------------------------------------------------------------------------------------------


def saved(run_store, engine, root, step, model=True) -> Path:
    """One checkpoint as verl's loop makes it: our files, verl's, and what verl removes."""
    folder = root / f"global_step_{step}"
    save(run_store, engine, folder, step)
    if model:
        (folder / "actor").mkdir()
    return folder / "adaptive"


@pytest.mark.parametrize(
    ("option", "stays"),
    [
        ("trainer.max_actor_ckpt_to_keep=1", False),
        ("+trainer.remove_previous_ckpt_in_save=true", False),
        ("trainer.max_actor_ckpt_to_keep=null", True),  # somebody else removed the model
    ],
)
def test_snapshots_go_with_the_checkpoints_that_verl_removes(tmp_path, option, stays):
    run_store, engine = run_store_of(tmp_path, option)
    first = saved(run_store, engine, tmp_path, 1)
    run_store.prune(str(tmp_path))
    assert first.exists()
    second = saved(run_store, engine, tmp_path, 2)
    run_store.prune(str(tmp_path))
    assert first.exists()
    (tmp_path / "global_step_1" / "actor").rmdir()  # verl keeps the newest only
    run_store.prune(str(tmp_path))
    assert first.exists() is stays
    assert read_snapshot(second)[2]["meta"]["step"] == 2


def test_a_snapshot_stays_where_the_model_is_on_another_disk(tmp_path):
    """Nodes without a shared disk, or a model that is still being written: nothing in this folder is a checkpoint."""
    run_store, engine = run_store_of(tmp_path, "trainer.max_actor_ckpt_to_keep=1")
    folders = []
    for step in (1, 2, 3):
        folders.append(saved(run_store, engine, tmp_path, step, model=False))
        run_store.prune(str(tmp_path))
    assert all(read_snapshot(folder) for folder in folders)
    (tmp_path / "global_step_3" / "actor").mkdir()  # it arrived
    run_store.prune(str(tmp_path))
    (tmp_path / "global_step_3" / "actor").rmdir()  # and is written anew under the same name
    run_store.prune(str(tmp_path))
    assert folders[2].exists()


def test_snapshots_of_an_earlier_process_stay_with_theirs(tmp_path):
    run_store, engine = run_store_of(tmp_path, "trainer.max_actor_ckpt_to_keep=1")
    first = saved(run_store, engine, tmp_path, 1, model=False)
    # resumed on another node: step 1's model is not on this one's disk
    run_store, engine = run_store_of(tmp_path, "trainer.max_actor_ckpt_to_keep=1")
    saved(run_store, engine, tmp_path, 2)
    run_store.prune(str(tmp_path))
    run_store.prune(str(tmp_path))
    assert first.exists()


def test_a_snapshot_is_copied_where_verl_copies_its_checkpoints(tmp_path, monkeypatch, caplog):
    """A step that was saved twice landed as adaptive/adaptive, and the older snapshot was resumed."""
    from verl.utils import hdfs_io

    run_store, engine = run_store_of(tmp_path, f"trainer.default_hdfs_dir={tmp_path}/remote")
    for _ in range(2):
        save(run_store, engine, tmp_path / "local" / "global_step_3", 3)
    remote = tmp_path / "remote" / "global_step_3" / "adaptive"
    assert np.array_equal(read_snapshot(remote)[0].col("visits"), engine.table.col("visits"))
    newest = read_snapshot(tmp_path / "local" / "global_step_3" / "adaptive")[2]
    assert read_snapshot(remote)[2] == newest and not (remote / "adaptive").exists()
    copy = hdfs_io.copy
    for name in ("state", "manifest", "prompts"):  # of hdfs, which refuses one of the files
        monkeypatch.setattr(hdfs_io, "copy", lambda src, dst, name=name: f"/{name}" not in src and copy(src, dst))
        engine.table.col("visits")[0] += 1
        save(run_store, engine, tmp_path / "local" / "global_step_3", 3)
        assert "trainer.default_hdfs_dir: the statistics of step 3 are not in" in caplog.text
        with pytest.raises(SnapshotError, match="not of one save"):  # the weights there are the newer ones
            run_store.load(str(remote.parent), 3)


def test_the_alarms_state_is_part_of_a_snapshot(tmp_path):
    run_store, engine = run_store_of(tmp_path)
    monitor = Monitor(run_store.adaptive, engine, longest=10, tracking=lambda: None)
    save(run_store, engine, tmp_path, 2, monitor)
    assert run_store.load(str(tmp_path), 2)["monitor"]["alarms"]["names"] == engine.table.sources


def test_weights_and_statistics_are_of_one_save_whatever_comes_after_them(tmp_path):
    """verl's checkpoint callback, which uploads, comes last: if it fails or is killed, the checkpoint is whole."""
    run_store, engine = run_store_of(tmp_path)
    saved(run_store, engine, tmp_path, 2)  # went back by one save interval, and on
    rows = [{"number": i} for i in range(8)]
    made = object.__new__(get_trainer_cls("sync").adaptive())
    made.run_store, made.engine, made.rollout_client, made._monitor = run_store, engine, NoGroups(), NoGroups()
    made.config = OmegaConf.create(
        {"trainer": {"default_local_dir": str(tmp_path), "default_hdfs_dir": None}, "actor_rollout_ref": {"actor": {}}}
    )
    made.stream = DataloaderPrompts(rows, SequentialSampler(rows), chunk=1, workers=0)
    made.train_dataloader, made.global_steps, made.use_critic, made.trainer_mode = made.stream.loader, 2, False, "sync"
    calls: list[str] = []

    def on_save(**_: object) -> None:
        raise OSError("503 Slow Down")

    def save_checkpoint(path: str, *_: object, **__: object) -> None:
        # the weights there are not yet this save's: killed now, resume said nothing
        with pytest.raises(SnapshotError, match=r"not of one save.*adaptive\.resume\.allow=\[interrupted\]"):
            run_store.load(os.path.dirname(path), 2)
        run_store.adaptive.resume.allow = ["interrupted"]
        assert run_store.load(os.path.dirname(path), 2) is not None
        run_store.adaptive.resume.allow = []
        calls.append(path)

    made.actor_rollout_wg = SimpleNamespace(save_checkpoint=save_checkpoint)
    made.checkpoint_callback = SimpleNamespace(on_save=on_save)
    with pytest.raises(OSError, match="503"):
        made._save_checkpoint()
    assert len(calls) == 1 and (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert run_store.load(str(tmp_path / "global_step_2"), 2) is not None
    pruned: list[str] = []
    run_store.prune, made.checkpoint_callback.on_save = pruned.append, lambda **_: None
    made._save_checkpoint()
    assert pruned == [str(tmp_path)]  # after each save


# -- settings -----------------------------------------------------------------------------------------------------------

OTHERS = {
    "adaptive.seed": 7,
    "adaptive.signal": "acc",
    "adaptive.success.mode": "value",
    "adaptive.success.threshold": 0.9,
    "adaptive.success.low": -1.0,
    "adaptive.success.high": 2.0,
    "adaptive.tolerance": 0.1,
    "adaptive.id_key": "extra_info.id",
    "adaptive.stale_discount": 0.5,
    "adaptive.refill": False,
    "adaptive.batch_unit": "rollouts",
    "adaptive.min_sessions": 0.25,
    "adaptive.max_rounds": 3,
    "adaptive.max_rollouts_per_step": 1000,
    "adaptive.total_rollouts": 10**6,
    "adaptive.on_exhausted": "raise",
    "adaptive.skip_zero_advantage": False,
    "data.train_batch_size": 8,
    "actor_rollout_ref.rollout.n": 8,
    "trainer.v1.trainer_mode": "colocate_async",
    "algorithm.adv_estimator": "rloo",
    "data.shuffle": False,
}


@pytest.mark.parametrize("key", OTHERS)
def test_a_resume_under_other_settings(tmp_path, key, caplog):
    caplog.set_level(logging.INFO, "verl_adaptive")
    first, engine = run_store_of(tmp_path)
    save(first, engine, tmp_path / "c")
    run_store, _ = run_store_of(tmp_path, f"{key}={OTHERS[key]}")
    said = f"{key} was {first.plan.settings[key]!r}, is {OTHERS[key]!r}"
    allow = run_store.adaptive.resume.allow = ["dataset"] if key.endswith("id_key") else []
    if key not in LOGGED:
        with pytest.raises(SnapshotError) as caught:
            run_store.load(str(tmp_path / "c"), 2)
        assert said in str(caught.value) and "adaptive.resume.allow=[settings]" in str(caught.value)
        allow += ["settings", "mode"]
    assert run_store.load(str(tmp_path / "c"), 2) is not None
    assert said in caplog.text


@pytest.mark.parametrize(
    ("under_way", "mode", "said"),
    [
        ({"flight": 5, "ready": 2}, "sync", "5 prompts in flight and 2 groups ready to train"),
        ({"flight": 0, "ready": 1}, "sync", "0 prompts in flight and 1 groups"),
        ({"flight": 5}, "colocate_async", ""),
        ({}, "sync", ""),
    ],
)
def test_a_mode_that_cannot_go_on_is_refused_before_a_model_is_loaded(tmp_path, under_way, mode, said, monkeypatch):
    run_store, engine = run_store_of(tmp_path)
    monkeypatch.setattr(type(engine), "under_way", under_way)
    save(run_store, engine, tmp_path / "c")
    folder = tmp_path / "c" / "adaptive"
    plan = run_store_of(tmp_path, f"trainer.v1.trainer_mode={mode}")[0].plan
    if not said:
        check_resume(folder, read_manifest(folder), plan, 2)
        return
    with pytest.raises(AdaptiveError, match=said):
        check_resume(folder, read_manifest(folder), plan, 2)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("policy", "adaptive.filter.name was 'keep_all', is 'informative'"),
        ("dataset", "the data set's fingerprint is "),
    ],
)
def test_another_policy_or_data_set_is_refused_unless_it_is_accepted(tmp_path, word, said, caplog):
    run_store, engine = run_store_of(tmp_path)
    save(run_store, engine, tmp_path / "c")
    other, _ = run_store_of(tmp_path, *(["adaptive/filter=informative"] if word == "policy" else []))
    if word == "dataset":
        other.fingerprint = "another"
    with pytest.raises(SnapshotError) as caught:
        other.load(str(tmp_path / "c"), 2)
    assert said in str(caught.value) and f"adaptive.resume.allow=[{word}]" in str(caught.value)
    assert "manifest.json" in str(caught.value)
    other.adaptive.resume.allow = ["policy", "dataset"]
    assert other.load(str(tmp_path / "c"), 2) is not None and said in caplog.text


def test_the_snapshot_of_another_step_is_never_accepted(tmp_path):
    run_store, engine = run_store_of(tmp_path)
    save(run_store, engine, tmp_path / "c")
    run_store.adaptive.resume.allow = ["policy", "dataset", "settings", "mode", "interrupted"]
    with pytest.raises(SnapshotError, match="step is 2, this run has 3$"):
        run_store.load(str(tmp_path / "c"), 3)
    (tmp_path / "c").rename(tmp_path / "global_step_3")  # and is refused before a model is loaded
    (tmp_path / MARKER).write_text("3")
    with pytest.raises(SnapshotError, match="step is 2, this run has 3$"):
        run_store.check_start()


def test_every_setting_is_compared_or_named(tmp_path):
    """An option that is added later is compared, unless somebody says why not."""
    run_store, _ = run_store_of(tmp_path)
    found = run_store.plan.settings
    compared = {key.split(".")[1] for key in found if key.startswith("adaptive.")}
    assert compared | set(IRRELEVANT) == set(vars(AdaptiveConfig())) and not compared & set(IRRELEVANT)
    assert {key for key in found if not is_policy(key)} == set(OTHERS) >= LOGGED


def test_all_differences_are_named_at_once_and_equal_ones_are_none(tmp_path, caplog):
    caplog.set_level(logging.INFO, "verl_adaptive")
    run_store, engine = run_store_of(tmp_path)
    save(run_store, engine, tmp_path / "c")
    run_store, _ = run_store_of(tmp_path)
    assert run_store.load(str(tmp_path / "c"), 2) is not None and " was '" not in caplog.text
    run_store, _ = run_store_of(tmp_path, "adaptive.seed=1 adaptive.signal=acc data.train_batch_size=8")
    with pytest.raises(
        SnapshotError, match=r"seed was 0, is 1; .*signal was 'reward', is 'acc'; .*batch_size was 4, is 8"
    ):
        run_store.load(str(tmp_path / "c"), 2)


def put(*keys: str) -> None:
    """Rows of rollouts, as a queue between two steps has them."""
    empty()
    rows = [{"input_ids": torch.arange(5) + i, "uid": key} for i, key in enumerate(keys)]
    tags = [{"status": "finished"}] * len(rows)
    tq.kv_batch_put(keys=list(keys), partition_id="train", fields=tu.list_of_dict_to_tensordict(rows), tags=tags)


@pytest.fixture
def held(queue, tmp_path):
    """A run with groups that wait for more rollouts, saved at step 2."""
    run_store, engine = run_store_of(tmp_path, preset=PILOT)
    assert len(engine.held)
    put("a_0", "b_0")
    save(run_store, engine, tmp_path / "c")
    return run_store, engine, tmp_path / "c"


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "added", "gone", "pipe"])
def test_damaged_rows_are_refused_by_name(held, damage):
    run_store, _, checkpoint = held
    (folder,) = (checkpoint / "adaptive").glob("transfer_queue-*")
    victim = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "flip":
        victim.write_bytes(data)
    elif damage == "cut":
        victim.write_bytes(data[:-1])
    elif damage == "added":
        victim = folder / "more.pkl"
        victim.write_bytes(b"")
    elif damage == "gone":
        shutil.rmtree(folder)
        victim = folder
    else:
        victim.unlink()
        if damage == "pipe":
            os.mkfifo(victim)
    with pytest.raises(SnapshotError, match=r"is damaged .*resume from an earlier checkpoint") as caught:
        run_store.load(str(checkpoint), 2)
    assert str(victim) in str(caught.value)
    table, _, _ = read_snapshot(checkpoint / "adaptive")  # for people, who need no rows
    assert len(table) == 40


@pytest.mark.parametrize("when", ["queue", "hashes", "manifest"])
def test_an_interrupted_save_over_another_leaves_that_whole(held, when, monkeypatch):
    run_store, engine, checkpoint = held
    put("c_0")

    def stops(*_, **__):
        raise KeyboardInterrupt

    def stops_half_way(path, **_):
        (Path(path).with_name(Path(path).name + ".tmp")).mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if when == "queue":
            patch.setattr(tq, "save_checkpoint", stops_half_way)
        elif when == "hashes":
            patch.setattr("verl_adaptive.stats.snapshot._sealed", stops)
        else:
            patch.setattr("verl_adaptive.stats.snapshot._seal", stops)
        with pytest.raises(KeyboardInterrupt):
            save(run_store, engine, checkpoint)
    assert run_store.load(str(checkpoint), 2) is not None
    assert left() == {"a_0", "b_0"}
    put("d_0")
    save(run_store, engine, checkpoint)
    assert len(list((checkpoint / "adaptive").glob("transfer_queue*"))) == 1  # what was left behind is gone
    assert run_store.load(str(checkpoint), 2) is not None
    assert left() == {"d_0"}


def test_a_save_without_waiting_groups_leaves_no_queue(held):
    run_store, _, checkpoint = held
    _, plain = run_store_of(checkpoint)
    run_store.table = plain.table
    save(run_store, plain, checkpoint)
    assert not list((checkpoint / "adaptive").glob("transfer_queue*"))
    assert "attached" not in json.loads((checkpoint / "adaptive" / "manifest.json").read_text())


def test_a_shared_folder_that_has_a_run_of_this_name_refuses_another(tmp_path) -> None:
    """Two users with verl's default names: the second would take the first one's place. It was said once the model was loaded."""
    shared = ("adaptive.store.enabled=true", f"adaptive.store.dir={tmp_path}/shared")
    run_store, engine = run_store_of(tmp_path / "one", *shared)
    with run_store.journal:
        run_store.begin(0)
        assert run_store.argument == run_store.plan.place.folder  # what our commands read
        checkpoint = saved(run_store, engine, tmp_path / "one", 2).parent
    for words in ((), ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")):
        other, _ = run_store_of(tmp_path / "two", *shared, *words)
        with other.journal:
            if words:  # a resume, from checkpoints that have moved
                other.check_start()
                meta = json.loads((checkpoint / "adaptive" / "manifest.json").read_text())["meta"]
                meta |= {"attempt": "of another journal"}
                write_snapshot(checkpoint / "adaptive", other.table, {}, meta=meta)
                (checkpoint / "adaptive" / "saved").write_text(meta["nonce"])
            with pytest.raises(
                AdaptiveError, match=r"the journal of a run with its checkpoints in \S*/one; .*experiment_name"
            ):
                other.check_start()


def test_a_resume_goes_on_in_the_journal_from_the_attempt_that_saved(tmp_path) -> None:
    """It went on from the newest one: a start-over by mistake, killed before its first save, became the run's history."""
    run_store, engine = run_store_of(tmp_path)
    for step in (0, 0, 2):
        with Journal(tmp_path / "adaptive") as run_store.journal:
            if step:
                run_store.load(str(tmp_path / "c"), step)
            run_store.begin(step)
            if run_store.journal.attempt == 0:
                save(run_store, engine, tmp_path / "c")
    assert [said["parent"] for said in JournalReader(tmp_path / "adaptive").attempts] == [None, None, 0]
    assert run_store.origin == "resumed at step 2: 8 prompts known"  # two batches of four


def test_rows_from_a_queue_of_another_size_say_what_to_set_back(held, monkeypatch) -> None:
    run_store, _, checkpoint = held

    def refuses(path):
        raise ValueError("Storage unit count mismatch: checkpoint has 8, current system has 4.")

    monkeypatch.setattr(tq, "load_checkpoint", refuses)
    with pytest.raises(SnapshotError, match=r"has 8, current system has 4\. Set transfer_queue.*storage_units back$"):
        run_store.load(str(checkpoint), 2)


def test_a_warm_start_counts_before_the_first_step_only(tmp_path) -> None:
    """Resume was refused when its source was gone."""
    run_store, engine = run_store_of(tmp_path, f"adaptive.warm_start={tmp_path}/gone")
    saved(run_store, engine, tmp_path, 2)
    with pytest.raises(ConfigError, match=r"^adaptive\.warm_start=.*/gone.*; leave it out"):
        run_store.check_start()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    run_store.check_start()
    run_store.fingerprint = "another"
    with pytest.raises(SnapshotError, match=r"data set's fingerprint.*allow=\[dataset\]"):
        run_store.check_start()
