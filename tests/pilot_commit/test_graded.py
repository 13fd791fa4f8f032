"""Signals of many values: pilots are judged by the scaled signal, unless the user says otherwise."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.world import make_engine
from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.groups import Groups

N, BATCH = 16, 16


def graded(requests: Requests, p: np.ndarray, step: int, low: float = 0.0, high: float = 1.0) -> Groups:
    """Scores around each prompt's own level, within [low, high]; a success is a score of 0.5 or more."""
    signals = []
    for submission, index, n in zip(requests.submission, requests.index, requests.n, strict=True):
        rng = np.random.default_rng([step, int(submission), int(n)])
        signals.append(low + (high - low) * np.clip(rng.normal(p[index], 0.08, int(n)), 0.0, 1.0))
    return Groups.from_lists(
        requests.row,
        signals,
        success=[(s >= 0.5).astype(float) for s in signals],
        submission=requests.submission,
        index=requests.index,
        stage=[[int(s)] * int(n) for s, n in zip(requests.stage, requests.n, strict=True)],
    )


def play(engine: Engine, p: np.ndarray, steps: range, **scale: float) -> list[StepResult]:
    out = []
    for step in steps:
        requests = engine.begin(step)
        while requests is not None:
            requests = engine.receive(graded(requests, p, step, **scale))
        out.append(engine.finish())
    return out


def made(p: np.ndarray, allocator: dict | None = None, **more) -> Engine:
    options = {"name": "pilot_commit", **(allocator or {})}
    return make_engine("epoch", options, "band", p=p, batch=BATCH, n=N, **more)[0]


LEVELS = np.random.default_rng(0).uniform(0.1, 0.45, 3000)  # below one half, every one


def cost(results: list[StepResult]) -> float:
    """Rollouts in multiples of plain GRPO's."""
    return sum(r.ledger.rollouts.generated for r in results) / (len(results) * BATCH * N)


def test_a_graded_signal_costs_half_of_what_the_threshold_does(caplog):
    by_success = play(made(LEVELS, {"judge": "success"}), LEVELS, range(1, 13))
    assert not caplog.records
    by_signal = play(made(LEVELS), LEVELS, range(1, 13))
    assert cost(by_signal[:1]) == cost(by_success[:1]) >= 3  # nothing is known before the first step
    assert cost(by_success[1:]) > 2.5 and cost(by_signal[1:]) < 1.6
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1 and "adaptive.success.mode=value" in said[0] and "adaptive.allocator.judge=success" in said[0]


def test_the_scale_of_the_signal_makes_no_difference():
    """Success is told from the signal here, so only what is judged by the signal may agree: from the second step on."""
    plain, scaled = made(LEVELS), made(LEVELS)
    play(plain, LEVELS, range(1, 4))
    play(scaled, LEVELS, range(1, 4), low=-3.0, high=7.0)
    low, high = plain.policy.allocator._range
    assert scaled.policy.allocator._range == pytest.approx((10 * low - 3, 10 * high - 3), rel=0.15)


@pytest.mark.parametrize(
    "more",
    [
        dict(success={"mode": "value", "low": 0.0, "high": 1.0}),
        dict(success={"threshold": 0.3}),
        dict(allocator={"judge": "success"}),
    ],
)
def test_what_the_user_chose_is_left_alone(more):
    engine = made(LEVELS, **more)
    play(engine, LEVELS, range(1, 4))
    assert engine.policy.allocator._range is None
    assert engine.policy.metrics()["adaptive/allocator/judged_by_signal"] == 0.0


@pytest.mark.parametrize("values", [(0.0, 1.0), (-1.0, 1.0), (0.0, 0.1, 1.0), (0.0, 0.1, 0.2, 0.3, 1.0, 1.1, 1.2, 1.3)])
def test_correctness_with_bonuses_is_judged_by_success(values):
    engine, world = make_engine("epoch", "pilot_commit", "band", p=LEVELS, batch=8, n=8)
    rng = np.random.default_rng(0)
    for step in range(1, 5):
        requests = engine.begin(step)
        while requests is not None:
            back = world.roll(requests)
            back.signal[:] = rng.choice(values, back.rollouts)
            back.success[:] = back.signal >= 0.5
            requests = engine.receive(back)
        engine.finish()
    assert engine.policy.allocator._range is None


def test_a_graded_signal_that_is_nearly_always_the_same_has_no_range(caplog):
    """Sparse rewards with a bonus: both ends of the range would be 0, and no pilot had a place in it."""
    engine, world = make_engine("epoch", "pilot_commit", "band", p=np.full(1000, 0.5), batch=64, n=8)
    rng = np.random.default_rng(0)
    requests = engine.begin(1)
    while requests is not None:
        back = world.roll(requests)
        back.signal[:] = np.where(rng.random(back.rollouts) < 0.04, rng.random(back.rollouts), 0.0)
        requests = engine.receive(back)
    engine.finish()
    assert engine.policy.allocator._range is None and "judged by the signal" not in caplog.text


def test_a_resume_makes_no_difference():
    whole = made(LEVELS)
    wanted = play(whole, LEVELS, range(1, 9))
    first = made(LEVELS)
    play(first, LEVELS, range(1, 5))
    second = make_engine("epoch", {"name": "pilot_commit"}, "band", p=LEVELS, batch=BATCH, n=N, table=first.table)[0]
    second.load_state_dict(first.state_dict())
    second.prompt_source.stream = first.prompt_source.stream
    later = play(second, LEVELS, range(5, 9))
    for a, b in zip(wanted[4:], later, strict=True):
        np.testing.assert_array_equal(a.groups.row, b.groups.row)
        np.testing.assert_array_equal(a.outcome, b.outcome)
    assert second.policy.allocator.state_dict() == whole.policy.allocator.state_dict()


def test_in_order_pilots_are_counted_by_what_they_were_judged_by():
    engine = made(LEVELS, {"form": "on_policy"})
    for step in range(1, 7):
        result = play(engine, LEVELS, range(step, step + 1))[0]
        groups, told = result.groups, engine.policy.metrics()
        committed = int((groups.reduce(np.maximum, groups.stage) > 0).sum())
        assert told["adaptive/allocator/in_band_total"] >= committed == BATCH
        if step > 3:
            assert told["adaptive/allocator/in_band_share"] > 0.25 and cost([result]) < 2.0
