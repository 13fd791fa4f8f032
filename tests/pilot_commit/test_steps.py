"""Pilot-Commit through the engine: whole steps, in both forms."""

from __future__ import annotations

import numpy as np
import pytest

from tests.world import World, make_engine, run, run_step
from verl_adaptive.engine import Engine

FORMS = {
    "on_policy": {"form": "on_policy"},
    "pipelined": {"form": "pipelined"},
    "fixed_size": {"form": "pipelined", "factor": 3.0, "choose": "max_variance"},
}
forms = pytest.mark.parametrize("form", FORMS)


def rates(count: int, spread: float = 1.5, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    """Logit-normal success rates."""
    return 1 / (1 + np.exp(-(shift + spread * np.random.default_rng(seed).standard_normal(count))))


def pilot_commit(form: str, sampler="epoch", filter="band", batch=8, n=16, M=2000, **more) -> tuple[Engine, World]:
    world = more.pop("world", None) or World(rates(M), failure=more.pop("failure", 0.0))
    allocator = {"name": "pilot_commit", **FORMS[form], **more.pop("allocator", {})}
    return make_engine(sampler, allocator, filter, batch=batch, n=n, world=world, **more)


# -- what a step gives --------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("failure", [0.0, 0.1])
def test_every_step_trains_b_whole_groups_whose_pilots_are_in_the_band(form, failure) -> None:
    engine, world = pilot_commit(form, failure=failure)
    commits = [12, 6] if failure else [12]  # one that fails loses half of its rollouts; its group trains on the rest
    held_before, waited, seen = 0, False, set()
    for result in run(engine, world, 25):
        trained = result.groups.select(result.trained)
        assert len(trained) == 8 and len(np.unique(trained.index)) == 8
        assert (trained.sum(trained.stage == 0) == 4).all()
        assert np.isin(trained.sum(trained.stage == 1), commits).all()
        assert result.ledger.rollouts.balanced(held_before) and result.ledger.tokens.trained > 0
        held_before = result.ledger.rollouts.held
        waited |= held_before > 0
        groups, failed = result.groups, result.outcome == "failed"
        successes = groups.sum(groups.success * (groups.stage == 0))
        inside = (successes >= 1) & (successes <= 3)
        assert inside[result.trained].all() and set(result.outcome[~inside & ~failed]) <= {"too_easy", "too_hard"}
        assert set(result.outcome[inside & ~failed]) <= {"trained", "surplus_pilot", "expired"}
        seen |= set(result.outcome)
        # Nothing but commits and pilots, and no commit for a group that does not train.
        assert set(groups.n[~failed]) <= {4, *(4 + n for n in commits)}
        assert (result.trained | (groups.n <= 4) | failed).all()
    assert engine.total.rollouts.balanced() and {"trained", "too_easy", "too_hard"} <= seen
    assert waited == (form != "on_policy")


@forms
@pytest.mark.parametrize("max_age", [1, 4])
def test_no_pilot_trains_that_is_older_than_the_bound(form, max_age) -> None:
    """Ages measured from outside: the step a submission was first asked for, and the step it trained in."""
    # Few prompts pass in some steps and many in others, so that the buffer both runs dry and lets groups expire.
    engine, world = pilot_commit(form, M=4000, allocator={"max_age": max_age})
    born: dict[int, int] = {}
    ages, expired = [], []
    for step in range(1, 61):
        world.p[:] = rates(4000, shift=4.0 if step // 5 % 2 else 0.0, spread=1.0)
        requests = engine.begin(step)
        while requests is not None:
            for submission in requests.submission[requests.stage == 0].tolist():
                born[submission] = step  # a submission that was not used in its step goes to another prompt
            requests = engine.receive(world.roll(requests))
        result = engine.finish()
        age = np.array([step - born[int(t)] for t in result.groups.submission])
        ages += age[result.trained].tolist()
        expired += age[result.outcome == "expired"].tolist()
    assert max(ages) <= max_age
    if form == "on_policy":
        assert set(ages) == {0} and not expired
    else:
        assert max(ages) >= 1 and set(expired) <= {max_age + 1}


def test_a_short_step_does_not_fall_back_on_pilots_that_are_too_old() -> None:
    """They have variance and are the oldest, so they came first. What they showed counts as old evidence, too."""
    engine, world = pilot_commit("pipelined", max_rounds=2, allocator={"max_age": 1}, on_exhausted="relax")
    run_step(engine, world, 1)
    old, observe, observed = engine.held.submission, engine.policy.observe, []
    engine.policy.observe = lambda groups, progress: (observed.append(groups.submission), observe(groups, progress))
    world.p[:] = 0.0
    result = run_step(engine, world, 3)
    assert sorted(np.concatenate(observed)) == sorted(result.groups.submission)
    assert len(old) and set(result.outcome[np.isin(result.groups.submission, old)]) == {"expired"}
    assert (engine.table.col("visits")[result.groups.row[result.outcome == "expired"]] == 1).all()
    assert result.trained.sum() == 8 and set(result.groups.lag[result.outcome == "expired"]) == {2}


# -- other parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filter", ["informative", "keep_all"])
@forms
def test_pilots_alone_never_train_whatever_the_filter(form, filter) -> None:
    engine, world = pilot_commit(form, filter=filter, n=32)
    seen = set()
    for result in run(engine, world, 10):
        assert (result.groups.n[result.trained] == 32).all() and result.trained.sum() == 8
        seen |= set(result.outcome)
    assert "incomplete" in seen


# -- figures ------------------------------------------------------------------------------------------------


def test_selection_bias_of_pilots_is_visible() -> None:
    """Prompts chosen for mixed pilots: on a hard pool the pilots' pass rate overstates the prompts'."""
    engine, world = pilot_commit("on_policy", batch=32, n=16, world=World(rates(5_000, shift=-3.0)))
    pilots, commits = [], []
    for step in range(1, 21):
        run_step(engine, world, step)
        metrics = engine.policy.allocator.metrics()
        assert metrics["committed_total"] == 32
        pilots.append(metrics["pilot_rate"])
        commits.append(metrics["commit_rate"])
    assert np.mean(pilots) > np.mean(commits) + 0.05


def test_a_step_without_a_commit_has_no_pass_rate_of_pilots() -> None:
    """It was 0, which pulled the curves and their mean down."""
    engine, world = pilot_commit("on_policy", on_exhausted="relax")
    world.p[:] = 0.0
    run_step(engine, world, 1)
    assert not {"pilot_rate", "commit_rate"} & engine.policy.allocator.metrics().keys()
    world.p[:] = 0.5
    run_step(engine, world, 2)
    metrics = engine.policy.allocator.metrics()
    assert metrics["pilot_rate"] > 0 and metrics["commit_rate"] > 0
    world.p[:] = 0.0
    run_step(engine, world, 3)
    assert not {"pilot_rate", "commit_rate"} & engine.policy.allocator.metrics().keys()
