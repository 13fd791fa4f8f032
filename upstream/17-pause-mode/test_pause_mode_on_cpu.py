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
import importlib.metadata
from types import SimpleNamespace
from unittest.mock import patch

import pytest

vllm = pytest.importorskip("vllm")
_version = importlib.metadata.version

# A build of vLLM for CPUs is a distribution of another name.
with patch("importlib.metadata.version", lambda name: vllm.__version__ if name == "vllm" else _version(name)):
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer


class _Engine:
    """An engine with the signature that ``AsyncLLM.pause_generation`` has since vLLM 0.32."""

    def __init__(self):
        self.paused = []
        self.output_processor = SimpleNamespace(request_states={"a": None, "b": None})

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        self.paused.append((mode, clear_cache))


@pytest.mark.parametrize("reset_prefix_cache", [True, False])
def test_requests_in_flight_are_aborted(reset_prefix_cache):
    server = object.__new__(vLLMHttpServer)
    server.node_rank, server.engine, server._admitting, server._resume_event = 0, _Engine(), 0, asyncio.Event()
    done = asyncio.run(server.abort_all_requests(reset_prefix_cache=reset_prefix_cache))
    assert done == {"aborted_count": 2, "request_ids": ["a", "b"]}
    assert server.engine.paused == [("abort", reset_prefix_cache)]
