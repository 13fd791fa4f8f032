"""Properties of the engine that hold whatever the parts: conservation, caps, order independence, exact resume."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.world import Arrivals, World, keys_of, make_engine, make_stream_engine, run, run_step
from verl_adaptive.engine import AsyncEngine, AsyncFacts, Requests, StepResult
from verl_adaptive.errors import AdaptiveError, Exhausted
from verl_adaptive.groups import Groups
from verl_adaptive.stats.table import StatsTable

ALLOCATORS = [
    {"name": "fixed"},
    {"name": "aero"},
    {"name": "aero", "budget": "per_prompt", "n_extra": 3, "u_res": 0.25},
    {"name": "reinforce_ada", "per_round": 3},
]
FILTERS = [{"name": "keep_all"}, {"name": "informative"}, {"name": "aero"}, {"name": "aero", "keep_degenerate": 0}]
ADVANTAGES = [{"name": "verl"}, {"name": "beta"}, {"name": "beta", "variant": "off"}, {"name": "discounted_beta"}]

setups = st.fixed_dictionaries(
    {
        "sampler": st.sampled_from(["epoch", "greso"]),
        "allocator": st.sampled_from(ALLOCATORS),
        "filter": st.sampled_from(FILTERS),
        "advantage": st.sampled_from(ADVANTAGES),
        "batch": st.integers(1, 6),
        "n": st.integers(2, 8),
        "M": st.integers(1, 20),
        "seed": st.integers(0, 10_000),
        "refill": st.booleans(),
        "max_rounds": st.sampled_from([1, 2, 5, 32]),
        "max_rollouts_per_step": st.sampled_from([None, 20, 60, 150]),
        "on_exhausted": st.sampled_from(["train_partial", "relax"]),
        "surplus": st.sampled_from(["discard", "train"]),
        "skip_zero": st.booleans(),
        "failure": st.sampled_from([0.0, 0.0, 0.2]),
        "shape": st.sampled_from(["even", "hard", "solved", "lost"]),
    }
)
quick = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def rates(shape: str, count: int) -> np.ndarray:
    even = (np.arange(count) + 0.5) / count
    return {"even": even, "hard": even**4, "solved": np.ones(count), "lost": np.zeros(count)}[shape]


def build(setup: dict, **more):
    options = {k: v for k, v in setup.items() if k not in ("failure", "shape")} | more
    world = World(rates(setup["shape"], setup["M"]), setup["seed"], failure=setup["failure"])
    options["keys"] = duplicated(setup["M"])
    return make_engine(world=world, **options)


def duplicated(count: int) -> np.ndarray:
    """Keys of a data set in which every fifth prompt repeats the one before."""
    keys = keys_of(count)
    keys[4::5] = keys[3 : 3 + len(keys) : 5][: len(keys[4::5])]
    return keys


class Recorder:
    """Drives an engine and keeps all it asked for."""

    def __init__(self, engine, world, shuffle: np.random.Generator | None = None) -> None:
        self.engine, self.world, self.shuffle = engine, world, shuffle
        self.requests: list[list[Requests]] = []

    def step(self, step: int) -> StepResult | str:
        """A step's result, or the message of the shortage that ended it."""
        rounds: list[Requests] = []
        self.requests.append(rounds)
        requests = self.engine.begin(step)
        while requests is not None:
            rounds.append(requests)
            results = self.world.roll(requests)
            if self.shuffle is not None:
                results = results.select(self.shuffle.permutation(len(results)))
            requests = self.engine.receive(results)
        try:
            return self.engine.finish()
        except Exhausted as error:
            return str(error)


def same_arrays(a, b, names) -> None:
    for name in names:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def same_result(a: StepResult | str, b: StepResult | str) -> None:
    if isinstance(a, str) or isinstance(b, str):
        assert a == b
        return
    same_arrays(a.groups, b.groups, [f.name for f in fields(Groups)])
    same_arrays(a, b, ["outcome", "trains", "ghost"])
    assert a.ledger == b.ledger
    assert (a.partial, a.note, a.rounds) == (b.partial, b.note, b.rounds)


def same_requests(a: list[list[Requests]], b: list[list[Requests]]) -> None:
    assert [len(step) for step in a] == [len(step) for step in b]
    for mine, theirs in zip(chain(*a), chain(*b), strict=True):
        same_arrays(mine, theirs, [f.name for f in fields(Requests)])


