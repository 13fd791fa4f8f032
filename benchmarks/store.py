"""What the statistics of a long run cost: the journal that training writes and people read, the table, a snapshot.

    python -m benchmarks.store
    python -m benchmarks.store --former FOLDER     # and the journal of another commit, which kept SQLite, in the same run

FOLDER is another checkout: ``git archive ff7a59c verl_adaptive | tar -x -C FOLDER``; it needs SQLAlchemy. Each journal is
written and read in a process of its own: a long one in memory (``/dev/shm``), so that the disk's noise is in none of its
figures, and a short one on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.stats import KEY_DTYPE, StatsTable, read_snapshot, write_snapshot
from verl_adaptive.stats import Journal as JournalClass

ROLLOUTS = 8
#: Steps, and groups in each: a very long run of very small steps, and a run of usual ones.
SHAPES = ((100_000, 8), (2_000, 1024))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that ``work`` took, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def keys_of(count: int) -> np.ndarray:
    """Keys as content hashes look."""
    return np.random.default_rng(0).integers(0, 2**64, (count, 2), dtype=np.uint64).view(KEY_DTYPE).reshape(count)


def step_of(draw: np.random.Generator, count: int, size: int) -> Groups:
    """One step's groups, on random rows."""
    rewards = draw.integers(0, 2, (size, ROLLOUTS)).astype(float).tolist()
    return Groups.from_lists(draw.integers(0, count, size), rewards)


def journal(keys: np.ndarray, where: Path, steps: int, size: int, former: bool) -> dict[str, float]:
    """Write a journal and read it again; ``former``: by the interface of SQLite's."""
    draw = np.random.default_rng(1)
    scalars = {f"adaptive/sampler/metric_{i}": float(draw.random()) for i in range(30)}
    account = dict.fromkeys(("generated", "trained", "surplus", "held"), 64) | {"dropped": {"all_wrong": 0}}
    ledger = {scope: {"rollouts": account, "tokens": account} for scope in ("step", "run")}
    made = [step_of(draw, len(keys), size) for _ in range(50)]
    out: dict[str, float] = {}
    if former:
        url = f"sqlite:///{where}/journal.sqlite"
        seconds, writer = timed(lambda: JournalClass.open(url, run_id="benchmark"))
    else:
        writer = JournalClass(where)
        seconds, _ = timed(lambda: writer.begin(0, keys, ["source"] * len(keys)))
    out["begin, s"] = seconds
    began, waited = time.perf_counter(), np.zeros(steps)
    with writer:
        for step in range(1, steps + 1):
            groups = made[step % len(made)]
            words = ["trained"] * size, ledger, scalars
            waited[step - 1], _ = timed(
                lambda: writer.commit_step(step, groups, keys[groups.row], *words, sources=["source"] * size)  # noqa: B023
            )
            if not former and step % 200 == 0:
                assert writer.flush(600), writer.trouble
    out["a step, ms"] = 1000 * (time.perf_counter() - began) / steps
    for name, q in (("median", 50), ("p99", 99)):
        out[f"commit, {name}, ms"] = 1000 * float(np.percentile(waited, q))
    out["size, MB"] = sum(path.stat().st_size for path in where.rglob("*") if path.is_file()) / 1e6
    if former:
        from verl_adaptive.stats import open_store  # type: ignore[attr-defined]

        out["open, newest step, ms"] = 1000 * timed(lambda: open_store(url).newest_arrow())[0]
        store = open_store(url)
        out["all steps, s"] = timed(store.steps_arrow)[0]
        out["all observations, s"] = timed(lambda: sum(map(len, store.observation_pages())))[0]
        out["replay of the table, s"] = timed(store.table)[0]
    else:
        from verl_adaptive.stats import open_run

        out["open, newest step, ms"] = 1000 * timed(lambda: open_run(where).newest())[0]
        run = open_run(where)
        out["all steps, s"] = timed(lambda: run.steps)[0]
        out["all observations, s"] = timed(lambda: sum(map(len, run.observations())))[0]
        out["replay of the table, s"] = timed(lambda: run.table)[0]
    return out


