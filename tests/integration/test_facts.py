"""What verl's configuration says of a run, once for everybody who asks."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import transfer_queue
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from tests.integration import common
from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.integration import facts, notes
from verl_adaptive.integration.advantage import EstimatorContext, provide, register_estimator
from verl_adaptive.integration.checks import check_manager, check_run, why_not_skip_zero
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.policy import build_policy
from verl_adaptive.roles import Advantage
from verl_adaptive.stats.table import StatsTable

COMMON = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.name=vllm",
    "trainer.project_name=p",
)


def composed(*overrides: str):
    config = common.composed(*COMMON, *overrides)
    return config, AdaptiveConfig.from_mapping(OmegaConf.to_container(config.adaptive, resolve=True))


def test_epochs_may_be_written_with_an_exponent() -> None:
    """verl takes 1e3, which Hydra reads as 1000.0; half an epoch more would be another number of steps than we plan for."""
    words = "+adaptive=greso", "actor_rollout_ref.rollout.n=8"
    assert RunPlan.of(composed(*words, "trainer.total_epochs=1e3")[0]).epochs == 1000
    for epochs in ("1.5", "0.0", "null", "true"):
        with pytest.raises(AdaptiveError, match="trainer.total_epochs=.*: must be a whole number"):
            RunPlan.of(composed(*words, f"trainer.total_epochs={epochs}")[0])


def test_the_longest_answer_is_the_one_that_verl_generates() -> None:
    """Of ``data.max_response_length`` it was, which verl reads nowhere: the rollout's own setting has it by default."""
    config, _ = composed("+adaptive=solo", "data.max_response_length=512", "actor_rollout_ref.rollout.n=8")
    assert RunPlan.of(config).longest == 512
    config.actor_rollout_ref.rollout.response_length = 2048
    assert RunPlan.of(config).longest == 2048


def test_less_than_no_batch_ahead_is_none_as_in_verl() -> None:
    """-1 left no room for the step's own batch, and -0.5 for half of it."""
    mode = "trainer.v1.trainer_mode=colocate_async"
    config, _ = composed("+adaptive=greso", mode, "trainer.v1.colocate_async.num_warmup_batches=-1")
    assert facts.ahead_of(config) == 0 and "0 warm-up batches" in facts.schedule_of(config)
    with pytest.raises(ConfigError, match="num_warmup_batches=None: must be a number; 0 for none"):
        facts.ahead_of(composed("+adaptive=greso", mode, "trainer.v1.colocate_async.num_warmup_batches=null")[0])


def test_asking_for_a_critic_does_not_repeat_verls_warning(recwarn) -> None:
    config, adaptive = composed("+adaptive=grpo", "algorithm.adv_estimator=grpo")
    assert not facts.has_critic(config)
    assert facts.has_critic(composed("+adaptive=grpo", "algorithm.adv_estimator=gae")[0])
    check_run(config, adaptive, build_policy(adaptive))
    assert why_not_skip_zero(config) == ""
    assert not [w for w in recwarn if "Disabled critic" in str(w.message)]


@pytest.mark.parametrize(
    ("overrides", "seed"),
    [([], 0), (["data.seed=5"], 5), (["data.seed=5", "adaptive.seed=3"], 3), (["data.seed=5", "adaptive.seed=0"], 0)],
)
def test_the_data_s_seed_seeds_the_draws(overrides, seed) -> None:
    """It was 0 for everybody: runs of other seeds drew the same prompts."""
    adaptive = facts.adaptive_of(composed("+adaptive=solo", *overrides)[0])
    assert adaptive.seed == seed
    assert RunFacts.of(adaptive, batch=8, n=1, steps=1, prompts=8).seed == seed


