"""Faults in the real pipeline: each ends as docs/store.md#when-something-breaks says, nothing hangs, no count is lost, no statistic poisoned."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from tests.e2e import starts
from tests.e2e.faults import (
    AGENT_LOOP,
    MODES,
    QUEUE,
    ROLLOUT_SERVER,
    Killer,
    changed_data,
    failed_run,
    reward,
    sound,
)
from tests.e2e.harness import replays, train
from verl_adaptive.stats import read_snapshot
from verl_adaptive.stats.keys import key_hex

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]
matrix = pytest.mark.matrix
#: The asynchronous modes belong to the longer matrix; tests/integration breaks them on a real TransferQueue by default.
everywhere = pytest.mark.parametrize("mode", ["sync", *(pytest.param(m, marks=matrix) for m in MODES if m != "sync")])


@pytest.fixture(scope="session")
def faulty_runs(tmp_path_factory, request):
    """Trainer mode → runs under faults, made once."""

    @functools.cache
    def of(mode):
        if mode == "sync":
            return request.getfixturevalue("faulty")
        return starts.faulty(tmp_path_factory.mktemp(f"faulty-{mode}"), mode)

    return of


@everywhere
def test_rollouts_that_come_back_wrong_empty_or_not_at_all(mode, faulty_runs):
    """An agent loop that returns nothing or raises; NaN, exceptions, None and strings from the reward function."""
    run = faulty_runs(mode)["faulty"]
    assert run.code == 0, run.tail
    sound(run, 2)
    replays(run, 2)
    assert (
        sum(run.series("adaptive/groups/failed_total")) > 0
        and "failed, with less than adaptive.min_sessions" in run.log
    )
    # the rollouts that did come back of a failed group are accounted for
    assert sum(run.series("adaptive/rollouts/dropped_total/failed")) > 0


@everywhere
def test_a_reward_function_that_hangs(mode, faulty_runs):
    """A sample never gets its reward: adaptive.stall_timeout ends the run and says what it is waiting for."""
    run = faulty_runs(mode)["hangs"]
    assert run.code not in (0, None), run.tail
    assert re.search(r"no rollout has finished for adaptive\.stall_timeout=15 s; still waiting for \d+ of \d+", run.log)
    assert re.search(r"the reward function( or a tool)? hangs", run.log)


def _dies(mode, tmp_path, victim):
    chosen, begun = reward(tmp_path, "time.sleep(2)\nreturn float(kind > 12)")
    with Killer(victim, begun.exists) as killer:
        run = failed_run(tmp_path, "+adaptive=dapo", *MODES[mode], chosen, "adaptive.stall_timeout=600")
    assert killer.killed is not None, run.tail
    return run


@everywhere
def test_an_agent_loop_worker_that_is_killed(mode, tmp_path, request):
    run = request.getfixturevalue("short")["killed"] if mode == "sync" else _dies(mode, tmp_path, AGENT_LOOP)
    assert run.code not in (0, None), run.tail
    assert re.search(r"AdaptiveError.*agent.loop", run.log), run.tail


@matrix
@everywhere
def test_a_rollout_server_that_is_killed(mode, tmp_path):
    run = _dies(mode, tmp_path, ROLLOUT_SERVER)
    assert re.search(r"AdaptiveError.*(rollout server|agent loop)", run.log), run.tail


@matrix
@everywhere
def test_a_queue_that_is_killed(mode, tmp_path):
    chosen, begun = reward(tmp_path, "time.sleep(2)\nreturn float(kind > 12)")
    with Killer(QUEUE, begun.exists) as killer:
        run = failed_run(tmp_path, "+adaptive=dapo", *MODES[mode], chosen, "adaptive.stall_timeout=20")
    assert killer.killed is not None, run.tail
    assert re.search(r"AdaptiveError.*TransferQueue has not answered for adaptive\.stall_timeout=20 s", run.log)


BLOCKING_LOOP = """
import time
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Blocking(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        if kwargs["session_id"] == 0:
            time.sleep(100_000)
        return await super().run(sampling_params, **kwargs)
"""


@matrix
@everywhere
def test_an_agent_loop_that_blocks_its_worker(mode, tmp_path):
    """A call without await and without end: whoever sends prompts to the worker waits for it, or for its rollouts."""
    (tmp_path / "blocking.py").write_text(BLOCKING_LOOP)
    (tmp_path / "loops.yaml").write_text("- name: blocking\n  _target_: blocking.Blocking\n")
    loop = "actor_rollout_ref.rollout.agent"
    run = failed_run(
        tmp_path,
        *("+adaptive=dapo", *MODES[mode], "adaptive.stall_timeout=20", f"{loop}.num_workers=2"),
        *(f"{loop}.agent_loop_config_path={tmp_path / 'loops.yaml'}", f"{loop}.default_agent_loop=blocking"),
        PYTHONPATH=str(tmp_path),
    )
    assert re.search(r"AdaptiveError.*for adaptive\.stall_timeout=20 s", run.log), run.tail


@everywhere
def test_a_data_set_smaller_than_a_batch(mode, tmp_path, request):
    chosen, rows = starts.small(tmp_path / "small.parquet")
    if mode == "sync":
        run = request.getfixturevalue("usual").small
    else:
        run = failed_run(tmp_path, "+adaptive=greso", *MODES[mode], chosen)
    assert run.code not in (0, None), run.tail
    assert f"data.train_batch_size=16: the training set has only {rows} prompts" in run.log
    assert not run.steps


@matrix
@everywhere
@pytest.mark.parametrize(("solved", "exhausted"), [(True, "relax"), (False, "train_partial")])
def test_everything_is_solved_or_nothing_is(solved, exhausted, mode, tmp_path):
    """No group has variance: the run goes on with what there is, and says so with the numbers."""
    chosen, _ = reward(tmp_path, f"return {float(solved)}")
    run = train(
        tmp_path,
        "+adaptive=greso",
        *MODES[mode],
        chosen,
        "adaptive.max_rounds=2",
        f"adaptive.on_exhausted={exhausted}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
    )
    assert run.code == 0, run.tail
    sound(run, 2)
    said = re.search(
        r"step 1: 0 of 16 groups after \d+ rounds and \d+ rollouts \((.*?)\): adaptive\.max_rounds=2", run.log
    )
    assert said, run.tail
    assert f"adaptive.on_exhausted={exhausted}" in run.log
    table, _, _ = read_snapshot(tmp_path / "checkpoints" / "global_step_2" / "adaptive")
    visited = table.col("visits") > 0
    assert (table.col("streak_kind")[visited] == (1 if solved else -1)).all()


@matrix
@everywhere
def test_a_data_set_that_changes_between_runs(mode, tmp_path):
    """Rows added, removed and reordered: resume refuses and names the way out, which keeps what is known."""
    common = ("+adaptive=greso", *MODES[mode], "trainer.save_freq=1")
    first = train(tmp_path, *common, "trainer.total_training_steps=1")
    assert first.code == 0, first.tail
    before, _, _ = read_snapshot(tmp_path / "checkpoints" / "global_step_1" / "adaptive")

    changed, _ = changed_data(tmp_path / "changed.parquet", drop=40, add=7)
    more = (*common, changed, "trainer.total_training_steps=2")
    refused = failed_run(tmp_path, *more)
    assert "the data set's fingerprint is" in refused.log
    assert "adaptive.resume.allow=[dataset]" in refused.log and not refused.steps

    second = train(tmp_path, *more, "adaptive.resume.allow=[dataset]")
    assert second.code == 0, second.tail
    known = int((before.col("visits") > 0).sum())
    assert f"resumed at step 1: {known} prompts known" in second.log
    after, _, _ = read_snapshot(tmp_path / "checkpoints" / "global_step_2" / "adaptive")
    # every prompt of before is still there, with at least the evidence it had; new ones have joined
    at = after.rows_for(before.keys.copy(), create=False)
    assert (at >= 0).all() and len(after) == len(before) + 7
    fresh = sum(second.series("adaptive/groups/finished_total"))
    assert after.col("visits").sum() == before.col("visits").sum() + fresh
    assert (after.col("visits")[at] >= before.col("visits")).all()
    np.testing.assert_array_equal(np.sort(key_hex(after.keys[at])), np.sort(key_hex(before.keys)))
