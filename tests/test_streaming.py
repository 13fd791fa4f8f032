"""The engine of asynchronous trainers, against worlds whose rewards never depend on the order of arrival."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.world import Arrivals, World, keys_of, make_engine, make_stream_engine, run_step
from verl_adaptive.engine import AsyncEngine, AsyncFacts, Engine, RoundEngine
from verl_adaptive.errors import AdaptiveError, Exhausted
from verl_adaptive.groups import Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.record import RecordError, Tape, replay
from verl_adaptive.stats.table import StatsTable

POLICIES = {
    "grpo": (("epoch", "fixed", "keep_all", "verl"), {"refill": False}),
    "dapo": (("epoch", "fixed", "informative", "verl"), {}),
    "greso": (("greso", "fixed", "informative", "verl"), {}),
    "aero": (("epoch", "aero", "aero", "beta"), {"refill": False}),
    "pilot_commit": (("retire", "pilot_commit", "band", "verl"), {}),
    "mopps+aero": (("mopps", "aero", "aero", "beta"), {"refill": False}),
    "cero": (("cero", "fixed", "keep_all", "verl"), {"refill": False}),
}
STREAMS = {
    "no warm-up": AsyncFacts(),
    "colocated": AsyncFacts(warmup=8, threshold=8),
    "separate": AsyncFacts(warmup=12, parts=4, threshold=3),
    "wait": AsyncFacts(warmup=8, parts=2, threshold=2, strategy="wait"),
}
CASES = [(p, s) for p in POLICIES for s in STREAMS if p != "cero" or STREAMS[s].warmup == 0]


def made(policy: str, stream: str | AsyncFacts, *, failure: float = 0.0, **more):
    parts, options = POLICIES[policy]
    facts = STREAMS[stream] if isinstance(stream, str) else stream
    engine, world = make_stream_engine(*parts, stream=facts, **{"steps": 12, **options, **more})
    world.failure = failure
    return engine, world


def states(engine: AsyncEngine) -> dict:
    return copy.deepcopy(engine.state_dict())


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return (
        np.array_equal(a, b, equal_nan=True)
        if isinstance(a, np.ndarray) and a.dtype.kind == "f"
        else bool(np.all(np.asarray(a) == np.asarray(b)))
    )


@pytest.mark.parametrize(("policy", "stream"), CASES)
@given(order=st.integers(0, 2**32 - 1), failure=st.sampled_from([0.0, 0.1]))
@settings(max_examples=6)
def test_every_rollout_is_accounted_for_and_no_prompt_is_in_flight_twice(policy, stream, order, failure):
    engine, world = made(policy, stream, failure=failure)
    arrivals = Arrivals(world, order)
    held = generated = 0
    observed = 0
    for step in range(1, 13):
        if engine.finished:
            break
        result = arrivals.step(engine, step)
        account = result.ledger.rollouts
        left = account.trained + account.dropped_in_all + account.surplus
        assert account.generated + held == left + account.held
        assert account.surplus == 0  # groups beyond the batch wait
        held, generated = account.held, generated + account.generated
        busy = np.concatenate([engine.flight.row, engine.ready.groups.row])
        assert len(np.unique(busy)) == len(busy)
        assert np.array_equal(np.sort(result.groups.ticket), result.groups.ticket)
        observed += len(result.groups) + 0
    # every group that left was observed once, and so were the ready ones
    seen = engine.table.col("visits").sum() + engine.table.col("failures").sum()
    assert seen == observed + len(engine.ready)
    assert engine.total.rollouts.generated == generated
    assert engine.table.col("rollouts").sum() <= generated


@pytest.mark.parametrize(("policy", "stream"), CASES)
def test_a_record_replays(policy, stream, tmp_path):
    """Given the recorded order of arrivals, every decision is the same; another order is another run."""
    engine, world = made(policy, stream, failure=0.05)
    tape = Tape(tmp_path, engine)
    arrivals = Arrivals(world, 5)
    steps = 0
    for step in range(1, 13):
        if engine.finished:
            break
        arrivals.step(engine, step)
        steps += 1
    tape.close()
    report = replay(tmp_path / "attempt-0")
    assert report.identical and report.open_step is None, report
    assert (report.steps, report.rollouts) == (steps, engine.total.rollouts.generated)


def test_a_replay_notices_a_changed_reward(tmp_path):
    engine, world = made("greso", "colocated")
    tape = Tape(tmp_path, engine)
    arrivals = Arrivals(world, 5)
    for step in range(1, 7):
        arrivals.step(engine, step)
    tape.close()
    events = tmp_path / "attempt-0" / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"back"' in line and "1.0,0.0" in line)
    lines[at] = lines[at].replace("1.0", "0.0")
    events.write_text("".join(lines))
    with pytest.raises(RecordError, match=r"line \d+: the record was changed after the run wrote it"):
        replay(tmp_path / "attempt-0")


def test_a_killed_runs_record_replays_up_to_its_end(tmp_path):
    engine, world = made("dapo", "separate")
    tape = Tape(tmp_path, engine)
    arrivals = Arrivals(world, 5)
    for step in range(1, 5):
        arrivals.step(engine, step)
    tape.close()
    events = tmp_path / "attempt-0" / "events.jsonl"
    text = events.read_text()
    for cut in (len(text) - 3, len(text) // 2, len(text) // 3):
        events.write_text(text[:cut])
        report = replay(tmp_path / "attempt-0")
        assert report.identical and report.open_step is not None, report


@pytest.mark.parametrize(("policy", "stream"), CASES)
@pytest.mark.parametrize("cut", [1, 4])
def test_resume_goes_on_bit_for_bit(policy, stream, cut):
    """In flight and ready groups survive: after a reload, the same arrivals lead to the same decisions and state."""
    engine, world = made(policy, stream, failure=0.05)
    arrivals = Arrivals(world, 9)
    for step in range(1, cut + 1):
        arrivals.step(engine, step)
    table = StatsTable.from_arrow(engine.table.to_arrow())
    again, _ = made(policy, stream, world=world, table=table)
    again.load_state_dict(states(engine))
    again.source = copy.deepcopy(engine.source)
    twin = copy.deepcopy(arrivals)
    for step in range(cut + 1, 10):
        if engine.finished:
            assert again.finished
            break
        one, other = arrivals.step(engine, step), twin.step(again, step)
        assert np.array_equal(one.groups.ticket, other.groups.ticket)
        assert one.outcome.tolist() == other.outcome.tolist()
        assert np.array_equal(one.trains, other.trains)
        assert one.ledger.as_dict() == other.ledger.as_dict()
        assert same(states(engine), states(again))
    for name in engine.table.columns:
        assert np.array_equal(engine.table.col(name), again.table.col(name), equal_nan=True), name


def test_a_step_takes_the_oldest_ready_groups_not_the_quickest():
    engine, world = made("grpo", AsyncFacts(warmup=8))
    requests = engine.begin(1)
    assert len(requests) == 16
    last = requests.select(np.arange(8, 16))
    assert engine.receive(world.roll(last)) is None
    assert engine.can_take(8)
    engine.receive(world.roll(requests.select(np.arange(7, 8))))
    assert engine.take(8).groups.ticket.tolist() == list(range(7, 15))


def test_stale_groups_are_dropped_and_replaced():
    engine, world = made("grpo", AsyncFacts(warmup=8, threshold=2))
    arrivals = Arrivals(world, 0)
    requests = engine.begin(1)
    engine.receive(world.roll(requests.select(np.arange(8))))
    engine.take(8)
    engine.finish()
    late = requests.select(np.arange(8, 16))
    arrivals.send(engine.begin(2))
    while not engine.can_take(8):
        arrivals.send(engine.receive(arrivals.back()))
    engine.take(8)
    engine.finish()
    arrivals.send(engine.begin(3))
    assert engine.receive(world.roll(late)) is None  # without refill their places are filled when the next step begins
    while not engine.can_take(8):
        arrivals.send(engine.receive(arrivals.back()))
    engine.take(8)
    result = engine.finish()
    assert (result.outcome == "stale").sum() == 8
    assert set(result.groups.ticket[result.outcome == "stale"]) == set(late.ticket.tolist())
    assert result.ledger.rollouts.dropped["stale"] == 64
    assert (engine.table.col("visits")[late.row] == 1).all()  # what they showed is remembered


@pytest.mark.parametrize("outcome", ["stale", "all_wrong"])
def test_a_short_batch_takes_no_group_that_is_too_old(outcome):
    """Whatever it was dropped for, verl's threshold holds; and the few that are young enough keep their rows."""
    facts = AsyncFacts(warmup=8, threshold=1)
    engine, world = made("dapo", facts, p=np.full(64, 0.5), on_exhausted="relax", max_rollouts_per_step=128)
    requests = engine.begin(1)
    engine.receive(world.roll(requests.select(np.arange(8))))
    engine.take(8)
    engine.finish()
    late, fresh = engine.flight, engine.begin(2)
    if outcome == "all_wrong":
        world.p[:] = 0.0
    engine.receive(world.roll(late))
    assert set(late.ticket) <= set(engine.never_trains())
    world.p[:] = 0.0
    engine.receive(world.roll(fresh.select(np.arange(3))))
    assert not set(fresh.ticket[:3]) & set(engine.never_trains())
    world.failure = 1.0
    while not engine.starved:
        engine.receive(world.roll(engine.flight))
    assert engine.take(engine.count).groups.ticket.tolist() == fresh.ticket[:3].tolist()
    result = engine.finish()
    assert set(late.ticket) == set(result.groups.ticket[result.outcome == outcome])


