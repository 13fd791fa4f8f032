"""The asynchronous rollout client on a real TransferQueue: presets by fault, any order of arrival, restarts with work in flight.

Only the rollout workers are a stand-in: a thread writes what verl's ``AgentLoopWorkerTQ`` writes, a few prompts at a
time, in a shuffled order.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import types
from dataclasses import replace
from typing import ClassVar

import pytest
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from tests.integration.common import left, listed
from tests.integration.test_sync_client import BATCH, N, Workers, engine_on_rows, requests_of, rollouts_of
from tests.integration.test_sync_client import client_of as sync_client_of
from tests.world import POLICIES, config_of
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.async_client import AsyncRolloutClient, NothingLeft
from verl_adaptive.integration.polling import PARTITION, stall_seconds
from verl_adaptive.integration.queue import Queue, bound_queue
from verl_adaptive.integration.replay_buffer import AdaptiveReplayBuffer
from verl_adaptive.integration.rollout_client import RolloutHandles
from verl_adaptive.record import Recorder, replay
from verl_adaptive.stats import StatsTable

STREAMS = {
    "colocate": AsyncFacts(warmup=BATCH, threshold=8),
    "separate": AsyncFacts(warmup=6, mini_steps=2, threshold=3),
}


class SlowWorkers(Workers):
    """Answers in a thread of its own, some time after it was asked, in an order of its own.

    Args:
        order: seeds the order and what fails.
        fail: chance that a prompt's session fails.
        forget: chance that a prompt is never answered.
    """

    alive: ClassVar[list[SlowWorkers]] = []

    def __init__(self, order: int = 0, fail: float = 0.0, forget: float = 0.0) -> None:
        super().__init__(order, fail)
        self.alive.append(self)
        self.forget, self.forgotten = forget, 0
        self.jobs: list[tuple] = []
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def submit(self, batch) -> int:
        self.calls += 1
        uids = [batch["uid"][i] for i in range(len(batch))]
        tag = {"is_prompt": True, "status": "pending", "global_steps": batch["global_steps"]}
        tq.kv_batch_put(keys=uids, partition_id="train", tags=[tag] * len(uids))
        with self.lock:
            for i, uid in enumerate(uids):
                self.jobs.append((uid, int(batch["__rollout_n__"][i]), int(batch["number"][i]), i + 100 * self.calls))
        return len(batch)

    def _work(self) -> None:
        while not self.stopped.wait(0.005):
            with self.lock:  # an abort waits for what is being written
                self.shuffle.shuffle(self.jobs)
                for _ in range(min(len(self.jobs), self.shuffle.randint(1, 4))):
                    job = self.jobs.pop()
                    if self.shuffle.random() < self.forget:
                        self.forgotten += 1
                    else:
                        self._prompt(*job)

    def stop(self) -> None:
        """As a kill does: what is not written is lost."""
        self.stopped.set()
        self.thread.join()


def client_of(workers: Workers, stream: AsyncFacts, table: StatsTable | None = None, **adaptive) -> AsyncRolloutClient:
    config = config_of(**{"poll_interval": 0.01, "stall_timeout": 60.0, **adaptive})
    engine, prompts = engine_on_rows(config, table=table, steps=20, async_facts=stream)
    handles = RolloutHandles(workers.submit, lambda: client.step, stall=stall_seconds(config, 64))
    client = AsyncRolloutClient(engine, prompts, handles)
    client.step = 0
    return client


def one_step(client: AsyncRolloutClient):
    """A step as the trainer takes it; the rows that trained leave the queue, as verl clears them."""
    client.step += 1
    client.start()
    for _ in range(client.engine.async_facts.mini_steps):
        batch = client.complete()
        assert set(batch.keys) <= left()
        for (key, trains), home in zip(batch.sequences, batch.group, strict=True):
            assert trains == (key in batch.keys) and 0 <= home < len(batch.trained)
        tq.kv_clear(keys=batch.keys, partition_id="train")
    return client.finish()


def nothing_but_open_groups_is_left(client: AsyncRolloutClient) -> None:
    """Rows in the queue belong to groups in flight or ready, and every ready group's rows are there."""
    own = {request.uid for requests in client.queue._groups.values() for request in requests}
    assert {key.split("_", 1)[0] for key in left()} <= own
    assert len(client.queue._groups) == len(
        set(client.engine.flight.submission) | set(client.engine.ready.groups.submission)
    )


