"""The worker groups that go over a step's rows: each with its own data-parallel ranks and micro batches.

Worker groups on several devices cannot be here; a stand-in answers with its ranks and keeps what it was sent. So do
mocks of the store and the engine, where a test is of what the trainer asks of them as it begins: a whole one begins with Ray,
models and servers, in tests/e2e.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainerSync, get_trainer_cls
from verl.utils import tensordict_utils as tu

from tests.integration.common import composed
from tests.integration.test_layout import even
from tests.integration.test_rows import TEXT, WORDS
from tests.world import config_of, make_async_engine, make_engine
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration.layout import PAD, Pass, plan
from verl_adaptive.integration.minibatches import StepState
from verl_adaptive.integration.status_messages import gather
from verl_adaptive.policy import build_policy

TRAINER = "verl_adaptive.integration.trainer"


class Workers:
    """A worker group's face: the ranks of each mesh, and the batch it got last."""

    def __init__(self, mesh: str, ranks: int) -> None:
        self._dispatch_info: dict[str, list[int]] = {}
        self.mesh, self.ranks = mesh, ranks

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh == self.mesh
        return sorted(range(self.ranks)) * 2  # two workers a rank, as tensor parallelism has them

    def train_mini_batch(self, batch: KVBatchMeta):
        self.keys, self.sizes = list(batch.keys), dict(batch.extra_info)
        return SimpleNamespace(get=lambda: {"metrics": {"mfu": [0.0]}})


def trainer_of(*overrides: str, critic: int | None = None, ref: int | None = None, actor: int = 2):
    made = object.__new__(get_trainer_cls("sync").adaptive())  # its minibatches alone
    made.config = composed(*overrides)
    made.actor_rollout_wg, made.critic_wg = Workers("actor", actor), Workers("train", critic or 1)
    made.ref_policy_wg, made.ref_in_actor = Workers("ref", ref or 1), False
    made.use_critic, made.use_reference_policy = critic is not None, ref is not None
    return made


def test_each_group_has_a_say():
    trainer = trainer_of(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "critic.forward_micro_batch_size_per_gpu=6",
        critic=4,
        ref=1,
    )
    assert list(trainer._passes().values()) == [
        *(Pass(2, "actor", 8), Pass(2, "none", 16), Pass(1, "none", 4)),
        *(Pass(4, "critic", 2), Pass(4, "none", 6)),
    ]
    trainer.config.actor_rollout_ref.actor.use_dynamic_bsz = True  # what the others follow, unless they say otherwise
    trainer.config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz = trainer.config.critic.use_dynamic_bsz = False
    assert [p.micro for p in trainer._passes().values()] == [None, 16, None, 2, 6]
    trainer.config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz = trainer.config.critic.use_dynamic_bsz = True
    assert {p.micro for p in trainer._passes().values()} == {None}


@pytest.mark.parametrize(("within", "own", "micro"), [(True, 4, 10), (True, None, 10), (False, 4, 4)])
def test_a_reference_goes_in_its_own_micro_batches_or_within_the_actor_in_the_actors(monkeypatch, within, own, micro):
    """LoRA: verl asks the actor, whose worker knows nothing of the reference's settings."""
    trainer = trainer_of("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16", ref=2, actor=2)
    trainer.config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu = own
    if within:
        trainer.ref_in_actor, trainer.ref_policy_wg = True, trainer.actor_rollout_wg
    limits = [p.micro for p in trainer._passes().values() if p.minibatches == "none"]
    assert limits == ([16] if within else [16, own])
    trainer._now, sent = StepState([SimpleNamespace(ranks=2)]), []
    monkeypatch.setattr(PPOTrainerSync, "_compute_ref_log_prob", lambda self, batch, metrics: sent.append(batch))
    batch = KVBatchMeta(partition_id="train", keys=[f"a_{i}_0" for i in range(40)], tags=[{} for _ in range(40)])
    assert trainer._compute_ref_log_prob(batch, {}) is batch
    assert sent[0].extra_info["micro_batch_size_per_gpu"] == micro  # of 20 rows a rank; 16 does not divide them


