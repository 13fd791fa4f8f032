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
        monkeypatch.setattr("verl_adaptive.stats.database.filesystem_of", lambda path: "nfs4")
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
        ("mysql://u:secret@h/d", "only SQLite"),
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


def test_a_locked_file_holds_training_up_for_a_moment_only(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal.open(str(path), run_id="r") as journal:
        assert commit(journal, 1)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        for step in range(2, 8):
            assert not commit(journal, step)
        # Six steps, of which three are tried (the pauses between grow), a second each.
        assert time.monotonic() - began < 10
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


def test_the_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal.open(f"sqlite:///{path}?journal_mode=wal", run_id="r") as journal:
        for step in range(1, 100):
            assert commit(journal, step, count=200)
            assert journal._checkpointer is not None
            journal._checkpointer.join()
        log = Path(f"{path}-wal").stat().st_size
        assert log < 4 * path.stat().st_size / 3 and path.stat().st_size > 1_000_000
    assert not Path(f"{path}-wal").exists()


def test_the_suite_asks_for_a_url() -> None:
    with pytest.raises(NotImplementedError, match="make_url"):
        JournalSuite.make_url.__wrapped__(None)  # type: ignore[attr-defined]