def test_a_rollout_of_no_known_group_is_an_error() -> None:
    """It got advantage 0, and the step went on."""
    role, groups = (
        build_policy(AdaptiveConfig(advantage={"name": "beta"})).advantage,
        Groups.from_lists([0], [[1.0, 0.0]]),
    )
    register_estimator(type(role))
    role.bind(StatsTable(), RunFacts(batch=1, n=2, steps=1, prompts=1))
    mask, keys = torch.ones(3, 2), ["a_0_0", "a_1_0", "b_0_0"]
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    mask[2] = 0  # padding
    with provide(EstimatorContext(role, groups, {"a": 0}, keys)):
        out, _ = get_adv_estimator_fn("adaptive_beta")(rewards, mask, index=np.array(["a", "a", "b"]))
        assert out[0, 0] > 0 > out[1, 0] and not out[2].any()
        with pytest.raises(AdaptiveError, match=r"1 of 3 rollouts .* 'b'"):
            get_adv_estimator_fn("adaptive_beta")(rewards, torch.ones(3, 2), index=np.array(["a", "a", "b"]))


def test_the_journal_lies_beside_the_checkpoints_or_where_it_is_said(tmp_path) -> None:
    place = facts.journal_place(
        *composed("+adaptive=greso", f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=e")
    )
    assert place == facts.JournalPlace(os.path.join(tmp_path, "adaptive"), "p/e", str(tmp_path))
    words = ("+adaptive=greso", "adaptive.store.dir=/runs", "trainer.experiment_name=../e")
    assert facts.journal_place(*composed(*words)).folder == "/runs/p/e"
    assert facts.journal_place(*composed("+adaptive=greso", "adaptive.store.enabled=false")).folder is None


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("Qwen2VLProcessor", (), True),
        ("qwen2_5_vl", (), True),
        ("Qwen2.5-VL-7B-Instruct", (), True),
        ("Qwen2VLProcessor", ("actor_rollout_ref.rollout.load_format=safetensors",), False),
        ("Qwen2VLProcessor", ("actor_rollout_ref.rollout.name=sglang",), False),
        ("Qwen3VLProcessor", (), False),
        ("Qwen2.5-7B-Instruct", (), False),
    ],
)
def test_images_that_vllm_would_see_wrongly(kind, words, said) -> None:
    config, _ = composed("+adaptive=greso", "actor_rollout_ref.rollout.name=vllm", *words)
    assert ("load_format=safetensors" in notes.image_note(config, kind)) == said


def test_the_kind_of_a_model_that_is_not_loaded(tmp_path) -> None:
    def kind(path: object) -> str:
        return notes.model_kind(composed("+adaptive=greso", f"actor_rollout_ref.model.path={path}")[0])

    assert kind("Qwen/Qwen2.5-VL-7B-Instruct") == "Qwen2.5-VL-7B-Instruct"
    assert kind(f"{tmp_path}/") == tmp_path.name
    (tmp_path / "config.json").write_text("[]")
    assert kind(tmp_path) == tmp_path.name
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    assert kind(tmp_path) == "qwen2_5_vl"


def test_a_validation_of_an_old_checkpoint_writes_no_journal() -> None:
    """It would begin a new branch there, and the steps beyond would leave the run's line."""
    place = facts.journal_place(*composed("+adaptive=greso", "trainer.val_only=true"))
    assert (place.folder, place.why_none) == (None, "trainer.val_only=true")
    # verl looks at val_only after the validation before training: without that one it trains
    words = ("trainer.val_only=true", "trainer.val_before_train=false")
    assert facts.journal_place(*composed("+adaptive=greso", *words)).folder is not None


class Mine(Advantage):
    """Somebody's own, named by its path."""

    name = "facts_mine"
    estimator = "facts_mine"

    def compute(self, reward, group_of, observed):
        return reward


def test_an_advantage_without_an_entry_point_is_known_to_verl() -> None:
    _, adaptive = composed("+adaptive=dapo", f"adaptive.advantage.name={__name__}:Mine")
    part = build_policy(adaptive).advantage
    with pytest.raises(ValueError, match="facts_mine"):
        get_adv_estimator_fn(part.estimator)
    register_estimator(type(part))
    register_estimator(type(part))  # a second trainer in the process
    assert callable(get_adv_estimator_fn(part.estimator))


