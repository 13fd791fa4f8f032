"""PostgreSQL going away: restarts, ended sessions, sessions that the server still believes in, several runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psycopg
import pytest

from tests.stats.postgres import PostgresServer
from verl_adaptive.stats import Journal, JournalError, open_store
from verl_adaptive.testing.stores import make_groups, make_keys

KEYS = make_keys(20)


def commit(journal: Journal, step: int) -> bool:
    groups = make_groups(step)
    return journal.commit_step(step, groups, KEYS[groups.row], ["kept"] * len(groups))


def steps(url: str) -> list[int]:
    return open_store(url).steps("r")["step"].tolist()


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    yield postgres.new_database()


def test_a_restarted_server_is_caught_up_with(postgres: PostgresServer, url: str) -> None:
    with Journal.open(url, run_id="r") as journal:
        assert commit(journal, 1)
        postgres.stop()
        began = time.monotonic()
        for step in range(2, 12):
            assert not commit(journal, step)
        assert time.monotonic() - began < 5, "training waited for a server that is not there"
        assert not journal.health().ok
        postgres.start()
        assert journal.flush()
        assert journal.health().ok
    assert steps(url) == list(range(1, 12))


def test_an_ended_session_is_made_anew(url: str) -> None:
    with Journal.open(url, run_id="r") as journal:
        assert commit(journal, 1)
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s)", [journal._server_process])
        done = [commit(journal, step) for step in (2, 3)]
        assert done[-1] and journal.health().ok
        # The lock came back with the session.
        with pytest.raises(JournalError, match="already being written"):
            Journal.open(url, run_id="r", patience=0)
    assert steps(url) == [1, 2, 3]


def test_an_own_session_that_the_server_still_believes_in_is_ended(url: str) -> None:
    """The network broke: for the server the old session lives on and holds the lock."""
    with Journal.open(url, run_id="r") as journal:
        assert commit(journal, 1)
        ghost, journal._connection = journal._connection, None
        assert commit(journal, 2) or journal.flush()
        assert journal.health().ok
        assert ghost is not None
        ghost.invalidate()
        ghost.close()
    assert steps(url) == [1, 2]


def test_the_message_about_a_second_writer_says_who(url: str) -> None:
    with Journal.open(url, run_id="project/one"), pytest.raises(JournalError) as caught:
        Journal.open(url, run_id="project/one", patience=0)
    text = str(caught.value)
    assert "verl-adaptive project/one" in text and "server process" in text and "adaptive.store.run_id" in text


def test_passwords_do_not_show(url: str) -> None:
    secret = url.replace("tester@", "tester:hunter2@")
    with Journal.open(secret, run_id="r") as journal:
        with pytest.raises(JournalError) as caught:
            Journal.open(secret, run_id="r", patience=0)
        assert "hunter2" not in str(caught.value)
        assert commit(journal, 1)
    assert "hunter2" not in open_store(secret).where
    with pytest.raises(JournalError) as caught:
        open_store(secret.replace("127.0.0.1:", "127.0.0.1:1"))
    assert "hunter2" not in str(caught.value)


def test_an_unreachable_server_is_an_error_at_start() -> None:
    with pytest.raises(JournalError, match=r"cannot be opened.*adaptive\.store\.url"):
        Journal.open("postgresql+psycopg://nobody@127.0.0.1:1/none", run_id="r")


def test_runs_that_start_together_make_one_schema(url: str) -> None:
    code = (
        "import sys\n"
        "from verl_adaptive.stats import Journal\n"
        "from verl_adaptive.testing.stores import make_groups, make_keys\n"
        "keys = make_keys(20)\n"
        "with Journal.open(sys.argv[1], run_id=sys.argv[2]) as journal:\n"
        "    for step in range(1, 6):\n"
        "        groups = make_groups(step)\n"
        "        assert journal.commit_step(step, groups, keys[groups.row], ['k'] * len(groups))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, url, f"run {i}"], stderr=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    store = open_store(url)
    assert sorted(store.runs()["run_id"]) == [f"run {i}" for i in range(4)]
    frames = [store.observations(f"run {i}") for i in range(4)]
    assert all(frame["ticket"].tolist() == frames[0]["ticket"].tolist() for frame in frames)
    assert all(frame["step"].nunique() == 5 for frame in frames)
