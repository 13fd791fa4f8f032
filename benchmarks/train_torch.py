"""Every preset at the same number of generated rollouts, on a tiny transformer trained with GRPO in this process.

    python -m benchmarks.train_torch                                  # what is missing in the results
    python -m benchmarks.train_torch --presets "greso;full" --seeds 3 --lrs 1e-3
    python -m benchmarks.train_torch --cell "base/greso/lr=0.001/seed=2" --check
    python -m benchmarks.report                                       # the tables again, from the JSON

The policies are the package's own, composed by Hydra as on verl's command line and driven through the same engine and the
same cut into minibatches as in verl's trainer; only generation and the update are small enough for one core. Runs that the
JSON holds are not run again. See ``tiny_learner.py`` for model and task.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import (
    GridParser,
    Key,
    cell_id,
    check_again,
    load_average,
    machine,
    run_all,
    run_script,
    to_json,
    versions,
    write_whole,
)
from benchmarks.torch_cells import COLUMNS, PRESETS, VARIANTS, Cell, Settings
from benchmarks.torch_run import Run

HERE = Path(__file__).resolve().parent
DEFAULT = Settings()


def settings_of(variant: str, settings: Settings) -> Settings:
    """The settings of a variant."""
    return replace(settings, **VARIANTS[variant])


def run_cell(key: Key, settings: Settings, cache: Path) -> Cell:
    """One run, on one core."""
    torch.set_num_threads(1)
    command = f'python -m benchmarks.train_torch --cell "{cell_id(*key)}" --check'
    return Run(Cell(*key, command=command, load=load_average()), settings_of(key[0], settings), cache).go()


# -- results ------------------------------------------------------------------------------------------------------

Cells = dict[Key, Cell]


def load(path: Path, settings: Settings) -> tuple[Cells, list[dict[str, Any]]]:
    """The cells of a results file and the machines that they ran on; none if there is no file.

    Raises:
        SystemExit: the file's settings are others.
    """
    if not path.exists():
        return {}, []
    data = json.loads(path.read_text())
    if data["settings"] != asdict(settings):
        raise SystemExit(f"{path} was measured with other settings; name another file with --results, or remove it")
    return {cell.key: cell for cell in (Cell(**c) for c in data["cells"])}, data["machines"]


def here(machines: list[dict[str, Any]]) -> int:
    """This machine's place among the machines; it is added if it is not there."""
    this = machine() | {"versions": versions("verl-adaptive", "torch", "numpy", "hydra-core")}
    if this not in machines:
        machines.append(this)
    return machines.index(this)


def save(path: Path, settings: Settings, cells: Cells, machines: list[dict[str, Any]]) -> None:
    """Write all cells; the old file stays whole until the new one is."""
    data = {
        "benchmark": "train_torch",
        "machines": machines,
        "settings": asdict(settings),
        "variants": VARIANTS,
        "presets": PRESETS,
        "columns": COLUMNS,
        "cells": [asdict(cells[key]) for key in sorted(cells)],
    }
    write_whole(path, to_json(data, "cells"))


def main(arguments: list[str] | None = None, settings: Settings = DEFAULT) -> None:
    """The command line."""
    parser = GridParser(
        "train_torch",
        __doc__.splitlines()[0],
        **{"presets": PRESETS, "variants": VARIANTS, "arms": PRESETS, "variant": "base"},
        **{"lrs": (3e-4, 1e-3, 2e-3), "seeds": 5},
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each (%(default)s)")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "train_torch.json")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "outputs" / "train_torch", help="warm starts")
    options = parser.parse_args(arguments)
    wanted = parser.cells(options)
    if options.jobs < 1:
        parser.error("--jobs must be 1 or greater")
    cells, machines = load(options.results, settings)
    if not options.cell and not options.fresh:
        wanted = [key for key in wanted if key not in cells]
    if options.list:
        print("\n".join(cell_id(*key) for key in wanted))
        return
    run = functools.partial(run_cell, settings=settings, cache=options.cache)
    for done, cell in enumerate(run_all(run, wanted, options.jobs), 1):
        if options.check:
            print(check_again(cell.key, cell.curve[-1][2], {key: c.curve[-1][2] for key, c in cells.items()}))
            continue
        cell.machine = here(machines)
        cells[cell.key] = cell
        save(options.results, settings, cells, machines)
        print(
            f"[{done}/{len(wanted)}] {cell_id(*cell.key)}: held-out {cell.curve[0][2]:.3f} -> {cell.curve[-1][2]:.3f}, "
            f"{cell.steps} steps, {cell.seconds['all']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
