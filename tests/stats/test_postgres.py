"""PostgreSQL going away: restarts, ended sessions, sessions that the server still believes in, several runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import text

from tests.stats.postgres import PostgresServer
from verl_adaptive.stats import Journal, JournalError, open_store
from verl_adaptive.stats.database import open_backend
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
        for step in range(2, 12):
            assert not commit(journal, step)
        assert not journal.health().ok
        postgres.start()
        assert journal.flush()
        assert journal.health().ok
    assert steps(url) == list(range(1, 12))


@contextmanager
def short_ceilings() -> Iterator[None]:
    """Only while the server gives no answer: a busy machine may need longer for one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("journal._WRITE_CEILING", "journal._START_CEILING", "reader._READ_CEILING"):
            patch.setattr(f"verl_adaptive.stats.{name}", 1.0)
        yield


@pytest.mark.timeout(120)  # without a ceiling on this side it hangs for as long as the server is frozen
def test_a_frozen_server_holds_nobody_up(postgres: PostgresServer, url: str) -> None:
    with Journal.open(url, run_id="r") as journal:
        assert commit(journal, 1)
        postgres.freeze()
        try:
            with short_ceilings():
                for step in range(2, 6):
                    assert not commit(journal, step)
                assert "no answer for 1 second" in str(journal.health())
                assert not journal.flush()  # a new connection: accepted by the kernel, answered by nobody
                with pytest.raises(JournalError, match="cannot be rewound"):
                    journal.rewind(2)
                with pytest.raises(JournalError, match="cannot be opened"):
                    Journal.open(f"{url}?connect_timeout=0", run_id="other")
                with pytest.raises(JournalError, match="no answer for 1 second|timeout"):
                    open_store(url)
        finally:
            postgres.thaw()
        assert journal.flush() and journal.health().ok
        assert commit(journal, 6)
    assert steps(url) == [1, 2, 6]  # rewinding forgot what waited beyond step 2


@pytest.mark.timeout(120)
def test_a_server_process_that_stops_in_the_middle(url: str) -> None:
    """The server answers, the session does not: no network setting notices that."""
    with Journal.open(url, run_id="r") as journal:
        assert commit(journal, 1)
        session = journal._backend.session  # type: ignore[attr-defined]
        os.kill(session, signal.SIGSTOP)
        try:
            with short_ceilings():
                assert not commit(journal, 2)
        finally:
            os.kill(session, signal.SIGCONT)
        assert journal.flush() and journal.health().ok
    assert steps(url) == [1, 2]


@pytest.mark.timeout(120)
def test_closing_waits_for_nobody(postgres: PostgresServer, url: str) -> None:
    journal = Journal.open(url, run_id="r")
    postgres.freeze()
    try:
        with short_ceilings():
            assert not commit(journal, 1)
            journal.close()
    finally:
        postgres.thaw()


def test_what_is_inside_a_ceiling_keeps_its_own_errors(url: str) -> None:
    backend = open_backend(url, read_only=True)
    with pytest.raises(ValueError, match="mine"), backend.ceiling(60):
        raise ValueError("mine")
    with backend.ceiling(60), backend.engine.begin() as connection:
        with backend.ceiling(60, connection):
            assert connection.execute(text("SELECT 1")).scalar() == 1
        assert connection.execute(text("SELECT 2")).scalar() == 2


def test_a_database_that_was_made_anew_is_begun_again(postgres: PostgresServer, url: str) -> None:
    with Journal.open(url, run_id="r") as journal:
        for step in (1, 2):
            assert commit(journal, step)
        journal._drop()
        name = url.rsplit("/", 1)[1]
        with psycopg.connect(postgres._conninfo("postgres"), autocommit=True) as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
            admin.execute(f"CREATE DATABASE {name}")
        assert commit(journal, 3)
        assert journal.health().missing == ((1, 2),)
    assert steps(url) == [3] and open_store(url).gaps("r")[0][:2] == (1, 2)


def test_an_ended_session_is_made_anew(url: str) -> None:
    with Journal.open(url, run_id="r") as journal:
        assert commit(journal, 1)
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s)", [journal._backend.session])
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
    said = str(caught.value)
    assert "verl-adaptive project/one" in said and "server process" in said and "adaptive.store.run_id" in said


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
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    store = open_store(url)
    assert sorted(store.runs()["run_id"]) == [f"run {i}" for i in range(4)]
    frames = [store.observations(f"run {i}") for i in range(4)]
    assert all(frame["ticket"].tolist() == frames[0]["ticket"].tolist() for frame in frames)
    assert all(frame["step"].nunique() == 5 for frame in frames)