@pytest.mark.parametrize(
    ("overrides", "multiple"),
    [
        ([], 1),
        (["actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2"], 4),
        (
            [
                "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2",
                "+actor_rollout_ref.actor.megatron.override_transformer_config.microbatch_group_size_per_vp_stage=8",
            ],
            8,
        ),
    ],
)
def test_a_virtual_pipeline_takes_micro_batches_in_its_multiple(overrides, multiple):
    pipeline = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4"
    trainer = trainer_of("model_engine=megatron", pipeline, *overrides)
    assert trainer.config.actor_rollout_ref.actor.strategy == "megatron"
    assert {p.multiple for p in trainer._passes().values()} == {multiple}


def test_a_critic_with_other_ranks_gets_whole_minibatches(monkeypatch):
    """Four ranks where the actor has two: each rank a quarter of every minibatch, the same groups in it."""
    trainer = trainer_of("critic.ppo_micro_batch_size_per_gpu=3", critic=4)
    group = np.repeat(np.arange(8), [3, 5, 4, 4, 6, 2, 7, 5])
    count = len(group)
    layout = plan(
        *(group, np.arange(count) + 5, np.zeros(count, int), np.ones(count, bool)),
        ranks=2,
        updates=2,
        critic_updates=4,
        partition=even,
        passes=list(trainer._passes().values()),
    )
    trainer._now = StepState([layout])
    pads = iter(range(count))
    keys = [f"pad{next(pads)}_0_0" if i == PAD else f"g{group[i]}_{i}_0" for i in layout.order.tolist()]
    tags = [{"seq_len": 2 if i == PAD else i + 5} for i in layout.order.tolist()]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    assert trainer._update_critic(batch, {}) is batch and batch.keys == keys  # the actor's order stays
    sent = trainer.critic_wg
    assert sorted(sent.keys) == sorted(keys) and sent.keys != keys
    size = sent.sizes["mini_batch_size"]
    assert len(keys) == 4 * size and size % 4 == 0 and (size // 4) % sent.sizes["micro_batch_size_per_gpu"] == 0
    by_rank = np.array(sent.keys).reshape(4, 4, -1)  # rank, minibatch, row
    for m in range(4):
        groups = {key.split("_")[0] for key in by_rank[:, m].ravel() if not key.startswith("pad")}
        assert groups == {f"g{2 * m}", f"g{2 * m + 1}"}
    assert sent.train_mini_batch.__func__ is Workers.train_mini_batch  # the next step's batch has sizes of its own


def test_a_steps_rows_in_minibatches_with_the_tokens_of_those_left_out(monkeypatch):
    """Two minibatches of two groups, of which one is left out: both denominators are those of four groups."""
    batch_of = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    trainer, metrics = trainer_of(*batch_of), {}
    trainer.processor, trainer.parameter_sync_step, trainer._now = None, 1, StepState()
    group = np.repeat(np.arange(4), 4)
    keys = [f"g{g}_{i}_0" for i, g in enumerate(group.tolist())]
    trains = group % 2 == 0
    done = SimpleNamespace(
        group=group,
        sequences=list(zip(keys, trains.tolist(), strict=True)),
        zero_row_tokens=np.where(trains, 0, 3),
        rows="of all groups",
    )
    trainer.rollout_client = SimpleNamespace(batch=done)
    masks = {key: torch.ones(3, dtype=torch.int64) for key in keys}

    def put(keys, partition_id, fields):
        masks.update(zip(keys, fields["loss_mask"].unbind(), strict=True))

    # the rows' masks alone, without workers or a Ray; on the real queue and ranks this is tests/e2e's
    queue = SimpleNamespace(kv_batch_put=put, kv_batch_get=lambda keys, **_: {"loss_mask": [masks[k] for k in keys]})
    monkeypatch.setattr("verl_adaptive.integration.minibatches.tq", queue)
    there = [key for key, trains in done.sequences if trains]
    # as they came, all the long ones would be one rank's
    tags = [{"seq_len": length, "response_len": 3} for length in [9] * 4 + [5] * 4]
    made = trainer._balance_batch(KVBatchMeta(partition_id="train", keys=there, tags=tags), metrics)
    assert sorted(made.keys) == sorted(there) and [tags[there.index(key)] for key in made.keys] == made.tags
    by_rank = np.array(made.keys).reshape(2, 2, 2)  # rank, minibatch, row
    assert [sum(int(masks[key].sum()) for key in by_rank[:, m].ravel()) for m in (0, 1)] == [2 * 4 * 3] * 2
    assert [layout.updates for layout in trainer._now.layouts] == [2] and trainer._now.rows == ["of all groups"]
    assert metrics["global_seqlen/balanced_max"] == metrics["global_seqlen/balanced_min"] == 28  # two of each length
    assert [metrics[f"global_seqlen/{name}"] for name in ("min", "max", "minmax_diff")] == [20, 36, 16]


@pytest.mark.parametrize("role", [None, "critic", "actor_rollout_ref.ref"])
def test_padding_is_short_where_every_engine_takes_it(role, monkeypatch):
    """Two tokens under FSDP; Megatron's context parallelism needs verl's 128, whichever of the models it runs."""
    trainer = trainer_of(critic=1, ref=1)
    if role is not None:
        OmegaConf.update(trainer.config, f"{role}.strategy", "megatron")
    trainer.processor, trainer.tokenizer = None, SimpleNamespace(eos_token_id=7)
    # a row to copy; on the real queue this is tests/e2e's
    queue = SimpleNamespace(kv_batch_get=lambda **_: [dict(TEXT)])
    monkeypatch.setattr("verl_adaptive.integration.minibatches.tq", queue)
    _, tag = trainer._padding_row(KVBatchMeta(partition_id="train", keys=["a_0_0"], tags=[{"seq_len": 9}]))
    assert tag["seq_len"] == (SYNTHETIC_PADDING_SEQ_LEN if role else 2)


@pytest.mark.parametrize(("source", "lengths"), [(TEXT, [9, 9, 9]), (WORDS, [10, 9, 10])], ids=["text", "axes"])
def test_padding_rows_differ_in_length_where_positions_have_axes(source, lengths, monkeypatch):
    """As the layout has planned: of rows as long as each other verl's workers could not select any."""
    trainer, sent = trainer_of(), {}
    trainer.global_steps, trainer.local_trigger_step, trainer.tokenizer = 1, 0, SimpleNamespace(eos_token_id=7)
    # the rows alone; on the real queue this is tests/e2e's
    queue = SimpleNamespace(kv_batch_put=lambda **said: sent.update(said))
    monkeypatch.setattr("verl_adaptive.integration.minibatches.tq", queue)
    batch, tag = KVBatchMeta(partition_id="train", keys=[], tags=[]), {"response_len": 4, "seq_len": 9}
    keys, tags = trainer._padding(batch, np.array([True, False, True]), dict(source), tag)
    assert keys == sent["keys"] and [tag["seq_len"] for tag in tags] == lengths
    assert [row["input_ids"].shape[-1] for row in sent["fields"]] == lengths


def test_prompts_that_are_sent_one_by_one_are_spread_over_the_agent_loop_workers(monkeypatch):
    """verl's own dealing begins with the first worker each time: it got every one of them."""
    # Stand-ins for a queue and four processes: what is dealt is verl's own doing. End to end: `aero` in tests/e2e.
    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_base.tq", MagicMock())
    monkeypatch.setattr("ray.get", list)
    trainer, manager = trainer_of(), object.__new__(AgentLoopManagerTQ)
    trainer.agent_loop_manager, trainer.trainer_mode, trainer.global_steps = manager, "sync", 1
    got = [0] * 4

    def worker(at: int):
        def remote(part):
            got[at] += len(part)

        return SimpleNamespace(generate_sequences=SimpleNamespace(remote=remote))

    manager.agent_loop_workers = [worker(at) for at in range(4)]
    for uid in "abcdefgh":
        assert trainer._submit_batch_to_rollout(tu.get_tensordict({"uid": [uid]})) == 1
    assert got == [2] * 4


def test_a_workers_death_is_seen_be_it_of_the_reward_function(monkeypatch):
    """A rollout waits for each of these; one that dies is named at once."""
    looks = []

    def alive(actors):
        looks.append(list(actors))
        return SimpleNamespace(dead=lambda: [])

    monkeypatch.setattr(f"{TRAINER}.Liveness", alive)
    trainer = trainer_of()
    trainer._liveness, trainer._loop_workers = None, {"agent-loop worker 0": None}
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[None], reward_model_manager=None)
    assert trainer._dead() == trainer._dead() == []
    assert looks == [["agent-loop worker 0", "reward worker 0"]]  # once: it remembers whom it has asked