def test_each_part_of_a_replica_is_an_engine_with_slots_of_its_own() -> None:
    rollout = "actor_rollout_ref.rollout"
    words = ("trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    config, _ = composed("+adaptive=greso", *words, f"{rollout}.tensor_model_parallel_size=4")
    assert (facts.replicas_of(config), facts.engines_of(config)) == (4, 4)
    sizes = (f"{rollout}.data_parallel_size=2", f"{rollout}.tensor_model_parallel_size=2")
    config, _ = composed("+adaptive=greso", *words, *sizes)
    assert (facts.replicas_of(config), facts.engines_of(config)) == (4, 8)
    config, _ = composed("+adaptive=greso", *words, *sizes, f"{rollout}.pipeline_model_parallel_size=2")
    assert facts.replicas_of(config) == 2
    own = ("trainer.v1.trainer_mode=separate_async", f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=4")
    config, _ = composed("+adaptive=greso", *words, *sizes, *own)
    assert facts.replicas_of(config) == 1  # generates on GPUs of its own
    config, _ = composed("+adaptive=greso", *words, f"{rollout}.disaggregation.enabled=true")
    assert (facts.replicas_of(config), facts.engines_of(config)) == (0, 0)


def test_engines_are_not_those_of_a_reward_model() -> None:
    plain, _ = composed("+adaptive=greso")
    model = ("enable=true", "enable_resource_pool=true", "nnodes=2", "n_gpus_per_node=8", "rollout.max_num_seqs=7")
    config, _ = composed("+adaptive=greso", *(f"reward.reward_model.{word}" for word in model))
    assert facts.engines_of(config) == facts.engines_of(plain) > 0


@pytest.mark.parametrize(
    ("words", "single"),
    [
        ((), True),
        (("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",), False),
        (("actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",), False),
    ],
)
def test_loss_masks_are_told_by_lengths_with_verls_own_loop_of_one_turn_only(words, single) -> None:
    assert facts.single_turn(composed("+adaptive=grpo", *words)[0]) == single


def test_a_queue_that_cannot_save_keeps_no_groups_over_a_checkpoint(monkeypatch) -> None:
    """TransferQueue 0.1.8, which verl 0.9.0 pins: a run ended at its first checkpoint with held groups."""
    for name in ("save_checkpoint", "load_checkpoint"):
        monkeypatch.delattr(transfer_queue, name)
    words = ("+adaptive=pilot_commit", "actor_rollout_ref.rollout.n=8")
    config, _ = composed(*words, "adaptive.allocator.form=pipelined", "trainer.save_freq=5")
    with pytest.raises(
        ConfigError, match=r"allocator.form='pipelined'.*TransferQueue>=0.1.10.*on_policy.*save_freq=-1"
    ):
        RunPlan.of(config)
    RunPlan.of(composed(*words, "adaptive.allocator.form=pipelined", "trainer.save_freq=-1")[0])
    RunPlan.of(composed(*words)[0])
    words = ("+adaptive=greso", "actor_rollout_ref.rollout.n=8", "trainer.v1.trainer_mode=colocate_async")
    with pytest.raises(ConfigError, match=r"trainer.save_freq=5: .*TransferQueue>=0.1.10.*\(-1\)"):
        RunPlan.of(composed(*words, "trainer.save_freq=5")[0])
    RunPlan.of(composed(*words, "trainer.save_freq=-1")[0])


@pytest.mark.parametrize(("preset", "refused"), [("greso", True), ("aero", True), ("solo", False), ("grpo", False)])
def test_a_manager_that_keeps_verls_contract_alone(preset, refused) -> None:
    """It has generate_sequences; without agent_loop_workers step 1 ended in an AttributeError."""

    class Mine:
        def generate_sequences(self, prompts) -> None: ...

    word = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=mine.Mine"
    config, adaptive = composed(f"+adaptive={preset}", "actor_rollout_ref.rollout.n=8", word)
    policy = build_policy(adaptive)
    if refused:
        with pytest.raises(
            ConfigError, match=r"agent_loop_manager_class='mine.Mine': has no agent_loop_workers.*AgentLoopManagerTQ"
        ):
            check_manager(config, Mine(), policy)
    else:
        check_manager(config, Mine(), policy)