@pytest.fixture
def clean(queue):
    yield
    for workers in SlowWorkers.alive:  # of a test that failed, too
        workers.stop()
    SlowWorkers.alive.clear()


@pytest.mark.parametrize(("stream", "fail"), [("colocate", 0.2), ("separate", 0.0)], ids=["failing", "sound"])
@pytest.mark.parametrize("preset", [preset for preset in POLICIES if preset != "cero"])
def test_steps_add_up_and_replay(clean, preset, fail, stream, tmp_path):
    workers = SlowWorkers(order=3, fail=fail)
    client = client_of(workers, STREAMS[stream], **POLICIES[preset])
    recorder = Recorder(tmp_path, client.engine)
    held = generated = closed = 0
    for _ in range(5):
        result = one_step(client)
        account = result.ledger.rollouts
        out = account.trained + account.dropped_in_all + account.held
        assert account.generated + held == out
        held, generated, closed = account.held, generated + account.generated, closed + len(result.groups)
        nothing_but_open_groups_is_left(client)
    workers.stop()
    recorder.close()
    table = client.engine.table
    assert table.col("visits").sum() + table.col("failures").sum() == closed + len(client.engine.ready)
    # each prompt's rewards are those that the workers wrote for it
    report = replay(tmp_path / "attempt-0")
    assert report.identical and (report.steps, report.rollouts) == (5, generated)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("preset", ["greso", "pilot_commit", "mopps+aero"])
def test_a_restart_loses_and_repeats_nothing(clean, preset, stream):
    """The driver dies with prompts in flight; the queue comes back as its checkpoint had it, some requests unknown.

    What is generated anew is as old as the resumed step; what was finished, or has pilots, as old as it was.
    """
    first = SlowWorkers(order=5)
    client = client_of(first, STREAMS[stream], **POLICIES[preset])
    for _ in range(3):
        one_step(client)
    state, own = copy.deepcopy(client.engine.state_dict()), copy.deepcopy(client.state_dict())
    table = StatsTable.from_arrow(client.engine.table.to_arrow())
    rollouts, held = int(table.col("rollouts").sum()), client.engine.ledger.rollouts.held
    first.stop()
    # half of what is not done is not in the restored queue at all, the rest is issued again, as verl does
    rows = listed()
    open_ = [k for k, t in rows.items() if t.get("is_prompt") and t["status"] not in ("finished", "failure")]
    lost, again = open_[::2], open_[1::2]
    gone = [k for k in rows if k.split("_", 1)[0] in lost] + [
        k for k, t in rows.items() if not t.get("is_prompt") and k.split("_", 1)[0] in again
    ]
    if gone:
        tq.kv_clear(keys=gone, partition_id="train")
    tq.kv_batch_put(keys=["stray_0_0"], partition_id="train", tags=[{"response_len": 1}])
    tq.kv_batch_put(
        keys=["late"], partition_id="train", tags=[{"status": "finished"}]
    )  # of a request cleared meanwhile

    second = SlowWorkers(order=6)
    other = client_of(second, STREAMS[stream], table=table, **POLICIES[preset])
    other.engine.load_state_dict(state)
    other.load_state_dict(own)
    other.step = client.step + 1
    assert not {"stray_0_0", "late"} & left()
    tq.kv_batch_put(keys=["late"], partition_id="train", tags=[{"status": "finished"}])
    for request in (p for requests in other.queue._groups.values() for p in requests if p.uid in again):
        submission = next(t for t, requests in other.queue._groups.items() if request in requests)
        number = int(other.stream.item(other.engine.living[submission])["number"])
        tag = {"is_prompt": True, "status": "pending", "global_steps": other.step}
        tq.kv_batch_put(keys=[request.uid], partition_id="train", tags=[tag])
        second.jobs.append((request.uid, request.n, number, 7))
    born = dict(other.engine._born)
    first_requests = {
        t for t, requests in other.queue._groups.items() if len(requests) == 1 and requests[0].uid in {*lost, *again}
    }
    assert other.resend() == len(lost)
    for submission, step in other.engine._born.items():
        assert step == (other.step if submission in first_requests else born[submission])
    other.step = client.step
    account = one_step(other).ledger.rollouts
    assert account.generated + held == account.trained + account.dropped_in_all + account.held
    tq.kv_clear(keys=["late"], partition_id="train")
    for _ in range(2):
        one_step(other)
        nothing_but_open_groups_is_left(other)
    second.stop()
    waiting = other.engine.tracker.open.rollouts
    assert table.col("rollouts").sum() + waiting == other.engine.total.rollouts.generated >= rollouts


