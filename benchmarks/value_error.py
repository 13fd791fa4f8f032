"""How far the memory's values are from the exact pass rates, for many options of it, from one recorded run of the tiny model.

    python -m benchmarks.value_error --preset solo-1 --seed 30

Every value is asked for before the rewards that it would be subtracted from are shown. The variance of a single rollout's
advantage is p (1 − p) plus the square of that error; beside it stands the error of the batch's mean, REINFORCE's baseline.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.tiny_learner import pass_rates
from benchmarks.torch_cells import PRESETS, Cell, Settings
from benchmarks.torch_run import Run
from verl_adaptive.engine import Requests
from verl_adaptive.groups import Groups
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.memory import Memory
from verl_adaptive.stats.table import StatsTable

__all__ = ["Visits", "batch_mean_error", "record", "value_error"]

DECAYS = (0.7, 0.8, 0.875, 0.9, 0.95, 1.0)
STRENGTHS = (1.0, 2.0, 4.0, 8.0)


@dataclass
class Visits:
    """One step: prompts ``(G,)``, the sums and numbers of their rewards, and their exact pass rates when they were asked."""

    row: np.ndarray
    total: np.ndarray
    n: np.ndarray
    exact: np.ndarray


def record(preset: str, seed: int, settings: Settings, cache: Path, lr: float = 1e-3) -> tuple[list[str], list[Visits]]:
    """Train once; the prompts' data sources, and what every step showed of them."""
    torch.set_num_threads(1)
    run = Run(Cell("base", preset, lr, seed), settings, cache)
    steps: dict[int, list[tuple[np.ndarray, ...]]] = {}
    generate = run._generate

    def overheard(requests: Requests, step: int) -> Groups:
        exact = pass_rates(run.model, run.pool.pick(requests.index))
        groups = generate(requests, step)
        parts = steps.setdefault(step, [])
        parts.append((groups.row, groups.sum(groups.reward), groups.n.astype(float), exact))
        return groups

    run._generate = overheard  # type: ignore[method-assign]
    run.go()
    return run.pool.sources, [Visits(*map(np.concatenate, zip(*parts, strict=True))) for parts in steps.values()]


def value_error(sources: list[str], steps: list[Visits], **options: float | bool) -> np.ndarray:
    """Mean squared error of the values in each step, float64 ``(steps,)``; ``options`` are the memory's."""
    table, keys = StatsTable(), np.zeros(len(sources), dtype=KEY_DTYPE)
    keys["lo"] = np.arange(len(sources))
    table.rows_for(keys, sources=sources)
    memory, out = Memory(table, "memory", **options), []  # type: ignore[arg-type]
    for step in steps:
        out.append(float(((memory.value(step.row) - step.exact) ** 2).mean()))
        memory.observe(step.row, step.total, step.n, step.total / step.n)
        memory.settle()
    return np.array(out)


def batch_mean_error(steps: list[Visits]) -> np.ndarray:
    """The same of the batch's own mean pass rate."""
    return np.array([step.exact.var() for step in steps])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="solo", choices=PRESETS)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--cache", type=Path, default=Path("outputs") / "train_torch", help="warm starts")
    options = parser.parse_args()
    sources, steps = record(options.preset, options.seed, Settings(), options.cache)
    third = len(steps) // 3
    single = np.array([(s.exact * (1 - s.exact)).mean() for s in steps])
    print("| baseline | first third | rest |\n|:--|--:|--:|")

    def row(name: str, error: np.ndarray) -> None:
        print(f"| {name} | {error[:third].mean():.4f} | {error[third:].mean():.4f} |")

    row("p (1 - p), beside any", single)
    row("the batch's mean", batch_mean_error(steps))
    for by_source, decay, strength in itertools.product((True, False), DECAYS, STRENGTHS):
        name = f"decay {decay:g}, strength {strength:g}, prior {'source' if by_source else 'all'}"
        row(name, value_error(sources, steps, decay=decay, strength=strength, by_source=by_source))


if __name__ == "__main__":
    main()
