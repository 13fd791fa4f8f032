"""verl's servers pause vLLM with a word that vLLM 0.32 no longer takes.

``vLLMHttpServer.abort_all_requests`` of verl 0.9.0, 0.9.1 and main (``1dda039b9``, 2026-08-22) calls
``AsyncLLM.pause_generation`` with ``wait_for_inflight_requests=False``, which vLLM had called deprecated. What it asks for is what
happens without it: requests in flight are aborted. With vLLM 0.32 the first abort would end the run, of a preset that asks for
more than it trains, and of verl's own asynchronous trainers.

Installed by the plugin in the process of each server.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

SERVER_MODULE = "vllm.v1.engine.async_llm"
_WORD = "wait_for_inflight_requests"


def take_verls_word(module: Any) -> None:
    """Let ``AsyncLLM.pause_generation`` take it all the same."""
    real = getattr(getattr(module, "AsyncLLM", None), "pause_generation", None)
    if real is None or _WORD in inspect.signature(real).parameters:
        return

    @functools.wraps(real)
    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool = False, **words: Any) -> None:
        await real(self, **({"mode": "wait"} if wait_for_inflight_requests else {}), **words)

    module.AsyncLLM.pause_generation = pause_generation
