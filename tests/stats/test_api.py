"""The Python interface for people: DataFrames and Arrow from a journal or a snapshot, while training runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.stats.postgres import PostgresServer
from verl_adaptive.stats import (
    Column,
    Journal,
    JournalError,
    StatsTable,
    StoreError,
    key_hex,
    open_store,
    write_snapshot,
)
from verl_adaptive.stats.database import parse_url
from verl_adaptive.stats.locate import Found, locate
from verl_adaptive.testing.stores import make_groups, make_keys

pd = pytest.importorskip("pandas")
KEYS = make_keys(20)


def train(journal: Journal, first: int, last: int, table: StatsTable | None = None) -> None:
    for step in range(first, last + 1):
        groups = make_groups(step)
        if table is not None:
            table.observe(groups, step, tolerance=0.0)
        ledger, scalars = {"rollouts": groups.rollouts}, {"p": step / 4}
        journal.commit_step(
            step, groups, KEYS[groups.row], [f"o{step}"] * len(groups), ledger, scalars, sources=["math"] * len(groups)
        )


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.new_database()
    return f"sqlite:///{tmp_path}/adaptive.sqlite"


def test_a_journal_while_it_is_written(url: str) -> None:
    table = StatsTable()
    table.rows_for(KEYS, sources=["math"] * 20)
    with Journal.open(url, run_id="r", meta={"preset": "greso"}) as journal:
        train(journal, 1, 3, table)
        with open_store(url) as store:
            assert store.kind == "journal" and store.runs()["run_id"].tolist() == ["r"]
            assert store.runs()["meta"][0] == {"preset": "greso"} and store.runs()["attempts"][0] == 1
            steps = store.steps()
            assert steps["step"].tolist() == [1, 2, 3] and steps["scalars"][1] == {"p": 0.5}
            assert isinstance(steps["wall_time"].dtype, pd.DatetimeTZDtype)
            train(journal, 4, 5, table)
            assert store.steps()["step"].tolist() == [1, 2, 3, 4, 5]  # the same store sees what came since
            frame = store.observations(first_step=2, last_step=4)
            assert frame["step"].unique().tolist() == [2, 3, 4] and frame["outcome"].iloc[0] == "o2"
            assert frame["key"].iloc[0] == key_hex(KEYS)[make_groups(2).row[0]]
            assert store.observations_arrow().schema.field("key").type == pa.binary(16)
            prompts = store.prompts()
    rows = table.rows_for(KEYS, create=False)
    seen = rows[table.col("visits")[rows] + table.col("failures")[rows] > 0]
    prompts = prompts.loc[[key_hex(KEYS)[i] for i in seen]]
    for name in ("visits", "rollouts", "successes", "streak", "streak_kind", "tokens", "last_step", "failures"):
        assert np.array_equal(prompts[name].to_numpy(), table.col(name)[seen]), name
    with np.errstate(invalid="ignore"):
        rate = table.col("successes")[seen] / table.col("rollouts")[seen]
    assert np.array_equal(prompts["pass_rate"], rate, equal_nan=True)
    assert set(prompts["source"]) == {"math"}


def test_abandoned_attempts_can_be_looked_at(url: str) -> None:
    with Journal.open(url, run_id="r") as journal:
        train(journal, 1, 4)
        journal.rewind(2)
        train(journal, 3, 3)
        store = open_store(url)
        assert store.steps()["attempt"].tolist() == [0, 0, 1]
        everything = store.steps(abandoned=True)
        assert list(zip(everything["attempt"], everything["step"], strict=True)) == [
            (0, 1),
            (0, 2),
            (0, 3),
            (0, 4),
            (1, 3),
        ]
        assert len(store.observations(abandoned=True)) == 6 * 5 and len(store.observations()) == 6 * 3
        assert store.gaps() == []


def test_several_runs(url: str) -> None:
    for run in ("a", "b"):
        with Journal.open(url, run_id=run) as journal:
            train(journal, 1, 1 if run == "a" else 2)
    store = open_store(url)
    assert len(store.steps("a")) == 1 and len(store.steps("b")) == 2
    with pytest.raises(JournalError, match="holds 2 runs"):
        store.steps()
    assert len(open_store(f"{url}#b").steps()) == 2


def test_a_run_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    for run in ("a", "b"):
        with Journal.open(str(path), run_id=run) as journal:
            train(journal, 1, 1 if run == "a" else 2)
    store = open_store(f"{path}#b")
    assert store.run_name("b") == "b" and len(store.steps("b")) == 2
    for read in (store.run_name, store.steps, store.table):
        with pytest.raises(StoreError, match=r"run='a'.*#b names the run 'b'"):
            read("a")


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}", "sqlite:///{}?journal_mode=wal"])
def test_a_number_sign_in_a_path_is_no_run(tmp_path: Path, form: str) -> None:
    path = tmp_path / "exp#2" / "j#.sqlite"
    with Journal.open(str(path), run_id="r") as journal:
        train(journal, 1, 1)
    source = form.format(path)
    if "?" not in form:  # a path's name, not a URL's settings
        assert locate(source) == Found("journal", source)
    for text in (source, f"{source}#r"):
        assert open_store(text).run_name() == "r"
    with pytest.raises(JournalError, match="no run 's'"):
        open_store(f"{source}#s").run_name()


def test_names_of_experiments_are_no_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What verl-adaptive made in a sweep's folders, it opens: by an absolute and by a relative path."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoints" / "kl=0.1&lr=2 exp?n=8" / "adaptive.sqlite"
    Journal.open(str(path), run_id="r").close()
    for source in (path, path.parent, path.relative_to(tmp_path), f"{path.parent.relative_to(tmp_path)}#r"):
        assert open_store(str(source)).run_name() == "r"
    for name in ("exp?n=8", "a;b=c", "run 12:30@node1", "api_key=3"):
        path = tmp_path / "checkpoints" / name / "adaptive.sqlite"
        assert parse_url(str(path)).database == str(path)
    for words in ("//u:hunter2@h/db", "u:hunter2@h/db", "postgresql:/u:hunter2@h/db", "host=h password=hunter2"):
        with pytest.raises(JournalError, match="looks like a database with a password") as caught:
            Journal.open(words, run_id="r")
        assert "hunter2" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]


def snapshot(folder: Path, step: int) -> StatsTable:
    table = StatsTable()
    rows = table.rows_for(KEYS, sources=["math"] * 10 + ["code"] * 10)
    table.declare("greso", {"p": Column("f4", 0.5)})
    for i in range(step):
        table.observe(make_groups(i), i, tolerance=0.0)
    table.col("greso.p")[rows] = rows
    write_snapshot(folder, table, {}, meta={"step": step})
    return table


def test_a_snapshot(tmp_path: Path) -> None:
    table = snapshot(tmp_path / "global_step_3" / "adaptive", 3)
    for path in (tmp_path / "global_step_3" / "adaptive", tmp_path / "global_step_3", tmp_path):
        store = open_store(path)
        assert store.kind == "snapshot"
        frame = store.prompts()
        assert frame.index.tolist() == key_hex(KEYS) and frame["greso.p"].tolist() == list(range(20))
        assert frame["source"].tolist() == ["math"] * 10 + ["code"] * 10
        assert frame["visits"].tolist() == table.col("visits").tolist()
        assert frame["pass_rate"].isna().tolist() == (table.col("rollouts") == 0).tolist()
        arrow = store.prompts_arrow()
        assert arrow["key"].type == pa.binary(16) and arrow["source"].to_pylist()[10] == "code"
        for read in (store.steps, store.runs, store.observations, store.gaps):
            with pytest.raises(StoreError, match="is a snapshot"):
                read()


def test_a_directory_of_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        open_store(tmp_path)
    for step in (3, 10, 9):
        snapshot(tmp_path / f"global_step_{step}" / "adaptive", step)
    (tmp_path / "global_step_12" / "adaptive").mkdir(parents=True)  # not finished
    assert open_store(tmp_path).where.endswith("global_step_10/adaptive")
    with Journal.open(str(tmp_path / "adaptive.sqlite"), run_id="r") as journal:
        train(journal, 1, 2)
    assert open_store(tmp_path).kind == "journal" and len(open_store(tmp_path).steps()) == 2
    assert open_store(tmp_path, prefer="snapshot").kind == "snapshot"
    Journal.open(str(tmp_path / "other.sqlite"), run_id="r").close()
    with pytest.raises(StoreError, match=r"several databases, name one: adaptive\.sqlite, other\.sqlite"):
        open_store(tmp_path)


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "results.parquet").write_bytes(b"")
    with pytest.raises(StoreError, match="file of results"):
        open_store(tmp_path / "results.parquet")
    with pytest.raises(StoreError, match="does not exist"):
        open_store(tmp_path / "nope")
    with pytest.raises(JournalError, match="no such file"):
        open_store(f"sqlite:///{tmp_path}/nope.sqlite")
    assert not (tmp_path / "nope.sqlite").exists()


def loaded_after(code: str) -> set[str]:
    show = "\nimport sys; print('\\n'.join(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + show], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_what_is_imported(tmp_path: Path) -> None:
    heavy = {"torch", "ray", "verl", "vllm", "transformers", "datasets"}
    core = loaded_after("from verl_adaptive.stats import StatsTable, write_snapshot, dataset_keys")
    assert not core & (heavy | {"sqlalchemy", "pandas", "sqlite3", "psycopg"})
    snapshot(tmp_path, 2)
    arrow = loaded_after(f"from verl_adaptive.stats import open_store; open_store({str(tmp_path)!r}).prompts_arrow()")
    assert not arrow & (heavy | {"sqlalchemy"})  # (pyarrow imports pandas where it is installed)
    with Journal.open(str(tmp_path / "j.sqlite"), run_id="r") as journal:
        train(journal, 1, 2)
    frames = loaded_after(
        f"from verl_adaptive.stats import open_store; open_store({str(tmp_path / 'j.sqlite')!r}).prompts()"
    )
    assert not frames & heavy and "pandas" in frames
