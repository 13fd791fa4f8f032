"""``verl-adaptive report``: the numbers are the run's, the page stands alone, and nobody's text gets out of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.cli.stores import HOSTILE, make_run, write_dataset
from verl_adaptive.cli import main
from verl_adaptive.report import figures
from verl_adaptive.report.collect import CLASSES, collect
from verl_adaptive.report.figures import Series
from verl_adaptive.report.history import windows
from verl_adaptive.report.opening import open_prompts
from verl_adaptive.report.page import _subtitle
from verl_adaptive.stats.journal import Journal

SECTIONS = (
    "Where every rollout went",
    "Savings against uniform allocation",
    "Difficulty over time",
    "Pass rate by visit",
    "Prompts",
    "By data source",
    "Calibration",
    "Budget and policy",
    "Never solved",
    "Regressed",
    "Flip-flopping",
    "Questions with different answers",
)
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what the page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data) -> None:
        self.words.append(data)


def test_every_section_is_there(reported) -> None:
    headings = re.findall(r"<h[23]>(.*?)</h[23]>", reported.html)
    assert [s for s in SECTIONS if s not in headings] == []
    assert reported.html.count("<svg") >= 8


def test_the_page_stands_alone(reported) -> None:
    page = Page(reported.html)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}
    assert not {a for a in page.attributes if a.startswith("on")} and not page.attributes & {"src", "href", "srcset"}
    assert "://" not in re.sub(r"sqlite:////\S+", "", reported.html).replace("data:", "")
    assert "url(" not in reported.html and "@import" not in reported.html
    assert "default-src 'none'" in reported.html
    assert len(reported.html) < 400_000


def test_nobodys_text_gets_out(reported) -> None:
    assert "<script>alert" not in reported.html and "&lt;script&gt;alert(1)" in reported.html
    assert "&lt;b&gt;7&lt;/b&gt;" in reported.html and "&amp;amp;" in reported.html
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", reported.html)
    assert "\\u202e" in reported.html and "\\x1b[31m" in reported.html


def test_the_numbers_are_the_runs(reported) -> None:
    text = " ".join(Page(reported.html).words)
    total = reported.engine.total
    for value in (total.rollouts.generated, total.rollouts.trained, total.tokens.generated, total.tokens.trained):
        assert f"{value:,}" in text
    for reason, amount in total.rollouts.dropped.items():
        assert re.search(rf"dropped: {reason}\s+{amount:,}\s", text)
    assert re.search(r"1\s+questions of the data set appear more than once", text)


def test_prompt_texts_only_if_asked_for(reported, tmp_path) -> None:
    assert "What is" in reported.html
    assert main(["report", str(reported.folder), "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "What is" not in page and "different answers" not in page


def test_classes_and_rollouts_add_up(reported) -> None:
    opened = open_prompts(str(reported.folder))
    made = collect(opened)
    history = made.history
    steps = opened.store.steps_arrow()
    assert history.classes.sum() == sum(steps.column("groups").to_pylist())
    assert history.classes[:, CLASSES.index("failed")].sum() == opened.prompts.table.col("failures").sum()
    total = reported.engine.total.rollouts
    assert sum(v.sum() for v in history.rollouts.values()) == total.generated - total.held
    assert history.rollouts["trained"].sum() == total.trained == history.cumulative["trained"][-1]
    assert history.visits.sum() == opened.prompts.table.col("visits").sum()
    assert made.then_and_now.sum() == (opened.prompts.table.col("visits") > 0).sum()
    assert set(history.scalars) == set(reported.engine.policy.metrics())


def test_a_step_counts_the_same_in_every_bin(tmp_path) -> None:
    """133 steps make bins of two steps and of one; a run that trains 32 rollouts in every step is a level area."""
    make_run(tmp_path, steps=133, prompts=200, sampler="epoch", filter="informative", snapshot=False, batch=4, seed=1)
    made = collect(open_prompts(str(tmp_path))).history
    assert sorted(set(made.steps.tolist())) == [1, 2] and made.steps.sum() == 133
    assert (made.rollouts["trained"] == 32 * made.steps).all()
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    points = re.search(r'<polygon points="([^"]*)" fill="var\(--c1\)"><title>trained', page)[1].split()
    assert len({point.split(",")[1] for point in points[: len(made.step)]}) == 1


def test_predictions_use_earlier_visits_only(reported) -> None:
    """The vectorised pass against one group after another."""
    opened = open_prompts(str(reported.folder))
    made = collect(opened).history
    won, tried = np.zeros(len(opened.prompts)), np.zeros(len(opened.prompts))
    wanted = np.zeros((10, 4))
    for w in windows(opened, opened.store.steps_arrow()):
        for row, rate, n, flat in zip(w.row[w.usable], w.rate[w.usable], w.n[w.usable], w.flat[w.usable], strict=True):
            if tried[row]:
                p = (won[row] + 1) / (tried[row] + 2)
                wanted[min(int(p * 10), 9)] += [p, rate, not flat, 1]
            won[row] += rate * n
            tried[row] += n
    assert np.allclose(made.calibration, wanted) and wanted[:, 3].sum() > 100


def test_savings_are_estimated_only_where_it_is_fair(tmp_path) -> None:
    """In a world that stands still, a run without a gate generates what uniform allocation would."""
    make_run(tmp_path / "dapo", prompts=200, steps=60, sampler="epoch", filter="informative", snapshot=False)
    uniform = collect(open_prompts(str(tmp_path / "dapo"))).history.uniform
    assert abs(uniform["saved"]) < 0.15 and uniform["n"] == 8
    make_run(tmp_path / "pc", n=16, sampler="retire", allocator="pilot_commit", filter="band", steps=20, snapshot=False)
    assert "different sizes" in collect(open_prompts(str(tmp_path / "pc"))).history.uniform["why"]


def test_a_snapshot_has_a_report_without_a_course(reported, tmp_path, capsys) -> None:
    assert main(["report", str(reported.folder / "global_step_40"), "-o", str(tmp_path / "s.html")]) == 0
    page = (tmp_path / "s.html").read_text()
    Page(page)
    assert "no course over time" in page and "Never solved" in page and "Over steps" not in page


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_very_beginning_of_a_run(steps, tmp_path) -> None:
    if steps:
        make_run(tmp_path, steps=steps, snapshot=False)
    else:
        with Journal.open(str(tmp_path / "adaptive.sqlite"), run_id="p/e"):
            pass
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    Page(page)
    assert "nan" not in re.findall(r'(?:points|x|y|r|cx|cy)="([^"]*)"', page)


def test_wrong_arguments_are_one_line(reported, tmp_path, capsys) -> None:
    for words, says in (
        (["report", "/no/where"], "does not exist"),
        (["report", str(reported.folder), "-o", str(tmp_path / "no" / "r.html")], "does not exist"),
        (["report", str(reported.folder), "-o", str(tmp_path)], "is a directory"),
        (["report", str(reported.folder), "-o", str(tmp_path / "r.html"), "--data", "/no.parquet"], "/no.parquet"),
        (["report", str(reported.folder), "--run", "other", "-o", str(tmp_path / "r.html")], "other"),
    ):
        assert main(words) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and says in err
    assert list(tmp_path.iterdir()) == []


def test_without_jinja2_it_says_what_to_install(reported, monkeypatch, capsys) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "verl_adaptive.report.page", raising=False)
    assert main(["report", str(reported.folder)]) == 1
    assert "verl-adaptive[report]" in capsys.readouterr().err


def test_many_sources_and_long_texts_stay_bounded(tmp_path) -> None:
    rows = [
        {
            "data_source": f"source {i} {HOSTILE}",
            "prompt": [{"role": "user", "content": f"{i} " + "x" * 100_000}],
            "reward_model": {"ground_truth": str(i)},
        }
        for i in range(130)
    ]
    make_run(tmp_path / "run", rows=rows, steps=40, snapshot=False)
    data = write_dataset(tmp_path / "d.parquet", rows)
    assert (
        main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html"), "--data", str(data), "--tries", "1"])
        == 0
    )
    page = (tmp_path / "r.html").read_text()
    assert len(page) < 400_000 and "100 of 130, by rollouts" in page


# -- figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hours", "said"), [(0.004, "under a minute"), (0.03, "2 min"), (0.9, "54 min"), (1.0, "1.0 h"), (31.26, "31.3 h")]
)
def test_how_long_a_run_took(hours, said) -> None:
    assert _subtitle({"kind": "journal", "store": "x", "hours": hours}).endswith(f" · {said}")


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


def test_ticks_are_round_and_inside() -> None:
    for low, high in ((0, 1), (0, 35_184), (-0.2, 0.7), (3, 3), (0, 1e-6), (1e6, 1.1e6)):
        ticks = figures._ticks(low, high)
        assert 1 <= len(ticks) <= 8 and all(low - 1e-9 <= t <= high * (1 + 1e-9) + 1e-9 for t in ticks)
    assert [figures.short(v) for v in (0.25, 1234, 3e6, float("nan"))] == ["0.25", "1.23k", "3M", "-"]


@pytest.mark.parametrize("values", [[], [np.nan, np.nan], [1.0], [np.nan, 2.0, np.nan, 3.0, 4.0], [0.0, 0.0]])
def test_lines_of_whatever_there_is(values) -> None:
    svg = figures.lines(
        "t", np.arange(len(values), dtype=float), [Series("s", np.array(values, float), "red")], ("", "")
    )
    assert "nan" not in svg and Page(svg)


def test_names_are_escaped_in_pictures() -> None:
    hostile = Series('"/><script>', np.ones(2), "red")
    for svg in (
        figures.lines("<t>", np.arange(2.0), [hostile], ("<x>", "<y>")),
        figures.stacked("<t>", np.arange(2.0), [hostile], ("<x>", "<y>")),
        figures.bars("<t>", ["<a>"], [1], ("<x>", "<y>"), "red"),
        figures.heatmap("<t>", ["<a>"], ["<b>"], np.ones((1, 1)), ("<x>", "<y>")),
    ):
        assert not Page(svg).tags & {"script", "t", "x", "y", "a", "b"}
