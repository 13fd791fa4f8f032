"""``verl-adaptive replay``: records of both engines, and records that cannot be read."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest

from tests.stats.mounts import tmpfs
from tests.world import Arrivals, World, config_of, engine_of, make_async_engine, make_engine, run_step
from verl_adaptive import Sampler
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.record import Recorder, _seed, replay
from verl_adaptive.stats import read_snapshot, write_snapshot

POLICY = ("greso", "fixed", "informative", "verl")


def record(folder, *, asynchronous: bool = False, steps: int = 4):
    """A small run's record; its folder. The run goes on to its end whatever becomes of the record."""
    if asynchronous:
        engine, world = make_async_engine(*POLICY, async_facts=AsyncFacts(warmup=8))
    else:
        engine, world = make_engine(*POLICY)
    recorder = Recorder(folder, engine)
    arrivals = Arrivals(world)
    for step in range(1, steps + 1):
        if asynchronous:
            arrivals.step(engine, step)
        else:
            assert run_step(engine, world, step).groups.rollouts
    recorder.close()
    return recorder.folder


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_record_and_one_attempt_of_it(call, tmp_path, asynchronous):
    record(tmp_path / "record", asynchronous=asynchronous)
    folder = record(tmp_path / "record", asynchronous=asynchronous, steps=2)
    status, out, err = call("replay", str(tmp_path / "record"))
    assert (status, err) == (0, "")
    assert "attempt-0: 4 steps" in out and "attempt-1: 2 steps" in out and out.count("every decision identical") == 2
    assert re.search(r"attempt-0: .* \(the record ends after step 4 of \d+\)$", out, flags=re.M)
    status, out, _ = call("replay", str(folder), "--json")
    (found,) = json.loads(out)
    assert status == 0 and found["identical"] and found["steps"] == 2 and len(found["ledgers"]) == 2
    assert found["rollouts"] == sum(ledger["rollouts"]["generated"] for ledger in found["ledgers"])


class Later(Sampler):
    """From one and a quarter passes on every second prompt."""

    name, whole_batches = "later", True

    def admit(self, rows, position, progress):
        return (progress.epoch < 1.25) | (position % 2 == 0)


def test_a_pass_is_as_long_as_it_was_in_the_run(tmp_path):
    """verl drops the last incomplete batch of a pass, so that a pass is shorter than the data set."""
    world = World(np.full(20, 0.5))
    world.source.size = 16
    engine = engine_of(config_of(sampler={"name": f"{__name__}:Later"}), world)
    recorder = Recorder(tmp_path, engine)
    for step in range(1, 9):
        run_step(engine, world, step)
    recorder.close()
    report = replay(recorder.folder)
    assert report.identical and report.steps == 8, report


def rewrite(folder, change, *, seal: bool) -> None:
    """Change the events of a record, with sums that fit or as they are."""
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    change(events)
    total, out = _seed(folder), b""
    for event in events:
        if seal and "sum" in event:
            event["sum"] = total.hexdigest()
        line = json.dumps(event).encode() + b"\n"
        total.update(line)
        out += line
    path.write_bytes(out)


def test_a_difference_is_named_and_is_a_failure(call, tmp_path):
    folder, lines = record(tmp_path / "record"), []

    def change(events):
        at = max(i for i, event in enumerate(events) if event.get("asked"))
        events[at]["asked"] = "0"
        lines.append(at + 1)

    rewrite(folder, change, seal=True)
    status, out, _ = call("replay", str(folder))
    assert status == 1 and f"line {lines[0]}: other rollouts were asked for" in out


def _change_answer(folder, which, name, more):
    def change(events):
        back = [event["back"] for event in events if "back" in event][which]
        back[name] = [value + more for value in back[name]]

    rewrite(folder, change, seal=False)


def _change_header(folder):
    header = json.loads((folder / "header.json").read_text())
    header["adaptive"]["name"] = "another"
    (folder / "header.json").write_text(json.dumps(header))


def _change_start(folder):
    """A snapshot of the same statistics, with another story."""
    table, state, _ = read_snapshot(folder / "start")
    write_snapshot(folder / "start", table, state, meta={"step": 7})


