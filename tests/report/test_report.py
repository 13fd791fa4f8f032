"""``verl-adaptive report``: the numbers are the run's, the page stands alone, and nobody's text gets out of it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from tests.cli.stores import HOSTILE, make_run, without_steps, write_dataset
from tests.stats.made import journal_of, make_keys
from tests.stats.test_journal import attempt
from tests.world import Arrivals, make_async_engine
from verl_adaptive.cli import main
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.groups import Groups
from verl_adaptive.report import figures
from verl_adaptive.report.collect import collect
from verl_adaptive.report.course import CLASSES, forecast, hours_of
from verl_adaptive.report.figures import Series
from verl_adaptive.report.findings import _failures, _moves, _waste
from verl_adaptive.report.learning_curve import curves, smooth
from verl_adaptive.report.page import _commands, render
from verl_adaptive.report.pictures import _fate, learning, pictures
from verl_adaptive.stats import Journal, StatsTable, open_run, reader
from verl_adaptive.stats.dataset import Row
from verl_adaptive.stats.dumps import answer_in, said_of
from verl_adaptive.stats.expressions import Expression
from verl_adaptive.stats.keys import Identity
from verl_adaptive.stats.prompts import Prompts
from verl_adaptive.stats.suspects import surprise
from verl_adaptive.text import short

SECTIONS = (
    *("Learning", "What to look at today", "The end of the run", "Likely wrong labels"),
    *("Where every rollout went", "Savings against uniform allocation", "Difficulty over time", "Pass rate by visit"),
    *("Prompts", "By data source", "Calibration", "Budget and policy"),
    *("Never solved", "Regressed", "Flip-flopping", "Questions with different answers"),
)
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what the page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.words: list[str] = []
        self.odd: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value)

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data) -> None:
        self.words.append(data)

    def handle_comment(self, data) -> None:
        self.odd.append(data)

    handle_pi = unknown_decl = handle_comment


def page_of(run, folder, *words) -> str:
    """What ``verl-adaptive report`` writes about a run."""
    assert main(["report", str(run), "-o", str(folder / "r.html"), *map(str, words)]) == 0
    return (folder / "r.html").read_text()


def hovers(text: str) -> list[dict]:
    """What the page's script is told of each chart."""
    return [json.loads(html.unescape(found)) for found in re.findall(r'data-hover="([^"]*)"', text)]


def rows_of(
    count: int, source: Callable[[int], str], text: str = "{}", answer: Callable[[int], int] = int
) -> list[dict]:
    """Rows of a data set, one a number."""
    return [
        {
            "data_source": source(i),
            "prompt": [{"role": "user", "content": text.format(i)}],
            "reward_model": {"style": "rule", "ground_truth": str(answer(i))},
        }
        for i in range(count)
    ]


def test_every_section_is_there(reported) -> None:
    headings = re.findall(r"<h[23][^>]*>(.*?)</h[23]>", reported.html)
    empty = re.search(r"Empty: (.*?)\.</p>", reported.html)
    assert [s for s in SECTIONS if s not in headings and s not in empty[1]] == []
    assert reported.html.count("data-hover") >= 10


def test_the_page_stands_alone(reported) -> None:
    """Its tags, attributes and links: tests/test_security.py, where every name is hostile."""
    assert not Page(reported.html).attributes.keys() & {"srcset", "style"}
    plain = reported.html.replace("http://www.w3.org/2000/svg", "")
    assert "://" not in plain
    assert "url(" not in reported.html and "@import" not in reported.html
    assert len(reported.html) < 700_000


def test_style_and_script_are_allowed_by_their_hashes_and_nothing_else(reported) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', reported.html)[1].replace("&#39;", "'")
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", reported.html, flags=re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "connect" not in policy


def test_the_numbers_are_the_runs(reported) -> None:
    text = " ".join(Page(reported.html).words)
    total = reported.engine.total
    for account in (total.rollouts, total.tokens):
        assert f"{account.generated:,}" in text and f"{account.trained:,}" in text
    for reason, amount in total.rollouts.dropped.items():
        assert re.search(rf"dropped: {reason}\s+{amount:,}\s", text)
    assert re.search(r"1\s+questions of the data set appear more than once", text)


def test_prompt_texts_only_if_asked_for(reported, tmp_path) -> None:
    assert "What is" in reported.html
    page = page_of(reported.folder, tmp_path)
    assert "What is" not in page and "different answers" not in page


def test_a_data_set_of_other_prompts_is_said(reported, tmp_path) -> None:
    """The page had no texts, and no word of why."""
    data = write_dataset(tmp_path / "other.parquet", rows_of(5, lambda i: "other", "another {}"))
    said = "listed prompts is in"
    assert said in page_of(reported.folder, tmp_path, "--data", data) and said not in reported.html


