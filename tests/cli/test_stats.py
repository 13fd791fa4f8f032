"""``verl-adaptive stats``: the numbers are the store's, live and on a snapshot; nothing escapes."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.cli.stores import HOSTILE, hostile_rows, make_run, without_steps, write_dataset
from tests.programs import interrupted, program
from tests.stats.made import journal_of, make_keys
from tests.stats.test_journal import attempt
from verl_adaptive.commands.stats import _account
from verl_adaptive.groups import Groups
from verl_adaptive.ledger import Account
from verl_adaptive.report.course import CLASSES, History
from verl_adaptive.report.judge import REGRESSED
from verl_adaptive.report.lists import lists_of
from verl_adaptive.report.overview import BINS, histogram
from verl_adaptive.simulate.traces import read_trace
from verl_adaptive.stats import Journal, StatsTable, dataset_keys, open_run, warm_start, write_snapshot
from verl_adaptive.stats.expressions import Expression
from verl_adaptive.stats.history import Flips
from verl_adaptive.stats.journal import attempts_in
from verl_adaptive.stats.keys import key_hex
from verl_adaptive.stats.prompts import Prompts
from verl_adaptive.stats.visits import Visits


def facts(call, *words) -> dict:
    status, out, err = call("stats", *words, "--json")
    assert status == 0, err
    return json.loads(out)


def selected(call, *words) -> list[dict]:
    return facts(call, *words)["lists"]["selected prompts"]


def test_the_overview_is_the_engines_table(finished, call) -> None:
    table, total = finished.engine.table, finished.engine.total
    found = facts(call, finished.folder)
    assert found["kind"] == "journal" and found["run"] == "project/experiment" and found["preset"] == "greso"
    assert (found["steps"], found["first_step"], found["last_step"]) == (30, 1, 30) and found["gaps"] == []
    visited = table.col("visits") > 0
    assert found["visited"] == visited.sum() and found["visits"] == table.col("visits").sum()
    assert found["rollouts"] == table.col("rollouts").sum() and found["successes"] == table.col("successes").sum()
    assert found["failed_groups"] == table.col("failures").sum() > 0
    assert found["ledger"]["rollouts"]["generated"] == total.rollouts.generated
    assert sum(found["histogram"]["prompts"]) == visited.sum()
    assert list(found["lists"]) == ["Never solved", "Flip-flopping"]  # by the report's titles
    by_source = found["by_source"]
    assert sum(s["rollouts"] for s in by_source.values()) == found["rollouts"] and HOSTILE in by_source
    assert (found["retired"], found["retired_at_step"]) == (3, 30)
    tried = table.col("rollouts") >= 16
    assert found["never_solved"] == (tried & (table.col("successes") == 0)).sum()
    assert facts(call, finished.folder, "--where", "flips >= 2")["selected"] > found["flip_flopping"]


def test_selecting_and_sorting(finished, call) -> None:
    where = ("--where", "visits > 3 and pass_rate < 0.5")
    found = facts(call, finished.folder, *where, "--sort", "pass_rate", "--limit", "4")
    rows = found["lists"]["selected prompts"]
    assert len(rows) == 4 < found["selected"]
    every = selected(call, finished.folder, "--limit", "60")
    theirs = [row["rollouts"] for row in every if row["visits"] > 3 and row["pass_rate"] < 0.5]
    assert found["selected_rollouts"] == sum(theirs) < found["rollouts"] == sum(row["rollouts"] for row in every)
    said = call("stats", finished.folder, *where)[1]
    assert f"{sum(theirs):,} rollouts ({sum(theirs) / found['rollouts']:.1%} of all)" in said
    rates = [row["pass_rate"] for row in rows]
    assert rates == sorted(rates) and all(row["visits"] > 3 for row in rows)
    visits = [row["visits"] for row in selected(call, finished.folder, "--sort", "visits", "--desc", "--limit", "60")]
    assert visits == sorted(visits, reverse=True) and len(visits) == found["prompts"]
    for words in ((), ("--desc",)):
        named = selected(call, finished.folder, "--sort", "key", *words, "--limit", "60")
        assert [row["key"] for row in named] == sorted((row["key"] for row in named), reverse=bool(words))
    by_name = selected(call, finished.folder, "--sort", "source", "--limit", "60")
    assert [row["source"] for row in by_name] == sorted(row["source"] for row in by_name)
    assert "flips" in selected(call, finished.folder, "--where", "flips >= 2")[0]


def test_the_picture_in_the_terminal(finished, call) -> None:
    out = "\n" + call("stats", finished.folder)[1]
    labels = (
        "store",
        "run",
        "steps",
        "prompts",
        "generated",
        "never solved",
        "always solved",
        "flip-flopping",
        "retired",
    )
    assert all(f"\n{label}  " in out for label in labels) and "\nmissing" not in out
    assert re.search(r"^step +30 \(greso.*\)$", call("stats", finished.folder / "global_step_30")[1], flags=re.M)
    bars = re.findall(r"^(?:0 \(none\)|1 \(all\)|0\.\d-\d\.\d) +([\d,]+) (█*)$", out, flags=re.M)
    assert len(bars) == len(BINS)
    assert max(len(bar) for _, bar in bars) == 40 and all((count == "0") == (bar == "") for count, bar in bars)
    assert "\nby data source\n" in out and re.search(r"^ gsm8k +20 +20 +\d", out, flags=re.M)
    assert re.search(r"^Never solved\n+( .*\n)+ [0-9a-f]+ +math ", out, flags=re.M)  # a narrow terminal breaks the key


def test_the_texts_of_listed_prompts(finished, tmp_path, call) -> None:
    data = write_dataset(tmp_path / "some.parquet", finished.rows[1:])
    words = (finished.folder, "--data", data, "--limit", "60")
    texts = {row["key"]: row["text"] for row in selected(call, *words)}
    first, *others = key_hex(dataset_keys(finished.rows))
    asked = [row["prompt"][-1]["content"] for row in finished.rows[1:]]
    assert texts.pop(first) is None and texts == dict(zip(others, asked, strict=True))
    out = call("stats", *words)[1]
    for key, text in ((others[0], "What is 1 + 1?"), (first, "(not in the data set)")):
        assert re.search(rf"^{key[:12]}\w*  {re.escape(text)}$", out, flags=re.MULTILINE)


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_a_terminal(width, finished, call, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = call("stats", finished.folder, "--data", finished.data, "--limit", "9", "--sort", "flips", "--desc")[1]
    out += call("compare", finished.folder, finished.folder / "global_step_30")[1]
    out += call("doctor")[1]
    lines = out.splitlines()
    # a path is whole, to be copied, however long
    assert not [line for line in lines if len(line) > width and not line.startswith(("A: ", "B: "))]
    assert not [line for line in lines if line.endswith(" ")]
    assert not re.search(r"\d,\n|\d\n\d", out) and "rollout\n" not in out  # neither numbers nor headings are broken
    keys = re.findall(r"^ ([0-9a-f]+) ", out, flags=re.M)
    assert len(keys) >= 9 and {len(key) for key in keys} == {12 if width == 80 else 32}


@pytest.mark.parametrize("width", [40, 50, 60, 70])
def test_a_number_that_has_no_room_is_not_another_number(width, finished, call, monkeypatch) -> None:
    """Right-hand columns lost their last digits: step 14 was step 1, a pass rate of 0.875 was 0."""
    whole = selected(call, finished.folder, "--limit", "60", "--sort", "last_step")
    steps = {str(row["last_step"]) for row in whole}
    monkeypatch.setenv("COLUMNS", str(width))
    out = call("stats", finished.folder, "--limit", "60", "--sort", "last_step")[1]
    shown = [line.split()[-1] for line in out.splitlines() if re.match(r" [0-9a-f]{6}", line)]
    assert len(shown) == 60 and {last for last in shown if not last.endswith("…")} <= steps


def test_rates_of_visits_are_the_numbers_they_are(tmp_path, call) -> None:
    """They are float32: 7 right of 10 was not `>= 0.7`, was printed as 0.699999988, and counted as 0.6 to 0.7."""
    make_run(tmp_path, n=10, steps=12, snapshot=False, sampler="epoch", filter="keep_all")
    found = facts(call, tmp_path)
    seven = selected(call, tmp_path, "--where", "last_rate == 0.7", "--limit", "60")
    assert seven and {row["last_rate"] for row in seven} == {0.7}
    assert 0.7 in open_run(tmp_path).prompts.to_arrow()["last_rate"].to_pylist()  # an export's, too
    every = selected(call, tmp_path, "--sort", "last_rate", "--limit", "60")
    rates = [row["last_rate"] for row in every if row["last_rate"] is not None]
    assert facts(call, tmp_path, "--where", "last_rate >= 0.7")["selected"] == sum(rate > 0.65 for rate in rates)
    bins = dict(zip(BINS, found["latest_histogram"]["prompts"], strict=True))
    assert (bins["0.6-0.7"], bins["0.7-0.8"]) == (rates.count(0.6), rates.count(0.7))


def test_the_beginning_of_a_key_finds_its_prompt(finished, call, refusal) -> None:
    key = selected(call, finished.folder, "--limit", "1")[0]["key"]
    for digits in (8, 12, 16, 17, 31, 32):
        for text in (key[:digits], key[:digits].upper()):
            found = facts(call, finished.folder, "--where", f"key == '{text}'")
            assert [row["key"] for row in found["lists"]["selected prompts"]] == [key]
            assert facts(call, finished.folder, "--where", f"key != '{text}'")["selected"] == found["prompts"] - 1
    for bad in ("1234567", "x" * 12, "0" * 33, ""):
        assert "first 8 or more" in refusal("stats", finished.folder, "--where", f"key == '{bad}'", status=2)


def test_a_misspelt_column_is_answered_alike_wherever_it_is_named(finished, refusal) -> None:
    words = ("--where", "pass_rat < 1"), ("--sort", "pass_rat")
    where, sort = (refusal("stats", finished.folder, *each, status=2) for each in words)
    assert where == sort and "no column 'pass_rat'; did you mean pass_rate?" in sort
    said = refusal("stats", finished.folder, "--where", "surce == 'math'", status=2)
    assert "columns of text: key, source" in said


def test_a_score_that_is_no_number_is_a_lost_rollout(tmp_path, call) -> None:
    """As in training; one in verl's rollouts made a whole folder of them unreadable, and was in no account."""
    line = {"input": "q", "output": "a", "gts": "1"}
    text = "".join(json.dumps({**line, "score": score}) + "\n" for score in (1.0, float("nan"), 0.0))
    (tmp_path / "1.jsonl").write_text(text + json.dumps({**line, "input": "r", "score": float("nan")}) + "\n")
    (page,) = open_run(tmp_path).observations()
    q, r = page.select(["n", "lost", "successes", "failed"]).to_pylist()
    assert q == {"n": 2, "lost": 1, "successes": 1.0, "failed": False}
    assert r == {"n": 0, "lost": 1, "successes": 0.0, "failed": True}
    account = json.loads(open_run(tmp_path).steps.column("ledger")[0].as_py())["run"]["rollouts"]
    assert account == {"generated": 4, "trained": 2, "dropped": {"lost": 2}}
    assert call("stats", tmp_path)[0] == 0


