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


@pytest.mark.parametrize("feature", ["distillation", "SGLang", "video"])
def test_the_readme_does_not_call_run_what_was_read(feature) -> None:
    """Distillation stood under "works", and no cell of it was ever run."""
    cells = [cell for row, _, cell in CELLS if feature.lower() in row.lower()]
    assert cells and all("read" in cell for cell in cells)
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|") and feature in line]
    assert rows and all("read, not run" in row for row in rows)


def test_the_numbers_on_a_gpu_are_those_of_the_run() -> None:
    run = json.loads((ROOT / "benchmarks" / "results" / "first_gpu.json").read_text())
    facts, trainings = (
        {item["name"].removeprefix("+adaptive="): item["facts"] for item in run["selftest"]},
        run["trainings"],
    )
    assert not any(item["findings"] for item in run["selftest"])
    for kind in ("fsdp", "fsdp2"):
        exact, half = (facts["gradient"][f"{kind} {dtype}"]["difference"] for dtype in ("float32", "bfloat16"))
        assert f"{exact:.1e} of its size in float32, {half:.4f}".replace(" 0.", " .") in PAGE
    aborted = (
        f"`{name}` {facts[name]['aborted']} of {facts[name]['rollouts']:,}" for name in ("greso", "pilot_commit")
    )
    assert ", ".join(aborted) in PAGE
    differences = [facts[name]["probs diff"] for name in ("grpo", "greso", "pilot_commit")]
    low, high = (f"{bound:.3f}".lstrip("0") for bound in (min(differences), max(differences)))
    assert f"{facts['plain verl']['probs diff']:.4f}".lstrip("0") + f" in plain verl, {low} to {high}" in PAGE
    second = {item["name"].removeprefix("+adaptive="): item for item in run["second"]["selftest"]}
    assert not any(item["findings"] for item in second.values())
    assert f"{second['solo']['facts']['probs diff']:.4f}".lstrip("0") + " in `solo`" in PAGE
    runs = [item["seconds"] for item in second.values() if "s/step" in item["facts"]]
    assert f"| {round(median(runs), -1):.0f} s on eight cores" in PAGE
    for preset, steps in trainings.items():
        step, gen, before, update = (
            median(s[k] for s in steps[1:]) for k in ("step", "gen", "old_log_prob", "update_actor")
        )
        made, trained = (median(s[f"adaptive/rollouts/{k}_total"] for s in steps[1:]) for k in ("generated", "trained"))
        row = f"| `{preset}` | {made:,.0f}, {trained:,.0f} | {gen:.1f} | {before + update:.1f} | {step:.1f} |"
        assert row in PAGE