# -- every setup ----------------------------------------------------------------------------------------------


@quick
@given(setups)
def test_every_rollout_is_accounted_for(setup) -> None:
    engine, world = build(setup)
    recorder = Recorder(engine, world)
    for step in range(1, 4):
        result = recorder.step(step)
        if isinstance(result, str):
            return  # nothing to train on: the run ends with a message
        groups, ledger = result.groups, result.ledger
        assert ledger.rollouts.balanced() and ledger.tokens.balanced()
        assert ledger.rollouts.generated == groups.rollouts
        assert ledger.tokens.generated == groups.tokens.sum()
        assert ledger.rollouts.planned == groups.rollouts + groups.lost.sum()
        assert ledger.rollouts.trained == result.trains.sum()
        assert ledger.tokens.trained == groups.tokens[result.trains].sum()
        assert engine.total.rollouts.balanced() and engine.total.tokens.balanced()
    assert engine.total.rollouts.planned == sum(r.rollouts for r in chain(*recorder.requests))


class Spoiling(World):
    """Two rewards of five are NaN, as ``Queue.collect`` reports it: these rollouts are in no group."""

    def roll(self, requests: Requests) -> Groups:
        groups = super().roll(requests)
        alive = groups.tokens % 10 >= 4  # hashed: the same in whatever order they come back
        home, size = groups.group_of, len(groups)
        spoilt = np.bincount(home[~alive], minlength=size)
        cuts = np.cumsum(np.bincount(home[alive], minlength=size))[:-1]
        self.spoilt = getattr(self, "spoilt", 0) + int(spoilt.sum())
        self.asked = getattr(self, "asked", 0) + groups.rollouts
        self.tokens_made = getattr(self, "tokens_made", 0) + int(groups.tokens.sum())
        return Groups.from_lists(
            groups.row,
            np.split(groups.reward[alive], cuts),
            tokens=np.split(groups.tokens[alive], cuts),
            stage=np.split(groups.stage[alive], cuts),
            ticket=groups.ticket,
            index=groups.index,
            failed=(requests.stage == 0) & (groups.n - spoilt < groups.n / 2),
            lost=spoilt,
            spoilt=spoilt,
            spoilt_tokens=np.bincount(home[~alive], groups.tokens[~alive], minlength=size).astype(np.int64),
        )


@pytest.mark.parametrize("kind", ["rounds", "ordered", "async"])
def test_rollouts_without_a_reward_are_on_the_bill(kind, tmp_path) -> None:
    """All that the servers generated is in the account, top-ups and failed groups included; and it replays."""
    from verl_adaptive.record import Tape, replay

    parts, facts = ("epoch", "aero", "informative"), {"batch": 8, "n": 8, "M": 60}
    world = Spoiling((np.arange(60) + 0.5) / 60)
    if kind == "async":
        engine, _ = make_stream_engine(*parts, **facts, world=world, stream=AsyncFacts(warmup=8))
    else:
        engine, _ = make_engine(*parts, **facts, world=world, rounds=kind == "rounds")
    tape, arrivals, ledgers, held = Tape(tmp_path, engine), Arrivals(world), [], [0, 0]
    for step in range(1, 5):
        result = arrivals.step(engine, step) if isinstance(engine, AsyncEngine) else run_step(engine, world, step)
        ledgers.append(result.ledger)
        accounts = result.ledger.rollouts, result.ledger.tokens
        assert [a.balanced(before) for a, before in zip(accounts, held, strict=True)] == [True, True]
        held = [a.held for a in accounts]
    tape.close()
    total = engine.total
    on_their_way = arrivals.waiting
    assert world.spoilt > 100 and total.rollouts.dropped["failed"] > 0
    assert total.rollouts.generated == world.asked - sum(g.rollouts + int(g.spoilt.sum()) for g in on_their_way)
    made = world.tokens_made - sum(int(g.tokens.sum() + g.spoilt_tokens.sum()) for g in on_their_way)
    assert total.tokens.generated == made
    assert total.rollouts.dropped["lost"] == world.spoilt - sum(int(g.spoilt.sum()) for g in on_their_way)
    report = replay(tmp_path / "attempt-0")
    assert report.identical and report.ledgers == ledgers