@pytest.mark.parametrize("column", ["data_source", None])
def test_a_validation_goes_to_the_journal_and_the_alarms(column, monkeypatch):
    """Also of a data set that cannot be counted by data source."""
    found = {"val-core/a/acc/mean@1": 0.5}
    monkeypatch.setattr(PPOTrainerSync, "_validate", lambda self: found)
    trainer = trainer_of()
    trainer.run_store, trainer._monitor, trainer.engine = MagicMock(), MagicMock(), "the engine"
    trainer.global_steps, trainer._validation_prompts = 3, None
    trainer.val_dataset = [{"data_source": "a", "prompt": []}] * 2 if column else None
    assert trainer._validate() is found
    prompts = {"a": 2} if column else {}
    trainer.run_store.validated.assert_called_once_with(3, found, prompts, "the engine")
    trainer._monitor.validated.assert_called_once_with(3, found, prompts)


@pytest.mark.parametrize("plain", [True, False], ids=["of a plain run", "of a run whose budget is spent"])
def test_what_a_checkpoint_brings(plain, monkeypatch):
    """A plain run's prompts in flight are let go: verl sends again what it finds. A run that has ended takes no more step."""
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", 4))
    monkeypatch.setattr(f"{TRAINER}.Monitor", MagicMock())
    named = ("trainer.resume_mode=resume_path", "trainer.resume_from_path=/other/global_step_4")
    trainer = trainer_of("trainer.default_local_dir=/run", *(named if plain else ()))
    trainer.plan, trainer.run_store, trainer._start_engine = MagicMock(only_validates=False), MagicMock(), MagicMock()
    trainer.engine, trainer.rollout_client, trainer.total_training_steps = MagicMock(finished=not plain), MagicMock(), 9
    state = {name: {name: 1} for name in ("engine", "rows", "monitor")}
    trainer.run_store.load.return_value = None if plain else state
    trainer._load_checkpoint()
    trainer.run_store.load.assert_called_once_with("/other/global_step_4" if plain else "/run/global_step_4", 4)
    trainer._start_engine.assert_called_once_with()  # once more, on the table that came with it
    trainer.rollout_client.load_state_dict.assert_called_once_with({} if plain else {"rows": 1})
    assert trainer.total_training_steps == (9 if plain else 4)
    trainer.run_store.begin.assert_called_once_with(4)
    if not plain:
        trainer.engine.load_state_dict.assert_called_once_with({"engine": 1})
        trainer._monitor.load_state_dict.assert_called_once_with({"monitor": 1})


