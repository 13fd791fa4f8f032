"""Seconds of generation: every preset and verl's own ``filter_groups`` in a queueing model, driven by the package's engine.

    python -m benchmarks.clock                   # what is missing in the results
    python -m benchmarks.clock --fresh           # all of it again
    python -m benchmarks.clock --only greso      # one policy
    python -m benchmarks.report                  # the tables

One cell: ``verl-adaptive simulate --clock`` with the same words. No time of this machine is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Parser, machine, run_all, run_script, to_json, versions, write_whole
from benchmarks.presets import FULL, TIGHT
from verl_adaptive.simulate import (
    PEERS,
    ClockConfig,
    Setting,
    Task,
    make_simulation,
    parse_pool,
    preset_names,
    run_task,
)
from verl_adaptive.simulate.clock import Clock
from verl_adaptive.simulate.equal_budget import BASELINE, by_preset, to_baseline

RESULTS = Path(__file__).resolve().parent / "results" / "clock.json"

#: Policies beside the shipped presets, which all run: options. Rows of generation rounds are in commit ff7a59c, the last to have them.
VARIANTS = (
    "pilot_commit adaptive.allocator.form=pipelined",
    "greso adaptive/allocator=pilot_commit adaptive/filter=band",
    "greso adaptive/allocator=pilot_commit adaptive/filter=band adaptive.allocator.form=pipelined",
    " ".join(TIGHT),
    "solo adaptive.longest_first=false",
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
        steps: of a run; with ``skip`` 0 GRPO's, whose rollouts are every policy's budget.
        skip: steps at the beginning that are not measured: the first pass, in which nobody knows the prompts.
        batch, n: B and N.
        ahead: batches that an asynchronous trainer keeps under way (``num_warmup_batches``); None: ``sync``.
        seeds: runs of each policy.
    """

    about: str
    pool: str = "static"
    steps: int = 64
    skip: int = 32
    batch: int = 128
    n: int = 16
    ahead: int | None = None
    seeds: int = 2

    def policies(self) -> list[str]:
        return [p for p in policies() if self.ahead is None or p not in SYNC_ONLY]


CLOCK = ClockConfig()
#: The model of the published table, an asynchronous trainer in it, and a pool that learns.
BLOCKS = {
    "model": Block(
        "8 replicas of 64 slots, 8 ms and 0.12 ms a sequence, median 4,000 tokens, σ 0.9, cap 32,768", seeds=4
    ),
    "one batch ahead": Block("an asynchronous trainer, `num_warmup_batches=1`", ahead=1),
    "mixed": Block("the pool learns: 30 % hopeless, 20 % solved", "mixed", steps=60, skip=0),
}


def policies() -> list[str]:
    """GRPO first, then the other presets and ``full``, what differs in an option, and verl's own filter."""
    return ["grpo", *sorted({*preset_names(), *FULL} - {"grpo"}), *VARIANTS, *PEERS]


