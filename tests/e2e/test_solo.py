"""The store as baseline on the real pipeline: one rollout a prompt, the rollouts and the updates of GRPO."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.harness import replays, train
from tests.e2e.test_pipeline import balanced, optimizer_updates
from verl_adaptive.stats import read_snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_solo_is_killed_and_goes_on(tmp_path):
    overrides = ("+adaptive=solo", "trainer.total_training_steps=6", "trainer.save_freq=2", "adaptive.record=true")
    first = train(tmp_path, *overrides, kill_at=3)
    assert first.code == -9
    second = train(tmp_path, *overrides)
    assert second.code == 0, second.tail
    assert "128 groups of 1, 2 optimizer updates" in second.log
    for m in first.steps + second.steps:  # as many rollouts and updates as GRPO's 16 prompts of 8
        assert m["adaptive/rollouts/generated_total"] == m["adaptive/rollouts/trained_total"] == 128
        assert m["adaptive/groups/trained_total"] == 128 and m["adaptive/updates_total"] == 2
        assert m["adaptive/padding_rows_total"] == 0
        assert m["adaptive/advantage/scale"] > 0
    assert optimizer_updates(second, 6) == 12
    replays(second)
    table, state, _ = read_snapshot(tmp_path / "checkpoints" / "global_step_6" / "adaptive")
    visited = table.col("visits") > 0
    assert ((table.col("memory.count") > 0) == visited).all() and ((table.col("spread.count") > 0) == visited).all()
    assert table.col("visits").sum() == 6 * 128
    assert np.isfinite(state["engine"]["policy"]["advantage"]["state"]["square"])
    assert abs(second.steps[-1]["critic/advantages/mean"]) < 1.0


def test_solo_in_small_groups_under_a_penalty_asynchronously(tmp_path):
    """Rows are never left out, so a KL penalty and an entropy bonus act on all of them; the window is in groups."""
    run = train(
        tmp_path,
        *("+adaptive=solo", "adaptive.allocator.n=2", "trainer.v1.trainer_mode=colocate_async"),
        *("trainer.v1.colocate_async.num_warmup_batches=1", "trainer.total_training_steps=3", "adaptive.record=true"),
        *("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coeff=0.001"),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
    )
    assert run.code == 0, run.tail
    assert "64 groups of 2, 2 optimizer updates" in run.log
    for m in run.steps:
        assert m["adaptive/rollouts/trained_total"] == 128 and m["adaptive/updates_total"] == 2
    balanced(run)
    replays(run, 3)