def test_classes_and_rollouts_add_up(reported) -> None:
    opened = open_run(reported.folder)
    made = collect(opened)
    history = made.history
    steps = opened.steps
    assert history.classes.sum() == sum(steps.column("groups").to_pylist())
    assert history.classes[:, CLASSES.index("failed")].sum() == opened.prompts.table.col("failures").sum()
    total = reported.engine.total.rollouts
    assert sum(v.sum() for v in history.rollouts.values()) == total.generated - total.held
    assert history.rollouts["trained"].sum() == total.trained
    assert history.visits.sum() == opened.prompts.table.col("visits").sum()
    again = (
        opened.prompts.table.col("visits") > 1
    ).sum()  # once is no change: most of GRPO's first epochs filled the diagonal
    assert made.then_and_now.sum() == again < (opened.prompts.table.col("visits") > 0).sum()
    assert set(history.scalars) == set(reported.engine.policy.metrics())


def test_a_step_counts_the_same_in_every_bin(tmp_path) -> None:
    """133 steps make bins of two steps and of one; a run that trains 32 rollouts in every step is a level area."""
    make_run(tmp_path, steps=133, prompts=200, sampler="epoch", filter="informative", snapshot=False, batch=4, seed=1)
    made = collect(open_run(tmp_path)).history
    assert sorted(set(made.steps.tolist())) == [1, 2] and made.steps.sum() == 133
    assert (made.rollouts["trained"] == 32 * made.steps).all()
    page = page_of(tmp_path, tmp_path)
    points = re.search(r'<polygon points="([^"]*)" fill="var\(--c1\)"><title>trained', page)[1].split()
    assert len({point.split(",")[1] for point in points[: len(made.step)]}) == 1


def test_what_is_said_of_smoothing_is_of_the_run_itself(tmp_path) -> None:
    """A run of ten steps is not smoothed, however the run beside it is."""
    for name, steps in (("short", 10), ("long", 60)):
        make_run(tmp_path / name, steps=steps, snapshot=False)
    for one, other, smoothed in (("short", "long", False), ("long", "short", True)):
        page = page_of(tmp_path / one, tmp_path, "--against", tmp_path / other)
        assert ("neighbours" in page) == smoothed


def test_lengths_are_of_the_rollouts_that_they_are_divided_by(tmp_path) -> None:
    """A group that failed has tokens and no rollouts that were judged."""
    make_run(tmp_path, steps=40, snapshot=False)
    history = collect(open_run(tmp_path)).history
    rows = [row for page in open_run(tmp_path).observations() for row in page.to_pylist()]
    lost = sum(row["tokens"] for row in rows if row["failed"])
    tokens, rollouts = (sum(row[name] for row in rows if not row["failed"]) for name in ("tokens", "n"))
    assert lost > 0 and (history.sums["tokens"].sum(), history.sums["rollouts"].sum()) == (tokens, rollouts)


def test_predictions_use_earlier_visits_only(reported, monkeypatch) -> None:
    """The vectorised pass, in pages of which each has some of a prompt's visits, against one group after another."""
    monkeypatch.setattr(reader, "_PAGE", 100)
    opened = open_run(reported.folder)
    made = collect(opened).history
    won, tried = np.zeros(len(opened.prompts)), np.zeros(len(opened.prompts))
    wanted = np.zeros((10, 3))
    for w in opened.windows():
        for row, rate, n in zip(w.row[w.usable], w.rate[w.usable], w.n[w.usable], strict=True):
            if tried[row]:
                p = (won[row] + 1) / (tried[row] + 2)
                wanted[min(int(p * 10), 9)] += [p, rate, 1]
            won[row] += rate * n
            tried[row] += n
    assert np.allclose(made.calibration, wanted) and wanted[:, 2].sum() > 100


def test_savings_are_estimated_only_where_it_is_fair(tmp_path) -> None:
    """In a world that stands still, a run without a gate is uniform allocation, whatever is aborted, failed or lost."""
    make_run(tmp_path / "dapo", prompts=200, steps=60, sampler="epoch", filter="informative", snapshot=False)
    made = collect(open_run(tmp_path / "dapo"))
    assert abs(made.history.uniform["saved"]) < 0.05 and made.history.uniform["n"] == 8
    dropped = made.facts["ledger"].rollouts.dropped
    assert dropped["aborted"] > 0.05 * made.history.uniform["judged"] and dropped["failed"] > 0
    make_run(tmp_path / "pc", n=16, sampler="retire", allocator="pilot_commit", filter="band", steps=20, snapshot=False)
    # most groups end with half of n, the others were topped up
    make_run(tmp_path / "aero", sampler="epoch", allocator="aero", filter="aero", steps=20, snapshot=False)
    for name in ("pc", "aero"):
        assert "different sizes" in collect(open_run(tmp_path / name)).history.uniform["why"]


def test_a_stale_group_is_one_that_uniform_allocation_has_too(tmp_path) -> None:
    """An asynchronous run without a gate, which is uniform allocation, was said to judge 84 % more rollouts than that."""
    engine, world = make_async_engine(
        "epoch", filter="informative", async_facts=AsyncFacts(warmup=16, threshold=1), batch=16, M=200
    )
    arrivals = Arrivals(world)
    with Journal(tmp_path / "adaptive") as journal:
        journal.begin(0)
        for step in range(1, 31):
            result = arrivals.step(engine, step)
            keys, outcomes = engine.table.keys[result.groups.row], result.outcome.astype(str)
            journal.commit_step(step, result.groups, keys, outcomes, sources=["s"] * len(keys))
    assert engine.total.rollouts.dropped["stale"] > 1000
    assert abs(collect(open_run(tmp_path)).history.uniform["saved"]) < 0.05


