"""verl's servers pause vLLM with a parameter that vLLM 0.32 removed.

``vLLMHttpServer.abort_all_requests`` of verl 0.9.0, 0.9.1 and main (``1dda039b9``, 2026-08-22) calls
``AsyncLLM.pause_generation`` with ``wait_for_inflight_requests=False``, which vLLM had deprecated. False is what vLLM does
without it: it aborts the requests in flight. With vLLM 0.32 the first abort would end the run with a ``TypeError``: that of
a preset that asks for more than it trains, and those of verl's own asynchronous trainers.

Installed by the plugin in the process of each server.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

SERVER_MODULE = "vllm.v1.engine.async_llm"
_PARAMETER = "wait_for_inflight_requests"


def accept_removed_parameter(module: Any) -> None:
    """Let ``AsyncLLM.pause_generation`` accept it, if it does not; ``module`` is vLLM's."""
    real = getattr(getattr(module, "AsyncLLM", None), "pause_generation", None)
    if real is None or _PARAMETER in inspect.signature(real).parameters:
        return

    @functools.wraps(real)
    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool = False, **others: Any) -> None:
        await real(self, **({"mode": "wait"} if wait_for_inflight_requests else {}), **others)

    module.AsyncLLM.pause_generation = pause_generation
