"""The engines, whatever the parts: conservation, order independence, budgets and resume at any point, over trainers, parts and faults.

``sync`` commits in submission order, so that what trains and what is learned depends on rewards and submissions alone; the asynchronous
trainers on the recorded order of arrivals. Worlds give the same rewards in whatever order requests are answered.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stats.test_snapshot import same_state as same
from tests.stats.test_table import equal
from tests.world import POLICIES, Arrivals, World, keys_of, make_async_engine, make_engine, run, run_step
from verl_adaptive.config import RunFacts
from verl_adaptive.engine import AsyncEngine, AsyncFacts, OrderedEngine, Requests, StepResult
from verl_adaptive.engine.prompt_source import BUSY, MAX_PASSES
from verl_adaptive.errors import AdaptiveError, Exhausted
from verl_adaptive.groups import PER_ROLLOUT, Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.progress import Progress
from verl_adaptive.record import Recorder, replay
from verl_adaptive.roles import CLOSE, HOLD, Allocator, Pick, Sampler, answers
from verl_adaptive.roles.pooled import PooledAllocator
from verl_adaptive.stats.state import decode_state, encode_state
from verl_adaptive.stats.table import StatsTable

ALLOCATORS = [
    {"name": "fixed"},
    {"name": "aero"},
    {"name": "aero", "budget": "per_prompt", "n_extra": 3, "u_res": 0.25},
    {"name": "reinforce_ada", "per_round": 3},
]
FILTERS = [{"name": "keep_all"}, {"name": "informative"}, {"name": "aero"}, {"name": "aero", "keep_degenerate": 0}]
ADVANTAGES = [{"name": "verl"}, {"name": "beta"}, {"name": "beta", "variant": "off"}]
ADVANTAGES += [{"name": "memory"}, {"name": "memory", "thin": 0.7}]

ON_POLICY = {"name": "pilot_commit", "n_pilot": 2, "form": "on_policy"}
PIPELINED = {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined"}
PILOTS = [ON_POLICY, {**ON_POLICY, "factor": 1.5}, PIPELINED]
#: A gate that lets hardly any solved prompt through.
SHUT = {"name": "greso", "p_easy": 0.0, "p_min": 0.0, "floor_easy": 1e-12, "warmup_epochs": 1000}
#: A gate that lets no retired prompt through.
RETIRED = {"name": "retire", "recheck": 0.0}
SAMPLERS = ["epoch", "greso", "retire", "mopps", "spread"]
SAMPLERS += [{"name": name, "round": {"prompts": 9}} for name in ("epoch", "mopps")]

setups = st.fixed_dictionaries(
    {
        "sampler": st.sampled_from(SAMPLERS),
        "allocator": st.sampled_from([*ALLOCATORS, {"name": "aero", "n_extra": 2, "rounds": 8}, *PILOTS]),
        "filter": st.sampled_from(FILTERS),
        "advantage": st.sampled_from(ADVANTAGES),
        "batch": st.integers(1, 6),
        "n": st.integers(3, 8),
        "M": st.integers(1, 20),
        "seed": st.integers(0, 10_000),
        "refill": st.booleans(),
        "max_rounds": st.sampled_from([1, 2, 5, 32]),
        "max_rollouts_per_step": st.sampled_from([None, None, 20, 60, 150]),
        "on_exhausted": st.sampled_from(["train_partial", "relax", "raise"]),
        "skip_zero": st.booleans(),
        "failure": st.sampled_from([0.0, 0.0, 0.2]),
        "shape": st.sampled_from(["even", "hard", "solved", "lost"]),
    }
).filter(lambda setup: isinstance(setup["sampler"], str) or setup["allocator"] not in PILOTS)  # it decides by itself
quick = settings(max_examples=30, suppress_health_check=list(HealthCheck))


def rates(shape: str, count: int) -> np.ndarray:
    even = (np.arange(count) + 0.5) / count
    return {"even": even, "hard": even**4, "solved": np.ones(count), "lost": np.zeros(count)}[shape]


def duplicated(count: int) -> np.ndarray:
    """Keys of a data set in which every fifth prompt repeats the one before."""
    keys = keys_of(count)
    keys[4::5] = keys[3 : 3 + len(keys) : 5][: len(keys[4::5])]
    return keys


def same_state(a: OrderedEngine, b: OrderedEngine) -> None:
    equal(a.table, b.table)
    assert a.prompt_source.position == b.prompt_source.position
    assert same(a.policy.state_dict(), b.policy.state_dict())
    assert same(a.policy.metrics(), b.policy.metrics())


def build(setup: dict, **more) -> tuple[OrderedEngine, World]:
    options = {k: v for k, v in setup.items() if k not in ("failure", "shape")} | more
    world = World(rates(setup["shape"], setup["M"]), setup["seed"], failure=setup["failure"])
    engine, _ = make_engine(world=world, keys=duplicated(setup["M"]), **options)
    assert isinstance(engine, OrderedEngine)
    return engine, world


class RandomWorkers:
    """Rollout workers that answer one request after another, in an order of their own; a prompt has one group at a time.

    Args:
        seed: of the order; None: everything in flight comes back together.
    """

    def __init__(self, engine, world, seed: int | None = None) -> None:
        self.engine, self.world = engine, world
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.asked: list[Requests] = []
        self.waiting: list[Groups] = []

    def send(self, requests: Requests | None) -> None:
        under_way = {
            submission: row
            for groups in (self.engine.flight, self.engine.tracker.open, self.engine.held)
            for submission, row in zip(groups.submission.tolist(), groups.row.tolist(), strict=True)
        }
        if not self.engine.policy.sampler.whole_batches:
            assert len(set(under_way.values())) == len(under_way), "two groups of a prompt under way"
        if requests is not None:
            self.asked.append(requests)
            groups = self.world.roll(requests)
            self.waiting += [groups.select(np.array([i])) for i in range(len(groups))]

    def back(self) -> Groups:
        if self.rng is None:
            out, self.waiting = self.waiting, []
        else:
            count = int(self.rng.integers(1, min(4, len(self.waiting)) + 1))
            chosen = set(self.rng.choice(len(self.waiting), count, replace=False).tolist())
            out = [g for i, g in enumerate(self.waiting) if i in chosen]
            self.waiting = [g for i, g in enumerate(self.waiting) if i not in chosen]
        return Groups.concat(out)

    def step(self, step: int) -> StepResult | str:
        self.asked, self.waiting = [], []
        self.send(self.engine.begin(step))
        while not self.engine.decided:
            self.send(self.engine.receive(self.back()))
        half = [g.select(np.arange(len(g))) for g in self.waiting]  # aborted: as much as the world made of them
        self.engine.abandon(sum(g.rollouts for g in half), sum(int(g.tokens.sum()) for g in half))
        try:
            return self.engine.finish()
        except Exhausted as error:
            return str(error)


def same_batch(a: StepResult | str, b: StepResult | str) -> None:
    """Everything but what was paid for groups that did not commit."""
    assert isinstance(a, str) == isinstance(b, str)
    if isinstance(a, str) or isinstance(b, str):
        return
    for f in fields(Groups):
        np.testing.assert_array_equal(getattr(a.groups, f.name), getattr(b.groups, f.name), err_msg=f.name)
    for name in ("outcome", "trains", "zero_row"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    mine, theirs = (
        {
            **r.ledger.rollouts.as_dict(),
            "dropped": {k: v for k, v in r.ledger.rollouts.dropped.items() if k != "aborted"},
        }
        for r in (a, b)
    )
    del mine["generated"], theirs["generated"]
    assert mine == theirs


# -- sync: every setup -----------------------------------------------------------------------------------------


def in_any_order(runs: Iterable[RandomWorkers], steps: int) -> Iterator[list[StepResult]]:
    """Play steps with workers of one world that answer in orders of their own: batches and statistics are the same."""
    runs = list(runs)
    for step in range(1, steps + 1):
        results = [one.step(step) for one in runs]
        for other in results[1:]:
            same_batch(results[0], other)
        if isinstance(results[0], str):
            return
        for one in runs[1:]:
            same_state(runs[0].engine, one.engine)
        yield results


@quick
@given(setups, st.integers(0, 2**32 - 1))
def test_any_order_of_arrival_gives_the_same_batch_and_statistics(setup, seed) -> None:
    for _ in in_any_order((RandomWorkers(*build(setup), seed=order) for order in (None, seed, seed + 1)), 4):
        pass


@quick
@given(setups, st.integers(0, 2**32 - 1))
def test_every_rollout_is_accounted_for(setup, seed) -> None:
    """Conservation, the caps, what may train, and that each closed group is learned from once."""
    engine, world = build(setup)
    run = RandomWorkers(engine, world, seed)
    held = 0
    seen = {name: np.zeros(len(engine.table)) for name in ("visits", "rollouts", "successes", "failures")}
    for step in range(1, 5):
        result = run.step(step)
        if isinstance(result, str):
            return  # nothing to train on: the run ends with a message
        groups, ledger, asked = result.groups, result.ledger, sum(r.rollouts for r in run.asked)
        assert ledger.rollouts.balanced(held) and engine.total.rollouts.balanced() and engine.total.tokens.balanced()
        held = ledger.rollouts.held
        assert held == engine.held.rollouts
        assert ledger.rollouts.trained == result.trains.sum()
        assert ledger.tokens.trained == groups.tokens[result.trains].sum()
        assert setup["max_rollouts_per_step"] is None or asked <= setup["max_rollouts_per_step"]
        if setup["allocator"] == {"name": "aero"} and not setup["refill"] and setup["sampler"] in ("epoch", "greso"):
            assert asked <= setup["batch"] * setup["n"]
        for requests in run.asked:
            assert (requests.n >= 1).all() and len(np.unique(requests.submission)) == len(requests)
            np.testing.assert_array_equal(requests.row, engine.row_of[requests.index])
        assert (np.diff(groups.submission) > 0).all()
        trained = np.flatnonzero(result.trained)
        assert len(trained) <= setup["batch"]
        assert (result.outcome[groups.failed] == "failed").all()
        member = groups.rollout_mask(result.trained)
        assert not ((result.trains | result.zero_row) & ~member).any() and not (result.trains & result.zero_row).any()
        assert result.trains.any() and (setup["skip_zero"] or not result.zero_row.any())
        training = result.trains | result.zero_row
        if setup["advantage"]["name"] != "memory":  # all that train of its group are equal
            for g in np.flatnonzero(groups.sum(result.zero_row) > 0):
                own = slice(groups.offsets[g], groups.offsets[g + 1])
                assert np.ptp(groups.reward[own][training[own]]) == 0
            compares = setup["advantage"] in ({"name": "verl"}, {"name": "beta", "variant": "off"})
            assert compares or not result.zero_row.any()
        fine = ~groups.failed
        for name, amount in (("visits", 1), ("rollouts", groups.n[fine]), ("successes", groups.successes[fine])):
            np.add.at(seen[name], groups.row[fine], amount)
        np.add.at(seen["failures"], groups.row[groups.failed], 1)
    for name, expected in seen.items():
        np.testing.assert_array_equal(engine.table.col(name), expected, err_msg=name)


@quick
@given(setups, st.integers(0, 2**32 - 1))
def test_resume_is_exact(setup, seed) -> None:
    engine, world = build(setup)
    for step in range(1, 3):
        if isinstance(RandomWorkers(engine, world, seed).step(step), str):
            return

    other_world = copy.deepcopy(world)
    resumed, _ = build(setup, table=StatsTable.from_arrow(engine.table.to_arrow()))
    resumed.prompt_source.stream = other_world.source
    resumed.load_state_dict(decode_state(encode_state(engine.state_dict())))
    runs = [RandomWorkers(engine, world, seed), RandomWorkers(resumed, other_world, seed + 1)]
    for step in range(3, 6):
        a, b = (run.step(step) for run in runs)
        same_batch(a, b)
        if isinstance(a, str):
            return
        same_state(engine, resumed)


# -- sync: particular situations ------------------------------------------------------------------------------


def test_the_batch_is_the_first_kept_and_the_rest_is_aborted() -> None:
    engine, world = make_engine(
        {"name": "epoch", "round": {"prompts": 12}}, batch=3, n=4, p=np.full(30, 0.5), filter="keep_all"
    )
    run = RandomWorkers(engine, world)
    requests = engine.begin(1)
    groups = world.roll(requests)
    assert engine.receive(groups.select(np.array([11, 5, 2, 1]))) is None and not engine.decided
    engine.receive(groups.select(np.array([0])))
    assert engine.decided and len(engine.flight) == 7
    engine.abandon(10, 250)
    result = engine.finish()
    assert result.groups.submission.tolist() == [0, 1, 2] and result.trained.all()
    assert result.ledger.rollouts.dropped == {"aborted": 8 + 10} and result.ledger.rollouts.balanced()
    assert run.engine.table.col("visits").sum() == 3
    # the next step begins where this one ended: the aborted prompts come again, under the numbers that were not used
    again = engine.begin(2)
    assert again.submission[0] == 3 and again.index[:9].tolist() == requests.index[3:].tolist()


@quick
@given(st.integers(11, 40), st.sampled_from([0.05, 0.1, 0.15, 0.3, 0.7]), st.integers(0, 2**32 - 1))
def test_failures_that_are_not_waited_for_are_the_same_in_any_order_of_arrival(batch, failure, seed) -> None:
    """Which of them are few was decided by how many had come back when the step looked."""
    setup = {"batch": batch, "n": 2, "M": 200, "seed": seed % 10_000, "failure": failure, "shape": "even"}
    runs = (RandomWorkers(*build(setup), seed=order) for order in (None, seed, seed + 1))
    for results in in_any_order(runs, 3):
        assert results[0].trained.sum() >= 0.9 * batch
        few = results[0].groups.failed[:batch].sum() <= 0.1 * batch
        assert (len(results[0].groups) == batch) == few and not results[0].note
        if failure <= 0.1:
            assert all("aborted" not in r.ledger.rollouts.dropped for r in results)


def test_only_where_a_failed_group_alone_is_lost_a_batch_may_be_short() -> None:
    """Pilots that get no commit never train: a batch that lacks some of them is not full but for a few faults."""
    engine, world = make_engine("epoch", ON_POLICY, batch=20, n=8, p=np.full(400, 0.1), seed=5)
    run = RandomWorkers(engine, world, 1)
    assert [int(run.step(step).trained.sum()) for step in range(1, 4)] == [20, 20, 20]


def test_a_topup_goes_out_when_its_own_group_is_back() -> None:
    engine, world = make_engine("epoch", "aero", "aero", "beta", batch=8, n=8, p=np.zeros(40), refill=False)
    requests = engine.begin(1)
    groups = world.roll(requests)
    more = engine.receive(groups.select(np.array([0])))
    assert more.submission.tolist() == [0] and more.n.tolist() == [4]


def test_pilots_commit_as_long_as_the_batch_has_places() -> None:
    options = dict(filter="band", batch=4, n=8, p=np.full(60, 0.5))
    engine, world = make_engine("epoch", {**ON_POLICY, "n_pilot": 4}, **options)
    groups = world.roll(engine.begin(1))
    assert len(groups) == 12
    inside = np.flatnonzero(engine.policy.allocator.side(groups) == 0)
    last = groups.select(inside[-1:])
    assert engine.receive(last) is None  # four lower ones may yet take all places
    first = engine.receive(groups.select(inside[:1]))
    assert first.submission.tolist() == [int(inside[0])]  # a place is sure
    engine, world = make_engine("epoch", {**ON_POLICY, "lower": 0.0, "upper": 0.0}, **options)
    groups = world.roll(engine.begin(1))
    engine.receive(world.roll(engine.receive(groups.select(np.array([0])))))
    assert engine.receive(groups.select(np.array([4]))) is None  # three lower ones may take what is left


def test_results_must_be_in_flight() -> None:
    engine, world = make_engine(batch=4, n=2, M=8)
    results = world.roll(engine.begin(1))
    engine.receive(results.select(np.array([1])))
    for wrong in (
        results.select(np.array([1])),
        Groups.concat([results.select(np.array([0])), results.select(np.array([0]))]),
    ):
        with pytest.raises(AdaptiveError, match="do not match"):
            engine.receive(wrong)


def test_long_answers_are_begun_first_and_decide_nothing() -> None:
    """Handed out by the length that a prompt's answers have had, what is in excess of the batch last; submissions stay."""
    results = []
    for longest_first in (True, False):
        engine, world = make_engine(
            "epoch", "fixed", "informative", batch=6, n=4, p=np.tile([0.5, 1.0], 12), longest_first=longest_first
        )
        length = np.arange(24) * 10.0

        def roll(requests, world=world, length=length):
            groups = world.roll(requests)
            groups.tokens = np.repeat(length[requests.index], groups.n).astype(np.int64) + 1
            return groups

        run = []
        for step in range(1, 8):
            requests = engine.begin(step)
            sent = [requests]
            while requests is not None:
                requests = engine.receive(roll(requests))
            run.append(engine.finish())
        results.append(run)
        needed = min(len(sent[0]), round(6 / engine.keep_rate))
        first = length[sent[0].index]
        assert (np.diff(first[: needed - 1]) <= 0).all() == longest_first
        assert (sent[0].submission[:-1] < sent[0].submission[1:]).all() != longest_first
    for a, b in zip(*results, strict=True):
        same_batch(a, b)