@pytest.mark.parametrize(
    ("steps", "lost", "why"), [(9, 0, "it takes 10 steps, and the run has 9"), (30, 20, "the journal lacks 20 steps")]
)
def test_no_saving_is_claimed_where_none_can_be_known(steps, lost, why, tmp_path) -> None:
    """At the beginning, and where the run's account has steps that the groups do not."""
    make_run(tmp_path, prompts=200, steps=steps, sampler="epoch", filter="informative", snapshot=False)
    without_steps(tmp_path, 1, lost)
    page = page_of(tmp_path, tmp_path)
    assert f"Not estimated: {why}" in page and "rollouts against uniform" not in page
    assert ("The journal lacks steps 1 to 20" in page) == bool(lost)


def test_a_snapshot_has_a_report_without_a_course(reported, tmp_path) -> None:
    page = page_of(reported.folder / "global_step_40", tmp_path)
    Page(page)
    assert "no course over time" in page and "Never solved" in page and "Over steps" not in page
    page = page_of(reported.folder, tmp_path, "--against", reported.folder / "global_step_40")
    assert "(snapshot) has no course to draw beside" in page


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_very_beginning_of_a_run(steps, tmp_path) -> None:
    if steps:
        make_run(tmp_path, steps=steps, snapshot=False)
    else:
        attempt(tmp_path / "adaptive")
    page = page_of(tmp_path, tmp_path)
    Page(page)
    assert "nan" not in re.findall(r'(?:points|x|y|r|cx|cy)="([^"]*)"', page)
    about = re.search('class="soft meta">([^<]*)', page)[1]
    assert steps != 1 or about.endswith("· step 1"), about  # how long it took is not known


def test_wrong_arguments_are_one_line(reported, tmp_path, refusal) -> None:
    for words, says in (
        (["/no/where"], "does not exist"),
        ([reported.folder, "-o", tmp_path / "no" / "r.html"], "does not exist"),
        ([reported.folder, "-o", tmp_path], "is a directory"),
        ([reported.folder, "-o", tmp_path / "r.html", "--data", "/no.parquet"], "/no.parquet"),
    ):
        assert says in refusal("report", *words)
    assert list(tmp_path.iterdir()) == []


def test_only_a_page_is_replaced_by_a_page(tmp_path, call, refusal) -> None:
    """A file of a journal that is named by mistake stays."""
    for name in ("a", "b"):
        make_run(tmp_path / name, steps=2, snapshot=False)
    journal = tmp_path / "b" / "adaptive" / "attempt-0" / "groups.arrows"
    before = journal.read_bytes()
    assert "must be .html" in refusal("report", tmp_path / "a", "-o", journal, status=2)
    assert journal.read_bytes() == before
    os.mkfifo(tmp_path / "pipe.html")  # no device, which root would replace where this is broken
    assert "no file that a page could replace" in refusal("report", tmp_path / "a", "-o", tmp_path / "pipe.html")
    for _ in range(2):
        assert call("report", tmp_path / "a", "-o", tmp_path / "r.html")[0] == 0


def test_many_sources_and_long_texts_stay_bounded(tmp_path) -> None:
    rows = rows_of(130, lambda i: f"source {i} {HOSTILE}", "{} " + "x" * 100_000)
    make_run(tmp_path / "run", rows=rows, steps=40, snapshot=False)
    data = write_dataset(tmp_path / "d.parquet", rows)
    page = page_of(tmp_path / "run", tmp_path, "--data", data, "--tries", 1)
    assert len(page) < 700_000 and "100 of 130, by rollouts" in page
    assert page.split('id="sources"')[1].split("</table>")[0].count('<td class="l wrap">source ') == 100


def test_every_source_says_when_it_was_solved_first(tmp_path) -> None:
    """Of those without a curve of their own a dash said that they never were."""
    make_run(
        tmp_path, rows=rows_of(60, lambda i: f"s{i % 30}"), rates=np.full(60, 0.7), steps=40, snapshot=False, longest=30
    )
    history = collect(open_run(tmp_path)).history
    assert len(history.sources) < 30
    every = {f"s{i}" for i in range(30)}
    assert history.first_solved.keys() == history.hearing.judge.cut_shares().keys() == every
    assert "Answers cut at the limit" in page_of(tmp_path, tmp_path)  # which is known here