@pytest.mark.parametrize(
    ("asynchronous", "change"),
    [
        (False, lambda folder: _change_answer(folder, -1, "tokens", 1)),
        (True, lambda folder: _change_answer(folder, 0, "reward", 0.25)),
        (False, lambda folder: rewrite(folder, lambda events: [e.pop("sum", None) for e in events], seal=False)),
        (False, _change_header),
        (False, _change_start),
    ],
    ids=["sync answers", "async answers", "sums", "header", "start"],
)
def test_what_decides_nothing_is_vouched_for_too(call, tmp_path, asynchronous, change):
    """Tokens and (with another signal) rewards, say: the decisions come out the same whatever they are."""
    folder = record(tmp_path / "record", asynchronous=asynchronous)
    change(folder)
    status, out, err = call("replay", str(folder))
    assert status == 1 and "identical" not in out and "the record was changed" in err


@pytest.mark.parametrize("content", [b"", b'{"begin":1}\n', b'{"begin":1}\n{"pull":[0'])
def test_an_empty_record_shows_nothing(call, tmp_path, content):
    record(tmp_path / "record")
    folder = record(tmp_path / "record", steps=0)
    assert (folder / "events.jsonl").read_bytes() == b""
    (folder / "events.jsonl").write_bytes(content)
    status, out, _ = call("replay", str(folder))
    assert status == 1 and "the record is empty" in out and "identical" not in out
    (found,) = json.loads(call("replay", str(folder), "--json")[1])
    assert found["empty"] and not found["identical"]
    status, out, _ = call("replay", str(tmp_path / "record"))  # beside an attempt that shows something
    assert status == 0 and out.count("every decision identical") == 1 and "attempt-1: the record is empty" in out


def test_a_full_disk_ends_the_recording_and_not_the_run(call, tmp_path, caplog):
    with tmpfs(tmp_path / "disk", "64k") as disk:
        folder = record(disk / "record", steps=59)
        assert caplog.text.count("recording stopped in step") == 1 and "No space left" in caplog.text
        status, out, err = call("replay", str(folder))  # what there is, up to the torn line
        assert status == 0 and "every decision identical" in out and not err
        steps = int(out.split(": ")[1].split(" ")[0])
        assert 0 < steps < 59


def test_a_disk_that_is_full_when_an_attempt_begins_costs_the_record_and_not_the_run(call, tmp_path, caplog):
    with tmpfs(tmp_path / "disk", "64k") as disk:
        record(disk / "record")
        (disk / "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize))
        record(disk / "record", steps=3)
        assert caplog.text.count("nothing is recorded of this attempt") == 1 and "No space left" in caplog.text
        assert [path.name for path in (disk / "record").iterdir()] == ["attempt-0"]  # no half of an attempt
        status, out, err = call("replay", str(disk / "record"))
        assert status == 0 and "every decision identical" in out and not err


def test_an_attempt_after_an_earlier_one_was_removed(tmp_path):
    folder = record(tmp_path / "record")
    record(tmp_path / "record", steps=0)
    shutil.rmtree(folder)
    record(tmp_path / "record", steps=0)
    assert sorted(path.name for path in (tmp_path / "record").iterdir()) == ["attempt-1", "attempt-2"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "header.json").unlink(), "header.json cannot be read"),
        (lambda f: (f / "header.json").write_text("{"), "header.json cannot be read"),
        (lambda f: (f / "header.json").write_text('{"version": 9}'), "reads version 2"),
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


def test_an_attempt_that_was_killed_as_it_began_hides_no_other(call, tmp_path):
    folder = record(tmp_path / "record")
    shutil.copytree(folder, folder.parent / "attempt-1")
    for name in ("events.jsonl", "start", "header.json"):
        path = folder.parent / "attempt-1" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert call("replay", str(folder.parent))[0] == 0


def test_nothing_to_replay(refusal, tmp_path):
    assert "adaptive.record=true" in refusal("replay", tmp_path / "nowhere")
    assert "holds no attempt" in refusal("replay", tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AdaptiveError, match=r"adaptive\.record=.*name a folder that can be written"):
        record(tmp_path / "file")
