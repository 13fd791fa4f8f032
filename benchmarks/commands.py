"""What the commands cost on large stores: seconds and peak memory of stats, export, report and compare.

    python -m benchmarks.commands                                   # 10^5, 10^6 and 10^7 prompts, in a temporary folder
    python -m benchmarks.commands --sizes 1e6 --json commands.json
    python -m benchmarks.commands --keep stores                     # leaves stores/<size>/ for trying things

A store is made as training would have left it: every prompt visited once in its data set's order, a fifth of them a
second time, 1,024 groups of 8 a step; the journal, the last checkpoint's snapshot and the data set in verl's format.
Each command runs in a process of its own, once, with the caches as the writing left them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cells import machine
from verl_adaptive.groups import Groups
from verl_adaptive.stats import StatsTable, dataset_keys, open_run, write_snapshot
from verl_adaptive.stats.journal import Journal
from verl_adaptive.stats.keys import KEY_DTYPE

GROUPS, ROLLOUTS = 1024, 8
_BATCH = 100_000
_SOURCES = ("dapo", "math", "deepmath", "openr1")


def write_dataset(path: Path, count: int) -> np.ndarray:
    """A data set in verl's format; the keys of its rows."""
    parts = [np.empty(0, dtype=KEY_DTYPE)]
    writer = None
    for start in range(0, count, _BATCH):
        rows = [
            {
                "data_source": _SOURCES[i % len(_SOURCES)],
                "prompt": [{"role": "user", "content": f"What is {i} times {i + 7}? Answer within \\boxed{{}}."}],
                "reward_model": {"style": "rule", "ground_truth": str(i * (i + 7))},
            }
            for i in range(start, min(start + _BATCH, count))
        ]
        parts.append(dataset_keys(rows))
        page = pa.Table.from_pylist(rows)
        writer = writer or pq.ParquetWriter(path, page.schema, compression="zstd")
        writer.write_table(page)
    if writer is not None:
        writer.close()
    return np.concatenate(parts)