@pytest.mark.parametrize(("words", "found"), [([], 0), (["--data", "train.parquet"], 2)])
def test_commands_on_the_page_find_what_it_lists(words, found, tmp_path, call, monkeypatch) -> None:
    """Of a store without data sources, by an id: stats and export were not told the id, nor the data set."""
    monkeypatch.chdir(tmp_path)
    rows = rows_of(120, lambda i: ("easy", "hopeless")[i % 2])
    lines = [json.dumps({"uid": str(i), "n": 24, "successes": 0 if i % 2 or i == 4 else 20}) for i in range(120)]
    (tmp_path / "eval.jsonl").write_text("\n".join(lines))
    write_dataset(tmp_path / "train.parquet", [{**row, "uid": str(i)} for i, row in enumerate(rows)])
    page = html.unescape(page_of("eval.jsonl", tmp_path, "--id-key", "uid", *words))
    commands = [shlex.split(c) for c in re.findall(r'<code class="command">verl-adaptive ([^<]*)</code>', page)]
    assert [command[0] for command in commands] == ["stats"] * found + ["export"] * 2
    for i, command in enumerate(commands):
        command[2] = command[2] if command[0] == "stats" else f"{i}-{command[2]}"  # the file that is written
        status, out, err = call(*command)
        assert status == 0 and "selected prompts: 0" not in out and not err.startswith("0 "), command


def test_commands_on_the_page_say_what_identifies_a_prompt() -> None:
    own = Identity("messages", "extra_info.id", {"images": "the pictures"})
    assert own.words()[:4] == ["--prompt-key", "messages", "--id-key", "extra_info.id"] and Identity().words() == []
    _, (_, kept) = _commands(
        {"argument": "r", "data": "d", "identity": own.words(), "kind": "journal"}, "visits > 1", "visits < 2"
    )
    assert "--data d --prompt-key messages --id-key extra_info.id --media-key 'images=the pictures' --where" in kept


def test_the_first_step_took_a_usual_one_s_time() -> None:
    hours, pace = hours_of(np.array([1, 2, 3]), np.array([1000.0, 1060.0, 1120.0]), np.zeros(3))
    assert (hours * 60).tolist() == pytest.approx([1, 2, 3]) and pace == 60
    hours, pace = hours_of(np.array([1, 2]), np.array([1000.0, 1060.0]), np.arange(2))  # attempts of one step each
    assert math.isnan(pace) and np.isnan(hours).all()  # they were said to have taken no time
    hours, pace = hours_of(np.array([1]), np.array([1000.0]), np.zeros(1))
    assert math.isnan(pace) and np.isnan(hours).all()


# -- figures ------------------------------------------------------------------------------------------------


def test_numbers_of_cards_are_not_broken_in_two(reported) -> None:
    made = collect(open_run(reported.folder))
    made.facts |= {"visited": 999_999, "never_solved": 12_345_678}
    page = render(made)
    assert "<b>999,999</b>" in page and "<b>12.3M</b>" in page


def test_areas_stack() -> None:
    x = np.array([1.0, 2.0, 3.0])
    svg = figures.stacked(
        "t", x, [Series("a", np.array([1.0, 2, 3]), "red"), Series("b", np.array([3.0, 2, 1]), "blue")], ("x", "y")
    )
    polygons = [
        [tuple(map(float, p.split(","))) for p in points.split()] for points in re.findall(r'points="([^"]*)"', svg)
    ]
    assert len(polygons) == 2
    lower, upper = polygons
    assert lower[:3] == upper[3:][::-1]  # the upper area stands on the lower one
    assert len({y for _, y in upper[:3]}) == 1  # 1+3 = 2+2 = 3+1
    assert re.findall(r'end">([\d.]+)<', svg) == ["0", "1", "2", "3", "4"]


def test_bars_cells_and_dots_are_drawn() -> None:
    """With what each says beside the pointer; a chart of the axes alone passed every other test."""
    svg = figures.bars("t", ["a", "b"], [1200, 0], ("x", "prompts"), "red")
    assert re.findall(r"<title>([^<]*)", svg) == ["a: 1,200", "b: 0"] and 'class="value">1.2k<' in svg
    assert re.findall(r'middle">([ab])<', svg) == ["a", "b"]
    shares = np.array([[0.25, 1.0], [0.75, np.nan]])
    svg = figures.heatmap("t", ["1", "2"], ["low", "high"], shares, ("visit", "rate"))
    assert re.findall(r"<title>([^<]*)", svg) == ["1, low: 25.0%", "2, low: 100.0%", "1, high: 75.0%"]
    assert re.findall(r'(?:end|middle)">(\w+)<', svg) == ["low", "high", "1", "2"]
    svg = figures.reliability("t", np.array([0.2, 0.8]), np.array([0.3, 0.7]), np.array([10.0, 40.0]))
    assert svg.count('class="diagonal"') == 1 and re.findall(r'end">([\d.]+)<', svg) == [
        "0",
        "0.25",
        "0.5",
        "0.75",
        "1",
    ]
    assert re.findall(r"<title>([^<]*)", svg)[1] == "predicted 0.80, observed 0.70, 40 groups"
    alone = [Series("s", np.array([0.5]), "red")]  # of one point there is no line
    assert figures.lines("t", np.ones(1), alone, ("x", "y")).count("<circle") == 1


def test_reasons_are_drawn_however_many_there_are() -> None:
    """Filters name their own, and the page of a run with more than 21 ended in a traceback."""
    rollouts = {f"dropped: reason {i}": np.ones(3) for i in range(30)}
    step, one = np.arange(3), np.ones(3)
    chart = _fate(SimpleNamespace(rollouts=rollouts, steps=one, step=step, sums={"judged": one[:, None]}))
    assert chart.count("<polygon") == 30


