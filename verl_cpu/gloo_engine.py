"""A checkpoint engine for CPU: the trainer's rank 0 broadcasts its weights to every rollout worker over gloo.

verl's own engines for separate trainers and rollouts (nccl, nixl, …) need CUDA. Choose this one by name::

    actor_rollout_ref.rollout.checkpoint_engine.backend=gloo
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu.gloo_engine

verl imports the module in the driver, in the training workers and in the rollout workers; nothing else imports it.

A group lives for one weight sync (``prepare`` to ``finalize``), so replicas may come and go in between. It is built
straight from a TCPStore: it neither needs nor touches the process's default ``torch.distributed`` group. The largest
tensor may exceed a bucket: verl's helpers split and merge it.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

from verl_cpu import fixes

#: Receivers view a bucket's bytes as each tensor's dtype, which needs offsets that are multiples of the item size.
ALIGNMENT = 16

#: The rank of a trainer worker that takes no part in the broadcast.
NOT_IN_GROUP = -1


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Weights from trainer rank 0 to all rollout workers, one bucket at a time.

    Args:
        bucket_size: Bytes per bucket.
        is_master: Whether this is the trainer's rank 0.
        timeout_s: How long a peer may stay silent; ``engine_kwargs.gloo.timeout_s`` in verl's config.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 120.0) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.timeout = timedelta(seconds=timeout_s)
        self.rank: int | None = None
        self.store: TCPStore | None = None
        self.group: ProcessGroupGloo | None = None

    def prepare(self) -> tuple[str, int] | None:
        """Open the store at which the peers of this sync meet; its host and port from the master, None from everybody else."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        return host, self.store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Keyword arguments of ``init_process_group`` for each training worker, and for each rollout worker.

        Rank 0 is the trainer's first worker, the others are the rollout workers. ``metadata`` is what ``prepare`` returned in
        each worker, the trainer's rank 0 first.
        """
        world_size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world_size] * len(ranks), "address": [metadata[0]] * len(ranks)}

        return arguments([0] + [NOT_IN_GROUP] * (actor_wg_world_size - 1)), arguments(list(range(1, world_size)))

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Join the group of this sync, whose store is at ``address``; not as rank ``NOT_IN_GROUP``."""
        self.rank = rank
        if rank == NOT_IN_GROUP:
            return
        if not self.is_master:
            self.store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=self.timeout)
        self.group = ProcessGroupGloo(PrefixStore("weights", self.store), rank, world_size, self.timeout)

    def finalize(self) -> None:
        """Leave the group and close the store."""
        self.rank = self.group = self.store = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, int]:
        """Broadcast names and full tensors, each of whose reading is collective over the training workers.

        Returns:
            Metrics of this sync, for verl's logger.
        """
        if self.rank == NOT_IN_GROUP:
            for _ in weights:  # walk along, or the other workers would wait for this one
                pass
            return {}
        bucket = torch.empty(self.bucket_size, dtype=torch.uint8)
        metas: list[TensorMeta] = []
        offset = total = 0
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            if offset + meta.chunk_size > self.bucket_size:
                await self._send_bucket(metas, bucket[:offset], is_last=False)
                metas, offset = [], 0
            meta.offset = offset
            bucket[offset : offset + meta.chunk_size] = chunk
            metas.append(meta)
            total += meta.chunk_size
            offset = min(_aligned(offset + meta.chunk_size), self.bucket_size)
        await self._send_bucket(metas, bucket[:offset], is_last=True)
        return {"weight_sync/bytes": total}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Names and full tensors, as the master sends them."""
        async for name, weight in merge_weight_chunks(self._receive_chunks(), self.bucket_size):
            yield name, weight

    async def _send_bucket(self, metas: list[TensorMeta], payload: torch.Tensor, is_last: bool) -> None:
        header = bytearray(pickle.dumps((metas, payload.numel(), is_last)))
        await self._broadcast(torch.tensor([len(header)]))
        await self._broadcast(torch.frombuffer(header, dtype=torch.uint8))
        await self._broadcast(payload)

    async def _receive_chunks(self) -> AsyncIterator[tuple[TensorMeta, torch.Tensor]]:
        is_last = False
        while not is_last:
            size = await self._broadcast(torch.empty(1, dtype=torch.int64))
            header = await self._broadcast(torch.empty(int(size.item()), dtype=torch.uint8))
            metas, nbytes, is_last = pickle.loads(header.numpy().tobytes())
            # A fresh bucket each time: the consumer may still be reading views of the last one.
            bucket = await self._broadcast(torch.empty(nbytes, dtype=torch.uint8))
            for meta in metas:
                yield meta, bucket[meta.offset : meta.offset + meta.chunk_size]

    async def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast from rank 0, without blocking the event loop on which the consumer runs."""
        assert self.group is not None, "init_process_group comes first"
        options = BroadcastOptions()
        options.rootRank = 0
        work = self.group.broadcast([tensor], options)
        await asyncio.to_thread(work.wait)
        return tensor


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


fixes.copy_saved_weights()
fixes.accept_flush_in_log()
