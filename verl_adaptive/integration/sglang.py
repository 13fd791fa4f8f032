"""A cancelled call leaves an SGLang server's request to the server until the server aborts it.

The ``sync`` trainer cancels its sessions before it closes the servers (:mod:`~verl_adaptive.integration.abort`). SGLang's
``pause_generation(mode="abort")`` waits for the callers of ``generate_request``, not for the scheduler: with its callers
cancelled it returns at once, while the scheduler still generates, and ``release_memory_occupation``, which verl calls
next, asserts that the scheduler is idle and kills it. So the call ends for Ray, which frees a place in the server's line,
and goes on inside the server, where the pause aborts it and waits for it. vLLM drains its engine and needs none of this.

Installed by the plugin in the process of each server.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)

SERVER_MODULE = "verl.workers.rollout.sglang_rollout.async_sglang_server"


def keep_requests(module: Any) -> None:
    """Shield ``SGLangHttpServer.generate`` from the cancellation of its caller."""
    server = getattr(module, "SGLangHttpServer", None)
    if server is None:  # plain verl imports it under the plugin, too, and cancels nothing
        logger.warning(
            "%s has no SGLangHttpServer: presets that abort requests may end with an assertion of SGLang's scheduler",
            SERVER_MODULE,
        )
        return
    real = server.generate
    running: set[asyncio.Task[Any]] = set()  # the loop holds tasks weakly, and a cancelled caller no longer does

    @functools.wraps(real)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        task = asyncio.ensure_future(real(self, *args, **kwargs))
        running.add(task)
        task.add_done_callback(running.discard)
        return await asyncio.shield(task)

    server.generate = generate
