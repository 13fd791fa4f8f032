"""Seconds of generation: every preset and verl's own ``filter_groups`` in a queueing model, driven by the package's engine.

    python -m benchmarks.clock                   # what is missing in the results
    python -m benchmarks.clock --fresh           # all of it again
    python -m benchmarks.clock --only greso      # one policy
    python -m benchmarks.report                  # the tables

One cell: ``verl-adaptive simulate --clock`` with the same words. No time of this machine is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Parser, machine, run_script, to_json, versions, write_whole
from benchmarks.presets import FULL, TIGHT
from verl_adaptive.simulate import (
    PEERS,
    ClockConfig,
    LengthConfig,
    Machine,
    Setting,
    Task,
    make_simulation,
    parse_pool,
    preset_names,
    run_task,
)
from verl_adaptive.simulate.clock import Clock, Timing

HERE = Path(__file__).resolve().parent

#: Policies beside the shipped presets, which all run: options. Rows of generation rounds are in commit ff7a59c, the last to have them.
VARIANTS = (
    "pilot_commit adaptive.allocator.form=pipelined",
    "greso adaptive/allocator=pilot_commit adaptive/filter=band",
    "greso adaptive/allocator=pilot_commit adaptive/filter=band adaptive.allocator.form=pipelined",
    " ".join(TIGHT),
)
#: What an asynchronous trainer has no use for, or refuses: plans of whole steps, pilots for a later generation.
#: Groups of one are left out for time: a window of them is some thousand groups.
SYNC_ONLY = ("cero", "solo", "spo", *VARIANTS, *PEERS)


@dataclass(frozen=True)
class Block:
    """One table.

    Attributes:
        about: what it is.
        pool: as ``--pool`` takes it.
        clock: what generation takes.
        steps: of a run; with ``skip`` 0 GRPO's, whose rollouts are every policy's budget.
        skip: steps at the beginning that are not measured: the first pass, in which nobody knows the prompts.
        batch, n: B and N.
        ahead: batches that an asynchronous trainer keeps under way (``num_warmup_batches``); None: ``sync``.
    """

    about: str
    pool: str = "static"
    clock: ClockConfig = field(default_factory=ClockConfig)
    steps: int = 64
    skip: int = 32
    batch: int = 128
    n: int = 16
    ahead: int | None = None

    @property
    def learns(self) -> bool:
        return self.skip == 0

    def policies(self) -> list[str]:
        return [p for p in policies() if self.ahead is None or p not in SYNC_ONLY]


def _with(machine: Machine | None = None, **lengths: Any) -> ClockConfig:
    return ClockConfig(machine or Machine(), LengthConfig(**lengths))


#: The first is the model of the published table; then the same with one thing changed; then pools that learn.
BLOCKS = {
    "model": Block("8 replicas of 64 slots, 8 ms and 0.12 ms a sequence, median 4,000 tokens, σ 0.9, cap 32,768"),
    "short answers": Block("median 1,000, σ 0.6, cap 8,192", clock=_with(median=1000, sigma=0.6, cap=8192)),
    "longer tail": Block("σ 1.2", clock=_with(sigma=1.2)),
    "more slots": Block("8 replicas of 256 slots: the batch fits at once", clock=_with(Machine(slots=256))),
    "one batch ahead": Block("an asynchronous trainer, `num_warmup_batches=1`", ahead=1),
    "two batches ahead": Block("an asynchronous trainer, `num_warmup_batches=2`", ahead=2),
    "mixed": Block("the pool learns: 30 % hopeless, 20 % solved", "mixed", steps=60, skip=0),
    "hard": Block("the pool learns: half hopeless, 5 % solved", "hard", steps=60, skip=0),
    "easy": Block("the pool learns: 5 % hopeless, 40 % solved", "easy", steps=60, skip=0),
}

#: Seeds of a block; the first block has more.
SEEDS = 2
SEEDS_OF_MODEL = 4


def policies() -> list[str]:
    """GRPO first, then the other presets and ``full``, what differs in an option, and verl's own filter."""
    return ["grpo", *sorted({*preset_names(), *FULL} - {"grpo"}), *VARIANTS, *PEERS]


