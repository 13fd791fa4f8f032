"""The two forms: which runs have which, and a change of form within a run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.world import make_engine, run, run_step
from verl_adaptive.policy import build_policy
from verl_adaptive.simulate.presets import compose_preset

PILOTS = ("adaptive/allocator=pilot_commit", "adaptive/filter=band")


@pytest.mark.parametrize("words", [("pilot_commit",), ("greso", *PILOTS), ("cero", *PILOTS)], ids=" ".join)
def test_the_default_commits_within_the_step_everywhere(words) -> None:
    assert not build_policy(compose_preset(list(words))).allocator.can_hold


@pytest.mark.parametrize("batch", [4, 8])
def test_groups_that_were_held_commit_under_the_other_form(batch) -> None:
    """At once, or in the steps after where there are more than the batch has places."""
    options = dict(filter="band", n=8, p=np.full(120, 0.5))
    before, after = ({"name": "pilot_commit", "n_pilot": 2, **more} for more in ({"form": "pipelined"}, {}))
    engine, world = make_engine("epoch", before, batch=batch, **options)
    run(engine, world, 3)
    held = set(engine.held.submission.tolist())
    assert len(held) >= batch
    other, _ = make_engine("epoch", after, world=world, table=engine.table, batch=4, **options)
    other.load_state_dict(engine.state_dict())
    results = run(other, world, 4, start=4)
    assert held & set(results[0].groups.submission[results[0].trained].tolist())
    assert not len(other.held) and all(r.trained.sum() == 4 for r in results)
    assert results[-1].groups.lag.max() == 0


def test_every_held_group_is_taken_up_the_first_prompt_of_the_data_set_among_them() -> None:
    allocator = {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined"}
    engine, world = make_engine("epoch", allocator, "band", n=8, batch=4, p=np.full(24, 0.5))
    for step in range(1, 20):
        run_step(engine, world, step)
        if 0 in engine.held.index:
            break
    other, _ = make_engine("epoch", allocator, "band", n=8, batch=4, world=world, table=engine.table)
    other.load_state_dict(engine.state_dict())
    assert 0 in other.held.index and np.array_equal(other.held.submission, engine.held.submission)


@pytest.mark.parametrize(("prompts", "cap", "seed"), [(5, 20, 6), (3, 24, 14), (7, 12, 8)])
def test_a_prompt_that_is_held_gets_no_second_group(prompts, cap, seed) -> None:
    """Where a cap holds pilots back and the data set is smaller than a step, prompts come a second time within it."""
    allocator = {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined"}
    rates, cap = np.full(prompts, 0.5), {"max_rollouts_per_step": cap}
    engine, world = make_engine("retire", allocator, "band", batch=4, p=rates, seed=seed, **cap)
    for step in range(1, 6):
        run_step(engine, world, step)
        assert len(set(engine.held.row.tolist())) == len(engine.held)