@pytest.mark.parametrize("stream", STREAMS)
def test_groups_that_sync_held_are_gone_in_an_asynchronous_trainer_and_leave_no_rows(clean, stream):
    """It tops up while it goes on, and recalls nothing: their rollouts count, and train nothing."""
    pilots = {**POLICIES["pilot_commit"], "allocator": {"name": "pilot_commit", "form": "pipelined"}}
    before = sync_client_of(Workers(), **pilots)
    for _ in range(2):
        before.start()
        tq.kv_clear(keys=before.complete().keys, partition_id="train")
    held = before.engine.held
    assert len(held) and len(left()) > held.rollouts  # prompts and outputs, as a snapshot brings them back
    state, own = copy.deepcopy(before.engine.state_dict()), copy.deepcopy(before.state_dict())

    client = client_of(workers := SlowWorkers(), STREAMS[stream], table=before.engine.table, **pilots)
    client.engine.load_state_dict(state)
    client.load_state_dict(own)
    assert not left() and not client.queue._groups
    client.step = 2
    result = one_step(client)
    account, closed = result.ledger.rollouts, result.groups.submission[result.outcome == "gone"]
    assert sorted(closed) == sorted(held.submission) and account.dropped["gone"] == held.rollouts
    assert account.generated + held.rollouts == account.trained + account.dropped_in_all + account.held
    nothing_but_open_groups_is_left(client)
    workers.stop()


def test_a_restart_does_not_wait_for_a_top_up_that_had_lost_everything(queue):
    """Its rollouts were still to come for the room that the queue needs, and for the error of a signal that none has."""
    rows = {"a": {}, "a_0_0": {"response_len": 1}, "a.t1": {"status": "failure"}, "b": {"status": "running"}}
    tq.kv_batch_put(keys=list(rows), partition_id="train", tags=list(rows.values()))
    before, after = Queue(config_of()), Queue(config_of())
    for stage, sessions in enumerate([["a_0_0"], []]):
        before.ask(0, "a", 1, stage)
        request = before._groups[0][-1]
        before._waited_for(request)
        request.sessions, request.tags = [sessions] * len(sessions), [rows["a_0_0"]] * len(sessions)
    before.ask(1, "b", 3, 0)  # it is waited for still
    after.load_state_dict(before.state_dict(), [0, 1])
    assert after.under_way == before.under_way == 3 and after.expected() == before.expected() == 3 + 1 + 3


def test_a_request_that_got_lost_is_asked_anew_and_not_twice(clean):
    """Its rollouts would be expected for the rest of the run, and a queue that has room would be too small."""
    workers, sent = Workers(), []
    workers.submit = lambda batch: sent.append(batch["uid"])
    client = client_of(workers, AsyncFacts())
    client.start()
    before = client.queue.under_way, client.queue.expected()
    assert client.resend() == BATCH and (client.queue.under_way, client.queue.expected()) == before
    assert not set(sent[0]) & set(sent[1]) and len(set(sent[1])) == BATCH


class FirstSolved(Workers):
    """The prompts of the first batch are solved for good, and half-solved are the others."""

    def _prompt(self, uid: str, n: int, number: int, place: int) -> None:
        self._write(uid, number, {s: (float(number < BATCH or s % 2), [3]) for s in range(n)})
        self._end(uid, False)


