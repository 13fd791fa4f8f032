"""A training run in miniature, to be killed: the package's engine in a fake world, snapshots, journal, resume.

    python -m tests.stats.driver FOLDER --kills 20 --seed 100

It forks the run again and again and kills it at random moments, until that many have died, then lets it finish; a run
that finishes early is compared and followed by one with another seed. Each run is compared with the same run left alone:
every decision ever taken (also by attempts that died), the final table, the final state and the journal's live line must
be equal bit for bit.
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
from tests.world import make_engine, run_step
from verl_adaptive.engine import Engine
from verl_adaptive.stats import Journal, StatsTable, open_run, read_snapshot, write_snapshot

STEPS, EVERY, PROMPTS = 40, 5, 600
#: Seconds that a step takes, more or less.
A_STEP = 0.01
#: Groups that wait for a step, a gate with state, and resampling: all that a resume has to bring back.
POLICY = ("greso", {"name": "pilot_commit", "form": "pipelined", "n_pilot": 4}, "band")


def digest(*parts: Any) -> str:
    return hashlib.blake2b("".join(map(repr, parts)).encode(), digest_size=16).hexdigest()


def state_of(engine: Engine) -> str:
    """Table and state, whatever the order of the rows."""
    table = engine.table
    order = np.lexsort((table.key_lo, table.key_hi))
    columns = [(name, table.col(name)[order].tobytes()) for name in sorted(table.columns)]
    held = engine.held
    waiting = (table.keys[held.row].tolist(), held.reward.tolist(), held.submission.tolist())
    return digest(columns, waiting, engine.policy.state_dict(), engine.total.as_dict())


def drive(folder: Path, seed: int, forget: bool = False) -> None:
    """Train to the end from wherever the folder is; decisions go to ``decisions``, the result to ``done``."""
    keys, marker, step, parent, state = make_keys(PROMPTS, seed), folder / "latest", 0, None, None
    table = StatsTable()
    if marker.exists():
        step = int(marker.read_text())
        table, state, manifest = read_snapshot(folder / f"global_step_{step}" / "adaptive")
        parent = manifest["meta"]["attempt"]
    else:
        table.rows_for(keys[np.random.default_rng(os.getpid()).permutation(PROMPTS)])  # order must not matter
    options = {"batch": 16, "n": 8, "steps": STEPS, "seed": seed, "M": PROMPTS}
    engine, world = make_engine(*POLICY, **options, table=table, keys=keys)
    world.failure = 0.02
    if state is not None:
        world.source.position = state["position"]
        # a negative control: something that a careless resume loses
        engine.load_state_dict(state["engine"] | ({"policy": engine.policy.state_dict()} if forget else {}))
    with Journal(folder / "adaptive") as journal, open(folder / "decisions", "a", encoding="ascii") as log:
        journal.begin(step, keys, ["s"] * PROMPTS, parent=parent)
        while step < STEPS:
            step += 1
            result = run_step(engine, world, step)
            groups = result.groups
            key, outcome = table.keys[groups.row], result.outcome.astype(str)
            journal.commit_step(step, groups, key, outcome, result.ledger.as_dict(), sources=["s"] * len(groups))
            log.write(
                f"{step} {digest(key.tolist(), groups.reward.tolist(), outcome.tolist(), result.trains.tolist())}\n"
            )
            log.flush()
            if step % EVERY == 0:  # snapshot, then the marker, as verl does
                written(journal)  # for the comparison: a kill loses what waits, and the resume says so
                saved = {"engine": engine.state_dict(), "position": world.source.position}
                where = folder / f"global_step_{step}" / "adaptive"
                write_snapshot(where, table, saved, meta={"attempt": journal.id})
                (folder / "latest.tmp").write_text(str(step))
                os.replace(folder / "latest.tmp", marker)
        assert written(journal)
    (folder / "done").write_text(state_of(engine))


def told(folder: Path) -> list[str]:
    """What a finished run left: its end, and the journal's live line without a gap."""
    run = open_run(folder / "adaptive")
    assert run.gaps() == [], f"gaps in the journal: {run.gaps()}"
    steps = run.steps.drop_columns(["attempt", "wall_time"])
    observations = pa.concat_tables(run.observations()).drop_columns(["attempt"])
    return [(folder / "done").read_text(), digest(steps.to_pydict()), digest(observations.to_pydict())]


def check_files(folder: Path) -> None:
    """The journal and the snapshot that resume would take can be read."""
    if list(folder.glob("adaptive/attempt-*/attempt.json")):
        list(open_run(folder / "adaptive").observations())
    if (folder / "latest").exists():
        read_snapshot(folder / f"global_step_{(folder / 'latest').read_text()}" / "adaptive")


def decided(folder: Path) -> int:
    """Steps that were written down, those that were made again included."""
    log = folder / "decisions"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def forked(folder: Path, *args: Any, steps: float | None = None) -> bool:
    """Run :func:`drive` in a child, without paying for its imports each time; whether it was killed after so many steps."""
    process = os.fork()
    if not process:
        try:
            drive(folder, *args)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    begun = decided(folder)
    while True:
        done, status = os.waitpid(process, 0 if steps is None else os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            assert code in (0, -signal.SIGKILL), f"the run failed by itself with status {code}"
            return code != 0
        if steps is not None and decided(folder) >= begun + int(steps):
            time.sleep(steps % 1 * A_STEP)  # somewhere in the next one
            os.kill(process, signal.SIGKILL)
            steps = None
        time.sleep(0.0005)


def supervise(folder: Path, seed: int, kills: int, forget: bool = False) -> dict[str, int]:
    """Kill the run so often in all, and compare every run with one that was left alone."""
    draw, report = random.Random(seed), {"kills": 0, "runs": 0, "repeated": 0}
    while report["kills"] < kills:
        reference, victim = folder / f"reference-{seed}", folder / f"victim-{seed}"
        for path in (reference, victim):
            path.mkdir(parents=True)
        forked(reference, seed)
        # enough for some progress, little enough that a run dies several times
        while forked(victim, seed, forget, steps=draw.uniform(0, STEPS / 2) if report["kills"] < kills else None):
            report["kills"] += 1
            check_files(victim)
        lines = (victim / "decisions").read_text().splitlines()
        expected = set((reference / "decisions").read_text().splitlines())
        assert set(lines) == expected, f"seed {seed}: decisions differ: {sorted(set(lines) - expected)[:3]}"
        assert told(victim) == told(reference), f"seed {seed}: table, state or journal differ"
        report["runs"] += 1
        report["repeated"] += len(lines) - STEPS
        seed += 1
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--forget", action="store_true", help="lose the policy's state on resume, to see it noticed")
    args = parser.parse_args()
    json.dump(supervise(args.folder, args.seed, args.kills, args.forget), sys.stdout)