def make_row(key: tuple[str, str, int]) -> dict[str, Any]:
    """One run, by block, policy and seed."""
    name, preset, seed = key
    block, policy = BLOCKS[name], " ".join(FULL.get(preset, [preset]))
    pool = parse_pool(block.pool)
    if not block.skip:
        setting = Setting(block.batch, block.n, block.steps, block.steps * block.batch * block.n)
        row = run_task(Task(policy, seed, setting, pool, clock=CLOCK))
        keep = ("time", "time_per_informative", "idle", "waves", "steps", "pool_start", "pool_end", "course", "ended")
        row["course"] = [[round(s), round(rate, 5)] for s, rate in row["course"]]
        return {"block": name, "preset": preset, "seed": seed, **_rounded({k: row[k] for k in keep})}
    # An asynchronous trainer stops running ahead towards the end of a run, so the run is planned to go on.
    planned = block.steps + 10 * (block.ahead is not None)
    task = Task(policy, seed, Setting(block.batch, block.n, planned, None), pool, clock=CLOCK)
    world, clock = task.world(), Clock(CLOCK)
    simulation = make_simulation(
        policy, world, batch=block.batch, n=block.n, steps=planned, seed=seed, clock=clock, ahead=block.ahead
    )
    ages: list[float] = []
    sent: dict[int, int] = {}  # submission → step of its first request
    for step in range(block.steps):
        # What is decided does not depend on time, so the steps before those that are measured need no clock. An
        # asynchronous trainer's decisions do depend on what is back.
        simulation.clock = clock if step >= block.skip or block.ahead is not None else None
        result = None if simulation.finished else simulation.try_step()
        if result is None:
            break
        for submission in (t for requests in simulation.requests for t in requests.submission.tolist()):
            sent.setdefault(submission, step)
        if step >= block.skip:
            trained = result.groups.submission[result.trained].tolist()
            ages.append(
                float(np.mean([step - sent[t] for t in trained])) if block.ahead is not None and trained else 0.0
            )
    measured = slice(0 if block.ahead is None else block.skip, None)  # in ``sync`` the clock saw no other steps
    row = {**clock.row(measured), "age": float(np.mean(ages))}
    return {"block": name, "preset": preset, "seed": seed, "steps": simulation.step, **_rounded(row)}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Short numbers; what is not one is None, for JSON knows no nan."""
    return {k: (round(v, 6) if np.isfinite(v) else None) if isinstance(v, float) else v for k, v in row.items()}


def shares(rows: Sequence[dict[str, Any]], block: str) -> dict[str, dict[str, Any]]:
    """Means of a block's policies over seeds: ``time`` and ``time_per_informative`` as shares of GRPO's in ``sync``, paired by
    seed; the rest as it is."""
    mine = {(row["preset"], row["seed"]): row for row in rows if row["block"] == block}
    grpo = {row["seed"]: row for row in rows if (row["block"], row["preset"]) == ("model", "grpo")}
    out: dict[str, dict[str, Any]] = {}
    for preset in policies():
        if pairs := [(mine[preset, seed], base) for seed, base in sorted(grpo.items()) if (preset, seed) in mine]:
            found = {
                name: [(row[name] or np.nan) / base[name] for row, base in pairs]
                for name in ("time", "time_per_informative")
            }
            found["seconds"] = [row["time"] for row, _ in pairs]
            found |= {name: [row[name] for row, _ in pairs] for name in ("begun", "prefill", "age")}
            means = {name: round(float(np.mean(values)), 4) for name, values in found.items()}
            if np.isnan(means["time_per_informative"]):  # groups of one have no variance of their own
                means["time_per_informative"] = None
            out[preset] = {**means, "seeds": len(pairs)}
    return out


def to_pool(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Seconds to where GRPO's pool ended, of GRPO's, in the block that learns; None: no seed got there."""
    by = by_preset([{**row, "learns": True} for row in rows if row["block"] == "mixed"])
    out = {}
    for preset in policies():
        if seeds := set(by.get(preset, ())) & set(by.get(BASELINE, ())):
            reached = to_baseline(by, preset)
            out[preset] = {"to_grpo": round(float(np.mean(reached)), 4) if reached else None, "seeds": len(seeds)}
    return out


def collected(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written, rows apart."""
    return {
        "policies": shares(rows, "model"),
        "one batch ahead": shares(rows, "one batch ahead"),
        "mixed": to_pool(rows),
        "blocks": {name: asdict(block) for name, block in BLOCKS.items()},
    }


def main() -> None:
    """The command line."""
    parser = Parser(prog="clock.py", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=policies(), default=policies(), help="policies (default: all)")
    parser.add_argument("--fresh", action="store_true", help="run again what the results hold")
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text())
    have = {(r["block"], r["preset"], r["seed"]): r for r in stored["rows"] if r["preset"] in policies()}
    wanted = [
        (name, preset, seed)
        for name, block in BLOCKS.items()
        for seed in range(block.seeds)
        for preset in block.policies()
        if preset in options.only and (options.fresh or (name, preset, seed) not in have)
    ]
    for done, row in enumerate(run_all(make_row, wanted, options.jobs), 1):
        have[row["block"], row["preset"], row["seed"]] = row
        print(
            f"[{done}/{len(wanted)}] {row['block']}, {row['preset']}, seed {row['seed']}: {row['time']:.0f} s",
            flush=True,
        )
        if done % 5 == 0:
            save(have, stored["note"])
    save(have, stored["note"])


def save(have: dict[tuple[str, str, int], dict[str, Any]], note: str) -> None:
    """Write the results whole; ``note`` is of rows that are not all of one code, and written into the file by hand."""
    rows = [have[key] for key in sorted(have)]
    about = {
        "benchmark": "clock",
        "command": "python -m benchmarks.clock",
        "machine": machine() | {"versions": versions("verl-adaptive", "numpy", "verl")},
        "note": note,
    }
    write_whole(RESULTS, to_json({**about, **collected(rows), "rows": rows}, "rows"))


if __name__ == "__main__":
    run_script(main)
