"""Seconds of a step: of its generation, and of waiting for its slowest groups."""

from __future__ import annotations

import pytest

from verl_adaptive.integration.timings import Timings


def measured(act: str, events: tuple[tuple[float, ...], ...], end: float, slots: int = 0) -> dict[str, float]:
    """Metrics of a step from second 100 on, in which ``act`` is called at each event: when, and with what."""
    now = [100.0]
    timings = Timings(slots, lambda: now[0])
    timings.begin()
    for now[0], *said in events:
        getattr(timings, act)(*said)
    now[0] = end
    timings.end()
    return timings.metrics()


@pytest.mark.parametrize(
    ("events", "end", "found"),
    [
        (((101, 50), (102, 40), (110, 9), (120, 1)), 121.0, (21.0, 19.0)),
        (((101, 89), (110, 1), (120, 10)), 121.0, (21.0, 11.0)),
        (((107, 30),), 107.0, (7.0, 0.0)),  # all at once: nobody is waited for
        ((), 100.5, (0.5, 0.0)),
    ],
)
def test_the_last_tenth_is_what_follows_nine_tenths_of_the_groups(events, end, found) -> None:
    metrics = measured("back", events, end)
    assert (metrics["adaptive/time/generation"], metrics["adaptive/time/last_tenth"]) == found


def idle(*loads: tuple[float, ...], end: float) -> float:
    return measured("load", loads, end, slots=10)["adaptive/time/idle_share"]


def test_slots_are_idle_while_fewer_rollouts_are_under_way() -> None:
    assert idle((100, 40), (110, 10), end=110.0) == 0.0  # those that wait for a slot take none
    assert idle((100, 10), (110, 0), end=110.0) == 0.5  # they end evenly
    assert idle((100, 10), (110, 10), (110, 0), end=120.0) == 0.5
    assert idle((100, 5), (110, 5), end=110.0) == 0.5
    assert idle((100, 10), (110, 0), (110, 10), (120, 10), end=120.0) == 0.25  # what is sent meanwhile takes slots


def test_rollouts_that_all_end_at_the_end_leave_no_slot_idle() -> None:
    """On a GPU "slots 50% idle" stood in every step: the one look that found whole groups was the last one."""
    loads = ((100, 40), (101.1, 40, 101.0), (102.1, 40, 101.0), (109.1, 12, 109.0), (110, 0))
    assert idle(*loads, end=110.0) == pytest.approx(0.05)


def test_idle_slots_are_not_said_where_nobody_knows_how_many_there_are() -> None:
    assert "adaptive/time/idle_share" not in Timings().metrics()
    assert idle(end=100.0) == 0.0
