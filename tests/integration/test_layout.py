"""The layout: every row once, plain GRPO's number of updates, nothing lost to the denominators."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptive.integration.layout import PAD, Pass, micro_size, plan


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


LIMITS = st.sampled_from([None, 1, 4, 8, 16])


@settings(max_examples=200)
@given(
    step=steps(),
    ranks=st.sampled_from([1, 2, 4]),
    others=st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 6])),
    updates=st.sampled_from([1, 2, 3, 4, 8]),
    critic=st.sampled_from([0, 1, 2, 4]),
    micro=st.tuples(LIMITS, LIMITS, LIMITS, LIMITS),
    stages=st.sampled_from([1, 2, 4]),
)
def test_layout_properties(step, ranks, others, updates, critic, micro, stages):
    group, length, tokens, trains = step
    passes = [
        Pass(ranks, "actor", micro[0], stages),
        Pass(ranks, "none", micro[1], stages),
        Pass(others[0], "none", micro[2]),  # the reference
        *([Pass(others[1], "critic", micro[3], stages), Pass(others[1], "none", micro[3])] if critic else []),
    ]
    made = plan(
        *(group, length, tokens, trains),
        ranks=ranks,
        updates=updates,
        critic_updates=critic,
        partition=even,
        passes=passes,
    )
    real = made.order[made.order != PAD]
    assert sorted(real.tolist()) == np.flatnonzero(trains).tolist()  # every trained row once, no zero-advantage row
    groups = int(group.max()) + 1
    assert made.updates == min(updates, groups)  # plain GRPO's number of updates, unless groups are too few
    assert made.chunks <= groups  # none is of padding alone
    wanted = min(critic, groups)  # the critic's, unless groups are too few for both
    assert made.critic_updates == (wanted if math.lcm(made.updates, wanted or 1) <= groups else made.updates)
    assert len(made.order) == ranks * made.rows_per_rank == made.minibatch_rows * made.updates
    assert made.minibatch_rows % ranks == 0
    assert made.zero_row_tokens.sum() == tokens.sum()
    # a chunk holds the same groups on every rank, in order
    last = -1
    for c in range(made.chunks):
        rows = made.order[made.positions(c)]
        members = set(group[rows[rows != PAD]].tolist())
        assert all(g > last for g in members)
        last = max(members, default=last)
        denominator_row = made.denominator_row(c)
        assert denominator_row in made.positions(c)
        if (rows == PAD).any():
            assert made.order[denominator_row] == PAD
    for share in made.order.reshape(-1, made.rows_per_chunk):  # no more padding in a row than it takes
        padding, others_there = int((share == PAD).sum()), np.flatnonzero(share != PAD)
        gaps = np.diff(others_there, prepend=-1, append=len(share)) - 1
        assert gaps.max() <= -(-padding // max(1, len(others_there)))
    # every worker group's even splits come out even
    for one in passes:
        parts = {"actor": made.updates, "critic": made.critic_updates, "none": 1}[one.minibatches]
        assert len(made.order) % (one.ranks * parts) == 0
        share = len(made.order) // (one.ranks * parts)
        assert share % one.multiple == 0  # dynamic: the count may be rounded up to a multiple
        if one.micro is not None:
            size = micro_size(share, one.micro, one.multiple)
            assert share % size == 0 and size <= one.micro and share // size % one.multiple == 0
        order = made.order_for(one.ranks, np.where(made.order == PAD, 1, length[made.order]), even)
        assert sorted(order.tolist()) == list(range(len(order)))
        if one.minibatches == "critic":  # its minibatches are whole chunks: the same groups as the actor's layout has
            cut = order.reshape(one.ranks, parts, -1)
            chunk_of = np.arange(len(order)) // made.rows_per_chunk % made.chunks
            for m in range(parts):
                assert set(chunk_of[cut[:, m]].ravel() * parts // made.chunks) == {m}


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
        passes=[Pass(1, "actor", 32), Pass(1, "none", 32)],
    )
    assert made.padding == 0 and made.order.tolist() == list(range(128)) and made.minibatch_rows == 32


@settings(max_examples=200)
@given(
    lengths=st.lists(st.sampled_from([20, 20, 20, 21, 30]), min_size=1, max_size=24),
    ranks=st.sampled_from([1, 2, 4, 8]),
    reference=st.sampled_from([1, 2, 8]),
    updates=st.sampled_from([1, 2, 4]),
    padding=st.sampled_from([20, 128]),
)
def test_no_ranks_rows_are_all_of_one_length(lengths, ranks, reference, updates, padding):
    """Of any pass, where positions have several axes: also not where one row is left for eight ranks."""
    pytest.importorskip("verl")
    from verl_adaptive.integration.minibatches import _even, _uneven, _workload

    count = len(lengths)
    facts = (np.arange(count), np.array(lengths), np.zeros(count, int), np.ones(count, bool))
    passes = [Pass(ranks, "actor", 1), Pass(reference)]
    lay_out = partial(plan, *facts, ranks=ranks, updates=updates, partition=_even, workload=_workload, passes=passes)
    made = _uneven(lay_out(), lay_out, facts[1], padding, {ranks, reference})
    length = np.where(made.order == PAD, padding, facts[1][made.order])
    length[made.order == PAD] += made.longer
    for one in (ranks, reference):
        shares = length[made.order_for(one, _workload(length), _even)].reshape(one, -1)
        assert all(len(set(share.tolist())) > 1 for share in shares)
    assert sorted(made.order[made.order != PAD].tolist()) == list(range(count))


@pytest.mark.parametrize(("rows", "limit", "size"), [(12, 8, 6), (7, 4, 1), (128, 64, 64), (5, 64, 5)])
def test_micro_size(rows, limit, size):
    assert micro_size(rows, limit) == size


def test_the_references_own_micro_batch_has_a_say():
    """113 rows would leave it micro batches of one; a few rows of padding are cheaper."""
    facts = (np.arange(113), np.full(113, 30), np.zeros(113, int), np.ones(113, bool))
    ask = {"ranks": 1, "updates": 1, "partition": even}
    assert len(plan(*facts, **ask, passes=[Pass(1, "actor")]).order) == 113
    made = plan(*facts, **ask, passes=[Pass(1, "actor"), Pass(1, "none", 16)])
    assert len(made.order) > 113 and micro_size(len(made.order), 16) > 8