@pytest.mark.parametrize(("step", "only_validates"), [(0, False), (4, True)], ids=["of a new run", "to be validated"])
def test_no_statistics_are_read_where_none_go_on(step, only_validates, monkeypatch):
    """A new run has no snapshot to miss; that of a checkpoint which is only validated may be damaged, or another policy's."""
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", step))
    monkeypatch.setattr(f"{TRAINER}.Monitor", MagicMock())
    trainer = trainer_of()
    trainer.plan, trainer.run_store, trainer.engine = MagicMock(only_validates=only_validates), MagicMock(), None
    trainer._load_checkpoint()
    trainer.run_store.load.assert_not_called()
    trainer.run_store.begin.assert_called_once_with(step)


def test_groups_of_one_rollout_are_counted_in_verls_prompts(monkeypatch):
    """``separate_async`` asks how many prompts of its batch wait; ``adaptive.batch_unit=rollouts`` makes three groups of one."""
    engine, _ = make_async_engine()
    monkeypatch.setattr(f"{TRAINER}.make_engine", lambda *_, **__: engine)
    trainer = trainer_of()
    trainer.plan, trainer.run_store, trainer.stream = MagicMock(groups=12, batch=4), MagicMock(), MagicMock()
    trainer.replay_buffer, trainer._loop_workers = SimpleNamespace(), dict.fromkeys("abc")
    trainer._start_engine()
    assert (
        trainer.replay_buffer.rollout_client is trainer.rollout_client and trainer.replay_buffer.groups_per_prompt == 3
    )
    assert trainer.rollout_client.handles.workers() == 1  # in the order that was recorded