def make_row(key: tuple[str, str, int]) -> dict[str, Any]:
    """One run, by block, policy and seed."""
    name, preset, seed = key
    block, policy = BLOCKS[name], " ".join(FULL.get(preset, [preset]))
    pool = parse_pool(block.pool)
    if block.learns:
        setting = Setting(block.batch, block.n, block.steps, block.steps * block.batch * block.n)
        row = run_task(Task(policy, seed, setting, pool, clock=block.clock))
        keep = ("time", "time_per_informative", "idle", "waves", "steps", "pool_start", "pool_end", "course", "ended")
        row["course"] = [[round(s), round(rate, 5)] for s, rate in row["course"]]
        return {"block": name, "preset": preset, "seed": seed, **_rounded({k: row[k] for k in keep})}
    # An asynchronous trainer stops running ahead towards the end of a run, so the run is planned to go on.
    planned = block.steps + 10 * (block.ahead is not None)
    task = Task(policy, seed, Setting(block.batch, block.n, planned, None), pool, clock=block.clock)
    world, clock, timing = task.world(), Clock(block.clock), Timing(block.clock)
    simulation = make_simulation(
        policy, world, batch=block.batch, n=block.n, steps=planned, seed=seed, clock=clock, ahead=block.ahead
    )
    ages: list[float] = []
    for step in range(block.steps):
        # What is decided does not depend on time, so the steps before those that are measured need no clock. An
        # asynchronous trainer's decisions do depend on what is back.
        simulation.clock = clock if step >= block.skip or block.ahead is not None else None
        result = None if simulation.finished else simulation.try_step()
        if result is None:
            break
        if step >= block.skip:
            timing.count(clock.phases[-1], result, simulation.engine.facts.tolerance, 0.0)
            ages.append(float(clock.ages(result).mean()) if block.ahead is not None and result.trained.any() else 0.0)
    row = {**timing.row(), "age": float(np.mean(ages))}
    return {"block": name, "preset": preset, "seed": seed, "steps": simulation.step, **_rounded(row)}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Short numbers; what is not one is None, for JSON knows no nan."""
    return {k: (round(v, 6) if np.isfinite(v) else None) if isinstance(v, float) else v for k, v in row.items()}


def made(wanted: Sequence[tuple[str, str, int]], jobs: int) -> Iterator[dict[str, Any]]:
    """The runs, in order."""
    if jobs == 1:
        yield from map(make_row, wanted)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(make_row, wanted)


def shares(rows: Sequence[dict[str, Any]], block: str, against: str | None = None) -> dict[str, dict[str, Any]]:
    """A block's policies as shares of GRPO's, in this block or another, paired by seed: ``time`` and
    ``time_per_informative``; the rest as it is."""
    by: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["block"] == block:
            by.setdefault(row["preset"], {})[row["seed"]] = row
    base = {row["seed"]: row for row in rows if row["block"] == (against or block) and row["preset"] == "grpo"}
    out: dict[str, dict[str, Any]] = {}
    for preset in (p for p in policies() if p in by):
        if not (seeds := sorted(set(by[preset]) & set(base))):
            continue
        found: dict[str, list[float]] = {
            "time": [by[preset][s]["time"] / base[s]["time"] for s in seeds],
            "time_per_informative": [
                (by[preset][s]["time_per_informative"] or np.nan) / base[s]["time_per_informative"] for s in seeds
            ],
            "idle": [by[preset][s]["idle"] for s in seeds],
            "rounds": [by[preset][s]["waves"] for s in seeds],
            "seconds": [by[preset][s]["time"] for s in seeds],
        }
        for key in ("empty", "last", "begun", "aborted", "aborted_tokens", "prefill", "informative", "age"):
            if key in by[preset][seeds[0]]:
                found[key] = [by[preset][s][key] for s in seeds]
        if not all(np.isfinite(found["time_per_informative"])):  # groups of one have no variance of their own
            del found["time_per_informative"]
        entry: dict[str, Any] = {"time": None, "time_per_informative": None}
        entry |= {key: round(float(np.mean(values)), 4) for key, values in found.items()}
        entry["seeds"] = len(seeds)
        out[preset] = entry
    return out


def to_pool(rows: Sequence[dict[str, Any]], block: str) -> dict[str, dict[str, Any]]:
    """Seconds to where GRPO's pool ended, of GRPO's, in a block that learns."""
    seeds = {row["seed"] for row in rows if row["block"] == block}
    out = {}
    for preset in policies():
        mine = [r for r in rows if r["block"] == block and r["preset"] == preset]
        if mine and seeds:
            out[preset] = _to_baseline(rows, block, preset)
    return out


def _to_baseline(rows: Sequence[dict[str, Any]], block: str, preset: str) -> dict[str, Any]:
    by = {(r["preset"], r["seed"]): r for r in rows if r["block"] == block}
    shares_, seeds = [], sorted(s for p, s in by if p == preset and ("grpo", s) in by)
    for seed in seeds:
        base = by["grpo", seed]["course"]
        target = base[-1][1]
        ours = next((s for s, rate in by[preset, seed]["course"] if rate >= target), None)
        if ours is not None:
            shares_.append(ours / next(s for s, rate in base if rate >= target))
    return {
        "to_grpo": round(float(np.mean(shares_)), 4) if shares_ else None,
        "reached": len(shares_),
        "seeds": len(seeds),
        "lowest": round(min(shares_), 4) if shares_ else None,
        "highest": round(max(shares_), 4) if shares_ else None,
        "pool_end": round(float(np.mean([by[preset, s]["pool_end"] for s in seeds])), 4),
    }


def collected(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written, rows apart."""
    there = [name for name in BLOCKS if any(row["block"] == name for row in rows)]
    sync = [name for name in there if BLOCKS[name].ahead is None]
    return {
        "policies": shares(rows, "model"),
        "variations": {name: shares(rows, name) for name in sync if name != "model" and not BLOCKS[name].learns},
        "asynchronous": {name: shares(rows, name, "model") for name in there if name not in sync},
        "learning": {name: to_pool(rows, name) for name in there if BLOCKS[name].learns},
        "blocks": {name: asdict(BLOCKS[name]) for name in there},
    }


