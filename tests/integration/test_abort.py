"""Aborting requests: verl's own worker tasks, client and load balancer, TransferQueue; the model server is a stand-in.

The stand-in is here for what a test must choose: how long each answer takes. Real vLLM servers are aborted by the tests
of the pipeline.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from tests.integration.common import left, listed
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration import abort
from verl_adaptive.integration.abort import Abort, CancellingClient
from verl_adaptive.integration.queue import Queue
from verl_adaptive.integration.status_messages import gather

pytestmark = pytest.mark.timeout(1200)  # the first one waits for five processes that import verl

CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "n": 4, "full_determinism": False}}})
VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class State:
    """As vLLM keeps it."""

    def __init__(self) -> None:
        self.tokens = 0
        self.detokenizer = self

    def num_output_tokens(self) -> int:
        return self.tokens


class Server:
    """Generates one token every 10 ms, ``prompt_ids[0]`` of them; takes few calls at once, as real servers do."""

    def __init__(self) -> None:
        self.engine = self.output_processor = self
        self.request_states: dict[str, State] = {}
        self.rejecting = False
        self.rejected = 0

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        if self.rejecting:
            self.rejected += 1
            return TokenOutput(token_ids=[], stop_reason="aborted")
        state = self.request_states[request_id] = State()
        try:
            while state.tokens < prompt_ids[0] and not self.rejecting:
                await asyncio.sleep(0.01)
                state.tokens += 1
        finally:
            del self.request_states[request_id]
        return TokenOutput(token_ids=[7] * state.tokens, stop_reason="completed")

    async def running(self) -> int:
        return len(self.request_states)

    async def generating(self) -> int:
        return sum(state.tokens > 0 for state in self.request_states.values())

    async def gate(self, closed: bool) -> None:
        self.rejecting = closed
        while closed and self.request_states:  # as vLLM's: returns once nothing runs
            await asyncio.sleep(0.01)


class Gates:
    """Of verl's checkpoint manager: what :class:`Abort` calls."""

    def __init__(self, servers) -> None:
        self.servers = servers

    async def abort_replicas(self, reject_request: bool = False) -> None:
        await asyncio.gather(*[s.gate.remote(reject_request) for s in self.servers])

    def resume_generation_replicas(self) -> None:
        ray.get([s.gate.remote(False) for s in self.servers])


class Worker(VerlWorker):
    """verl's worker without a model: its requests, statuses and settling are verl's; a session is one call and one row."""

    def __init__(self, client) -> None:
        tq.init()
        self.config, self.llm_client, self.background_tasks = CONFIG, client, set()
        self.yields = asyncio.Event()
        self.judging = 0

    async def _run_agent_loop(self, sampling_params, *, session_id, uid, tokens, **_):
        try:
            out = await self.llm_client.generate(
                request_id=f"{uid}{session_id}", prompt_ids=[tokens], sampling_params={}
            )
        except asyncio.CancelledError:
            if uid != "stubborn":
                raise
            await self.yields.wait()
            out = TokenOutput(token_ids=[7])
        if uid == "judged":  # its reward takes long
            self.judging += 1
            await asyncio.sleep(3600)
        rows = [{"uid": uid, "responses": torch.tensor(out.token_ids or [0])}]
        await tq.async_kv_batch_put(
            keys=[f"{uid}_{session_id}_0"],
            partition_id="train",
            fields=tu.list_of_dict_to_tensordict(rows),
            tags=[{"response_len": len(out.token_ids)}],
        )

    async def judged(self) -> int:
        """Sessions that wait for their reward."""
        return self.judging

    async def calls(self) -> int:
        """Calls that servers have of its sessions."""
        return sum(asked.open for asked in abort._sessions.values())

    async def give_in(self) -> None:
        """Sessions that hold their cancellation back end."""
        self.yields.set()

    async def send(self, prompts: list[tuple[str, int, int]]) -> None:
        for uid, n, tokens in prompts:
            prompt = {"uid": uid, "__rollout_n__": n, "tokens": tokens}
            task = asyncio.create_task(self._run_prompt(prompt, {}, trajectory={"validate": False}))
            self.background_tasks.add(task)
            task.add_done_callback(self.background_tasks.discard)


