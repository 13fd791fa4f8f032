"""Cut a step's rows into minibatches, so that the number of optimizer updates is plain GRPO's whatever the groups' sizes.

verl makes minibatches of ``ppo_mini_batch_size · rollout.n`` rows and pads the batch up to a multiple of that, so that
fewer rows mean fewer updates and more rows mean extra ones. Here the *groups* are cut into as many minibatches as plain
GRPO has; each minibatch is padded (with rows that weigh nothing) only to the common physical size that verl's
dispatch asks for. Rows left out because their advantage is zero (zero rows) still belong to a minibatch: they count in
its loss denominators.

Pure arithmetic: no verl, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

PAD = -1


@dataclass(frozen=True)
class Pass:
    """One pass of a worker group over the step's rows, and what its even splits ask of their number.

    Attributes:
        ranks: data-parallel ranks of the group; verl sends each the same number of rows.
        minibatches: whose minibatches it trains on; ``none``: inference, every row in one go.
        micro: most rows of a micro batch on a rank; None: dynamic, by tokens.
        multiple: the number of micro batches of a minibatch must be a multiple of this (Megatron's virtual pipeline).
    """

    ranks: int
    minibatches: Literal["actor", "critic", "none"] = "none"
    micro: int | None = None
    multiple: int = 1


@dataclass
class Layout:
    """The physical order of a step's batch.

    Attributes:
        order: int64, the sequence of each physical row (``PAD`` for a padding row), for rank 0 chunk 0, rank 0 chunk 1, …,
            rank 1 chunk 0, …
        chunks: chunks a rank; a multiple of both numbers of updates.
        rows_per_chunk: physical rows of one chunk on one rank.
        updates: actor minibatches.
        critic_updates: critic minibatches (0: no critic).
        sequences: real sequences of the step, those left out included.
        zero_row_tokens: int64 ``(chunks,)``, loss tokens of the rows left out of each chunk.
        ranks: data-parallel ranks.
    """

    order: np.ndarray
    chunks: int
    rows_per_chunk: int
    updates: int
    critic_updates: int
    sequences: int
    zero_row_tokens: np.ndarray
    ranks: int

    @property
    def padding(self) -> int:
        """Padding rows in all."""
        return int((self.order == PAD).sum())

    @property
    def rows_per_rank(self) -> int:
        """Physical rows of one rank."""
        return self.chunks * self.rows_per_chunk

    @property
    def minibatch_rows(self) -> int:
        """Physical rows of an actor minibatch over all ranks."""
        return self.ranks * self.rows_per_rank // self.updates

    @property
    def critic_minibatch_rows(self) -> int:
        """Physical rows of a critic minibatch over all ranks."""
        return self.ranks * self.rows_per_rank // self.critic_updates

    def positions(self, chunk: int) -> np.ndarray:
        """int64 ``(ranks · rows_per_chunk,)``: where a chunk's rows are in ``order``, rank by rank."""
        start = np.arange(self.ranks)[:, None] * self.rows_per_rank + chunk * self.rows_per_chunk
        return (start + np.arange(self.rows_per_chunk)).ravel()

    @property
    def longer(self) -> np.ndarray:
        """bool ``(padding,)``: the first, third, … padding row of its rank, which :meth:`uneven` wants longer."""
        rank = np.flatnonzero(self.order == PAD) // self.rows_per_rank
        return (np.arange(len(rank)) - np.searchsorted(rank, rank)) % 2 == 0

    def uneven(
        self,
        length: np.ndarray,
        ranks: Collection[int],
        workload: Callable[[np.ndarray], np.ndarray],
        partition: Callable[[np.ndarray, int], list[list[int]]],
    ) -> bool:
        """Whether every rank of every pass has rows of more than one length.

        Positions of a multimodal model are (axes, length) a row. Torch takes for the ragged dimension of a nested tensor
        the first one that differs: of one row, or of rows as long as each other, it is the axes, while verl's workers
        count on the length (``maybe_fix_3d_position_ids``), and their next selection of rows fails (verl issue 7899).

        ``length`` is of each physical row, ``ranks`` of each pass; the others are as for :func:`plan`.
        """
        orders = [length[self.order_for(one, workload(length), partition)].reshape(one, -1) for one in ranks]
        return all((share.min(axis=1) < share.max(axis=1)).all() for share in orders)

    def order_for(
        self, ranks: int, cost: np.ndarray, partition: Callable[[np.ndarray, int], list[list[int]]]
    ) -> np.ndarray:
        """The same rows for the worker group of a pass with another number of ranks: the same chunks, cut anew.

        ``cost`` is the workload of each physical row.

        Returns:
            int64 ``(len(order),)``, positions in ``order``.
        """
        if ranks == self.ranks:
            return np.arange(len(self.order))
        chunks = [self.positions(chunk) for chunk in range(self.chunks)]
        return _deal(chunks, [cost[here] for here in chunks], ranks, partition)

    def denominator_row(self, chunk: int) -> int:
        """Position in ``order`` of the row that carries the tokens left out of a chunk: a padding row if there is one."""
        positions = self.positions(chunk)
        pads = positions[self.order[positions] == PAD]
        return int(pads[0]) if len(pads) else int(positions[0])


def plan(
    group: np.ndarray,
    length: np.ndarray,
    loss_tokens: np.ndarray,
    trains: np.ndarray,
    *,
    ranks: int,
    updates: int,
    critic_updates: int = 0,
    partition: Callable[[np.ndarray, int], list[list[int]]],
    workload: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    passes: Sequence[Pass] = (),
    spare: int = 0,
) -> Layout:
    """Lay out a step.

    Args:
        group: int64 ``(S,)``, group of each sequence, 0-based and in training order; those left out included.
        length: int64 ``(S,)``, tokens of each sequence (prompt and response), for balance.
        loss_tokens: int64 ``(S,)``, tokens each sequence adds to the loss denominator.
        trains: bool ``(S,)``: False for those left out.
        ranks: data-parallel ranks.
        updates: optimizer updates of plain GRPO per step (B / ``ppo_mini_batch_size``).
        critic_updates: the critic's, or 0.
        partition: balanced equal-size partition of workloads into ``ranks`` lists of positions (verl's).
        workload: cost of a sequence of a given length (verl's).
        passes: what goes over the rows, the actor's own update among it.
        spare: padding rows a chunk and rank beyond those that the splits ask for.

    Returns:
        The layout; every trained row appears once.
    """
    groups = int(group.max()) + 1 if len(group) else 0
    updates = max(1, min(updates, groups))
    critic_updates = max(1, min(critic_updates, groups)) if critic_updates else 0
    chunks = math.lcm(updates, critic_updates or 1)
    if chunks > groups:  # too few groups to serve both: the critic follows the actor
        chunks, critic_updates = updates, updates if critic_updates else 0
    # Groups as evenly as can be, earlier chunks first: with B groups this is plain GRPO's cut.
    chunk_of_group = np.repeat(np.arange(chunks), [len(c) for c in np.array_split(np.arange(groups), chunks)])
    chunk = chunk_of_group[group]

    members = [np.flatnonzero((chunk == c) & trains) for c in range(chunks)]
    zero_row_tokens = np.array([int(loss_tokens[(chunk == c) & ~trains].sum()) for c in range(chunks)], dtype=np.int64)
    minibatches = {"actor": updates, "critic": critic_updates, "none": 1}
    cuts = [(p, minibatches[p.minibatches]) for p in passes]
    rows = _rows_per_chunk(max(len(m) for m in members) + spare * ranks, ranks, chunks, cuts)

    padded = [np.concatenate([m, np.full(rows * ranks - len(m), PAD, dtype=np.int64)]) for m in members]
    costs = [workload(np.where(p == PAD, 1, length[p])) for p in padded]
    order = _deal(padded, costs, ranks, partition)
    return Layout(
        order=np.concatenate([_spread(share) for share in order.reshape(-1, rows)]),
        chunks=chunks,
        rows_per_chunk=rows,
        updates=updates,
        critic_updates=critic_updates,
        sequences=len(group),
        zero_row_tokens=zero_row_tokens,
        ranks=ranks,
    )


def _deal(
    chunks: list[np.ndarray],
    costs: list[np.ndarray],
    ranks: int,
    partition: Callable[[np.ndarray, int], list[list[int]]],
) -> np.ndarray:
    """int64: each chunk's rows dealt to the ranks in balanced parts, in their order; rank by rank."""
    shares = []
    for rows, cost in zip(chunks, costs, strict=True):
        parts = [list(range(len(rows)))] if ranks == 1 else partition(cost, ranks)
        shares.append([rows[np.sort(np.asarray(part, dtype=np.int64))] for part in parts])
    return np.concatenate([share[rank] for rank in range(ranks) for share in shares])


def _spread(rows: np.ndarray) -> np.ndarray:
    """A rank's rows of a chunk, padding evenly between the others: verl's even cut then makes no micro batch of padding alone,
    which some of its losses fail on (distillation, ``bypass_mode``), and which counts as much in means over micro batches."""
    pad = rows == PAD
    place = np.where(pad, (np.cumsum(pad) - 0.5) / max(1, pad.sum()), (np.cumsum(~pad) - 0.5) / max(1, (~pad).sum()))
    return rows[np.argsort(place, kind="stable")]


def micro_size(rows: int, limit: int, multiple: int = 1) -> int:
    """The micro batch that verl's even split can take: the largest divisor of ``rows`` that is at most ``limit``.

    The number of micro batches is a multiple of ``multiple``, which divides ``rows``.
    """
    for size in range(min(rows, limit), 0, -1):
        if rows % size == 0 and rows // size % multiple == 0:
            return size
    return 1


def _rows_per_chunk(most: int, ranks: int, chunks: int, cuts: Sequence[tuple[Pass, int]]) -> int:
    """Rows of a chunk on a rank: as few as possible, but not so that a micro batch shrinks to a sliver.

    ``most`` are those of the largest chunk over all ranks; ``cuts`` the passes, each with its number of minibatches.
    """
    step = 1  # the passes' ranks and micro batches come out even for multiples of this
    for one, minibatches in cuts:
        whole = one.ranks * minibatches * one.multiple
        step = math.lcm(step, one.ranks // math.gcd(one.ranks, ranks), whole // math.gcd(whole, ranks * chunks))
    least = -(-max(1, -(-most // ranks)) // step) * step
    best, best_cost = least, math.inf
    for rows in range(least, least + max(2 * step, least // 8) + 1, step):
        cost = float(rows * chunks)
        for one, minibatches in cuts:
            if one.micro is not None:
                total = rows * chunks * ranks // (one.ranks * minibatches)
                calls = total // micro_size(total, one.micro, one.multiple)
                cost += rows * chunks * 0.05 * (calls / math.ceil(total / one.micro) - 1)
        if cost < best_cost:
            best, best_cost = rows, cost
    return best
