"""``verl-adaptive simulate``: what it prints and writes, and one clear line for everything that cannot work."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import call  # noqa: F401
from tests.cli.stores import make_run

QUICK = ("--batch", 8, "--budget", 640, "--pool", "mixed:prompts=100", "--seeds", "0,1")


def test_everything_runs_by_default_and_the_limits_are_said(call) -> None:  # noqa: F811
    status, out, err = call("simulate", *QUICK)
    assert (status, err) == (0, "")
    for name in ("grpo", "dapo", "greso", "aero", "cero", "pilot_commit", "full", "oracle", "oracle_best"):
        assert any(line.strip().startswith(name) for line in out.splitlines()), name
    assert "cannot tell a model's final accuracy" in " ".join(out.split())
    assert "640 rollouts a run, 2 seeds" in out


def test_the_file_holds_every_row_and_what_it_depends_on(call, tmp_path) -> None:  # noqa: F811
    path = tmp_path / "out.json"
    assert call("simulate", *QUICK, "--preset", "greso", "--json", path, "adaptive.sampler.p_easy=0.3")[0] == 0
    data = json.loads(path.read_text())
    assert [(r["preset"], r["seed"]) for r in data["rows"]] == [
        (p, s) for s in (0, 1) for p in ("grpo", "greso", "oracle", "oracle_best")
    ]
    assert data["setting"] == {"batch": 8, "n": 8, "steps": 10, "budget": 640}
    assert data["pool"]["prompts"] == 100 and data["overrides"] == ["adaptive.sampler.p_easy=0.3"]
    assert data["summary"][1]["efficiency_signal"] is not None and "accuracy" in data["limits"]
    assert {"calibration", "by_start", "dropped", "regret"} <= set(data["rows"][0])
    status, _, err = call("simulate", *QUICK, "--json", path)
    assert status == 1 and "exists" in err
    assert call("simulate", *QUICK, "--preset", "grpo", "--no-references", "--json", path, "--overwrite")[0] == 0


def test_json_on_standard_output_is_json_alone(call) -> None:  # noqa: F811
    status, out, _ = call("simulate", *QUICK, "--preset", "grpo", "--no-references", "--json", "-")
    assert status == 0 and len(json.loads(out)["rows"]) == 2


def test_two_processes_give_the_same_rows(call) -> None:  # noqa: F811
    rows = []
    for jobs in (1, 2):
        out = call("simulate", *QUICK, "--preset", "greso", "--jobs", jobs, "--json", "-")[1]
        rows.append([{k: v for k, v in r.items() if k != "seconds"} for r in json.loads(out)["rows"]])
    assert rows[0] == rows[1]


def test_a_recorded_run_is_simulated(call, tmp_path) -> None:  # noqa: F811
    make_run(tmp_path / "run", steps=12, snapshot=False)
    status, out, err = call("simulate", "--trace", tmp_path / "run", "--batch", 8, "--steps", 5, "--preset", "greso")
    assert (status, err) == (0, "") and "journal of" in out and "5 steps a run" in out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--preset", "gres"), 1, "no such preset; did you mean greso?"),
        (
            ("--preset", "greso adaptive.sampler.p_easy=2"),
            1,
            "greso adaptive.sampler.p_easy=2: adaptive.sampler.p_easy=2.0",
        ),
        (("adaptive.sampler.p_easy=0.3",), 1, "overrides of one preset go into its own quotes"),
        (("data.train_batch_size=8",), 1, "write --batch 8"),
        (("--trace", "/nowhere"), 1, "/nowhere does not exist"),
        (("--run", "x"), 1, "add --trace"),
        (("--pool", "mixd"), 1, "did you mean mixed?"),
        (("--budget", 511), 1, "less than one step of 64 prompts x 8 rollouts = 512"),
        (("--budget", 5120, "--steps", 3), 2, "not allowed with argument"),
        (("--batch", 4001), 1, "more than the 4000 prompts"),
        (("--batch", 0), 1, "must be 1 or greater"),
        (("--n", 2), 1, "pilot_commit: adaptive.allocator.n_pilot"),
        (("--jobs", 0), 1, "must be 1 or greater"),
        (("--seeds", "0,x"), 1, "whole numbers with commas"),
        (("--seeds", "0,-1"), 1, "must not be negative"),
        (("--json", "/nowhere/out.json"), 1, "/nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_one_clear_line(call, words, status, message) -> None:  # noqa: F811
    found, out, err = call("simulate", *words)
    assert (found, out) == (status, "") and err.count("\n") == 1 and message in err, err
    assert "Traceback" not in err and "defect" not in err
