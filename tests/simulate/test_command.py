"""``verl-adaptive simulate``: what it prints and writes, and one clear line for everything that cannot work."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.cli.stores import make_run
from verl_adaptive.commands.simulate import _POOL, _SPENT, _cell, _decimals
from verl_adaptive.simulate.merit import merits

pytestmark = pytest.mark.usefixtures("runs_once")

QUICK = ("--batch", 8, "--budget", 640, "--pool", "mixed:prompts=100", "--seeds", "0,1")
STATIC = ("--batch", 8, "--steps", 6, "--pool", "static:prompts=100", "--seeds", "0,1")


def test_presets_that_cannot_be_are_left_out_unless_they_are_named(call) -> None:
    words = ("--batch", 8, "--steps", 1, "--pool", "static:prompts=100", "--seeds", "0", "--n", 2)
    status, out, err = call("simulate", *words)
    assert status == 0 and "greso" in out and "pilot_commit" not in out and "a step, 1 step a run, 1 seed" in out
    assert "left out: pilot_commit: adaptive.allocator.n_pilot" in err


def test_everything_runs_by_default_and_the_limits_are_said(call) -> None:
    status, out, err = call("simulate", *QUICK)
    assert (status, err) == (0, "")
    for name in ("grpo", "dapo", "greso", "aero", "cero", "pilot_commit", "solo", "oracle_best"):
        assert any(line.strip().startswith(name) for line in out.splitlines()), name
    assert "cannot tell a model's final accuracy" in " ".join(out.split())
    assert "640 rollouts a run, 2 seeds" in out


def test_no_two_columns_have_one_name() -> None:
    """Both shares of the oracle's gain had: -0.03 in one table, 0.72 in the next."""
    heads = [head for head, _, _ in (*_SPENT, *_POOL[1:])]
    assert len(set(heads)) == len(heads)


def test_a_column_has_one_number_of_decimals() -> None:
    """A column had 1.06 above 1.8, and one that was 3.2 in every seed read "3.2 ± 1e-15"."""
    columns = ([1.8, 0.891], [0.154, -0.0876], [26.7], [300.0, None], [0.0])
    assert [_decimals(column) for column in columns] == [2, 3, 1, 0, 0]
    assert _cell({"gap": 3.2, "gap_half": 1e-15}, "gap", 2) == "3.20 ± 0.00"
    assert _cell({"gap": 3000.0, "gap_half": 31.0}, "gap", 0) == "3,000 ± 31" and _cell({"gap": 3.2}, "gap", 1) == "3.2"
    reached = {"to_baseline": 0.5, "to_baseline_half": None, "to_baseline_seeds": 1, "seeds": 3}
    assert _cell(reached, "to_baseline", 2) == "0.50 (1 of 3 seeds)"  # a mean over those that did not fail


def test_the_json_holds_every_row_and_what_it_depends_on(call) -> None:
    status, out, _ = call("simulate", *QUICK, "--preset", "greso", "--json", "adaptive.sampler.p_easy=0.3")
    data = json.loads(out)
    assert status == 0
    assert [(r["preset"], r["seed"]) for r in data["rows"]] == [
        (p, s) for s in (0, 1) for p in ("grpo", "greso", "oracle_best")
    ]
    assert data["setting"] == {"batch": 8, "n": 8, "steps": 10, "budget": 640}
    assert data["pool"]["prompts"] == 100 and data["overrides"] == ["adaptive.sampler.p_easy=0.3"]
    assert data["summary"][1]["efficiency_signal"] is not None and "accuracy" in data["limits"]
    assert {"estimate_error", "dropped", "regret"} <= set(data["rows"][0])


