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
from unittest.mock import patch

import pytest

vllm = pytest.importorskip("vllm")
_version = importlib.metadata.version

# A build of vLLM for CPUs is a distribution of another name.
with patch("importlib.metadata.version", lambda name: vllm.__version__ if name == "vllm" else _version(name)):
    from verl.workers.rollout.vllm_rollout.vllm_pd_replica import vLLMPDReplica


class _Call:
    def __init__(self, events, name):
        self.events, self.name = events, name

    async def remote(self):
        self.events.append(self.name)


class _Server:
    """A server of the replica: its engine is paused, and its gate closed."""

    def __init__(self, events, name):
        self.resume_engine_generation = _Call(events, f"engine {name}")
        self.open_submission_gate = _Call(events, f"gate {name}")


def test_every_engine_is_resumed_before_any_gate_opens():
    events = []
    replica = object.__new__(vLLMPDReplica)
    replica.servers = [_Server(events, name) for name in ("prefill", "decode 0", "decode 1")]
    asyncio.run(replica.resume_generation())
    assert sorted(events[:3]) == ["engine decode 0", "engine decode 1", "engine prefill"]
    assert sorted(events[3:]) == ["gate decode 0", "gate decode 1", "gate prefill"]
