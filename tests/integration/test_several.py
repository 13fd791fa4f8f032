"""Runs on one start-up of verl: everyone who lists runs lists them as the driver reads them."""

from __future__ import annotations

import json

import pytest

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


def test_what_no_run_has_is_a_mistake(tmp_path) -> None:
    arm = Arm("grpo")
    (run,) = quickstart.planned({tmp_path / "run": (arm, 0)}, 512, tmp_path)
    assert planned([{**run, "anew": True}])[0].anew
    with pytest.raises(TypeError, match="fresh"):
        planned([{**run, "fresh": True}])
