"""The shares of ``benchmarks/results/headline.json``, on curves made by hand, and the file against the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks.headline import POOLS, headline, less, standings
from benchmarks.page_docs import ablations, rivals
from benchmarks.page_front import front
from benchmarks.page_summary import best_solo, entry, goals, told_apart
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
            curve = [[BUDGET * k / 10, k, end * k / 10, end * k / 10] for k in range(12)]
            cells[variant, preset.replace("_", "-"), 1e-3, seed] = {"curve": curve}
    presets = list(dict.fromkeys(key[1] for key in cells))
    variants = {key[0] for key in cells}
    return Runs(
        cells,
        ("rollouts", "updates", "held_out", "pool"),
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


def test_what_the_pages_say_of_a_pool() -> None:
    """Seed by seed, against the rival's own seeds; told apart only where the interval excludes zero."""
    runs = made(
        base__grpo=[0.50, 0.52, 0.48],
        base__grpo_4=[0.62, 0.60],
        base__reinforce=[0.70, 0.76, 0.65],
        base__solo=[0.72, 0.74, 0.70],
        base__full=[0.40, 0.64, 0.46],
        base__solo_epoch=[0.62, 0.64, 0.60],
    )
    found = {"tiny/base": standings(runs, ("base",))}
    of = found["tiny/base"]
    assert less(of["solo"], of["grpo-4"]) == pytest.approx([0.095, 0.133], abs=0.002)  # .95 of the ends, two seeds
    assert told_apart(of.values()) == (["`reinforce`", "`solo`", "`solo-epoch`"], [])
    assert entry(of["solo"]).startswith("0.71, +0.209 ± 0.000") and entry(None) == "not run"
    assert entry(of["grpo-4"]).endswith("(2 seeds)") and entry(of["full"]).startswith("1.04, -0.000 ± 0.26")
    text = "\n".join(rivals(found))
    assert "| REINFORCE, no memory | +0.016 ± 0.0" in text and "Told apart, at 95 %: above `full`" not in text
    assert "met (3)" not in "\n".join(goals(found)) and "0.71: missed (3)" in "\n".join(goals(found))
    assert "Told apart from `solo` on held-out prompts, at 95 %: `solo-epoch`." in ablations(runs)
    assert any(line.startswith("| tiny, as they come | 3 | 0.71, ") for line in front(found))


def test_solo_may_have_a_decayed_learning_rate_as_the_best_grpo_may() -> None:
    runs = made(base__grpo=[0.5] * 3, base__solo=[0.6] * 3, decay__solo=[0.7] * 3, decay__grpo=[0.4] * 3)
    found = {"tiny/base": standings(runs, ("base", "decay"))}
    better = best_solo(found["tiny/base"])
    assert better is not None and better.name == "solo decay"
    (row,) = [line for line in front(found) if line.startswith("| tiny, as they come")]
    assert row.split(" | ")[2].endswith("(decayed)") and "(`grpo`)" in row
    assert ": missed, decayed (3)" in "\n".join(goals(found))
    runs = made(base__grpo=[0.5] * 3, base__solo=[0.6] * 3, decay__solo=[0.55] * 3, decay__grpo=[0.4] * 3)
    assert best_solo(standings(runs, ("base", "decay"))).name == "solo"
    assert best_solo({}) is None


def test_the_file_is_that_of_the_pools() -> None:
    assert {name for pool, names in POOLS.items() if pool.startswith("tiny/") for name in names} <= set(VARIANTS)
    written = json.loads(FILE.read_text())
    assert set(written) <= set(POOLS) and written["real/base"]["grpo"]["seeds"] >= 3
