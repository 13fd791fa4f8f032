"""Committing in ticket order: what trains and what is learned depends on rewards and tickets, never on who is back first."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_engine import ALLOCATORS, FILTERS, duplicated, rates, same_table
from tests.world import World, make_engine, run_step
from verl_adaptive.engine import OrderedEngine, Requests, StepResult
from verl_adaptive.errors import AdaptiveError, ConfigError, Exhausted
from verl_adaptive.groups import PER_ROLLOUT, Groups
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.roles import Allocator, Pick, Sampler
from verl_adaptive.stats.table import StatsTable

ON_POLICY = {"name": "pilot_commit", "n_pilot": 2, "form": "on_policy"}
PILOTS = [
    ON_POLICY,
    {**ON_POLICY, "sized_to_need": True, "factor": None},
    {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined"},
]
SAMPLERS = ["epoch", "greso", "retire", "mopps", {"name": "epoch", "round": {"prompts": 9}}]

setups = st.fixed_dictionaries(
    {
        "sampler": st.sampled_from(SAMPLERS),
        "allocator": st.sampled_from([*ALLOCATORS, {"name": "aero", "n_extra": 2, "rounds": 8}, *PILOTS]),
        "filter": st.sampled_from(FILTERS[:3]),
        "batch": st.integers(1, 6),
        "n": st.integers(3, 8),
        "M": st.integers(1, 20),
        "seed": st.integers(0, 10_000),
        "refill": st.booleans(),
        "max_rounds": st.sampled_from([1, 2, 5, 32]),
        "max_rollouts_per_step": st.sampled_from([None, None, 20, 60, 150]),
        "on_exhausted": st.sampled_from(["train_partial", "relax", "raise"]),
        "failure": st.sampled_from([0.0, 0.0, 0.2]),
        "shape": st.sampled_from(["even", "hard", "solved", "lost"]),
    }
)
quick = settings(max_examples=40, suppress_health_check=list(HealthCheck))


def build(setup: dict, **more) -> tuple[OrderedEngine, World]:
    options = {k: v for k, v in setup.items() if k not in ("failure", "shape")} | more
    world = World(rates(setup["shape"], setup["M"]), setup["seed"], failure=setup["failure"])
    engine, _ = make_engine(world=world, rounds=False, keys=duplicated(setup["M"]), **options)
    assert isinstance(engine, OrderedEngine)
    return engine, world


class Arrivals:
    """Rollout workers that answer one request after another, in an order of their own.

    Args:
        seed: of the order; None: everything in flight comes back together.
    """

    def __init__(self, engine, world, seed: int | None = None) -> None:
        self.engine, self.world = engine, world
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.asked: list[Requests] = []
        self.waiting: list[Groups] = []

    def send(self, requests: Requests | None) -> None:
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
        while not self.engine.settled:
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
    for name in ("outcome", "trains", "ghost"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.partial == b.partial
    mine, theirs = (
        {
            **r.ledger.rollouts.as_dict(),
            "dropped": {k: v for k, v in r.ledger.rollouts.dropped.items() if k != "aborted"},
        }
        for r in (a, b)
    )
    for paid in ("planned", "generated"):
        del mine[paid], theirs[paid]
    assert mine == theirs


@quick
@given(setups, st.integers(0, 2**32 - 1))
def test_any_order_of_arrival_gives_the_same_batch_and_statistics(setup, seed) -> None:
    runs = [Arrivals(*build(setup)), Arrivals(*build(setup), seed=seed), Arrivals(*build(setup), seed=seed + 1)]
    for step in range(1, 5):
        results = [run.step(step) for run in runs]
        for other in results[1:]:
            same_batch(results[0], other)
        if isinstance(results[0], str):
            return
        for run in runs[1:]:
            same_table(runs[0].engine.table, run.engine.table)
            assert run.engine.feed.position == runs[0].engine.feed.position
            assert run.engine.policy.state_dict() == runs[0].engine.policy.state_dict()


@quick
@given(setups, st.integers(0, 2**32 - 1))
def test_every_rollout_is_accounted_for(setup, seed) -> None:
    engine, world = build(setup)
    run = Arrivals(engine, world, seed)
    held = 0
    for step in range(1, 5):
        result = run.step(step)
        if isinstance(result, str):
            return
        ledger = result.ledger
        assert ledger.rollouts.balanced(held), ledger
        held = ledger.rollouts.held
        assert held == engine.held.rollouts
        assert engine.total.rollouts.balanced() and engine.total.tokens.balanced()
        assert (np.diff(result.groups.ticket) > 0).all()
        trained = np.flatnonzero(result.trained)
        whole = not setup["refill"] and engine.policy.sampler.kind == "pool"
        assert len(trained) <= setup["batch"] or whole
        asked = sum(r.rollouts for r in run.asked)
        assert asked == ledger.rollouts.planned
        cap = setup["max_rollouts_per_step"]
        assert cap is None or asked <= cap


@quick
@given(setups, st.integers(0, 2**32 - 1))
def test_resume_is_exact(setup, seed) -> None:
    engine, world = build(setup)
    for step in range(1, 3):
        if isinstance(Arrivals(engine, world, seed).step(step), str):
            return

    def plain(state):
        if isinstance(state, dict):
            return {key: plain(value) for key, value in state.items()}
        return state.copy() if isinstance(state, np.ndarray) else json.loads(json.dumps(state))

    other_world = copy.deepcopy(world)
    resumed, _ = build(setup, table=StatsTable.from_arrow(engine.table.to_arrow()))
    resumed.source = other_world.source
    resumed.load_state_dict(plain(engine.state_dict()))
    runs = [Arrivals(engine, world, seed), Arrivals(resumed, other_world, seed + 1)]
    for step in range(3, 6):
        a, b = (run.step(step) for run in runs)
        same_batch(a, b)
        if isinstance(a, str):
            return
        same_table(engine.table, resumed.table)


@quick
@given(setups, st.integers(0, 2**32 - 1))
def test_one_group_of_a_prompt_at_a_time(setup, seed) -> None:
    engine, world = build(setup)
    run = Arrivals(engine, world, seed)
    for step in range(1, 4):
        run.asked, run.waiting = [], []
        run.send(engine.begin(step))
        while True:
            under_way = {
                ticket: row
                for groups in (engine.flight, engine.desk.open, engine.held)
                for ticket, row in zip(groups.ticket.tolist(), groups.row.tolist(), strict=True)
            }
            if not engine.policy.sampler.whole_batches:
                assert len(set(under_way.values())) == len(under_way), "two groups of a prompt under way"
            if engine.settled:
                break
            run.send(engine.receive(run.back()))
        try:
            engine.finish()
        except Exhausted:
            return


# -- particular situations ------------------------------------------------------------------------------------


def test_the_batch_is_the_first_kept_and_the_rest_is_aborted() -> None:
    engine, world = make_engine(
        {"name": "epoch", "round": {"prompts": 12}}, batch=3, n=4, p=np.full(30, 0.5), filter="keep_all", rounds=False
    )
    run = Arrivals(engine, world)
    requests = engine.begin(1)
    groups = world.roll(requests)
    assert engine.receive(groups.select(np.array([11, 5, 2, 1]))) is None and not engine.settled
    engine.receive(groups.select(np.array([0])))
    assert engine.settled and len(engine.flight) == 7
    engine.abandon(10, 250)
    result = engine.finish()
    assert result.groups.ticket.tolist() == [0, 1, 2] and result.trained.all()
    assert result.ledger.rollouts.dropped == {"aborted": 8 + 10} and result.ledger.rollouts.balanced()
    assert run.engine.table.col("visits").sum() == 3
    # the next step begins where this one ended: the aborted prompts come again, under the numbers that were not used
    again = engine.begin(2)
    assert again.ticket[0] == 3 and again.index[:9].tolist() == requests.index[3:].tolist()


def test_plain_grpo_asks_for_a_batch_and_no_more() -> None:
    engine, world = make_engine(batch=8, n=4, M=64, rounds=False)
    run = Arrivals(engine, world, 1)
    for step in range(1, 6):
        result = run.step(step)
        assert [len(r) for r in run.asked] == [8] and result.rounds == 1
        assert "aborted" not in result.ledger.rollouts.dropped


def test_few_failures_do_not_make_grpo_wait() -> None:
    """One group in twenty lost: the step trains on nineteen; a fifth of them lost: it fills up."""
    for lost, sends in ((1, 1), (4, 2)):
        engine, world = make_engine(batch=20, n=4, M=64, rounds=False)
        requests = engine.begin(1)
        groups = world.roll(requests)
        groups.failed[:lost] = True
        more = engine.receive(groups)
        assert (more is not None) == (sends == 2)
        if more is not None:
            engine.receive(world.roll(more))
        result = engine.finish()
        assert result.trained.sum() == (19 if lost == 1 else 20) and not result.note


@quick
@given(st.integers(11, 40), st.sampled_from([0.05, 0.1, 0.15, 0.3, 0.7]), st.integers(0, 2**32 - 1))
def test_failures_that_are_not_waited_for_are_the_same_in_any_order_of_arrival(batch, failure, seed) -> None:
    """Which of them are few was decided by how many had come back when the step looked."""
    setup = {"batch": batch, "n": 2, "M": 200, "seed": seed % 10_000, "failure": failure, "shape": "even"}
    runs = [Arrivals(*build(setup)), Arrivals(*build(setup), seed=seed), Arrivals(*build(setup), seed=seed + 1)]
    for step in range(1, 4):
        results = [run.step(step) for run in runs]
        for other in results[1:]:
            same_batch(results[0], other)
        assert results[0].trained.sum() >= 0.9 * batch
        if failure <= 0.1:
            assert all("aborted" not in r.ledger.rollouts.dropped for r in results)


def test_only_where_a_failed_group_alone_is_lost_a_batch_may_be_short() -> None:
    """Pilots that get no commit never train: a batch that lacks some of them is not full but for a few faults."""
    engine, world = make_engine("epoch", ON_POLICY, batch=20, n=8, p=np.full(400, 0.1), seed=5, rounds=False)
    run = Arrivals(engine, world, 1)
    assert [int(run.step(step).trained.sum()) for step in range(1, 4)] == [20, 20, 20]


def test_one_bad_step_costs_the_later_ones_nothing() -> None:
    """What a fault lost says nothing of the prompts: the next steps ask for a batch again, not for a tenth more."""
    engine, world = make_engine(batch=50, n=4, M=400, rounds=False)
    for step in range(1, 6):
        world.failure = 0.04 if step == 2 else 0.0
        result = run_step(engine, world, step)
        assert step == 2 or result.ledger.rollouts.generated == 200
        assert "aborted" not in result.ledger.rollouts.dropped
    assert engine.fertile == 1.0


def test_a_yield_of_nearly_all_asks_for_nearly_as_many_as_are_missing() -> None:
    progress = Progress(step=1, batch=100, draw=Draw(0, 1))
    for fertile, wanted in ((None, 100), (1.0, 100), (1 - 4e-16, 100), (0.99, 103), (0.9, 123), (0.5, 220)):
        progress.fertile = fertile
        assert progress.wanted() == wanted


@pytest.mark.parametrize(
    ("sampler", "more"),
    [("epoch", {"filter": "informative"}), ("mopps", {"failure": 0.1}), ("spread", {"filter": "informative"})],
)
def test_without_refill_a_step_is_one_batch(sampler, more) -> None:
    failure = more.pop("failure", 0.0)
    world = World(np.full(400, 0.5), 0, failure=failure)
    engine, _ = make_engine(sampler, world=world, batch=32, n=2, rounds=False, refill=False, **more)
    for step in range(1, 7):
        result = run_step(engine, world, step)
        assert len(result.groups) == 32 and result.trained.sum() <= 32


def test_without_refill_a_cap_costs_rescues_before_prompts() -> None:
    """Prompts whose worst case had no room at first go out when the others have turned out to need less."""
    for cap, whole in ((6 * 64, True), (4 * 64 - 4, False)):
        engine, world = make_engine(
            "epoch", "aero", "aero", "beta", batch=64, n=8, M=400, rounds=False, refill=False, max_rollouts_per_step=cap
        )
        for step in range(1, 4):
            result = run_step(engine, world, step)
            assert result.ledger.rollouts.generated <= cap
            assert (len(result.groups) == 64) == whole
            assert whole == (not result.note) and (whole or f"the step's cap of {cap} rollouts" in result.note)


def test_a_step_ends_with_the_epoch_that_it_has_reached() -> None:
    for rounds in (True, False):
        engine, world = make_engine(batch=8, n=4, M=64, rounds=rounds)
        for step in range(1, 11):
            run_step(engine, world, step)
            assert engine.progress.epoch == step / 8


def test_the_first_request_follows_the_yield() -> None:
    engine, world = make_engine(filter="informative", batch=16, n=4, p=np.repeat([0.5, 1.0], 200), rounds=False)
    run = Arrivals(engine, world, 0)
    first = []
    for step in range(1, 12):
        run.step(step)
        first.append(len(run.asked[0]))
    assert first[0] == 16  # nothing is known yet
    assert 30 <= np.mean(first[4:]) <= 48  # 1.1 · 16 / 0.44


def test_a_topup_goes_out_when_its_own_group_is_back() -> None:
    engine, world = make_engine(
        "epoch", "aero", "aero", "beta", batch=8, n=8, p=np.zeros(40), refill=False, rounds=False
    )
    requests = engine.begin(1)
    groups = world.roll(requests)
    more = engine.receive(groups.select(np.array([0])))
    assert more.ticket.tolist() == [0] and more.n.tolist() == [4]


def test_a_pool_of_rollouts_is_settled_in_ticket_order() -> None:
    """Eight prompts pay 4 each into the pool of 32; each takes 8 while it lasts: the first four do, whoever is back first."""
    options = dict(batch=8, n=8, p=np.zeros(40), refill=False, rounds=False)
    for seed in range(20):
        engine, world = make_engine("epoch", {"name": "aero", "rounds": 2}, "aero", "beta", **options)
        run = Arrivals(engine, world, seed)
        result = run.step(1)
        assert result.groups.n.tolist() == [12, 12, 12, 12, 4, 4, 4, 4]
        assert sum(r.rollouts for r in run.asked) == 64


def test_pilots_commit_as_long_as_the_batch_has_places() -> None:
    options = dict(filter="band", batch=4, n=8, p=np.full(60, 0.5), rounds=False)
    engine, world = make_engine("epoch", {**ON_POLICY, "n_pilot": 4}, **options)
    groups = world.roll(engine.begin(1))
    assert len(groups) == 12
    inside = np.flatnonzero(engine.policy.allocator.side(groups) == 0)
    last = groups.select(inside[-1:])
    assert engine.receive(last) is None  # four lower ones may yet take all places
    first = engine.receive(groups.select(inside[:1]))
    assert first.ticket.tolist() == [int(inside[0])]  # a place is sure


class CommitsLast(Arrivals):
    """Pilots are back before every commit: what is out is out early, what is kept is not yet."""

    def back(self) -> Groups:
        first = [g for g in self.waiting if int(g.stage.max()) == 0] or self.waiting
        self.waiting = [g for g in self.waiting if not any(g is f for f in first)]
        return Groups.concat(first)


def test_groups_that_commit_count_when_more_pilots_are_sent() -> None:
    """Else hardly any group seems to be kept, and a step sends hundreds of pilots that it aborts."""
    p = np.where(np.arange(4000) % 10 < 3, 0.5, 0.0)
    engine, world = make_engine("epoch", {**ON_POLICY, "n_pilot": 4}, "band", batch=16, n=8, p=p, rounds=False)
    run, pilots = CommitsLast(engine, world), 0
    for step in range(1, 21):
        result = run.step(step)
        assert isinstance(result, StepResult) and result.trained.sum() == 16
        pilots += sum(int((r.stage == 0).sum()) for r in run.asked)
        for further in run.asked[1:]:
            assert (further.stage == 0).sum() <= 80  # half of a batch may be missing where one of four is kept
    assert pilots <= 20 * 1.5 * 16 / 0.26


def test_results_must_be_in_flight() -> None:
    engine, world = make_engine(batch=4, n=2, M=8, rounds=False)
    results = world.roll(engine.begin(1))
    engine.receive(results.select(np.array([1])))
    for wrong in (
        results.select(np.array([1])),
        Groups.concat([results.select(np.array([0])), results.select(np.array([0]))]),
    ):
        with pytest.raises(AdaptiveError, match="do not match"):
            engine.receive(wrong)


def test_training_on_the_surplus_needs_rounds() -> None:
    with pytest.raises(ConfigError, match=r"adaptive.surplus.*adaptive.rounds=true"):
        make_engine(batch=4, n=2, M=8, rounds=False, surplus="train")


def test_long_answers_are_begun_first_and_decide_nothing() -> None:
    """Handed out by the length that a prompt's answers have had, what is in excess of the batch last; tickets stay."""
    results = []
    for longest_first in (True, False):
        engine, world = make_engine(
            "epoch",
            "fixed",
            "informative",
            batch=6,
            n=4,
            p=np.tile([0.5, 1.0], 12),
            rounds=False,
            longest_first=longest_first,
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
            answers = roll(requests)
            while not engine.settled:
                requests = engine.receive(answers)
                if requests is not None:
                    answers = roll(requests)
            run.append(engine.finish())
        results.append(run)
        needed = min(len(sent[0]), round(6 / engine.fertile))
        first = length[sent[0].index]
        assert (np.diff(first[: needed - 1]) <= 0).all() == longest_first
        assert (sent[0].ticket[:-1] < sent[0].ticket[1:]).all() != longest_first
    for a, b in zip(*results, strict=True):
        same_batch(a, b)


def test_a_record_replays_what_was_given_up(tmp_path) -> None:
    from verl_adaptive.record import Tape, replay

    engine, world = make_engine("greso", "aero", "informative", batch=6, n=8, M=60, rounds=False)
    tape = Tape(tmp_path, engine)
    run = Arrivals(engine, world, 3)
    ledgers = [run.step(step).ledger for step in range(1, 7)]
    tape.close()
    report = replay(tmp_path / "attempt-0")
    assert report.identical and report.ledgers == ledgers
    assert sum(ledger.rollouts.dropped.get("aborted", 0) for ledger in ledgers) > 0


@pytest.mark.parametrize(
    "allocator", ["fixed", "aero", {"name": "pilot_commit", "form": "on_policy"}], ids=["fixed", "aero", "pilot_commit"]
)
@pytest.mark.parametrize("seed", range(3))
def test_who_plans_a_step_at_once_is_asked_once_and_told_what_was_spent(allocator, seed) -> None:
    rates = np.random.default_rng(seed).beta(0.3, 0.3, 64)

    def run_of(rounds: bool):
        engine, world = make_engine(
            "cero", allocator, refill=False, rounds=rounds, p=rates, batch=8, n=8, M=64, steps=30, seed=seed
        )
        seen = []
        for step in range(1, 31):
            if engine.finished:
                break
            before = engine.policy.sampler.spent, engine.total.rollouts.generated
            result = run_step(engine, world, step)
            sampler = engine.policy.sampler
            asked = result.ledger.rollouts.generated
            assert sampler.spent - before[0] == -(-asked // sampler.g)
            seen.append((sorted(result.groups.row.tolist()), asked))
        return seen

    ordered, rounds = run_of(False), run_of(True)
    if allocator == "fixed":  # others top up otherwise
        assert ordered == rounds
    assert len(ordered) == len(rounds)


def test_a_step_that_is_planned_at_once_goes_out_whole() -> None:
    """66 prompts of a batch of 64, as published: one batch of prompts (``max_rounds=1``) is that plan, not its first 64."""
    engine, world = make_engine("cero", refill=False, rounds=False, max_rounds=1, batch=64, M=200, n=8, steps=20)
    for step in range(1, 4):
        result = run_step(engine, world, step)
        sampler = engine.policy.sampler
        assert len(result.groups) == 66
        assert sampler.spent * sampler.g == engine.total.rollouts.generated


class PlainAllocator(Allocator):
    """Gives each prompt its group, once, and says nothing of top-ups."""

    name = "plain"

    def first(self, rows, planned, progress):
        return np.full(len(rows), self.facts.n)


def test_under_a_cap_an_allocator_without_top_ups_sends_a_step_at_once():
    engine, _ = make_engine(
        "epoch", "tests.test_ordered:PlainAllocator", batch=8, n=4, rounds=False, max_rollouts_per_step=8 * 4 * 2
    )
    assert len(engine.begin(1)) >= 8
    assert PlainAllocator().most(np.array([4]), np.array([0])).tolist() == [0]


class AskingAllocator(PlainAllocator):
    """May top up, and does not say how much."""

    def ask(self, groups, progress):
        return np.where(groups.n < 2 * self.facts.n, self.facts.n, 0)


def test_an_allocator_that_may_top_up_is_taken_for_boundless_unless_it_says_more():
    assert AskingAllocator().most(np.array([4]), np.array([0])).tolist() == [2**31]


class Shuffled(Sampler):
    """Picks anything that it is shown, by random numbers of the step and of ``progress.round``."""

    name = "shuffled"
    kind = "pool"

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        u = progress.draw.uniform("shuffled", self.table.key_hi[pool], self.table.key_lo[pool], progress.round)
        return Pick(pool[np.argsort(u)[:count]])


class Closing(Sampler):
    """A gate that closes after two steps, and asks for nothing more."""

    name = "closing"

    def round_size(self, progress: Progress) -> int:
        return 60 if progress.step <= 2 else 0

    def admit(self, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
        return np.full(len(rows), progress.step <= 2)


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
        "allocator": {"name": "pilot_commit", "n_pilot": 2, "form": "pipelined", "sized_to_need": False, "factor": 1.5},
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
    "small pool": {
        "sampler": f"{__name__}:Shuffled",
        "filter": "informative",
        "p": np.full(5, 0.2),
        "batch": 4,
    },
}


@pytest.mark.parametrize("name", SENT)
def test_how_many_were_sent_decides_nothing(name) -> None:
    options = {"n": 8, "rounds": False, **SENT[name]}
    p, failure = options.pop("p"), options.pop("failure", 0.0)
    for seed in range(4):
        runs = [
            Arrivals(*make_engine(world=World(p, seed, failure=failure), seed=seed, **options), seed=order)
            for order in (None, seed, seed + 100)
        ]
        for step in range(1, 5):
            first, *others = (run.step(step) for run in runs)
            for run, other in zip(runs[1:], others, strict=True):
                same_batch(first, other)
                same_table(runs[0].engine.table, run.engine.table)


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


@pytest.mark.parametrize(
    ("allocator", "cap"),
    [
        ({**ON_POLICY, "n_pilot": 3, "lower": 0.0, "upper": 0.0}, 46),
        ({"name": "aero", "n_explore": 3, "n_extra": 4, "rounds": 3, "max_per_prompt": 9, "budget": "per_prompt"}, 51),
    ],
    ids=["pilot_commit", "aero"],
)
def test_a_cap_holds_where_rollouts_are_lost(allocator, cap) -> None:
    """Who lost some would take more than was reckoned with when later prompts were sent."""
    for seed in range(3):
        runs = [
            Arrivals(
                *make_engine(
                    allocator=allocator,
                    world=Losing(np.full(40, 0.02), seed),
                    batch=6,
                    n=8 if allocator["name"] == "pilot_commit" else 9,
                    rounds=False,
                    max_rollouts_per_step=cap,
                ),
                seed=order,
            )
            for order in (None, seed)
        ]
        for step in range(1, 4):
            same_batch(*(run.step(step) for run in runs))
            assert all(sum(r.rollouts for r in run.asked) <= cap for run in runs)
