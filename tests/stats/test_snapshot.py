"""Snapshots: whole or refused, never half; every difference named with its way out."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.programs import ran
from tests.stats.made import make_keys
from tests.stats.mounts import tmpfs
from tests.stats.test_table import equal, filled
from verl_adaptive.stats import SnapshotMissing, StatsTable, read_snapshot, write_snapshot
from verl_adaptive.stats import snapshot as module
from verl_adaptive.stats.snapshot import SnapshotError
from verl_adaptive.stats.table import Column

META = {"policy": "greso", "dataset": "f1", "step": 7}
STATE = {
    "controller": {"p": 0.1 + 0.2, "nan": math.nan, "inf": -math.inf, "on": True, "none": None, "name": "ünï\0\ud800"},
    "held": [np.arange(5, dtype=np.uint64) + 2**63, {"deep": np.array([[1.5, math.nan]], dtype=np.float32)}],
    "raw": b"\x00\xff",
    "big": 2**80,
    "empty": np.empty((0, 3)),
    "flags": np.array([True, False]),
    "words": np.array(["a", "bc"]),
}


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def write(folder: Path, table: StatsTable | None = None, state: dict[str, Any] | None = None, **meta: Any) -> None:
    write_snapshot(
        folder, filled() if table is None else table, STATE if state is None else state, meta={**META, **meta}
    )


def test_there_and_back(tmp_path: Path) -> None:
    table = filled()
    write(tmp_path / "global_step_7" / "adaptive", table)
    again, state, manifest = read_snapshot(tmp_path / "global_step_7" / "adaptive")
    equal(table, again)
    assert same_state(STATE, state)
    assert manifest["meta"] == META and manifest["prompts"] == 100 and manifest["schema"] == module.SNAPSHOT_SCHEMA
    again.declare("greso", {"p": Column("f4", math.nan)})
    assert again.col("greso.p").tobytes() == table.col("greso.p").tobytes()
    assert np.array_equal(again.rows_for(make_keys(120)), np.arange(120)) and again.col("greso.n")[110] == -5


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list a process's threads")
def test_reading_leaves_no_thread_behind(tmp_path: Path) -> None:
    """A thread of Arrow's that lets go of a Python buffer while the interpreter ends aborts the process."""
    write(tmp_path)
    code = (
        "import os, sys\n"
        "import pyarrow.parquet, verl_adaptive.stats as stats\n"
        "before = set(os.listdir('/proc/self/task'))\n"
        "stats.read_snapshot(sys.argv[1])\n"
        "print(len(set(os.listdir('/proc/self/task')) - before))"
    )
    done = ran(sys.executable, "-c", code, tmp_path)
    assert done.stdout == "0\n", done.stderr


def test_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART_ROWS", 7)
    table = filled()
    write(tmp_path, table)
    assert len(list(tmp_path.glob("prompts-*.parquet"))) == 15
    equal(table, read_snapshot(tmp_path)[0])


def test_the_same_state_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name)
    files = [sorted((p.name, p.read_bytes()) for p in (tmp_path / n).iterdir()) for n in ("one", "two")]
    assert files[0] == files[1]


def test_values_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    for state, where in [
        ({"a": {"b": [object()]}}, r"state\['a'\]\['b'\]\[0\]: a object"),
        ({"a": np.array([object()])}, r"\['a'\].*Python objects"),
        ({"a": {1: 2}}, r"the key 1 is a int"),
        ({"__ndarray__": "a0"}, "reserved"),
        ({"a": {2}}, "set"),
    ]:
        with pytest.raises(TypeError, match=where):
            write(tmp_path, state=state)


def test_numpy_scalars_and_tuples_come_back_plain(tmp_path: Path) -> None:
    write(tmp_path, state={"a": np.float32(0.1), "b": (1, np.int64(2)), "c": np.bool_(True)})
    assert read_snapshot(tmp_path)[1] == {"a": float(np.float32(0.1)), "b": [1, 2], "c": True}


# -- foreign --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_plain_run_has_none(tmp_path: Path) -> None:
    with pytest.raises(SnapshotMissing, match="no snapshot"):
        read_snapshot(tmp_path / "adaptive")
    (tmp_path / "adaptive").mkdir()
    with pytest.raises(SnapshotMissing):
        read_snapshot(tmp_path / "adaptive")


def test_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_SCHEMA", 99)
    write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match=r"manifest\.json: its layout is 99, this verl-adaptive reads 2"):
        read_snapshot(tmp_path)


# -- damaged --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    write(folder)
    return folder


