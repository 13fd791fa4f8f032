"""The clock around the package's own engine: by hand, nothing lost, the same every time, and no decision touched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.simulate import (
    PEERS,
    ClockConfig,
    LengthConfig,
    Machine,
    PoolConfig,
    Setting,
    Task,
    make_simulation,
    preset_names,
    read_trace,
    run_task,
    summarise,
)
from verl_adaptive.simulate.clock import Clock
from verl_adaptive.simulate.driver import Simulation
from verl_adaptive.simulate.lengths import Lengths
from verl_adaptive.simulate.verl_filter import VerlFilter
from verl_adaptive.simulate.worlds import StaticWorld

SMALL = ClockConfig(Machine(replicas=2, slots=8), LengthConfig(median=60, sigma=0.8, cap=400), prompt_tokens=10)
SLOW = replace(SMALL, machine=Machine(1, 3, 0.01, 0.01))  # most requests wait for a slot
SETTING = Setting(batch=8, n=8, steps=8, budget=None)


class Fixed:
    """Lengths by rollout number, the same for all groups."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def draw(self, groups, rates) -> np.ndarray:
        number = np.arange(groups.rollouts) - groups.offsets[:-1][groups.group_of]
        return np.array(self.lengths)[number]


def timed(preset, p, config=SMALL, lengths=None, *, failure=0.0, seed=0, batch=8, n=8, steps=8, **more):
    """A simulation whose answers take time, of lengths that ``seed`` draws unless they are given; and its clock."""
    clock = Clock(config)
    world = StaticWorld(p, lengths=lengths or Lengths(config.lengths, len(p), seed), failure=failure)
    return make_simulation(preset, world, batch=batch, n=n, steps=steps, clock=clock, **more), clock


def test_a_step_of_grpo_by_hand() -> None:
    """Two prompts of two rollouts, three slots of 1 s a token: 4 s, then the fourth rollout from the second second."""
    config = ClockConfig(Machine(1, 3, 1.0, 0.0), prompt_tokens=7)
    words = "grpo adaptive.poll_interval=0.5"
    run, clock = timed(words, np.full(2, 0.5), config, Fixed([4, 2]), batch=2, n=2, steps=1)
    (result,), (phase,) = list(run), clock.phases
    assert phase.seconds == 4.0  # 4 and 2 at once, 4 at once, 2 after the first 2
    assert (phase.tokens, phase.occupied, phase.waves, phase.rollouts) == (12.0, 12.0, 1, 4)
    assert "aborted" not in result.ledger.rollouts.dropped and clock.course == [(4.0, 0.5)]
    row = clock.row()
    assert row["time"] == 4.0 and row["prefill"] == 28 and row["idle"] == row["empty"] == 0.0
    mixed = int((~result.groups.degenerate()).sum())
    assert row["informative"] == mixed
    assert row["time_per_informative"] == (pytest.approx(4.0 / mixed) if mixed else pytest.approx(np.nan, nan_ok=True))


def test_a_result_is_seen_at_the_next_look() -> None:
    config = ClockConfig(Machine(1, 8, 1.0, 0.0))
    for poll, seen in ((0.5, 3.0), (2.0, 4.0), (5.0, 5.0)):
        words = f"grpo adaptive.poll_interval={poll}"
        run, clock = timed(words, np.full(2, 0.5), config, Fixed([3, 1]), batch=2, n=2, steps=1)
        run.run_step()
        assert clock.phases[0].seconds == seen
        assert clock.phases[0].last == 0.0  # both groups at once


MOPPS_AERO = "dapo adaptive/sampler=mopps_by_source adaptive/allocator=aero"


@pytest.mark.parametrize(
    ("preset", "config", "failure", "n"),
    [
        *((preset, SMALL, 0.0, 8) for preset in (*preset_names(), MOPPS_AERO, *PEERS)),
        # a group of one that failed has no rollout that could end: the simulation stopped with an error
        *((preset, SLOW, 0.2, n) for preset in ("sao", "solo", "greso", MOPPS_AERO) for n in (1, 4)),
    ],
)
def test_nothing_is_lost(preset, config, failure, n) -> None:
    """What the machine generated is what the ledger says, what was aborted included; every number is a possible one."""
    p = np.random.default_rng(0).beta(0.4, 0.4, 200 if failure else 60)
    simulation, clock = timed(preset, p, config, failure=failure, n=n)
    results, machine = list(simulation), config.machine
    assert len(results) == len(clock.phases) > 0
    for result, phase in zip(results, clock.phases, strict=True):
        tokens, rollouts = result.ledger.tokens, result.ledger.rollouts
        if isinstance(simulation.engine, VerlFilter):
            assert "aborted" not in rollouts.dropped
        assert phase.tokens == pytest.approx(tokens.generated, abs=1.0)
        assert phase.rollouts == rollouts.generated
        assert 0 < phase.last <= phase.seconds or phase.last == 0
        assert phase.occupied <= machine.replicas * machine.slots * phase.seconds + 1e-6
        assert phase.tokens <= machine.fastest * phase.seconds + 1e-6
    assert not clock.queue.busy
    table, groups = simulation.engine.table, [result.groups for result in results]
    assert table.col("rollouts").sum() == sum(each.select(~each.failed).rollouts for each in groups)
    assert (table.col("failures").sum() > 0) == (failure > 0)
    row, total = clock.row(), simulation.engine.total
    assert row["begun"] * len(results) == pytest.approx(total.rollouts.generated)
    assert row["aborted"] * len(results) == pytest.approx(total.rollouts.dropped.get("aborted", 0))
    assert 0 <= row["aborted_tokens"] < 1 and 0 <= row["idle"] < 1 and 0 <= row["last"] < 1


