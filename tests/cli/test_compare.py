"""``verl-adaptive compare``: arms over seeds by the project's rule, and two runs prompt by prompt."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.stores import make_run, without_steps
from tests.stats.made import make_keys
from verl_adaptive.commands.compare import page_of_runs
from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.report.arms import Trial, outcomes, plot, sentence
from verl_adaptive.report.common import matched
from verl_adaptive.significance import difference, significant, t95
from verl_adaptive.stats import StatsTable, open_run
from verl_adaptive.stats.prompts import Prompts

GAINS = {1: 0.04, 2: 0.03, 3: 0.035}


def validated(folder: Path, validate=lambda step: 0.3, **options) -> None:
    """A run that is named after its folder, with these validations."""
    options = {"run_id": f"p/{folder.name}", "prompts": 40, **options}
    make_run(folder, snapshot=False, validate=validate, **options)


def seed_of(folder: Path, preset: str, seed: int, steps: int, validate=lambda step: 0.3) -> None:
    """A run of an arm, in ``folder/<preset>-s<seed>``."""
    parts = {"sampler": "epoch", "filter": "keep_all"}
    validated(folder / f"{preset}-s{seed}", validate, preset=preset, steps=steps, seed=seed, **parts)


def trial(seed: int | None, *values: float, **more) -> Trial:
    """A curve with a value every 100 rollouts."""
    return Trial(seed, np.arange(len(values)) * 100.0, np.array(values), **more)


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """Two arms of three seeds: GRPO climbs to .5 in 20 steps; solo is above it by a little, and goes on longer."""
    folder = tmp_path_factory.mktemp("arms")
    for seed, gain in GAINS.items():
        for name, steps, more in (("grpo", 20, 0.0), ("solo", 30, gain)):
            seed_of(folder, name, seed, steps, lambda s, m=more: 0.3 + (0.01 + m / 20) * s)
    return folder


def test_arms_are_paired_by_seed_at_the_common_cost(arms, call, tmp_path, monkeypatch) -> None:
    words = ("compare", f"grpo={arms}/grpo-s*", f"solo={arms}/solo-s*")
    found = json.loads(call(*words, "--json")[1])
    grpo, solo = found["arms"]
    assert {int(seed): round(gain, 6) for seed, gain in solo["gain"].items()} == pytest.approx(GAINS, abs=2e-3)
    assert solo["significant"] and grpo["gain"] == {} and grpo["share"] == 1.0 and 0.6 < solo["share"] < 0.9
    assert difference(list(solo["gain"].values())) in found["verdict"] and found["metric"] == "acc/mean@1, math"
    assert found["verdict"].startswith("acc/mean@1, math: solo minus grpo, final value: +0.03")
    whole = json.loads(call(*words, "--json", "--whole")[1])["arms"]
    assert whole[0]["final"] == grpo["final"] and min(whole[1]["gain"].values()) > 0.1
    costs = {
        line.split()[0]: line.split()[-4:-1] for line in call(*words)[1].splitlines() if " ± " in line or "100%" in line
    }
    assert costs["solo"][0] == costs["grpo"][0]  # solo's later steps are not compared
    status, out, err = call(*words, "--by", "hours", "--target", "0.4", "--csv", tmp_path / "c.csv")
    assert status == 0 and "c.csv written" in err and "hours" in out and "* significant" in out
    monkeypatch.setenv("COLUMNS", "80")  # as wide as a terminal is: the mark of significance was cut off
    assert re.search(r"^ solo .* ± \d\.\d{3} \* ", call(*words)[1], flags=re.M)
    monkeypatch.setenv("COLUMNS", "56")  # cells of several words break, and numbers had lost their ends
    assert re.search(r"^ solo +\d +\d\.\d{3} ", call(*words)[1], flags=re.M)
    rows = list(csv.DictReader((tmp_path / "c.csv").open()))
    assert len(rows) == 3 * 5 + 3 * 7 and {row["arm"] for row in rows} == {"grpo", "solo"}
    last = [row for row in rows if row["arm"] == "solo" and row["seed"] == "2"][-1]
    assert float(last["value"]) == pytest.approx(0.3 + 0.0115 * 30) and last["step"] == "30"
    assert call(*words, "--csv", tmp_path / "c.csv")[0] == 1  # not without --overwrite


def test_runs_that_ended_early_are_told(arms, call, tmp_path) -> None:
    """One that died before its second validation counted as a seed in which nothing differed: a gain became none."""
    for name in ("grpo", "solo"):
        for seed in GAINS:
            (tmp_path / f"{name}-s{seed}").symlink_to(arms / f"{name}-s{seed}")
    for name, steps in (("grpo", 20), ("solo", 3)):
        seed_of(tmp_path, name, 4, steps)
    words = ("compare", f"grpo={tmp_path}/grpo-s*", f"solo={tmp_path}/solo-s*")
    out, err = (" ".join(text.split()) for text in call(*words)[1:])
    assert "(3 seeds, significant)" in out and "seed 4: not compared" in out
    assert "solo-s4/adaptive has no validation after its first step: left out" in err
    # what is left of these arms is a run of each: seed 4 was compared with seed 1, as if neither had been given others
    died = (f"grpo={tmp_path}/grpo-s4", f"solo={tmp_path}/solo-s[14]")
    verdict = json.loads(call("compare", *died, "--json")[1])["verdict"]
    assert "no seed in common" in verdict and "±" not in verdict
    paired = (f"grpo={tmp_path}/grpo-s1", f"solo={tmp_path}/solo-s[12]")
    assert call("compare", *paired, "--csv", tmp_path / "c.csv")[0] == 0
    rows = csv.DictReader((tmp_path / "c.csv").open())
    assert {(row["arm"], row["seed"]) for row in rows} == {("grpo", "1"), ("solo", "1"), ("solo", "2")}


def test_a_cost_is_said_in_whole_tokens_and_in_minutes() -> None:
    """18,008 tokens were 1.801e+04."""
    cost, value = np.array([0, 9_004, 18_008]), np.array([0.2, 0.3, 0.4])
    base = [Trial(1, cost, value), Trial(2, cost[:2], value[:2])]
    said = sentence(outcomes({"a": base, "b": base}), "tokens")
    assert said.endswith("Compared early, since a run is shorter: seed 2 at 9,004 of 18,008 tokens.")
    base = [Trial(1, cost / 36_016, value), Trial(2, cost[:2] / 36_016, value[:2])]
    assert sentence(outcomes({"a": base, "b": base}), "hours").endswith("seed 2 at 15 min of 30 min.")


def test_two_seeds_are_said_to_be_too_few() -> None:
    """ "+0.033 ± 0.026, not significant" contradicts itself: the interval excludes zero."""
    assert difference([0.03, 0.03]) == "+0.030 ± 0.000 (2 seeds, not significant: that takes 3 seeds)"
    assert difference([0.3, -0.3]).endswith("(2 seeds, not significant)")


def test_runs_without_a_common_metric_are_named(arms, tmp_path, refusal) -> None:
    validated(tmp_path / "nan-s1", lambda s: 0.3 if s < 5 else float("nan"), steps=8, n=4)
    said = refusal("compare", f"a={arms}/grpo-s1", f"b={tmp_path}/nan-s1", "--csv", tmp_path / "c.csv")
    assert "nan-s1/adaptive has no metric that each of its validations has" in said
    validated(tmp_path / "other-s1", lambda s: {"val-core/math/acc/mean@8": 0.3}, steps=8, n=4)
    said = refusal("compare", f"a={arms}/grpo-s1", f"b={tmp_path}/other-s1", "--csv", tmp_path / "c.csv")
    assert "mean@1; " in said and "other-s1/adaptive has " in said and "val_kwargs.n" in said


def test_arms_are_drawn(arms, call, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    words = ("compare", f"grpo={arms}/grpo-s*", f"solo={arms}/solo-s*", "--plot")
    for name in ("a.svg", "a.png", "a.html"):
        assert call(*words, tmp_path / name)[0] == 0 and (tmp_path / name).stat().st_size > 5000
    page = (tmp_path / "a.html").read_text()
    assert "significant" in page and "solo, seed 2" in page and "solo, mean" in page
    assert page.count('<polyline class="raw"') == 6 and page.count('<polyline class="line"') == 2
    assert call(*words, tmp_path / "a.gif")[0] == 2
    assert "--csv" in call(*words, tmp_path / "b.html", "--csv", tmp_path / "." / "b.html")[2]  # the page replaced it
    assert not (tmp_path / "b.html").exists()
    assert "not a finite number" in call(*words[:-1], "--target", "nan")[2]


def test_a_plot_has_each_seed_and_the_means_by_name(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    arms = {
        name: [trial(seed, 0.2, end, 0.1 + end) for seed in (1, 2, 3)] for name, end in (("grpo", 0.3), ("solo", 0.4))
    }
    plot(arms, ("rollouts generated", "accuracy"), tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()  # of texts, which are paths there, matplotlib leaves a comment
    assert [drawn.count(f"<!-- {text} -->") for text in ("grpo", "solo", "rollouts generated", "accuracy")] == [1] * 4
    assert len(re.findall("stroke-opacity: 0.4; stroke-width: 0.8", drawn)) == 6  # a line a seed
    assert drawn.count("stroke-width: 2.2") == 2 + 2  # the means, and their keys in the legend


def test_single_runs_of_several_seeds_are_arms(arms, call) -> None:
    """As ticked in `serve`, and as a shell makes a pattern without quotes into: each run was an arm of one seed.

    Or as it makes of grpo=runs/grpo-s{1,2,3}.
    """
    quoted = call("compare", f"grpo={arms}/grpo-s*", f"solo={arms}/solo-s*", "--json")[1]
    for arm in ("{}=", ""):
        words = [f"{arm.format(name)}{arms}/{name}-s{seed}" for name in ("grpo", "solo") for seed in GAINS]
        assert json.loads(call("compare", *words, "--json")[1]) == json.loads(quoted)
    assert json.loads(call("compare", f"{arms}/*", "--json")[1]) == json.loads(quoted)  # and in quotes
    runs = [open_run(word) for word in words]
    page = page_of_runs(runs)
    assert "(3 seeds, significant)" in page and page.count('<polyline class="line"') == 2
    assert page_of_runs(runs[:3]).count('<polyline class="line"') == 3  # one method: nothing to compare it with


def test_runs_of_other_settings_are_no_seeds_of_one_arm(tmp_path) -> None:
    """Learning rates in the names, and group sizes that no name says."""
    runs = {}
    for name, n in (("solo-s1", 4), ("solo-s2", 4), ("grpo-lr1-s1", 4), ("grpo-lr3-s2", 4), ("grpo-lr1-s2", 2)):
        validated(tmp_path / name, lambda s: s / 10, preset=name[:4], n=n, steps=5)
        runs[name] = open_run(tmp_path / name)
    solo, first = [runs["solo-s1"], runs["solo-s2"]], runs["grpo-lr1-s1"]
    assert page_of_runs([*solo, first, runs["grpo-lr3-s2"]]).count('<polyline class="line"') == 3
    assert page_of_runs([*solo, first, runs["grpo-lr1-s2"]]).count('<polyline class="line"') == 4


def test_a_curve_that_was_there_before_its_end_is_said() -> None:
    said = sentence(outcomes({"a": [trial(1, 0.2, 0.6, 0.5)], "b": [trial(1, 0.2, 0.4, 0.5)]}))
    assert said.endswith("b reaches a's final value with 100% of a's cost (a itself: 38%).")


def test_the_rows_of_arms_are_of_the_seeds_that_are_compared() -> None:
    """Seeds of its own were in an arm's mean, each to its own end, and the table then said the opposite of the difference."""
    first = [trial(s, 0.2, 0.4, 0.4 if s < 3 else 0.9) for s in (1, 2, 3, 4)]
    other = [trial(s, 0.2, 0.5 if s < 3 else 0.05) for s in (1, 2, 9)]
    one, two = outcomes({"first": first, "other": other})
    assert one.compared == two.compared == [1, 2] and (one.mean, two.mean) == (0.4, 0.5)