def test_a_mini_step_that_would_have_nothing_draws_once_more(clean):
    """Without a refill, and all of the first prompts solved: verl's step cannot do without a batch."""
    client = client_of(FirstSolved(), AsyncFacts(), filter="informative", refill=False)
    client.start()
    result = client.complete().result
    assert result.trained.any() and result.groups.index[result.trained].min() >= BATCH


def test_rows_of_a_step_are_listed_before_they_are_judged(queue, monkeypatch):
    """A colocated reward model judges rows that nobody has read: of the second step on, looks do without a list of them."""
    monkeypatch.setattr("verl_adaptive.integration.queue._LIST_SHARE", 1e-9)
    made = Queue(config_of(), late=True)
    made.ask(0, "a", 2, 0, whole=True)
    tq.kv_batch_put(keys=["a"], partition_id="train", tags=[{"status": "running"}])
    assert made.look(["a"]) == {"a": "running"} and made.count == 1  # the first look lists them
    listed_at = made.listed_at
    assert made.look(["a"]) == {"a": "running"} and made.listed_at == listed_at
    made._single = True  # as the first step has found
    rollouts_of("a", [1, 1], {})
    assert made.look(["a"]) == {"a": "finished"}
    assert made.rows(["a"]) == (["a_0_0", "a_1_0"], [{"response_len": 1}] * 2)


def test_rows_of_another_agent_loop_are_never_guessed(queue, monkeypatch):
    """Prompts of verl's loop of one turn leave a row a session; beside them others' may name a loop that leaves several."""
    monkeypatch.setattr("verl_adaptive.integration.queue._LIST_SHARE", 1e-9)
    made = Queue(config_of())
    for submission, (uid, outputs) in enumerate({"a": 1, "b": 2}.items()):
        made.ask(submission, uid, 2, 0, whole=uid == "a")
        rollouts_of(uid, [outputs] * 2, {})
        made.look([uid])
        assert made.collect(requests_of(submission, n=2), 1).tokens.tolist() == [outputs] * 2
    made.close([0, 1])
    assert not left()


def test_a_group_is_as_old_as_its_oldest_rollout(queue):
    """``adaptive/trained_lag_*``, in steps; rows of a rollout server that does not say are none."""
    made = Queue(config_of())
    for submission, (uid, versions) in enumerate({"a": (3, 1), "b": (None, 4), "c": (None, None)}.items()):
        made.ask(submission, uid, 2, 0)
        rollouts_of(uid, [1, 1], {})
        tags = [{"response_len": 1, "min_global_steps": version} for version in versions]
        tq.kv_batch_put(keys=[f"{uid}_0_0", f"{uid}_1_0"], partition_id="train", tags=tags)
    made.look(list("abc"))
    assert made.collect(requests_of(0, 1, 2, n=2), 5).lag.tolist() == [3, 0, 0]


def test_a_checkpoint_without_verls_queue_says_the_ways_out(queue):
    """verl writes it last, and nowhere but to the local folder: an interrupted save, or a copy, may lack it."""
    client = client_of(Workers(order=5), STREAMS["colocate"], **POLICIES["greso"])  # which answer before a step looks
    one_step(client)
    assert len(client.engine.ready)
    tq.kv_clear(keys=list(left()), partition_id="train")
    other = client_of(Workers(), STREAMS["colocate"], table=client.engine.table, **POLICIES["greso"])
    other.engine.load_state_dict(client.engine.state_dict())
    ways = r"trainer\.resume_from_path.* trainer\.v1\.trainer_mode=sync adaptive\.resume\.allow=\[mode\]$"
    with pytest.raises(AdaptiveError, match=ways):
        other.load_state_dict(client.state_dict())
    other.queue.load_state_dict(client.state_dict(), [])  # in sync, where none of them lives on
    assert not other.queue.submissions


def test_answers_that_never_come_end_the_run_with_what_is_missing(clean):
    workers = SlowWorkers(order=1, forget=0.6)
    client = client_of(workers, STREAMS["colocate"], stall_timeout=1.0, **POLICIES["grpo"])
    with pytest.raises(AdaptiveError, match=r"stall_timeout=1 s; still waiting for \d+ of \d+ prompts \(\d+ pending"):
        for _ in range(10):
            one_step(client)
    workers.stop()
    assert workers.forgotten


