"""The store as baseline on the real pipeline: one rollout a prompt, the rollouts and the updates of GRPO."""

from __future__ import annotations

import pytest

from tests.e2e.harness import balanced, optimizer_updates, replays
from verl_adaptive.stats import read_snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]


def test_as_many_rollouts_and_updates_as_grpo(usual):
    run = usual.solo
    assert run.code == 0, run.tail
    assert "128 groups of 1; 2 optimizer updates" in run.log
    assert len(run.steps) == 6
    for m in run.steps:  # GRPO's 16 prompts of 8
        assert m["adaptive/rollouts/generated_total"] == m["adaptive/rollouts/trained_total"] == 128
        assert m["adaptive/groups/trained_total"] == 128 and m["adaptive/updates_total"] == 2
        assert m["adaptive/padding_rows_total"] == 0
        assert m["adaptive/advantage/scale"] > 0
    assert optimizer_updates(run, 6) == 12
    balanced(run)
    replays(run, 6)
    table, state, _ = read_snapshot(run.folder / "checkpoints" / "global_step_6" / "adaptive")
    visited = table.col("visits") > 0
    assert ((table.col("memory.count") > 0) == visited).all() and ((table.col("spread.count") > 0) == visited).all()
    assert table.col("visits").sum() == 6 * 128
    assert state["engine"]["policy"]["advantage"]["state"]["scale"]["sums"][0] > 0
    assert abs(run.steps[-1]["critic/advantages/mean"]) < 1.0


def test_solo_in_small_groups_under_a_penalty_asynchronously(colocated):
    """Rows are never left out, so a KL penalty and an entropy bonus act on all of them; the window is in groups."""
    run = colocated.solo
    assert run.code == 0, run.tail
    assert "64 groups of 2; 2 optimizer updates" in run.log
    for m in run.steps:
        assert m["adaptive/rollouts/trained_total"] == 128 and m["adaptive/updates_total"] == 2
    balanced(run)
    replays(run, 3)