@pytest.mark.parametrize("preset", ["greso", MOPPS_AERO, "pilot_commit"])
def test_a_clock_changes_no_decision(preset) -> None:
    """The same batches and statistics whether answers take time or not, and however long they take."""
    p = np.random.default_rng(1).beta(0.4, 0.4, 60)

    def decided(run: Simulation) -> tuple[list[list[tuple[int, int]]], list[float]]:
        batches = [
            [(int(i), int(n)) for i, n in zip(r.groups.index[r.trained], r.groups.n[r.trained], strict=True)]
            for r in run
        ]
        return batches, [run.engine.table.col(name).tolist() for name in ("rollouts", "successes", "last_step")]

    first = decided(make_simulation(preset, StaticWorld(p), batch=8, n=8, steps=8))
    assert decided(timed(preset, p)[0]) == first and decided(timed(preset, p, SLOW)[0]) == first
    assert decided(timed(preset, p, seed=5)[0]) == first  # other lengths, another order of arrival


def test_shares_of_grpos() -> None:
    setting = Setting(batch=8, n=8, steps=30, budget=30 * 64)
    names = ["grpo", "verl_filter_groups", "oracle_best"]
    rows = [run_task(Task(p, s, setting, PoolConfig(prompts=60), clock=SMALL)) for s in (0, 1) for p in names]
    grpo, dapo, best = summarise(rows)
    assert grpo["time_ratio"] == grpo["time_per_informative_ratio"] == grpo["to_baseline"] == 1.0
    assert dapo["waves"] > 1.0 and dapo["time_ratio"] > 1.0
    assert best["to_baseline"] < 1.0 and best["to_baseline_seeds"] == 2
    by = {r["preset"]: r for r in rows if r["seed"] == 0}
    curve = by["oracle_best"]["course"]
    assert [s for s, _ in curve] == sorted(s for s, _ in curve)
    reached = next(s for s, rate in curve if rate >= by["grpo"]["course"][-1][1])
    other = [r for r in rows if r["seed"] == 1]
    assert summarise([r for r in rows if r not in other])[2]["to_baseline"] == reached / by["grpo"]["course"][-1][0]


def test_nothing_waits_for_its_slowest() -> None:
    """DAPO in submission order: faster than verl's own filter, for the same informative groups."""
    config = ClockConfig(Machine(2, 16), LengthConfig(median=400, cap=3200))
    setting, pool = Setting(batch=32, n=8, steps=12, budget=None), PoolConfig(prompts=600)
    rows = {p: run_task(Task(p, 0, setting, pool, clock=config)) for p in ("dapo", *PEERS)}
    ours, verls = rows.values()
    assert ours["informative"] == verls["informative"] == 32
    assert ours["time"] < 0.9 * verls["time"] and ours["waves"] < 1.5


def test_a_pool_that_does_not_learn_has_no_time_to_its_end() -> None:
    pool = PoolConfig(prompts=60)
    pool.rate = pool.spill = pool.forget = 0.0
    (entry,) = summarise([run_task(Task("grpo", 0, SETTING, pool, clock=SMALL))])
    assert entry["to_baseline"] is None and entry["to_baseline_seeds"] == 0