def test_ticks_are_round_and_inside() -> None:
    for low, high in ((0, 1), (0, 35_184), (-0.2, 0.7), (3, 3), (0, 1e-6), (1e6, 1.1e6)):
        ticks = figures._ticks(low, high)
        assert 1 <= len(ticks) <= 8 and all(low - 1e-9 <= t <= high * (1 + 1e-9) + 1e-9 for t in ticks)
    said = {0.25: "0.25", 999.6: "1k", 1234: "1.23k", 999_400: "999k", 999_999: "1M", 3e6: "3M", math.nan: "-"}
    assert [short(value) for value in said] == [*said.values()]


def test_nothing_but_zeros_has_an_axis_that_begins_at_zero() -> None:
    """Where no answer is cut, the picture said -50% to 50%."""
    svg = figures.lines("t", np.arange(3.0), [Series("a", np.zeros(3), "red")], ("x", "y"), percent=True)
    assert re.findall(r">(-?[0-9]+%)<", svg) == ["0%", "25%", "50%", "75%", "100%"]


# -- what to look at ----------------------------------------------------------------------------------------


def dumped(folder, rows, records) -> None:
    """verl's rollout files: of each prompt some answers and their scores."""
    folder.mkdir()
    for step, (row, answers) in enumerate(records, 1):
        prompt, truth = rows[row]["prompt"][0]["content"], rows[row]["reward_model"]["ground_truth"]
        lines = [
            {"input": f"user\n{prompt}\nassistant", "output": out, "gts": truth, "score": score, "step": step}
            for out, score in answers
        ]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')


def test_wrong_answers_come_from_verls_rollouts(tmp_path) -> None:
    rows = rows_of(60, lambda i: "sums", "What is {0} and {0}?", lambda i: 2 * i)
    rates = np.full(60, 0.9)
    rates[5] = 0.0  # the label is wrong
    make_run(tmp_path / "run", rows=rows, rates=rates, steps=60, sampler="epoch", filter="keep_all", snapshot=False)
    data = write_dataset(tmp_path / "d.parquet", rows)
    answers = [("so \\boxed{11}", 0.0), ("#### 11", 0.0), ("<answer>12</answer>", 0.0), ("it is 10", 1.0)]
    dumped(tmp_path / "rollouts", rows, [(5, answers), (6, [("\\boxed{1}", 0.0)])])
    opened = open_run(tmp_path / "run")
    made = collect(opened, data=str(data), rollouts=str(tmp_path / "rollouts"))
    suspects = made.lists[0]
    assert suspects.title == "Likely wrong labels" and suspects.total == 1
    (found,) = suspects.records
    assert (found["row"], found["expected"], found["said"]) == (5, "10", "11 50% · 12 25% · right 25%")
    assert found["surprise"] > 3
    assert any("1 prompt fails although" in f.what for f in made.findings)
    opened.about["success"] = 1.5  # the run's own adaptive.success.threshold
    (row,) = opened.texts({found["key"]}, data=str(data), rollouts=str(tmp_path / "rollouts")).values()
    assert row.said.answers == "11 50% · 12 25% · it is 10 25%"