def test_groups_of_older_files_have_lost_nothing_and_one_output_a_rollout() -> None:
    new = Groups.from_lists([3, 4], [[0.0, 1.0], [1.0]], tokens=[[9, 5], [7]], spoilt=[1, 0], shorter=[[4, 0], [2]])
    assert new.longest.tolist() == [5, 5, 5]
    assert new.select(np.array([1, 0])).longest.tolist() == [5, 5, 5]
    more = Groups.from_lists([3], [[0.0]], ticket=[0], tokens=[[8]], spoilt=[2], spoilt_tokens=[30], shorter=[[5]])
    merged = new.merge(more)
    assert merged.longest.tolist() == [5, 5, 3, 5] and merged.spoilt.tolist() == [3, 0]
    assert merged.spoilt_tokens.tolist() == [30, 0]
    saved = {f.name: getattr(new, f.name) for f in fields(Groups)}
    old = Groups(**{k: v for k, v in saved.items() if k not in ("spoilt", "spoilt_tokens", "shorter")})
    assert old.longest.tolist() == [9, 5, 7] and old.spoilt.tolist() == old.spoilt_tokens.tolist() == [0, 0]
    with pytest.raises(ValueError, match="spoilt has 1 entries, not 2"):
        Groups(**{**saved, "spoilt": np.ones(1)})


@quick
@given(setups)
def test_what_trains(setup) -> None:
    engine, world = build(setup)
    for step in range(1, 4):
        result = Recorder(engine, world).step(step)
        if isinstance(result, str):
            return
        groups, outcome = result.groups, result.outcome
        assert (np.diff(groups.ticket) > 0).all()
        trained, surplus = np.flatnonzero(outcome == "trained"), np.flatnonzero(outcome == "surplus")
        if setup["surplus"] == "discard":
            assert len(trained) <= setup["batch"]
            assert not len(surplus) or (len(trained) == setup["batch"] and surplus.min() > trained.max())
        else:
            assert not len(surplus)
        assert result.partial == (len(trained) < setup["batch"])
        assert not (result.partial and setup["refill"] and not result.note)
        assert not groups.failed[trained].any() and (outcome[groups.failed] == "failed").all()
        member = groups.rollout_mask(outcome == "trained")
        assert not (result.trains & ~member).any() and not (result.ghost & ~member).any()
        assert not (result.trains & result.ghost).any()
        assert result.trains.any()


@quick
@given(setups)
def test_caps_are_never_exceeded(setup) -> None:
    engine, world = build(setup)
    recorder = Recorder(engine, world)
    for step in range(1, 4):
        result = recorder.step(step)
        asked = sum(r.rollouts for r in recorder.requests[-1])
        assert len(recorder.requests[-1]) <= setup["max_rounds"]
        assert setup["max_rollouts_per_step"] is None or asked <= setup["max_rollouts_per_step"]
        pooled = setup["allocator"] == {"name": "aero"}
        if pooled and not setup["refill"]:
            assert asked <= setup["batch"] * setup["n"]
        if not setup["refill"]:
            assert all((r.stage > 0).all() for r in recorder.requests[-1][1:])
        if isinstance(result, str):
            return


@quick
@given(setups)
def test_requests_are_consistent(setup) -> None:
    engine, world = build(setup)
    recorder = Recorder(engine, world)
    seen: dict[int, tuple[int, int, int]] = {}
    for step in range(1, 4):
        result = recorder.step(step)
        for requests in recorder.requests[-1]:
            assert (requests.n >= 1).all()
            assert len(np.unique(requests.ticket)) == len(requests)
            np.testing.assert_array_equal(requests.row, engine.row_of[requests.index])
            for ticket, index, row, stage in zip(
                *(getattr(requests, f).tolist() for f in ("ticket", "index", "row", "stage")), strict=True
            ):
                if stage == 0:
                    assert ticket not in seen  # a new group, a new ticket
                else:
                    assert seen[ticket] == (index, row, stage - 1)
                seen[ticket] = (index, row, stage)
        if isinstance(result, str):
            return
        asked = np.concatenate([r.ticket for r in recorder.requests[-1]])
        np.testing.assert_array_equal(np.unique(asked), result.groups.ticket)  # nothing is left open