def test_prompts_whose_tokens_are_not_known_are_not_begun_last() -> None:
    """A warm start may bring rollouts without their tokens: those prompts are of middling length, as new ones are."""
    engine, _ = make_engine("epoch", batch=12, n=4, M=12)
    engine.table.col("rollouts")[:] = 4
    engine.table.col("tokens")[:] = [0, 0, 0, 0, *(100, 200, 300, 400), *(500, 600, 700, 800)]
    begun = engine.begin(1).row.tolist()
    assert begun[:4] == [11, 10, 9, 8] and set(begun[4:8]) == {0, 1, 2, 3} and begun[8:] == [7, 6, 5, 4]


def test_after_a_step_that_kept_nothing_all_of_a_large_request_are_wanted() -> None:
    engine, world = make_engine("epoch", "fixed", "informative", batch=4, n=4, M=64, max_rounds=4)
    run_step(engine, world, 1)
    rates, world.p = world.p, np.ones(64)
    engine.keep_rate = None
    run_step(engine, world, 2)
    assert engine.keep_rate == 0.0
    world.p = rates
    expected = (engine.table.col("tokens") / np.maximum(engine.table.col("rollouts"), 1))[engine.begin(3).row]
    assert len(expected) == 16 and (np.diff(expected[expected > 0]) <= 0).all()