@pytest.mark.parametrize("order", [("short", "long"), ("long", "short")])
def test_an_answer_belongs_to_the_longest_text_in_the_input(tmp_path, order) -> None:
    texts = {"short": "Is 12 even?", "long": "Is 12 even? Is 2 even?"}
    lines = [
        {"input": f"user\n{text}\nassistant", "output": f"#### {name}", "gts": "yes", "score": 0.0}
        for name, text in texts.items()
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = {"short": "0" * 32, "long": "1" * 32}
    said = said_of(str(tmp_path), {keys[name]: Row(None, texts[name], "yes") for name in order})
    assert {key: dict(one.wrong) for key, one in said.items()} == {keys[name]: {name: 1} for name in order}


def test_validations_are_drawn_and_compared(tmp_path) -> None:
    for name, gain in (("a", 0.1), ("b", 0.05)):
        rises = lambda s, g=gain: 0.2 + g * s / 5  # noqa: E731
        make_run(tmp_path / name, steps=20, snapshot=False, run_id=f"p/{name}", validate=rises)
    opened, other = (open_run(tmp_path / name) for name in ("a", "b"))
    made = collect(opened, against=[other])
    assert [v["step"] for v in made.history.validations] == [0, 5, 10, 15, 20]
    assert made.history.validations[-1]["rollouts"] == made.history.generated[-1]
    page = page_of(tmp_path / "a", tmp_path, "--against", tmp_path / "b")
    first = next(h for h in hovers(page) if h["of"] == "step")
    assert [line[0] for line in first["lines"]] == ["math", "math · p/b"]
    assert first["lines"][0][2] == [0.2, 0.3, 0.4, 0.5, 0.6] and first["lines"][1][2][-1] == 0.4
    assert "0.600" in page and "against p/b" in page
    # Runs beside this one share its colours: each has its own dashes, which the legend shows.
    lines = re.findall(
        r'<line [^>]*stroke-dasharray="([^"]*)"', learning(collect(opened, against=[other, other]))[1][2][0][1]
    )
    assert len(set(lines)) == len(lines) == 2


def test_another_runs_sources_keep_their_colours_and_its_mean_is_of_ours(tmp_path) -> None:
    """Dashed lines are read by their colour; a mean over other sources beside ours looked like a difference."""
    for name, source in (("a", "gsm8k"), ("b", "aime")):
        metrics = {f"val-core/{source}/acc/mean@1": 0.3, "val-core/math/acc/mean@1": 0.5}
        sizes = {source: 30, "math": 20}
        make_run(tmp_path / name, steps=10, snapshot=False, validate=lambda s, m=metrics: m, validated_on=sizes)
    opened, other = (open_run(tmp_path / name) for name in ("a", "b"))
    chart = learning(collect(opened, against=[other]))[1][2][0][1]
    (hover,) = hovers(chart)
    colors = {line[0].split(" · ")[0]: line[1] for line in hover["lines"]}
    drawn = [line[0].split(" · ")[0] for line in hover["lines"]]
    assert drawn == ["gsm8k", "math", "mean of 2 sources", "aime", "math"]
    assert colors["math"] == hover["lines"][1][1] and len({colors[s] for s in ("gsm8k", "math", "aime")}) == 3
    (hover,) = hovers(learning(collect(opened, against=[other, other]))[1][2][0][1])
    assert len(hover["lines"]) == 3 + 2  # of several runs one curve each: ten runs of three sources were a tangle


def test_a_source_has_one_colour_on_the_page(tmp_path) -> None:
    """Validation has another order of them, and one that is not trained on."""
    metrics = {f"val-core/{name}/acc/mean@1": 0.5 for name in ("held out", "math", "gsm8k")}
    make_run(tmp_path, steps=10, snapshot=False, validate=lambda s: metrics, validated_on=dict.fromkeys(metrics, 9))
    made = collect(open_run(tmp_path))
    (validated,), (trained,) = hovers(learning(made)[1][2][0][1]), hovers(pictures(made)["difficulty"][2][1])
    first, second = ({line[0]: line[1] for line in found["lines"]} for found in (validated, trained))
    assert first["math"] == second["math"] and first["gsm8k"] == second["gsm8k"]
    assert first["held out"] not in (first["math"], first["gsm8k"])


def test_a_chart_is_there_where_there_is_something_to_draw(tmp_path) -> None:
    make_run(tmp_path, steps=3, snapshot=False)
    made = collect(open_run(tmp_path))

    def drawn() -> set[str]:
        return {h for found in (*pictures(made).values(), learning(made)[0][2]) for h, *_ in found}

    assert {"Exploration", "Pass rate by data source", "Pass rate at the latest visit", "Length of answers"} <= drawn()
    assert not {"Answers cut at the limit", "Training pass rate"} & drawn()  # not known; that of the rewards
    made.history.sums["reward"] *= 2
    assert "Training pass rate" in drawn()


def test_a_mean_over_sources_is_of_the_same_validations() -> None:
    """Other validation files from step 10 on: both sources have two points, of different steps, and no mean."""
    early, late = (
        {f"val-core/{name}/acc/{way}": 0.5 for way in ("mean@4", "std@4", "best@4/std")} for name in ("gsm8k", "math")
    )
    found = curves([{"metrics": m, "prompts": {}} for m in (early, early, late, late)])
    assert [c.name for c in found.pop("acc/mean@4")] == ["math", "gsm8k"]  # last: what stands for the run
    assert not found  # spreads are no accuracy


def test_a_reward_that_wavers_is_not_below_its_best(tmp_path) -> None:
    """On a scale of a hundred, validations differ by more than 0.02 all the time."""
    wavers = lambda s: {"val-core/math/reward/mean@1": 50.0 - s % 2 - s / 10 * (s > 5)}  # noqa: E731
    make_run(tmp_path, steps=20, snapshot=False, validate=wavers)
    assert not [f for f in collect(open_run(tmp_path)).findings if "below its best" in f.what]


def test_findings_name_what_is_wrong(tmp_path) -> None:
    rows = rows_of(60, lambda i: "broken" if i % 2 else "fine")
    rates = np.where(np.arange(60) % 2, 0.0, 0.6)
    how = {"sampler": "epoch", "filter": "keep_all", "snapshot": False, "longest": 1}
    make_run(tmp_path, rows=rows, rates=rates, steps=40, validate=lambda s: 0.8 if s == 10 else 0.3, **how)
    found = {f.what: f for f in collect(open_run(tmp_path)).findings}
    (dead,) = (f for what, f in found.items() if what.startswith("broken: not one success"))
    assert dead.grave and dead.where == 'source == "broken"'
    assert any("answers are cut at" in w for w in found)
    assert any("below its best, 0.800 at step 10" in w for w in found)


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ({"sampler": "epoch", "filter": "informative"}, "+adaptive=greso"),
        ({"sampler": "greso", "filter": "informative"}, "adaptive.warm_start"),
        ({"sampler": {"name": "spread", "weight": "mixed"}, "filter": "informative"}, "adaptive.warm_start"),
        ({"sampler": "epoch", "allocator": "pilot_commit", "filter": "band"}, "+adaptive=greso"),
    ],
)
def test_advice_on_waste_knows_what_is_running(parts, advice, tmp_path) -> None:
    make_run(tmp_path, prompts=40, steps=2, batch=4, rates=np.linspace(0, 0.1, 40), snapshot=False, **parts)
    (why,) = (f.why for f in collect(open_run(tmp_path)).findings if "of the latest rollouts went to" in f.what)
    assert advice in why and ("greso" in why) == (advice == "+adaptive=greso")