def test_a_recorded_run_is_simulated(call, tmp_path) -> None:
    make_run(tmp_path / "run", steps=12)
    words = ("--batch", 8, "--steps", 5, "--preset", "greso", "--trace", tmp_path / "run")
    status, out, err = call("simulate", *words)
    assert (status, err) == (0, "") and "journal of 60 prompts, 12 steps; " in out and "5 steps a run" in out
    status, out, _ = call("simulate", *words[:-1], tmp_path / "run" / "global_step_12", "--pool", "mixed:failure=0.5")
    assert "snapshot of 60 prompts, whose rates move as in pool mixed:failure=0.5; " in out  # once "1 step"
    assert re.search(r"rollouts not trained .*failed", out) and "budget" not in out
    assert "knows which rollouts succeeded; leave it out" in call("simulate", *words, "--threshold", "0.9")[2]
    lines = [
        json.dumps({"input": f"q{i}", "output": "", "gts": "1", "score": i % 2}) + "\n" for i in range(8) for _ in "ab"
    ]
    (tmp_path / "1.jsonl").write_text("".join(lines))
    said = " ".join(call("simulate", *words[:-1], tmp_path / "1.jsonl")[1].split())
    assert re.search(r" Note: \S+: verl writes down .*dropped prompts and groups are not in it", said)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("adaptive.sampler.p_easy=0.3",), 2, "overrides of one preset go into its own quotes"),
        (("greso",), 2, "greso is a preset: write --preset greso"),
        (("--preset", "dapo adaptive/sampler=mops"), 2, "adaptive/sampler=mops: did you mean mopps?; overrides of"),
        (("--preset", "dapo adaptive.sampler.p_easy=0.3"), 2, "p_easy: is an option of adaptive/sampler=greso"),
        (("--threshold", "nan"), 2, "'nan' is not a finite number"),
        (("--trace", "/nowhere"), 1, "/nowhere does not exist"),
        (("--budget", 511), 2, "less than one step of 64 prompts x 8 rollouts = 512"),
        (("--budget", 5120, "--steps", 3), 2, "not allowed with argument"),
        (("--batch", 4001), 2, "more than the 4000 prompts"),
        (("--batch", 0), 2, "must be 1 or greater"),
        (("--n", 1), 2, "must be 2 or greater"),
        (("--pool", "", "--steps", 1, "--batch", 4), 2, "--pool='': no such pool; there are mixed,"),
        (("--n", 2, "--preset", "pilot_commit"), 2, "pilot_commit: adaptive.allocator.n_pilot"),
        (("--seeds", "0,x"), 2, "whole numbers with commas"),
        (("--seeds", "0,-1"), 2, "must not be negative"),
        (("--threshold", 0.7), 2, "--threshold=0.7: is about the scores of a trace; add --trace"),
        (("--slots", 32), 2, "--slots=32: is an option of the clock; add --clock"),
        (("--clock", "--slots", 0), 2, "--slots=0: must be 1 or greater"),
        (("--clock", "--decode-ms", -1), 2, "--decode-ms=-1.0: must be 0 or greater"),
        (("--clock", "--decode-ms", 0, "--sequence-ms", 0), 2, "must take some time"),
    ],
)
def test_what_cannot_work_is_one_clear_line(refusal, words, status, message) -> None:
    said = refusal("simulate", *words, status=status)
    assert message in said and "defect" not in said


# -- the answer ---------------------------------------------------------------------------------------------


def test_the_answer_comes_first_and_the_best_is_on_top(call) -> None:
    words = (*QUICK, "--preset", "greso", "--preset", "dapo")
    status, out, _ = call("simulate", *words, "--json")
    found = json.loads(out)
    merit = {entry["preset"]: entry["merit"] for entry in found["summary"]}
    assert status == 0 and found["merit"] == "learned per rollout" and merit["grpo"] == 1.0
    assert found["answer"].startswith("Not told by 2 seeds")
    lines = call("simulate", *words)[1].splitlines()
    assert any(line.startswith("Not told by") for line in lines[:4])
    assert any(line.startswith("learned ") and "rise of the pool" in line for line in lines)
    first = [line.split()[0] for line in lines if line.split() and line.split()[0] in merit][: len(merit)]
    real = sorted((p for p in merit if not p.startswith("oracle")), key=lambda p: -merit[p])
    assert first[: len(real)] == real and all(p.startswith("oracle") for p in first[len(real) :])


