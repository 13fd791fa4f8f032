# Copyright 2026 Bytedance Ltd. and/or its affiliates
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

import asyncio
import importlib
import importlib.machinery
import sys
from unittest.mock import AsyncMock, MagicMock

import pytest

MODULE = "verl.workers.rollout.sglang_rollout.async_sglang_server"


class _NoSGLang:
    """Whatever is imported of SGLang, which needs a GPU to be imported."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "sglang" else None

    def create_module(self, spec):
        module = MagicMock(__version__="0.5.12", __spec__=spec, __path__=[])
        module.__name__ = spec.name
        return module

    def exec_module(self, module):
        return None


@pytest.fixture(scope="module")
def server_module():
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [_NoSGLang(), *sys.meta_path])
        yield importlib.import_module(MODULE)
    for name in set(sys.modules) - before:
        if "sglang" in name:
            del sys.modules[name]


class _TokenizerManager:
    """A scheduler that is busy for the next few looks."""

    def __init__(self, busy: int):
        self.busy = busy

    async def flush_cache(self):
        idle = self.busy == 0
        self.busy -= not idle
        return MagicMock(success=idle)

    async def release_memory_occupation(self, request, _):
        assert self.busy == 0, "release_memory_occupation should be called only when server is idle."


def _server(module, busy: int, free_cache_engine: bool = True):
    server = object.__new__(module.SGLangHttpServer)
    server.node_rank, server.rollout_mode = 0, module.RolloutMode.HYBRID
    server.config = MagicMock(free_cache_engine=free_cache_engine)
    server.model_config = MagicMock(lora_rank=0, lora={})
    server.tokenizer_manager = _TokenizerManager(busy)
    return server


@pytest.mark.parametrize("busy", [0, 3])
def test_sleep_waits_for_the_scheduler(server_module, busy, monkeypatch):
    monkeypatch.setattr(asyncio, "sleep", AsyncMock())
    server = _server(server_module, busy)
    asyncio.run(server.sleep())
    assert server.tokenizer_manager.busy == 0


def test_a_scheduler_that_stays_busy_is_an_error(server_module, monkeypatch):
    monkeypatch.setattr(asyncio, "sleep", AsyncMock())
    with pytest.raises(TimeoutError, match="still has requests"):
        asyncio.run(_server(server_module, 100).wait_for_requests_to_drain(polls=5))


def test_nothing_is_waited_for_where_nothing_is_released(server_module):
    server = _server(server_module, 5, free_cache_engine=False)
    asyncio.run(server.sleep())
    assert server.tokenizer_manager.busy == 5