def table(keys: np.ndarray, where: Path) -> dict[str, float]:
    """The table in memory, and a snapshot of it with real-valued rewards, which hardly two prompts share."""
    draw, count, made = np.random.default_rng(2), len(keys), StatsTable()
    out = {"filling the table, s": timed(lambda: made.rows_for(keys))[0]}
    out["table and index, bytes a prompt"] = made.nbytes / count
    for name in ("successes", "signal_sum", "signal_sqsum", "reward_sum"):
        made.col(name)[:] = draw.random(count) * 48
    for name, top in (("visits", 7), ("rollouts", 56), ("tokens", 300_000), ("streak", 4), ("last_step", 10_000)):
        made.col(name)[:] = draw.integers(0, top, count)
    groups = step_of(draw, count, 1024)
    seconds = [timed(lambda: made.observe(groups, 1, tolerance=0.0))[0] for _ in range(100)]
    out["observing 1,024 groups, median, ms"] = 1000 * float(np.median(seconds))
    out["snapshot, write, s"] = timed(lambda: write_snapshot(where, made, {}, meta={}))[0]
    out["snapshot, MB"] = sum(path.stat().st_size for path in where.iterdir()) / 1e6
    out["snapshot, load, s"] = timed(lambda: read_snapshot(where))[0]
    return out


def child(kind: str, options: argparse.Namespace, place: Path | None = None, **changed: int) -> dict[str, float]:
    """Measure in a process of its own, in a folder of ``place`` (by default the system's for temporary files)."""
    with tempfile.TemporaryDirectory(prefix="verl-adaptive-store-", dir=place) as folder:
        words = ["--one", kind, "--folder", folder]
        for name in ("prompts", "steps", "groups"):
            words += [f"--{name}", str(changed.get(name, getattr(options, name)))]
        package = options.former.resolve() if kind == "former" else Path(__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": str(package)}
        done = subprocess.run(
            [sys.executable, __file__, *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        return json.loads(done.stdout)


def one(options: argparse.Namespace) -> Mapping[str, float]:
    """What a child measures."""
    keys = keys_of(options.prompts)
    if options.one == "table":
        return table(keys, options.folder / "snapshot")
    return journal(keys, options.folder, options.steps, options.groups, options.one == "former")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=int, default=8, help=argparse.SUPPRESS)
    parser.add_argument("--former", type=Path, metavar="FOLDER", help="a checkout whose journal was SQLite's")
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="of the long journals (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        json.dump(one(options), sys.stdout)
        return
    from benchmarks.cells import load_average, machine, to_json, versions, write_whole

    load, kinds = load_average(), ["journal", *(["former"] if options.former else [])]
    rows: list[dict[str, Any]] = []
    for steps, groups in SHAPES:
        found = [child(kind, options, options.folder, steps=steps, groups=groups) for kind in kinds]
        for made, kind in zip(found, kinds, strict=True):
            made["on the disk: a step, ms"] = child(kind, options, steps=1000, groups=groups)["a step, ms"]
        shape = f"{steps:,} steps of {groups:,} groups"
        values = {name: dict(zip(("now", "former"), (made[name] for made in found), strict=False)) for name in found[0]}
        rows += [{"shape": shape, "what": name, **value} for name, value in values.items()]
    rows += [{"shape": "the table", "what": name, "now": value} for name, value in child("table", options).items()]
    for row in rows:
        print(
            f"{row['shape']:<34}{row['what']:<40}{row['now']:12.3g}"
            + (f"{row['former']:12.3g}" if "former" in row else "")
        )
    report = {
        "command": "python -m benchmarks.store" + (" --former FOLDER" if options.former else ""),
        "machine": machine() | versions("numpy", "pyarrow", "SQLAlchemy"),
        "load": [load, load_average()],
        "prompts": options.prompts,
        "rows": rows,
    }
    if options.json:
        write_whole(options.json, to_json(report, "rows"))


if __name__ == "__main__":
    main()
