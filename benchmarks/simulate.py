"""Every preset in the simulator, on several pools, against the oracles; and the simulator's speed.

python -m benchmarks.simulate                # what is missing in the results
python -m benchmarks.simulate --speed        # measure the speed again
python -m benchmarks.report                  # the tables again
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.presets import spelled
from verl_adaptive.simulate import LIMITS, REFERENCES, Setting, Task, parse_pool, run_task, summarise

HERE = Path(__file__).resolve().parent

#: Pilot-Commit with commits within the step, which is its default in the asynchronous trainers.
ON_POLICY = "pilot_commit adaptive.allocator.form=on_policy"
#: Shipped presets, DAPO with the fair round size, `full` and what it is made of. The results are of commit ff7a59c, the last
#: that simulated in generation rounds and knew ``round.adaptive`` and ``sized_to_need``.
POLICIES = (
    "grpo",
    "dapo",
    "dapo adaptive.sampler.round.adaptive=true",
    "greso",
    "aero",
    "cero",
    ON_POLICY,
    "full",
    "full adaptive/sampler=mopps",
    "greso adaptive/allocator=pilot_commit adaptive/filter=band adaptive.allocator.form=on_policy "
    "adaptive.allocator.sized_to_need=true",
    "grpo adaptive/sampler=mopps",
    "grpo adaptive/sampler=mopps adaptive.sampler.decay=0.5",
    "dapo adaptive/sampler=mopps adaptive.sampler.decay=0.5",
    *REFERENCES,
)


@dataclass(frozen=True)
class Block:
    """One table: a pool and what is equal in it."""

    about: str
    pool: str
    batch: int = 64
    n: int = 8
    budget: int = 102_400

    def words(self, seeds: list[int]) -> str:
        """The command that makes the table's rows."""
        return (
            f"verl-adaptive simulate --pool {self.pool} --batch {self.batch} --n {self.n} --budget {self.budget} "
            f"--seeds {','.join(map(str, seeds))}"
        )

    @property
    def setting(self) -> Setting:
        return Setting(self.batch, self.n, self.budget // (self.batch * self.n), self.budget)


BLOCKS = {
    "mixed": Block("4,000 prompts: 30 % hopeless, 20 % solved, the rest between; all of it moves", "mixed"),
    "static": Block("the same pool, and nothing is learned", "static"),
    "hard": Block("half of the prompts hopeless, 5 % solved", "hard"),
    "easy": Block("40 % of the prompts solved, 5 % hopeless", "easy"),
    "large": Block("12,000 prompts: one pass for GRPO", "large"),
    "mixed, sources tell some": Block(
        "the mixed pool in 8 data sources, each prompt's rank by difficulty correlated 0.5 with its source's",
        "mixed:sources=8,told=0.5",
    ),
    "mixed, sources tell most": Block("the same, correlated 0.9", "mixed:sources=8,told=0.9"),
    "mixed, n = 16": Block("the mixed pool with groups of 16", "mixed", batch=32, n=16),
    "mixed, n = 64": Block("the mixed pool with groups of 64, Pilot-Commit's own size", "mixed", batch=16, n=64),
}

#: The issue's measure: a sequential method, a million prompts, a thousand steps.
SPEED = ("greso", "mixed:prompts=1000000,spill=0.005", Setting(256, 8, 1000, None))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        cpu = ""
    return {
        "cpu": cpu or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("verl-adaptive", "numpy", "hydra-core")},
    }


def measure_speed() -> dict[str, Any]:
    """One run, on one core."""
    preset, pool, setting = SPEED
    begun, used = time.perf_counter(), time.process_time()
    row = run_task(Task(preset, 0, setting, parse_pool(pool)[1]))
    return {
        "command": f'verl-adaptive simulate --pool "{pool}" --preset {preset} --batch 256 --n 8 --steps 1000 --seeds 0 '
        "--no-references",
        "prompts": 1_000_000,
        "steps": row["steps"],
        "rollouts": row["generated"],
        "seconds": round(time.perf_counter() - begun, 1),
        "processor_seconds": round(time.process_time() - used, 1),
        "load": round(os.getloadavg()[0], 1),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "machine": machine(),
    }


def make_row(key: tuple[str, str, int]) -> dict[str, Any]:
    """One run, by block, policy and seed."""
    name, preset, seed = key
    block = BLOCKS[name]
    row = run_task(Task(spelled(preset), seed, block.setting, parse_pool(block.pool)[1]))
    small = {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}
    small = {k: v for k, v in small.items() if k not in ("calibration", "by_start")}
    return {"block": name, **small, "preset": preset}


def made(wanted: list[tuple[str, str, int]], jobs: int) -> Iterator[dict[str, Any]]:
    """The runs, as they finish in order."""
    if jobs == 1:
        yield from map(make_row, wanted)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(make_row, wanted)


