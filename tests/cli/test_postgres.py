"""Stores in PostgreSQL: two runs in one database, read by the commands, on a real server."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from tests.cli.stores import make_run
from tests.stats.conftest import postgres  # noqa: F401 - a fixture
from verl_adaptive.commands.price import ASSUMED, yield_of
from verl_adaptive.config import AdaptiveConfig, StoreConfig


@pytest.fixture
def database(postgres, tmp_path) -> str:  # noqa: F811
    url = postgres.new_database()
    make_run(tmp_path / "a", run_id="p/a", steps=6, url=url, snapshot=False)
    make_run(tmp_path / "b", run_id="p/b", steps=4, url=url, snapshot=True, seed=1)
    return url


def test_the_commands_read_a_shared_database(database, tmp_path, call) -> None:
    status, _, err = call("stats", database)
    assert status == 1 and "p/a, p/b" in err
    assert [r["run"] for r in json.loads(call("stats", database, "--runs", "--json")[1])] == ["p/a", "p/b"]
    found = json.loads(call("stats", f"{database}#p/a", "--json")[1])
    assert found["steps"] == 6 and found["run"] == "p/a" and found["retired"] is None
    assert json.loads(call("stats", database, "--run", "p/b", "--json")[1])["retired"] == 3  # its checkpoints' snapshot
    assert call("export", f"{database}#p/b", tmp_path / "b.parquet")[0] == 0
    assert pq.read_table(tmp_path / "b.parquet").num_rows > 0
    assert call("report", f"{database}#p/a", "-o", tmp_path / "r.html")[0] == 0
    assert "rollouts generated" in (tmp_path / "r.html").read_text()
    status, out, _ = call("compare", f"{database}#p/a", f"{database}#p/b")
    assert status == 0 and "p/a" in out and "p/b" in out


def test_the_price_knows_what_a_run_has_seen_in_a_database(database) -> None:
    """A SQLite journal was read; with PostgreSQL a run that went on was priced as if nothing were known."""
    secret = database.replace("tester@", "tester:hunter2@")
    config, plan = OmegaConf.create({"data": {}}), SimpleNamespace(store_path=None, run_id="p/a")
    adaptive = AdaptiveConfig(store=StoreConfig(url=secret))
    share, known = yield_of(config, adaptive, plan, 8)
    assert share != ASSUMED and "earlier steps in postgresql" in known and "hunter2" not in known
    for url, run in ((database, "p/new"), (database.replace("127.0.0.1:", "127.0.0.1:1"), "p/a")):
        plan = SimpleNamespace(store_path=None, run_id=run)
        assert yield_of(config, AdaptiveConfig(store=StoreConfig(url=url)), plan, 8)[0] == ASSUMED


def test_a_database_without_our_tables_is_one_line(postgres, call) -> None:  # noqa: F811
    status, out, err = call("stats", postgres.new_database())
    assert status == 1 and out == "" and err.count("\n") == 1 and "holds no journal" in err


def test_passwords_are_not_shown(database, tmp_path, call) -> None:
    secret = database.replace("tester@", "tester:hunter2@")
    out = call("stats", f"{secret}#p/a")[1]
    assert "tester:***@" in out and "hunter2" not in out
    assert call("report", f"{secret}#p/a", "-o", tmp_path / "r.html")[0] == 0
    assert "hunter2" not in (tmp_path / "r.html").read_text()
    status, out, err = call("stats", secret.replace("127.0.0.1:", "127.0.0.1:1"))
    assert status == 1 and err.count("\n") == 1 and "hunter2" not in err