def test_recorded_lengths_are_used(tmp_path) -> None:
    path = tmp_path / "rates.jsonl"
    rows = [{"prompt": f"q{i}", "n": 8, "successes": 4, "tokens": 8 * (40 + 160 * (i % 2))} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(SMALL, lengths=LengthConfig(sigma=0.5, cap=10**6))
    world = Task("grpo", 0, SETTING, None, read_trace(path), clock=config).world()
    run = list(make_simulation("grpo", world, batch=20, n=8, steps=10))
    tokens, index = (
        np.concatenate([f(r.groups) for r in run]) for f in (lambda g: g.tokens, lambda g: np.repeat(g.index, g.n))
    )
    assert tokens[index % 2 == 0].mean() == pytest.approx(40, rel=0.1)
    assert tokens[index % 2 == 1].mean() == pytest.approx(200, rel=0.1)


# -- asynchronous trainers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "ahead"), [("grpo", 0), ("grpo", 1), ("dapo", 1), ("greso", 2), ("aero", 1)])
def test_an_asynchronous_step_loses_nothing_and_leaves_the_rest_in_flight(preset, ahead) -> None:
    """Over the run: what the machine made is what came back and what is still in flight; the window bounds the latter."""
    run, clock = timed(preset, np.random.default_rng(0).beta(0.6, 0.6, 80), steps=30, ahead=ahead)
    back = 0
    for step, result in enumerate(run, 1):
        assert result.trained.sum() == 8 or result.note or not run.engine.config.refill
        assert "aborted" not in result.ledger.rollouts.dropped
        back += result.ledger.tokens.generated
        flight = run.engine.flight
        assert len(flight) + len(run.engine.ready) <= 8 + 8 * ahead
        assert clock.queue.busy <= flight.rollouts and clock.queue.tokens >= back - 1e-6
        if step == 12:
            break
    assert clock.queue.tokens - back <= sum(
        int(run.world.roll(flight.select(np.array([i]))).tokens.sum()) for i in range(len(flight))
    )
    assert (len(flight) == 0) == (ahead == 0) or preset != "grpo"


def test_a_race_to_the_finish_trains_short_answers() -> None:
    """docs/order.md says by how much, of half-solved prompts: the reason why every answer of a step is waited for."""
    count = 20_000
    at = np.arange(count)
    one = [np.ones(1)] * count
    groups = Groups.from_lists(at, one, tokens=one, stage=[[0]] * count, submission=at, index=at)
    lengths = np.sort(Lengths(LengthConfig(), count).draw(groups, np.full(count, 0.5)))
    shorter = 1 - lengths[: count * 4 // 5].mean() / lengths.mean()
    assert f"slowest fifth, {100 * shorter:.0f} % shorter" in (Path(__file__).parents[2] / "docs/order.md").read_text()


def test_slow_prompts_lose_turns_where_the_data_are_few_batches() -> None:
    """docs/order.md says how many, of half-solved prompts."""
    said = []
    for batches in (4, 8):
        size = 64 * batches
        lengths = Lengths(LengthConfig(), size)
        rates = np.full(size, 0.5)
        run, _ = timed("grpo", rates, ClockConfig(), lengths, batch=64, steps=15 * batches, ahead=1)
        slow = lengths.centre > np.quantile(lengths.centre, 0.8)
        trained = np.concatenate([result.groups.index[result.trained] for result in run]) % size
        said.append(1 - slow[trained].mean() / slow.mean())
    few, more = (f"{100 * lost:.0f} %" for lost in said)
    text = f"trains {few} less often with data of four batches, {more} with eight"
    assert text in (Path(__file__).parents[2] / "docs/order.md").read_text()


def test_a_window_that_is_kept_full_leaves_no_slot_idle() -> None:
    seconds = {}
    for ahead in (None, 2):
        run, clock = timed("grpo", np.full(200, 0.5), batch=16, steps=30, ahead=ahead)
        for _ in range(15):
            run.run_step()
        row = clock.row(slice(3, None))  # a policy has learned by then what its prompts are like
        seconds[ahead is not None] = row["time"]
        assert (row["idle"] < 0.02) == (ahead is not None) and (row["waves"] == 0) == (ahead is not None)
    assert seconds[True] < 0.9 * seconds[False]


def test_an_asynchronous_trainer_needs_a_clock() -> None:
    with pytest.raises(AdaptiveError, match="with a clock only"):
        make_simulation("grpo", StaticWorld(np.full(9, 0.5)), batch=4, n=2, steps=2, ahead=0)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("runs_once")
def test_the_command_counts_seconds(call, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    pool = ("simulate", "--batch", 8, "--n", 8, "--steps", 5, "--seeds", "0,1", "--pool", "mixed:prompts=60")
    words = (*pool, "--clock", "--median", 100, "--slots", 4, "--replicas", 2, "--preset", "dapo")
    status, out, err = call(*words)
    assert (status, err) == (0, "")
    for text in ("verl_filter_groups", "oracle_best", "GRPO's pass rate", "seconds per step", "queueing model"):
        assert text in out, text
    data = json.loads(call(*words, "--json")[1])
    assert data["clock"]["machine"] == {"replicas": 2, "slots": 4, "base": 0.008, "each": 0.00012}
    assert data["clock"]["lengths"]["median"] == 100
    assert "wall clock" not in data["limits"] and {"time", "idle", "course"} <= set(data["rows"][0])
    status, out, _ = call(*pool, "--preset", "grpo", "--json")
    assert status == 0 and "clock" not in json.loads(out) and "time" not in json.loads(out)["rows"][0]