@quick
@given(setups, st.integers(0, 2**32 - 1))
def test_order_of_arrival_does_not_matter(setup, shuffle) -> None:
    recorders = [Recorder(*build(setup)), Recorder(*build(setup), shuffle=np.random.default_rng(shuffle))]
    for step in range(1, 4):
        a, b = (r.step(step) for r in recorders)
        same_result(a, b)
        if isinstance(a, str):
            return
    same_requests(*(r.requests for r in recorders))
    same_table(*(r.engine.table for r in recorders))


def same_table(a: StatsTable, b: StatsTable) -> None:
    assert list(a.columns) == list(b.columns)
    for name in a.columns:
        np.testing.assert_array_equal(a.col(name), b.col(name), err_msg=name)


def through_files(state):
    """A state as it comes back from a checkpoint: JSON for plain values, copies for arrays."""
    if isinstance(state, dict):
        return {key: through_files(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else json.loads(json.dumps(state))


@quick
@given(setups)
def test_resume_is_exact(setup) -> None:
    engine, world = build(setup)
    for step in range(1, 3):
        if isinstance(Recorder(engine, world).step(step), str):
            return
    state = through_files(engine.state_dict())
    table = StatsTable.from_arrow(engine.table.to_arrow())
    resumed_world = copy.deepcopy(world)
    options = {k: v for k, v in setup.items() if k not in ("failure", "shape")}
    resumed, _ = make_engine(world=resumed_world, table=table, keys=duplicated(setup["M"]), **options)
    resumed.load_state_dict(state)

    recorders = [Recorder(engine, world), Recorder(resumed, resumed_world)]
    for step in range(3, 6):
        a, b = (r.step(step) for r in recorders)
        same_result(a, b)
        if isinstance(a, str):
            return
    same_requests(*(r.requests for r in recorders))
    same_table(engine.table, resumed.table)
    assert engine.total == resumed.total


@quick
@given(setups)
def test_difficulty_is_learned_from_every_closed_group_once(setup) -> None:
    engine, world = build(setup)
    results = []
    for step in range(1, 4):
        result = Recorder(engine, world).step(step)
        if isinstance(result, str):
            return
        results.append(result)
    table = engine.table
    visits, rollouts, successes, failures = (np.zeros(len(table)) for _ in range(4))
    for groups in (r.groups for r in results):
        fine = ~groups.failed
        np.add.at(visits, groups.row[fine], 1)
        np.add.at(rollouts, groups.row[fine], groups.n[fine])
        np.add.at(successes, groups.row[fine], groups.successes[fine])
        np.add.at(failures, groups.row[groups.failed], 1)
    for name, expected in zip(
        ("visits", "rollouts", "successes", "failures"), (visits, rollouts, successes, failures), strict=True
    ):
        np.testing.assert_array_equal(table.col(name), expected, err_msg=name)


@quick
@given(setups)
def test_ghosts_have_no_advantage(setup) -> None:
    engine, world = build(setup, skip_zero=True)
    for step in range(1, 4):
        result = Recorder(engine, world).step(step)
        if isinstance(result, str):
            return
        groups = result.groups
        flat = groups.degenerate(0.0, groups.reward)
        # Under mixed rewards a row is a ghost only if all that train of its group are equal.
        in_training = result.trains | result.ghost
        for g in np.flatnonzero(groups.sum(result.ghost) > 0):
            own = slice(groups.offsets[g], groups.offsets[g + 1])
            assert np.ptp(groups.reward[own][in_training[own]]) == 0
            assert flat[g] or setup["filter"]["name"] == "aero"
        may_skip = setup["advantage"] in ({"name": "verl"}, {"name": "beta", "variant": "off"})
        assert may_skip or not result.ghost.any()


# -- particular situations ------------------------------------------------------------------------------------


def test_surplus_is_what_was_submitted_last() -> None:
    sampler = {"name": "epoch", "round": {"prompts": 12}}
    engine, world = make_engine(sampler, batch=5, n=4, M=40)
    result = run_step(engine, world, 1)
    assert result.outcome.tolist() == ["trained"] * 5 + ["surplus"] * 7
    assert result.ledger.rollouts.surplus == 28
    engine, world = make_engine(sampler, batch=5, n=4, M=40, surplus="train")
    assert run_step(engine, world, 1).trained.sum() == 12


def test_everything_solved() -> None:
    engine, world = make_engine(filter="informative", p=np.ones(10), batch=4, n=4, max_rounds=3)
    result = run_step(engine, world, 1)
    assert set(result.outcome) == {"all_correct", "trained"}
    assert "0 of 4 groups after 3 rounds and 48 rollouts (12 all_correct)" in result.note and not result.partial
    # One row carries the step's zero gradient; the others are ghosts.
    assert result.trains.sum() == 1
    assert result.groups.tokens[result.trains][0] == result.groups.tokens[result.trains | result.ghost].min()


def test_nothing_solved_is_rescued_within_the_pool() -> None:
    engine, world = make_engine(
        allocator="aero", filter="aero", advantage="beta", p=np.zeros(50), batch=10, n=8, refill=False
    )
    result = run_step(engine, world, 1)
    assert result.ledger.rollouts.generated == 80  # the whole pool, to the last top-up
    assert result.trained.sum() == 10 and result.trains.sum() == 40


@pytest.mark.parametrize("on_exhausted", ["train_partial", "relax", "raise"])
def test_on_exhausted(on_exhausted) -> None:
    p = np.repeat([0.0, 0.5], [15, 5])
    world = World(p, shuffle=False)
    engine, _ = make_engine(
        filter="informative", world=world, batch=8, n=8, max_rounds=2, on_exhausted=on_exhausted, M=20
    )
    # In data-set order the two rounds see 16 prompts, one of which has any chance.
    requests = engine.begin(1)
    while requests is not None:
        requests = engine.receive(world.roll(requests))
    if on_exhausted == "raise":
        with pytest.raises(Exhausted, match=r"1 of 8 groups after 2 rounds and 128 rollouts .*max_rounds=2"):
            engine.finish()
        return
    result = engine.finish()
    assert result.trained.sum() == (1 if on_exhausted == "train_partial" else 8)
    assert result.partial == (on_exhausted == "train_partial")
    assert "1 of 8 groups" in result.note
    assert result.ledger.rollouts.balanced()
    if on_exhausted == "relax":  # the first submitted fill up
        assert result.outcome[:7].tolist() == ["trained"] * 7


def test_all_failed_ends_with_a_message() -> None:
    world = World(np.full(6, 0.5), failure=1.0)
    engine, _ = make_engine(world=world, batch=2, n=4, max_rounds=3)
    requests = engine.begin(1)
    while requests is not None:
        requests = engine.receive(world.roll(requests))
    with pytest.raises(Exhausted, match="6 failed"):
        engine.finish()
    assert engine.table.col("visits").sum() == 0 and engine.table.col("failures").sum() == 6


def test_a_data_set_smaller_than_a_batch() -> None:
    engine, world = make_engine(batch=7, n=2, M=3)
    result = run_step(engine, world, 1)
    assert result.trained.sum() == 7  # prompts come again, as groups of their own
    assert engine.table.col("visits").tolist() == np.bincount(result.groups.row, minlength=3).tolist()
    assert engine.feed.epoch(0) == pytest.approx(7 / 3)


@pytest.mark.parametrize("on_exhausted", ["train_partial", "raise"])
def test_a_gate_that_lets_nothing_through(on_exhausted) -> None:
    """It ends the run when that was asked for; otherwise one round goes ungated, as a step needs rows to train on."""
    sampler = {"name": "greso", "p_easy": 0.0, "p_min": 0.0, "floor_easy": 1e-12, "warmup_epochs": 1000}
    engine, world = make_engine(sampler, filter="informative", p=np.ones(5), batch=2, n=4, on_exhausted=on_exhausted)
    requests = engine.begin(1)
    while requests is not None:
        requests = engine.receive(world.roll(requests))
    requests = engine.begin(2)
    if on_exhausted == "raise":
        assert requests is None
        with pytest.raises(Exhausted, match="let nothing more through in 4 passes"):
            engine.finish()
        return
    assert len(requests) == 3
    assert engine.receive(world.roll(requests)) is None  # and the gate is back
    result = engine.finish()
    assert result.trained.sum() == 2 and "let nothing more through in 4 passes" in result.note


def test_a_round_larger_than_the_data_set_goes_ungated_too() -> None:
    """What such a round had pulled in vain left it no pass to go ungated with, and the run ended."""
    sampler = {"name": "greso", "p_easy": 0.0, "p_min": 0.0, "floor_easy": 1e-12, "warmup_epochs": 1000}
    sampler["round"] = {"prompts": 13}
    engine, world = make_engine(sampler, filter="informative", p=np.ones(5), batch=2, n=4)
    results = run(engine, world, 3)
    assert [r.trained.sum() for r in results] == [2, 2, 2] and "let nothing more through" in results[-1].note


def test_a_step_that_goes_ungated_has_one_group_of_a_prompt() -> None:
    sampler = {"name": "greso", "p_easy": 0.0, "p_min": 0.0, "floor_easy": 1e-12, "warmup_epochs": 1000}
    keys = keys_of(6)[[0, 1, 2, 0, 1, 2]]
    engine, world = make_engine(sampler, filter="informative", p=np.ones(6), M=6, keys=keys, batch=3, n=4)
    for step in range(1, 5):
        requests, rows = engine.begin(step), []
        while requests is not None:
            rows += requests.row.tolist()
            requests = engine.receive(world.roll(requests))
            assert len(rows) == len(set(rows))
            rows = []
        engine.finish()


def test_duplicates_share_a_row() -> None:
    keys = keys_of(10)
    keys[5:] = keys[:5]
    engine, world = make_engine(batch=10, n=4, p=np.full(10, 0.5), keys=keys)
    result = run_step(engine, world, 1)
    assert len(engine.table) == 5 and engine.facts.prompts == 5
    assert sorted(result.groups.index.tolist()) == list(range(10))
    assert (engine.table.col("visits") == 2).all() and (engine.table.col("rollouts") == 8).all()


def test_total_rollouts_ends_the_run() -> None:
    engine, world = make_engine(batch=4, n=4, M=16, total_rollouts=40)
    assert len(run(engine, world, 10)) == 3  # 16 a step: 48 is the first total of at least 40
    assert engine.finished


def test_results_must_be_those_of_the_requests() -> None:
    engine, world = make_engine(batch=4, n=2, M=8)
    results = world.roll(engine.begin(1))
    first, twice = results.select(np.arange(1)), Groups.concat([results, results.select(np.arange(1))])
    for wrong in (twice, Groups.empty()):
        with pytest.raises(AdaptiveError, match="do not match"):
            engine.receive(wrong)
    assert engine.receive(first) is None and not engine.settled  # the round is not whole
    with pytest.raises(AdaptiveError, match="do not match"):
        engine.receive(results)
    assert engine.receive(results.select(np.arange(1, 4))) is None and engine.settled
    with pytest.raises(AdaptiveError, match="do not match"):
        engine.receive(results)


def test_groups_being_topped_up_count_towards_the_batch() -> None:
    """No new prompts are drawn for places that open groups may still fill."""
    engine, world = make_engine(
        allocator={"name": "aero", "budget": "per_prompt", "n_explore": 2}, p=np.zeros(40), batch=6, n=8
    )
    recorder = Recorder(engine, world)
    result = recorder.step(1)
    assert [len(r) for r in recorder.requests[0]] == [6, 6, 6, 6]
    assert result.trained.sum() == 6 and result.ledger.rollouts.surplus == 0


def test_a_refill_leaves_room_for_open_groups() -> None:
    """Three groups are dropped, two kept, three open: the refill is of three prompts, not of six."""
    world = World(np.r_[np.ones(3), np.full(2, 0.5), np.zeros(3), np.full(20, 0.5)], shuffle=False)
    allocator = {"name": "aero", "budget": "per_prompt", "n_explore": 8}
    engine, _ = make_engine(allocator=allocator, filter="informative", world=world, batch=8, n=10)
    recorder = Recorder(engine, world)
    recorder.step(1)
    first, second = recorder.requests[0][:2]
    assert len(first) == 8 and second.stage.tolist() == [1, 1, 1, 0, 0, 0]


def test_a_group_of_one_is_no_ghost() -> None:
    """verl's GRPO takes the reward itself for the advantage there."""
    engine, world = make_engine(batch=6, n=1, p=np.ones(6))
    result = run_step(engine, world, 1)
    assert result.trains.sum() == 6 and not result.ghost.any()


def test_a_prompt_twice_in_a_step_is_two_groups() -> None:
    engine, world = make_engine(allocator="aero", filter="aero", batch=6, n=4, p=np.zeros(2), refill=False)
    result = run_step(engine, world, 1)
    assert len(result.groups) == 6 and len(np.unique(result.groups.ticket)) == 6
