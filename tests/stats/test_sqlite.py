"""SQLite where it lies: file systems, full and read-only disks, locked and damaged files."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.stats.mounts import tmpfs
from verl_adaptive.stats import Journal, JournalError, open_store
from verl_adaptive.stats.database import parse_url
from verl_adaptive.stats.filesystem import filesystem_of, wal_is_safe
from verl_adaptive.stats.locks import is_running, process_mark
from verl_adaptive.testing.stores import JournalSuite, make_groups, make_keys

KEYS = make_keys(20)


def commit(journal: Journal, step: int, count: int = 6) -> bool:
    groups = make_groups(step, count)
    return journal.commit_step(step, groups, KEYS[groups.row], ["kept"] * count)


def steps(path: Path) -> list[int]:
    return open_store(path).steps()["step"].tolist()


# -- which journal mode ---------------------------------------------------------------------------------------------

MOUNTS = """\
21 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
22 21 0:20 / /proc rw - proc proc rw
23 21 0:30 / /home rw - nfs4 server:/home rw
24 23 254:2 / /home/me/local\\040disk rw - xfs /dev/vdb rw
25 21 0:31 / /lustre rw - lustre mds:/fs rw
26 21 0:32 / /fuse rw - fuse.sshfs host: rw
27 21 0:33 / /shadow rw - ext4 /dev/vdc rw
28 21 0:34 / /shadow rw - 9p share rw
29 21 0:35 / /container rw - overlay overlay rw,lowerdir=/a:/b,upperdir=/nowhere/upper,workdir=/nowhere/work
30 21 0:36 / /union rw - overlay overlay rw,lowerdir=/a,upperdir=/,workdir=/
31 21 0:37 / /win rw - cifs //server/share rw
32 21 0:38 / /mnt/数据 rw - nfs4 server:/数据 rw
33 21 0:39 / /mnt/\udcff rw - ext4 /dev/vdd rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "wal"),
    [
        ("/data/run/adaptive.sqlite", "ext4", True),
        ("/home/me/adaptive.sqlite", "nfs4", False),
        ("/homes/adaptive.sqlite", "ext4", True),
        ("/home/me/local disk/adaptive.sqlite", "xfs", True),
        ("/lustre/a/b/c", "lustre", False),
        ("/fuse/x", "fuse.sshfs", False),
        ("/shadow/x", "9p", False),
        ("/container/x", "overlay", False),
        ("/union/x", "overlay:ext4", True),
        ("/win/x", "cifs", False),
        ("/mnt/数据/x", "nfs4", False),
        ("/mnt/\udcff/x", "ext4", True),
    ],
)
def test_the_file_system_decides_the_journal_mode(path: str, kind: str, wal: bool) -> None:
    assert filesystem_of(path, MOUNTS) == kind
    assert wal_is_safe(kind) is wal


def test_unknown_file_systems_get_the_rollback_journal() -> None:
    assert filesystem_of("/x", "") == "unknown" and filesystem_of("/x", "nonsense\n- - -\n") == "unknown"
    for kind in ("unknown", "beegfs", "gpfs", "overlay:nfs", "virtiofs", "smb3", "ceph"):
        assert not wal_is_safe(kind)