def test_a_source_that_came_later_is_in_no_comparison(tmp_path, call) -> None:
    """The mean over sources of one run stood beside the smallest source of the other."""
    counts = {"math": 500, "aime": 30}
    for name, first in (("a", 15), ("b", 0)):
        metric = "val-core/{}/acc/mean@1".format
        both = lambda s, f=first, m=metric: {m("math"): 0.5} | ({m("aime"): 0.1} if s >= f else {})  # noqa: E731
        validated(tmp_path / name, both, steps=20, validated_on=counts)
    out = " ".join(call("compare", tmp_path / "a", tmp_path / "b")[1].split())  # lines end where paths let them
    assert "acc/mean@1, math: " in out and "final value: +0.000 ± " in out


def test_the_error_of_a_single_run_is_that_of_the_value_that_is_compared() -> None:
    single = trial(1, 0.5, 1.0, errors=np.array([0.05, 0.0]))
    assert single.error_at(50.0) == pytest.approx(0.025) and single.error_at(np.inf) == 0.0


@pytest.mark.parametrize("name", ["{}-s{}-lr1e-6", "seed{1}/{0}", "{}_lr3e-6_seed_{}", "{}-{}"])
def test_seeds_are_found_wherever_a_name_has_them(name, tmp_path, call) -> None:
    for arm in ("grpo", "solo"):
        for seed in (1, 2, 3):
            own = name.format(arm, seed)
            validated(tmp_path / own, run_id=own, preset=arm, steps=5, prompts=20)
    folders = [path.parent for path in sorted(tmp_path.rglob("adaptive"))]
    found = json.loads(call("compare", *folders, "--json")[1])["arms"]
    assert [len(one["runs"]) for one in found] == [3, 3]


