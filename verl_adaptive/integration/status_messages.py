"""The statuses of a worker's prompts go to TransferQueue together.

verl's ``AgentLoopWorkerTQ._run_prompt`` says "running" and later "finished" with a ``kv_put`` of its own a prompt: two
requests to TransferQueue's one controller, and the prompt's sessions wait for the first. A step of many prompts with few
rollouts each begins late by that, and later with each prompt (``benchmarks/results/prompt_cost.json`` and
``status_messages.json``). Here one message is under way at a time, and what is put meanwhile goes with the next. Each caller
still waits until its own status is there.

``upstream/16-running-in-one-message`` mends the first of the two in verl itself; this goes with the last verl without it.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import wrapt


class GatheredStatus(wrapt.ObjectProxy):
    """The module ``transfer_queue`` as one event loop uses it: puts of a tag alone share messages."""

    def __init__(self, queue: Any) -> None:
        super().__init__(queue)
        self._self_next: dict[str, tuple[dict[str, dict], asyncio.Task]] = {}  # partition → the message being gathered
        self._self_line = asyncio.Lock()

    async def async_kv_put(
        self, key: str, partition_id: str, fields: Any = None, tag: dict | None = None, **more: Any
    ) -> Any:
        """As TransferQueue's; for a tag alone it returns the meta data of the whole message."""
        if fields is not None or tag is None:
            return await self.__wrapped__.async_kv_put(key, partition_id, fields, tag, **more)
        if partition_id not in self._self_next:
            self._self_next[partition_id] = {}, asyncio.ensure_future(self._put(partition_id))
        tags, message = self._self_next[partition_id]
        tags[key] = tag
        return await asyncio.shield(message)  # a caller that is cancelled must not take the others' status with it

    async def _put(self, partition_id: str) -> Any:
        async with self._self_line:
            tags, _ = self._self_next.pop(partition_id)
            return await self.__wrapped__.async_kv_batch_put(
                keys=list(tags), partition_id=partition_id, tags=list(tags.values())
            )


def gather(worker: Any) -> None:
    """Let an agent-loop worker gather; runs in the worker's process.

    Ray sends an actor's class with its functions' global names, so that those are not the ones of verl's module.
    """
    for kind in type(worker).__mro__:
        if "_run_prompt" in vars(kind):
            names = inspect.unwrap(vars(kind)["_run_prompt"]).__globals__
            if "tq" in names and not isinstance(names["tq"], GatheredStatus):
                names["tq"] = GatheredStatus(names["tq"])