def test_a_group_that_never_comes_back_costs_nothing_but_itself():
    """Its place is filled once it is too old to train, to the last step of the run."""
    engine, world = made("grpo", AsyncFacts(warmup=8, threshold=3), steps=8)
    arrivals = Arrivals(world, 0)
    requests = engine.begin(1)
    hung = requests.ticket[3]
    arrivals.send(requests.select(requests.ticket != hung))
    for step in range(1, 9):
        if step > 1:
            arrivals.send(engine.begin(step))
        while not engine.can_take(8):
            arrivals.send(engine.receive(arrivals.back()))
        assert len(engine.take(8).groups) == 8
        engine.finish()
    assert engine.flight.ticket.tolist() == [hung]


def test_wait_blocks_until_old_groups_are_back():
    engine, world = made("grpo", AsyncFacts(warmup=8, threshold=2, strategy="wait"))
    requests = engine.begin(1)
    engine.receive(world.roll(requests.select(np.arange(8))))
    engine.take(8)
    engine.finish()
    fresh = engine.begin(2)
    engine.receive(world.roll(fresh))
    assert len(engine.ready) >= 8 and not engine.can_take(8)  # eight of step 1 are still in flight
    with pytest.raises(AdaptiveError, match="wait for more"):
        engine.take(8)
    engine.receive(world.roll(requests.select(np.arange(8, 16))))
    assert engine.can_take(8)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("mode", ["train_partial", "relax", "raise"])