class House:
    """Workers, servers that take eight calls at a time, a load balancer, and the abort."""

    def __init__(self) -> None:
        self.servers = [ray.remote(Server).options(max_concurrency=8).remote() for _ in range(2)]
        self.balancer = ray.remote(GlobalRequestLoadBalancer).remote(dict(zip("ab", self.servers, strict=True)))
        client = CancellingClient(CONFIG, self.balancer)
        self.workers = [ray.remote(Worker).remote(client) for _ in range(2)]
        ray.get([worker.__ray_call__.remote(gather) for worker in self.workers])  # as in a run
        gates = Gates(self.servers)
        self.abort = Abort(lambda: self.workers, lambda: self.servers, lambda: gates, timeout=300.0)

    def send(self, prompts: list[tuple[str, int, int]]) -> None:
        for uid, _, _ in prompts:
            tq.kv_batch_put(keys=[uid], partition_id="train", tags=[{"is_prompt": True, "status": "pending"}])
        ray.get([w.send.remote(prompts[i :: len(self.workers)]) for i, w in enumerate(self.workers)])

    def running(self) -> int:
        return sum(ray.get([s.running.remote() for s in self.servers]))

    def generating(self) -> int:
        """Calls that have a token: what has none is no rollout when it is aborted."""
        return sum(ray.get([s.generating.remote() for s in self.servers]))

    def inflight(self) -> int:
        until = time.monotonic() + 60  # a release is sent, not awaited
        while (left := ray.get(self.balancer.get_total_inflight.remote())) and time.monotonic() < until:
            time.sleep(0.05)
        return left


def until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def built(started):
    return House()


@pytest.fixture
def house(built, queue):
    yield built
    built.abort.reopen()


@pytest.fixture
def counted(monkeypatch):
    """A machine with other work may take longer to count than a step would wait for."""
    monkeypatch.setattr(abort, "_COUNT_PATIENCE", 120.0)


def count_statuses(worker: Worker) -> None:
    """Note how many prompts each message is about that says statuses; runs in the worker."""
    real, worker.said = tq.async_kv_batch_put, []

    async def counted(keys, partition_id, **more):
        if "fields" not in more:
            worker.said.append(len(keys))
        return await real(keys=keys, partition_id=partition_id, **more)

    tq.async_kv_batch_put = counted


def test_in_a_real_worker_prompts_say_together_that_they_run(house):
    """Ray sends the class with names of its own: what verl's module says is not what a worker does."""
    ray.get([w.__ray_call__.remote(count_statuses) for w in house.workers])
    house.send([(f"prompt{i}", 1, 3) for i in range(40)])
    until(lambda: all(listed()[f"prompt{i}"]["status"] == "finished" for i in range(40)))
    for said in ray.get([w.__ray_call__.remote(lambda worker: worker.said) for w in house.workers]):
        assert said[0] == 20 and sum(said) == 40


def test_nothing_is_left_and_what_was_generated_is_counted(house, counted):
    house.send([("quick", 3, 5), ("half", 2, 100_000), ("long", 4, 100_000)])
    until(lambda: listed()["quick"]["status"] == "finished" and house.generating() == 6)
    done = house.abort(["half", "long"])
    assert done.rollouts == 6 and done.tokens >= 6
    assert house.running() == 0 and house.inflight() == 0
    assert left() == {"quick", "quick_0_0", "quick_1_0", "quick_2_0"}  # what is not aborted stays
    time.sleep(0.5)
    assert len(listed()) == 4
    # servers take nothing until the weights are new, and everything from then on
    house.abort.reopen()
    house.send([("next", 2, 3)])
    until(lambda: listed()["next"]["status"] == "finished")
    assert listed()["next_1_0"]["response_len"] == 3


def test_finished_sessions_of_an_aborted_request_are_counted_and_cleared(house, counted):
    house.send([("slow", 1, 100_000)])
    tq.kv_batch_put(keys=["slow_1_0", "slow_1_1", "slow_2_0"], partition_id="train", tags=[{"response_len": 9}] * 3)
    until(lambda: house.generating() == 1)
    done = house.abort(["slow"])
    assert done.rollouts == 3 and done.tokens >= 27
    assert not left()


def test_sessions_whose_reward_is_being_computed_are_counted(house, counted):
    """At no server any more and without a row yet, they were billed as nothing."""
    house.send([("judged", 3, 5), ("long", 2, 100_000)])
    until(lambda: sum(ray.get([w.judged.remote() for w in house.workers])) == 3 and house.generating() == 2)
    done = house.abort(["judged", "long"])
    assert done.rollouts == 5 and done.tokens >= 3 * 5 + 2 and not left()