def test_a_dead_worker_is_named_at_once(clean, monkeypatch):
    monkeypatch.setattr("verl_adaptive.integration.polling._LIVENESS_INTERVAL", 0.1)
    workers = SlowWorkers(order=1, forget=1.0)
    client = client_of(workers, STREAMS["colocate"], stall_timeout=60.0, **POLICIES["grpo"])
    client.handles = replace(client.handles, dead=lambda: ["agent-loop worker 0 (ActorDiedError)"])
    with pytest.raises(AdaptiveError, match=r"agent-loop worker 0 \(ActorDiedError\) died .*resumes from the"):
        one_step(client)
    workers.stop()


def test_a_mini_step_after_the_first_may_have_nothing_left(clean):
    workers = SlowWorkers(order=1)
    client = client_of(workers, AsyncFacts(mini_steps=2), max_rollouts_per_step=N, **POLICIES["grpo"])
    client.step = 1
    client.start()
    assert len(client.complete().trained) == 1
    with pytest.raises(NothingLeft, match=rf"1 of {BATCH} groups"):
        client.complete()
    result = client.finish()
    assert result.trained.sum() == 1 and "1 of" in result.note
    workers.stop()


def test_liveness_of_ray_actors(queue, monkeypatch):

    import ray

    from verl_adaptive.integration.polling import Liveness, StallTimeout

    @ray.remote(num_cpus=0)
    class Actor:
        def busy(self) -> None:
            time.sleep(3)

    alive, doomed = Actor.remote(), Actor.remote()
    ray.get([alive.__ray_ready__.remote(), doomed.__ray_ready__.remote()])
    monkeypatch.setattr("verl_adaptive.integration.polling._LIVENESS_INTERVAL", 0.05)
    liveness = Liveness({"alive": alive, "doomed": doomed})
    timeout = StallTimeout(0.01, 60.0, 7, liveness.dead)
    timeout.rest({}, 0)
    alive.busy.remote()
    ray.kill(doomed)
    deadline = time.monotonic() + 20
    with pytest.raises(AdaptiveError, match=r"step 7: doomed \(ActorDiedError\) died while"):
        while time.monotonic() < deadline:
            timeout.restart()  # others' rollouts come back all the time
            timeout.rest({}, 0)
    ray.kill(alive)


def test_a_queue_that_does_not_answer_ends_the_wait(queue):
    import ray

    client = tq.get_client()
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    process = ray.get(controller.__ray_call__.remote(lambda _: os.getpid()))
    bound_queue(2.0)
    try:
        assert not listed()
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(AdaptiveError, match=r"TransferQueue has not answered for adaptive\.stall_timeout=2 s: "):
            tq.kv_list(PARTITION)
        os.kill(process, signal.SIGCONT)
        assert not listed()
        with pytest.raises(Exception, match="nowhere"):  # its own errors come through
            tq.load_checkpoint("/nowhere")
    finally:
        os.kill(process, signal.SIGCONT)
        del client._run_coroutine


