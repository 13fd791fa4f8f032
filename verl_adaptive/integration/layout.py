"""Cut a step's rows into minibatches, so that the number of optimizer updates is plain GRPO's whatever the groups' sizes.

verl makes minibatches of ``ppo_mini_batch_size · rollout.n`` rows and pads the batch up to a multiple of that, so that
fewer rows mean fewer updates and more rows mean extra ones. Here the *groups* are cut into as many minibatches as plain
GRPO has; each minibatch is padded (with rows that weigh nothing) only to the common physical size that verl's
dispatch asks for. Rows left out because their advantage is zero ("ghosts") still belong to a minibatch: they count in
its loss denominators.

Pure arithmetic: no verl, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Layout", "micro_size", "plan"]

PAD = -1


@dataclass
class Layout:
    """The physical order of a step's batch.

    Attributes:
        order: int64, row numbers (``PAD`` for a padding row), for rank 0 chunk 0, rank 0 chunk 1, …, rank 1 chunk 0, …
        chunks: chunks a rank; a multiple of both numbers of updates.
        rows_per_chunk: physical rows of one chunk on one rank.
        updates: actor minibatches.
        critic_updates: critic minibatches (0: no critic).
        sequences: real sequences of the step, ghosts included.
        ghost_tokens: int64 ``(chunks,)``, loss tokens of the ghosts of each chunk.
        ranks: data-parallel ranks.
    """

    order: np.ndarray
    chunks: int
    rows_per_chunk: int
    updates: int
    critic_updates: int
    sequences: int
    ghost_tokens: np.ndarray
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

    def carrier(self, chunk: int) -> int:
        """Position in ``order`` of the row that carries a chunk's ghost tokens: a padding row if there is one."""
        positions = np.concatenate(
            [
                np.arange(self.rows_per_chunk) + rank * self.rows_per_rank + chunk * self.rows_per_chunk
                for rank in range(self.ranks)
            ]
        )
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
    micro: tuple[int | None, int | None] = (None, None),
) -> Layout:
    """Lay out a step.

    Args:
        group: int64 ``(S,)``, group of each sequence, 0-based and in training order; ghosts included.
        length: int64 ``(S,)``, tokens of each sequence (prompt and response), for balance.
        loss_tokens: int64 ``(S,)``, tokens each sequence adds to the loss denominator.
        trains: bool ``(S,)``: False for ghosts.
        ranks: data-parallel ranks.
        updates: optimizer updates of plain GRPO per step (B / ``ppo_mini_batch_size``).
        critic_updates: the critic's, or 0.
        partition: balanced equal-size partition of workloads into ``ranks`` lists of positions (verl's).
        workload: cost of a sequence of a given length (verl's).
        micro: rows per micro batch in training and in inference, or None where dynamic batching is on.

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
    ghost_tokens = np.array([int(loss_tokens[(chunk == c) & ~trains].sum()) for c in range(chunks)], dtype=np.int64)
    rows = _rows_per_chunk(max(len(m) for m in members), ranks, chunks, updates, micro)

    per_rank: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for m in members:
        padded = np.concatenate([m, np.full(rows * ranks - len(m), PAD, dtype=np.int64)])
        cost = workload(np.where(padded == PAD, 1, length[padded]))
        parts = [list(range(len(padded)))] if ranks == 1 else partition(cost, ranks)
        for rank, part in enumerate(parts):
            per_rank[rank].append(padded[np.sort(np.asarray(part, dtype=np.int64))])
    return Layout(
        order=np.concatenate([np.concatenate(p) for p in per_rank]).astype(np.int64),
        chunks=chunks,
        rows_per_chunk=rows,
        updates=updates,
        critic_updates=critic_updates,
        sequences=len(group),
        ghost_tokens=ghost_tokens,
        ranks=ranks,
    )


def micro_size(rows: int, limit: int) -> int:
    """Largest divisor of ``rows`` that is at most ``limit``: the micro batch that verl's even split can take."""
    for size in range(min(rows, limit), 0, -1):
        if rows % size == 0:
            return size
    return 1


def _rows_per_chunk(most: int, ranks: int, chunks: int, updates: int, micro: tuple[int | None, int | None]) -> int:
    """Rows of a chunk on a rank: as few as possible, but not so that a micro batch shrinks to a sliver."""
    least = max(1, -(-most // ranks))
    best, best_cost = least, math.inf
    for rows in range(least, least + max(2, least // 8) + 1):
        cost = float(rows * chunks)
        for limit, total in ((micro[0], rows * chunks // updates), (micro[1], rows * chunks)):
            if limit is not None:
                calls = total // micro_size(total, limit)
                cost += rows * chunks * 0.05 * (calls / math.ceil(total / limit) - 1)
        if cost < best_cost:
            best, best_cost = rows, cost
    return best
