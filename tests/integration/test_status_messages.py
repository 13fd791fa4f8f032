"""Statuses that share messages, on verl's own ``_run_prompt`` and TransferQueue: none is late, lost or somebody else's."""

from __future__ import annotations

import asyncio

import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import tensordict_utils as tu

from tests.integration.common import listed
from verl_adaptive.integration.status_messages import GatheredStatus, gather

pytestmark = pytest.mark.usefixtures("started", "queue")

COUNT = 64


class Worker(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker without a model."""

    def __init__(self, session) -> None:
        rollout = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": False, "n": 2}
        agent = {"default_agent_loop": "single_turn_agent"}
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {**rollout, "agent": agent}}})
        self.background_tasks = set()
        self._session = session

    async def _run_agent_loop(self, sampling_params, *, uid, session_id, **_):
        await self._session(uid, session_id)

    async def run(self, uids: list[str]) -> None:
        batch = tu.get_tensordict({"uid": uids, "index": list(range(len(uids)))})
        tu.assign_non_tensor_data(batch, "global_steps", 1)
        await self.generate_sequences(batch)
        await asyncio.gather(*self.background_tasks, return_exceptions=True)


@pytest.fixture
def messages(started, monkeypatch):
    """Number of prompts in each message that says a status."""
    sizes: list[int] = []
    real = started.async_kv_batch_put

    async def counted(keys, partition_id, **more):
        sizes.append(len(keys))
        return await real(keys=keys, partition_id=partition_id, **more)

    monkeypatch.setattr(started, "async_kv_batch_put", counted)
    monkeypatch.setattr(agent_loop_tq, "tq", started)
    worker = object.__new__(Worker)
    gather(worker)
    gather(worker)  # a second time changes nothing
    assert isinstance(agent_loop_tq.tq, GatheredStatus)
    assert not isinstance(agent_loop_tq.tq.__wrapped__, GatheredStatus)
    return sizes


def statuses() -> dict[str, str]:
    return {key: tag["status"] for key, tag in listed().items()}


def test_each_prompt_runs_before_its_sessions_and_ends_as_it_ended(messages) -> None:
    before = {}

    async def session(uid, session_id):
        before[uid] = statuses()[uid]
        await asyncio.sleep(0.001 * session_id)
        if uid == "prompt 3":
            raise RuntimeError("a session that fails")

    uids = [f"prompt {i}" for i in range(COUNT)]
    asyncio.run(Worker(session).run(uids))
    assert before == dict.fromkeys(uids, "running")
    found = statuses()
    assert found.pop("prompt 3") == "failure"
    assert {found[uid] for uid in uids if uid in found} == {"finished"}
    assert messages[0] == COUNT  # all said in one message that they run
    assert sum(messages) == 2 * COUNT


def test_a_cancelled_prompt_takes_no_other_with_it(messages) -> None:
    started_sessions = []

    async def session(uid, _):
        started_sessions.append(uid)

    async def run():
        worker = Worker(session)
        running = asyncio.ensure_future(worker.run([f"kept {i}" for i in range(4)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # its prompts wait for their first message
        assert len(worker.background_tasks) == 4
        next(iter(worker.background_tasks)).cancel()
        await running

    asyncio.run(run())
    ended = [uid for uid, status in statuses().items() if uid.startswith("kept") and status == "finished"]
    assert len(ended) == 3
    assert set(started_sessions) == set(ended)


def test_what_is_no_status_goes_its_own_way(messages) -> None:
    async def run():
        queue = agent_loop_tq.tq
        await queue.async_kv_put("row", "train", {"x": torch.ones(2)}, {"status": "whole"})
        with pytest.raises(ValueError, match="at least one"):
            await queue.async_kv_put("row", "train")
        await asyncio.gather(
            queue.async_kv_put("a", "train", tag={"status": "running"}),
            queue.async_kv_put("a", "val", tag={"status": "finished"}),
        )

    asyncio.run(run())
    assert statuses()["row"] == "whole"
    assert statuses()["a"] == "running"
    assert (tq.kv_list("val") or {})["val"]["a"]["status"] == "finished"
    assert messages == [1, 1]


def test_an_error_reaches_everybody_and_ends_nothing_else(messages, monkeypatch) -> None:
    broken = True
    real = tq.async_kv_batch_put

    async def flaky(**message):
        if broken:
            raise RuntimeError("no queue")
        return await real(**message)

    monkeypatch.setattr(tq, "async_kv_batch_put", flaky)

    async def run():
        nonlocal broken
        queue = agent_loop_tq.tq
        puts = [queue.async_kv_put(key, "train", tag={"status": "running"}) for key in ("b", "c")]
        found = await asyncio.gather(*puts, return_exceptions=True)
        broken = False
        await queue.async_kv_put("d", "train", tag={"status": "running"})
        return found

    assert [str(error) for error in asyncio.run(run())] == ["no queue"] * 2
    assert statuses()["d"] == "running"