def test_a_record_replays_what_was_given_up(tmp_path) -> None:
    engine, world = make_engine("greso", "aero", "informative", batch=6, n=8, M=60)
    recorder = Recorder(tmp_path, engine)
    run = RandomWorkers(engine, world, 3)
    ledgers = [run.step(step).ledger for step in range(1, 7)]
    recorder.close()
    report = replay(tmp_path / "attempt-0")
    assert report.identical and report.ledgers == ledgers
    assert sum(ledger.rollouts.dropped.get("aborted", 0) for ledger in ledgers) > 0


def without(gone: np.ndarray, engine, world: World, **options):
    """The run, resumed on a data set that lacks the prompts at these positions; and its world."""
    keep = np.setdiff1d(np.arange(len(world.p)), gone)
    smaller = World(world.p[keep], world.seed)
    table = StatsTable.from_arrow(engine.table.to_arrow())
    again, _ = make_engine(**options, world=smaller, table=table, keys=keys_of(len(world.p))[keep])
    again.load_state_dict(copy.deepcopy(engine.state_dict()))
    return again, smaller


def test_a_record_replays_groups_that_a_resume_left_behind(tmp_path) -> None:
    """Those of a prompt that left the data set: a replay counted them as never made."""
    policy = {"allocator": PIPELINED, "filter": "band", "batch": 4, "seed": 1}
    engine, world = make_engine(**policy, p=np.full(40, 0.5))
    run(engine, world, 3)
    again, smaller = without(engine.held.index[:1], engine, world, **policy)
    recorder = Recorder(tmp_path, again)
    run(again, smaller, 3, start=4)
    recorder.close()
    assert replay(tmp_path / "attempt-0").identical and again.total.rollouts.dropped["gone"]


def test_a_step_that_is_planned_at_once_goes_out_whole() -> None:
    """66 prompts of a batch of 64, as published: one batch of prompts (``max_rounds=1``) is that plan, not its first 64."""
    engine, world = make_engine("cero", refill=False, max_rounds=1, batch=64, M=200, n=8, steps=20)
    for step in range(1, 4):
        result = run_step(engine, world, step)
        sampler = engine.policy.sampler
        assert len(result.groups) == 66
        assert sampler.spent * sampler.g == engine.total.rollouts.generated


@pytest.mark.parametrize("make", [make_engine, make_async_engine], ids=["sync", "async"])
def test_a_plan_goes_out_whole_beside_pilots(make) -> None:
    """As many prompts of it were piloted as the share in the band called for; asynchronous, one batch of them committed."""
    sampler = {"name": "cero", "capacity": 48, "nu0": 0.0, "gamma": 0.01}
    allocator = {**ON_POLICY, "lower": 0.0, "upper": 0.0}
    engine, world = make(sampler, allocator, "band", refill=False, batch=8, n=8, steps=20, p=np.full(64, 0.5))
    for step in range(1, 4):
        result = Arrivals(world, 1).step(engine, step)
        assert len(result.groups) == 24 and result.trained.all()


class PlainAllocator(Allocator):
    """Gives each prompt its group, once, and says nothing of top-ups."""

    name = "plain"

    def first(self, rows, planned, progress):
        return np.full(len(rows), self.facts.n)


class BoundedAllocator(PlainAllocator):
    """May top up, and says how much at most."""

    def review(self, groups, progress):
        return np.where(groups.n < 2 * self.facts.n, self.facts.n, 0)

    def most(self, n, stage):
        return np.maximum(2 * self.facts.n - n, 0)


@pytest.mark.parametrize(("allocator", "most"), [(PlainAllocator, 0), (BoundedAllocator, 4)])
def test_under_a_cap_an_allocator_sends_what_its_top_ups_leave_room_for(allocator, most):
    part = allocator()
    part.facts = RunFacts(batch=8, n=4, steps=1, prompts=8)
    assert answers.most(part, np.array([4]), np.array([0])).tolist() == [most]
    engine, _ = make_engine("epoch", f"{__name__}:{allocator.__name__}", batch=8, n=4, max_rollouts_per_step=64)
    assert len(engine.begin(1)) == 8


def test_a_group_whose_top_up_finds_no_room_under_the_cap_ends_as_it_is() -> None:
    allocator = {"name": "aero", "budget": "per_prompt", "n_explore": 4, "n_extra": 4}
    for cap, sizes in ((12, [8, 4]), (15, [8, 4]), (16, [8, 8])):
        engine, world = make_engine(allocator=allocator, p=np.zeros(40), batch=2, n=8, max_rollouts_per_step=cap)
        assert run_step(engine, world, 1).groups.n.tolist() == sizes


class Waiting(PooledAllocator):
    """Tops most groups up a step later, and goes on with all that wait, for however many the batch has places."""

    name = "waiting"
    can_hold = True

    def first(self, rows, planned, progress):
        return np.full(len(rows), 2)

    def review(self, groups, progress):
        return np.where((groups.n > 2) | (groups.submission % 4 == 0), CLOSE, HOLD)

    def recall(self, held, since, progress):
        return np.full(len(held), 2)

    def most(self, n, stage):
        return np.where(stage == 0, 2, 0)


class Reserving(Waiting):
    """A step goes on until so many wait."""

    def reserve(self, progress):
        return 8

    def prompts(self, wanted, progress):
        return 16