def test_what_cannot_be_paired_is_said(arms, call, tmp_path) -> None:
    other = f"other={tmp_path}/*"
    for name in ("one", "two"):
        validated(tmp_path / name, steps=5)
    assert "no different seeds" in call("compare", f"grpo={arms}/grpo-s*", other)[2]
    make_run(tmp_path / "blind", run_id="p/one-7", steps=5)
    (tmp_path / "blind" / "dumps").mkdir()
    (tmp_path / "blind" / "dumps" / "1.jsonl").write_text('{"input": "q", "output": "a", "gts": "1", "score": 1.0}\n')
    for folder, kind, hint in (
        ("adaptive", "journal", "set trainer.test_freq"),
        ("global_step_5/adaptive", "snapshot", "name the run's journal"),
        ("dumps", "rollouts", "set trainer.test_freq, have file in trainer.logger, and let VERL_FILE_LOGGER_PATH name"),
    ):
        said = call("compare", f"grpo={arms}/grpo-s*", f"x={tmp_path}/blind/{folder}")[2]
        assert f"blind/{folder} ({kind}) has no validation: {hint}" in " ".join(said.split())


def test_whole_runs_need_a_share_of_what_the_first_arm_spent(arms, call) -> None:
    """The longer arm comes first: it needs its own whole cost for its own end, and no more."""
    words = ("compare", f"solo={arms}/solo-s*", f"grpo={arms}/grpo-s*", "--json", "--whole")
    assert [arm["share"] for arm in json.loads(call(*words)[1])["arms"]] == [1.0, None]