def save(path: Path, data: dict[str, Any]) -> None:
    """Write the results, one row a line; the old file stays whole until the new one is."""
    head = json.dumps({k: v for k, v in data.items() if k != "rows"}, indent=1)[:-2]
    rows = ",\n".join(json.dumps(row) for row in data["rows"])
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f'{head},\n "rows": [\n{rows}\n]\n}}\n')
    temporary.replace(path)


# -- the report -------------------------------------------------------------------------------------------------------


def spread(values: list[float]) -> str:
    """Lowest to highest."""
    return f"{min(values):.2f} to {max(values):.2f}"


def verdict(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What the tables say of each policy, in one line each, from the numbers alone."""
    lines = [
        "| policy | rollouts an informative group, GRPO's being 1 | efficiency: signal | efficiency: pool "
        "| pools below GRPO (signal, pool) | pool against `oracle` | pools at 0.9 (signal, pool, pool against `oracle`) |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for policy in POLICIES:
        if policy in ("grpo", *REFERENCES):
            continue
        cells, below, top = [], [], []
        for key in ("efficiency_signal", "efficiency_pool_end", "efficiency_pool_end_drawn"):
            entries = [(e[key], e[f"{key}_half"] or 0.0) for e in of(found, policy).values() if e[key] is not None]
            cells.append(spread([v for v, _ in entries]))
            below.append(f"{sum(v + half < 0 for v, half in entries)} of {len(entries)}")
            top.append(sum(v >= 0.9 for v, _ in entries))
        ratio = spread(list(against(found, policy, "grpo").values()))
        lines.append(
            f"| `{policy}` | {ratio} | {cells[0]} | {cells[1]} | {below[0]}, {below[1]} | {cells[2]} "
            f"| {', '.join(map(str, top))} |"
        )
    return lines


def of(found: dict[str, list[dict[str, Any]]], policy: str) -> dict[str, dict[str, Any]]:
    """A policy's entry in each block."""
    return {name: next(e for e in entries if e["preset"] == policy) for name, entries in found.items()}


def against(found: dict[str, list[dict[str, Any]]], policy: str, other: str) -> dict[str, float]:
    """Rollouts for an informative group, relative to another policy's, in each block."""
    ours, theirs = of(found, policy), of(found, other)
    key = "rollouts_per_informative"
    return {name: ours[name][key] / theirs[name][key] for name in found}


def findings(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The papers' claims that a simulation can check, with what the pools show."""
    fair = "dapo adaptive.sampler.round.adaptive=true"
    methods = [p for p in POLICIES if p not in ("grpo", *REFERENCES)]
    best = {
        key: max((e[key], p, n) for p in methods for n, e in of(found, p).items() if e[key] is not None)
        for key in ("efficiency_signal", "efficiency_pool_end")
    }
    signal, pool = (f"{v:.2f} (`{p}`, pool {n})" for v, p, n in best.values())
    full = {n: e["efficiency_pool_end_drawn"] for n, e in of(found, "full").items()}
    full = {n: value for n, value in full.items() if value is not None}
    there = [f"`{n}`" for n, value in full.items() if value >= 0.9]
    share = {n: of(found, "cero")[n]["mixed_share"] / of(found, "grpo")[n]["mixed_share"] for n in found}
    compute, grpo = (
        [e["compute"] / (4 * (e["compute"] - 6 * e["trained_tokens"])) for e in of(found, p).values()]
        for p in ("aero", "grpo")
    )
    pilots = against(found, ON_POLICY, "grpo")
    return [
        f"* **0.9 of the oracle's gain** is the aim. The most that any policy reaches is {signal} by signal and {pool} by "
        "what the pool learns. Of what the pool learns with `oracle`, which draws prompts as the oracle of the training "
        f"benchmarks does, `full` makes {spread(list(full.values()))}; 0.9 in {', '.join(there) or 'no pool'}.",
        f"* **GRESO** needs {spread(list(against(found, 'greso', 'dapo').values()))} of DAPO's rollouts for an informative "
        f"group, and {spread(list(against(found, 'greso', fair).values()))} of those of DAPO with GRESO's own round size. "
        "Its paper reports 0.30 to 0.67 of dynamic sampling's rollouts, over more passes. Where GRPO makes one pass "
        f"(`large`) or less (`mixed, n = 64`) there is next to no history: "
        f"{against(found, 'greso', 'dapo')['large']:.2f} and {against(found, 'greso', 'dapo')['mixed, n = 64']:.2f} of DAPO's.",
        f"* **Pilot-Commit**, on-policy, needs {spread(list(pilots.values()))} of GRPO's rollouts for an informative group "
        f"({pilots['mixed']:.2f} in groups of 8, {pilots['mixed, n = 16']:.2f} of 16 and {pilots['mixed, n = 64']:.2f} of 64 "
        "on the mixed pool). Its paper reports 1/1.9 to 1/1.5 of GRPO's rollouts to a target, with groups of 64 and 128 and "
        "1.5 times the updates a step.",
        f"* **CERO**'s share of mixed groups is {spread(list(share.values()))} of GRPO's. Its paper reports 57.3 % against "
        "52.7 % for the same sizes drawn at random, 1.09 times.",
        f"* **AERO** spends {spread(compute)} of the compute (2 a generated token, 6 a trained one) of a GRPO that trains every "
        f"row, for each generated token; its paper reports about 0.52. GRPO without the rows of zero advantage, as in every "
        f"preset here, spends {spread(grpo)}. AERO's signal for a generated rollout is "
        f"{spread([e['signal'] / of(found, 'grpo')[n]['signal'] for n, e in of(found, 'aero').items()])} of GRPO's.",
    ]


def section(data: dict[str, Any]) -> list[str]:
    """The section of RESULTS.md; the tables of single pools are what ``verl-adaptive simulate`` prints."""
    speed, where = data["speed"], data["machine"]
    found = {}
    for name in BLOCKS:
        by = {p: [r for r in data["rows"] if r["block"] == name and r["preset"] == p] for p in POLICIES}
        found[name] = summarise([row for rows in by.values() for row in rows])
    seeds = sorted({row["seed"] for row in data["rows"]})
    lines = [
        "## In the simulator",
        "",
        f"`python -m benchmarks.simulate`: every policy at 102,400 generated rollouts (a run ends with the step that reaches "
        f"them), {len(seeds)} seeds, the package's own presets and engine against pools whose pass rates are known. "
        f"`full` is short for `{spelled('full')}`. "
        "[How the pools learn, and what every column means](../docs/simulate.md).",
        "",
        f"**What this cannot tell.** {LIMITS}",
        "",
        "*Efficiency* is the share of the gain over GRPO that `oracle_best` makes, which rolls out the prompts of the largest "
        "p(1 − p): of the gradient signal for each generated rollout, and of what the pool learned. *Against `oracle`*: the "
        "same for the oracle that draws in proportion to p(1 − p), the reference of the in-process benchmark. 0 is GRPO. "
        "Where the oracle gains nothing there is a dash.",
        "",
        "### Over all pools",
        "",
        "A step moves a pool by the mean gradient of its batch, so a policy that makes more steps of the same rollouts lets "
        "the pool learn more, as in training: read *pool* beside *steps*. The oracles choose prompts for whole groups; a "
        "policy that spends less than a group on a prompt can pass them.",
        "",
        "Lowest to highest. A policy is *below GRPO* in a pool if the 95 % interval of its efficiency lies below zero.",
        "",
        *verdict(found),
        "",
        "### What it says of the papers' claims",
        "",
        *findings(found),
    ]
    lines += [
        "",
        "### Speed of the simulator",
        "",
        f"`{speed['command']}`: {speed['prompts']:,} prompts, {speed['steps']:,} steps, {speed['rollouts']:,} rollouts in "
        f"{speed['seconds']} s ({speed['processor_seconds']} s of one core; load average {speed['load']} on "
        f"{speed['machine']['cores']} cores), {speed['memory_mib']:,} MiB. Target: under 60 s.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores, Python {where['python']}, "
        + ", ".join(f"{k} {v}" for k, v in where["versions"].items())
        + ".",
    ]
    return [*lines, ""]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to this less one (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each (default: %(default)s)")
    parser.add_argument("--speed", action="store_true", help="measure the speed again, and nothing else")
    parser.add_argument("--fresh", action="store_true", help="run again what the results hold")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "simulate.json")
    options = parser.parse_args()
    data: dict[str, Any] = {"benchmark": "simulate", "rows": [], "speed": None}
    if options.results.exists():
        data = json.loads(options.results.read_text())
    if options.speed or not data["speed"]:
        data["speed"] = measure_speed()
        print(f"speed: {data['speed']['seconds']} s", flush=True)
    have = {} if options.fresh else {(r["block"], r["preset"], r["seed"]): r for r in data["rows"]}
    wanted = [(b, p, s) for s in range(options.seeds) for b in BLOCKS for p in POLICIES if (b, p, s) not in have]
    data |= {"command": " ".join(["python -m benchmarks.simulate", *sys.argv[1:]]), "machine": machine()}
    for done, row in enumerate(made([] if options.speed else wanted, options.jobs), 1):
        have[row["block"], row["preset"], row["seed"]] = row
        print(f"[{done}/{len(wanted)}] {row['block']}, {row['preset']}, seed {row['seed']}", flush=True)
        if done % 20 == 0 or done == len(wanted):
            data["rows"] = [have[key] for key in sorted(have)]
            save(options.results, data)
    data["rows"] = [have[key] for key in sorted(have)]
    save(options.results, data)


if __name__ == "__main__":
    main()
