"""Tables of seconds follow from their JSON."""

from __future__ import annotations

import pytest

pytest.importorskip("pandas")

from benchmarks.page_speed import step_time_page
from benchmarks.page_time import beside_page, driver_page, long_page, prompt_page

MACHINE = {"machine": {"cpu": "a processor", "cores": 2}, "command": "python -m x"}


def test_ratios_are_pair_by_pair() -> None:
    rows = [{"preset": "greso", "earlier": [0.002, 0.004], "rounds": [0.001, 0.002], "in order": [0.004, 0.008]}]
    settings = {"batch": 512, "n": 16, "prompts": 1_000_000, "looks": 20}
    lines = [line for line in beside_page({**MACHINE, "load": 1.0, "settings": settings, "rows": rows}) if line]
    assert lines[-1] == "| `greso` | 3.0 | 1.5 | 0.50 ± 0.00 | 6.0 | 2.00 ± 0.00 |"
    assert "8,192 rollouts" in lines[1] and "2 pairs" in lines[1]


def test_a_drivers_seconds_by_part() -> None:
    row = {
        "preset": "aero",
        "rollouts": 65536,
        "generated": 80000,
        "parts": {"decide": 0.25},
        "own": 1.5,
        "verl": 0.5,
        "queue": 2.0,
    }
    lines = [
        line
        for line in driver_page(
            {**MACHINE, "load": 1.0, "tokens": 128, "waves": 20, "rows": [{**row, "after_last": 0.75}]}
        )
        if line
    ]
    assert lines[-1] == "| `aero` | 65,536 | 80,000 | 0.25 | 1.50 | 0.50 | 2.00 | 0.050 | 0.75 |"


def test_a_prompts_and_a_rollouts_milliseconds() -> None:
    median = {
        of: {"worker": k, "controller": k / 2, "storage": 0.1, "wall": k} for of, k in (("prompt", 1.5), ("row", 2.5))
    }
    data = {**MACHINE, "load": 1.0, "rollouts": 2048, "groups_of": [1, 8], "median": median, "rows": [{}] * 5}
    lines = [line for line in prompt_page(data) if line]
    assert lines[-2:] == [
        "| a prompt, without its rollouts | 1.50 | 0.75 | 0.10 | 1.50 |",
        "| a rollout | 2.50 | 1.25 | 0.10 | 2.50 |",
    ]
    assert "medians of 5 repeats" in lines[1]


def test_steps_are_compared_pair_by_pair_in_each_mode() -> None:
    def pair(ours: float) -> dict[str, dict[str, float]]:
        return {"verl": {"step": 2.0, "rest": 1.0}, "ours": {"step": ours, "rest": ours / 2}}

    modes = {
        "sync": {**MACHINE, "load": [1.0, 3.0], "pairs": [pair(1.0), pair(3.0)]},
        "separate_async": {**MACHINE, "load": [2.0], "pairs": [pair(1.0)]},
    }
    text = step_time_page({"modes": modes})
    lines = [line for line in text if line]
    assert lines[-3] == "| `sync`: ours | 2.00 | 1.00 ± 6.35 | 1.00 | 1.00 ± 6.35 |"
    assert lines[-1] == "| `separate_async`: ours | 1.00 | 0.50 | 0.50 | 0.50 |"
    assert "(2 pairs, on a processor (2 cores, load average 1 before and 3 after))" in lines[1]
    assert "(1 pair, on a processor" in lines[1]


def test_long_answers_are_compared_in_the_same_repeat() -> None:
    def run(gen: float, informative: float, **more: float) -> dict[str, float]:
        return {"gen": gen, "step": gen + 1, "informative": informative, "length": 40.0, "longest": 300.0, **more}

    ours = {"rollouts": 200.0, "tokens": 1000.0, "aborted_tokens": 100.0, "idle": 0.25, "last_tenth": 1.0}
    arms = {
        "verl": [run(4, 8), run(6, 8)],
        "`dapo`": [run(6, 16, **ours), run(9, 16, **ours)],
        "`solo`": [run(4, 0)] * 2,
    }
    settings = {"batch": 16, "n": 8, "slots": 32, "cap": 384, "poll": 0.1, "measured": 4}
    data = {
        **MACHINE,
        "load": [1.0, 2.0],
        "settings": settings,
        "rows": [{"arm": a, "runs": r} for a, r in arms.items()],
    }
    lines = [line for line in long_page(data) if line]
    assert lines[-3] == "| verl | 5.0 | 1.00 ± 0.00 | 8.0 | 1.00 ± 0.00 | – | – | – | 6.0 |"
    assert lines[-2] == "| `dapo` | 7.5 | 1.50 ± 0.00 | 16.0 | 0.75 ± 0.00 | 200 | 10% | 25% | 8.5 |"
    assert lines[-1].split(" | ")[4] == "–"  # groups of one have no variance of their own
    assert "load average 1 before and 2 after" in lines[1]


def test_the_reward_of_long_answers_ignores_the_dots() -> None:
    pytest.importorskip("reasoning_gym")
    import json

    from benchmarks.long_answers import DOTS
    from benchmarks.long_reward import compute_score

    about = {"dataset": "chain_sum", "entry": json.dumps({"answer": "12", "metadata": {}})}
    assert compute_score("sum_1digit", "12" + "." * 40, "12", about)["score"] == 1.0
    assert compute_score("sum_1digit", "1.2...", "12", about)["score"] == 0.0
    from examples.cpu.make_data import TASKS

    assert set(DOTS) == {task.name for task in TASKS}
