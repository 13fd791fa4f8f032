"""Conformance suite for journals: what a database must do to keep one.

Subclass :class:`JournalSuite` in a test module of your own and give it a ``make_url`` fixture:

    class TestMyDatabase(JournalSuite):
        @pytest.fixture
        def make_url(self):
            return lambda: "postgresql+psycopg://…/a_database_that_is_empty"
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from verl_adaptive.groups import Groups
from verl_adaptive.stats.api import open_store
from verl_adaptive.stats.journal import Journal, JournalBusy, JournalError
from verl_adaptive.stats.keys import KEY_DTYPE, key_hex, keys_bytes
from verl_adaptive.stats.table import StatsTable

__all__ = ["JournalSuite", "make_groups", "make_keys", "outage"]


def make_keys(count: int, seed: int = 0) -> np.ndarray:
    """``count`` different keys, ``KEY_DTYPE``."""
    words = np.random.default_rng(seed).integers(0, 2**64, (count, 2), dtype=np.uint64)
    return np.ascontiguousarray(words).view(KEY_DTYPE).reshape(count)


def make_groups(seed: int, count: int = 6, prompts: int = 20) -> Groups:
    """Groups of one to five rollouts on rows of a table of ``prompts``; some rows repeat, some groups failed."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 6, count)
    rewards = [draw.choice([0.0, 0.1, 1.0], size).tolist() for size in sizes]
    return Groups.from_lists(
        draw.integers(0, prompts, count),
        rewards,
        tokens=[draw.integers(1, 5000, size).tolist() for size in sizes],
        ticket=np.arange(count) + 1000 * seed,
        failed=draw.random(count) < 0.1,
        lag=draw.integers(0, 3, count),
        lost=draw.integers(0, 2, count),
    )


@contextmanager
def outage(journal: Journal, message: str = "the database is away") -> Iterator[None]:
    """Make every statement of a journal's writer fail, as a lost connection does."""

    def fail(*_: Any) -> None:
        raise OperationalError("", {}, RuntimeError(message))

    event.listen(journal._engine, "before_cursor_execute", fail)
    try:
        yield
    finally:
        event.remove(journal._engine, "before_cursor_execute", fail)


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def passes(self, seconds: float) -> None:
        """Let time go by."""
        self.now += seconds


