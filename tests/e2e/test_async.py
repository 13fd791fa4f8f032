"""verl's asynchronous trainers on the real pipeline: the same presets, nothing lost, nothing counted twice."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.faults import MODES
from tests.e2e.harness import ProcessRun, groups_of, optimizer_updates, replays, train, trained_groups, trains
from tests.e2e.starts import MIXED, PRESETS
from verl_adaptive.stats import open_run, read_snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]

COLOCATE, SEPARATE = MODES["colocate_async"], MODES["separate_async"]


def state_of(run: ProcessRun, step: int) -> tuple:
    table, state, _ = read_snapshot(run.folder / "checkpoints" / f"global_step_{step}" / "adaptive")
    return table, state["engine"]


def observed_once(run: ProcessRun, step: int) -> None:
    """The statistics of a checkpoint are the journal's observations plus the groups that are ready to train."""
    table, engine = state_of(run, step)
    ready = engine["asynchronous"]["ready"]
    store = open_run(run.folder / "checkpoints" / "adaptive")
    seen = groups_of(store)
    assert store.steps.column("step").to_pylist() == list(range(1, step + 1))
    good = seen[~seen["failed"].astype(bool)]
    assert table.col("visits").sum() == len(good) + len(ready["row"])
    rollouts = int(np.diff(ready["offsets"]).sum())
    assert table.col("rollouts").sum() == good["n"].sum() + rollouts
    submissions = np.concatenate(
        [seen["submission"], ready["submission"], engine["asynchronous"]["flight"]["submission"]]
    )
    assert (
        len(np.unique(submissions)) == len(submissions) == engine["submission"]
    )  # every group that was ever asked for, once


def went_on(first: ProcessRun, second: ProcessRun, steps: int) -> tuple[ProcessRun, ProcessRun, int]:
    """What holds of a run that was killed, and of the one that went on from its checkpoint."""
    assert first.code == -9, first.tail
    assert second.code == 0, second.tail
    saved = int(second.steps[0]["training/global_step"]) - 1
    assert saved >= 2 and saved % 2 == 0  # steps 2, 4 and 6 are saved; it was killed after the third
    _, before = state_of(first, saved)
    assert [int(m["training/global_step"]) for m in second.steps] == list(range(saved + 1, steps + 1))
    account = second.steps[0]
    held = sum(len(before["asynchronous"][name]["reward"]) for name in ("open", "ready"))
    out = sum(account[f"adaptive/rollouts/{k}"] for k in ("trained_total", "dropped_total", "held"))
    assert account["adaptive/rollouts/generated_total"] + held == out
    replays(second, steps)
    observed_once(second, steps)
    return first, second, saved


def test_colocated_pilots_survive_a_kill(colocated):
    """Top-ups, partial rollouts and prompts in flight go on after SIGKILL and resume."""
    first, second, saved = went_on(*colocated.pilots, 6)
    _, engine = state_of(first, saved)
    assert len(engine["asynchronous"]["flight"]["submission"]) > 0
    for run in (first, second):
        assert set(run.series("adaptive/updates_total")) == {2.0}
    assert optimizer_updates(second, 6) == 12
    # pilots and commits train as one group of 8
    assert set(trained_groups(second, 6).values()) == {8}


def test_parts_of_several_presets_train_colocated(colocated):
    trains_all(colocated.mixed)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "preset, mode",
    [*(("pilot_commit", mode) for mode in MODES), ("solo", "sync"), ("sao", "sync"), ("sao", "separate_async")],
)
def test_killed_again_and_again(preset, mode, tmp_path):
    """Three SIGKILLs in one run of ten steps, with a critic, too; every group is observed once all the same."""
    chosen = PRESETS.get(preset, (f"+adaptive={preset}",))
    words = (*chosen, *MODES[mode], "trainer.total_training_steps=10", "trainer.save_freq=1")
    for _ in range(3):
        assert train(tmp_path, *words, "adaptive.record=true", kill_at=2).code == -9
    last = train(tmp_path, *words, "adaptive.record=true")
    assert last.code == 0, last.tail
    replays(last, 10)
    table, engine = state_of(last, 10)
    store = open_run(tmp_path / "checkpoints" / "adaptive")
    seen = groups_of(store)
    assert store.steps.column("step").to_pylist() == list(range(1, 11))
    assert sorted(seen["submission"]) == list(range(engine["submission"]))
    assert table.col("visits").sum() == (~seen["failed"].astype(bool)).sum()
    total = engine["total"]["rollouts"]
    assert table.col("rollouts").sum() == total["generated"] - total["dropped"].get("aborted", 0)


#: Of the longer matrix: what chooses a trainer mode → presets.
LONGER = {
    MODES["sync"]: ("spo",),
    COLOCATE: ("grpo", "dapo", "greso", "aero", "spo", "sao"),
    (*COLOCATE, "trainer.v1.colocate_async.num_warmup_batches=0"): ("cero",),
    SEPARATE: ("grpo", "dapo", "aero", "pilot_commit", "mixed", "solo", "spo", "sao"),
    (*SEPARATE, "trainer.v1.separate_async.num_warmup_batches=0"): ("cero",),
    (*SEPARATE, "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"): ("greso",),
}


@pytest.mark.parametrize(
    ("preset", "mode"),
    [("greso", SEPARATE)]
    + [pytest.param(name, mode, marks=pytest.mark.matrix) for mode, names in LONGER.items() for name in names],
)
def test_preset_trains(preset, mode, tmp_path):
    words = MIXED if preset == "mixed" else PRESETS.get(preset, (f"+adaptive={preset}",))
    run = train(tmp_path, *words, *mode, "trainer.total_training_steps=3", "adaptive.record=true")
    trains_all(run)
    if preset == "greso" and mode == SEPARATE:  # trainer and rollout on different workers, two mini-steps a step
        assert set(run.series("adaptive/updates_total")) == {2.0}
        assert max(abs(k) for k in run.series("actor/ppo_kl")) > 0  # old log-probs are not those being trained


def trains_all(run: ProcessRun) -> None:
    """Nothing is generated that no step could train on."""
    trains(run, 3)
    assert run.steps[-1]["adaptive/rollouts/held"] == 0
