"""Decisions of every preset in both engines, as they were recorded, made again.

``decisions.tar.xz`` holds a record a folder. Every event in it, requests, batches and drops, is as the tree of a commit made it,
and only the names of fields are today's:

========================  =====================================================================
most                      14f2ab6, the first in which groups commit in one order
``spo-``, ``mopps-async``  07bf57a, which draws prompts in flight for the time when they are free
``solo-``, ``sao-``       5e77ab0, in which the prior of a prompt fades with its visits
========================  =====================================================================

After a change of decisions that was meant, make again the records that it was meant to change, and name its commit here. After
a change of what a record holds (a key of the configuration, a column), make all of them again: those whose decisions are not
what they were are named::

    python -m tests.test_decisions [solo-sync solo-async …]
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.world import Arrivals, World, engine_of
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.policy import build_policy
from verl_adaptive.record import Recorder, replay
from verl_adaptive.simulate.presets import compose_preset, preset_names, split_words

ARCHIVE = Path(__file__).with_name("decisions.tar.xz")
RUNS = {
    **{name: name for name in preset_names()},
    "pipelined": "pilot_commit adaptive.allocator.form=pipelined",
    "reinforce_ada": "dapo adaptive/allocator=reinforce_ada",
    "cap": "aero adaptive.max_rollouts_per_step=24",
    "mopps": "dapo adaptive/sampler=mopps_by_source adaptive/allocator=aero",
}
STEPS = 12


def record(folder: Path, words: str, asynchronous: bool) -> None:
    """A run of 12 steps over 40 prompts, some hopeless and some solved, of which some groups fail."""
    config = replace(compose_preset(split_words(words)), seed=3)
    rates = np.random.default_rng(5).permutation(np.concatenate([np.zeros(8), np.ones(8), np.linspace(0.05, 0.95, 24)]))
    world = World(rates, 3, failure=0.05)
    async_facts = AsyncFacts(warmup=0 if build_policy(config).sampler.plans_steps else 4) if asynchronous else None
    engine = engine_of(config, world, steps=STEPS, async_facts=async_facts)
    recorder, arrivals = Recorder(folder, engine), Arrivals(world)
    for step in range(1, STEPS + 1):
        if engine.finished:
            break
        arrivals.step(engine, step)
    recorder.close()


def main(names: list[str]) -> None:
    """Make records again, all if there are no names; say of which the decisions are others."""
    made = {f"{name}-{mode}": (words, mode == "async") for name, words in RUNS.items() for mode in ("sync", "async")}
    with tempfile.TemporaryDirectory() as folder:
        if ARCHIVE.exists():
            unpack(folder)
        for name in names or made:
            before = decisions(Path(folder, name))
            shutil.rmtree(Path(folder, name), ignore_errors=True)
            record(Path(folder, name), *made[name])
            if decisions(Path(folder, name)) != before:
                print(f"{name}: other decisions than before")
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(Path(folder).rglob("*")):
                archive.add(path, path.relative_to(folder), recursive=False, filter=_nobodys)


def decisions(folder: Path) -> list[object]:
    """The digests of a record; none of one that is not there."""
    events = [json.loads(line) for path in folder.glob("attempt-0/events.jsonl") for line in path.open()]
    return [event.get(name) for event in events for name in ("asked", "digest", "end") if name in event]


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpack(folder: str | Path) -> None:
    """The records, a folder each."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder)  # our own; the argument `filter` came with Python 3.11.4


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decisions")
    unpack(folder)
    return folder


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", RUNS)
def test_decisions_are_those_that_were_recorded(records: Path, name: str, mode: str) -> None:
    report = replay(records / f"{name}-{mode}" / "attempt-0")
    assert report.identical, f"{name}, {mode}: {report.difference}"
    assert report.steps >= STEPS - 1 and report.open_step is None


def test_a_preset_of_each_name_is_recorded(records: Path) -> None:
    assert {path.name for path in records.iterdir()} == {
        f"{name}-{mode}" for name in RUNS for mode in ("sync", "async")
    }


if __name__ == "__main__":
    main(sys.argv[1:])