@pytest.mark.parametrize(("longest_first", "workers"), [(True, 3), (False, 1)])
def test_the_longest_answers_begin_first_in_every_agent_loop_worker(longest_first, workers, monkeypatch):
    """Sorted by length, one worker would get all long ones, and nobody is dealt anew what is sent in its own order."""
    monkeypatch.setattr(f"{TRAINER}.make_engine", lambda *_, **__: make_engine()[0])
    trainer = trainer_of()
    trainer.plan, trainer.run_store, trainer.stream = MagicMock(async_facts=None, engines=1, slots=4), MagicMock(), None
    trainer.plan.adaptive.longest_first = longest_first
    trainer.replay_buffer, trainer._loop_workers, trainer._abort = SimpleNamespace(), dict.fromkeys("abc"), None
    trainer._start_engine()
    assert trainer.rollout_client.handles.workers() == workers


@pytest.mark.parametrize(("sampler", "fetch", "chunk"), [("epoch", None, 16), ("epoch", 1, 1), ("greso", None, 1)])
def test_epoch_order_is_read_in_verls_batches_and_a_gated_stream_by_positions(sampler, fetch, chunk, monkeypatch):
    """verl drops an epoch's last incomplete batch; a gate passes prompts by, whose images nobody needs."""
    asked = {}
    monkeypatch.setattr(PPOTrainerSync, "_init_dataloader", lambda self: None)
    monkeypatch.setattr(f"{TRAINER}.create_rl_sampler", lambda *_: None)
    monkeypatch.setattr(f"{TRAINER}.DataloaderPrompts", lambda *_, **how: asked.update(how) or MagicMock())
    monkeypatch.setattr(f"{TRAINER}.RunStore", lambda config, plan, dataset: MagicMock(plan=plan))
    trainer = trainer_of("data.dataloader_num_workers=3")
    trainer.config.data.gen_batch_size = fetch
    trainer.plan = SimpleNamespace(policy=build_policy(config_of(sampler=sampler)), batch=16)
    trainer.train_dataset, trainer._start_engine = [], lambda: None
    trainer._init_dataloader()
    assert asked == {"chunk": chunk, "workers": 3}


