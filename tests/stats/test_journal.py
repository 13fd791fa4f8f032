"""The journal: what is written is read back, whatever happens to the process and to the disk."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.programs import ran
from tests.stats.made import make_groups, make_keys, written
from tests.stats.mounts import tmpfs
from tests.stats.test_table import equal
from verl_adaptive.groups import Groups
from verl_adaptive.stats import Journal, StatsTable, journal, open_run
from verl_adaptive.stats.journal import JournalBusy, JournalError, attempts_in, sealed
from verl_adaptive.stats.reader import JournalReader

KEYS = make_keys(20)
SOURCES = ["gsm8k" if i % 2 else "math" for i in range(20)]


def commit(writer: Journal, step: int, groups: Groups | None = None) -> None:
    groups = make_groups(step) if groups is None else groups
    sources = [SOURCES[row] for row in groups.row]
    outcomes = [f"o{step}"] * len(groups)
    writer.commit_step(step, groups, KEYS[groups.row], outcomes, {"n": step}, {"p": step / 4}, sources=sources)


@contextmanager
def begun(folder: Path, *steps: int) -> Iterator[Journal]:
    """A new journal in which these steps are written."""
    with Journal(folder) as writer:
        writer.begin(0, KEYS, SOURCES)
        for step in steps:
            commit(writer, step)
        assert written(writer)
        yield writer


def attempt(folder: Path, *steps: int, after: int = 0, of: int | str | None = None) -> str:
    """Another start of the run, which writes these steps; its id. It goes on with attempt ``of``, by number or id."""
    parent = attempts_in(folder)[of]["id"] if isinstance(of, int) else of
    with Journal(folder) as writer:
        writer.begin(after, parent=parent)
        for step in steps:
            commit(writer, step)
    return writer.id


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in JournalReader(folder).lines()]


def test_the_table_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    table = StatsTable()
    table.rows_for(KEYS, sources=SOURCES)
    with Journal(tmp_path, {"run": "r", "preset": "greso"}) as writer:
        writer.begin(0, KEYS, SOURCES)
        for step in range(1, 30):
            groups = make_groups(step, count=12)
            if step == 7:
                groups.reward[:] = np.nan
            table.observe(groups, step, tolerance=0.05)
            commit(writer, step, groups)
    run = open_run(tmp_path, tolerance=0.05)
    equal(run.table, table)
    assert (run.name, run.about["preset"]) == ("r", "greso")
    rows = [row for page in run.observations(3, 4) for row in page.to_pylist()]
    assert [row["step"] for row in rows] == [3] * 12 + [4] * 12
    assert rows[0]["outcome"] == "o3" and rows[0]["key"].hex() in run.prompts.to_arrow().column("key").to_pylist()


def test_a_resume_begins_an_attempt_and_leaves_the_rest_aside(tmp_path: Path) -> None:
    (tmp_path / "attempt-9-copy").mkdir()
    parent = None
    for after, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5)), (4, (5,)), (3, (4, 5, 6))):
        with Journal(tmp_path) as writer:
            writer.begin(after, parent=parent)
            parent = writer.id
            writer.commit_validation(after, {"acc": after / 10, "bad": float("nan")}, prompts={"math": 9})
            for step in steps:
                commit(writer, step)
            if after == 0:  # the resume's own of that step comes second, and does not count
                writer.commit_validation(2, {"acc": 0.9})
    run = open_run(tmp_path)
    lines = JournalReader(tmp_path).lines()
    assert [(line["attempt"], line["step"]) for line in lines] == [(0, 1), (0, 2), (1, 3), (3, 4), (3, 5), (3, 6)]
    found = [(v["step"], v["metrics"]["acc"], len(v["metrics"])) for v in run.validations()]
    assert found == [(0, 0.0, 1), (2, 0.9, 1), (3, 0.3, 1)]
    assert run.gaps() == [] and run.about["attempts"] == 4
    attempt(tmp_path, after=9, of=parent)
    assert [gap[:2] for gap in open_run(tmp_path).gaps()] == [(7, 9)]
    attempt(tmp_path, 1)
    assert steps_of(tmp_path) == [1]


def test_a_resume_goes_on_from_the_attempt_that_wrote_the_checkpoint(tmp_path: Path) -> None:
    """A start-over by mistake between the two took the run's place, or another run's steps did."""
    attempt(tmp_path, 1, 2, 3)
    attempt(tmp_path, 1, 2)
    attempt(tmp_path, 3, 4, after=2, of=0)
    lines = [(line["attempt"], line["step"]) for line in JournalReader(tmp_path).lines()]
    assert lines == [(0, 1), (0, 2), (2, 3), (2, 4)] and open_run(tmp_path).gaps() == []
    attempt(tmp_path, 3, after=2, of="another journal's")
    assert steps_of(tmp_path) == [3] and [gap[:2] for gap in open_run(tmp_path).gaps()] == [(1, 2)]


def test_one_reading_is_of_the_same_steps(tmp_path: Path) -> None:
    """Prompts, steps and gaps were read one after another, each up to its own moment."""
    with begun(tmp_path, 1) as writer:
        run = open_run(tmp_path)
        assert len(run.steps) == 1
        commit(writer, 2)
        writer.commit_validation(2, {"acc": 0.5})
        assert written(writer)
        assert run.table.col("visits").sum() == sum(map(len, run.observations())) == 6
        assert len(run.again().steps) == 2 and run.validations() == run.gaps() == []


def test_torn_tails_are_cut_at_every_byte(tmp_path: Path) -> None:
    with begun(tmp_path / "whole", 1, 2):
        pass
    for name in ("steps.jsonl", "groups.arrows"):
        whole = (tmp_path / "whole" / "attempt-0" / name).read_bytes()
        shutil.rmtree(tmp_path / "torn", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "torn")
        for size in [*range(0, len(whole), 1 if name == "steps.jsonl" else 17), len(whole)]:
            (tmp_path / "torn" / "attempt-0" / name).write_bytes(whole[:size])
            run = open_run(tmp_path / "torn")
            steps = run.steps.column("step").to_pylist()
            assert steps == [1, 2][: len(steps)] and (len(steps) == 2) == (size == len(whole))
            assert sum(len(page) for page in run.observations()) == 6 * len(steps)
            if name == "groups.arrows" and len(steps) < 2:  # that a line was cut off nobody can know
                assert run.gaps() == [(len(steps) + 1, 2, "groups.arrows of attempt 0 ends before them")]
    with begun(tmp_path / "x") as writer:
        writer.commit_validation(2, {"acc": 0.5})
    assert open_run(tmp_path / "x").gaps() == [(1, 2, "steps.jsonl of attempt 0 ends before them")]
    with Journal(tmp_path / "x") as writer:
        writer.begin(6, parent=attempts_in(writer.folder)[0]["id"])
        commit(writer, 7)
        writer.commit_validation(8, {"acc": 0.5})
    (tmp_path / "x" / "attempt-1" / "groups.arrows").write_bytes(b"")
    assert [gap[:2] for gap in open_run(tmp_path / "x").gaps()] == [(1, 6), (7, 7), (8, 8)]  # each step once
    attempt(tmp_path / "torn", 3, after=2, of=0)  # and a resume goes on behind what is whole
    assert steps_of(tmp_path / "torn")[-1] == 3


def test_damage_elsewhere_names_the_file(tmp_path: Path) -> None:
    with begun(tmp_path, 1, 2):
        pass
    (prompts,) = tmp_path.glob("prompts-*.parquet")
    whole = prompts.read_bytes()
    for at in range(60, 400, 34):  # keys: one bit is another prompt
        prompts.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(JournalError, match=rf"{prompts.name} cannot be read"):
            _ = open_run(tmp_path).prompts
    prompts.unlink()  # without it there would be fewer prompts, and nothing would be said
    with pytest.raises(JournalError, match=rf"{prompts.name} cannot be read: No such file"):
        _ = open_run(tmp_path).prompts
    prompts.write_bytes(whole)
    (tmp_path / "attempt-0" / "attempt.json").unlink()  # without it the run would be the attempt before
    with pytest.raises(JournalError, match=r"attempt\.json is gone"):
        JournalReader(tmp_path)
    with pytest.raises(JournalError, match=r"attempt\.json is gone.*adaptive\.store\.dir"):
        Journal(tmp_path)  # a resume did not say how to go on without it


def test_a_flipped_bit_is_damage_and_no_other_number(tmp_path: Path) -> None:
    with begun(tmp_path, 1, 2) as writer:
        for step in (1, 2):
            writer.commit_validation(step, {"acc": step / 8})

    def all_of_it() -> list[object]:
        run = open_run(tmp_path)
        return [run.about, run.steps, run.validations(), list(run.observations()), run.gaps()]

    whole = all_of_it()
    rng = np.random.default_rng(0)
    for path in sorted((tmp_path / "attempt-0").iterdir()):
        before = path.read_bytes()
        lines = [i for i, byte in enumerate(before) if byte == 10 and path.suffix != ".arrows"]
        for at in rng.integers(0, len(before), 60):
            path.write_bytes(before[:at] + bytes([before[at] ^ 1 << int(rng.integers(8))]) + before[at + 1 :])
            try:
                # a last line without its end is not there yet
                assert all_of_it() == whole or at == lines[-1], (path, at)
            except JournalError as error:
                assert path.name in str(error) and "damaged" in str(error)
        path.write_bytes(before)
    groups = tmp_path / "attempt-0" / "groups.arrows"
    groups.write_bytes(bytes(64) + groups.read_bytes()[64:])  # a block that a crash left empty
    with pytest.raises(JournalError, match=r"groups\.arrows is damaged, steps 1 to 2"):
        all_of_it()


def test_a_column_that_came_later_is_null_in_the_attempts_before(tmp_path: Path, monkeypatch) -> None:
    fewer = pa.schema([field for field in journal.GROUPS if field.name != "clipped"])
    with monkeypatch.context() as older:
        older.setattr(journal, "GROUPS", fewer)
        with begun(tmp_path, 1):
            pass
    attempt(tmp_path, 2, after=1, of=0)
    before, after = open_run(tmp_path).observations()
    assert before.schema == after.schema and before.column("clipped").null_count == len(before) == 6
    assert open_run(tmp_path).table.col("visits").sum() == 12


@contextmanager
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that does not answer: the writer hangs in fsync until the event is set."""
    thaws = threading.Event()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (thaws.wait(60), real(descriptor))[1])
    try:
        yield thaws
    finally:
        thaws.set()
        monkeypatch.setattr(os, "fsync", real)