def test_exhausted(mode, parts):
    """Nothing is solvable: the ceiling on prompts ends the step, and ``on_exhausted`` says how."""
    stream = AsyncFacts(warmup=8, parts=parts)
    engine, world = made("dapo", stream, p=np.zeros(64), max_rounds=2, on_exhausted=mode)
    arrivals = Arrivals(world, 1)
    if mode == "raise":
        with pytest.raises(Exhausted, match=r"0 of 8 groups .*all_wrong.*max_rounds=2"):
            arrivals.step(engine, 1)
        return
    result = arrivals.step(engine, 1)
    assert result.trained.sum() == 8 and not result.partial and "max_rounds=2" in result.note
    assert result.ledger.rollouts.planned <= (2 * 16 + 16) * 8


def test_a_mini_step_without_a_group_draws_once_more_where_nothing_is_refilled():
    """A step whose groups all failed ended the run: nothing was ready, and a batch of none passed for one."""
    engine, world = made("grpo", AsyncFacts(), failure=1.0)
    requests = engine.begin(1)
    assert engine.receive(world.roll(requests)) is None
    assert engine.starved and not engine.can_take(engine.count)
    world.failure = 0.0
    engine.receive(world.roll(engine.revive()))
    assert engine.can_take(engine.count) and len(engine.take(engine.count).groups) == 8


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["train_partial", "relax"])
def test_what_little_there_is_serves_every_mini_step(mode, rate):
    """The first one used to take all that the filter had dropped, and the next one ended the run."""
    parts = 4
    engine, world = made(
        "dapo", AsyncFacts(parts=parts), p=np.full(64, rate), max_rollouts_per_step=40, on_exhausted=mode
    )
    result = Arrivals(world, 1).step(engine, 1)
    assert [len(taken.groups) for taken in engine._taken] == [2, 1, 1, 1]
    assert result.trained.sum() == 5 and result.partial and f"{0 if rate == 0 else 5} of 8 groups" in result.note
    assert all("cap of 40 rollouts" in taken.note for taken in engine._taken if taken.note)


