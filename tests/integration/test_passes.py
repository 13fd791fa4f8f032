"""The worker groups that go over a step's rows: each with its own data-parallel ranks and micro batches.

Worker groups on several devices cannot be here; a stand-in answers with its ranks and keeps what it was sent.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainerSync, get_trainer_cls
from verl.utils import tensordict_utils as tu

from tests.integration.common import composed
from tests.integration.test_layout import even
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.integration.layout import PAD, Pass, plan
from verl_adaptive.integration.minibatches import StepState
from verl_adaptive.policy import build_policy


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


@pytest.mark.parametrize("own", [4, None])
def test_a_reference_within_the_actor_goes_in_the_actors_micro_batches(monkeypatch, own):
    """LoRA: verl asks the actor, whose worker knows nothing of the reference's settings."""
    trainer = trainer_of("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16", ref=1, actor=2)
    trainer.config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu = own
    trainer.ref_in_actor, trainer.ref_policy_wg = True, trainer.actor_rollout_wg
    assert [p.micro for p in trainer._passes().values() if p.minibatches == "none"] == [16]
    trainer._now, sent = StepState([SimpleNamespace(ranks=2)]), []
    monkeypatch.setattr(PPOTrainerSync, "_compute_ref_log_prob", lambda self, batch, metrics: sent.append(batch))
    batch = KVBatchMeta(partition_id="train", keys=[f"a_{i}_0" for i in range(40)], tags=[{} for _ in range(40)])
    assert trainer._compute_ref_log_prob(batch, {}) is batch
    assert sent[0].extra_info["micro_batch_size_per_gpu"] == 10  # of 20 rows a rank; 16 does not divide them


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


@pytest.mark.parametrize("error", [None, RuntimeError("the loop broke")])
def test_verls_normal_end_closes_the_journal_and_the_record(error, monkeypatch):
    """verl 0.9.1 returns from its last planned step without on_train_end."""

    def fit(self, agent_loop_manager):
        if error is not None:
            raise error

    monkeypatch.setattr(PPOTrainerSync, "fit", fit)
    # even of no calls Ray's own starts a Ray, which the fixture `started` then meets
    monkeypatch.setattr("ray.get", list)
    trainer, closed = trainer_of(), []
    trainer.plan = SimpleNamespace(async_facts=None, policy=build_policy(AdaptiveConfig()), stall=1.0)
    manager = SimpleNamespace(agent_loop_workers=[])
    trainer.run_store = SimpleNamespace(close=lambda: closed.append("journal"))
    trainer._recorder = SimpleNamespace(close=lambda: closed.append("record"))
    if error is None:
        trainer.fit(manager)
    else:
        with pytest.raises(RuntimeError, match="the loop broke"):
            trainer.fit(manager)
    assert closed == ["journal", "record"]


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
    trainer._compute_metrics = lambda *args, **kwargs: None
    PPOTrainerSync.fit(trainer, None)
    expected = []
    for at in (1, 2):
        expected += [("asleep", at), *[("saved", at)] * (at in saved), ("awake", at)]
    assert done == [*expected, ("validated", 2)]
