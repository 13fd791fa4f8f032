"""verl's abort under a vLLM without the parameter that verl passes; the engine is a stand-in, with the signature of vLLM 0.32's."""

from __future__ import annotations

import asyncio
import inspect
import sys
from types import SimpleNamespace

import pytest
import setuptools  # noqa: F401  (vLLM does, and that fails after some other tests have left their distutils)
import verl  # noqa: F401  (its plugins)

from verl_adaptive.integration import vllm
from verl_cpu import fixes


@pytest.fixture
def engine():
    class AsyncLLM:
        def __init__(self):
            self.paused = []
            self.output_processor = SimpleNamespace(request_states={"a": None})

        async def pause_generation(self, *, mode="abort", clear_cache=True):
            self.paused.append((mode, clear_cache))

    return AsyncLLM


def test_verls_own_abort_pauses_the_engine(engine, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    fixes.name_vllm()  # verl asks for the distribution "vllm"
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    server = object.__new__(vLLMHttpServer)
    server.node_rank, server.engine, server._admitting, server._resume_event = 0, engine(), 0, asyncio.Event()
    with pytest.raises(TypeError, match="wait_for_inflight_requests"):
        asyncio.run(server.abort_all_requests())
    vllm.accept_removed_parameter(SimpleNamespace(AsyncLLM=engine))
    assert asyncio.run(server.abort_all_requests())["request_ids"] == ["a"]
    assert server.engine.paused == [("abort", True)]


def test_a_caller_that_waits_still_waits(engine):
    vllm.accept_removed_parameter(SimpleNamespace(AsyncLLM=engine))
    made = engine()
    asyncio.run(made.pause_generation(wait_for_inflight_requests=True, clear_cache=False))
    asyncio.run(made.pause_generation(mode="keep"))
    assert made.paused == [("wait", False), ("keep", True)]


def test_the_installed_engine_accepts_the_parameter():
    """Because it has it, and is left alone; or because the plugin has seen to it."""
    from vllm.v1.engine.async_llm import AsyncLLM

    assert "wait_for_inflight_requests" in inspect.signature(AsyncLLM.pause_generation, follow_wrapped=False).parameters


def test_an_engine_that_has_it_is_left_alone(engine):
    async def pause_generation(self, *, mode="abort", wait_for_inflight_requests=None, clear_cache=True):
        pass

    engine.pause_generation = pause_generation
    vllm.accept_removed_parameter(SimpleNamespace(AsyncLLM=engine))
    assert engine.pause_generation is pause_generation
    vllm.accept_removed_parameter(SimpleNamespace())  # a later vLLM has no such class
