"""Files of every released version are read and upgraded."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import inspect, text

from tests.stats.fixtures import make_journals, make_snapshot
from tests.stats.postgres import PostgresServer
from tests.stats.test_table import equal
from verl_adaptive.groups import Groups
from verl_adaptive.stats import Journal, JournalError, StatsTable, keys_array, open_store, read_snapshot
from verl_adaptive.stats import schema as module
from verl_adaptive.stats.database import make_engine

FIXTURES = Path(__file__).parent / "fixtures"
LIVE = [(0, 1, 10), (0, 1, 11), (0, 2, 20), (0, 2, 21), (1, 3, 30), (1, 3, 31)]


@pytest.fixture(params=["sqlite", "postgres"])
def make_old(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], str]:
    """Returns a function that gives the URL of a journal as a version left it."""

    def make(version: int) -> str:
        if request.param == "sqlite":
            shutil.copy(FIXTURES / f"journal_v{version}.sqlite", tmp_path / "journal.sqlite")
            return f"sqlite:///{tmp_path}/journal.sqlite"
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.new_database()
        import psycopg

        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            for statement, values in make_journals.statements(version, "postgres"):
                connection.execute(statement.replace("?", "%s"), values)
        return url

    return make


def story(url: str) -> list[tuple[int, int, int]]:
    frame = open_store(url).observations("old")
    return list(zip(frame["attempt"], frame["step"], frame["ticket"], strict=True))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_old_journal_is_read_as_it_is(make_old: Callable[[int], str], version: int) -> None:
    url = make_old(version)
    assert story(url) == LIVE
    store = open_store(url)
    frame = store.observations("old")
    if version == 1:
        assert frame[["tokens", "lag", "lost"]].isna().all(axis=None)
    else:
        assert frame["tokens"].tolist() == (100 * frame["successes"]).tolist()
    assert frame["clipped"].isna().all() == (version < 3)
    measured = [(v["step"], v["generated"], v["metrics"]["val-core/math/acc/mean@1"]) for v in store.validations("old")]
    assert measured == ([(0, 0, 0.1), (2, 16, 0.3), (3, 24, 0.6)] if version == 3 else [])
    prompts = store.prompts("old")
    assert prompts["visits"].sum() == 6 and sorted(prompts["source"].unique()) == ["code", "math"]
    assert prompts["tokens"].sum() == (0 if version == 1 else 100 * prompts["successes"].sum())
    assert store.gaps("old") == [] and store.steps("old")["step"].tolist() == [1, 2, 3]
    with make_engine(url, read_only=True).connect() as connection:
        assert connection.execute(text("SELECT version FROM verl_adaptive_schema")).scalar() == version


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_writer_upgrades_an_old_journal_and_goes_on(make_old: Callable[[int], str], version: int) -> None:
    url = make_old(version)
    before = open_store(url).observations_arrow("old").to_pylist()
    groups = Groups.from_lists([0, 1], [[1.0, 0.0], [1.0]], tokens=[[5, 6], [7]], lag=[1, 2], lost=[0, 3])
    keys = keys_array(make_journals.KEYS[:2])
    with Journal.open(url, run_id="old") as journal:
        assert (journal.attempt, journal.health().last_step) == (1, 3)
        assert journal.commit_step(4, groups, keys, ["a", "b"])
        journal.rewind(2)
        assert journal.commit_step(3, groups, keys, ["a", "b"], sources=["math", "math"])
        after = journal.history().to_pylist()
    assert after[:4] == before[:4]
    assert [(row["attempt"], row["step"], row["tokens"], row["lag"], row["lost"]) for row in after[4:]] == [
        (2, 3, 11, 1, 0),
        (2, 3, 7, 2, 3),
    ]
    engine = make_engine(url, read_only=True)
    fresh = make_engine(url.replace("journal.sqlite", "fresh.sqlite"), read_only=False)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version FROM verl_adaptive_schema")).scalar() == module.SCHEMA_VERSION
        columns = {t: {c["name"] for c in inspect(connection).get_columns(t)} for t in module.metadata.tables}
    assert columns == {name: set(table.columns.keys()) for name, table in module.metadata.tables.items()}
    fresh.dispose()


def test_an_upgrade_that_fails_leaves_the_old_journal(
    make_old: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_old(1)

    def breaks(connection: object) -> None:
        module._to_2(connection)  # type: ignore[arg-type]
        raise OSError("the disk is gone")

    monkeypatch.setitem(module._UPGRADES, 1, breaks)
    with pytest.raises(JournalError, match="the disk is gone"):
        Journal.open(url, run_id="old")
    monkeypatch.undo()
    assert story(url) == LIVE
    with make_engine(url, read_only=True).connect() as connection:
        assert connection.execute(text("SELECT version FROM verl_adaptive_schema")).scalar() == 1
        assert "lag" not in {c["name"] for c in inspect(connection).get_columns("observations")}
    Journal.open(url, run_id="old").close()
    assert story(url) == LIVE


def test_the_sqlite_fixtures_are_what_the_script_says(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        connection = sqlite3.connect(":memory:")
        for statement, values in make_journals.statements(version, "sqlite"):
            connection.execute(statement, values)
        stored = sqlite3.connect(f"file:{FIXTURES}/journal_v{version}.sqlite?mode=ro&immutable=1", uri=True)
        assert list(stored.iterdump()) == list(connection.iterdump())


def test_the_current_schema_is_that_of_its_fixture(tmp_path: Path) -> None:
    """Whoever changes a table has to make a version of it: the last fixture pins down what the current version is."""
    Journal.open(str(tmp_path / "new.sqlite"), run_id="x").close()

    def shape(path: Path) -> dict[str, list[tuple[object, ...]]]:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tables = [name for name in tables if name != "verl_adaptive_writers"]  # who writes now: nothing that is kept
        return {
            t: sorted((c[1], c[3], bool(c[5])) for c in connection.execute(f"PRAGMA table_info({t})")) for t in tables
        }

    old = tmp_path / "old.sqlite"
    shutil.copy(FIXTURES / f"journal_v{module.SCHEMA_VERSION}.sqlite", old)
    assert shape(tmp_path / "new.sqlite") == shape(old)


def test_the_snapshot_of_schema_1_is_read() -> None:
    table, state = make_snapshot.content()
    again, stored, manifest = read_snapshot(
        make_snapshot.FOLDER, expect={"policy": "greso", "step": 3, "dataset": table.fingerprint()}
    )
    equal(table, again)
    assert again.col("last_try").tolist() == again.col("last_step").tolist()  # a column that came later
    assert stored["p"] == state["p"] and np.array_equal(stored["held"], np.arange(3))
    assert manifest["schema"] == 1 and isinstance(again, StatsTable)