def test_advice_on_failures_is_no_sampler() -> None:
    history = SimpleNamespace(
        step=np.arange(4), rollouts={"trained": np.ones(4), "dropped: failed": np.full(4, 3)}, scalars={}
    )
    (finding,) = _waste(history)
    assert "failed" in finding.what and "greso" not in finding.why and "docs/metrics.md" in finding.why
    history.rollouts["trained"] *= 4
    assert _waste(history) == []


@pytest.mark.parametrize(("failed", "said"), [(0, ""), (1, ""), (5, "20% of the latest groups failed")])
def test_groups_that_fail_are_said(failed, said) -> None:
    """A fifth of them did, and nothing stood out."""
    classes = np.zeros((8, len(CLASSES)), dtype=np.int64)
    classes[-2:, 0], classes[-2:, CLASSES.index("failed")] = 25 - failed, failed
    found = _failures(SimpleNamespace(step=np.arange(8), classes=classes))
    assert [finding.what for finding in found] == ([said] if said else [])
    assert not found or (found[0].grave and Expression(found[0].where))


def test_a_forecast_goes_on_as_of_late(tmp_path) -> None:
    make_run(tmp_path, steps=40, snapshot=False, plan={"adaptive/plan/steps": 100})
    opened = open_run(tmp_path)
    made = collect(opened)
    end = forecast(made.history)
    assert (end.left, end.by, end.steps) == (60, "steps", 100) and end.pace == pytest.approx(60)
    assert end.hours_left == pytest.approx(1.0)
    late = np.diff(made.history.generated)[-8:].mean()
    assert end.per_step == pytest.approx(late)
    made.history.plan["rollouts"] = made.history.generated[-1] + 3 * late
    assert (forecast(made.history).left, forecast(made.history).by) == (3, "rollouts")


def test_neighbouring_ticks_have_different_words() -> None:
    """Half a per cent was 0% and one and a half 2%, beside the true ones; late steps were all 10k."""
    share = figures.lines("t", np.arange(2.0), [Series("s", np.array([0.0, 0.02]), "red")], ("x", "y"), percent=True)
    assert re.findall(r">([\d.]+%)<", share) == ["0%", "0.5%", "1%", "1.5%", "2%"]
    late = figures.lines("t", np.array([10010.0, 10050.0]), [Series("s", np.zeros(2), "red")], ("step", "y"))
    assert re.findall(r">([\d.]+k)<", late) == ["10.01k", "10.02k", "10.03k", "10.04k", "10.05k"]
    assert re.findall(r'end">([\d.]+)<', figures.bars("t", ["a"], [2], ("x", "prompts"), "red")) == ["0", "1", "2"]


def test_the_axis_covers_what_is_drawn() -> None:
    """The faint line that is not smoothed left the picture."""
    values, raw = np.full(20, 0.5), np.where(np.arange(20) % 2, 3.0, -3.0)
    picture = figures.lines("t", np.arange(20.0), [Series("s", values, "red", raw=raw)], ("x", "y"), from_zero=False)
    (points,) = re.findall(r'<polyline class="raw" points="([^"]*)"', picture)
    heights = {float(point.split(",")[1]) for point in points.split()}
    assert min(heights) >= 0 and max(heights) <= figures.HEIGHT


def test_seeds_of_one_experiment_are_drawn_under_their_folders(tmp_path, monkeypatch) -> None:
    """Four dashed lines were named pretrained/solo, pretrained/grpo, pretrained/grpo and pretrained/solo."""
    for seed in (1, 2, 3):
        make_run(tmp_path / f"s{seed}", steps=2, seed=seed, run_id="p/solo", snapshot=False)
    monkeypatch.chdir(tmp_path)
    made = collect(open_run("s1"), against=[open_run(tmp_path / "s2"), open_run("s3")])
    assert [name.split("/")[0] for name, _ in made.against] == ["s2", "s3"]


def test_sources_get_worse_by_chance_on_few_pages() -> None:
    """Each of ten sources at 97.5 % was a warning on one page in four, in runs in which no pass rate changed."""
    draw, size, names = np.random.default_rng(0), 64, [f"s{i}" for i in range(10)]
    table = StatsTable()
    keys = make_keys(size * len(names))
    rows = table.rows_for(keys, sources=np.repeat(names, size))

    def said(first: np.ndarray, last: np.ndarray) -> list[str]:
        for name, rate in (("visits", 2), ("first_rate", first), ("last_rate", last)):
            table.col(name)[rows] = rate
        table.col("rollouts")[rows], table.col("successes")[rows] = 16, 4 * (first + last)
        return [found.what for found in _moves(Prompts(table), None) if "prompts get worse" in found.what]

    rate = draw.beta(0.5, 1.5, len(rows))
    assert sum(bool(said(*draw.binomial(8, rate, (2, len(rows))) / 8)) for _ in range(100)) <= 8
    first, last = draw.binomial(8, np.stack([rate, np.where(np.arange(len(rows)) < size, 0.5 * rate, rate)])) / 8
    (what,) = said(first, last)
    change = (last - first)[:size]
    half = 1.96 * change.std(ddof=1) / len(change) ** 0.5  # as everywhere
    assert what.startswith("s0:") and f"({change.mean():+.3f} ± {half:.3f} over" in what


