"""The shares of ``benchmarks/results/headline.json``, on curves made by hand, and the file against the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.headline import POOLS, headline
from benchmarks.runs import Runs
from benchmarks.train_torch import VARIANTS

BUDGET = 1000
FILE = Path(__file__).parents[1] / "benchmarks" / "results" / "headline.json"


def made(**ends: list[float]) -> Runs:
    """Straight lines from 0 to these final accuracies at the budget, a seed each; names as ``variant__preset``."""
    cells = {}
    for name, finals in ends.items():
        variant, _, preset = name.partition("__")
        for seed, end in enumerate(finals):
            curve = [[BUDGET * k / 10, k, end * k / 10] for k in range(12)]
            cells[variant, preset.replace("_", "-"), 1e-3, seed] = {"curve": curve}
    presets = list(dict.fromkeys(key[1] for key in cells))
    variants = {key[0] for key in cells}
    return Runs(
        cells,
        ("rollouts", "updates", "held_out"),
        dict.fromkeys(variants, BUDGET),
        dict.fromkeys(variants, 10),
        presets,
    )


def test_shares_of_grpo_and_of_the_best_grpo() -> None:
    runs = made(
        base__grpo=[0.5, 0.5, 0.5], base__grpo_4=[0.8, 0.8, 0.8], base__solo=[1.0, 1.0, 0.2], decay__grpo=[0.6] * 3
    )
    shares = headline(runs, ("base", "decay"))
    assert set(shares) == {"grpo", "grpo-4", "solo", "grpo decay"}
    assert shares["solo"]["best_grpo"] == "grpo-4" and shares["solo"]["seeds"] == 3
    assert shares["grpo"]["of_grpo"] == pytest.approx(1.0, abs=0.01) and shares["grpo"]["of_best_grpo"] is None
    # Accuracies are means over the window before: at the budget .95 of the end, so half of that takes half, and a window.
    assert shares["solo"]["of_grpo"] == pytest.approx(0.525, abs=0.01)  # the median seed, not the one that fails
    assert shares["solo"]["of_best_grpo"] == pytest.approx(0.81, abs=0.01)


def test_a_preset_whose_median_seed_never_gets_there_has_none() -> None:
    shares = headline(made(base__grpo=[0.5] * 3, base__solo=[0.9, 0.4, 0.4]), ("base",))
    assert shares["solo"]["of_grpo"] is None and headline(made(base__solo=[1.0]), ("base",)) == {}


def test_the_file_is_that_of_the_pools() -> None:
    assert {name for pool, names in POOLS.items() if pool.startswith("tiny/") for name in names} <= set(VARIANTS)
    written = json.loads(FILE.read_text())
    assert set(written) <= set(POOLS) and written["real/base"]["grpo"]["seeds"] >= 3
