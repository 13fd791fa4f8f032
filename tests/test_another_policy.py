"""``adaptive.resume.allow=[policy]``: a run goes on with any other shipped policy from any shipped policy's snapshot."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.world import World, keys_of, run_step
from verl_adaptive.config import RunFacts
from verl_adaptive.engine import Engine, make_engine
from verl_adaptive.policy import build_policy
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
    "greso adaptive.sampler.classify=mean",
    "cero adaptive.sampler.g=1 adaptive.sampler.n_max=16",
    "dapo adaptive/filter=stack",
    "dapo adaptive/filter=stack adaptive.filter.filters=[informative,aero]",
    "solo adaptive.sampler.strength=3 adaptive.advantage.strength=3",
    "solo adaptive.sampler.prior=all adaptive.advantage.prior=all",
    "solo adaptive.sampler.weight=success",
    "solo adaptive.sampler.weight=mixed adaptive.sampler.n=8",
]
PROMPTS = 64


compose = functools.cache(lambda words: compose_preset(split_words(f"{words} adaptive.resume.allow=[policy]")))


def engine_of(words: str, table: StatsTable) -> tuple[Engine, World]:
    config = copy.deepcopy(replace(compose(words), seed=3))
    batch, n = (32, 1) if config.batch_unit == "rollouts" else (4, 8)
    facts = RunFacts.of(config, batch=batch, n=n, steps=12, prompts=PROMPTS)
    world = World(np.linspace(0, 1, PROMPTS), 3, failure=0.05)
    row_of = table.rows_for(keys_of(PROMPTS), sources=np.arange(PROMPTS).astype(str).astype("U1"))
    return make_engine(build_policy(config), table, config, facts, row_of, world.source), world


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory) -> dict:
    """A folder a policy, with its snapshot after three steps."""
    folders = {}
    for words in POLICIES:
        engine, world = engine_of(words, StatsTable())
        for step in range(1, 4):
            run_step(engine, world, step)
        folders[words] = tmp_path_factory.mktemp("snapshot")
        write_snapshot(folders[words], engine.table, engine.state_dict(), meta={})
    return folders


@pytest.mark.parametrize("before", POLICIES)
def test_a_run_goes_on_with_another_policy(snapshots, before) -> None:
    at = POLICIES.index(before)
    for after in (
        POLICIES if "pipelined" in before else POLICIES[at % 2 :: 2]
    ):  # each after half of the others, and after groups held
        table, state, _ = read_snapshot(snapshots[before])
        try:
            engine, world = engine_of(after, table)
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
