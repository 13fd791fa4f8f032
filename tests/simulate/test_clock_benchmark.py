"""The published seconds: their shares by hand, the pages from the JSON, a cell again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import clock as bench

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "clock.json").read_text())


def row(preset: str, seed: int, time: float, apiece: float | None, block: str = "model") -> dict:
    return {
        **{"block": block, "preset": preset, "seed": seed, "time": time, "time_per_informative": apiece},
        **{"begun": 9.0, "prefill": 5.0, "age": 1.0},
    }


def test_shares_are_of_grpos_in_the_same_seed() -> None:
    rows = [row("grpo", s, 10.0 + s, 2.0) for s in (0, 1)]
    rows += [row("dapo", 0, 20.0, 3.0), row("dapo", 1, 11.0, 1.0), row("solo", 0, 5.0, None), row("greso", 7, 1.0, 1.0)]
    found = bench.shares(rows, "model")
    assert list(found) == ["grpo", "dapo", "solo"]  # GRPO has no run beside greso's
    assert (found["grpo"]["time"], found["grpo"]["time_per_informative"], found["grpo"]["seeds"]) == (1.0, 1.0, 2)
    assert found["dapo"]["time"] == pytest.approx(1.5) and found["dapo"]["time_per_informative"] == pytest.approx(1.0)
    assert (found["dapo"]["begun"], found["dapo"]["seconds"]) == (9.0, 15.5)
    assert found["solo"]["time_per_informative"] is None
    ahead = [row("grpo", 0, 5.0, 1.0, "one batch ahead")]
    assert bench.shares(rows + ahead, "one batch ahead")["grpo"]["time"] == 0.5


def test_what_is_collected_follows_from_the_rows(results) -> None:
    assert bench.collected(results["rows"]).items() <= results.items()


def test_a_cell_runs_again(results) -> None:
    cell = ("model", "grpo", 0)
    old = next(r for r in results["rows"] if (r["block"], r["preset"], r["seed"]) == cell)
    new = bench.make_row(cell)
    for name in ("steps", "time", "time_per_informative", "idle", "begun", "informative"):
        assert new[name] == pytest.approx(old[name], rel=0.01), name