def mode(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    finally:
        connection.close()


def test_the_mode_is_set_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with tmpfs(tmp_path / "disk", "8m") as folder:
        with Journal.open(str(folder / "a.sqlite"), run_id="r") as journal:
            assert all(commit(journal, step) for step in range(1, 5))
        assert mode(folder / "a.sqlite") == "wal"
        assert caplog.text.count("write-ahead log, on tmpfs") == 1
        caplog.clear()
        monkeypatch.setattr("verl_adaptive.stats.backends.sqlite.filesystem_of", lambda path: "nfs4")
        with Journal.open(str(folder / "b.sqlite"), run_id="r") as journal:
            assert all(commit(journal, step) for step in range(1, 5))
        assert mode(folder / "b.sqlite") == "delete"
        assert caplog.text.count("rollback journal, on nfs4") == 1
        # The same file after it was moved from a local disk to a network file system.
        Journal.open(str(folder / "a.sqlite"), run_id="r").close()
        assert mode(folder / "a.sqlite") == "delete" and steps(folder / "a.sqlite") == [1, 2, 3, 4]
        Journal.open(f"sqlite:///{folder}/a.sqlite?journal_mode=wal", run_id="r").close()
        assert mode(folder / "a.sqlite") == "wal"


def test_urls() -> None:
    assert parse_url("/data/a.sqlite").render_as_string() == "sqlite:////data/a.sqlite"
    assert parse_url(Path("/data/a b#c.db")).database == "/data/a b#c.db"
    assert parse_url("postgresql://u:p@h/d").drivername == "postgresql+psycopg"
    for wrong, what in [
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("mysql://u:secret@h/d", "only PostgreSQL"),
        ("postgresql://u:secret@h:port/d", "not a database URL"),
    ]:
        with pytest.raises(JournalError, match=what) as caught:
            parse_url(wrong)
        assert "secret" not in str(caught.value)
    with pytest.raises(JournalError, match="wal or delete, not 'off'"):
        Journal.open("sqlite:////tmp/x.sqlite?journal_mode=off", run_id="r")
    for run in ("", "x" * 256):
        with pytest.raises(JournalError, match="1 to 255"):
            Journal.open("/tmp/x.sqlite", run_id=run)


# -- disks that refuse ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
def test_training_goes_on_when_the_disk_is_full(tmp_path: Path, journal_mode: str) -> None:
    with tmpfs(tmp_path / "small", "1m") as folder:
        journal = Journal.open(f"sqlite:///{folder}/j.sqlite?journal_mode={journal_mode}", run_id="r")
        step = 0
        while journal.health().ok:  # until it does not fit any more
            step += 1
            assert step < 100
            commit(journal, step, count=300)
        for _ in range(3):
            step += 1
            assert not commit(journal, step, count=300)
        health = journal.health()
        assert "full" in str(health) and health.waiting[-1] == step and not health.missing
        assert health.last_step == health.waiting[0] - 1
        subprocess.run(["mount", "-o", "remount,size=16m", str(folder)], check=True)  # somebody makes room
        assert journal.flush() and journal.health().ok
        journal.close()
        assert steps(folder / "j.sqlite") == list(range(1, step + 1))
        connection = sqlite3.connect(folder / "j.sqlite")
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()


def test_a_read_only_disk_is_an_error_at_start_and_a_backlog_later(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "8m") as folder:
        path = folder / "j.sqlite"
        with Journal.open(str(path), run_id="r") as journal:
            commit(journal, 1)
        with tmpfs(folder, "8m", remount="ro"):
            with pytest.raises(JournalError, match=r"cannot be opened: .*[Rr]ead-only.*adaptive\.store\.url"):
                Journal.open(str(path), run_id="r")
            assert steps(path) == [1]  # people can still read it
            with pytest.raises(JournalError, match="cannot be opened"):
                Journal.open(str(folder / "new.sqlite"), run_id="r")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal.open(str(tmp_path / "file" / "j.sqlite"), run_id="r")


def test_a_locked_file_holds_training_up_for_a_moment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.sqlite"
    with Journal.open(str(path), run_id="r") as journal:
        assert commit(journal, 1)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        tried: list[int] = []
        real = journal._write
        monkeypatch.setattr(journal, "_write", lambda *args: (tried.append(1), real(*args)))
        for step in range(2, 8):
            assert not commit(journal, step)
        assert len(tried) <= 3  # each waits a second for the lock, and the pauses between grow
        assert "locked" in str(journal.health())
        other.execute("ROLLBACK")
        other.close()
        assert journal.flush()
    assert steps(path) == list(range(1, 8))


def test_a_file_that_is_no_database_is_an_error_at_start(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"this is not a database" * 1000)
    with pytest.raises(JournalError, match=r"not a database.*moved away"):
        Journal.open(str(path), run_id="r")
    with pytest.raises(JournalError, match="not a database"):
        open_store(path)


def test_damage_while_training_is_said_and_survived(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal.open(f"sqlite:///{path}?journal_mode=delete", run_id="r")
    assert commit(journal, 1, count=500)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(24)
        file.write(b"\x7f\x01\x02\x03")  # the change counter: the writer must not trust its cache
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    for step in range(2, 5):
        assert not commit(journal, step)
    assert not journal.health().ok and journal.health().error
    journal.close()  # does not raise either


def test_flipped_bytes_never_crash_a_reader(tmp_path: Path) -> None:
    """SQLite has no checksums, so damage may go unnoticed; what is noticed must be an error of ours."""
    path = tmp_path / "j.sqlite"
    with Journal.open(f"sqlite:///{path}?journal_mode=delete", run_id="r") as journal:
        for step in range(1, 10):
            commit(journal, step, count=30)
    raw = path.read_bytes()
    noticed = 0
    for offset in range(0, len(raw), 997):
        damaged = bytearray(raw)
        damaged[offset] ^= 0xFF
        path.write_bytes(damaged)
        try:
            store = open_store(path)
            store.runs()
            store.observations("r")
        except JournalError:
            noticed += 1
    assert noticed > 0


# -- files that disappear -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
@pytest.mark.parametrize("how", ["delete", "delete all", "move", "folder", "older copy", "log"])
def test_a_journal_that_disappears_is_noticed_and_begun_again(
    tmp_path: Path, journal_mode: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An open file can be written to long after its name is gone: SQLite would not say so, ever."""
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "j.sqlite"
    with Journal.open(f"sqlite:///{path}?journal_mode={journal_mode}", run_id="r", meta={"preset": "greso"}) as journal:
        for step in (1, 2):
            assert commit(journal, step)
        journal._backend.checkpointer.join()
        if how == "older copy":
            with sqlite3.connect(path) as source, sqlite3.connect(tmp_path / "copy") as target:
                source.backup(target)
            source.close(), target.close()
        for step in range(3, 6):
            assert commit(journal, step)
        if how == "delete":
            path.unlink()
        elif how == "delete all":
            for file in folder.glob("j.sqlite*"):
                file.unlink()
        elif how == "move":
            for file in folder.glob("j.sqlite*"):
                file.rename(tmp_path / file.name)
        elif how == "folder":
            folder.rename(tmp_path / "elsewhere")
        elif how == "older copy" and journal_mode == "delete":
            journal._drop()  # between two attempts
            os.replace(tmp_path / "copy", path)
        elif how == "older copy":
            Path(f"{path}-wal").unlink(missing_ok=True)
            os.replace(tmp_path / "copy", path)
        elif journal_mode == "wal":
            Path(f"{path}-wal").unlink()
        done = [commit(journal, step) for step in range(6, 9)]
        assert all(done)
        health = journal.health()
    kept = {"older copy": [1, 2], "log": [1, 2, 3, 4, 5]}.get(how, [])
    assert steps(path) == [*kept, 6, 7, 8]
    lost = [(kept[-1] + 1 if kept else 1, 5)] if len(kept) < 5 else []
    assert [gap[:2] for gap in open_store(path).gaps("r")] == lost and list(health.missing) == lost
    if lost:
        assert "was deleted, moved or replaced while it was being written" in caplog.text
    assert open_store(path).runs()["meta"][0] == {"preset": "greso"}
    if how in ("move", "folder"):  # what was moved is whole
        assert steps(tmp_path / ("elsewhere" if how == "folder" else ".") / "j.sqlite") == [1, 2, 3, 4, 5]


def test_a_journal_whose_folder_cannot_come_back_waits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Journal.open(str(folder / "j.sqlite"), run_id="r") as journal:
        assert commit(journal, 1)
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("in the way")
        assert not commit(journal, 2)
        assert journal.health().waiting == (2,)
        folder.unlink()
        assert journal.flush()
    assert steps(folder / "j.sqlite") == [2]


@pytest.mark.parametrize("readers", [4])
def test_readers_do_not_keep_a_writer_without_a_log_waiting(tmp_path: Path, readers: int) -> None:
    """A rollback journal lets the writer commit only while nobody reads: a reader's pages are short there."""
    path = tmp_path / "j.sqlite"
    with Journal.open(f"sqlite:///{path}?journal_mode=delete", run_id="r") as journal:
        for step in range(1, 20):
            assert commit(journal, step, count=300)
        pages = [page.num_rows for page in journal.reader().observations("r")]
        assert max(pages) <= 1000 and sum(pages) == 19 * 300
    with Journal.open(f"sqlite:///{path}?journal_mode=wal", run_id="r") as journal:
        pages = [page.num_rows for page in journal.reader().observations("r")]
        assert pages == [19 * 300]


# -- locks ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A data-loader worker that outlives a killed driver must not keep the run locked."""
    code = (
        "import os, sys, time\n"
        "from verl_adaptive.stats import Journal\n"
        "journal = Journal.open(sys.argv[1], run_id='r')\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(30)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "j.sqlite"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.wait()
    try:
        with Journal.open(str(path), run_id="r", patience=0) as journal:
            assert commit(journal, 1)
    finally:
        os.kill(child, 9)
        process.stdout.close()


def test_a_writer_under_another_name_of_the_file_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with Journal.open(str(tmp_path / "real" / "j.sqlite"), run_id="r"), pytest.raises(JournalError, match="this very"):
        Journal.open(str(tmp_path / "link" / "j.sqlite"), run_id="r", patience=0)


def other_writer(path: Path) -> subprocess.Popen[str]:
    """Another process that writes the run until its standard input ends; it has written a step when this returns."""
    code = (
        "import sys\n"
        "from tests.stats.test_sqlite import commit\n"
        "from verl_adaptive.stats import Journal\n"
        "with Journal.open(sys.argv[1], run_id='r') as journal:\n"
        "    for step, line in enumerate(iter(sys.stdin.readline, ''), 1):\n"
        "        print(commit(journal, step), journal.health(), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert next_step(process).startswith("True")
    return process


def next_step(process: subprocess.Popen[str]) -> str:
    """What another writer says after one more step."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_deleting_lock_files_lets_no_second_writer_in(tmp_path: Path) -> None:
    """``rm *.lock``, as one does after a crash that was none."""
    path = tmp_path / "j.sqlite"
    process = other_writer(path)
    try:
        for _ in range(2):
            for file in tmp_path.glob("*.lock"):
                file.unlink()
            with pytest.raises(JournalError, match=rf"already being written to .* by process {process.pid} on"):
                Journal.open(str(path), run_id="r", patience=0)
            assert next_step(process).startswith("True complete")
        assert len(list(tmp_path.glob("*.lock"))) == 1  # made again
        Journal.open(str(path), run_id="another").close()
        process.kill()
        process.wait()
        with Journal.open(str(path), run_id="r", patience=0) as journal:  # a dead writer's claim is void
            assert commit(journal, 4)
        assert open_store(f"{path}#r").steps()["step"].tolist() == [1, 2, 3, 4]
    finally:
        process.kill()
        process.communicate()


def test_a_writer_whose_run_was_taken_over_stops(tmp_path: Path) -> None:
    """On another machine nobody can tell whether the holder lives: the newer one writes, never both."""
    path = tmp_path / "j.sqlite"
    with Journal.open(str(path), run_id="r") as first:
        assert commit(first, 1)
        with sqlite3.connect(path) as database:
            database.execute('UPDATE verl_adaptive_writers SET holder = \'{"host": "elsewhere", "pid": 1}\'')
        database.close()
        for file in tmp_path.glob("*.lock"):
            file.unlink()
        process = other_writer(path)
        try:
            assert not commit(first, 2)
            assert f"process {process.pid} on" in str(first.health())
            assert next_step(process).startswith("True")
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("holder", ["", "null", "[]", "{}", '{"host": 1, "pid": "x"}', "[" * 100000, '{"pid": 1e400}'])
def test_a_claim_that_makes_no_sense_is_void(tmp_path: Path, holder: str) -> None:
    path = tmp_path / "j.sqlite"
    Journal.open(str(path), run_id="r").close()
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO verl_adaptive_writers VALUES ('r', 't', ?)", (holder,))
    database.close()
    with Journal.open(str(path), run_id="r", patience=0) as journal:
        assert commit(journal, 1)


def test_marks_of_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = process_mark(child.pid)
    assert (
        mark
        and is_running(child.pid, mark)
        and not is_running(child.pid, "another")
        and not is_running(child.pid, None)
    )
    child.kill()
    while process_mark(child.pid) is not None:  # a zombie from now on: nobody has waited for it
        time.sleep(0.01)
    assert not is_running(child.pid, mark)
    child.communicate()
    assert not is_running(child.pid, mark) and not is_running(0, mark)


def test_the_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal.open(f"sqlite:///{path}?journal_mode=wal", run_id="r") as journal:
        for step in range(1, 100):
            assert commit(journal, step, count=200)
            journal._backend.checkpointer.join()
        log = Path(f"{path}-wal").stat().st_size
        assert log < 4 * path.stat().st_size / 3 and path.stat().st_size > 1_000_000
    assert not Path(f"{path}-wal").exists()


def test_the_suite_asks_for_a_url() -> None:
    with pytest.raises(NotImplementedError, match="make_url"):
        JournalSuite.make_url.__wrapped__(None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("meta", ["null", "[]", "not JSON", '{"checkpoints": 3}'])
def test_a_run_that_says_nothing_of_its_checkpoints_is_nobodys(tmp_path, meta) -> None:
    url = str(tmp_path / "adaptive.sqlite")
    Journal.open(url, run_id="run").close()
    with sqlite3.connect(url) as connection:
        connection.execute("UPDATE runs SET meta = ?", (meta,))
    with Journal.open(url, run_id="run", meta={"checkpoints": "/here"}) as journal:
        assert journal.elsewhere is None
