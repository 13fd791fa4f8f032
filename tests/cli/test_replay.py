"""``verl-adaptive replay``: records of both engines, and records that cannot be read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.world import Arrivals, make_engine, make_stream_engine, run_step
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.record import Tape, replay

POLICY = ("greso", "fixed", "informative", "verl")


def record(folder, *, stream: bool = False, steps: int = 4):
    """A small run's record; its folder."""
    if stream:
        engine, world = make_stream_engine(*POLICY, stream=AsyncFacts(warmup=8))
    else:
        engine, world = make_engine(*POLICY)
    tape = Tape(folder, engine)
    arrivals = Arrivals(world)
    for step in range(1, steps + 1):
        if stream:
            arrivals.step(engine, step)
        else:
            run_step(engine, world, step)
    tape.close()
    return tape.folder


@pytest.mark.parametrize("stream", [False, True], ids=["sync", "async"])
def test_a_record_and_one_attempt_of_it(call, tmp_path, stream):
    record(tmp_path / "record", stream=stream)
    folder = record(tmp_path / "record", stream=stream, steps=2)
    status, out, err = call("replay", str(tmp_path / "record"))
    assert (status, err) == (0, "")
    assert "attempt-0: 4 steps" in out and "attempt-1: 2 steps" in out and out.count("every decision identical") == 2
    status, out, _ = call("replay", str(folder), "--json")
    (found,) = json.loads(out)
    assert status == 0 and found["identical"] and found["steps"] == 2 and len(found["ledgers"]) == 2
    assert found["rollouts"] == sum(ledger["rollouts"]["generated"] for ledger in found["ledgers"])


def test_a_difference_is_named_and_is_a_failure(call, tmp_path):
    folder = record(tmp_path / "record")
    events = folder / "events.jsonl"
    lines = events.read_text().splitlines()
    at = max(i for i, line in enumerate(lines) if "asked" in line and json.loads(line)["asked"])
    lines[at] = '{"asked":"0"}'
    events.write_text("\n".join(lines) + "\n")
    status, out, _ = call("replay", str(folder))
    assert status == 1 and f"line {at + 1}: other rollouts were asked for" in out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "header.json").unlink(), "header.json cannot be read"),
        (lambda f: (f / "header.json").write_text("{"), "header.json cannot be read"),
        (lambda f: (f / "header.json").write_text('{"version": 9}'), "reads version 1"),
        (lambda f: (f / "events.jsonl").unlink(), "adaptive.record=true"),
        (lambda f: (f / "events.jsonl").write_text("[]\n"), "line 1: not an event"),
        (lambda f: (f / "events.jsonl").write_text("{]\n{}\n"), "events.jsonl, line 1"),
        (lambda f: (f / "events.jsonl").write_text('{"import": "os"}\n'), "unexpected event"),
        (lambda f: next((f / "start").glob("*.json")).write_text("{}"), "start"),
    ],
)
def test_a_damaged_record_is_one_line(call, tmp_path, damage, message):
    folder = record(tmp_path / "record")
    damage(folder)
    status, out, err = call("replay", str(folder))
    assert status == 1
    assert message in err + out and "Traceback" not in err and len(err.splitlines()) <= 1


def test_nothing_to_replay(call, tmp_path):
    status, _, err = call("replay", str(tmp_path / "nowhere"))
    assert status == 1 and "adaptive.record=true" in err
    status, _, err = call("replay", str(tmp_path))
    assert status == 1 and "holds no attempt" in err


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AdaptiveError, match=r"adaptive\.record=.*name a folder that can be written"):
        record(tmp_path / "file")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return record(tmp_path_factory.mktemp("sound") / "record", stream=True)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_flipped_bytes_are_found_or_refused(sound, seed, tmp_path_factory):
    """Whatever stands in a record, a replay ends: identical, different, or refused with the file's name."""
    rng = np.random.default_rng(seed)
    path = sound / "events.jsonl"
    whole = path.read_bytes()
    data = bytearray(whole)
    for at in rng.integers(0, len(data), 3):
        data[at] = int(rng.integers(32, 127))
    try:
        path.write_bytes(bytes(data))
        try:
            replay(sound)
        except AdaptiveError as error:
            assert "events.jsonl" in str(error)
    finally:
        path.write_bytes(whole)