@pytest.mark.parametrize(("mode", "sizes"), [("train_partial", [1, 1, 1, 0]), ("relax", [2, 2, 2, 2])])
def test_dropped_groups_train_beside_kept_ones_where_that_was_asked_for(mode, sizes):
    engine, world = made("dapo", AsyncFacts(parts=4), p=np.ones(64), on_exhausted=mode, max_rollouts_per_step=80)
    requests = engine.begin(1)
    world.p[:] = 0.5
    back = world.roll(requests.select(np.arange(3)))
    world.p[:] = 1.0
    engine.receive(back)
    while not engine.starved:
        engine.receive(world.roll(engine.flight))
    assert [len(engine.take(engine.count).groups) for _ in range(4)] == sizes


def test_fewer_groups_than_mini_steps_are_no_reason_to_end_a_run():
    """As at the end of CERO's budget, whose last round is what is left of it."""
    engine, world = made("cero", AsyncFacts(parts=4), steps=3)
    engine.policy.sampler.budget = 5
    arrivals, sizes = Arrivals(world, 1), []
    while not engine.finished:
        result = arrivals.step(engine, len(sizes) + 1)
        sizes.append([len(taken.groups) for taken in engine._taken])
        assert result.trained.sum() == sum(sizes[-1]) and not result.partial
    assert sizes == [[1, 1, 1, 0]]
    assert "3 of 8 groups" in result.note


def test_a_mini_step_that_no_prompt_is_let_through_for_goes_ungated():
    """Two prompts are left, and solved: they serve two mini-steps, and retired ones the others."""
    parts = ({"name": "retire", "recheck": 0.0}, "fixed", "informative", "verl")
    engine, world = make_stream_engine(*parts, stream=AsyncFacts(parts=4), p=np.ones(64))
    engine.table.col("retired")[2:] = 1
    result = Arrivals(world, 1).step(engine, 1)
    assert all(len(taken.groups) for taken in engine._taken)
    assert {0, 1} < set(result.groups.row[result.trained].tolist())


def test_max_rounds_bounds_the_prompts_of_a_step():
    engine, world = made("dapo", "colocated", p=np.zeros(64), max_rounds=2)
    result = Arrivals(world, 1).step(engine, 1)
    assert engine._drawn == 2 * 16 and "max_rounds=2 windows" in result.note


def test_a_cap_on_the_steps_rollouts_holds():
    engine, world = made("dapo", "colocated", max_rollouts_per_step=96)
    arrivals = Arrivals(world, 1)
    for step in range(1, 8):
        result = arrivals.step(engine, step)
        assert result.ledger.rollouts.planned <= 96


def test_the_window_closes_towards_the_end():
    engine, world = made("grpo", "colocated", steps=3)
    arrivals = Arrivals(world, 1)
    for step in (1, 2, 3):
        arrivals.step(engine, step)
    assert len(engine.flight) == len(engine.ready) == 0
    assert engine.total.rollouts.generated == 3 * 8 * 8


def test_pilots_leave_room_under_a_cap_for_their_commits():
    """They used to eat it: a fifth of the groups, and every third pilot in the band had no commit."""
    stream, p = AsyncFacts(warmup=8), (np.arange(400) + 0.5) / 400
    engine, world = made("pilot_commit", stream, M=400, p=p, steps=40, max_rollouts_per_step=96)
    arrivals, trained, passed_over = Arrivals(world, 3), 0, 0
    for step in range(1, 31):
        result = arrivals.step(engine, step)
        assert result.ledger.rollouts.planned <= 96
        trained += int(result.trained.sum())
        passed_over += int((result.outcome == "surplus_pilot").sum())
    assert trained > 0.9 * 30 * 8 and passed_over < 0.1 * trained


def test_unasked_results_are_refused():
    engine, world = made("grpo", "colocated")
    requests = engine.begin(1)
    back = world.roll(requests)
    engine.receive(back.select(np.array([0])))
    with pytest.raises(AdaptiveError, match="do not match"):
        engine.receive(back.select(np.array([0])))


