"""Retirement: against a slow reference, reversible by default, permanent when asked for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.samplers.bound import bound, groups_of, known, progress_at
from tests.world import make_engine
from verl_adaptive.groups import Groups
from verl_adaptive.samplers.retire import Retire


def make_retire(M: int = 100, **options) -> Retire:
    return bound(Retire(options), M, n=4)


@pytest.mark.parametrize("options", [{}, dict(after=2, recheck=0.3), dict(threshold=0.75, after=3), dict(recheck=0.0)])
def test_decisions_equal_the_slow_reference_over_random_histories(options):
    rng = np.random.default_rng(len(str(options)))
    part = make_retire(**options)
    c, history = part.config, {row: [] for row in range(100)}
    for step in range(1, 200):
        progress = progress_at(step)
        rows, where = rng.permutation(100)[:40], 40 * step + np.arange(40)
        u = progress.draw.uniform("retire.gate", part.table.key_hi[rows], part.table.key_lo[rows], where)
        solved = [len(history[r]) >= c.after and all(x >= c.threshold for x in history[r][-c.after :]) for r in rows]
        passed = part.admit(rows, where, progress)
        assert passed.tolist() == [not s or x < c.recheck for s, x in zip(solved, u, strict=True)]
        assert (part.table.col("retired")[rows] > 0).tolist() == solved
        rows = rows[passed]
        if step % 7 == 0:
            rows = np.concatenate([rows, rows[:5]])  # a prompt can come twice in a round
        correct = rng.binomial(4, np.where(rows % 2, 0.95, 0.6))
        part.observe(groups_of(rows, correct, np.full(len(rows), 4)), progress)
        for row, k in zip(rows, correct, strict=True):
            history[row].append(k / 4)


def test_a_retired_prompt_comes_back_when_it_falls_short():
    part = make_retire(2, recheck=1.0)
    part.observe(Groups.from_lists([0, 1], [[1.0] * 4, [1.0] * 4]), progress_at(1))
    assert part.table.col("retired").tolist() == [1, 1]
    part.observe(Groups.from_lists([0, 1], [[1.0, 1.0, 0.0, 1.0], [1.0] * 4]), progress_at(2))
    assert part.table.col("retired").tolist() == [0, 1]
    part.end_step(progress_at(2))
    metrics = part.metrics()
    assert metrics["brought_back_total"] == 1.0 and metrics["newly_retired_total"] == 2.0
    assert metrics["retired_share"] == 0.5


def test_prompts_that_a_warm_start_knows_to_be_solved_begin_retired():
    counts = {"rollouts": [0, 8, 8, 3, 16, 4], "successes": [0, 8, 7, 3, 16, 4 - 1e-12]}
    table = known(**counts, last_rate=[np.nan, 1, 1, 1, 0.5, 1])
    part = bound(Retire({"recheck": 0.0}), 6, n=4, table=table)
    assert table.col("retired").tolist() == [0, 1, 0, 0, 0, 1]  # not known, solved, nearly, too few, not lately, solved
    assert part.col("solved").tolist() == [0, 2, 0, 0, 0, 1]
    assert part.admit(np.arange(6), np.arange(6), progress_at(1)).tolist() == [True, False, True, True, True, False]


def test_a_threshold_and_a_run_of_visits_hold_for_a_warm_start_too():
    table = known(rollouts=[8, 12, 12], successes=[8.0, 10.8, 10.0], last_rate=[1.0, 0.9, 0.9])
    bound(Retire({"after": 3, "threshold": 0.9}), 3, n=4, table=table)
    assert table.col("retired").tolist() == [0, 1, 0]


def test_with_pilots_as_many_rollouts_as_pilots_tell_enough():
    table = known(rollouts=[2, 1], successes=[2.0, 1.0], last_rate=[1.0, 1.0])
    make_engine("retire", "pilot_commit", "band", batch=1, n=8, M=2, table=table)
    assert table.col("retired").tolist() == [1, 0]


def test_a_resume_leaves_alone_what_came_back_since_the_warm_start():
    table = known(rollouts=[8, 8], successes=[8.0, 8.0], last_rate=[1.0, 1.0])
    part = bound(Retire(), 2, n=4, table=table)
    short = Groups.from_lists([0], [[0.0, 1.0, 1.0, 1.0]])
    table.observe(short, 1, tolerance=1e-6)
    part.observe(short, progress_at(1))
    bound(Retire(), 2, n=4, table=table)
    assert table.col("retired").tolist() == [0, 1] and table.col("retire.solved").tolist() == [0, 2]