def main() -> None:
    """The command line."""
    parser = Parser(prog="clock.py", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each (default: %(default)s)")
    parser.add_argument("--seeds", type=int, help=f"seeds of every block (default: {SEEDS_OF_MODEL}, others {SEEDS})")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="tables (default: all)")
    parser.add_argument("--only", nargs="+", choices=policies(), default=policies(), help="policies (default: all)")
    parser.add_argument("--fresh", action="store_true", help="run again what the results hold")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "clock.json")
    options = parser.parse_args()
    have: dict[tuple[str, str, int], dict[str, Any]] = {}
    note = ""  # of rows that are not all of one code; written into the file by hand
    if options.results.exists():
        stored = json.loads(options.results.read_text())
        have = {(r["block"], r["preset"], r["seed"]): r for r in stored["rows"] if r["preset"] in policies()}
        note = stored.get("note", "")
    wanted = [
        (block, preset, seed)
        for block in options.blocks
        for seed in range(options.seeds or (SEEDS_OF_MODEL if block == "model" else SEEDS))
        for preset in BLOCKS[block].policies()
        if preset in options.only and (options.fresh or (block, preset, seed) not in have)
    ]
    for done, row in enumerate(made(wanted, options.jobs), 1):
        have[row["block"], row["preset"], row["seed"]] = row
        print(
            f"[{done}/{len(wanted)}] {row['block']}, {row['preset']}, seed {row['seed']}: {row['time']:.0f} s",
            flush=True,
        )
        if done % 5 == 0 or done == len(wanted):
            save(options.results, have, note)
    if not wanted:
        save(options.results, have, note)


def save(path: Path, have: dict[tuple[str, str, int], dict[str, Any]], note: str) -> None:
    """Write the results whole."""
    rows = [have[key] for key in sorted(have)]
    about = {
        "benchmark": "clock",
        "command": "python -m benchmarks.clock",
        "machine": machine() | {"versions": versions("verl-adaptive", "numpy", "verl")},
    }
    if note:
        about["note"] = note
    write_whole(path, to_json({**about, **collected(rows), "rows": rows}, "rows"))


if __name__ == "__main__":
    run_script(main)
