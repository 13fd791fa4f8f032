"""The queue against a slow, obvious reference (by hand: test_clock.py); lengths."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptive.groups import Groups
from verl_adaptive.simulate import LengthConfig, Machine
from verl_adaptive.simulate.lengths import Lengths
from verl_adaptive.simulate.queueing import ServerQueue


class Slow:
    """The same machine, one list, everything worked out anew at every event."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.now, self.ended = machine, 0.0, []
        self.left: list[list[float]] = []  # tokens left, tag; in the order of sending
        self.made = 0.0

    def add(self, lengths: list[int], tag: int) -> None:
        self.left += [[float(length), tag] for length in lengths]

    def running(self) -> list[list[float]]:
        return self.left[: self.machine.slots * self.machine.replicas]

    def step(self) -> float:
        return self.machine.base + self.machine.each * len(self.running()) / self.machine.replicas

    def next(self) -> float:
        return min((x[0] * self.step() for x in self.running()), default=inf)

    def go(self, seconds: float) -> None:
        tokens = seconds / self.step()
        for x in self.running():
            x[0] -= tokens
            self.made += tokens
        self.now += seconds
        self.ended += [(x[1], self.now) for x in self.left if x[0] <= 1e-9]
        self.left = [x for x in self.left if x[0] > 1e-9]


@given(
    sent=st.lists(
        st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0, 20)), min_size=1, max_size=8
    ),
    replicas=st.integers(1, 3),
    slots=st.integers(1, 4),
    each=st.floats(0, 0.5),
    stop=st.integers(0, 40),
)
@settings(max_examples=150)
def test_the_queue_is_the_slow_reference(sent, replicas, slots, each, stop) -> None:
    """Any sending times, then an abort after ``stop`` ends: the same ends, tokens and remains; nothing is lost."""
    machine = Machine(replicas, slots, 0.1, each)
    queue, slow, ended = ServerQueue(machine), Slow(machine), []

    def until(when: float) -> None:
        while queue.busy and queue.next_end <= when + 1e-9:
            ended.append((queue.pop(), queue.now))
        queue.wait(max(when, queue.now))
        while slow.left and slow.now + slow.next() <= when + 1e-9:
            slow.go(slow.next())
        slow.go(max(0.0, when - slow.now))

    for tag, (lengths, pause) in enumerate(sent):
        queue.add(lengths, tag)
        slow.add(lengths, tag)
        until(queue.now + pause)
    while queue.busy and len(ended) < stop:
        until(queue.next_end)
    assert sorted(t for t, _ in ended) == sorted(t for t, _ in slow.ended)
    assert [w for _, w in ended] == pytest.approx([w for _, w in slow.ended], abs=1e-6)
    assert queue.busy == len(slow.left) and queue.tokens == pytest.approx(slow.made, abs=1e-6)
    if not queue.busy:
        assert queue.tokens == pytest.approx(sum(sum(lengths) for lengths, _ in sent))
    assert queue.abort() == max(0, len(slow.left) - replicas * slots) and not queue.busy and queue.next_end == inf
    with pytest.raises(ValueError, match="nothing is running"):
        queue.pop()


# -- lengths ----------------------------------------------------------------------------------------------------------


def groups_of(submission, n, index=None, stage=0) -> Groups:
    rewards = [np.zeros(k) for k in n]
    stages = [np.full(k, stage, dtype=int) for k in n]
    index = np.arange(len(n)) if index is None else index
    return Groups.from_lists(range(len(n)), rewards, submission=submission, index=index, stage=stages)


def test_lengths_are_lognormal_with_a_cap() -> None:
    config = LengthConfig(median=1000, sigma=0.8, cap=8000, harder=0.0)
    groups = groups_of(np.arange(4000), [8] * 4000)
    drawn = Lengths(config, 4000, 3).draw(groups, np.full(4000, 0.5))
    assert drawn.min() >= 1 and drawn.max() == 8000
    assert np.median(drawn) == pytest.approx(1000, rel=0.04)
    assert np.quantile(np.log(drawn), 0.84) - np.log(1000) == pytest.approx(0.8, rel=0.05)
    own = np.log(drawn).reshape(4000, 8).mean(axis=1)
    assert own.var() == pytest.approx(0.64 * (0.25 + 0.75 / 8), rel=0.1) and (drawn < 8000).sum() > 30_000


def test_harder_prompts_answer_longer() -> None:
    config = LengthConfig(median=1000, sigma=0.5, cap=10**9, harder=1.0, shared=0.0)
    groups = groups_of(np.arange(2), [20_000] * 2, index=[0, 0])
    drawn = Lengths(config, 1, 0).draw(groups, np.array([0.0, 1.0]))
    assert np.median(drawn[:20_000]) / np.median(drawn[20_000:]) == pytest.approx(np.e, rel=0.05)


def test_recorded_means_are_kept() -> None:
    means = np.array([100.0, 3000.0])
    groups = groups_of(np.arange(2), [40_000] * 2)
    drawn = Lengths(LengthConfig(cap=10**9), 2, 0, means).draw(groups, np.array([0.0, 1.0]))
    assert drawn.reshape(2, -1).mean(axis=1) == pytest.approx([100, 3000], rel=0.03)


def test_a_rollouts_length_is_its_own() -> None:
    """Whoever is asked for beside it, in whatever order; a top-up's rollouts have lengths of their own."""
    lengths = Lengths(LengthConfig(), 5, 1)
    both = groups_of([7, 3], [4, 6], index=[2, 4])
    rates = np.array([0.2, 0.9])
    drawn, alone = lengths.draw(both, rates), lengths.draw(both.select(np.array([1])), rates[1:])
    assert np.array_equal(drawn[4:], alone)
    later = lengths.draw(groups_of([3], [6], index=[4], stage=1), rates[1:])
    assert not np.isin(later, alone).any()