def test_the_files_are_there_though_nobody_reads_the_table_to_its_end(arms, tmp_path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = ["compare", f"grpo={arms}/grpo-s*", f"solo={arms}/solo-s*", "--csv", str(tmp_path / "curves.csv")]
    with os.fdopen(write, "w") as closed:
        assert subprocess.run([sys.executable, "-m", "verl_adaptive", *words], stdout=closed).returncode == 141
    assert len((tmp_path / "curves.csv").read_text().splitlines()) > 10


def test_single_runs_have_no_seed_and_ten_arms_have_a_colour_each(arms, call, tmp_path) -> None:
    page, curves = tmp_path / "ten.html", tmp_path / "ten.csv"
    words = [f"{name}={arms}/grpo-s1" for name in "abcdefghij"]
    assert call("compare", *words, "--by", "tokens", "--plot", page, "--csv", curves)[0] == 0
    said = page.read_text()
    assert "seed 0" not in said and "tokens needed" in said and "var(--c9)" not in said
    assert {row["seed"] for row in csv.DictReader(curves.open())} == {""}


def test_students_t_goes_on_beyond_its_table() -> None:
    found = [t95(count) for count in (21, 22, 31, 61, 121)]
    assert found == pytest.approx([2.086, 2.0796, 2.0423, 2.0003, 1.9799], abs=1e-3)


def test_a_seed_of_its_own_is_left_out_and_a_curve_that_never_gets_there_counts() -> None:
    base = [trial(1, 0.2, 0.4), trial(2, 0.2, 0.5)]
    found = outcomes({"a": base, "b": [trial(1, 0.2, 0.5), trial(2, 0.2, 0.48), trial(9, 0.2, 0.9)]})[1]
    assert found.gains == pytest.approx({1: 0.1, 2: -0.02}) and not significant(list(found.gains.values()))
    assert found.shares == pytest.approx({1: 2 / 3, 2: np.inf})
    assert trial(1, 0.2, 0.4, 0.3, 0.6).needed(0.3) == pytest.approx(50) and trial(1, 0.2, 0.4).needed(0.5) is None
    assert trial(1, 0.2, 0.4).needed(0.1) == 0
    assert sentence([outcomes({"a": base})[0], found]).endswith("Only one of the two has seed 9: not compared.")
    assert sentence(outcomes({"a": base, "b": [trial(9, 0.2, 0.9)]})) == "b and a have no seed in common."
    longer = outcomes({"a": [trial(1, 0.2, 0.4)], "b": [trial(1, 0.2, 0.3, 0.9)]})[1]
    assert longer.finals == {1: 0.3}  # after 100, as a


def test_a_target_that_the_first_arm_never_reaches_is_a_share_of_all_that_it_spent() -> None:
    arms = {"a": [trial(1, 0.2, 0.4)], "b": [trial(1, 0.2, 0.6)]}
    first, other = outcomes(arms, target=0.5)
    assert first.shares == {1: np.inf} and other.shares == pytest.approx({1: 0.75})
    said = "b reaches 0.5 with 75% of all rollouts of a, which does not reach it."
    assert said in sentence([first, other], "rollouts", 0.5)
    arms["a"] = [trial(1, 0.2, 0.3, 0.4)]  # 200 rollouts, of which 100 are compared
    assert outcomes(arms, target=0.5)[1].shares == pytest.approx({1: 0.375})
    of_both = outcomes(arms, target=0.3)
    assert of_both[1].shares == pytest.approx({1: 0.25})
    assert "b reaches 0.3 with 25% of the rollouts that a spends on it." in sentence(of_both, "rollouts", 0.3)


def test_a_target_that_the_first_arm_has_before_it_trains_is_refused() -> None:
    """ "b reaches 0.1 with 40% of the rollouts that a spends on it" was of all that a spends: it spends none on it."""
    with pytest.raises(ConfigError, match=r"--target=0.1: a has 0.2 before its first step; .* above 0.2"):
        outcomes({"a": [trial(1, 0.2, 0.4)], "b": [trial(1, 0.0, 0.2)]}, target=0.1)


def test_runs_that_were_validated_before_training_alone_are_compared() -> None:
    """verl's default is no validation on the way: nothing was spent by then, of which nothing is a share."""
    for arms in ({"a": [trial(1, 0.2)], "b": [trial(1, 0.3, 0.4)]}, {"a": [trial(1, 0.2, 0.3)], "b": [trial(1, 0.3)]}):
        other = outcomes(arms)[1]
        assert other.shares == {1: np.inf} and other.gains == pytest.approx({1: 0.1})


def test_arms_that_are_all_shorter_than_another_are_said_to_be_compared_early(arms, call, tmp_path) -> None:
    """ "solo reaches grpo's final value with 82% of grpo's rollouts" was of a third of GRPO's runs, beside runs under way."""
    longer, other = f"solo={arms}/solo-s*", f"grpo={arms}/grpo-s*"
    early = r"Compared early, since a run is shorter: seed 1 at \S+, seed 2 at \S+, seed 3 at \S+ of 1,\d+ rollouts\."
    for words in ((longer, other), (other, longer)):
        assert re.search(early, " ".join(call("compare", *words)[1].split()))
    assert "Compared early" not in call("compare", longer, other, "--whole")[1]
    single = call("compare", arms / "solo-s1", arms / "grpo-s1", "--json")[1]
    assert re.search(r"One seed [^.]*\. Compared early, since a run is shorter: at \S+ of \S+ rollouts\.", single)
    seed_of(tmp_path, "aero", 9, 20)
    alone = call("compare", other, longer, f"aero={tmp_path}/aero-s*")[1]
    (row,) = (line.split() for line in alone.splitlines() if line.startswith(" aero"))
    assert row[3:5] == ["-", "-"]  # "never": nothing is known


# -- two runs -----------------------------------------------------------------------------------------------------------


def test_two_runs_are_compared_by_their_prompts(finished, tmp_path, call) -> None:
    make_run(tmp_path / "other", seed=1, sampler="epoch", preset="grpo", rows=finished.rows[:40])
    words = ("compare", finished.folder, tmp_path / "other", "--whole", "--visits", "1")
    status, out, err = call(*words, "--json")
    found = json.loads(out)
    assert status == 0 and err.startswith("not compared by validation: ")
    mine, theirs = finished.engine.table, found["matched"]
    assert theirs["prompts"] + theirs["only_a"] == (mine.col("visits") > 0).sum()
    assert theirs["better_in_b"] + theirs["worse_in_b"] <= theirs["prompts"] <= 40
    gains = theirs["largest_gains_in_b"]
    assert len(gains) == 5 and all(g["b"] - g["a"] > 0 for g in gains)
    assert found["verdict"].startswith("Latest pass rate of the prompts that both visited: A ")
    status, text, _ = call(*words)
    assert status == 0 and "grpo" in text and "rollouts generated" in text and "\x1b" not in text
    assert "significantly better in B: " in text and "gains in B, most significant first" in text
    assert re.search(r"^A: greso, project/experiment \(.*\n?.*^B: grpo, project/experiment \(", text, flags=re.M)
    assert f"{theirs['prompts']} prompts visited by both at least 1 times ({theirs['only_a']} by A only, " in text


def test_how_long_a_run_of_one_step_took_is_not_known(tmp_path, call) -> None:
    """It was said to have taken 0 s; on the report, too (tests/report/test_report.py)."""
    for name, steps in (("a", 1), ("b", 5)):
        make_run(tmp_path / name, steps=steps, seed=3, snapshot=False)
    out = call("compare", tmp_path / "a", tmp_path / "b", "--whole")[1]
    (time,) = (line for line in out.splitlines() if "training time" in line)
    assert time.split()[2:] == ["-", "5", "min"]


def test_both_are_cut_at_common_rollouts(tmp_path, call) -> None:
    """The longer run is compared as it was when it had generated what the shorter one generated in all."""
    for name, steps in (("short", 10), ("long", 40)):
        make_run(tmp_path / name, steps=steps, seed=3, snapshot=False, validate=lambda s: s / 100)
    words = ("compare", tmp_path / "short", tmp_path / "long")
    found = json.loads(call(*words, "--json", "--visits", "1")[1])
    a, b = found["a"], found["b"]
    assert (a["last_step"], b["last_step"], a["cut"], b["cut"]) == (10, 10, False, True)  # the same seed
    for key in ("visited", "visits", "rollouts", "successes", "tokens", "ledger", "hours", "never_solved"):
        assert a[key] == b[key], key
    half = 1.96 * (2 * 0.1 * 0.9 / 200) ** 0.5  # two validations of 200 prompts
    whole = json.loads(call(*words, "--json", "--whole")[1])
    assert whole["arms"][1]["final"] == {"null": 0.4}  # of whatever seed: 0 was nobody's
    assert whole["b"]["last_step"] == 40 and "+0.300 ± " in whole["verdict"] and "(beyond the" in whole["verdict"]
    assert f"+0.000 ± {half:.3f} (within the" in found["verdict"]
    out = call(*words)[1]
    assert "Both at equal rollouts" in out and "Latest pass rate of the prompts that both visited: A " in out
    (time,) = (line for line in call(*words, "--whole")[1].splitlines() if "training time" in line)
    assert time.split()[-2][0] == "+" and time.split()[-1] == "min"
    without_steps(tmp_path / "long", 1, 30)
    assert "Not at equal rollouts; --whole" in call(*words, "--visits", "1")[1]


@pytest.mark.parametrize(
    ("of_a", "of_b", "says"),
    [
        # "mean of 2 sources" of both, of which they share one, is no difference between them
        ({"math/acc": 0.5, "gsm8k/acc": 0.8}, {"math/acc": 0.5, "aime/acc": 0.1}, "+0.000 ± 0.020 (within"),
        # the smallest source decides the interval
        ({"math/acc": 0.5, "aime/acc": 0.3}, {"math/acc": 0.5, "aime/acc": 0.4}, "± 0.120 (within the sampling error"),
        # sqrt(p (1 - p) / m) is of shares
        ({"math/reward": -0.5}, {"math/reward": -0.49}, "(1 seed: no interval)"),
    ],
)
def test_what_is_said_of_two_validations(of_a, of_b, says, tmp_path, call) -> None:
    sizes = {"math": 5000, "gsm8k": 300, "aime": 30}
    for name, values in (("a", of_a), ("b", of_b)):
        metrics = {f"val-core/{key}/mean@1": value for key, value in values.items()}
        make_run(tmp_path / name, steps=10, snapshot=False, validate=lambda s, m=metrics: m, validated_on=sizes)
    verdict = json.loads(call("compare", tmp_path / "a", tmp_path / "b", "--json", "--visits", "1")[1])["verdict"]
    assert says in verdict


def test_single_rollouts_are_no_clear_gains(tmp_path) -> None:
    """0 of 8 and then 6 of 8 says more than one rollout that was wrong and one that was right."""
    keys, tables = make_keys(2), []
    for groups in ([[0.0] * 8, [0.0]], [[1.0] * 6 + [0.0] * 2, [1.0]]):
        tables.append(StatsTable())
        rows = tables[-1].rows_for(keys)
        for step in (1, 2):
            tables[-1].observe(Groups.from_lists(rows, groups), step, tolerance=0.0)
    found = matched(Prompts(tables[0]), Prompts(tables[1]), 5, 2)
    assert [gain["b"] for gain in found["largest_gains_in_b"]] == [0.75, 1.0] and found["clearly_better_in_b"] == 1


def test_only_prompts_with_enough_visits(finished, call) -> None:
    visits = finished.engine.table.col("visits")
    for least in (1, 3):
        found = json.loads(call("compare", finished.folder, finished.folder, "--json", "--visits", least)[1])
        assert found["matched"]["prompts"] == (visits >= least).sum()
