"""Recorded traces: every kind that can be read, what is estimated from them, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from tests.cli.stores import make_run
from tests.world import keys_of
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.simulate import PoolConfig, Setting, make_simulation, read_trace, run_task, tasks
from verl_adaptive.simulate.replayed import ReplayedWorld, knot_rates, make_replayed
from verl_adaptive.simulate.traces import Trace
from verl_adaptive.stats import StatsTable, open_run, write_snapshot
from verl_adaptive.stats.keys import key_hex


def trace_of(p: np.ndarray, n: int, steps: int = 1, seed: int = 0, move: float = 0.0) -> Trace:
    """Every prompt visited in every step, its rate moving by ``move`` from the first to the last."""
    rng, count = np.random.default_rng(seed), len(p)
    prompt, step = np.tile(np.arange(count), steps), np.repeat(np.arange(1, steps + 1), count)
    rate = np.clip(p[prompt] + move * (step - 1) / max(1, steps - 1), 0, 1)
    return Trace(
        keys_of(count),
        prompt,
        step,
        np.full(len(prompt), float(n)),
        rng.binomial(n, rate).astype(float),
        np.full(count, np.nan),
    )


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_journal_is_read_group_by_group(tmp_path) -> None:
    make_run(tmp_path / "run", steps=12, snapshot=False)
    trace = read_trace(tmp_path / "run")
    seen = pa.concat_tables(open_run(tmp_path / "run").observations()).to_pandas()
    good = seen[~seen.failed & (seen.n > 0)]
    assert trace.kind == "journal" and len(trace.prompt) == len(good) and trace.steps == 12
    assert key_hex(trace.keys[trace.prompt]) == [key.hex() for key in good.key]
    assert trace.n.tolist() == good.n.tolist() and trace.successes.tolist() == good.successes.tolist()
    assert trace.step.tolist() == good.step.tolist()
    for prompt, key in enumerate(key_hex(trace.keys)):
        of = good[good.key == bytes.fromhex(key)]
        assert trace.tokens[prompt] == pytest.approx(of.tokens.sum() / of.n.sum())


@pytest.mark.parametrize("snapshot", [True, False])
def test_data_sources_come_along_into_the_simulation(tmp_path, snapshot) -> None:
    engine, _ = make_run(tmp_path / "run", steps=12, snapshot=snapshot)
    trace = read_trace(tmp_path / "run" / "global_step_12" if snapshot else tmp_path / "run")
    assert trace.kind == ("snapshot" if snapshot else "journal") and trace.sources is not None
    rows = engine.table.rows_for(trace.keys.copy(), create=False)
    if snapshot:  # totals only
        assert trace.steps == 1 and trace.n.tolist() == engine.table.col("rollouts")[rows].tolist()
    assert trace.sources == engine.table.source_names(rows)
    simulation = make_simulation(
        "dapo adaptive/sampler=mopps_by_source", make_replayed(trace, None, 0), batch=4, n=4, steps=2
    )
    table = simulation.engine.table
    assert table.source_names() == list(trace.sources) and len(set(trace.sources)) > 1


def test_verls_rollouts_are_judged_by_the_threshold(tmp_path) -> None:
    """How they are grouped: tests/stats/test_run.py."""
    lines = [{"input": "2+2?", "output": "...", "gts": "4", "step": 2, "score": score} for score in (1.0, 0.6, 0.0)]
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for threshold, wins in ((0.5, 2), (0.7, 1)):
        trace = read_trace(tmp_path, threshold=threshold)
        assert (trace.n.tolist(), trace.successes.tolist()) == ([3], [wins])
    assert "dropped prompts and groups are not in it" in trace.note


def test_results_of_an_evaluation_are_read(tmp_path) -> None:
    rows = [{"prompt": f"q{i}", "data_source": "x", "ground_truth": "1", "n": 8, "successes": i} for i in range(5)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(tmp_path / "eval.jsonl")
    assert trace.kind == "results of an evaluation" and trace.successes.tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "scores.jsonl").write_text(json.dumps({**rows[0], "n": None, "score": [0.6, 1.0, 0.2]}))
    for threshold, wins in ((0.5, 2), (0.7, 1)):
        assert read_trace(tmp_path / "scores.jsonl", threshold=threshold).successes.tolist() == [wins]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("u.jsonl", '{"pass_rate": null, "n": 0}\n', "has no results"),
        ("1.jsonl", '{"input": "q", "output": "a", "score": "NaN"}\n', "line 1: score='NaN' is not a number"),
        ("3.jsonl", '{"input": "q", "output": "a", "score": 1}\n{"score": 1}\n', "line 2: no input"),
        (
            "4.jsonl",
            '{"input": "q", "output": "a", "score": 1, "step": null}\n',
            "line 1: step=None is not a whole number",
        ),
        ("e.jsonl", '{"prompt": "q", "score": null}\n', "score nor prior says how it went; score is null"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused(tmp_path, name, text, message) -> None:
    """What is no trace at all: tests/stats/test_run.py; other results: tests/stats/test_warm_start.py."""
    (tmp_path / name).write_text(text)
    with pytest.raises(AdaptiveError, match=message):
        read_trace(tmp_path / name)


def test_a_run_without_a_finished_rollout_is_refused(tmp_path) -> None:
    write_snapshot(tmp_path / "begun", StatsTable(), {}, meta={})
    with pytest.raises(AdaptiveError, match="holds no finished rollout"):
        read_trace(tmp_path / "begun")


# -- estimating -------------------------------------------------------------------------------------------------------


def test_drawn_rates_spread_as_the_true_ones_do_and_not_as_the_observed_ones() -> None:
    """Observed rates of eight rollouts are too spread out, posterior means too little: E[p(1 − p)] tells."""
    p = np.random.default_rng(1).beta(0.5, 0.8, 20_000)
    trace = trace_of(p, 8)
    _, made = knot_rates(trace, 0)
    true = float((p * (1 - p)).mean())
    seen = trace.successes / 8
    assert float((made[0] * (1 - made[0])).mean()) == pytest.approx(true, rel=0.03)
    assert float((seen * (1 - seen)).mean()) < 0.9 * true
    assert np.corrcoef(made[0], p)[0, 1] > 0.85
    assert not np.array_equal(made, knot_rates(trace, 1)[1])


def test_a_policy_that_visits_middling_prompts_most_leaves_the_pool_as_it_is() -> None:
    """As greso, cero and pilot_commit do: weighed by rollouts, its trace had far more prompts of middling rates than there are."""
    p = np.random.default_rng(1).beta(0.5, 0.8, 20_000)
    trace, more = trace_of(p, 8), trace_of(p, 64, seed=1)
    often = (trace.successes > 0) & (trace.successes < 8)
    trace.n[often] += 64
    trace.successes[often] += more.successes[often]
    _, made = knot_rates(trace, 0)
    assert made.mean() == pytest.approx(p.mean(), abs=0.01)
    assert (made * (1 - made)).mean() == pytest.approx((p * (1 - p)).mean(), rel=0.05)


def test_rates_over_time_follow_the_trace() -> None:
    p = np.full(3_000, 0.2)
    trace = trace_of(p, 16, steps=30, move=0.6)
    times, made = knot_rates(trace, 0)
    assert times[0] == 1 and times[-1] == 30
    mean = made.mean(axis=1)
    assert (np.diff(mean) > 0.01).all()
    # evidence of a half-life of 3.6 steps looks back over 5 of 30 on average, in which the rate moves by 0.1
    assert mean[0] == pytest.approx(0.3, abs=0.03) and mean[-1] == pytest.approx(0.7, abs=0.03)
    assert mean[3] + mean[4] == pytest.approx(1.0, abs=0.02)
    # the same random bits at every knot: neighbouring knots of one prompt are close to each other
    assert np.abs(np.diff(made - mean[:, None], axis=0)).mean() < 0.5 * made[0].std() + 0.05


def test_a_replayed_world_moves_with_the_step_only_and_stops_at_the_end() -> None:
    knots = np.array([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]], dtype=np.float32)
    world = ReplayedWorld(np.array([10.0, 15.0, 20.0]), knots)
    found = [world.rates().tolist()]
    for step in (1, 5, 9, 10, 50):
        world.learn(None, None, step)  # type: ignore[arg-type]
        found.append(world.rates().tolist())
    assert np.array(found) == pytest.approx(
        np.array([[0, 1], [0.1, 0.9], [0.5, 0.5], [0.9, 0.1], [1, 0], [1, 0]]), abs=1e-6
    )


def test_policies_run_on_a_trace_and_a_trace_can_be_the_start_of_a_learning_pool() -> None:
    trace = trace_of(np.random.default_rng(2).beta(0.5, 0.5, 300), 8, steps=5)
    setting = Setting(batch=8, n=8, steps=30, budget=30 * 64)
    replayed = {
        r["preset"]: r for r in map(run_task, tasks(["grpo", "greso", "oracle_best"], [0], setting, None, trace))
    }
    # whatever is trained, the pool takes the recorded course
    assert abs(replayed["grpo"]["pool_end"] - replayed["oracle_best"]["pool_end"]) < 1e-12
    assert replayed["oracle_best"]["signal"] > 1.3 * replayed["grpo"]["signal"]
    learning = PoolConfig()
    moved = {r["preset"]: r for r in map(run_task, tasks(["grpo", "oracle_best"], [0], setting, learning, trace))}
    assert moved["oracle_best"]["pool_end"] > moved["grpo"]["pool_end"] > moved["grpo"]["pool_start"]