@pytest.mark.parametrize("allocator", [Waiting, Reserving])
def test_groups_that_wait_make_no_batch_too_large_and_are_not_given_up(allocator) -> None:
    """More were topped up than the batch had places for: the others were finished, dropped as aborted, and never observed."""
    setup = {"allocator": f"{__name__}:{allocator.__name__}", "batch": 4, "n": 4, "M": 200}
    runs = [RandomWorkers(*make_engine(**setup), seed=order) for order in (None, 1, 2)]
    waited = np.zeros(0)
    for result, *_ in in_any_order(runs, 6):
        held = runs[0].engine.held.submission
        assert result.trained.sum() == 4 and np.isin(waited, [*result.groups.submission, *held]).all()
        waited = held


class Shuffled(Sampler):
    """Picks anything that it is shown, by random numbers of the step and of ``progress.chunk``."""

    name = "shuffled"
    kind = "pool"

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        u = progress.draw.uniform("shuffled", self.table.key_hi[pool], self.table.key_lo[pool], progress.chunk)
        return Pick(pool[np.argsort(u)[:count]])


class Generous(Shuffled):
    """Gives the whole pool in its order, however many prompts are wanted."""

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        return super().pick(pool, len(pool), progress)


def test_a_window_is_not_overfilled_by_a_sampler_that_picks_more_than_are_wanted() -> None:
    counts = []
    for part in (Shuffled, Generous):
        engine, _ = make_async_engine(f"{__name__}:{part.__name__}", batch=8, n=4, M=40)
        requests = engine.begin(1)
        assert requests is not None
        counts.append(requests.index.tolist())
    assert len(counts[0]) == 8 and counts[0] == counts[1]