class JournalSuite:
    """Every promise of :class:`verl_adaptive.stats.journal.Journal`, on a real database."""

    keys = make_keys(20)

    @pytest.fixture
    def make_url(self) -> Callable[[], str]:
        """Returns a function that gives the URL of an empty database, the same one within a test."""
        raise NotImplementedError("a subclass provides make_url")

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """Stands in for the one by which a journal waits between attempts."""
        clock = Clock()
        monkeypatch.setattr("verl_adaptive.stats.journal._clock", lambda: clock.now)
        return clock

    def open(self, url: str, run_id: str = "run", **options: Any) -> Journal:
        return Journal.open(url, run_id=run_id, **options)

    def commit(self, journal: Journal, step: int, seed: int | None = None, **options: Any) -> bool:
        groups = make_groups(step if seed is None else seed)
        outcomes = [f"kept {step}"] * len(groups)
        return journal.commit_step(
            step, groups, self.keys[groups.row], outcomes, {"step": step}, {"p": step / 7}, **options
        )

    def story(self, journal: Journal, run: str | None = None) -> list[tuple[int, int]]:
        """``(step, ticket)`` of every observation on the live line."""
        history = journal.history(run)
        return list(zip(history["step"].to_pylist(), history["ticket"].to_pylist(), strict=True))

    def expected(self, *steps: int | tuple[int, int]) -> list[tuple[int, int]]:
        pairs = [s if isinstance(s, tuple) else (s, s) for s in steps]
        return [(step, int(ticket)) for step, seed in pairs for ticket in make_groups(seed).ticket]

    # -- what is written comes back -------------------------------------------------------------------------------

    def test_every_number_of_a_group_comes_back(self, make_url: Callable[[], str]) -> None:
        groups = make_groups(3, count=40)
        words = [f"outcome {i % 3}" for i in range(40)]
        with self.open(make_url()) as journal:
            assert journal.commit_step(1, groups, self.keys[groups.row], words)
            table = journal.history()
        assert table["step"].to_pylist() == [1] * 40
        assert table["seq"].to_pylist() == list(range(40))
        assert table["key"].to_pylist() == keys_bytes(self.keys[groups.row])
        assert table["outcome"].to_pylist() == words
        expected = {
            "ticket": groups.ticket,
            "n": groups.n,
            "successes": groups.successes,
            "signal_sum": groups.sum(groups.signal),
            "signal_sqsum": groups.sum(groups.signal**2),
            "signal_min": groups.reduce(np.minimum, groups.signal),
            "signal_max": groups.reduce(np.maximum, groups.signal),
            "reward_sum": groups.sum(groups.reward),
            "failed": groups.failed,
            "tokens": groups.sum(groups.tokens),
            "lag": groups.lag,
            "lost": groups.lost,
        }
        for name, values in expected.items():
            assert np.array_equal(table[name].to_numpy(), values), name

    def test_steps_carry_ledger_and_scalars(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url(), meta={"preset": "greso"}) as journal:
            groups = make_groups(1)
            odd = {"n": np.int64(3), "x": np.float32(0.5), "v": np.arange(2), "nan": float("nan"), "text": "ü\0\ud800"}
            journal.commit_step(1, groups, self.keys[groups.row], ["k"] * len(groups), odd, {"p": 0.1}, wall_time=12.5)
            reader = journal.reader()
            row = reader.steps("run").to_pylist()[0]
            assert (row["step"], row["wall_time"], row["groups"], row["attempt"]) == (1, 12.5, len(groups), 0)
            assert '"n": 3' in row["ledger"] and '"v": [0, 1]' in row["ledger"] and row["scalars"] == '{"p": 0.1}'
            assert reader.runs()[0]["meta"] == {"preset": "greso"}

    def test_odd_values_are_stored_or_null_and_never_cost_a_step(self, make_url: Callable[[], str]) -> None:
        big = 2.0**60 + 1
        groups = Groups.from_lists(
            [0, 1, 2, 3],
            [[float("nan"), 1.0], [float("inf")], [1e-310, -0.0], []],
            tokens=[[2**40, 1], [0], [1, 1], []],
        )
        groups.reward[0] = big
        with self.open(make_url()) as journal:
            assert journal.commit_step(
                1, groups, self.keys[:4], ["a\0b", "\ud800", "ünï", ""], sources=["\0", "", "", ""]
            )
            rows = journal.history().to_pylist()
        assert [row["outcome"] for row in rows] == ["ab", "\\ud800", "ünï", ""]
        assert rows[0]["signal_sum"] is None and rows[0]["reward_sum"] == big + 1.0
        assert rows[0]["tokens"] == 2**40 + 1
        assert rows[1]["signal_sum"] == float("inf") and rows[2]["signal_sum"] == 1e-310 and rows[3]["n"] == 0

    def test_validations_come_back_along_the_live_line(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url()) as journal:
            assert journal.commit_validation(0, {"val-core/a/acc/mean@1": 0.25}, generated=0, prompts={"a": 50})
            for step in (1, 2, 3):
                self.commit(journal, step)
                odd = {"val-core/a/acc/mean@1": np.float32(step), "x": math.nan, "y": "word", "z\0": 1}
                assert journal.commit_validation(step, odd, generated=8 * step, prompts={"a": 50}, wall_time=step)
            journal.rewind(2)
            assert journal.commit_validation(2, {"val-core/a/acc/mean@1": 9.0})  # a resumed run validates once more
            assert journal.commit_validation(2, {"val-core/a/acc/mean@1": 8.0})
            found = journal.reader().validations("run")
        assert [(v["step"], v["generated"], v["wall_time"]) for v in found[1:]] == [(1, 8, 1.0), (2, 16, 2.0)]
        assert [v["metrics"]["val-core/a/acc/mean@1"] for v in found] == [0.25, 1.0, 2.0]
        assert found[0]["prompts"] == {"a": 50} and set(found[1]["metrics"]) == {"val-core/a/acc/mean@1", "z"}

    def test_a_run_that_starts_over_says_anew_what_it_is(self, make_url: Callable[[], str]) -> None:
        """Under the name of another run: neither its description nor its first validation stays."""
        url = make_url()
        for preset, accuracy in (("grpo", 0.1), ("solo", 0.7)):
            with self.open(url, meta={"preset": preset, "tolerance": 0.5}) as journal:
                journal.rewind(0)
                journal.commit_validation(0, {"val-core/a/acc/mean@1": accuracy}, generated=0)
                self.commit(journal, 1)
                (row,) = journal.reader().runs()
                assert row["meta"]["preset"] == preset and row["meta"]["tolerance"] == 0.5
                assert [v["metrics"]["val-core/a/acc/mean@1"] for v in journal.reader().validations("run")] == [
                    accuracy
                ]

    def test_a_validation_during_an_outage_is_caught_up_with(self, make_url: Callable[[], str], clock: Clock) -> None:
        with self.open(make_url()) as journal:
            self.commit(journal, 1)
            with outage(journal):
                assert not journal.commit_validation(1, {"v": 1.0})
                assert not journal.health().ok
            assert journal.reader().validations("run") == []
            clock.passes(100)
            assert self.commit(journal, 2) and journal.health().ok
            assert [v["metrics"] for v in journal.reader().validations("run")] == [{"v": 1.0}]

    def test_rollouts_that_were_cut_are_counted(self, make_url: Callable[[], str]) -> None:
        groups = make_groups(3, count=40)
        groups.shorter = groups.tokens // 4  # of several outputs the longest counts
        with self.open(make_url()) as journal:
            self.commit(journal, 1)
            journal.commit_step(2, groups, self.keys[groups.row], ["k"] * 40, longest=2500)
            clipped = journal.history()["clipped"].to_pylist()
        assert clipped[:6] == [None] * 6
        assert clipped[6:] == groups.sum((groups.longest >= 2500) * 1.0).tolist()

    def test_a_step_without_groups(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url()) as journal:
            assert journal.commit_step(1, Groups.empty(), self.keys[:0], [])
            assert journal.history().num_rows == 0
            assert journal.reader().steps("run")["step"].to_pylist() == [1]

    def test_arguments_of_different_lengths_are_refused(self, make_url: Callable[[], str]) -> None:
        groups = make_groups(1)
        with self.open(make_url()) as journal:
            with pytest.raises(ValueError, match="2 outcomes for 6 groups"):
                journal.commit_step(1, groups, self.keys[groups.row], ["a", "b"])
            assert journal.history().num_rows == 0

    def test_replay_is_the_table_bit_for_bit(self, make_url: Callable[[], str]) -> None:
        table = StatsTable()
        table.rows_for(self.keys, sources=["math"] * 10 + ["code"] * 10)
        with self.open(make_url()) as journal:
            for step in range(1, 40):
                groups = make_groups(step, count=30)
                table.observe(groups, step, tolerance=0.05)
                names = [table.sources[i] for i in table.col("source")[groups.row]]
                journal.commit_step(step, groups, self.keys[groups.row], ["k"] * 30, sources=names)
            again = journal.reader().replay("run", tolerance=0.05)
        rows = table.rows_for(again.keys, create=False)
        assert len(again) == len(np.unique(rows)) == 20
        for name in table.columns:
            if name != "source":
                assert again.col(name).tobytes() == table.col(name)[rows].tobytes(), name
        assert [again.sources[i] for i in again.col("source")] == [table.sources[i] for i in table.col("source")[rows]]

    def test_long_histories_come_in_pages(self, make_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("verl_adaptive.stats.reader._PAGE", 7)
        with self.open(make_url()) as journal:
            for step in range(1, 12):
                self.commit(journal, step)
            journal.rewind(8)
            for step in range(9, 12):
                self.commit(journal, step, seed=step + 100)
            live = self.expected(*range(1, 9), (9, 109), (10, 110), (11, 111))
            assert self.story(journal) == live
            part = journal.history(first_step=3, last_step=9)
            assert part["step"].to_pylist() == [step for step, _ in live if 3 <= step <= 9]
            assert journal.reader().steps("run")["step"].to_pylist() == list(range(1, 12))

    def test_prompts_are_registered_once(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url()) as journal:
            for step, rows, source in ((1, [0, 1, 1], "math"), (2, [1, 2, 2], "co\0de"), (3, [0, 2, 1], "other")):
                groups = Groups.from_lists(rows, [[1.0], [0.0], [1.0]])
                assert journal.commit_step(step, groups, self.keys[groups.row], ["k"] * 3, sources=[source] * 3)
            found = [row for page in journal.reader().prompts() for row in page.to_pylist()]
        names = {row["key"].hex(): row["source"] for row in found}
        assert len(found) == 3 and [names[key] for key in key_hex(self.keys[:2])] == ["math", "math"]
        assert "\0" not in names[key_hex(self.keys[2:3])[0]]

    # -- runs and branches ----------------------------------------------------------------------------------------

    def test_runs_do_not_mix(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        with self.open(url, "one") as one, self.open(url, "two") as two:
            for step in range(1, 4):
                assert self.commit(one, step)
                assert self.commit(two, step, seed=step + 50)
            two.rewind(1)
            assert self.story(one) == self.expected(1, 2, 3)
            assert self.story(two) == self.expected((1, 51))
            assert self.story(one, "two") == self.expected((1, 51))
            reader = one.reader()
            assert [run["run_id"] for run in reader.runs()] == ["one", "two"]
            with pytest.raises(JournalError, match="holds 2 runs, name one: one, two"):
                reader.only_run(None)
            with pytest.raises(JournalError, match="no run 'three'"):
                reader.only_run("three")

    def test_reopening_goes_on(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        with self.open(url) as journal:
            self.commit(journal, 1)
        with self.open(url) as journal:
            assert journal.health().last_step == 1 and journal.attempt == 0
            journal.rewind(1)
            assert journal.attempt == 1  # so that the pause before it can be told from training
            self.commit(journal, 2)
            assert self.story(journal) == self.expected(1, 2)

    def test_a_name_that_is_taken_says_by_whom(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        with self.open(url, meta={"checkpoints": "/a", "preset": "greso"}) as journal:
            self.commit(journal, 1)
        with self.open(url, meta={"checkpoints": "/b", "preset": "solo"}) as journal:
            assert journal.elsewhere == "/a"
            assert journal.reader().runs()[0]["meta"]["preset"] == "greso"  # nothing was changed by asking
            journal.rewind(1)  # a checkpoint folder that has moved
            assert journal.elsewhere is None and journal.reader().runs()[0]["meta"]["preset"] == "solo"
        with self.open(url, meta={"checkpoints": "/b"}) as journal:
            assert journal.elsewhere is None

    def test_rewinding_starts_a_branch_and_keeps_the_old_one_aside(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        with self.open(url) as journal:
            for step in range(1, 6):
                self.commit(journal, step)
        with self.open(url) as journal:
            journal.rewind(2)
            assert journal.attempt == 1
            assert self.story(journal) == self.expected(1, 2)
            for step in range(3, 5):
                self.commit(journal, step, seed=step + 100)
            live = self.expected(1, 2, (3, 103), (4, 104))
            assert self.story(journal) == live
            abandoned = journal.reader().observations("run", abandoned=True)
            rows = [(row["attempt"], row["step"]) for page in abandoned for row in page.to_pylist()]
            assert sorted(set(rows)) == [(0, s) for s in range(1, 6)] + [(1, 3), (1, 4)]
            assert journal.health().ok

    def test_rewinding_below_the_start_of_a_branch(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url()) as journal:
            for step in range(1, 7):
                self.commit(journal, step)
            journal.rewind(4)
            self.commit(journal, 5, seed=105)
            journal.rewind(2)  # below where the second branch began
            self.commit(journal, 3, seed=203)
            assert self.story(journal) == self.expected(1, 2, (3, 203))
            journal.rewind(0)
            assert self.story(journal) == []
            self.commit(journal, 1, seed=301)
            assert self.story(journal) == self.expected((1, 301))
            assert journal.attempt == 3

    def test_a_repeated_step_starts_a_branch_by_itself(
        self, make_url: Callable[[], str], caplog: pytest.LogCaptureFixture
    ) -> None:
        url = make_url()
        with self.open(url) as journal:
            for step in (1, 2, 3):
                self.commit(journal, step)
        with self.open(url) as journal:  # a caller that forgot to rewind
            assert self.commit(journal, 2, seed=102)
            assert "new branch" in caplog.text
            assert self.story(journal) == self.expected(1, (2, 102))

    @pytest.mark.parametrize("seed", range(4))
    def test_any_sequence_of_commits_rewinds_and_restarts(self, make_url: Callable[[], str], seed: int) -> None:
        draw = random.Random(seed)
        url, serial = make_url(), 0
        model: list[tuple[int, int]] = []
        journal = self.open(url)
        try:
            for _ in range(40):
                action = draw.random()
                last = model[-1][0] if model else 0
                if action < 0.75:
                    serial += 1
                    assert self.commit(journal, last + 1, seed=serial)
                    model.append((last + 1, serial))
                elif action < 0.9:
                    target = draw.randint(0, last)
                    journal.rewind(target)
                    model = [pair for pair in model if pair[0] <= target]
                else:
                    journal.close()
                    journal = self.open(url)
            assert self.story(journal) == self.expected(*model)
            assert journal.reader().steps("run")["step"].to_pylist() == [step for step, _ in model]
            assert journal.health().ok
        finally:
            journal.close()

    def test_steps_the_journal_never_saw_are_named(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        with self.open(url) as journal:
            self.commit(journal, 1)
        with self.open(url) as journal:
            journal.rewind(5)  # the snapshot is ahead: the journal had fallen behind when the process died
            assert not journal.health().ok and journal.health().missing == ((2, 5),)
            assert "missing: 2 to 5" in str(journal.health())
            self.commit(journal, 6)
            reader = journal.reader()
            assert [gap[:2] for gap in reader.gaps("run")] == [(2, 5)]
            journal.rewind(3)
            assert [gap[:2] for gap in reader.gaps("run")] == [(2, 3)]
            assert self.story(journal) == self.expected(1)

    def test_gaps_of_a_journal_that_stays_empty_are_those_of_the_latest_resume(
        self, make_url: Callable[[], str]
    ) -> None:
        """A new database, resumed at 10; nothing of 11 to 20 arrives; resumed at 20, then from the checkpoint of step 5."""
        url = make_url()
        for step, gap in ((10, (1, 10)), (20, (1, 20)), (5, (1, 5))):
            with self.open(url) as journal:
                journal.rewind(step)
                assert [found[:2] for found in journal.reader().gaps("run")] == [gap]

    def test_ids_that_another_run_gave_to_other_prompts_are_said(
        self, make_url: Callable[[], str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """One key has one data source in a database; reports of the second run would show the first one's."""
        url, keys = make_url(), make_keys(1200)
        groups = Groups.from_lists(np.arange(len(keys)), [[1.0]] * len(keys))
        for run, source, warned in (("a", "gsm8k", 0), ("b", "gsm8k", 0), ("c", "math", 1)):
            caplog.clear()
            with self.open(url, run_id=run, own_ids=True) as journal:
                for step in (1, 2):
                    assert journal.commit_step(
                        step, groups, keys, ["kept"] * len(keys), {}, {}, sources=[source] * len(keys)
                    )
            said = [r.getMessage() for r in caplog.records if "adaptive.id_key" in r.getMessage()]
            assert len(said) == warned and all("'math'" in line and "'gsm8k'" in line for line in said)

    # -- one writer, many readers ---------------------------------------------------------------------------------

    def test_a_second_writer_is_told_so(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        with self.open(url) as journal:
            with pytest.raises(JournalBusy, match=r"run 'run' is already being written .*run_id"):
                self.open(url, patience=0.1)
            self.open(url, "another").close()
            assert self.commit(journal, 1)
        self.open(url, patience=0.0 if url.startswith("sqlite") else 2.0).close()

    def other_writer(self, url: str) -> subprocess.Popen[str]:
        """Another process that opens the run, says so and waits."""
        code = (
            "import sys, time\n"
            "from verl_adaptive.stats.journal import Journal\n"
            "journal = Journal.open(sys.argv[1], run_id='run')\n"
            "print('open', flush=True)\n"
            "time.sleep(60)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        return process

    def test_the_lock_of_a_killed_writer_is_free(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        process = self.other_writer(url)
        try:
            with pytest.raises(JournalBusy, match=str(process.pid) if url.startswith("sqlite") else "server process"):
                self.open(url, patience=0.1)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        with self.open(url) as journal:
            assert self.commit(journal, 1)

    def test_a_writer_that_was_overtaken_stops(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        with self.open(url) as journal:
            self.commit(journal, 1)
            with journal._engine.connect() as connection, connection.begin():
                connection.execute(
                    text(
                        "INSERT INTO branches (run_id, attempt, parent_id, parent_step, created_at) "
                        "VALUES ('run', 1, :parent, 0, 0)"
                    ),
                    {"parent": journal.branch_id},
                )
            assert not self.commit(journal, 2)
            assert "another process has continued run 'run'" in str(journal.health())
            assert self.story(journal) == []  # the other one's line, untouched

    def test_a_reader_in_the_middle_does_not_stop_the_writer(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url()) as journal:
            self.commit(journal, 1)
            reader = journal.reader()
            pages = reader.observations("run")
            next(pages)
            assert self.commit(journal, 2)

    def test_readers_see_whole_steps_while_they_are_written(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        trouble: list[str] = []
        done = threading.Event()
        with self.open(url) as journal:
            self.commit(journal, 1)
            reader = journal.reader()

            def read() -> None:
                while not done.is_set():
                    steps = reader.observations("run")
                    seen = [step for page in steps for step in page["step"].to_pylist()]
                    if len(seen) % 6 or sorted(set(seen)) != list(range(1, max(seen) + 1)):
                        trouble.append(f"saw {seen}")
                    time.sleep(0.001)

            threads = [threading.Thread(target=read) for _ in range(2)]
            for thread in threads:
                thread.start()
            try:
                written = [self.commit(journal, step) for step in range(2, 60)]
            finally:
                done.set()
                for thread in threads:
                    thread.join()
            assert journal.flush()
        assert not trouble and all(written)

    # -- trouble --------------------------------------------------------------------------------------------------

    def test_an_outage_is_caught_up_with(
        self, make_url: Callable[[], str], caplog: pytest.LogCaptureFixture, clock: Clock
    ) -> None:
        with self.open(make_url()) as journal:
            assert self.commit(journal, 1)
            with outage(journal):
                assert [self.commit(journal, step) for step in range(2, 8)] == [False] * 6
                health = journal.health()
                assert not health.ok and health.last_step == 1 and health.waiting == tuple(range(2, 8))
                assert "away" in str(health) and "6 steps wait in memory (2 to 7)" in str(health)
                assert "training goes on" in caplog.text
            step = 8
            clock.passes(3600)
            while not self.commit(journal, step):
                step += 1
                assert step < 60, "the journal never caught up"
            assert journal.health().ok and not journal.health().missing
            assert self.story(journal) == self.expected(*range(1, step + 1))
            assert f"caught up: complete up to step {step}" in caplog.text

    def test_a_long_outage_is_tried_less_and_less_often(
        self, make_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, clock: Clock
    ) -> None:
        """By the clock, not by the number of steps: those may take a second or an hour."""
        with self.open(make_url()) as journal:
            tried: list[float] = []
            real = journal._connect

            def connect(*args: Any) -> Any:
                tried.append(clock.now)
                return real(*args)

            monkeypatch.setattr(journal, "_connect", connect)
            with outage(journal):
                for step in range(1, 121):
                    clock.passes(2.5)
                    assert not self.commit(journal, step)
                pauses = np.diff(tried)
                assert (np.diff(pauses) >= 0).all() and pauses[0] <= 2.5 and 55 <= pauses[-1] <= 63
                before = len(tried)
                for step in range(121, 123):  # slow steps: each finds that long enough has passed
                    clock.passes(3600)
                    assert not self.commit(journal, step)
                assert len(tried) == before + 2
            assert journal.flush() and self.story(journal) == self.expected(*range(1, 123))

    def test_attempts_that_take_long_are_rare(
        self, make_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, clock: Clock
    ) -> None:
        """A database that answers nothing costs its ceiling each time; training must not pay for that with every step."""
        with self.open(make_url()) as journal:
            tried: list[int] = []

            def connect(*args: Any) -> Any:
                tried.append(1)
                clock.passes(10)
                raise JournalError("the server gave no answer for 10 seconds")

            with monkeypatch.context() as patch:
                patch.setattr(journal, "_connect", connect)
                for step in range(1, 101):
                    clock.passes(6)
                    assert not self.commit(journal, step)
                assert 4 <= len(tried) <= 7
            assert "no answer" in str(journal.health())
            assert journal.flush()

    def test_rewinding_forgets_what_waits_beyond(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url()) as journal:
            with outage(journal):
                for step in range(1, 6):
                    self.commit(journal, step)
                with pytest.raises(JournalError, match="cannot be rewound to step 2.*away"):
                    journal.rewind(2)
            journal.rewind(2)
            assert journal.attempt == 1 and journal.health().ok  # steps 3 to 5 were never written anywhere
            self.commit(journal, 3, seed=103)
            assert self.story(journal) == self.expected(1, 2, (3, 103))

    def test_flush_writes_all_at_once(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url()) as journal:
            with outage(journal):
                for step in range(1, 31):
                    self.commit(journal, step)
                assert not journal.flush()
            assert journal.flush()
            assert self.story(journal) == self.expected(*range(1, 31))

    def test_what_is_given_up_is_named(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url(), backlog=3) as journal:
            self.commit(journal, 1)
            with outage(journal):
                for step in range(2, 9):
                    self.commit(journal, step)
            assert journal.health().missing == ((2, 5),) and journal.health().waiting == (6, 7, 8)
            assert journal.flush()
            assert not journal.health().ok and str(journal.health()) == "missing: 2 to 5"
            assert self.story(journal) == self.expected(1, 6, 7, 8)
            gaps = journal.reader().gaps("run")
            assert [gap[:2] for gap in gaps] == [(2, 5)] and "3 steps were waiting" in gaps[0][2]
            journal.rewind(7)
            self.commit(journal, 8, seed=108)  # in a branch of its own, which lacks nothing
            assert journal.reader().gaps("run") == gaps
            assert self.story(journal) == self.expected(1, 6, 7, (8, 108))

    def test_a_validation_that_is_given_up_is_named(
        self, make_url: Callable[[], str], caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.open(make_url(), backlog=2) as journal:
            self.commit(journal, 1)
            with outage(journal):
                for step in range(1, 5):
                    journal.commit_validation(step, {"val-core/math/acc/mean@1": 0.5})
            assert [m for m in caplog.messages if "validation of step 2 is lost" in m and "more than 2" in m]
            assert journal.flush()
            assert [v["step"] for v in journal.reader().validations("run")] == [3, 4]

    def test_an_outage_across_a_branch(self, make_url: Callable[[], str]) -> None:
        with self.open(make_url(), backlog=2) as journal:
            for step in (1, 2, 3):
                self.commit(journal, step)
            with outage(journal):
                for step in (2, 3, 4, 5):  # steps 2 and 3 again: a branch that begins while the database is away
                    self.commit(journal, step, seed=step + 100)
            assert journal.flush()
            assert self.story(journal) == self.expected(1, (4, 104), (5, 105))
            assert [gap[:2] for gap in journal.reader().gaps("run")] == [(2, 3)]

    def test_a_commit_whose_answer_was_lost_is_not_written_twice(
        self, make_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with self.open(make_url()) as journal:
            self.commit(journal, 1)
            dialect = journal._engine.dialect
            real = dialect.do_commit

            def commits_and_breaks(connection: Any) -> None:
                real(connection)
                raise OperationalError("", {}, RuntimeError("connection lost while waiting for an answer"))

            for step, seed in ((2, 2), (3, 3), (2, 102)):  # the last one starts a branch
                with monkeypatch.context() as patch:
                    patch.setattr(dialect, "do_commit", commits_and_breaks)
                    assert not self.commit(journal, step, seed=seed)
                assert journal.flush()
            assert self.commit(journal, 3, seed=103)
            assert self.story(journal) == self.expected(1, (2, 102), (3, 103))
            assert journal.attempt == 1

    def test_closing_writes_what_waits(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        journal = self.open(url)
        with outage(journal):
            self.commit(journal, 1)
        journal.close()
        with self.open(url) as journal:
            assert self.story(journal) == self.expected(1)

    def test_a_journal_closed_during_an_outage_is_free(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        journal = self.open(url)
        self.commit(journal, 1)
        with outage(journal):
            self.commit(journal, 2)
            journal.close()
        with self.open(url) as journal:
            assert self.story(journal) == self.expected(1)

    def test_decisions_do_not_depend_on_the_clock(
        self, make_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = iter([1e9, 5e9, 0.0, -1.0] * 50)
        monkeypatch.setattr(time, "time", lambda: next(times))
        url = make_url()
        for start in (1, 4, 7):  # the clock jumps between attempts and within them
            with self.open(url) as journal:
                journal.rewind(start - 1)
                for step in range(start, start + 5):
                    assert self.commit(journal, step, seed=step + start)
                live = journal.history()["step"].to_pylist()
        assert sorted(set(live)) == list(range(1, 12))
        with self.open(url) as journal:
            assert journal.attempt == 2 and journal.health().last_step == 11

    def test_a_newer_schema_is_refused(self, make_url: Callable[[], str]) -> None:
        url = make_url()
        with self.open(url) as journal, journal._engine.connect() as connection, connection.begin():
            connection.execute(text("UPDATE verl_adaptive_schema SET version = 99"))
        for way in (self.open, open_store):
            with pytest.raises(JournalError, match=r"schema version 99.*upgrade verl-adaptive"):
                way(url)

    def test_a_database_without_a_journal_has_nothing_to_read(self, make_url: Callable[[], str]) -> None:
        with pytest.raises(JournalError, match="holds no journal|cannot be read"):
            open_store(make_url())
