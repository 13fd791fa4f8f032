"""Damaged and forged files: every reader answers rightly or with an error of ours that names the file."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cli.stores import change_lines, hostile_rows, make_run, write_dataset
from tests.fuzz.common import damage, examples, json_values, seeds, survives
from tests.world import make_engine, run_step
from verl_adaptive.cli import main
from verl_adaptive.record import Recorder, replay
from verl_adaptive.report.collect import collect
from verl_adaptive.report.page import render
from verl_adaptive.stats import StatsTable, dataset_keys, open_run, read_snapshot, warm_start
from verl_adaptive.stats.atomic import TEMPORARY
from verl_adaptive.stats.snapshot import SnapshotError, _digest, _seal, attached, read_manifest
from verl_adaptive.stats.state import decode_state, encode_state


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run: ``adaptive``, ``global_step_12/adaptive`` and ``data.parquet``."""
    folder = tmp_path_factory.mktemp("run")
    _, rows = make_run(folder, prompts=40, steps=12, validate=lambda step: 0.1)
    write_dataset(folder / "data.parquet", rows, row_group_size=13)
    return folder


def read_all(source: Path) -> None:
    """Everything that looks at a journal."""
    render(collect(open_run(source)))


def same_text(said: list[str], *names: str) -> None:
    """An error names the file that it is about, in one of the ways that users know it by."""
    assert not said or any(name in said[0] for name in names), said


# -- the journal ----------------------------------------------------------------------------------------------------


STRANGE = [
    *("x", "", -1, 2**62, 10**30, 1e308, float("inf"), None),
    *([], {}, {"run": 1}, {"math": -5}, {"math": []}, [[[]]]),
]


@examples(40)
@given(seeds, st.sampled_from(["attempt.json", "steps.jsonl", "validations.jsonl"]), st.sampled_from(STRANGE))
@example(158, "validations.jsonl", {})  # as `generated`: nothing, and no number
def test_a_journal_with_strange_values(run, tmp_path_factory, capsys, seed, name, value) -> None:
    folder = tmp_path_factory.mktemp("journal") / "adaptive"
    shutil.copytree(run / "adaptive", folder)
    rng = random.Random(seed)
    change_lines(folder / "attempt-0" / name, lambda line: {**line, rng.choice(sorted(line)): value})
    with survives() as said:
        read_all(folder)
    same_text(said, str(folder), "the journal", "run ")
    out = str(folder.parent / "out.jsonl")
    for words in (["stats", folder, "--json"], ["compare", folder, folder], ["export", folder, out]):
        assert main([str(word) for word in words]) in (0, 1)
        said = capsys.readouterr().err
        assert "defect" not in said and "Warning" not in said
    shutil.rmtree(folder.parent)


# -- snapshots --------------------------------------------------------------------------------------------------------


