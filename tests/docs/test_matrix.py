"""docs/verl_versions.md: every cell is run, read or refused, and a refusal is one that the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verl_versions.md").read_text()
MATRIX = PAGE.partition("<!-- matrix: begin -->")[2].partition("<!-- matrix: end -->")[0]
TABLES = [
    [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")]
    for block in MATRIX.split("## ")[1:]
]
CELLS = [
    (row[0], head, cell)
    for head_row, _, *rows in TABLES
    for row in rows
    for head, cell in zip(head_row[1:], row[1:], strict=True)
]


def test_there_are_cells() -> None:
    assert len(TABLES) == 3 and len(CELLS) > 90


@pytest.mark.parametrize("cell", sorted({cell for _, _, cell in CELLS}))
def test_a_cell_is_one_of_three(cell) -> None:
    assert re.fullmatch(r"(run|read)(: [^`]+)?|refused: `[^`]+`", cell), cell


@pytest.mark.parametrize("message", sorted({m for _, _, c in CELLS for m in re.findall(r"refused: `([^`]+)`", c)}))
def test_a_refusal_is_one_that_the_code_says(message) -> None:
    files = (ROOT / "verl_adaptive" / "integration").rglob("*.py")
    texts = [re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in files]
    assert any(message in text for text in texts)


def test_what_stands_behind_the_cells_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py|test_\w+\.py)`", PAGE)
    assert len(named) > 8
    for name in named:
        found = (ROOT / name).exists() if "/" in name else list((ROOT / "tests").rglob(name))
        assert found, name


@pytest.mark.parametrize("feature", ["SGLang", "audio"])
def test_the_readme_does_not_call_run_what_was_read(feature) -> None:
    """Distillation stood under "works", and no cell of it was ever run."""
    cells = [cell for row, _, cell in CELLS if feature.lower() in row.lower()]
    assert cells and not any(cell.startswith("run") for cell in cells)
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|") and feature in line]
    assert rows and all("read, not run" in row for row in rows)


def test_the_numbers_on_a_gpu_are_those_of_the_runs() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "first_gpu.json").read_text())
    items = [
        {item["name"].removeprefix("+adaptive="): item for item in run["selftest"]}
        for run in (runs, runs["second"], runs["third"])
    ]
    assert not any(item["findings"] for run in items for item in run.values())
    first, _, third = ({name: item["facts"] for name, item in run.items()} for run in items)
    for run in items:
        for kind in ("fsdp", "fsdp2"):
            exact, half = (
                run["gradient"]["facts"][f"{kind} {dtype}"]["difference"] for dtype in ("float32", "bfloat16")
            )
            assert f"{exact:.1e} of its size in float32, {half:.4f}".replace(" 0.", " .") in PAGE
    killed, thinned = third["greso, SIGKILL, resume"], third["solo in colocate_async"]
    assert (
        f"{killed['aborted']} of {killed['rollouts']} rollouts aborted, {killed['updates']} optimizer updates" in PAGE
    )
    assert f"{thinned['left out']} of {thinned['rollouts']} rows left out of training, {thinned['updates']} up" in PAGE
    checks = sum(len(item["checks"]) for item in runs["third"]["selftest"])
    minutes, seconds = divmod(round(runs["third"]["seconds"]), 60)
    assert f"{checks} checks of five items in {minutes} min {seconds} s" in PAGE
    greso, pilots = (f"{first[name]['aborted']} of {first[name]['rollouts']:,}" for name in ("greso", "pilot_commit"))
    assert f"`greso` aborted {greso} rollouts, `pilot_commit` {pilots}" in PAGE
    presets = [item["facts"]["probs diff"] for run in items for name, item in run.items() if "updates" in item["facts"]]
    low, high = (f"{bound:.4f}".lstrip("0") for bound in (min(presets), max(presets)))
    assert f".0004 in plain verl, {low} to {high} in presets" in PAGE
    assert {round(run["plain verl"]["facts"]["probs diff"], 4) for run in items} == {0.0004}
    took = [
        item["seconds"]
        for run in items[1:]
        for name, item in run.items()
        if "s/step" in item["facts"] and "SIGKILL" not in name
    ]
    assert f"| {round(median(took), -1):.0f} s beside a training" in PAGE
    for trainings in (runs["trainings"], runs["third"]["trainings"]):
        for preset, steps in trainings.items():
            step, gen, before, update = (
                median(s[k] for s in steps[1:]) for k in ("step", "gen", "old_log_prob", "update_actor")
            )
            made, trained = (
                median(s[f"adaptive/rollouts/{k}_total"] for s in steps[1:]) for k in ("generated", "trained")
            )
            row = f"`{preset}` | {made:,.0f}, {trained:,.0f} | {gen:.1f} | {before + update:.1f} | {step:.1f} |"
            assert row in PAGE
    grpo, solo = (f"{steps[-1]['accuracy']:.3f}".lstrip("0") for steps in runs["third"]["trainings"].values())
    assert f"from .286 to {grpo} (`grpo`) and {solo} (`solo`)" in PAGE
