"""Forged records: a replay answers, or says what is wrong with which file."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.common import examples, json_values, seeds, survives
from tests.world import make_engine, run_step

record = pytest.importorskip("verl_adaptive.record")


@pytest.fixture(scope="module")
def attempt(tmp_path_factory) -> Path:
    """A record of a few steps."""
    folder = tmp_path_factory.mktemp("record")
    parts = {"sampler": "greso", "allocator": "aero", "filter": "informative"}
    engine, world = make_engine(**parts, batch=4, n=4, M=30, p=[0.5] * 30, seed=1)
    recorder = record.Recorder(folder, engine)
    for step in range(1, 5):
        run_step(engine, world, step)
    recorder.close()
    assert record.replay(folder / "attempt-0").identical
    return folder / "attempt-0"


@examples(25)
@given(seeds, json_values, st.sampled_from(["begin", "pull", "asked", "back", "take", "end", "revive"]))
def test_events_of_anything(attempt, tmp_path_factory, seed, value, kind) -> None:
    folder = tmp_path_factory.mktemp("forged") / "attempt-0"
    shutil.copytree(attempt, folder)
    lines = (folder / "events.jsonl").read_text().splitlines()
    lines[random.Random(seed).randrange(len(lines))] = json.dumps({kind: value})
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    with survives() as said:
        record.replay(folder)
    assert not said or str(folder) in said[0], said
    shutil.rmtree(folder.parent)


def test_results_that_do_not_fit_together_are_not_replayed(attempt, tmp_path) -> None:
    """A size that is no group's would be memory that nobody has."""
    shutil.copytree(attempt, tmp_path / "attempt-0")
    lines = (attempt / "events.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "back" in json.loads(line))
    event = json.loads(lines[at])
    event["back"]["offsets"][-1] = 10**13
    lines[at] = json.dumps(event)
    (tmp_path / "attempt-0" / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert "do not fit together" in record.replay(tmp_path / "attempt-0").difference