def forge(source: Path, folder: Path, **files: bytes) -> None:
    """A snapshot whose manifest fits files of somebody else's making."""
    shutil.copytree(source, folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for stem, data in files.items():
        old = next(name for name in manifest["files"] if name.startswith(stem))
        del manifest["files"][old]
        name = f"{old.rsplit('-', 1)[0]}-{_digest(data)[:16]}.{old.rsplit('.', 1)[1]}"
        (folder / name).write_bytes(data)
        manifest["files"][name] = {"bytes": len(data), "blake2b": _digest(data)}
    (folder / "manifest.json").write_bytes(_seal(manifest))


@examples(40)
@given(st.data())
def test_a_forged_snapshot(run, tmp_path_factory, data) -> None:
    """The hashes fit; the content is anything."""
    folder = tmp_path_factory.mktemp("forged") / "adaptive"
    source = run / "global_step_12" / "adaptive"
    rng = random.Random(data.draw(seeds))
    stem = data.draw(st.sampled_from(["state", "prompts"]))
    original = next(source.glob(f"{stem}-*")).read_bytes()
    if stem == "state" and rng.random() < 0.5:
        forged = json.dumps(data.draw(json_values)).encode()
    elif stem == "state" and rng.random() < 0.3:
        forged = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
    else:
        forged = damage(original, rng)
    forge(source, folder, **{stem: forged})
    with survives() as said:
        table, _, _ = read_snapshot(folder)
        table.view_by_source()
    same_text(said, str(folder))
    shutil.rmtree(folder.parent)


@pytest.mark.parametrize("value", [None, [1], {"step": [1]}, {"settings": 5, "step": {}}])
@pytest.mark.parametrize("key", ["meta", "files", "attached"])
def test_a_manifest_of_somebody_elses_making(run, tmp_path, capsys, key, value) -> None:
    """Its digest fits; what it holds is anything."""
    folder = tmp_path / "global_step_12" / "adaptive"
    shutil.copytree(run / "global_step_12" / "adaptive", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[key] = value
    (folder / "manifest.json").write_bytes(_seal(manifest))
    with survives() as said:
        read_snapshot(folder)
    same_text(said, str(folder))
    with survives() as said:
        attached(folder, read_manifest(folder), "transfer_queue")
    same_text(said, str(folder))
    # beside a journal, whose commands look at the newest snapshot too
    shutil.copytree(run / "adaptive", tmp_path / "adaptive")
    for source in (folder, tmp_path):
        for command, *more in (
            ["stats"],
            ["export", tmp_path / "x.csv", "--overwrite"],
            ["report", "-o", tmp_path / "r.html"],
        ):
            assert main([command, str(source), *map(str, more)]) in (0, 1) and "defect" not in capsys.readouterr().err


def _npy(shape: tuple[int, ...], dtype: str, payload: bytes) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue() + payload


@pytest.mark.parametrize(
    "array",
    [
        _npy((1 << 50,), "<f8", b"12345678"),
        _npy((2,), "|O", b"\x80\x04N."),
        b"\x93NUMPY\x09\x00garbage",
        b"\x93NUMPY\x01\x00\x0b\x00{'descr': (\n",
        b"PK\x05\x06" + bytes(18) + b"trailing",
        None,
    ],
    ids=["claims a petabyte", "objects", "unknown version", "half a header", "an archive", "no text"],
)
def test_an_array_that_lies_about_its_size(run, tmp_path, array) -> None:
    said = array and base64.b64encode(array).decode()
    forge(run / "global_step_12" / "adaptive", tmp_path / "adaptive", state=json.dumps({"__ndarray__": said}).encode())
    with pytest.raises(SnapshotError, match="is damaged"):
        read_snapshot(tmp_path / "adaptive")


def test_a_table_without_keys_takes_no_memory(run, tmp_path) -> None:
    """A part without columns can claim any number of rows."""
    source = run / "global_step_12" / "adaptive"
    meta = pq.read_schema(next(source.glob("prompts-*"))).metadata
    out = io.BytesIO()
    empty = pa.table({"key": pa.nulls(10, pa.string())}).replace_schema_metadata(meta)
    pq.write_table(empty, out)
    forge(source, tmp_path / "adaptive", prompts=out.getvalue())
    with pytest.raises(SnapshotError, match="column key"):
        read_snapshot(tmp_path / "adaptive")


@examples(40)
@given(
    st.dictionaries(
        st.text(max_size=6).filter(lambda k: k not in ("__ndarray__", "__bytes__")), json_values, max_size=4
    )
)
def test_any_state_comes_back(state) -> None:
    back = decode_state(encode_state(state))
    assert json.dumps(back, sort_keys=True) == json.dumps(state, sort_keys=True)


# -- data sets and results --------------------------------------------------------------------------------------------


@examples(40)
@given(seeds)
def test_a_damaged_data_set(run, tmp_path_factory, capsys, seed) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("data")
    path, out = folder / "data.parquet", folder / "kept.parquet"
    path.write_bytes(damage((run / "data.parquet").read_bytes(), rng))
    status = main(["export", str(run / "adaptive"), str(out), "--data", str(path), "--where", "visits >= 0"])
    said = capsys.readouterr().err
    assert status in (0, 1) and "defect" not in said and len(said.splitlines()) == 1, said
    assert out.exists() == (status == 0) and not list(folder.glob(f"*{TEMPORARY}"))
    shutil.rmtree(folder)


def results_file(folder: Path, rows: list, suffix: str) -> Path:
    path = folder / f"results{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory) -> dict[str, bytes]:
    """An offline evaluation in both formats."""
    folder = tmp_path_factory.mktemp("evaluation")
    rows = [
        {**{k: row[k] for k in ("data_source", "prompt", "reward_model")}, "n": 8, "pass_rate": i / 40, "tokens": 100.0}
        for i, row in enumerate(hostile_rows(40))
    ]
    return {suffix: results_file(folder, rows, suffix).read_bytes() for suffix in (".parquet", ".jsonl")}


def sane(table: StatsTable) -> None:
    """No statistic is poisoned: whole, finite numbers in their places."""
    rollouts, successes = table.col("rollouts"), table.col("successes")
    assert (successes >= 0).all() and (successes <= rollouts).all()
    for name in ("signal_sum", "signal_sqsum"):
        assert np.isfinite(table.col(name)).all()
    assert not np.isinf(table.col("reward_sum")).any()  # nan: not known, of a file that tells successes only
    assert (table.col("visits") <= rollouts).all() and (table.col("tokens") <= 2**60).all()


@examples(30)
@given(seeds, st.sampled_from([".parquet", ".jsonl"]))
def test_a_damaged_evaluation(evaluation, tmp_path_factory, seed, suffix) -> None:
    folder = tmp_path_factory.mktemp("results")
    path = folder / f"results{suffix}"
    path.write_bytes(damage(evaluation[suffix], random.Random(seed)))
    table = StatsTable()
    table.rows_for(dataset_keys(hostile_rows(40)))
    with survives() as said:
        warm_start(table, path, discount=0.5)
        sane(table)
    same_text(said, str(path))
    shutil.rmtree(folder)


FIELDS = (
    *("key", "n", "successes", "pass_rate", "score", "tokens", "reward_sum", "signal_sum", "signal_sqsum"),
    *("source", "prompt", "data_source", "ground_truth", "reward_model"),
)


@examples(60)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5), min_size=1, max_size=3))
def test_an_evaluation_of_anything(tmp_path_factory, rows) -> None:
    folder = tmp_path_factory.mktemp("results")
    path = results_file(folder, [{"key": "0" * 32, "n": 4, "successes": 1, **row} for row in rows], ".jsonl")
    table = StatsTable()
    table.rows_for(np.zeros(1, dtype=table.keys.dtype))
    with survives() as said:
        warm_start(table, path, discount=1.0)
        sane(table)
    same_text(said, str(path))
    shutil.rmtree(folder)


# -- records ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attempt(tmp_path_factory) -> Path:
    """A record of a few steps."""
    folder = tmp_path_factory.mktemp("record")
    parts = {"sampler": "greso", "allocator": "aero", "filter": "informative"}
    engine, world = make_engine(**parts, batch=4, n=4, M=30, p=[0.5] * 30, seed=1)
    recorder = Recorder(folder, engine)
    for step in range(1, 5):
        run_step(engine, world, step)
    recorder.close()
    assert replay(folder / "attempt-0").identical
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
        replay(folder)
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
    assert "do not fit together" in replay(tmp_path / "attempt-0").difference
