"""The published table: it follows from its JSON, its cells run again, and the simulator is as fast as it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import simulate as bench
from verl_adaptive.simulate import Setting, Task, parse_pool, run_task

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "simulate.json").read_text())


def test_no_cell_is_missing(results) -> None:
    seeds = {row["seed"] for row in results["rows"]}
    assert len(seeds) >= 3
    have = [(row["block"], row["preset"], row["seed"]) for row in results["rows"]]
    assert sorted(have) == sorted((b, p, s) for b in bench.BLOCKS for p in bench.POLICIES for s in seeds)


@pytest.mark.parametrize("key", [("hard", "cero", 2)])
def test_a_cell_runs_again(results, key) -> None:
    """One whose steps are planned at once: the others are of generation rounds (commit ff7a59c)."""
    old = next(r for r in results["rows"] if (r["block"], r["preset"], r["seed"]) == key)
    new = bench.make_row(key)
    for name in ("steps", "generated", "informative_groups", "signal", "regret", "pool_end", "compute"):
        assert new[name] == pytest.approx(old[name], rel=0.02), name


def test_a_sequential_method_takes_milliseconds_a_step_on_a_large_pool() -> None:
    """300,000 prompts, 100 steps of 256 x 8: a minute for a million and a thousand leaves 60 ms a step."""
    pool = parse_pool("mixed:prompts=300000,spill=0.005")[1]
    run_task(Task("greso", 0, Setting(256, 8, 1, None), parse_pool("mixed")[1]))  # Hydra's imports
    begun = time.process_time()
    run_task(Task("greso", 0, Setting(256, 8, 100, None), pool))
    assert time.process_time() - begun < 6.0
