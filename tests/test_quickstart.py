"""The quickstart: what it counts, what it says of significance, and the notebook."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from examples.cpu import quickstart
from examples.cpu.quickstart import Arm, Result
from tests.cli.stores import make_run
from tests.programs import ran

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "benchmarks" / "results" / "quickstart.json"


def result(arm: Arm, seed: int, *accuracies: float, step: int = 128) -> Result:
    curve = [(i * step, accuracy) for i, accuracy in enumerate(accuracies)]
    count = curve[-1][0]
    return Result(
        arm.name, arm.preset, arm.n, seed, len(curve) - 1, 2, count, count, 0.5, curve, 9.0, "runs/x/checkpoints"
    )


GRPO, FOUR, SOLO = Arm("grpo"), Arm("grpo", 4), Arm("solo")


def test_arms_have_the_same_rollouts_and_updates(tmp_path) -> None:
    thin = Arm.parse("solo adaptive.advantage.thin=1")
    work = tmp_path / "x=1,é (2)"
    for arm in (GRPO, FOUR, SOLO, thin):
        words = dict(w.lstrip("+").split("=", 1) for w in arm.words(1, 2048, work, work / "run"))
        assert words["actor_rollout_ref.model.path"] == f"'{work}/model'"  # as Hydra's grammar wants such a path
        n, batch = int(words["actor_rollout_ref.rollout.n"]), int(words["data.train_batch_size"])
        assert n * batch == quickstart.ROLLOUTS_PER_STEP and words["trainer.total_training_steps"] == "16"
        assert batch // int(words["actor_rollout_ref.actor.ppo_mini_batch_size"]) == quickstart.UPDATES_PER_STEP
    assert words["adaptive"] == "solo" and words["adaptive.advantage.thin"] == "1" and thin.folder != SOLO.folder
    assert Arm.parse("grpo:4") == FOUR and Arm.parse(" solo") == SOLO
    for wrong in ("grpo:3", "grpo:x", "grpo:0"):
        with pytest.raises(SystemExit, match="must divide"):
            Arm.parse(wrong)


def test_the_verdict_is_paired_by_seed() -> None:
    pairs = [((0.40, 0.50), (0.42, 0.52), (0.44, 0.54)), ((0.40, 0.439), (0.40, 0.396), (0.40, 0.429))]
    runs = [
        [
            result(arm, seed, 0.2, end)
            for seed, ends in enumerate(found)
            for arm, end in zip((GRPO, SOLO), ends, strict=True)
        ]
        for found in pairs
    ]
    assert "+0.100 ± 0.000 (3 seeds, significant) over GRPO n=8" in quickstart.verdict(runs[0])
    assert "+0.021 ± 0.056 (3 seeds, not significant)" in quickstart.verdict(runs[1])
    assert "(1 seed: no interval)" in quickstart.verdict(runs[0][:2])


def test_the_table_compares_within_a_seed() -> None:
    runs = [result(GRPO, 1, 0.2, 0.4), result(SOLO, 1, 0.2, 0.5), result(GRPO, 2, 0.2, 0.5), result(SOLO, 2, 0.2, 0.48)]
    table = dict(quickstart.summary(runs))
    assert table["  against GRPO n=8 (by seed)"] == ["", "+0.040 (+0.100, -0.020)"]
    assert table["rollouts to GRPO n=8's accuracy (median)"] == ["100%", "never"]
    assert table["prompts x rollouts of a step"] == ["16 x 8", "128 x 1"]


def test_what_is_left_is_said_from_the_beginning() -> None:
    assert quickstart._left(23_040, 0, 0.0, 0.0) == "about 11 min left"
    assert quickstart._left(23_040, 11_520, 400.0, 300.0) == "about 5 min left"


def published() -> dict:
    return json.loads(PUBLISHED.read_text())


def test_the_published_run_is_of_the_quickstart_as_it_is() -> None:
    found = [quickstart.result_of(stored) for stored in published()["results"]]
    arms = [Arm.parse(text) for text in quickstart.ARMS.split(",")]
    assert [(r.arm, r.seed) for r in found] == [
        (a.name, s) for s in range(quickstart.FIRST, quickstart.FIRST + quickstart.SEEDS) for a in arms
    ]
    assert {r.generated for r in found} == {quickstart.ROLLOUTS} and all(r.updates == 32 for r in found)


def notebook() -> str:
    """The notebook's code, cell after cell, as Jupyter would run it."""
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_the_notebooks_stored_outputs_are_of_the_published_results() -> None:
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    said = "".join(text for cell in cells for out in cell.get("outputs", []) for text in out.get("text", []))
    results = [quickstart.result_of(stored) for stored in published()["results"]]
    assert " ".join(quickstart.verdict(results).split()) in " ".join(said.split())


def run_notebook(work: Path, **settings: str) -> str:
    variables = {f"QUICKSTART_{name}": value for name, value in {"WORK": str(work), **settings}.items()}
    done = ran(sys.executable, "-c", notebook(), cwd=ROOT / "examples", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_notebook_runs_with_results_that_are_there(tmp_path) -> None:
    """Every cell; training has been done: the published results stand where it would have put them."""
    pytest.importorskip("matplotlib")
    for name in ("data/done", "model/done"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for stored in published()["results"]:
        run = (tmp_path / stored["checkpoints"]).parent
        run.mkdir(parents=True)
        (run / "result.json").write_text(json.dumps(stored))
    make_run(tmp_path / stored["checkpoints"])
    said = run_notebook(tmp_path)
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    assert "GRPO n=4" in said and "questions, " in said


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_the_notebook_trains(tmp_path) -> None:
    said = run_notebook(tmp_path, ARMS="grpo,solo", SEEDS="1", ROLLOUTS="256")
    found = sorted((tmp_path / "runs").glob("*/result.json"))
    results = [quickstart.read_result(path) for path in found]
    assert len(results) == 2 and all(r.generated == 256 and r.updates == 4 and len(r.curve) == 3 for r in results)
    assert "solo" in said and "questions, " in said and asdict(results[0])["checkpoints"].startswith("runs/")
