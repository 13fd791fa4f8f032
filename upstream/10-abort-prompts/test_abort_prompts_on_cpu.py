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
"""Aborting single prompts: the sessions end, the servers stop, the load balancer's books are right."""

import asyncio
from types import SimpleNamespace

import pytest
import transfer_queue as tq
from omegaconf import OmegaConf

from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.workers.rollout import llm_server
from verl.workers.rollout.llm_server import LLMServerClient

WORKER = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class _Worker:
    """An agent-loop worker whose sessions wait for a server; the real one needs a model."""

    def __init__(self, generate):
        rollout = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "calculate_log_probs": False,
            "n": 2,
            "agent": {"default_agent_loop": "single_turn_agent"},
        }
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        self.background_tasks = set()
        self._generate = generate

    async def _run_agent_loop(self, sampling_params, *, uid, session_id, **kwargs):
        await self._generate(uid, session_id)

    generate_sequences = WORKER.generate_sequences
    abort_prompts = getattr(WORKER, "abort_prompts", None)
    _run_prompt = WORKER._run_prompt


def _prompts(*uids: str):
    batch = tu.get_tensordict({"uid": list(uids), "index": list(range(len(uids)))})
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    return batch


@pytest.fixture
def status(monkeypatch):
    """The status of each prompt, in the place of TransferQueue."""
    tags = {}

    async def async_kv_put(key, partition_id, tag):
        tags[key] = tag["status"]

    async def async_kv_batch_put(keys, partition_id, tags):
        for key, tag in zip(keys, tags, strict=True):
            await async_kv_put(key, partition_id, tag)

    monkeypatch.setattr(tq, "async_kv_put", async_kv_put)
    monkeypatch.setattr(tq, "async_kv_batch_put", async_kv_batch_put)
    return tags


def test_only_the_sessions_of_these_prompts_end(status):
    ended = []

    async def run():
        gate = asyncio.Event()

        async def generate(uid, session_id):
            try:
                await gate.wait()
                ended.append((uid, "finished"))
            except asyncio.CancelledError:
                ended.append((uid, "cancelled"))
                raise

        worker = _Worker(generate)
        await worker.generate_sequences(_prompts("a", "b", "c"))
        await asyncio.sleep(0.01)
        assert await worker.abort_prompts(["a", "c", "of another worker"]) == []
        assert len(worker.background_tasks) == 1
        gate.set()
        await asyncio.gather(*worker.background_tasks)
        assert await worker.abort_prompts(["b"]) == []  # finished: nothing to do

    asyncio.run(run())
    assert sorted(ended) == [(uid, "cancelled") for uid in "aa"] + [("b", "finished")] * 2 + [("c", "cancelled")] * 2
    assert status == {"a": "running", "b": "finished", "c": "running"}


def test_a_session_that_holds_on_is_named_and_not_waited_for(status):
    async def run():
        gate = asyncio.Event()

        async def generate(uid, session_id):
            try:
                await gate.wait()
            except asyncio.CancelledError:
                await gate.wait()  # a tool that cleans up for long

        worker = _Worker(generate)
        await worker.generate_sequences(_prompts("a", "b"))
        await asyncio.sleep(0.01)
        assert await worker.abort_prompts(["a"], timeout=0.05) == ["a"]
        gate.set()
        await asyncio.gather(*worker.background_tasks, return_exceptions=True)

    asyncio.run(run())


class _Remote:
    """A method of a Ray actor, called in this process: ``method.remote(...)`` gives something to await."""

    def __init__(self, method):
        self._method = method

    def remote(self, *args, **kwargs):
        return asyncio.ensure_future(self._method(*args, **kwargs))


class FakeServer:
    """A rollout server that generates for ever, and the load balancer in front of it."""

    def __init__(self):
        self.running = self.cancelled = self.inflight = 0
        self.found = asyncio.Event()
        for name in (
            "generate",
            "require_acquire_fields",
            "require_release_fields",
            "acquire_server",
            "release_server",
        ):
            setattr(self, name, _Remote(getattr(self, f"_{name}")))

    async def _generate(self, **kwargs):
        self.running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _require_acquire_fields(self):
        return []

    async def _require_release_fields(self):
        return []

    async def _acquire_server(self, request_id):
        self.inflight += 1
        if request_id == "slow":
            await self.found.wait()
        return "0", self

    async def _release_server(self, server_id):
        self.inflight -= 1

    @property
    def counts(self):
        return {"running": self.running, "cancelled": self.cancelled, "inflight": self.inflight}


def test_a_cancelled_request_ends_on_the_server_too(monkeypatch):
    # Awaiting an ObjectRef does not pass a cancellation on, so the client has to.
    monkeypatch.setattr(llm_server.ray, "cancel", lambda task: task.cancel())
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "full_determinism": False}}})

    async def settle():
        for _ in range(20):
            await asyncio.sleep(0)

    async def run():
        server = FakeServer()
        monkeypatch.setattr(server.generate, "remote", lambda **kw: _Shielded(server._generate(**kw)))
        client = LLMServerClient(config, load_balancer_handle=server)
        kept, gone = (
            asyncio.create_task(client.generate(request_id, prompt_ids=[1], sampling_params={}))
            for request_id in ("kept", "gone")
        )
        slow = asyncio.create_task(client.generate("slow", prompt_ids=[1], sampling_params={}))
        await settle()
        assert server.counts == {"running": 2, "cancelled": 0, "inflight": 3}

        gone.cancel()
        slow.cancel()
        await asyncio.wait([gone, slow])
        await settle()
        assert server.counts == {"running": 1, "cancelled": 1, "inflight": 2}

        server.found.set()  # the server that nobody waits for any more is given back
        await settle()
        assert server.counts == {"running": 1, "cancelled": 1, "inflight": 1}

        kept.cancel()
        await asyncio.wait([kept])
        await settle()
        assert server.counts == {"running": 0, "cancelled": 2, "inflight": 0}

    asyncio.run(run())


class _Shielded:
    """A call's ObjectRef: whoever awaits it and is cancelled leaves the call running."""

    def __init__(self, coroutine):
        self.task = asyncio.ensure_future(coroutine)
        self.cancel = self.task.cancel

    def __await__(self):
        return asyncio.shield(self.task).__await__()


def test_the_manager_asks_every_worker(monkeypatch):
    monkeypatch.setattr(agent_loop_tq.ray, "get", lambda calls: calls)
    manager = AgentLoopManagerTQ.__new__(AgentLoopManagerTQ)
    asked = []

    def worker(pending):
        def remote(uids, timeout):
            asked.append((uids, timeout))
            return [uid for uid in uids if uid in pending]

        return SimpleNamespace(abort_prompts=SimpleNamespace(remote=remote))

    manager.agent_loop_workers = [worker(["b"]), worker(["a", "d"])]
    assert manager.abort_prompts(["a", "b", "c"], timeout=3) == ["a", "b"]
    assert asked == [(["a", "b", "c"], 3)] * 2