def test_a_disk_that_does_not_answer_holds_up_nothing(tmp_path: Path, monkeypatch, caplog) -> None:
    """Hung NFS hung training for ever; now it costs a warning, and readers say what is missing."""
    monkeypatch.setattr(journal, "BACKLOG", 4)
    writer = Journal(tmp_path)
    writer.begin(0)
    commit(writer, 1)
    assert written(writer)
    writer._since -= 2 * journal.SLOW  # a step that took long
    commit(writer, 2)
    assert written(writer) and not caplog.records  # is not blamed on the disk
    monkeypatch.setattr(journal, "SLOW", 0.05)
    with frozen(monkeypatch) as thaws, caplog.at_level(logging.WARNING):
        for step in range(3, 30):  # were one of them to wait, it would wait for `thaws`
            commit(writer, step)
            time.sleep(0.01)
        writer.commit_validation(29, {"acc": 0.5})
        assert len(caplog.records) == 1 and "has not answered for" in caplog.text
        assert "lost" in writer._without() and not written(writer, 0.05)
        thaws.set()
        assert not written(writer)  # what is lost stays lost
    commit(writer, 30)
    writer.close()
    run = open_run(tmp_path)
    (gap,) = run.gaps()
    assert [v["step"] for v in run.validations()] == [29]
    assert steps_of(tmp_path)[-1] == 30 and gap[1] == 29 and "waiting for the disk" in gap[2]