@pytest.mark.parametrize(("slots", "rollouts"), [(16, 16), (0, 320)])
def test_rollouts_of_servers_that_are_too_busy_to_count_are_billed(house, monkeypatch, slots, rollouts):
    """All places of a server are taken, so that it does not answer before it is given up; it counted as nothing."""
    monkeypatch.setattr(abort, "_COUNT_PATIENCE", 0.2)
    monkeypatch.setattr(house.abort, "_slots", slots)
    house.send([(f"b{i}", 8, 100_000) for i in range(40)])
    until(lambda: sum(ray.get([w.calls.remote() for w in house.workers])) == 320)
    done = house.abort([f"b{i}" for i in range(40)])
    assert done == abort.Aborted(rollouts=rollouts, tokens=0) and not left()


def test_a_server_with_other_books_ends_nothing(house, monkeypatch):
    """Its private names are another version's: the rollouts are those that were cancelled."""
    monkeypatch.setattr(abort, "_generated", _other_books)
    house.send([("other", 3, 100_000)])
    until(lambda: house.generating() == 3)
    assert house.abort(["other"]) == abort.Aborted(rollouts=3, tokens=0)
    assert abort._generated.__name__ == "_other_books" and _REAL(object()) is None


_REAL = abort._generated


def _other_books(server):
    raise AttributeError("request_states")


@pytest.mark.parametrize("moment", np.linspace(0.0, 0.06, 7).tolist())
def test_an_abort_at_any_moment_leaves_a_queue_that_works(house, moment):
    """Sessions are cancelled before they reach a server, at it, and while they write."""
    prompts = [(f"m{i}", 8, 1 + i % 3) for i in range(24)]
    house.send(prompts)
    time.sleep(moment)
    house.abort([uid for uid, _, _ in prompts])
    assert not left() and house.running() == 0 and house.inflight() == 0
    house.abort.reopen()
    house.send([(f"n{i}", 8, 2) for i in range(24)])
    until(lambda: all(listed()[f"n{i}"]["status"] == "finished" for i in range(24)))
    keys = [f"n{i}_{s}_0" for i in range(24) for s in range(8)]
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["uid", "responses"])
    assert [getattr(u, "data", u) for u in data["uid"]] == [key.split("_")[0] for key in keys]
    assert all(r.tolist() == [7, 7] for r in data["responses"])


def test_sessions_that_hold_cancellation_back_are_said_and_their_rows_cleared(house, caplog):
    house.send([("stubborn", 2, 100_000)])
    until(lambda: house.running() == 2)
    with caplog.at_level("WARNING", logger="verl_adaptive"):
        house.abort(["stubborn"])
    assert "1 requests were cancelled 10 s ago and have not ended" in caplog.text
    assert not any(key.startswith("stubborn_") for key in left())
    ray.get([w.give_in.remote() for w in house.workers])
    until(lambda: "stubborn_1_0" in left() and "stubborn_0_0" in left())
    Queue(AdaptiveConfig()).clear_strays()
    assert not left()


def test_a_worker_of_another_kind_is_refused_by_name(house):
    class Odd:
        def ping(self) -> None:
            return None

    house.workers.append(ray.remote(Odd).remote())
    try:
        with pytest.raises(AdaptiveError, match=r"Odd keeps no background_tasks.*derive the workers"):
            house.abort(["x"])
    finally:
        ray.kill(house.workers.pop())


def test_what_has_not_begun_is_no_rollout_and_a_session_of_several_turns_is_one(monkeypatch):
    """A server has more requests in its books than it generates; a session in its second turn is in them, too."""
    counts = [SimpleNamespace(num_output_tokens=lambda n=n: n) for n in (0, 0, 3)]
    states = dict(enumerate(SimpleNamespace(detokenizer=count) for count in counts))
    server = SimpleNamespace(engine=SimpleNamespace(output_processor=SimpleNamespace(request_states=states)))
    # two wait, one is in its second turn, one waits for its reward, one for its first call
    asked = [abort._Asked(*of) for of in ((1, 0), (1, 0), (1, 5), (0, 7), (0, 0))]
    monkeypatch.setattr(abort, "_sessions", dict(enumerate(asked)))
    monkeypatch.setattr(abort, "_clear", lambda uids: {})
    # what two processes count, without either: sessions of several turns on real servers are tests/e2e's
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    monkeypatch.setattr(ray, "get", lambda calls, **_: calls)
    worker = SimpleNamespace(background_tasks=set())
    handles = [
        SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda call, of=of: call(of))) for of in (worker, server)
    ]

    async def abort_replicas(reject_request: bool = False) -> None:
        assert reject_request

    made = Abort(lambda: handles[:1], lambda: handles[1:], lambda: SimpleNamespace(abort_replicas=abort_replicas), 1.0)
    assert made(["a"]) == abort.Aborted(rollouts=2, tokens=3 + 5 + 7)