class Closing(Sampler):
    """A gate that closes after two steps, and asks for nothing more."""

    name = "closing"

    def round_size(self, progress: Progress) -> int:
        return 60 if progress.step <= 2 else 0

    def admit(self, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
        return np.full(len(rows), progress.step <= 2)


class Losing(World):
    """Loses the last rollout of every first request; the survivors are the group."""

    def roll(self, requests: Requests) -> Groups:
        groups = super().roll(requests)
        lost = (requests.stage == 0).astype(np.int64)
        last = np.zeros(groups.rollouts, dtype=bool)
        last[(groups.offsets[1:] - 1)[lost > 0]] = True
        kept = {name: getattr(groups, name)[~last] for name in PER_ROLLOUT}
        offsets = groups.offsets - np.concatenate([[0], np.cumsum(lost)])
        return replace(groups, **kept, offsets=offsets, lost=lost.astype(np.int32))


#: What may be decided by how many prompts happen to have been sent.
SENT = {
    # a cap keeps back prompts that pay into AERO's pool
    "pool under a cap": {
        "allocator": {"name": "aero", "n_explore": 2, "n_extra": 6, "rounds": 3},
        "p": np.where(np.arange(40) % 2, 0.9, 0.02),
        "batch": 6,
        "max_rollouts_per_step": 60,
        "refill": False,
    },
    # more pilots than the first request's, and too few in the band for the next step
    "pilots held for the next step": {
        "allocator": {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined", "factor": 1.5},
        "filter": "band",
        "p": np.linspace(0, 0.6, 40) ** 2,
        "batch": 4,
    },
    # commits of held groups fill the step, so that no prompt is asked for until some fail
    "held groups that fail": {
        "sampler": "mopps",
        "allocator": {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined"},
        "filter": "band",
        "p": np.full(60, 0.5),
        "batch": 4,
        "failure": 0.4,
    },
    # pilots in the band for which the cap has no room, if the batch has no place for them either
    "held pilots under a cap": {
        "allocator": {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined"},
        "filter": "band",
        "p": np.full(40, 0.5),
        "batch": 3,
        "max_rollouts_per_step": 30,
    },
    # as these, and what is asked for then goes ungated
    "held groups beside a closed gate": {
        "sampler": f"{__name__}:Closing",
        "allocator": {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined", "factor": 6.0},
        "filter": {"name": "informative", "low": 0.4, "high": 0.6},
        "p": np.full(300, 0.5),
        "batch": 10,
        "failure": 0.2,
    },
    # a pool of which nothing is left until all that was sent is back
    "small pool": {"sampler": f"{__name__}:Shuffled", "filter": "informative", "p": np.full(5, 0.2), "batch": 4},
    # who lost some would take more than was reckoned with when later prompts were sent
    "commits that make up for losses": {
        "allocator": {**ON_POLICY, "n_pilot": 3, "lower": 0.0, "upper": 0.0},
        "p": np.full(40, 0.02),
        "batch": 6,
        "max_rollouts_per_step": 46,
        "world": Losing,
    },
    "rescues that make up for losses": {
        "allocator": {"name": "aero", "budget": "per_prompt", "n_explore": 3, "n_extra": 4, "rounds": 3},
        "p": np.full(40, 0.02),
        "batch": 6,
        "n": 9,
        "max_rollouts_per_step": 51,
        "world": Losing,
    },
}


@pytest.mark.parametrize("name", SENT)
def test_how_many_were_sent_decides_nothing(name) -> None:
    options = {"n": 8, **SENT[name]}
    p, failure, world = options.pop("p"), options.pop("failure", 0.0), options.pop("world", World)
    cap = options.get("max_rollouts_per_step", math.inf)
    for seed in range(4):
        runs = [
            RandomWorkers(*make_engine(world=world(p, seed, failure=failure), seed=seed, **options), seed=order)
            for order in (None, seed, seed + 100)
        ]
        steps = 0
        for _ in in_any_order(runs, 4):
            steps += 1
            assert all(sum(r.rollouts for r in run.asked) <= cap for run in runs)
        assert steps == 4


@pytest.mark.parametrize("allocator", ["fixed", "aero", ON_POLICY], ids=["fixed", "aero", "pilot_commit"])
def test_who_plans_a_step_at_once_is_told_what_was_spent(allocator) -> None:
    rates = np.random.default_rng(0).beta(0.3, 0.3, 64)
    engine, world = make_engine("cero", allocator, refill=False, p=rates, batch=8, n=8, M=64, steps=30)
    for step in range(1, 31):
        if engine.finished:
            break
        before = engine.policy.sampler.spent
        result, sampler = run_step(engine, world, step), engine.policy.sampler
        assert sampler.spent - before == -(-result.ledger.rollouts.generated // sampler.g)


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
            submission=groups.submission,
            index=groups.index,
            failed=(requests.stage == 0) & (groups.n - spoilt < groups.n / 2),
            lost=spoilt,
            spoilt=spoilt,
            spoilt_tokens=np.bincount(home[~alive], groups.tokens[~alive], minlength=size).astype(np.int64),
        )


@pytest.mark.parametrize("facts", [None, AsyncFacts(warmup=8)], ids=["sync", "async"])
def test_rollouts_without_a_reward_are_on_the_bill(facts, tmp_path) -> None:
    """All that the servers generated is in the account, top-ups and failed groups included; and it replays."""
    world = Spoiling((np.arange(60) + 0.5) / 60)
    engine, _ = make_engine("epoch", "aero", "informative", world=world, async_facts=facts)
    recorder, arrivals, ledgers, held = Recorder(tmp_path, engine), Arrivals(world), [], [0, 0]
    for step in range(1, 5):
        result = arrivals.step(engine, step)
        ledgers.append(result.ledger)
        accounts = result.ledger.rollouts, result.ledger.tokens
        assert [a.balanced(before) for a, before in zip(accounts, held, strict=True)] == [True, True]
        held = [a.held for a in accounts]
    recorder.close()
    total = engine.total
    on_their_way = arrivals.waiting
    assert world.spoilt > 100 and total.rollouts.dropped["failed"] > 0
    assert total.rollouts.generated == world.asked - sum(g.rollouts + int(g.spoilt.sum()) for g in on_their_way)
    made = world.tokens_made - sum(int(g.tokens.sum() + g.spoilt_tokens.sum()) for g in on_their_way)
    assert total.tokens.generated == made
    assert total.rollouts.dropped["lost"] == world.spoilt - sum(int(g.spoilt.sum()) for g in on_their_way)
    report = replay(tmp_path / "attempt-0")
    assert report.identical and report.ledgers == ledgers


INFORMATIVE = ("epoch", "fixed", "informative")
SOLVED = {"p": np.ones(64)}
FEW = {"p": np.ones(64), "max_rollouts_per_step": 20, "refill": False}
HALF_RETIRED = {"p": np.full(64, 0.5), "refill": False, "columns": {"retired": np.arange(64) >= 5}}
#: Steps that get fewer than eight groups → parts, options, groups that the filter keeps, what is said.
SHORT: dict[str, tuple[tuple, dict, int, str]] = {
    "max_rounds": (INFORMATIVE, {"p": np.zeros(64), "max_rounds": 2}, 0, r"\(16 all_wrong\): adaptive\.max_rounds=2 "),
    "max_rounds, some kept": (
        INFORMATIVE,
        {"p": np.repeat([0.0, 0.5], [52, 12]), "max_rounds": 2},
        2,
        r"128 rollouts \(14 all_wrong, 2 trained\): adaptive\.max_rounds=2 ",
    ),
    # of a step that kept all its groups an asynchronous trainer said "none finished"
    "cap": (
        ("epoch",),
        {"n": 4, "max_rollouts_per_step": 20},
        5,
        r"after 1 round and 20 rollouts \(5 trained\): .*cap of 20 ",
    ),
    "cap, all dropped": (
        INFORMATIVE,
        SOLVED | {"n": 4, "max_rollouts_per_step": 60},
        0,
        r"60 rollouts \(15 all_correct\): the step's cap of 60 rollouts was reached",
    ),
    # without refill ``on_exhausted`` was ignored, while the note named it
    "cap of a batch": (INFORMATIVE, FEW, 0, r"\(2 all_correct\): the step's cap of 20 "),
    "cap of rescues": (("epoch", "aero", "aero", "beta"), FEW, 5, r"\(5 trained\): .*cap of 20 "),
    "cap of a plan": (("cero",), FEW | {"steps": 20}, 3, r"\(3 trained\): the step's cap of 20 "),
    # of data, or room for commits, that ended nothing was said in ``sync``
    "data": (
        (RETIRED, "fixed", "informative"),
        HALF_RETIRED,
        5,
        ": (the sampler gave no further prompt|all prompts that the sampler let through were under way)",
    ),
    # it ends the run when that was asked for; otherwise one round goes ungated, as a step needs rows to train on
    "gate": (
        (SHUT, "fixed", "informative"),
        SOLVED | {"columns": {"streak": 5, "streak_kind": 1}},
        0,
        r"\((none finished|8 all_correct)\): the sampler let nothing more through in 4 passes",
    ),
}
TRAINERS = {"sync": None, "async": AsyncFacts(), "mini-steps": AsyncFacts(mini_steps=4)}


@pytest.mark.parametrize("on_exhausted", ["raise", "train_partial", "relax"])
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", SHORT)
def test_a_short_step_ends_as_configured(name, trainer, on_exhausted) -> None:
    """Groups that were dropped train if nothing else does, or where ``relax`` asks for it, and the note says so."""
    parts, options, kept, says = SHORT[name]
    options = {"columns": {}, **options}
    columns = options.pop("columns")
    engine, world = make_engine(*parts, async_facts=TRAINERS[trainer], on_exhausted=on_exhausted, **options)
    for column, values in columns.items():
        engine.table.col(column)[:] = values
    says = rf"{kept} of 8 groups .*{says}"
    if on_exhausted == "raise":
        with pytest.raises(Exhausted, match=says):
            Arrivals(world, 1).step(engine, 1)
        return
    result = Arrivals(world, 1).step(engine, 1)
    assert re.search(says, result.note)
    back = min(8, len(result.groups)) - kept if on_exhausted == "relax" or not kept else 0
    assert result.trained.sum() == kept + back
    said = f". The step trains on {back} of the groups that it dropped"
    assert result.note.endswith(said) if back else "that it dropped" not in result.note


def test_room_for_commits_that_ends_exhausts_a_step_without_refill() -> None:
    for on_exhausted in ("raise", "train_partial"):
        engine, world = make_engine("epoch", "pilot_commit", "band", on_exhausted=on_exhausted, **FEW)
        if on_exhausted == "raise":
            with pytest.raises(Exhausted, match=r"of 8 groups .*: the step's cap of 20 rollouts"):
                run_step(engine, world, 1)
        else:
            assert "5 too_easy): the step's cap of 20 rollouts" in run_step(engine, world, 1).note


@pytest.mark.parametrize(("cap", "rate"), [(None, 0.5), (None, 1.0), (600, 0.5)])
def test_what_a_filter_or_a_plan_leaves_out_exhausts_nothing(cap, rate) -> None:
    """Without refill a step may train less than a batch, as configured: ``raise`` is for data and caps that end."""
    rates, ended = np.where(np.arange(64) % 2, 0.5, rate), {"on_exhausted": "raise", "refill": False}
    for parts in (("epoch", "fixed", "informative"), ("cero",)):
        engine, world = make_engine(*parts, p=rates, batch=8, n=8, steps=8, max_rollouts_per_step=cap, **ended)
        assert not any(result.note for result in run(engine, world, 8))


@pytest.mark.parametrize("make", [make_engine, make_async_engine], ids=["sync", "async"])
def test_the_end_of_a_budget_cuts_no_plan(make) -> None:
    """Where the allocator tops up, the rest of CERO's budget bounds the step: a last plan of just that much had "reached the cap"."""
    sampler = {"name": "cero", "budget": 40, "capacity": 16, "nu0": 0.0, "gamma": 0.01}
    engine, world = make(sampler, "aero", p=np.full(64, 0.5), batch=8, n=8, steps=8, refill=False, on_exhausted="raise")
    notes = []
    while not engine.finished:
        notes.append(Arrivals(world, 1).step(engine, len(notes) + 1).note)
    assert engine.policy.sampler.left == 0 and not any(notes)


@pytest.mark.parametrize("make", [make_engine, make_async_engine], ids=["sync", "async"])
def test_a_batch_that_the_filter_drops_whole_exhausts_nothing_without_refill(make) -> None:
    """An asynchronous trainer draws once more before it falls back on dropped groups; that this ends ended the run."""
    options = {"p": np.ones(64), "refill": False, "on_exhausted": "raise", "max_rounds": 1}
    engine, world = make(filter="informative", **options)
    result = Arrivals(world, 1).step(engine, 1)
    assert result.trained.sum() == 8 and "0 of 8 groups" in result.note and "(8 all_correct)" in result.note


def test_all_failed_ends_with_a_message() -> None:
    world = World(np.full(6, 0.5), failure=1.0)
    engine, _ = make_engine(world=world, batch=2, n=4, max_rounds=3)
    with pytest.raises(Exhausted, match="6 failed"):
        run_step(engine, world, 1)
    assert engine.table.col("visits").sum() == 0 and engine.table.col("failures").sum() == 6


@pytest.mark.parametrize(("sampler", "read"), [("epoch", 7), ("greso", 11)])
def test_a_data_set_smaller_than_a_batch(sampler, read) -> None:
    """verl's order has a prompt twice in a request; a gate's come again after a pass without a new one, when all are back."""
    engine, world = make_engine(sampler, batch=7, n=2, M=4)
    result = run_step(engine, world, 1)
    assert result.trained.sum() == 7  # as groups of their own
    assert engine.table.col("visits").tolist() == np.bincount(result.groups.row, minlength=4).tolist()
    assert engine.prompt_source.epoch(0) == pytest.approx(read / 4)


def test_a_round_larger_than_the_data_set_goes_ungated_too() -> None:
    """What such a round had pulled in vain left it no pass to go ungated with, and the run ended."""
    engine, world = make_engine({**SHUT, "round": {"prompts": 13}}, filter="informative", p=np.ones(5), batch=2, n=4)
    results = run(engine, world, 3)
    assert [r.trained.sum() for r in results] == [2, 2, 2] and "let nothing more through" in results[-1].note


def test_a_step_that_goes_ungated_has_one_group_of_a_prompt() -> None:
    keys = keys_of(6)[[0, 1, 2, 0, 1, 2]]
    engine, world = make_engine(SHUT, filter="informative", p=np.ones(6), M=6, keys=keys, batch=3, n=4)
    run = RandomWorkers(engine, world)
    for step in range(1, 5):
        run.step(step)  # which looks


def test_total_rollouts_ends_the_run() -> None:
    engine, world = make_engine(batch=4, n=4, M=16, total_rollouts=40)
    assert len(run(engine, world, 10)) == 3  # 16 a step: 48 is the first total of at least 40
    assert engine.finished


def test_a_group_of_one_is_no_ghost() -> None:
    """verl's GRPO takes the reward itself for the advantage there."""
    engine, world = make_engine(batch=6, n=1, p=np.ones(6))
    result = run_step(engine, world, 1)
    assert result.trains.sum() == 6 and not result.zero_row.any()


# -- asynchronous trainers ------------------------------------------------------------------------------------


STREAMS = {
    "no warm-up": AsyncFacts(),
    "colocated": AsyncFacts(warmup=8, threshold=8),
    "separate": AsyncFacts(warmup=12, mini_steps=4, threshold=3),
    "wait": AsyncFacts(warmup=8, mini_steps=2, threshold=2, strategy="wait"),
}
CASES = [(p, s) for p in POLICIES for s in STREAMS if p != "cero" or STREAMS[s].warmup == 0]


def made(policy: str, stream: str | AsyncFacts, *, failure: float = 0.0, **more):
    facts = STREAMS[stream] if isinstance(stream, str) else stream
    engine, world = make_async_engine(async_facts=facts, **{"steps": 12, **POLICIES[policy], **more})
    world.failure = failure
    return engine, world


def states(engine: AsyncEngine) -> dict:
    return copy.deepcopy(engine.state_dict())


@pytest.mark.parametrize(("policy", "stream"), CASES)
@given(order=st.integers(0, 2**32 - 1), failure=st.sampled_from([0.0, 0.1]))
@settings(max_examples=4)
def test_an_async_step_accounts_for_every_rollout_and_no_prompt_is_in_flight_twice(policy, stream, order, failure):
    engine, world = made(policy, stream, failure=failure)
    arrivals = Arrivals(world, order)
    held = generated = 0
    observed = 0
    for step in range(1, 13):
        if engine.finished:
            break
        result = arrivals.step(engine, step)
        account = result.ledger.rollouts
        left = account.trained + account.dropped_in_all
        assert account.generated + held == left + account.held
        held, generated = account.held, generated + account.generated
        busy = np.concatenate([engine.flight.row, engine.ready.groups.row])
        assert len(np.unique(busy)) == len(busy)
        assert np.array_equal(np.sort(result.groups.submission), result.groups.submission)
        observed += len(result.groups)
    # every group that left was observed once, and so were the ready ones
    seen = engine.table.col("visits").sum() + engine.table.col("failures").sum()
    assert seen == observed + len(engine.ready)
    assert engine.total.rollouts.generated == generated
    assert engine.table.col("rollouts").sum() <= generated


def test_a_killed_runs_record_replays_up_to_its_end(tmp_path):
    engine, world = made("dapo", "separate")
    recorder = Recorder(tmp_path, engine)
    arrivals = Arrivals(world, 5)
    for step in range(1, 5):
        arrivals.step(engine, step)
    recorder.close()
    events = tmp_path / "attempt-0" / "events.jsonl"
    text = events.read_text()
    for cut in (len(text) - 3, len(text) // 2, len(text) // 3):
        events.write_text(text[:cut])
        report = replay(tmp_path / "attempt-0")
        assert report.identical and report.open_step is not None, report


@pytest.mark.parametrize(("policy", "stream", "cut"), [*((*case, 4) for case in CASES), ("greso", "separate", 1)])
def test_an_async_resume_goes_on_bit_for_bit_and_a_record_replays(policy, stream, cut, tmp_path):
    """In flight and ready groups survive: after a reload, the same arrivals lead to the same decisions and state."""
    engine, world = made(policy, stream, failure=0.05)
    recorder, arrivals = Recorder(tmp_path, engine), Arrivals(world, 9)
    for step in range(1, cut + 1):
        arrivals.step(engine, step)
    table = StatsTable.from_arrow(engine.table.to_arrow())
    again, _ = made(policy, stream, world=world, table=table)
    again.load_state_dict(states(engine))
    again.prompt_source.stream = copy.deepcopy(world.source)
    twin = copy.deepcopy(arrivals)
    for step in range(cut + 1, 10):
        if engine.finished:
            assert again.finished
            break
        one, other = arrivals.step(engine, step), twin.step(again, step)
        assert np.array_equal(one.groups.submission, other.groups.submission)
        assert one.outcome.tolist() == other.outcome.tolist()
        assert np.array_equal(one.trains, other.trains)
        assert one.ledger.as_dict() == other.ledger.as_dict()
        assert same(states(engine), states(again))
        equal(engine.table, again.table)
    recorder.close()
    report = replay(tmp_path / "attempt-0")
    assert report.identical and report.open_step is None, report
    assert (report.steps, report.rollouts) == (engine.progress.step, engine.total.rollouts.generated)


@pytest.mark.parametrize("sampler", ["spread", "mopps"])
def test_prompts_that_were_read_ahead_are_picked_from_the_pool_after_a_change_of_sampler(sampler):
    """They wait for a gate, which a pool sampler has not."""
    engine, world = make_async_engine("greso", filter="informative", batch=4, n=4, M=40)
    engine.prompt_source.ahead = np.arange(6)
    state, table = engine.state_dict(), engine.table
    other, _ = make_async_engine(sampler, filter="informative", batch=4, n=4, world=world, table=table)
    other.load_state_dict(state)
    arrivals, seen = Arrivals(world), set()
    for step in range(1, 31):
        seen |= set(arrivals.step(other, step).groups.index.tolist())
    assert set(range(6)) <= seen


def test_a_step_takes_the_oldest_ready_groups_not_the_quickest():
    engine, world = made("grpo", AsyncFacts(warmup=8))
    requests = engine.begin(1)
    assert len(requests) == 16
    last = requests.select(np.arange(8, 16))
    assert engine.receive(world.roll(last)) is None
    assert engine.can_take(8)
    engine.receive(world.roll(requests.select(np.arange(7, 8))))
    assert engine.take().groups.submission.tolist() == list(range(7, 15))


def half_taken(engine: AsyncEngine, world: World) -> Requests:
    """A first step that trains on the first 8 of 16 groups; gives the requests of the others, which stay in flight."""
    requests = engine.begin(1)
    engine.receive(world.roll(requests.select(np.arange(8))))
    engine.take()
    engine.finish()
    return requests.select(np.arange(8, 16))


@pytest.mark.parametrize("outcome", ["stale", "all_wrong"])
def test_a_short_batch_takes_no_group_that_is_too_old(outcome):
    """Whatever it was dropped for, verl's threshold holds; and the few that are young enough keep their rows."""
    facts = AsyncFacts(warmup=8, threshold=1)
    engine, world = made("dapo", facts, p=np.full(64, 0.5), on_exhausted="relax", max_rollouts_per_step=128)
    late, fresh = half_taken(engine, world), engine.begin(2)
    if outcome == "all_wrong":
        world.p[:] = 0.0
    engine.receive(world.roll(late))
    assert set(late.submission) <= set(engine.never_trains().submission)
    world.p[:] = 0.0
    engine.receive(world.roll(fresh.select(np.arange(3))))
    assert not set(fresh.submission[:3]) & set(engine.never_trains().submission)
    world.failure = 1.0
    while not engine.starved:
        engine.receive(world.roll(engine.flight))
    assert engine.take().groups.submission.tolist() == fresh.submission[:3].tolist()
    result = engine.finish()
    assert set(late.submission) == set(result.groups.submission[result.outcome == outcome])


def test_a_group_that_never_comes_back_costs_nothing_but_itself():
    """Its place is filled once it is too old to train, to the last step of the run."""
    engine, world = made("grpo", AsyncFacts(warmup=8, threshold=3), steps=8)
    arrivals = Arrivals(world, 0)
    requests = engine.begin(1)
    hung = requests.submission[3]
    arrivals.send(requests.select(requests.submission != hung))
    for step in range(1, 9):
        if step > 1:
            arrivals.send(engine.begin(step))
        while not engine.can_take(8):
            arrivals.send(engine.receive(arrivals.back()))
        assert len(engine.take().groups) == 8
        engine.finish()
    assert engine.flight.submission.tolist() == [hung]


def test_a_step_does_not_wait_for_a_group_that_is_too_old_to_train():
    """Where nothing is refilled it waited for the one that hangs, until ``stall_timeout`` ended the run."""
    engine, world = made("grpo", AsyncFacts(warmup=1, threshold=1))
    requests = engine.begin(1)
    engine.receive(world.roll(requests.select(np.arange(1, 9))))
    engine.take()
    engine.finish()
    world.failure = 1.0
    engine.receive(world.roll(engine.begin(2)))
    assert engine.flight.submission.tolist() == [0] and not len(engine.ready)
    fresh = engine.revive()
    engine.receive(world.roll(fresh.select(np.arange(4))))
    world.failure = 0.0
    engine.receive(world.roll(fresh.select(np.arange(4, len(fresh)))))
    assert engine.decided and len(engine.take().groups) == len(fresh) - 4 == 5


def test_a_group_that_is_too_old_to_train_gets_no_top_up():
    """It was topped up and then dropped, and its commit took the place of a younger one."""
    parts = ("epoch", {**ON_POLICY, "lower": 0.0, "upper": 0.0}, "band", "verl")
    engine, world = make_async_engine(*parts, async_facts=AsyncFacts(warmup=8, threshold=1))
    first = engine.begin(1)
    engine.receive(world.roll(engine.receive(world.roll(first.select(np.arange(8))))))
    engine.take()
    engine.finish()
    young = engine.begin(2)
    assert engine.receive(world.roll(first.select(np.arange(8, 16)))) is None
    assert len(engine.receive(world.roll(young))) == len(young) == 16


def test_wait_blocks_until_old_groups_are_back():
    engine, world = made("grpo", AsyncFacts(warmup=8, threshold=2, strategy="wait"))
    late = half_taken(engine, world)
    engine.receive(world.roll(engine.begin(2)))
    assert len(engine.ready) >= 8 and not engine.can_take(8)  # eight of step 1 are still in flight
    with pytest.raises(AdaptiveError, match="wait for more"):
        engine.take()
    engine.receive(world.roll(late))
    assert engine.can_take(8)


@pytest.mark.parametrize(("strategy", "stale"), [("drop", 8), ("wait", 0)])
def test_only_drop_makes_a_ready_group_stale(strategy, stale):
    engine, world = made("grpo", AsyncFacts(warmup=16, threshold=2, strategy=strategy))
    for step in (1, 2, 3):
        engine.receive(world.roll(engine.begin(step)))
        assert len(engine.take().groups) == 8
        result = engine.finish()
    assert (result.outcome == "stale").sum() == stale


def test_a_mini_step_without_a_group_draws_once_more_where_nothing_is_refilled(tmp_path):
    """A step whose groups all failed ended the run: nothing was ready, and a batch of none passed for one."""
    engine, world = made("grpo", AsyncFacts(), failure=1.0)
    recorder = Recorder(tmp_path, engine)
    requests = engine.begin(1)
    assert engine.receive(world.roll(requests)) is None
    assert engine.starved and not engine.can_take(engine.count)
    world.failure = 0.0
    engine.receive(world.roll(engine.revive()))
    assert engine.can_take(engine.count) and len(engine.take().groups) == 8
    recorder.close()
    report = replay(tmp_path / "attempt-0")
    assert report.identical and (report.polls, report.decisions) == (2, 5), report


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["train_partial", "relax"])
def test_what_little_there_is_serves_every_mini_step(mode, rate):
    """The first one used to take all that the filter had dropped, and the next one ended the run."""
    parts = 4
    engine, world = made(
        "dapo", AsyncFacts(mini_steps=parts), p=np.full(64, rate), max_rollouts_per_step=40, on_exhausted=mode
    )
    result = Arrivals(world, 1).step(engine, 1)
    assert [len(taken.groups) for taken in engine._taken] == [2, 1, 1, 1]
    assert result.trained.sum() == 5 and f"{0 if rate == 0 else 5} of 8 groups" in result.note
    assert all("cap of 40 rollouts" in taken.note for taken in engine._taken if taken.note)


@pytest.mark.parametrize(("mode", "sizes"), [("train_partial", [1, 1, 1, 0]), ("relax", [2, 2, 2, 2])])
def test_dropped_groups_train_beside_kept_ones_where_that_was_asked_for(mode, sizes):
    engine, world = made("dapo", AsyncFacts(mini_steps=4), p=np.ones(64), on_exhausted=mode, max_rollouts_per_step=80)
    requests = engine.begin(1)
    world.p[:] = 0.5
    back = world.roll(requests.select(np.arange(3)))
    world.p[:] = 1.0
    engine.receive(back)
    while not engine.starved:
        engine.receive(world.roll(engine.flight))
    assert [len(engine.take().groups) for _ in range(4)] == sizes


def test_fewer_groups_than_mini_steps_are_no_reason_to_end_a_run():
    """As at the end of CERO's budget, whose last round is what is left of it."""
    engine, world = made("cero", AsyncFacts(mini_steps=4), steps=3)
    engine.policy.sampler.budget = 5
    arrivals, sizes = Arrivals(world, 1), []
    while not engine.finished:
        result = arrivals.step(engine, len(sizes) + 1)
        sizes.append([len(taken.groups) for taken in engine._taken])
        assert result.trained.sum() == sum(sizes[-1])
    assert sizes == [[1, 1, 1, 0]]
    assert "3 of 8 groups" in result.note


def test_a_mini_step_that_no_prompt_is_let_through_for_goes_ungated():
    """Two prompts are left, and solved: they serve two mini-steps, and retired ones the others."""
    parts = (RETIRED, "fixed", "informative", "verl")
    engine, world = make_async_engine(*parts, async_facts=AsyncFacts(mini_steps=4), p=np.ones(64))
    engine.table.col("retired")[2:] = 1
    result = Arrivals(world, 1).step(engine, 1)
    assert all(len(taken.groups) for taken in engine._taken)
    assert {0, 1} < set(result.groups.row[result.trained].tolist())


def test_a_step_asks_the_gate_about_so_many_passes_and_no_more_for_each_look():
    """Else what is turned away gets another chance whenever something comes back, and the gate keeps nothing out."""
    size = 64
    p = np.where(np.arange(size) % 10, 1.0, 0.5)
    parts = ("greso", "fixed", "informative")
    engine, world = make_async_engine(*parts, batch=16, p=p, async_facts=AsyncFacts(warmup=16))
    arrivals = Arrivals(world)
    for step in range(1, 8):
        before = engine.prompt_source.position
        arrivals.step(engine, step)
        assert engine.prompt_source.position - before <= (MAX_PASSES + 1) * size


@pytest.mark.parametrize("on_exhausted", ["train_partial", "raise"])
def test_live_prompts_that_are_all_under_way_do_not_shut_the_gate(on_exhausted) -> None:
    """Ten are left of forty, for a window of twelve: the first draw of a step found none free, and steps were short."""
    p = np.ones(40)
    p[:10] = 0.15
    parts, stream = ({"name": "retire", "recheck": 0.0}, "fixed", "informative"), AsyncFacts(warmup=8)
    engine, world = make_async_engine(*parts, batch=4, n=4, p=p, on_exhausted=on_exhausted, async_facts=stream)
    arrivals, shown = Arrivals(world, 1), 0
    for step in range(1, 31):
        result = arrivals.step(engine, step)
        assert result.trained.sum() == 4
        shown += engine.prompt_source.ended == BUSY
    assert shown  # it came to that


def test_pilots_leave_room_under_a_cap_for_their_commits():
    """They used to eat it: a fifth of the groups, and every third pilot in the band had no commit."""
    stream, p = AsyncFacts(warmup=8), (np.arange(400) + 0.5) / 400
    engine, world = made("pilot_commit", stream, M=400, p=p, steps=40, max_rollouts_per_step=96)
    arrivals, trained, passed_over = Arrivals(world, 3), 0, 0
    for step in range(1, 31):
        result = arrivals.step(engine, step)
        assert engine.progress.planned <= 96
        trained += int(result.trained.sum())
        passed_over += int((result.outcome == "surplus_pilot").sum())
    assert trained > 0.9 * 30 * 8 and passed_over < 0.1 * trained


def in_sync(like: AsyncEngine) -> OrderedEngine:
    config = copy.deepcopy(like.config)
    table = StatsTable.from_arrow(like.table.to_arrow())
    return OrderedEngine(build_policy(config), table, config, like.facts, like.row_of, like.prompt_source.stream)


@pytest.mark.parametrize("policy", ["greso", "pilot_commit"])
def test_another_mode_leaves_behind_what_is_in_flight(policy, tmp_path):
    """Where the user accepts it (integration/resume.py)."""
    engine, world = made(policy, "colocated")
    arrivals = Arrivals(world, 2)
    held = arrivals.step(engine, 1).ledger.rollouts.held
    state = states(engine)
    other = in_sync(engine)
    other.load_state_dict(state)
    seen, ready = other.table.col("visits").sum(), set(engine.ready.groups.submission.tolist())
    recorder, observe, observed = Recorder(tmp_path, other), other.policy.observe, []
    other.policy.observe = lambda groups, progress: (observed.append(groups.submission), observe(groups, progress))
    result = run_step(other, world, 2)
    recorder.close()
    assert replay(tmp_path / "attempt-0").identical  # where they counted as never made
    assert result.ledger.rollouts.dropped.get("gone", 0) == held
    # what was ready had been reviewed, and is not learned from again
    assert ready or len(engine.tracker.open)
    assert ready <= set(result.groups.submission[result.outcome == "gone"])
    assert sorted(np.concatenate(observed)) == sorted(set(result.groups.submission) - ready)
    assert other.table.col("visits").sum() == seen + len(result.groups) - len(ready)
    account = result.ledger.rollouts
    assert account.generated + held == account.trained + account.dropped_in_all + account.held


@pytest.mark.parametrize("parts", [{}, {"allocator": ON_POLICY, "filter": "band"}], ids=["fixed", "on_policy"])
def test_an_asynchronous_trainer_drops_groups_that_another_allocator_held(parts):
    """It was refused once the models were loaded, and with any other allocator it was not."""
    engine, world = make_engine(allocator=PIPELINED, filter="band", p=np.full(64, 0.5))
    run(engine, world, 3)
    held = engine.held.rollouts
    again, _ = make_async_engine(world=world, table=StatsTable.from_arrow(engine.table.to_arrow()), **parts)
    again.load_state_dict(engine.state_dict())
    account = Arrivals(world).step(again, 4).ledger.rollouts
    assert account.dropped["gone"] == held > 0 and account.balanced(held)
    again.load_state_dict(again.state_dict())


def test_prompts_that_left_the_data_set_are_not_topped_up():
    """``resume.allow=[dataset]``: open groups of vanished prompts are counted, never asked for again."""
    engine, world = made("pilot_commit", "colocated")
    arrivals = Arrivals(world, 2)
    held = 0
    for step in (1, 2, 3):
        held = arrivals.step(engine, step).ledger.rollouts.held
    gone = np.unique(engine.flight.row)[:4]
    again, arrivals.world = without(gone, engine, world, **POLICIES["pilot_commit"], async_facts=STREAMS["colocated"])
    assert not np.isin(again.flight.row, gone).any()
    arrivals.waiting = [g for g in arrivals.waiting if not np.isin(g.row, gone).any()]
    account = arrivals.step(again, 4).ledger.rollouts
    assert account.generated + held == account.trained + account.dropped_in_all + account.held


def test_what_prompts_that_left_the_data_set_had_paid_leaves_aeros_pool():
    setting = {"allocator": "aero", "filter": "informative", "batch": 4, "async_facts": AsyncFacts(warmup=12)}
    engine, world = make_engine(**setting, p=np.full(40, 0.2))
    Arrivals(world).step(engine, 1)
    gone = int((engine.flight.index >= 20).sum())
    assert gone and engine._unspent == 4 * len(engine.living)  # 8 rollouts a prompt, 4 of which explore
    again, _ = without(np.arange(20, 40), engine, world, **setting)
    assert again._unspent == engine._unspent - 4 * gone


def test_the_pool_of_an_allocator_that_is_gone_cuts_no_top_up():
    """``resume.allow=[policy]``: pilots in the band were dropped by the thousand, for want of what AERO's prompts had paid."""
    setting = {"p": np.full(400, 0.5), "async_facts": AsyncFacts(warmup=24)}
    engine, world = make_async_engine(allocator="aero", **setting)
    arrivals = Arrivals(world)
    for step in (1, 2):
        arrivals.step(engine, step)
    before, pilots = engine._submission, {**ON_POLICY, "lower": 0.0, "upper": 0.0}
    again, _ = make_async_engine(allocator=pilots, filter="band", **setting, world=world, table=engine.table)
    again.load_state_dict(engine.state_dict())
    for step in range(3, 7):
        result = arrivals.step(again, step)
        assert result.trained[result.groups.submission >= before].all()


@pytest.mark.parametrize("refill", [False, True])
def test_aeros_pool_is_paid_by_the_prompts_that_the_cap_lets_through(refill):
    """The others were credited as well, in each step that asked for them anew."""
    parts = ("epoch", "aero", "aero", "beta")
    engine, _ = make_async_engine(*parts, async_facts=AsyncFacts(warmup=8), refill=refill, max_rollouts_per_step=24)
    assert engine.begin(1).rollouts == 24
    assert engine._unspent == 6 * (8 - 4)


def test_a_top_up_that_lost_rollouts_costs_aeros_pool_nothing_more():
    """Its group closes with what it has: a further one was taken from the pool, and never sent."""
    engine, world = made("aero", AsyncFacts(warmup=8), p=np.zeros(64))
    topups = engine.receive(world.roll(engine.begin(1)))
    pool, back = engine._unspent, world.roll(topups)
    back.lost[:] = 1
    assert engine.receive(back) is None and len(engine.ready) == 16
    assert engine._unspent == pool == 16 * 4 - 16 * 4


def test_first_rollouts_get_older_while_their_group_waits_for_a_top_up():
    parts = ("epoch", {"name": "aero", "rounds": 1}, "aero", "beta")
    engine, world = make_async_engine(*parts, async_facts=AsyncFacts(warmup=8), p=np.zeros(64), refill=False)
    first = world.roll(engine.begin(1))
    first.lag[:] = 1
    topups = engine.receive(first)
    engine.receive(world.roll(topups.select(np.arange(8))))
    engine.take()
    assert (engine.finish().groups.lag == 1).all()
    engine.begin(2)
    late = world.roll(topups.select(np.arange(8, 16)))
    late.lag[:] = 1  # asked for a step ago, when the first ones were one weight update old
    engine.receive(late)
    assert (engine.ready.groups.lag == 2).all() and len(engine.ready) == 8


def test_old_evidence_weighs_less():
    engine, _ = made("mopps+aero", "colocated", stale_discount=0.5)
    engine.begin(1)
    sampler = engine.policy.sampler
    groups = Groups.from_lists([0, 1], [[1.0] * 4, [1.0] * 4], lag=[0, 2])
    sampler.observe(groups, engine.progress)
    wins = sampler.col("wins")
    assert wins[0] == 4.0 and wins[1] == 1.0