def damaged_copy(intact: Path, folder: Path, name: str, data: bytes | None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(intact, folder)
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    return folder / name


def names(intact: Path) -> list[str]:
    return sorted(p.name for p in intact.iterdir())


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_change_to_any_byte_is_an_error_that_names_the_file(
    data: st.DataObject, intact: Path, tmp_path: Path
) -> None:
    name = data.draw(st.sampled_from(names(intact)))
    raw = bytearray((intact / name).read_bytes())
    change = data.draw(st.sampled_from(["flip", "cut", "lengthen"]))
    if change == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    elif change == "lengthen":
        raw += data.draw(st.binary(min_size=1, max_size=9))
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path = damaged_copy(intact, tmp_path / "s", name, bytes(raw))
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(tmp_path / "s")
    assert str(path) in str(caught.value) and "earlier checkpoint" in str(caught.value)


#: Files that are no snapshot's own, so that none of them is opened.
OUTSIDE = ("../../etc/passwd", "/etc/passwd", "state.json", "../state-0123456789abcdef.json")
OUTSIDE += ("state-0123456789abcdef.json/../x",)


def test_a_well_sealed_manifest_of_nonsense(intact: Path, tmp_path: Path) -> None:
    good = json.loads((intact / "manifest.json").read_text())
    strange: list[dict[str, Any]] = [
        {},
        {**good, "files": []},
        {**good, "files": {}},
        *({**good, "files": {**good["files"], name: {"bytes": 2, "blake2b": "x"}}} for name in OUTSIDE),
        {**good, "prompts": 3},
        {**good, "prompts": "many"},
        {**good, "files": dict.fromkeys(good["files"], 7)},
    ]
    for manifest in strange:
        damaged_copy(
            intact, tmp_path / "s", "manifest.json", module._seal({**manifest, "schema": module.SNAPSHOT_SCHEMA})
        )
        with pytest.raises(SnapshotError) as caught:
            read_snapshot(tmp_path / "s")
        assert not set(OUTSIDE) & set(manifest.get("files", ())) or "it names a file" in str(caught.value)
    for name in (*OUTSIDE, "others-0123456789abcdef"):
        assert module.attached(tmp_path / "s", {"attached": {name: {}}}, "ours") is None


@pytest.mark.parametrize("instead", ["nothing", "folder", "pipe", "endless"])
def test_every_file_that_is_none_is_named(instead: str, intact: Path, tmp_path: Path) -> None:
    assert len(names(intact)) == 3
    for name in names(intact):
        path = damaged_copy(intact, tmp_path / "s", name, None)
        if instead == "folder":
            path.mkdir()
        elif instead == "pipe":  # opening it waits for somebody to write
            os.mkfifo(path)
        elif instead == "endless":
            path.symlink_to("/dev/zero")
        with pytest.raises(SnapshotError, match="missing" if instead == "nothing" else "") as caught:
            read_snapshot(tmp_path / "s")
        assert str(path) in str(caught.value) and not isinstance(caught.value, SnapshotMissing)


# -- writing under difficulties ---------------------------------------------------------------------------------------


class Died(BaseException):
    """The process ends here."""


def test_a_writer_that_dies_at_any_moment_leaves_the_old_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever call of the operating system is the last one, the directory holds the old or the new snapshot, whole."""
    old, new = filled(), filled()
    new.col("visits")[:] += 1
    calls = {"left": 0, "all": 0}

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls["all"] += 1
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Died(name)
            return real(*args, **options)

        return call

    outcomes = set()
    for moment in range(1, 200):
        folder = tmp_path / str(moment)
        write(folder, old)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted("replace", os.replace))
            patch.setattr(os, "fsync", counted("fsync", os.fsync))
            patch.setattr(Path, "unlink", counted("unlink", Path.unlink))
            calls["left"] = moment
            try:
                write(folder, new, step=8)
                finished = True
            except Died:
                finished = False
        table, _, manifest = read_snapshot(folder)
        equal(new if manifest["meta"]["step"] == 8 else old, table)
        outcomes.add((finished, manifest["meta"]["step"]))
        write(folder, old)  # the next writer sweeps up
        assert names(folder) == names(tmp_path / "1"), "left-overs"
        if finished:
            break
    assert outcomes == {(False, 7), (False, 8), (True, 8)}


def test_a_full_file_system(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m") as folder:
        write(folder / "s")
        big = StatsTable()
        big.rows_for(make_keys(200_000))
        with pytest.raises(OSError) as caught:
            write(folder / "s", big, step=8)
        assert caught.value.errno == errno.ENOSPC
        table, _, manifest = read_snapshot(folder / "s")
        assert manifest["meta"]["step"] == 7 and not list(folder.glob("s/*.tmp"))
        equal(filled(), table)
        write(folder / "s", step=9)  # there is room for a small one again
        assert read_snapshot(folder / "s")[2]["meta"]["step"] == 9


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "transfer_queue").mkdir()
    for name in ("notes.txt", "state.json", "prompts.parquet", "x.tmp"):
        (tmp_path / name).write_text("mine")
    write(tmp_path)
    write(tmp_path, StatsTable(), step=8)
    kept = {"notes.txt", "state.json", "prompts.parquet", "x.tmp", "transfer_queue", "manifest.json"}
    assert kept < set(names(tmp_path)) and len(names(tmp_path)) == len(kept) + 2