def test_a_stall_says_which_servers_have_the_requests(queue):
    import ray

    from verl_adaptive.integration import polling

    @ray.remote(num_cpus=0)
    class Server:
        """With the books that vLLM keeps of its requests, where verl's server has them."""

        def __init__(self, requests: int) -> None:
            from types import SimpleNamespace

            processor = SimpleNamespace(request_states=dict.fromkeys(range(requests)))
            self.engine = SimpleNamespace(output_processor=processor)

    @ray.remote(num_cpus=0)
    class Other:
        def busy(self) -> None:
            threading.Event().wait()

    servers = {"rollout server 0": Server.remote(0), "reward model 0": Server.remote(128)}
    servers |= {
        "rollout server 1": Other.remote(),
        "rollout server 2": Other.remote(),
        "rollout server 3": Other.remote(),
    }
    ray.get([server.__ray_ready__.remote() for server in servers.values()])
    servers["rollout server 2"].busy.remote()
    ray.kill(servers["rollout server 3"])
    with pytest.raises(ray.exceptions.RayActorError):  # a busy machine takes its time to
        while True:
            ray.get(servers["rollout server 3"].__ray_ready__.remote())
    timeout = polling.StallTimeout(0.0, 0.0, 7, list, lambda: polling.open_requests(servers))
    timeout.rest({"a": "running", "b": "finished"}, 1)
    said = (
        r"step 7: .*stall_timeout=0 s; still waiting for 1 of 2 prompts.* the reward function, its model or a tool hangs "
        r"\(open requests: rollout server 0: 0, reward model 0: 128, rollout server 1: unknown, rollout server 2: does not "
        r"answer, rollout server 3: dead \((Actor|Ray)\w+Error\)\): look for the last error"
    )
    with pytest.raises(AdaptiveError, match=said):
        timeout.rest({"a": "running", "b": "finished"}, 1)
    for server in servers.values():
        ray.kill(server)
    quiet = polling.StallTimeout(0.0, 0.0, 7, list)
    quiet.rest({"a": "running"}, 1)
    with pytest.raises(AdaptiveError, match="the reward function or a tool hangs: look"):
        quiet.rest({"a": "running"}, 1)
    nothing = polling.StallTimeout(0.0, 0.0, 7, list)
    nothing.rest({}, 1)
    with pytest.raises(AdaptiveError, match=r"waiting for 0 of 0 prompts \(; first: none\)"):
        nothing.rest({}, 1)


@pytest.mark.parametrize(
    ("passed", "processor", "looked"),
    [(0.3, 0.001, 0.001), (0.1, 0.1, 0.1), (0.05, 0.75, 0.05)],
    ids=["the queue was busy", "a large queue", "torch's threads spin"],
)
def test_rests_for_what_a_look_cost_and_not_for_what_it_waited(passed, processor, looked, monkeypatch):
    """A look waits whenever agent loops write to TransferQueue, and the step ended up to a second late."""
    from verl_adaptive.integration import polling

    now = {"monotonic": 100.0, "process_time": 10.0}
    rests: list[float] = []
    monkeypatch.setattr(
        polling, "time", types.SimpleNamespace(sleep=rests.append, **{n: lambda n=n: now[n] for n in now})
    )
    watch = polling.Stopwatch()
    now["monotonic"], now["process_time"] = 100.0 + passed, 10.0 + processor
    assert watch.seconds == pytest.approx(looked)
    polling.StallTimeout(0.01, 60.0, 7, list).rest({"a": "running"}, 0, watch.seconds)
    assert rests == [pytest.approx(max(0.01, 5 * looked))]


def test_lent_gpus_come_back_when_as_much_is_there_as_verl_meant(clean):
    """``hybrid_rollout`` reckons in prompts of ``rollout.n`` rollouts, of which ``batch_unit=rollouts`` makes several groups."""

    class Trainer:
        is_adaptive = True

        def refill(self, count: int) -> None: ...

    workers = SlowWorkers()
    client = client_of(workers, STREAMS["separate"], **POLICIES["grpo"])
    buffer = AdaptiveReplayBuffer(
        trainer_mode="separate_async",
        trainer_config={},
        max_off_policy_threshold=3,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        refill_fn=Trainer().refill,
    )
    buffer.rollout_client, buffer.groups_per_prompt = client, 3
    client.start()
    buffer.wait_for_sampleable(1, "train", 2)
    assert len(client.engine.ready) >= 6
    workers.stop()
    assert buffer.get_sampleable_count(1, "train") == client.sampleable() // 3 >= 2


def test_what_is_judged_late_keeps_what_verl_has_noted_of_the_batch():
    """The temperature, by which the actor's log-probs are computed."""
    buffer = object.__new__(AdaptiveReplayBuffer)
    batch = types.SimpleNamespace(keys=["a_0_0"], tags=[{}])
    buffer.rollout_client = types.SimpleNamespace(complete=lambda: batch)
    whole = KVBatchMeta(partition_id="train", keys=["a_0_0", "b_0_0"], tags=[{}, {}], extra_info={"temperature": 0.7})
    made = buffer.judged(whole)
    assert made.keys == ["a_0_0"] and made.extra_info == {"temperature": 0.7}