def make(count: int, folder: Path) -> None:
    """Write ``train.parquet``, ``run/adaptive`` and ``run/global_step_N/adaptive``."""
    draw = np.random.default_rng(0)
    keys = write_dataset(folder / "train.parquet", count)
    rates = np.clip(draw.normal(0.5, 0.45, count), 0, 1)
    table = StatsTable()
    row_of = table.rows_for(keys, sources=[_SOURCES[i % len(_SOURCES)] for i in range(count)])
    order = np.concatenate([np.arange(count), draw.permutation(count)[: count // 5]])
    run = folder / "run"
    run.mkdir()
    run_account = {"generated": 0, "trained": 0, "held": 0, "dropped": {"all_correct": 0, "all_wrong": 0}}
    step = 0
    with Journal(run / "adaptive", {"run": "benchmark/commands", "preset": "dapo"}) as journal:
        journal.begin(0, keys, [_SOURCES[i % len(_SOURCES)] for i in range(count)])
        for start in range(0, len(order), GROUPS):
            step += 1
            chosen = order[start : start + GROUPS]
            wins = draw.random((len(chosen), ROLLOUTS)) < rates[chosen, None]
            groups = Groups.from_lists(row_of[chosen], wins.astype(float).tolist())
            table.observe(groups, step, tolerance=0.0)
            solved = wins.sum(axis=1)
            outcome = np.select([solved == 0, solved == ROLLOUTS], ["all_wrong", "all_correct"], default="trained")
            account = _account(outcome)
            _add(run_account, account)
            ledger = {
                "step": {"rollouts": account, "tokens": account},
                "run": {"rollouts": run_account, "tokens": run_account},
            }
            sources = [_SOURCES[i % len(_SOURCES)] for i in chosen.tolist()]
            scalars = {"adaptive/sampler/p_easy": 0.5}
            journal.commit_step(
                step, groups, keys[chosen], outcome, ledger, scalars, sources=sources, wall_time=1.7e9 + 60.0 * step
            )
            if step % 100 == 0:
                time.sleep(1)  # for the thread that writes: 1,000 steps may wait
    if (found := len(open_run(run).steps)) != step:
        raise RuntimeError(f"{found} steps of {step} were written")
    meta = {"step": step, "policy": "dapo", "policy_digest": "benchmark", "dataset": "benchmark"}
    write_snapshot(run / f"global_step_{step}" / "adaptive", table, {}, meta=meta)


def _account(outcome: np.ndarray) -> dict[str, Any]:
    amounts = {name: ROLLOUTS * int((outcome == name).sum()) for name in ("trained", "all_correct", "all_wrong")}
    trained = amounts.pop("trained")
    return {"generated": ROLLOUTS * len(outcome), "trained": trained, "held": 0, "dropped": amounts}


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for name, amount in more.items():
        if isinstance(amount, dict):
            _add(total[name], amount)
        else:
            total[name] += amount


def commands(folder: Path) -> dict[str, list[str]]:
    """What is measured: name → words after ``verl-adaptive``."""
    run, data, out = str(folder / "run"), str(folder / "train.parquet"), folder / "out"
    out.mkdir(exist_ok=True)
    (snapshot,) = (folder / "run").glob("global_step_*")
    band = ["--where", "0.1 <= pass_rate <= 0.9", "--overwrite"]
    return {
        "stats, journal": ["stats", run],
        "stats --where --sort, journal": [
            "stats",
            run,
            "--where",
            "visits > 1 and pass_rate < 0.2",
            "--sort",
            "tokens",
        ],
        "stats, snapshot": ["stats", str(snapshot)],
        "export to Parquet, journal": ["export", run, str(out / "p.parquet"), "--overwrite"],
        "export to Parquet, snapshot": ["export", str(snapshot), str(out / "q.parquet"), "--overwrite"],
        "export to CSV, snapshot": ["export", str(snapshot), str(out / "q.csv"), "--overwrite"],
        "export of observations, journal": [
            *("export", run, str(out / "o.parquet"), "--what", "observations", "--overwrite")
        ],
        "report, journal": ["report", run, "-o", str(out / "report.html")],
        "report --data, journal": ["report", run, "-o", str(out / "texts.html"), "--data", data],
        "export --data, journal": ["export", run, str(out / "kept.parquet"), "--data", data, *band],
        "export --data, snapshot": ["export", str(snapshot), str(out / "k.parquet"), "--data", data, *band],
        "compare, two snapshots": ["compare", str(snapshot), str(snapshot)],
    }


def measured(words: list[str], log: Path) -> dict[str, float]:
    """Seconds and peak memory of one command.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    with log.open("wb") as file:
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "verl_adaptive", *words], stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: status {process.returncode}: {log.read_text()}")
    return {"s": round(seconds, 2), "cpu s": round(usage.ru_utime + usage.ru_stime, 2), "MB": usage.ru_maxrss // 1000}


def show(report: dict[str, Any]) -> None:
    """A Markdown table, seconds and megabytes."""
    sizes = list(report["sizes"])
    print("| command | " + " | ".join(f"{int(size):,} prompts" for size in sizes) + " |")
    print("|:--|" + "--:|" * len(sizes))
    for name in report["sizes"][sizes[-1]]["commands"]:
        cells = [report["sizes"][size]["commands"][name] for size in sizes]
        print(f"| `{name}` | " + " | ".join(f"{c['s']:.1f} s, {c['MB']:,} MB" for c in cells) + " |")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e5, 1e6, 1e7])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="commands whose name contains one of these")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="leave the stores there, and take those that are there"
    )
    parser.add_argument("--json", type=Path, help="write the report there too")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="verl-adaptive-commands-"))
    root.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.commands", *(w for w in sys.argv[1:] if "/" not in w)]),
        "machine": machine(),
        "sizes": {},
    }
    try:
        for count in map(int, args.sizes):
            folder = root / str(count)
            began = time.perf_counter()
            if not (folder / "made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(count, folder)
                (folder / "made").touch()
            print(f"{count:,} prompts: made in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            found: dict[str, Any] = {
                "journal MB": sum(p.stat().st_size for p in (folder / "run" / "adaptive").rglob("*")) // 10**6
            }
            report["sizes"][str(count)] = {**found, "commands": {}}
            for name, words in commands(folder).items():
                if args.only is None or any(word in name for word in args.only):
                    report["sizes"][str(count)]["commands"][name] = measured(words, folder / "log.txt")
                    print(f"  {name}: {report['sizes'][str(count)]['commands'][name]}", file=sys.stderr, flush=True)
            for file in ("report.html", "texts.html"):
                if (folder / "out" / file).exists():
                    report["sizes"][str(count)][f"{file} KB"] = (folder / "out" / file).stat().st_size // 1000
    finally:
        if args.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    report["machine"]["load after"] = os.getloadavg()[0]
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
