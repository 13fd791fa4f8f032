"""A training run in miniature, to be killed: decisions from statistics and state, snapshots, journal, resume.

    python -m tests.stats.driver FOLDER --steps 60 --every 5 --seed 0
    python -m tests.stats.driver FOLDER --steps 60 --every 5 --seed 0 --kills 20

With ``--kills`` it is a supervisor: it forks the driver again and again and kills it at random moments, until that
many have died, then lets it finish; a run that finishes early is compared and followed by one with another seed. Each
run is compared with the same run left alone: every decision ever taken (also by attempts that died), the final table,
the final state and the journal's live line must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.stats.made import make_keys, written
from verl_adaptive.groups import Groups
from verl_adaptive.rng import Draw
from verl_adaptive.stats import Column, Journal, StatsTable, fingerprint, open_run, read_snapshot, write_snapshot
from verl_adaptive.stats.reader import JournalReader

PROMPTS = 3000
BATCH = 96
_COLUMNS = {"kept": Column("u4", 0), "skip": Column("f4", float("nan"))}


def _rewards(keys: np.ndarray, visit: np.ndarray, sizes: np.ndarray) -> list[list[float]]:
    """The environment: rewards depend on the prompt and on how often it was visited, never on the process."""
    difficulty = Draw(99, 0).uniform("difficulty", keys["hi"], keys["lo"])
    out = []
    for key, times, size, hard in zip(keys, visit, sizes, difficulty, strict=True):
        u = Draw(7, int(times)).uniform("rollout", key["hi"], key["lo"], np.arange(size))
        out.append(np.round((u > hard).astype(float) + 0.01 * u * (hard > 0.5), 6).tolist())
    return out


class Run:
    """Everything the decisions of a step depend on: table, controller, and groups held over from the step before."""

    def __init__(self, folder: Path, seed: int, forget: str | None = None) -> None:
        self.folder, self.seed = folder, seed
        keys = make_keys(PROMPTS, seed)
        self.data = keys[np.random.default_rng(seed + os.getpid()).permutation(PROMPTS)]  # order must not matter
        self.dataset = fingerprint(self.data)
        self.step = 0
        self.table = StatsTable()
        self.state: dict[str, Any] = {
            "p": 0.5,
            "submission": 0,
            "held": np.empty(0, dtype=np.uint64),
            "moments": [0.0, 0.0],
        }
        marker, parent = folder / "latest", None
        if marker.exists():
            self.step = int(marker.read_text())
            self.table, self.state, manifest = read_snapshot(folder / f"global_step_{self.step}" / "adaptive")
            parent = manifest["meta"].pop("attempt")
            assert manifest["meta"] == {"policy": "driver", "dataset": self.dataset, "step": self.step}
            if forget is not None:  # a negative control: something that a careless resume loses
                self.state[forget] = {"p": 0.5, "submission": 0, "held": np.empty(0, dtype=np.uint64)}[forget]
        self.table.declare("driver", _COLUMNS)
        self.row_of = self.table.rows_for(self.data)
        self.journal = Journal(folder / "adaptive")
        self.journal.begin(self.step, keys, ["s"] * PROMPTS, parent=parent)

    def decide(self) -> np.ndarray:
        """The prompts of a step, as keys in the order of submission; held ones first."""
        table, draw = self.table, Draw(self.seed, self.step)
        order = np.argsort(draw.bits("order", table.key_hi, table.key_lo), kind="stable")
        streak = table.col("streak")[order].astype(np.float64)
        keep = draw.uniform("gate", table.key_hi[order], table.key_lo[order]) < np.maximum(
            self.state["p"] ** streak, 0.01
        )
        chosen = order[keep][: BATCH - len(self.state["held"]) // 2]
        held = np.asarray(self.state["held"], dtype=np.uint64).reshape(-1, 2)
        return np.concatenate([held, np.stack([table.key_hi[chosen], table.key_lo[chosen]], axis=1)])

    def train(self) -> str:
        """One step.

        Returns:
            A digest of its decisions and of the state they left.
        """
        self.step += 1
        words = self.decide()
        keys = np.ascontiguousarray(words).view(self.data.dtype).reshape(len(words))
        rows = self.table.rows_for(keys, create=False)
        visits = self.table.col("visits")[rows]
        sizes = np.where(visits == 0, 2, 2 + (self.table.col("streak")[rows] % 3))
        draw = Draw(self.seed, self.step)
        failed = draw.uniform("fail", keys["hi"], keys["lo"]) < 0.02
        submissions = self.state["submission"] + np.arange(len(rows))
        groups = Groups.from_lists(rows, _rewards(keys, visits, sizes), submission=submissions, failed=failed)
        kept = ~groups.degenerate(1e-6) & ~failed
        held = np.flatnonzero(kept)[BATCH // 3 :][:8]  # a few informative ones wait for the next step
        self.state["held"] = words[held].ravel()
        self.state["submission"] += len(rows)
        self.table.observe(groups, self.step, tolerance=1e-6)
        self.table.col("driver.kept")[rows[kept]] += 1
        self.table.col("driver.skip")[rows] = draw.uniform("skip", keys["hi"], keys["lo"])
        share = float(kept.mean())
        self.state["p"] = float(np.clip(self.state["p"] + 0.05 * (share - 0.4), 0.05, 0.95))
        self.state["moments"] = [self.state["moments"][0] + share, self.state["moments"][1] + share * share]
        outcomes = np.where(failed, "failed", np.where(kept, "trained", "zero variance"))
        ledger = {"rollouts": groups.rollouts, "kept": int(kept.sum())}
        self.journal.commit_step(
            self.step, groups, keys, outcomes, ledger, self.state | {"held": len(held)}, sources=["s"] * len(keys)
        )
        return hashlib.blake2b(words.tobytes() + sizes.tobytes() + repr(self.summary()).encode()).hexdigest()[:32]

    def summary(self) -> dict[str, Any]:
        """The state without its arrays' addresses, for digests."""
        return {name: np.asarray(value).tolist() for name, value in self.state.items()}

    def save(self) -> None:
        """Snapshot, then the marker, as verl does."""
        meta = {"policy": "driver", "dataset": self.dataset, "step": self.step, "attempt": self.journal.id}
        write_snapshot(self.folder / f"global_step_{self.step}" / "adaptive", self.table, self.state, meta=meta)
        temporary = self.folder / "latest.tmp"
        temporary.write_text(str(self.step))
        os.replace(temporary, self.folder / "latest")

    def digest(self) -> str:
        """Table and state, whatever the order of the rows."""
        order = np.lexsort((self.table.key_lo, self.table.key_hi))
        whole = hashlib.blake2b(repr(self.summary()).encode())
        for name in sorted(self.table.columns):
            whole.update(name.encode() + self.table.col(name)[order].tobytes())
        return whole.hexdigest()