def test_closing_waits_for_a_frozen_disk_only_so_long(tmp_path: Path, monkeypatch, caplog) -> None:
    writer = Journal(tmp_path)
    writer.begin(0)
    monkeypatch.setattr(journal, "PATIENCE", 0.2)
    with frozen(monkeypatch), caplog.at_level(logging.WARNING):
        commit(writer, 1)
        writer.close()
        assert "the run has ended" in caplog.text
        with pytest.raises(JournalError, match="does not answer|has not answered"):
            Journal(tmp_path / "new").begin(0)
    with pytest.raises(JournalError, match=r"cannot be opened.*adaptive\.store\.dir"):
        (tmp_path / "file").write_text("")
        Journal(tmp_path / "file" / "x")


def test_a_full_disk_is_caught_up_with(tmp_path: Path, monkeypatch, caplog) -> None:
    with tmpfs(tmp_path / "disk", "96k") as disk:
        with begun(disk / "adaptive", 1) as writer:
            (disk / "ballast").write_bytes(b"x" * 4096)
            with caplog.at_level(logging.WARNING):
                with open(disk / "more", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                    while True:
                        file.write(b"x" * 1024)
                for step in range(2, 8):
                    commit(writer, step)
                    assert not written(writer, 0.1)
                assert caplog.text.count("training goes on without it") == 1 and "No space left" in caplog.text
                assert steps_of(disk / "adaptive") == [1]  # whole, whatever half lines there are
                (disk / "ballast").unlink()
                (disk / "more").unlink()
                commit(writer, 8)
                assert written(writer) and "written again" in caplog.text
                monkeypatch.setattr(os, "fsync", full)
                commit(writer, 9)
                assert not written(writer, 0.1) and caplog.text.count("training goes on without it") == 2
                monkeypatch.undo()
        assert steps_of(disk / "adaptive") == list(range(1, 10)) and open_run(disk / "adaptive").gaps() == []


def full(*_: object) -> int:
    """In the place of a call that writes."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_stays_full_is_one_warning_and_one_at_the_end(tmp_path: Path, monkeypatch, caplog) -> None:
    writer = Journal(tmp_path)
    writer.begin(0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "pwrite", full)
        writer.commit_validation(0, {"acc": 0.5})  # waits before the steps, and says nothing
        for step in range(1, 9):
            commit(writer, step)
            time.sleep(0.01)
        writer.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert "No space left" in first and "the run has ended" in last
    assert last.endswith("not all of it is written; 8 steps lost, from 1 to 8")  # and no step waits any more


@pytest.mark.parametrize(("name", "steps"), [("groups.arrows", [1]), ("attempt.json", [])])
def test_an_attempt_that_could_not_be_begun_is_begun_again(name, steps, tmp_path: Path, monkeypatch) -> None:
    """Every later step was lost with a KeyError, and called written; or it went on in the attempt without attempt.json, and
    nothing of the run could be read."""
    real = os.fsync

    def one_is_full(descriptor: int) -> None:
        (full if name in os.readlink(f"/proc/self/fd/{descriptor}") else real)(descriptor)

    with begun(tmp_path / "j", *steps) as writer:
        shutil.rmtree(tmp_path / "j")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", one_is_full)
            commit(writer, 2)
            assert not written(writer, 0.5)
        commit(writer, 3)
        assert written(writer)
    run = open_run(tmp_path / "j")
    assert steps_of(tmp_path / "j") == [2, 3] and [gap[:2] for gap in run.gaps()] == [(1, 1)]
    assert len(run.prompts) == len(KEYS)


@pytest.mark.parametrize("call", ["fstat", "close"])
def test_what_is_open_of_a_deleted_folder_is_let_go(call, tmp_path: Path, monkeypatch) -> None:
    """Another client of an NFS had put a copy in its place: every later step was lost. What could not be closed was closed
    again later, when its number was another file's, or ended the training."""
    real = getattr(os, call)

    def refuses(descriptor: int) -> object:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        found = real(descriptor)
        if name.startswith(str(tmp_path)) and name.endswith("(deleted)"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return found

    with begun(tmp_path / "j", 1) as writer:
        shutil.copytree(tmp_path / "j", tmp_path / "copy")
        shutil.rmtree(tmp_path / "j")
        (tmp_path / "copy").rename(tmp_path / "j")
        monkeypatch.setattr(os, call, refuses)
        commit(writer, 2)
        assert written(writer) and steps_of(tmp_path / "j") == [1, 2]
        subprocess.run(["rm", "-r", tmp_path / "j"], check=True)


def test_a_full_disk_costs_no_descriptors(tmp_path: Path, monkeypatch) -> None:
    """Where the folder was deleted, too, one a step."""
    with begun(tmp_path / "j", 1) as writer:
        shutil.rmtree(tmp_path / "j")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            commit(writer, 2)
            assert not written(writer, 0.5)
            before = len(os.listdir("/proc/self/fd"))
            commit(writer, 3)
            assert not written(writer, 0.5)
            assert len(os.listdir("/proc/self/fd")) == before
    assert steps_of(tmp_path / "j") == [2, 3]


HOLDER = """
import sys, time
from verl_adaptive.stats import Journal
journal = Journal(sys.argv[1]); journal.begin(0); print("held", flush=True); time.sleep(100)
"""


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(JournalBusy, match=f"is being written by process {process.pid} on"):
        Journal(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with begun(tmp_path, 1):
        with pytest.raises(JournalBusy, match="trainer.experiment_name"):
            Journal(tmp_path)
        assert "JournalBusy" in ran(sys.executable, "-c", HOLDER, tmp_path).stderr  # to be refused gave the lock back


def test_the_older_of_two_writers_stops(tmp_path: Path, caplog) -> None:
    """Where a file system has no locks, or somebody deleted the file."""
    with begun(tmp_path, 1) as older:
        (tmp_path / "attempt-1").mkdir()
        (tmp_path / "attempt-1" / "attempt.json").write_bytes(sealed('{"attempt": 1, "after": 1, "parent": 0}'))
        for step in (2, 3):
            commit(older, step)
        assert not written(older, 0.5)
    assert caplog.text.count("another process has begun attempt 1") == 1
    assert steps_of(tmp_path) == [1] and not (tmp_path / "attempt-1" / "steps.jsonl").exists()


def test_a_list_of_prompts_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    with begun(tmp_path, 1) as writer:
        next(tmp_path.glob("prompts-*")).unlink()
        commit(writer, 2)
    assert steps_of(tmp_path) == [1, 2] and len(open_run(tmp_path).prompts) == len(KEYS)


def test_a_step_that_cannot_be_written_is_missing_and_holds_up_nothing(tmp_path: Path) -> None:
    with begun(tmp_path, 1) as writer:
        about = tmp_path / "attempt-0" / "attempt.json"
        whole = about.read_bytes()
        next(tmp_path.glob("prompts-*")).unlink()  # so that a new attempt is begun
        about.write_bytes(b"{}\n")
        commit(writer, 2)
        while not writer._lost:
            time.sleep(0.01)
        about.write_bytes(whole)
        commit(writer, 3)
    ((first, last, why),) = open_run(tmp_path).gaps()
    assert steps_of(tmp_path) == [1, 3] and (first, last) == (2, 2) and "attempt.json is damaged" in why


def test_a_data_source_that_was_corrected_is_read(tmp_path: Path) -> None:
    for source in ("unknown", "gsm8k"):
        with Journal(tmp_path) as journal:
            journal.begin(0, KEYS, [source] * len(KEYS))
            commit(journal, 1)
    assert set(open_run(tmp_path).prompts.values("source")) == {"gsm8k"}


FOLLOWER = """
import logging, sys, time
from tests.stats.test_journal import commit
from verl_adaptive.stats import Journal
logging.basicConfig(stream=sys.stdout)
journal = Journal(sys.argv[1]); journal.begin(0)
for line in sys.stdin:
    commit(journal, int(line))
    while journal._waiting:  # a lock that another process holds is tried for seconds, on a busy machine for many
        time.sleep(0.01)
    print(not journal._stopped, flush=True)
"""


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[tuple[int, Callable[[int], str]]]:
    """A process that writes ``tmp_path/j``: its id, and what it says when it has written a step."""
    with subprocess.Popen(
        [sys.executable, "-c", FOLLOWER, str(tmp_path / "j")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def write(step: int) -> str:
            print(step, file=process.stdin, flush=True)
            said = [process.stdout.readline()]
            while said[-1] not in ("True\n", "False\n", ""):
                said.append(process.stdout.readline())
            return "".join(said)

        yield process.pid, write
        process.kill()


def test_a_folder_that_was_deleted_is_locked_anew(tmp_path: Path, follower) -> None:
    """The lock went with the folder, and a second writer was let in."""
    pid, write = follower
    write(1)
    shutil.rmtree(tmp_path / "j")
    assert "deleted or replaced" in write(2)
    with pytest.raises(JournalBusy, match=f"process {pid} on"):
        Journal(tmp_path / "j")


def test_the_writer_of_a_folder_that_was_moved_leaves_the_next_one_alone(tmp_path: Path, follower) -> None:
    """It wrote its steps into the journal of the run that had begun in the folder's old place, and that one stopped."""
    pid, write = follower
    write(1)
    (tmp_path / "j").rename(tmp_path / "moved")
    with pytest.raises(JournalBusy, match=f"process {pid} on"):
        Journal(tmp_path / "moved")
    with begun(tmp_path / "j", 1) as second:
        assert "another process writes in its place; this one writes no more after step 1" in write(2)
        commit(second, 2)
        assert written(second)
    assert steps_of(tmp_path / "j") == [1, 2] and len(JournalReader(tmp_path / "j").attempts) == 1


def test_text_of_anything_is_kept(tmp_path: Path) -> None:
    with Journal(tmp_path) as writer:
        writer.begin(0)
        groups = Groups.from_lists([0], [[1.0]])
        odd = {"x": float("inf"), ',"scalars":': ',"ledger":', "\ud800": np.float32(1), "n": {"a": (1, Path("p"))}}
        writer.commit_step(1, groups, KEYS[:1], ["a\0\udc80"], odd, odd, sources=["\ud800"])
        with pytest.raises(ValueError, match="1 groups"):
            writer.commit_step(2, groups, KEYS[:1], [], sources=["s"])
    (page,) = open_run(tmp_path).observations()
    assert page.column("source").to_pylist() == ["\\ud800"]
    assert '"x": null' in open_run(tmp_path).steps.column("ledger")[0].as_py()
