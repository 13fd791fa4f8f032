"""What the prompt-statistics store costs: memory, observing, the journal, snapshots; at 10^5, 10^6 and 10^7 prompts.

    python -m benchmarks.store                         # all three sizes, in a temporary directory
    python -m benchmarks.store --sizes 1e6 --json store.json
    python -m benchmarks.store --sizes 1e6 --steps 100000  # and a journal of so many steps of 64 groups

The table is filled twice: with rewards of 0 and 1, where sums are whole numbers, and with real-valued rewards, where
hardly two prompts share a sum, which is the worst case for a snapshot's size. Each size runs in a process of its own,
so that peak memory means something.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.stats import (
    KEY_DTYPE,
    SHARED_COLUMNS,
    Journal,
    StatsTable,
    dataset_keys,
    open_run,
    read_snapshot,
    write_snapshot,
)

BATCH, ROLLOUTS = 1024, 8

#: What issue 3 asks for at 10^7 prompts.
TARGETS = {
    "bytes a prompt, shared columns and keys": 100.0,
    "observe + read 1,024 rows, p50 ms": 10.0,
    "journal commit of 1,024 groups, p99 ms": 50.0,
    "snapshot write, s": 10.0,
    "snapshot load, s": 6.0,
    "snapshot size, MB": 500.0,
}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that ``work`` took, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def random_keys(count: int, draw: np.random.Generator) -> np.ndarray:
    """Keys as content hashes look."""
    return draw.integers(0, 2**64, (count, 2), dtype=np.uint64).view(KEY_DTYPE).reshape(count)


def fill(table: StatsTable, draw: np.random.Generator, real: bool) -> None:
    """Statistics as after some epochs; ``real``: sums that hardly repeat."""
    count = len(table)
    visits = draw.integers(1, 7, count)
    rollouts = visits * ROLLOUTS
    successes = draw.binomial(rollouts, draw.random(count)).astype(np.float64)
    noise = draw.random(count) if real else 0.0
    columns: dict[str, np.ndarray] = {
        "visits": visits,
        "rollouts": rollouts,
        "successes": successes,
        "signal_sum": successes + noise,
        "signal_sqsum": successes + (draw.random(count) if real else 0.0),
        "reward_sum": successes + (draw.random(count) if real else 0.0),
        "tokens": rollouts * draw.integers(200, 6000, count),
        "streak": draw.integers(0, 4, count),
        "streak_kind": draw.integers(-1, 2, count),
        "first_step": draw.integers(0, 2000, count),
        "last_step": draw.integers(2000, 10000, count),
        "first_rate": draw.integers(0, 9, count) / 8,
        "last_rate": draw.integers(0, 9, count) / 8,
    }
    for name, values in columns.items():
        table.col(name)[:] = values


def batch(draw: np.random.Generator, count: int, size: int = BATCH) -> Groups:
    """One step's groups, on random rows."""
    rewards = draw.integers(0, 2, (size, ROLLOUTS)).astype(float).tolist()
    return Groups.from_lists(draw.integers(0, count, size), rewards)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def percentiles(seconds: list[float], name: str) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    p50, p99, worst = (1000 * float(np.percentile(seconds, q)) for q in (50, 99, 100))
    return {f"{name}, p50 ms": p50, f"{name}, p99 ms": p99, f"{name}, max ms": worst}


def observe(table: StatsTable, keys: np.ndarray, draw: np.random.Generator, rounds: int) -> list[float]:
    """Seconds for finding, observing and reading back one batch, ``rounds`` times."""
    out = []
    for step in range(rounds):
        groups = batch(draw, len(table))
        wanted = keys[groups.row]

        def work(groups: Groups = groups, wanted: np.ndarray = wanted, step: int = step) -> None:
            rows = table.rows_for(wanted)
            table.observe(groups, step, tolerance=0.0)
            for name in SHARED_COLUMNS:
                table.col(name)[rows]

        out.append(timed(work)[0])
    return out


def commit(journal: Journal, keys: np.ndarray, draw: np.random.Generator, rounds: int, size: int) -> list[float]:
    """Seconds that training waits for each of ``rounds`` commits of ``size`` groups; everything is on disk afterwards."""
    out = []
    scalars = {f"adaptive/sampler/metric_{i}": float(draw.random()) for i in range(30)}
    account = {
        "generated": 8192,
        "trained": 8192,
        "surplus": 0,
        "held": 0,
        "dropped": {"all_wrong": 0, "all_correct": 0},
    }
    ledger = {scope: {"rollouts": account, "tokens": account} for scope in ("step", "run")}
    made = [batch(draw, len(keys), size) for _ in range(20)]
    for step in range(1, rounds + 1):
        groups = made[step % len(made)]
        began = time.perf_counter()
        journal.commit_step(
            step, groups, keys[groups.row], ["trained"] * size, ledger, scalars, sources=["source"] * size
        )
        out.append(time.perf_counter() - began)
        if step % 200 == 0 and not journal.flush(600):
            raise RuntimeError(f"step {step} was not written: {journal.trouble}")
    return out