def drive(folder: Path, steps: int, every: int, seed: int, forget: str | None = None) -> None:
    """Train to the end from wherever the folder is; decisions go to ``decisions``, the result to ``done``."""
    run = Run(folder, seed, forget)
    with open(folder / "decisions", "a", encoding="ascii") as log:
        while run.step < steps:
            decision = run.train()
            log.write(f"{run.step} {decision}\n")
            log.flush()
            if run.step % every == 0:
                written(run.journal)  # for the comparison: a kill loses what waits, and the resume says so
                run.save()
    run.journal.close()
    if run.journal._lost:
        raise RuntimeError(f"journal: {run.journal._without()}")
    (folder / "done").write_text(run.digest())


def live_line(folder: Path) -> str:
    """A digest of the journal's live line: steps, ledgers, scalars and observations."""
    run = open_run(folder / "adaptive")
    steps = run.steps.drop_columns(["attempt", "wall_time"])
    observations = pa.concat_tables(run.observations()).drop_columns(["attempt"])
    if run.gaps():
        raise RuntimeError(f"gaps in the journal: {run.gaps()}")
    whole = hashlib.blake2b()
    for table in (steps, observations):
        whole.update(repr(table.to_pydict()).encode())
    return whole.hexdigest()


def check_files(folder: Path) -> None:
    """The journal and the snapshot that resume would take can be read."""
    if list(folder.glob("adaptive/attempt-*/attempt.json")):
        for _ in open_run(folder / "adaptive").observations():
            pass
    marker = folder / "latest"
    if marker.exists():
        read_snapshot(folder / f"global_step_{marker.read_text()}" / "adaptive")