def test_what_verls_rollouts_do_not_say_is_null(tmp_path, call) -> None:
    """Their tokens and what was retired were 0, in some places."""
    (tmp_path / "1.jsonl").write_text(json.dumps({"input": "q", "output": "a", "gts": "1", "score": 1.0}) + "\n")
    found = facts(call, tmp_path, "--sort", "tokens_per_rollout")
    (source,), (row,) = found["by_source"].values(), found["lists"]["selected prompts"]
    assert [found["tokens"], source["tokens"], source["retired"], row["tokens_per_rollout"]] == [None] * 4
    assert found["failed_groups"] is None and source["failures"] is None
    assert "failed" not in call("stats", tmp_path)[1]
    (page,) = open_run(tmp_path).observations()
    assert page.select(["tokens", "lag"]).to_pylist() == [{"tokens": None, "lag": None}]
    assert facts(call, tmp_path, "--where", "tokens < 5")["selected"] == 0
    row = open_run(tmp_path).prompts.to_arrow().to_pylist()[0]
    assert (row["tokens"], row["tokens_per_rollout"], row["rollouts"]) == (None, None, 1)
    assert (
        row["retired"] is row["failures"] is None and facts(call, tmp_path, "--where", "retired == 0")["selected"] == 0
    )
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"key": "0" * 32, "n": 2, "pass_rate": 0.5}) + "\n")
    assert facts(call, tmp_path / "evaluation.jsonl")["failed_groups"] is None