def test_a_source_that_stands_still_is_said_of_prompts_visited_lately() -> None:
    table = StatsTable()
    rows = table.rows_for(make_keys(80), sources=["still"] * 40 + ["before"] * 40)
    for name, value in (("visits", 2), ("first_rate", 0.5), ("last_rate", 0.5), ("rollouts", 16), ("successes", 8)):
        table.col(name)[rows] = value
    table.col("last_step")[rows] = np.where(np.arange(80) < 40, 9, 2)
    (found,) = _moves(Prompts(table), SimpleNamespace(step=np.arange(1, 11)))
    assert found.what == "still: stands still (+0.000 ± 0.000 over 40 prompts visited at least twice)"
    assert not found.grave and found.where == 'source == "still"'


def test_single_rollouts_are_not_shown_as_groups_without_variance(tmp_path, call) -> None:
    """Each visit of solo's is all right or all wrong by chance: the page called every prompt that, and showed zeros."""
    parts = {"sampler": "spread", "filter": "keep_all", "advantage": "memory"}
    make_run(tmp_path, steps=20, batch=32, n=1, snapshot=False, **parts)
    page = page_of(tmp_path, tmp_path)
    of_groups = {"Pass rate by visit", "Pass rate at the latest visit", "First and latest visit"}
    assert not of_groups & set(re.findall("<h3>(.*?)</h3>", page))
    assert "a single rollout has no variance" in page and "single rollouts" in page and "Predicted and observed" in page
    assert re.search(r"^ math .*% +- +- +\S+$", call("stats", tmp_path)[1], flags=re.M)


@pytest.mark.parametrize("lost", [(1, 39), (34, 38)])
def test_a_forecast_counts_the_steps_that_the_journal_lacks(tmp_path, lost) -> None:
    """Steps that were given up made the next one last as long as all of them, or generate as much as the run."""
    make_run(tmp_path, steps=40, snapshot=False, plan={"adaptive/plan/steps": 100})
    made = collect(open_run(tmp_path))
    whole = forecast(made.history)
    without_steps(tmp_path, *lost)
    made = collect(open_run(tmp_path))
    end = forecast(made.history)
    assert (end.per_step, end.rollouts) == pytest.approx((whole.per_step, whole.rollouts), rel=0.25)
    assert math.isnan(end.pace) if lost[0] == 1 else end.pace == pytest.approx(60)


def test_a_reward_that_is_no_number_says_nothing_on_the_page_either(tmp_path) -> None:
    """The table left such groups out of pass rates, the page's curves had them."""
    rewards = [[1.0, math.nan, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]]
    groups = Groups.from_lists([0, 1], rewards, success=[[1, 1, 0, 1], [1, 0, 0, 1]])
    journal_of(tmp_path / "adaptive", groups, make_keys(2))
    made = collect(open_run(tmp_path))
    assert (made.facts["visits"], made.facts["failed_groups"], made.facts["pass_rate"]) == (1, 1, 0.5)
    assert [made.history.sums[name].sum() for name in ("judged", "rollouts", "successes")] == [1, 4, 2]
    assert made.history.classes.sum(axis=0).tolist() == [0, 0, 1, 0, 0, 1]


def test_surprise_is_the_tail_of_the_beta_binomial() -> None:
    a, b = 3.0, 1.5
    draw = np.random.default_rng(0)
    n = np.array([8, 8, 16])
    s = np.array([0, 2, 1])
    sampled = [(draw.binomial(k, draw.beta(a, b, 400_000)) <= w).mean() for k, w in zip(n, s, strict=True)]
    assert 10 ** -surprise(s, n, a, b) == pytest.approx(sampled, rel=0.1)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("then \\boxed{\\frac{1}{2}} done", "\\frac{1}{2}"),
        ("x\n#### 42\n", "42"),
        ("<answer> 7\n</answer>", "7"),
        ("The answer is 5.", "5"),
        ("first\nlast line", "last line"),
        ("", "(nothing)"),
        ("\\boxed{never closed", "\\boxed{never closed"),
    ],
)
def test_the_answer_in_a_rollout(output, answer) -> None:
    assert answer_in(output) == answer


def test_smoothing_keeps_level_and_weight() -> None:
    values, weights = np.array([1.0, np.nan, 3.0, 5.0]), np.array([1.0, 9.0, 1.0, 3.0])
    assert smooth(values, weights, 1)[[0, 2, 3]].tolist() == [1.0, 3.0, 5.0]
    assert smooth(values, weights, 3).tolist() == [1.0, 2.0, 4.5, 4.5]
    assert np.allclose(smooth(np.full(30, 0.4), np.arange(1.0, 31), 7), 0.4)
