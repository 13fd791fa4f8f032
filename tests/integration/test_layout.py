"""The layout: every row once, plain GRPO's number of updates, nothing lost to the denominators."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptive.integration.layout import PAD, micro_size, plan


def even(cost: np.ndarray, k: int) -> list[list[int]]:
    """A balanced equal-size partition, as verl's: longest first, to the rank with the least so far that has room."""
    room, load, parts = len(cost) // k, [0.0] * k, [[] for _ in range(k)]
    for i in np.argsort(-np.asarray(cost), kind="stable").tolist():
        rank = min((r for r in range(k) if len(parts[r]) < room), key=lambda r: load[r])
        parts[rank].append(i)
        load[rank] += float(cost[i])
    return parts


@st.composite
def steps(draw):
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=40))
    group = np.repeat(np.arange(len(sizes)), sizes)
    total = len(group)
    trains = np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    trains[draw(st.integers(0, total - 1))] = True
    length = np.array(draw(st.lists(st.integers(2, 500), min_size=total, max_size=total)))
    return group, length, np.where(trains, 0, length // 2), trains


@settings(max_examples=200, deadline=None)
@given(
    step=steps(),
    ranks=st.sampled_from([1, 2, 4]),
    updates=st.sampled_from([1, 2, 3, 4, 8]),
    critic=st.sampled_from([0, 1, 2, 4]),
    micro=st.sampled_from([(None, None), (4, 4), (16, 8), (1, 1)]),
)
def test_layout_properties(step, ranks, updates, critic, micro):
    group, length, tokens, trains = step
    made = plan(
        group, length, tokens, trains, ranks=ranks, updates=updates, critic_updates=critic, partition=even, micro=micro
    )
    real = made.order[made.order != PAD]
    assert sorted(real.tolist()) == np.flatnonzero(trains).tolist()  # every trained row once, no ghost
    groups = int(group.max()) + 1
    assert made.updates == min(updates, groups)  # plain GRPO's number of updates, unless groups are too few
    assert len(made.order) == ranks * made.rows_per_rank == made.minibatch_rows * made.updates
    assert made.minibatch_rows % ranks == 0
    if critic:
        assert len(made.order) == made.critic_minibatch_rows * made.critic_updates
    assert made.ghost_tokens.sum() == tokens.sum()
    # a chunk holds the same groups on every rank, in order
    by_rank = made.order.reshape(ranks, made.chunks, made.rows_per_chunk)
    last = -1
    for c in range(made.chunks):
        rows = by_rank[:, c].ravel()
        members = set(group[rows[rows != PAD]].tolist())
        assert all(g > last for g in members)
        last = max(members, default=last)
        carrier = made.carrier(c)
        assert carrier in np.flatnonzero(np.isin(np.arange(len(made.order)) // made.rows_per_chunk % made.chunks, [c]))
        if (rows == PAD).any():
            assert made.order[carrier] == PAD
    for limit, rows in ((micro[0], made.minibatch_rows // ranks), (micro[1], made.rows_per_rank)):
        if limit is not None:
            assert rows % micro_size(rows, limit) == 0 and micro_size(rows, limit) <= limit


def test_equal_groups_are_cut_as_plain_grpo_cuts_them():
    group = np.repeat(np.arange(16), 8)
    made = plan(
        group,
        np.full(128, 30),
        np.zeros(128, int),
        np.ones(128, bool),
        ranks=1,
        updates=4,
        partition=even,
        micro=(32, 32),
    )
    assert made.padding == 0 and made.order.tolist() == list(range(128)) and made.minibatch_rows == 32


@pytest.mark.parametrize(("rows", "limit", "size"), [(12, 8, 6), (7, 4, 1), (128, 64, 64), (5, 64, 5)])
def test_micro_size(rows, limit, size):
    assert micro_size(rows, limit) == size