def test_colours_only_where_they_are_wanted(finished) -> None:
    """A terminal's, without NO_COLOR; that there are none in a pipe is tests/test_security.py's."""

    def on_a_terminal(**env: str) -> str:
        mine, theirs = pty.openpty()
        words = [sys.executable, "-m", "verl_adaptive", "stats", str(finished.folder)]
        clean_env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
        process = subprocess.Popen(words, stdout=theirs, env={**clean_env, "TERM": "xterm-256color", **env})
        os.close(theirs)
        out = b""
        while True:
            try:
                piece = os.read(mine, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not piece:
                break
            out += piece
        os.close(mine)
        assert process.wait() == 0
        return out.decode()

    assert "\x1b[36m" in on_a_terminal()  # the bars
    assert not re.search(r"\x1b\[[\d;]*3\dm", on_a_terminal(NO_COLOR="1"))


def test_columns_are_listed(finished, tmp_path, call) -> None:
    listed = json.loads(call("stats", finished.folder, "--columns", "--json")[1])
    assert listed["pass_rate"].startswith("successes / rollouts") and all(listed.values()) and "flips" in listed
    assert listed["visits"].startswith("finished groups")
    make_run(tmp_path, steps=2, sampler="retire", filter="informative")
    out = call("stats", tmp_path / "global_step_2", "--columns")[1]
    assert "pass_rate" in out and "retire.solved" in out and "change" in out


def test_a_folder_or_a_pattern_leads_to_several_runs(tmp_path, call, refusal) -> None:
    for name, steps in (("a", 2), ("b", 3)):
        make_run(tmp_path / "runs" / name, steps=steps, run_id=f"p/{name}", snapshot=False)
    make_run(tmp_path / "elsewhere" / "c", steps=1, run_id="p/c", snapshot=False)
    for where in (tmp_path / "runs", tmp_path / "runs" / "*"):
        for words in ((), ("--runs",)):
            runs = json.loads(call("stats", where, "--json", *words)[1])
            assert [(r["run"], r["preset"], r["attempts"], r["steps"], r["last_step"]) for r in runs] == [
                ("p/a", "greso", 1, 2, 2),
                ("p/b", "greso", 1, 3, 3),
            ]
        shown = call("stats", where)[1]
        assert re.search(r"^ p/b +greso +\d{4}-\d\d-\d\d \d\d:\d\d +1 +3 +3 ", shown, flags=re.M)
        said = refusal("stats", where, "--where", "visits > 0", status=2)
        assert "leads to 2 runs" in said and str(tmp_path / "runs" / "a") in said
        assert str(tmp_path / "runs" / "b") in refusal("export", where, tmp_path / "x.csv")
        assert json.loads(call("compare", where, "--json", "--visits", "1")[1])["b"]["run"] == "p/b"
    assert facts(call, tmp_path / "elsewhere")["run"] == "p/c"  # one run below is meant
    # from .8 to .4 is half, and is not counted
    assert "fell by 0.5 or more" in call("stats", tmp_path / "elsewhere")[1]
    assert call("compare", tmp_path / "runs" / "a", tmp_path / "elsewhere", "--visits", "1")[0] == 0
    assert call("compare", tmp_path / "runs")[0] == 0
    said = refusal("compare", tmp_path / "elsewhere")
    assert "two arms or more are compared" in said and "with 1 run: " in said
    said = refusal("compare", f"x={tmp_path / 'runs' / 'a'}", f"x={tmp_path / 'runs' / 'b'}")
    assert "the only arm is x, with 2 runs" in said


def test_a_link_is_no_other_run_and_a_damaged_one_hides_none(tmp_path, call) -> None:
    root, page = tmp_path / "runs", tmp_path / "r.html"
    for name in "abc":
        make_run(root / name, steps=2, run_id=f"p/{name}", snapshot=False)
    (root / "a-latest").symlink_to("a")
    damaged = root / "c" / "adaptive" / "attempt-0" / "attempt.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"p/c", b"p/d"))
    for where in (root, root / "*"):
        _, out, err = call("stats", where, "--json")
        assert [r["run"] for r in json.loads(out)] == ["p/a", "p/b"] and err.count("attempt.json is damaged") == 1
        assert call("report", root / "a-latest", "-o", page, "--against", where)[0] == 0
        assert "against p/b (dashed)" in page.read_text()
    steps = root / "b" / "adaptive" / "attempt-0" / "steps.jsonl"
    steps.write_bytes(steps.read_bytes()[1:])
    _, out, err = call("stats", root, "--json")
    assert [r["run"] for r in json.loads(out)] == ["p/a"] and "steps.jsonl is damaged" in err


def test_steps_that_are_missing_are_said_whatever_is_asked(tmp_path, call) -> None:
    for name in "ab":
        make_run(tmp_path / name, steps=10, run_id=f"p/{name}", snapshot=False, validate=lambda step: step / 20)
    without_steps(tmp_path / "b", 2, 3)
    said = "p/b: the journal lacks steps 2 to 3"
    b, page, missed = tmp_path / "b", tmp_path / "p.html", []
    for words in (
        ("stats", b, "--where", "visits > 0"),
        ("stats", tmp_path),
        ("compare", tmp_path / "a", b, "--json"),
        ("compare", tmp_path / "a", b, "--plot", page),
        ("export", b, tmp_path / "x.csv"),
    ):
        missed += [words] if call(*words)[2].count(said) != 1 else []
    assert not missed and said in page.read_text()
    assert re.search(r"^missing +steps 2 to 3: ", call("stats", b)[1], flags=re.M)
    assert call("report", tmp_path / "a", "-o", page, "--against", b)[0] == 0 and said in page.read_text()
    table = StatsTable()
    table.rows_for(make_keys(1))
    assert said in str(warm_start(table, b, discount=0.5)) and said in read_trace(b).note


def test_prompts_that_were_never_visited_are_known(tmp_path, call) -> None:
    """Of a data set of 60 a run said "570 of 570 visited", and `visits == 0` found none."""
    engine, _ = make_run(tmp_path, steps=3, snapshot=False)
    unseen = int((engine.table.col("visits") == 0).sum())
    found = facts(call, tmp_path)
    assert (found["prompts"], found["visited"]) == (60, 60 - unseen) and unseen > 10
    assert f"{60 - unseen} visited" in call("stats", tmp_path)[1]
    assert facts(call, tmp_path, "--where", "visits == 0")["selected"] == unseen
    assert {name: s["prompts"] for name, s in found["by_source"].items()} == {"gsm8k": 20, "math": 20, HOSTILE: 20}


def test_alarms_that_stand_are_said(tmp_path, call) -> None:
    make_run(tmp_path, steps=20, batch=16, rates=np.zeros(60), sampler="epoch", filter="keep_all", snapshot=False)
    alarms = facts(call, tmp_path)["alarms"]
    assert sum("not one success in" in alarm for alarm in alarms) >= 1
    said = [line for line in call("stats", tmp_path)[1].splitlines() if line.startswith("alarm  ")]
    assert len(said) == len(alarms)


def test_what_is_generated_is_said_to_be_somewhere() -> None:
    """What an allocator holds for a later step was in no figure of the line."""
    assert _account(Account(10, 4, 3, {"failed": 3})) == "10 rollouts: 4 trained (40.0%), dropped 3 failed, 3 held"


def test_an_empty_store(tmp_path, call) -> None:
    with Journal(tmp_path / "adaptive", {"run": "p/e"}) as journal:
        journal.begin(0)
    (only,) = json.loads(call("stats", tmp_path, "--runs", "--json")[1])
    assert only["run"] == "p/e" and only["steps"] == 0 and only["last_step"] is None
    found = facts(call, tmp_path)
    assert found["prompts"] == 0 and found["pass_rate"] is None and found["steps"] == 0
    status, out, err = call("stats", tmp_path)
    assert (status, err) == (0, "") and "p/e" in out
    assert facts(call, tmp_path, "--where", "pass_rate < 1", "--sort", "visits")["selected"] == 0


def test_a_damaged_snapshot_is_one_line(tmp_path, call, refusal) -> None:
    make_run(tmp_path, steps=2)
    part = next((tmp_path / "global_step_2" / "adaptive").glob("prompts-*"))
    part.write_bytes(part.read_bytes()[:-9])
    assert part.name in refusal("stats", tmp_path / "global_step_2")
    assert facts(call, tmp_path)["retired"] is None  # the journal beside it is still readable


def test_settings_of_alarms_that_somebody_has_written_by_hand(tmp_path, refusal) -> None:
    groups = Groups.from_lists([0, 1], [[0, 1], [1, 1]])
    journal_of(tmp_path / "adaptive", groups, make_keys(2), alarms={"sources": 2.5})
    assert "the journal is damaged: alarms.sources=2.5" in refusal("stats", tmp_path)


def test_histogram_bins() -> None:
    counts = dict(
        zip(BINS, histogram(np.array([0, 0.05, 0.1, 0.1 + 0.2, 0.3, 7 / 10, 0.95, 1.0, np.nan])), strict=True)
    )
    filled = {"0": 1, "0.0-0.1": 1, "0.1-0.2": 1, "0.3-0.4": 2, "0.7-0.8": 1, "0.9-1.0": 1, "1": 1}
    assert counts == {**dict.fromkeys(BINS, 0), **filled}


def test_a_fall_by_exactly_half_is_one() -> None:
    """Rates are float32, where 4/10 - 9/10 is above -0.5; the list's two conditions select and leave the same prompts."""
    pairs = [(n, a, b) for n in (8, 10, 12, 16, 20, 48, 100) for a in range(n + 1) for b in range(a + 1)]
    n, first, last = np.array(pairs).T
    table = StatsTable()
    rows = table.rows_for(make_keys(len(pairs)))
    for step, count in ((1, first), (2, last)):
        won, none = count.astype(np.float64), np.zeros(len(pairs))
        table.observe_visits(Visits(rows, none + step, n, won, won, won, won, none, none > 0, none > 0))
    prompts = Prompts(table)
    fell = 2 * (first - last) >= n
    assert np.array_equal(Expression("change <= -0.5").select(prompts), fell)
    listing = Expression(REGRESSED).select(prompts)
    assert listing.any() and not listing[~fell].any()
    (listed,) = (one for one in lists_of(prompts, 16, 5) if one.title == "Regressed")
    assert listed.total == listing.sum() and np.array_equal(Expression(listed.where).select(prompts), listing)
    assert np.array_equal(Expression(listed.keep).select(prompts), ~listing)


def test_flips_over_windows_equal_flips_at_once() -> None:
    rng = np.random.default_rng(0)
    row, rate = rng.integers(0, 20, 500), rng.choice([0.0, 0.25, 0.5, 1.0, np.nan], 500)
    whole, parts = Flips(), Flips()
    n = rng.choice([4, 8], 500)
    whole.add(row, rate, n, 20)
    for begin in range(0, 500, 37):
        parts.add(*(v[begin : begin + 37] for v in (row, rate, n)), prompts=20)
    assert whole.count.tolist() == parts.count.tolist() and np.allclose(whole._kept, parts._kept)
    for prompt in range(20):
        sides = [r > 0.5 for r in rate[row == prompt] if np.isfinite(r) and r != 0.5]
        assert whole.count[prompt] == sum(a != b for a, b in itertools.pairwise(sides))


# -- finding, asking, watching -------------------------------------------------------------------------------


def test_who_asks_gets_the_answer_alone(finished, call) -> None:
    for words in (("--where", "visits > 3"), ("--sort", "visits"), ("--limit", "3")):
        out = call("stats", finished.folder, *words)[1]
        assert out.startswith("selected prompts: ") and "never solved" not in out and "by data source" not in out
    out = call("stats", finished.folder, "--where", "visits > 10000")[1]
    assert out == "selected prompts: 0, 0 rollouts (0.0% of all)\n"


def test_watching_prints_what_is_new(tmp_path) -> None:
    engine, _ = make_run(tmp_path, steps=3, snapshot=False)
    process = program("stats", tmp_path, "--watch", 1, "--json")

    def one() -> dict:
        lines = []
        while (line := process.stdout.readline()) != "}\n":
            assert line, process.stderr.read()
            lines.append(line)
        return json.loads("".join(lines) + "}")

    try:
        assert one()["last_step"] == 3
        with Journal(tmp_path / "adaptive") as journal:
            journal.begin(3, parent=attempts_in(journal.folder)[-1]["id"])
            journal.commit_step(
                4, Groups.empty(), engine.table.keys[:0], [], {"run": engine.total.as_dict()}, sources=[]
            )
        assert one()["last_step"] == 4
    finally:
        assert interrupted(process) == (0, "")


@pytest.mark.parametrize(("mine", "asked", "used"), [(None, None, 1e-6), (0.3, None, 0.3), (0.3, 0.0, 0.0)])
def test_the_whole_page_has_the_runs_tolerance(tmp_path, mine, asked, used) -> None:
    """Signals of 0.4 and 0.6 are no variance to a run with adaptive.tolerance=0.3, in the table and along the course."""
    path, keys = tmp_path / "adaptive", make_keys(2)
    groups = Groups.from_lists(np.arange(2), [[0.4, 0.6], [0.4, 0.6]], success=[[0, 1], [0, 1]])
    journal_of(path, groups, keys, **({} if mine is None else {"tolerance": mine}))
    opened = open_run(path, tolerance=asked)
    middle = History(opened).classes[0, CLASSES.index("middle")]
    assert opened.tolerance == used and middle == (0 if used > 0.2 else 2)
    assert opened.prompts.table.col("streak").tolist() == ([1, 1] if used > 0.2 else [0, 0])


def test_what_is_retired_is_of_the_runs_own_snapshots(tmp_path, monkeypatch) -> None:
    """Where the run said they are or, of a journal that was moved with them, around it.

    Another training may be in the old place now, and one from scratch has those of before beside it.
    """
    make_run(tmp_path / "a", run_id="A", steps=4)
    (tmp_path / "a").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert open_run(tmp_path / "moved").retired == open_run("adaptive").retired == (3, 4)
    make_run(tmp_path / "a", run_id="A", steps=3)
    assert open_run(tmp_path / "moved").retired == (3, 4) and open_run(tmp_path / "a").retired == (3, 3)
    make_run(tmp_path / "a", run_id="A", steps=5, snapshot=False)  # from scratch
    assert open_run(tmp_path / "a").retired is None
    make_run(tmp_path / "b", run_id="B", journal=tmp_path / "moved" / "p" / "b", steps=3, snapshot=False)
    assert open_run(tmp_path / "moved" / "p" / "b").retired is None


def test_what_a_warm_start_retired_counts_though_nothing_visited_it(tmp_path) -> None:
    """The journal has no groups of such prompts; `stats` said that nothing was retired."""
    rows = [{**row, "data_source": "math"} for row in hostile_rows(60)]
    engine, _ = make_run(tmp_path, rows=rows, steps=2, snapshot=False)
    unvisited = np.flatnonzero(engine.table.col("visits") == 0)
    assert len(unvisited) > 20
    engine.table.col("retired")[unvisited] = 1
    attempt = open_run(tmp_path)._journal.about["id"]
    write_snapshot(tmp_path / "global_step_2" / "adaptive", engine.table, {}, meta={"step": 2, "attempt": attempt})
    assert open_run(tmp_path).retired == (len(unvisited), 2)


def test_a_snapshot_says_what_a_warm_start_brought(tmp_path, call) -> None:
    engine, _ = make_run(tmp_path, steps=2, snapshot=False)
    known = np.flatnonzero(engine.table.col("visits") == 0)
    for name in ("visits", "rollouts"):
        engine.table.col(name)[known] = 4
    write_snapshot(tmp_path / "global_step_2" / "adaptive", engine.table, {}, meta={"step": 2})
    place = tmp_path / "global_step_2"
    found = json.loads(call("stats", place, "--json")[1])
    assert found["brought"] == len(known) > 20
    assert (found["kind"], found["step"], found["flip_flopping"]) == ("snapshot", 2, None)
    assert f"warm start     {len(known)} prompts with its evidence alone" in call("stats", place)[1]
    assert call("report", place, "-o", tmp_path / "r.html")[0] == 0
    assert f"Of {len(known)} prompts it has a warm start" in (tmp_path / "r.html").read_text()
    assert json.loads(call("stats", tmp_path, "--json")[1])["brought"] is None


def test_a_snapshot_behind_the_step_that_was_resumed_from_is_not_of_the_run(tmp_path) -> None:
    """Of a run resumed after step 2 `stats` had what was retired in step 4 of the attempt that was given up."""
    make_run(tmp_path, steps=4)
    attempt(tmp_path / "adaptive", 3, 4, 5, after=2, of=-1)
    assert open_run(tmp_path).retired is None