def journal_of(folder: Path, keys: np.ndarray, draw: np.random.Generator, rounds: int, size: int) -> dict[str, float]:
    """A journal of ``rounds`` steps of ``size`` groups: writing, its size, and reading it."""
    tail = f", {rounds:,} steps of {size:,} groups"
    began = time.perf_counter()
    with Journal(folder) as journal:
        journal.begin(0, keys, ["source"] * len(keys))
        out = percentiles(commit(journal, keys, draw, rounds, size), f"journal commit of {size:,} groups")
    out[f"written to disk, ms a step{tail}"] = 1000 * (time.perf_counter() - began) / rounds
    out[f"journal, MB{tail}"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    out[f"open and newest step, ms{tail}"] = 1000 * timed(lambda: open_run(folder).newest())[0]
    run = open_run(folder)
    out[f"steps, s{tail}"] = timed(lambda: run.steps)[0]
    seconds, rows = timed(lambda: sum(map(len, run.observations())))
    out[f"reading observations, us each{tail}"] = 1e6 * seconds / rows
    out[f"replay of the table, s{tail}"] = timed(lambda: run.table)[0]
    return out


def measure(count: int, folder: Path, steps: int, rounds: int) -> dict[str, float]:
    """Everything at one size."""
    draw = np.random.default_rng(0)
    out: dict[str, float] = {}
    rows = [
        {
            "data_source": "s",
            "prompt": [{"role": "user", "content": f"{i} " * 50}],
            "reward_model": {"ground_truth": "1"},
        }
        for i in range(20_000)
    ]
    out["hashing a data set, us a row"] = 1e6 * timed(lambda: dataset_keys(rows))[0] / len(rows)

    keys = random_keys(count, draw)
    table = StatsTable()
    out["first filling of the table, s"] = timed(lambda: table.rows_for(keys))[0]
    shared = sum(table.col(name).itemsize for name in SHARED_COLUMNS) + KEY_DTYPE.itemsize
    out["bytes a prompt, shared columns and keys"] = float(shared)
    out["bytes a prompt, index included"] = table.nbytes / count
    extra = random_keys(count // 100, draw)
    out["1% more prompts, s"] = timed(lambda: table.rows_for(extra))[0]
    table = StatsTable()
    table.rows_for(keys)
    out["fingerprint, s"] = timed(table.fingerprint)[0]

    for kind in ("0/1", "real"):
        fill(table, draw, real=kind == "real")
        tail = "" if kind == "0/1" else ", real-valued rewards"
        target = folder / f"snapshot-{kind.replace('/', '')}"
        out[f"snapshot write, s{tail}"] = timed(lambda target=target: write_snapshot(target, table, {}, meta={}))[0]
        out[f"snapshot size, MB{tail}"] = folder_bytes(target) / 1e6
        out[f"snapshot load, s{tail}"] = timed(lambda target=target: read_snapshot(target))[0]
    out |= percentiles(observe(table, keys, draw, rounds), "observe + read 1,024 rows")
    out["totals by data source, ms"] = 1000 * statistics.median(timed(table.view_by_source)[0] for _ in range(5))
    out["peak memory so far, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

    out |= journal_of(folder / "large", keys, draw, 5 * rounds, BATCH)
    if steps:
        out |= journal_of(folder / "long", keys, draw, steps, 64)
    return out


def machine() -> dict[str, Any]:
    """What the numbers were taken on; nothing that names the machine."""
    model = "unknown"
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    names = ("numpy", "pyarrow")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory GB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
        "load before": os.getloadavg()[0],
    }


def show(report: dict[str, Any]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    sizes = list(report["sizes"])
    table = Table(title="The prompt-statistics store")
    table.add_column("")
    for size in sizes:
        table.add_column(f"{int(size):,} prompts", justify="right")
    table.add_column("asked at 10^7", justify="right")
    for name in report["sizes"][sizes[-1]]:
        asked = next((limit for target, limit in TARGETS.items() if name.startswith(target)), None)
        cells = [f"{report['sizes'][size][name]:,.3g}" if report["sizes"][size][name] < 1000 else
                 f"{report['sizes'][size][name]:,.0f}" for size in sizes]  # fmt: skip
        table.add_row(name, *cells, "" if asked is None else f"≤ {asked:g}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(" · ".join(f"{name}: {value}" for name, value in report["machine"].items()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6, 1e7])
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--steps", type=int, default=0, help="of a second, long journal (default: none)")
    parser.add_argument("--rounds", type=int, default=100, help="batches to observe; five times as many commits")
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        json.dump(measure(args.one, args.folder, args.steps, args.rounds), sys.stdout)
        return
    root = Path(tempfile.mkdtemp(prefix="verl-adaptive-store-", dir=args.folder))
    try:
        report: dict[str, Any] = {
            "command": " ".join(["python -m benchmarks.store", *sys.argv[1:]]),
            "machine": machine(),
            "targets": TARGETS,
            "sizes": {},
        }
        for size in map(int, args.sizes):
            folder = root / str(size)
            folder.mkdir()
            command = [
                sys.executable,
                __file__,
                "--one",
                str(size),
                "--folder",
                str(folder),
                "--rounds",
                str(args.rounds),
            ]
            command += ["--steps", str(args.steps)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            report["sizes"][str(size)] = json.loads(done.stdout)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report["machine"]["load after"] = os.getloadavg()[0]
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
