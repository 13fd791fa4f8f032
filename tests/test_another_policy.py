"""``adaptive.resume.allow=[policy]``: a run goes on with any other shipped policy from any shipped policy's snapshot."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.world import World, engine_of, run_step
from verl_adaptive.engine import Engine
from verl_adaptive.simulate.presets import compose_preset, preset_names, split_words
from verl_adaptive.stats import read_snapshot, write_snapshot
from verl_adaptive.stats.table import StatsTable

POLICIES = [
    *preset_names(),
    "pilot_commit adaptive.allocator.form=pipelined",
    "pilot_commit adaptive.allocator.form=pipelined adaptive.allocator.max_age=1",
    "dapo adaptive/allocator=reinforce_ada",
    "dapo adaptive/allocator=aero adaptive/sampler=retire",
    "dapo adaptive/sampler=mopps_by_source",
    "cero adaptive.sampler.g=1 adaptive.sampler.n_max=16",
    "dapo adaptive/filter=stack",
    "dapo adaptive/filter=stack adaptive.filter.filters=[informative,aero]",
    "solo adaptive.sampler.strength=3 adaptive.advantage.strength=3",
    "solo adaptive.sampler.prior=all adaptive.advantage.prior=all",
    "solo adaptive.sampler.weight=success",
    "dapo adaptive/sampler=mixed",
]
PROMPTS = 64


compose = functools.cache(lambda words: compose_preset(split_words(f"{words} adaptive.resume.allow=[policy]")))


def made(words: str, table: StatsTable) -> tuple[Engine, World]:
    config = copy.deepcopy(replace(compose(words), seed=3))
    world = World(np.linspace(0, 1, PROMPTS), 3, failure=0.05)
    sources = np.arange(PROMPTS).astype(str).astype("U1")
    return engine_of(config, world, steps=12, table=table, sources=sources), world


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory) -> dict:
    """A folder a policy, with its snapshot after three steps."""
    folders = {}
    for words in POLICIES:
        engine, world = made(words, StatsTable())
        for step in range(1, 4):
            run_step(engine, world, step)
        folders[words] = tmp_path_factory.mktemp("snapshot")
        write_snapshot(folders[words], engine.table, engine.state_dict(), meta={})
    return folders


@pytest.mark.parametrize("before", POLICIES)
def test_a_run_goes_on_with_another_policy(snapshots, before) -> None:
    at = POLICIES.index(before)
    # each after half of the others, and after groups held
    for after in POLICIES if "pipelined" in before else POLICIES[at % 2 :: 2]:
        table, state, _ = read_snapshot(snapshots[before])
        try:
            engine, world = made(after, table)
            engine.load_state_dict(state)
            held = state["total"]["rollouts"]["held"]
            for step in range(4, 6):
                account = run_step(engine, world, step).ledger.rollouts
                assert account.balanced(held)
                left = 0 if engine.policy.allocator.name == "pilot_commit" or step > 4 else held
                assert account.dropped.get("gone", 0) == left
                held = account.held
        except Exception as error:
            raise AssertionError(f"{before} -> {after}: {error!r}") from error
