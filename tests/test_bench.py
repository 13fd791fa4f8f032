"""The benchmarks' report, the statistics behind it, and the command in front of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from verl_adaptive import cli
from verl_adaptive.commands import bench
from verl_adaptive.significance import interval

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("pandas")

from benchmarks import cells, pretrained, report  # noqa: E402
from benchmarks import runs as tables  # noqa: E402


def test_interval_is_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 / np.sqrt(3), abs=1e-3)
    assert cells.prediction([1.0, 2.0, 3.0])[1] == pytest.approx(4.303 * np.sqrt(4 / 3), abs=1e-3)
    assert interval([1.0])[1] == float("inf")


def test_smoothing_is_a_mean_over_the_last_tenth() -> None:
    points, values = tables.smoothed(np.array([0, 200]), np.array([0.0, 2.0]), 100)
    assert points[-1] == 2.0 and len(points) == 2 * tables.GRID + 1
    assert values[0] == 0.0 and values[tables.GRID] == pytest.approx(0.95, abs=0.01)


def test_learning_rates_are_compared_over_the_runs_that_both_have() -> None:
    def ends(lr: float, *found: tuple[int, str, float]) -> dict:
        return {
            ("base", "grpo", lr, seed): {"curve": [[0, at], [100, at]], "start": start} for seed, start, at in found
        }

    often = ends(1e-5, *((seed, "a", 0.1 * seed) for seed in range(4)))
    for other, best in {
        (9, "a", 0.9): 1e-5,  # a seed that the usual rate does not have
        (3, "b", 0.9): 1e-5,  # another start
        (0, "a", 0.1): 2e-5,  # below the usual rate's mean, above its run
    }.items():
        runs = tables.Runs(
            {**often, **ends(2e-5, other)},
            ["rollouts", "held_out"],
            {"base": 100},
            ["grpo"],
            lambda cell: cell["start"],
        )
        assert runs.best_lr("base", "grpo") == best


def test_every_number_comes_from_the_json(tmp_path, capsys) -> None:
    for name in ("benchmarks/results", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "benchmarks/RESULTS.md", "verl_adaptive/commands/measured.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def stale() -> str:
        with pytest.raises(SystemExit) as stop:
            report.main(["--check"], tmp_path)
        said = capsys.readouterr().out
        assert stop.value.code == bool(said)
        return said

    front, results = tmp_path / "README.md", tmp_path / "benchmarks" / "results" / "train_torch.json"
    data = json.loads(results.read_text())
    for cell in data["cells"]:
        if cell["variant"] == "onepass" and cell["preset"] == "solo":
            cell["curve"][-1][data["columns"].index("held_out")] += 0.1
    results.write_text(json.dumps(data))
    front.write_text(front.read_text().replace("# verl-adaptive\n", "# by hand\n"))
    assert "-| tiny, one pass, 5 seeds: `solo`" in stale()
    report.main([], tmp_path)
    assert stale() == "" and front.read_text().startswith("# by hand\n")
    assert (tmp_path / "benchmarks" / "figures" / "accuracy.svg").read_text().count("<svg") == 1
    with pytest.raises(SystemExit, match="README.md has no <!-- gone: begin --> marker"):
        report.put(front, front.read_text(), "gone", [])


def test_the_pages_are_what_the_results_say() -> None:
    """RESULTS.md and the README's table were generated from the JSON beside them, after its last change.

    A benchmark that runs meanwhile and adds to the JSON makes this fail, until the report is written again.
    """
    pytest.importorskip("torch")
    for path, text in report.pages(ROOT).items():
        assert path.read_text() == text, f"{path.name} is out of date: verl-adaptive bench report"


# -- the real pipeline's cells ------------------------------------------------------------------------------------


def test_every_shipped_preset_runs_on_the_real_pipeline() -> None:
    shipped = {p.stem for p in (ROOT / "hydra_configs/verl_adaptive/adaptive").glob("*.yaml")}
    assert shipped <= set(pretrained.PRESETS)


def test_a_cell_that_ran_again_is_judged_by_its_seeds() -> None:
    known = {("base", "greso", 1e-3, seed): end for seed, end in enumerate((0.50, 0.52, 0.51))}
    key, one = ("base", "greso", 1e-3, 1), ("base", "greso", 1e-3, 0)
    assert cells.check_again(key, 0.53, known).endswith("(3 seeds): inside")
    with pytest.raises(SystemExit, match="OUTSIDE"):
        cells.check_again(key, 0.60, known)
    assert cells.check_again(key, 0.9, {one: 0.5}).endswith("no interval")
    with pytest.raises(SystemExit, match="no seed of this cell"):
        cells.check_again(key, 0.5, {("base", "dapo", 1e-3, 0): 0.5})


def test_oracle_prefers_prompts_near_one_half() -> None:
    torch_run = pytest.importorskip("benchmarks.torch_run")
    rng = np.random.default_rng(0)
    rate = np.repeat([0.0, 0.1, 0.5, 1.0], 100)
    counts = np.zeros(4)
    for _ in range(200):
        drawn = torch_run.draw_by_variance(rate, rng.random(400), 20)
        assert len(set(drawn.tolist())) == 20
        counts += np.bincount(drawn // 100, minlength=4)
    assert counts[[0, 3]].sum() == 0
    assert counts[2] / counts[1] == pytest.approx(0.25 / 0.09, rel=0.15)


# -- the command --------------------------------------------------------------------------------------------------


def test_command_hands_its_words_on(capfd) -> None:
    pytest.importorskip("torch")
    assert cli.main(["bench", "torch", "--presets", "nope"]) == 2
    assert capfd.readouterr().err.startswith("train_torch: no preset 'nope'; there are grpo")


def test_command_says_what_is_missing(monkeypatch, capsys, tmp_path) -> None:
    assert cli.main(["bench"]) == 2
    assert cli.main(["bench", "nope"]) == 2
    capsys.readouterr()
    monkeypatch.setitem(bench.MODULES, "torch", ("train_torch", ("no_such_module",)))
    assert cli.main(["bench", "torch"]) == 1
    said = capsys.readouterr().err
    assert "needs no_such_module" in said and "scripts/install.sh" in said and said.count("\n") == 1
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "bench.py"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "pretrained"]) == 1
    said = capsys.readouterr().err
    assert "needs the source checkout" in said and said.count("\n") == 1
