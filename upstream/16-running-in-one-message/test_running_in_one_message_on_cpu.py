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
"""Prompts are said to be running in one message, before their first session begins."""

import asyncio

import pytest
import transfer_queue as tq
from omegaconf import OmegaConf

from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

WORKER = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class _Worker:
    """An agent-loop worker with sessions of its own; the real one needs a model."""

    def __init__(self, session):
        rollout = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "calculate_log_probs": False,
            "n": 2,
            "val_kwargs": {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "n": 1},
            "agent": {"default_agent_loop": "single_turn_agent"},
        }
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        self.background_tasks = set()
        self._session = session

    async def _run_agent_loop(self, sampling_params, *, uid, session_id, **kwargs):
        self._session(uid)

    generate_sequences = WORKER.generate_sequences
    _run_prompt = WORKER._run_prompt


@pytest.mark.parametrize(("validate", "partition", "sessions"), [(False, "train", 2), (True, "val", 1)])
def test_one_message_says_that_all_are_running(monkeypatch, validate, partition, sessions):
    events = []

    async def async_kv_put(key, partition_id, tag):
        events.append((partition_id, [key], tag["status"]))

    async def async_kv_batch_put(keys, partition_id, tags):
        events.append((partition_id, keys, *{tag["status"] for tag in tags}))

    monkeypatch.setattr(tq, "async_kv_put", async_kv_put)
    monkeypatch.setattr(tq, "async_kv_batch_put", async_kv_batch_put)

    def session(uid):
        events.append(uid)
        if uid == "b":
            raise RuntimeError("a session that fails")

    batch = tu.get_tensordict({"uid": ["a", "b", "c"], "index": [0, 1, 2]})
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    tu.assign_non_tensor_data(batch, "validate", validate)

    async def run():
        worker = _Worker(session)
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)

    asyncio.run(run())
    first, *rest = events
    assert first == (partition, ["a", "b", "c"], "running")
    assert sorted(event for event in rest if isinstance(event, str)) == sorted([*"abc"] * sessions)
    ended = sorted(event for event in rest if not isinstance(event, str))
    assert ended == [(partition, ["a"], "finished"), (partition, ["b"], "failure"), (partition, ["c"], "finished")]
