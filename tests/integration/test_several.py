"""Runs on one start-up of verl: everyone who lists runs lists them as the driver reads them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("verl")

from benchmarks import train_cpu
from examples.cpu import quickstart
from examples.cpu.quickstart import Arm
from examples.cpu.several import planned


def test_the_quickstarts_runs_are_read(tmp_path) -> None:
    arms = [Arm.parse(text) for text in quickstart.ARMS.split(",")]
    runs = {tmp_path / str(number): (arm, 3) for number, arm in enumerate(arms)}
    listed = json.loads(json.dumps(quickstart.planned(runs, 512, tmp_path)))
    read = planned(listed)
    assert [run.name for run in read] == [f"{arm.name}, seed 3" for arm in arms]
    assert [run.metrics for run in read] == [str(folder / "metrics.jsonl") for folder in runs]
    assert not any(run.anew or run.refused for run in read)
    assert [run.config.adaptive.seed for run in read] == [3] * len(arms)


def test_the_benchmarks_runs_are_read(tmp_path) -> None:
    keys = [("base", "solo", 3e-4, 0), ("sparse", "grpo-4", 3e-4, 1)]
    made = [train_cpu.begun(key, train_cpu.Settings(), tmp_path) for key in keys]
    read = planned(json.loads(json.dumps(train_cpu.planned(made))))
    assert [run.name for run in read] == ["base/solo/lr=0.0003/seed=0", "sparse/grpo-4/lr=0.0003/seed=1"]
    assert not any(run.anew or run.refused for run in read)
    assert [run.config.adaptive.seed for run in read] == [0, 1]


def test_what_no_run_has_is_a_mistake(tmp_path) -> None:
    arm = Arm("grpo")
    (run,) = quickstart.planned({tmp_path / "run": (arm, 0)}, 512, tmp_path)
    assert planned([{**run, "anew": True}])[0].anew
    with pytest.raises(TypeError, match="fresh"):
        planned([{**run, "fresh": True}])