def rounds_engine(like: AsyncEngine, **config) -> Engine:
    adaptive = copy.deepcopy(like.config)
    for name, value in config.items():
        setattr(adaptive, name, value)
    table = StatsTable.from_arrow(like.table.to_arrow())
    return RoundEngine(build_policy(adaptive), table, adaptive, like.facts, like.row_of, like.source)


def test_another_mode_refuses_what_is_in_flight_or_leaves_it_behind():
    engine, world = made("greso", "colocated")
    arrivals = Arrivals(world, 2)
    held = arrivals.step(engine, 1).ledger.rollouts.held
    state = states(engine)
    with pytest.raises(AdaptiveError, match=r"adaptive\.resume\.allow=\[mode\]"):
        rounds_engine(engine).load_state_dict(state)
    other = rounds_engine(engine)
    other.config.resume.allow = ["mode"]
    other.load_state_dict(state)
    seen, ready = other.table.col("visits").sum(), set(engine.ready.groups.ticket.tolist())
    result = run_step(other, world, 2)
    assert result.ledger.rollouts.dropped.get("gone", 0) == held
    # what was ready had been reviewed, and is not learned from again
    assert ready and ready <= set(result.groups.ticket[result.outcome == "gone"])
    assert other.table.col("visits").sum() == seen + len(result.groups) - len(ready)
    account = result.ledger.rollouts
    assert account.generated + held == account.trained + account.dropped_in_all + account.surplus + account.held


def test_prompts_that_left_the_data_set_are_not_topped_up():
    """``resume.allow=[dataset]``: open groups of vanished prompts are counted, never asked for again."""
    engine, world = made("pilot_commit", "colocated")
    arrivals = Arrivals(world, 2)
    held = 0
    for step in (1, 2, 3):
        held = arrivals.step(engine, step).ledger.rollouts.held
    state = states(engine)
    table = StatsTable.from_arrow(engine.table.to_arrow())
    gone = np.unique(engine.flight.row)[:4]
    keep = np.setdiff1d(np.arange(64), gone)
    smaller = World(world.p[keep], world.seed)
    again, _ = made("pilot_commit", "colocated", world=smaller, table=table, keys=keys_of(64)[keep])
    again.load_state_dict(state)
    arrivals.world = smaller
    assert not np.isin(again.flight.row, gone).any()
    arrivals.waiting = [g for g in arrivals.waiting if not np.isin(g.row, gone).any()]
    account = arrivals.step(again, 4).ledger.rollouts
    assert account.generated + held == account.trained + account.dropped_in_all + account.surplus + account.held


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_aeros_pool_is_paid_by_the_prompts_that_the_cap_lets_through(rounds, refill):
    """The others were credited as well, in each step that asked for them anew."""
    parts, more = ("epoch", "aero", "aero", "beta"), {"refill": refill, "max_rollouts_per_step": 24}
    make = make_engine if rounds else functools.partial(make_stream_engine, stream=AsyncFacts(warmup=8))
    engine, _ = make(*parts, **more)
    assert engine.begin(1).rollouts == 24
    assert engine.policy.allocator._pool == 6 * (8 - 4)


def test_a_top_up_that_lost_rollouts_costs_aeros_pool_nothing_more():
    """Its group closes with what it has: a further one was taken from the pool, and never sent."""
    engine, world = made("aero", AsyncFacts(warmup=8), p=np.zeros(64))
    topups = engine.receive(world.roll(engine.begin(1)))
    pool, back = engine.policy.allocator._pool, world.roll(topups)
    back.lost[:] = 1
    assert engine.receive(back) is None and len(engine.ready) == 16
    assert engine.policy.allocator._pool == pool == 16 * 4 - 16 * 2


def test_first_rollouts_get_older_while_their_group_waits_for_a_top_up():
    parts = ("epoch", {"name": "aero", "rounds": 1}, "aero", "beta")
    engine, world = make_stream_engine(*parts, stream=AsyncFacts(warmup=8), p=np.zeros(64), refill=False)
    first = world.roll(engine.begin(1))
    first.lag[:] = 1
    topups = engine.receive(first)
    engine.receive(world.roll(topups.select(np.arange(8))))
    engine.take(8)
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