@pytest.mark.parametrize("error", [None, RuntimeError("the loop broke")])
def test_verls_normal_end_closes_the_journal_and_the_record(error, monkeypatch):
    """verl 0.9.1 returns from its last planned step without on_train_end."""

    def fit(self, agent_loop_manager):
        if error is not None:
            raise error
        assert agent_loop_manager.generate_sequences("prompts") == ["prompts"]
        blocked.clear()
        with pytest.raises(AdaptiveError, match=r"blocks its worker.* for adaptive\.stall_timeout=1 s"):
            agent_loop_manager.generate_sequences("more")

    blocked, limits = threading.Event(), []
    blocked.set()
    monkeypatch.setattr(PPOTrainerSync, "fit", fit)
    monkeypatch.setattr(f"{TRAINER}.bound_queue", limits.append)
    # even of no calls Ray's own starts a Ray, which the fixture `started` then meets
    monkeypatch.setattr("ray.get", list)
    trainer, closed, checked, told = trainer_of(), [], [], []
    trainer.plan = SimpleNamespace(async_facts=None, policy=build_policy(AdaptiveConfig()), stall=1.0)
    worker = SimpleNamespace(__ray_call__=SimpleNamespace(remote=told.append))
    manager = SimpleNamespace(
        agent_loop_workers=[worker], generate_sequences=lambda prompts: blocked.wait() and [prompts]
    )
    monkeypatch.setattr(f"{TRAINER}.check_installed", lambda actors, patience: checked.append(actors))
    trainer.run_store = SimpleNamespace(close=lambda: closed.append("journal"))
    trainer._recorder = SimpleNamespace(close=lambda: closed.append("record"))
    if error is None:
        trainer.fit(manager)
    else:
        with pytest.raises(RuntimeError, match="the loop broke"):
            trainer.fit(manager)
    assert closed == ["journal", "record"] and limits == [1.0]
    assert checked == [{"agent-loop worker 0": worker}] and told == [gather]
    trainer.plan.policy = build_policy(config_of(filter="informative"))
    with pytest.raises(ConfigError, match="has no agent_loop_workers"):  # nothing is sent to it
        trainer.fit(SimpleNamespace())


@pytest.mark.parametrize(("save_freq", "saved"), [(1, [1, 2]), (4, [2]), (-1, [])])
def test_the_last_checkpoint_of_a_budget_is_saved_while_the_servers_sleep(save_freq, saved, monkeypatch):
    """verl's own loop: a checkpoint comes after the update and before the servers wake for the next weights.

    The loop and our two hooks are real, and the order in which they call. What they call is stood in for: workers, servers,
    loggers and TransferQueue are a run's, and tests/e2e/test_pipeline.py has one that its budget ends.
    """
    module = "verl.trainer.ppo.v1.trainer_base"
    for name in ("Tracking", "ValidationGenerationsLogger", "DapoFilteredRewardTableLogger", "SkipManager", "tq"):
        monkeypatch.setattr(f"{module}.{name}", MagicMock())
    trainer = trainer_of("trainer.val_before_train=false", f"trainer.save_freq={save_freq}", "trainer.test_freq=4")
    trainer.global_steps, trainer.steps_per_epoch, trainer.total_training_steps = 0, 9, 9
    trainer.trainer_mode, trainer._abort, trainer._shutdown_dump_executor = "sync", MagicMock(), lambda: None
    trainer._ended_early, trainer._recorder, trainer.run_store = False, None, MagicMock()
    done = []
    wakes = SimpleNamespace(update_weights=lambda step: done.append(("awake", step)))
    trainer.checkpoint_manager, trainer.logger = wakes, MagicMock()

    def step(metrics, timing_raw):
        done.append(("asleep", trainer.global_steps))
        if trainer.global_steps == 2:  # as AdaptiveMixin.step does when the engine has finished
            trainer._ended_early, trainer.total_training_steps = True, 2
        return KVBatchMeta(partition_id="train", keys=[], tags=[])

    trainer.step, trainer.on_train_begin = step, lambda: None
    trainer._save_checkpoint = lambda: done.append(("saved", trainer.global_steps))
    trainer._validate = lambda: done.append(("validated", trainer.global_steps)) or {"val": 1.0}
    trainer.on_validate_begin = lambda: done.append("all engines generate")  # separate_async's does
    trainer.on_validate_end = lambda: done.append("no more")
    trainer._compute_metrics = lambda *args, **kwargs: None
    PPOTrainerSync.fit(trainer, None)
    expected = []
    for at in (1, 2):
        expected += [("asleep", at), *[("saved", at)] * (at in saved), ("awake", at)]
    assert done == [*expected, "all engines generate", ("validated", 2), "no more"]
    assert trainer.logger.log.call_args.kwargs == {"data": {"val": 1.0}, "step": 2}