def test_prompts_that_do_not_learn_are_judged_by_their_signal(call) -> None:
    words = (*STATIC, "--preset", "dapo")
    found = json.loads(call("simulate", *words, "--json")[1])
    merit = {entry["preset"]: entry["merit"] for entry in found["summary"]}
    assert found["merit"] == "signal per rollout" and merit["oracle_best"] > 1.2 and merit["grpo"] == 1.0
    timed = json.loads(call("simulate", *words, "--clock", "--cap", 2000, "--median", 300, "--json")[1])
    assert timed["merit"] == "signal per second"
    assert "rise of the pool" not in call("simulate", *words)[1]


def test_where_no_group_is_informative_nothing_is_ranked(call, tmp_path) -> None:
    """It said that GRPO's baseline is not the group's mean."""
    lines = [json.dumps({"key": f"{i:032x}", "n": 8, "successes": 8}) + "\n" for i in range(20)]
    (tmp_path / "solved.jsonl").write_text("".join(lines))
    words = ("--batch", 8, "--steps", 2, "--trace", tmp_path / "solved.jsonl", "--preset", "dapo", "--json")
    assert (
        json.loads(call("simulate", *words)[1])["answer"] == "Nothing is ranked: no group of grpo is informative here."
    )


def test_a_preset_with_a_critic_is_not_ranked(call) -> None:
    """It got the bare reward for an advantage, and 0.5 times GRPO's gain."""
    for pool in ("easy", "static:prompts=150"):  # groups of one and, of so few prompts, larger ones
        words = ("--pool", pool, "--steps", 4, "--batch", 32, "--preset", "sao", "--preset", "dapo", "--json")
        said = json.loads(call("simulate", *words)[1])["answer"]
        assert "sao: not ranked, because verl's gae is not simulated." in said and "dapo" in said


def test_of_single_rollouts_a_signal_says_nothing(call, monkeypatch) -> None:
    """solo had "nan", a signal of 0 and a gain of -2 in the tables, and no word about it in the answer."""
    words = (*STATIC, "--preset", "solo")
    monkeypatch.setenv("COLUMNS", "140")
    pairs = call("simulate", *words, "--batch", 16)[1]  # more rollouts than prompts: two of each, with solo's baseline
    assert "solo: not ranked" in pairs
    said = call("simulate", *words, "--preset", "dapo")[1]
    assert re.search(r"solo: not ranked, .*--pool", said) and "nan" not in said
    solo = next(line.split() for line in said.splitlines() if line.split()[:1] == ["solo"] and len(line.split()) > 4)
    assert solo[-1].endswith("%") and solo[-3:-1] == ["-", "-"]  # signal, oracle's gain, regret
    assert "--pool" in json.loads(call("simulate", *words, "--json")[1])["answer"]
    assert "nan" not in call("simulate", *words, "--clock", "--cap", 2000, "--median", 300)[1]