def _fork(*args: Any) -> int:
    """The driver in a child process, without paying for its imports each time."""
    process = os.fork()
    if process:
        return process
    try:
        drive(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _finish(process: int, wait: float | None) -> int | None:
    """Wait for a child, at most ``wait`` seconds.

    Returns:
        Its exit status, ``None`` if it still runs.
    """
    end = None if wait is None else time.monotonic() + wait
    while True:
        done, status = os.waitpid(process, 0 if end is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(0.0005)


def supervise(folder: Path, steps: int, every: int, seed: int, kills: int, forget: str | None = None) -> dict[str, Any]:
    """Kill the driver ``kills`` times in all, and compare every run with one that was left alone.

    Raises:
        RuntimeError: a difference, a damaged file, or a driver that failed by itself.
    """
    draw = random.Random(seed)
    report: dict[str, Any] = {"kills": 0, "runs": 0, "attempts": 0, "decisions": 0, "repeated": 0, "branches": 0}
    while report["kills"] < kills:
        reference, victim = folder / f"reference-{seed}", folder / f"victim-{seed}"
        for path in (reference, victim):
            path.mkdir(parents=True)
        began = time.monotonic()
        if _finish(_fork(reference, steps, every, seed), None) != 0:
            raise RuntimeError("the driver that was left alone failed")
        whole = time.monotonic() - began
        # Enough time for some progress, little enough that a run dies several times.
        while report["kills"] < kills:
            process = _fork(victim, steps, every, seed, forget)
            report["attempts"] += 1
            status = _finish(process, draw.uniform(0, 0.5 * whole))
            if status is None:
                os.kill(process, signal.SIGKILL)
                status = _finish(process, None)
                report["kills"] += status == -signal.SIGKILL
            if status not in (0, -signal.SIGKILL):
                raise RuntimeError(f"the driver failed by itself with status {status}")
            check_files(victim)
            if status == 0:
                break
        else:
            report["attempts"] += 1
            if _finish(_fork(victim, steps, every, seed, forget), None) != 0:
                raise RuntimeError("the driver failed to finish")
        if (victim / "done").read_text() != (reference / "done").read_text():
            raise RuntimeError(f"seed {seed}: final table or state differ")
        expected = dict(line.split() for line in (reference / "decisions").read_text().splitlines())
        lines = (victim / "decisions").read_text().splitlines()
        for line in lines:
            step, decision = line.split()
            if expected[step] != decision:
                raise RuntimeError(f"seed {seed}: the decisions of step {step} differ")
        if live_line(victim) != live_line(reference):
            raise RuntimeError(f"seed {seed}: the journal's live line differs")
        report["branches"] += len(JournalReader(victim / "adaptive").live)
        report["runs"] += 1
        report["decisions"] += len(lines)
        report["repeated"] += len(lines) - steps
        seed += 1
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--forget", choices=("p", "submission", "held"), help="lose this on resume, to see it noticed")
    args = parser.parse_args()
    if args.kills:
        report = supervise(args.folder, args.steps, args.every, args.seed, args.kills, args.forget)
        json.dump(report, sys.stdout)
    else:
        args.folder.mkdir(parents=True, exist_ok=True)
        drive(args.folder, args.steps, args.every, args.seed)


if __name__ == "__main__":
    main()