@pytest.mark.parametrize("width", [80, 120, 160])
def test_no_name_is_broken_within_a_word(width, call, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = ("--batch", 8, "--steps", 3, "--pool", "mixed:prompts=100", "--seeds", "0,1", "--preset", "solo", "--clock")
    lines = call("simulate", *words)[1].splitlines()
    assert all(len(line) <= width for line in lines[4:])  # the legend, once one line of 900 characters, too
    assert sum(line.startswith(("waves ", "regret ", "longest gap ")) for line in lines) == 3
    tables = [line for line in lines if not re.match(r"\S+( \S+)+\.", line)]
    assert sum(line.startswith(" verl_filter_groups ") for line in tables) >= 4
    assert all(len(line) <= width for line in tables if line.startswith(" "))


def row(preset: str, seed: int, gain: float, **more) -> dict:
    return {
        "preset": preset,
        "seed": seed,
        "learns": True,
        "pool_start": 0.3,
        "pool_end": 0.3 + gain,
        "signal": 0.5,
        "generated": 100,
        "ended": "budget",
        **more,
    }


@pytest.mark.parametrize(
    ("gains", "says"),
    [
        (
            {"a": (0.3, 0.31, 0.3), "b": (0.2, 0.2, 0.21)},
            "For these prompts: a, which learns 3.03 ± 0.14 times as much per rollout as GRPO.",
        ),
        ({"a": (0.3, 0.31, 0.3), "b": (0.3, 0.3, 0.3)}, "Not significantly behind it: b."),
        ({"a": (0.1, 0.05, 0.16)}, "For these prompts: plain grpo."),
        (
            {"a": (0.2,)},
            "Not told by 1 seed, in which a learns 2.00 times as much per rollout as GRPO: name 3 or more, as --seeds 0,1,2.",
        ),
        ({"a": (0.2, 0.2)}, "Not told by 2 seeds, in which a learns 2.00 ± 0.00 times"),  # once "plain grpo"
        (
            {"a": (0.05,)},
            "Not told by 1 seed, in which a learns 0.50 times as much per rollout as GRPO",
        ),
    ],
)
def test_the_sentence_says_no_more_than_the_seeds(gains, says) -> None:
    rows = [row(p, s, g) for p, values in gains.items() for s, g in enumerate(values)]
    beside = {"grpo": 0.1, "verl_filter_groups": 0.8, "oracle_best": 0.9}  # the last two are no presets to take
    rows += [row(p, s, gain) for p, gain in beside.items() for s in range(3)]
    assert says in merits(rows).answer()


def test_pass_rates_that_rise_whatever_trains_are_no_merit() -> None:
    """A trace's do, and the preset of the longest course was recommended."""
    rows = [row(p, s, g, learns=False, signal=v) for p, g, v in (("a", 0.9, 0.4), ("grpo", 0.1, 0.8)) for s in range(3)]
    found = merits(rows)
    assert found.name == "signal per rollout" and found.mean("a")[0] == 0.5


def test_a_run_that_would_end_with_an_error_is_not_the_one_to_take(call) -> None:
    """It ended when learning was cheapest, and 0 generated rollouts were a division by zero."""
    rows = [row("grpo", s, 0.1) for s in range(3)]
    rows += [row("a", s, 0.9, **({"ended": "step 3: the cap was reached"} if s else {})) for s in range(3)]
    found = merits(rows)
    assert found.mean("a") == (None, None) and found.answer() == ""
    words = ("--preset", "dapo adaptive.max_rollouts_per_step=8 adaptive.on_exhausted=raise")
    status, out, err = call("simulate", *QUICK, *words)
    said = " ".join(out.split())  # wrapped as the terminal is wide
    assert (status, err) == (0, "") and "ended early, step 1" in said and not out.startswith("For these prompts: dapo")


OWN = """
from dataclasses import dataclass
from verl_adaptive.filters.keep_all import KeepAll

class Mine(KeepAll):
    name = "mine"
"""


def test_two_processes_give_the_same_rows_with_a_part_in_a_file_of_the_users_own_too(
    call, refusal, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_own_parts.py").write_text(OWN)
    preset = f"grpo adaptive/filter=custom adaptive.filter.name={tmp_path}/my_own_parts.py:Mine"
    words, found = ("--preset", "greso", "--preset", preset, "--json"), []
    for jobs in (1, 2):
        status, out, err = call("simulate", *QUICK, *words, "--jobs", jobs)
        assert (status, err) == (0, "")
        found.append([{k: v for k, v in row.items() if k != "seconds"} for row in json.loads(out)["rows"]])
        rows = {row["preset"]: row for row in found[-1]}
        mine = next(p for p in rows if "my_own_parts.py:Mine" in p)
        assert rows[mine]["generated"] == rows["grpo"]["generated"]
    assert found[0] == found[1]
    (tmp_path / "json.py").write_text(OWN)
    words = ("--preset", f"grpo adaptive/filter=custom adaptive.filter.name={tmp_path}/json.py:Mine")
    assert "rename the file" in refusal("simulate", *QUICK, *words, status=2)
    preset += " adaptive.filter.longest=3"
    assert "write +adaptive.filter.longest=…" in refusal("simulate", *QUICK, "--preset", preset, status=2)
