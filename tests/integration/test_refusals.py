"""Bad settings are refused before any worker starts, with the key, the value and what to write instead."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.config import validate_config

from tests.cli.lines import MINIMAL, told
from tests.integration import common
from verl_adaptive import Advantage
from verl_adaptive.advantages.verl import COMPARING
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError, ConfigError, Exhausted
from verl_adaptive.integration import checks, compat, composing, guard, plugin, register
from verl_adaptive.integration.async_client import NothingLeft
from verl_adaptive.integration.checks import why_not_skip_zero, zero_rows
from verl_adaptive.integration.compared_settings import LOGGED, differences
from verl_adaptive.integration.inspect import _try_words
from verl_adaptive.integration.minibatches import MinibatchMixin
from verl_adaptive.integration.notes import BYPASS_LOSS
from verl_adaptive.integration.replay_buffer import AdaptiveReplayBuffer
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.integration.trainer import AdaptiveMixin
from verl_adaptive.simulate.presets import preset_names

TRAINERS = {mode: get_trainer_cls(mode).adaptive() for mode in compat.MODES}
COMMON = (
    "actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
    "data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=8"
)


#: What the asynchronous modes need.
DEVICES = (
    "trainer.v1.separate_async.parameter_sync_step=2 actor_rollout_ref.rollout.nnodes=1 "
    "actor_rollout_ref.rollout.n_gpus_per_node=2 actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
)
SEPARATE = f"trainer.v1.trainer_mode=separate_async {DEVICES}"
COLOCATE = "trainer.v1.trainer_mode=colocate_async"
DISAGGREGATED = "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.disaggregation.enabled=true"
SGLANG = "actor_rollout_ref.rollout.name=sglang"
COLOCATED = "reward.reward_model.enable=true"
OWN_POOL = (
    "reward.reward_model.enable=true reward.reward_model.enable_resource_pool=true "
    "reward.reward_model.nnodes=1 reward.reward_model.n_gpus_per_node=2"
)


CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode"
TEACHER = "distillation.enabled=true distillation.distillation_loss"
COSINE = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
KL, FORM = "actor_rollout_ref.actor.use_kl_loss=true", "adaptive.allocator.form"
LOG_PROBS, QUEUE = "actor_rollout_ref.rollout.calculate_log_probs", "transfer_queue.backend.storage_backend"
ASLEEP, REWARD = "reward.reward_model.rollout.free_cache_engine", "reward.custom_reward_function.path"


class Taken(Advantage):
    """Would take the place of an estimator of verl's."""

    name, estimator = "taken", "rloo"
    compute = zero = lambda self, *_: None


class Own(Taken):
    """Has a name of its own."""

    name, estimator = "own", "test_own"


TAKEN = f"+adaptive=dapo adaptive/advantage=custom adaptive.advantage.name={__name__}"


def composed(*words: str):
    return common.composed(COMMON, *words)


def run_checks(*words: str) -> None:
    RunPlan.of(composed(*words))


def test_a_mini_step_that_has_nothing_left_is_no_error():
    class Verl:
        def _step_once(self, *_):
            raise self.error

    class Trainer(AdaptiveMixin, Verl):
        def __init__(self, error):
            self.error = error

    assert not len(Trainer(NothingLeft("3 of 8 groups"))._step_once({}, {}, 8))
    with pytest.raises(Exhausted):
        Trainer(Exhausted("0 of 8 groups"))._step_once({}, {}, 8)


def test_groups_of_another_size_in_another_mode_are_no_other_policy():
    plans = [RunPlan.of(composed("+adaptive=solo", *mode.split())).sized(300) for mode in ("", COLOCATE)]
    assert plans[0].n < plans[1].n and differences(plans[0].settings, plans[1].settings)[0] == []


def test_what_a_resumed_run_may_change_is_said_and_accepted():
    """docs/store.md lists it."""
    limits = "max_rounds=3 max_rollouts_per_step=512 total_rollouts=999 on_exhausted=raise skip_zero_advantage=false"
    other = " ".join(f"adaptive.{word}" for word in limits.split())
    saved, now = (
        RunPlan.of(composed("+adaptive=dapo", words)).settings
        for words in ("", f"{other} {COLOCATE} data.shuffle=false algorithm.adv_estimator=rloo")
    )
    policy, hard, soft = differences(saved, now)
    assert policy == hard == [] and {said.partition(" was ")[0] for said in soft} == LOGGED


def test_the_command_line_wins_over_the_preset():
    config = composing.compose(composing.Command(("algorithm.adv_estimator=grpo", "+adaptive=aero")))
    assert config.algorithm.adv_estimator == "grpo"


@pytest.mark.parametrize("words", [*preset_names(), "greso +adaptive/platform=cpu"])
def test_verl_accepts_what_a_preset_brings(words):
    validate_config(common.composed(*MINIMAL, f"+adaptive={words}"), use_reference_policy=False, use_critic=False)


PRESETS = ("grpo", "dapo", "greso", "aero", "pilot_commit", "solo", "spo")


@pytest.mark.parametrize(
    "overrides",
    [
        *(f"+adaptive={preset} {mode}".strip() for preset in PRESETS for mode in ("", COLOCATE, SEPARATE)),
        *(f"+adaptive=sao algorithm.adv_estimator=gae {mode}".strip() for mode in ("", COLOCATE, SEPARATE)),
        "+adaptive=cero",
        *(
            f"+adaptive=greso trainer.save_freq=5 data.train_max_samples=100 data.{word}"
            for word in ("seed=1", "shuffle=false")
        ),
        "+adaptive=dapo data.gen_batch_size=1",  # what verl's own asynchronous trainers have
        f"+adaptive=cero {SEPARATE} trainer.v1.separate_async.num_warmup_batches=0",
        # what the estimator takes
        "+adaptive=aero algorithm.norm_adv_by_std_in_grpo=false adaptive.advantage.norm_by_std=false",
        "+adaptive=greso algorithm.norm_adv_by_std_in_grpo=false algorithm.use_kl_in_reward=true",
        "+adaptive=greso actor_rollout_ref.rollout.calculate_log_probs=false",
        "+adaptive=solo algorithm.norm_adv_by_std_in_grpo=false algorithm.use_kl_in_reward=true",
        "+adaptive=solo actor_rollout_ref.actor.kl_loss_type=none algorithm.kl_penalty=none",  # nobody asks for a penalty
        # a baseline of its own, which compares with nobody
        "+adaptive=solo adaptive.allocator.n=4 adaptive/filter=aero adaptive.filter.keep_degenerate=1 "
        "algorithm.use_kl_in_reward=true",
        "+adaptive=dapo adaptive/filter=aero adaptive.filter.keep_degenerate=1 algorithm.use_kl_in_reward=true "
        "algorithm.adv_estimator=reinforce_plus_plus",
        # the preset's file names its own advantage's estimator, which nobody wrote
        "+adaptive=aero adaptive/advantage=memory algorithm.adv_estimator=adaptive_beta",
        "+adaptive=solo adaptive/advantage=beta adaptive.allocator.n=4 algorithm.adv_estimator=adaptive_memory",
        f"{TAKEN}:Own algorithm.adv_estimator=test_own",  # as a preset's file of one's own names it
        "+adaptive=dapo adaptive/filter=keep_all",  # plain parts, and a preset's name: somebody chose them
        "+adaptive.name=mine",
        "+adaptive=solo adaptive.max_rollouts_per_step=7",  # groups of one: seven of them
        "+adaptive/sampler=greso +adaptive.name=greso",
        # groups of one, and smaller groups
        "+adaptive=solo adaptive.allocator.n=2",
        "+adaptive=solo actor_rollout_ref.rollout.n=1",
        "+adaptive=solo adaptive/sampler=epoch",
        "+adaptive=grpo actor_rollout_ref.rollout.n=1",
        "+adaptive=grpo adaptive.batch_unit=rollouts adaptive.allocator.n=4",
        "+adaptive=solo adaptive/advantage=verl algorithm.adv_estimator=reinforce_plus_plus",
        "+adaptive=dapo algorithm.adv_estimator=rloo",
        "+adaptive=solo actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.entropy_coeff=0.01",
        # a reward model in a pool of its own, and a colocated one where a step trains what it generated
        *(f"+adaptive=dapo {mode} {OWN_POOL} {ASLEEP}=false {REWARD}=mine.py" for mode in ("", COLOCATE, SEPARATE)),
        *(f"+adaptive={preset} {COLOCATED}" for preset in ("grpo", "solo", "spo", "cero")),
        f"+adaptive=greso adaptive.refill=false {COLOCATED}",
        "+adaptive=solo reward_model.enable=false reward_model.reward_manager=naive",  # older names of what is so anyway
        # prefill and decode servers where all are reached
        f"+adaptive=greso {DISAGGREGATED}",
        f"+adaptive=solo {DISAGGREGATED} {SGLANG}",
        f"+adaptive=solo {DISAGGREGATED} actor_rollout_ref.rollout.free_cache_engine=false",
        # a cluster that runs already, and one of the run's own
        "+adaptive=greso +ray_kwargs.ray_init.address=auto ray_kwargs.ray_init.num_cpus=null",
        "+adaptive=greso +ray_kwargs.ray_init.address=local ray_kwargs.ray_init.num_cpus=8",
        # the cures of refusals
        f"+adaptive=solo {SEPARATE} actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora.merge=true",
        "+adaptive=solo actor_rollout_ref.model.lora_rank=8",
        "+adaptive=solo actor_rollout_ref.rollout.full_determinism=true",
        f"+adaptive=dapo {COLOCATE} {QUEUE}=MooncakeStore",
        f"+adaptive=greso trainer.save_freq=5 {QUEUE}=MooncakeStore",
    ],
    ids=str,
)
def test_passes(overrides):
    config = composed(overrides)
    RunPlan.of(config)
    _try_words(config)


REFUSED = rf"""
+adaptive=greso actor_rollout_ref.rollout.n=1
    rollout\.n=1: .*at least 2
+adaptive=solo trainer.save_freq=5 actor_rollout_ref.actor.checkpoint.async_save=true
    checkpoint\.async_save=True: .*could be resumed.*leave it false
+adaptive=greso trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.tensor_model_parallel_size=3
    tensor_model_parallel_size=3: an engine takes 3 GPUs .* there are 8 to generate on; choose sizes that divide 8
+adaptive=greso trainer.save_freq=5 data.train_max_samples=100
    data\.train_max_samples=100: every start draws other prompts.*set data\.seed=1
+adaptive=dapo {COLOCATE} trainer.save_freq=5 {QUEUE}=MooncakeStore
    could not hold their rows: .*=MooncakeStore does not write them; set it to SimpleStorage
+adaptive=greso adaptive/allocator=pilot_commit adaptive.allocator.form=pipelined trainer.save_freq=5 {QUEUE}=MooncakeStore
    could not hold their rows: .*=MooncakeStore does not write them; set it to SimpleStorage
+adaptive.name=greso
    adaptive\.name='greso': .*chooses no part.*Write \+adaptive=greso
+adaptive=dapo adaptive.allocator.n=1
    adaptive\.allocator\.n=1: .*\+adaptive=solo
+adaptive=grpo adaptive/allocator=aero actor_rollout_ref.rollout.n=2
    n_explore=1: closes groups with one rollout .*n=2, which grpo .*n_explore=2 or more
+adaptive=grpo adaptive/allocator=reinforce_ada adaptive.allocator.variant=pos adaptive.allocator.per_round=1
    per_round=1: closes groups with one rollout
+adaptive=solo adaptive/filter=informative
    adaptive\.allocator\.n=1: .*no variance to judge by
+adaptive=solo adaptive.allocator.n=3
    adaptive\.allocator\.n=3: .*rollout\.n=8: 1, 2, 4, 8
+adaptive=solo adaptive/allocator=aero
    adaptive.batch_unit
# the way out must not lead to the next refusal
+adaptive=solo algorithm.adv_estimator=rloo
    write algorithm\.adv_estimator=grpo, or, .*take \+adaptive=dapo
# verl's default, where nothing is said: there is nothing to leave out
{TAKEN}:Own algorithm.adv_estimator=gae
    adv_estimator='gae': .*write algorithm\.adv_estimator=grpo, or, to keep gae
{TAKEN}:Taken
    adaptive\.advantage\.name='taken': Taken has estimator = 'rloo', .*give it another name
+adaptive=solo algorithm.adv_estimator=gae
    or take \+adaptive=sao, one rollout a prompt with a critic
+adaptive=solo critic.enable=true
    critic\.enable=True: .*take \+adaptive=sao
+adaptive=sao algorithm.adv_estimator=gae {LOG_PROBS}=false
    calculate_log_probs=False: .*bypass_mode=true trains with the rollout's own .*set it to true
+adaptive=solo {CORRECTION}.rollout_is=token {LOG_PROBS}=false
    calculate_log_probs=False: .*rollout_\w\w would be off, .*set it to true
+adaptive=solo {CORRECTION}.rollout_rs=seq_mean_k3 {LOG_PROBS}=false
    calculate_log_probs=False: .*rollout_\w\w would be off, .*set it to true
+adaptive=grpo algorithm.adv_estimator=gae critic.enable=false
    critic\.enable=False: .*gae takes the values of a critic.*adv_estimator=grpo
# after grpo; the policy is that of solo with adaptive/advantage=verl
+adaptive=sao
    n=1: .*no variance to judge by.*\+adaptive=sao with algorithm\.adv_estimator=gae
+adaptive=greso adaptive.max_rollouts_per_step=7
    max_rollouts_per_step=7: .*takes 8 rollouts; use 8
+adaptive=dapo adaptive/filter=aero algorithm.adv_estimator=opo adaptive.filter.keep_degenerate=1
    keep_degenerate=1: .*which opo would train on its bare reward; use 0
+adaptive=dapo adaptive/filter=aero algorithm.use_kl_in_reward=true adaptive.filter.keep_degenerate=1
    keep_degenerate=1: .*use_kl_in_reward=true\) grpo has no other to compare with.*; use 0
+adaptive=dapo adaptive/allocator=aero adaptive.allocator.n_explore=1 algorithm.adv_estimator=reinforce_plus_plus_baseline
    n_explore=1: .*which reinforce_plus_plus_baseline would train on its bare reward
# what is recommended instead must not be refused for the estimator
+adaptive=greso actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=gae
    \+adaptive=solo without algorithm\.adv_estimator=gae
+adaptive=pilot_commit adaptive.sampler.round.prompts=64
    round\.prompts=64: .*pilot_commit decides how many.*adaptive\.allocator\.factor
+adaptive=grpo data.gen_batch_size=64
    set what a step first asks for with adaptive\.sampler\.round\.prompts=64
+adaptive=dapo {COLOCATE} data.gen_batch_size=192
    data\.gen_batch_size=192: .*leave it out$
+adaptive=solo data.gen_batch_size=64
    data\.gen_batch_size=64: .*leave it out$
+adaptive=dapo {COLOCATE} adaptive.sampler.round.prompts=192
    round\.prompts=192: has no effect.*leave it out
+adaptive=pilot_commit {SEPARATE} adaptive.allocator.factor=3 actor_rollout_ref.rollout.n=16
    allocator\.factor=3\.0: has no effect with trainer\.v1\.trainer_mode=separate_async.*leave it out
+adaptive=pilot_commit data.gen_batch_size=64
    asks for as many prompts as the step is short of; leave it out$
+adaptive=dapo adaptive/filter=stack adaptive.filter.filters=[{{name:aero,keep_degenerate:1}}] algorithm.adv_estimator=opo
    adaptive\.filter\.filters: aero\.keep_degenerate=1: .*which opo would train
+adaptive=greso adaptive.on_exhausted=explode
    must be one of train_partial, relax, raise
+adaptive=greso algorithm.filter_groups.enable=true
    \+adaptive=dapo for
+adaptive=dapo algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc
    \+adaptive=dapo with adaptive\.signal=acc for
+adaptive=greso trainer.v1.sampler.sync_refill_failed_groups=true
    adaptive\.refill does this.*leave it false
+adaptive=greso {COLOCATED}
    adaptive\.refill=True: .*too late to generate others.*write adaptive\.refill=false
+adaptive=aero {COLOCATED}
    enable_resource_pool=False: .*too late for adaptive/allocator=aero.*presets grpo, solo
+adaptive=greso +ray_kwargs.ray_init.address=auto ray_kwargs.ray_init.num_cpus=8
    num_cpus=8: Ray takes no resources for a cluster that runs already \(auto, by .*\); set it to null
# what verl's open pull requests 6868 and 6874 would add
+adaptive=greso trainer.v1.trainer_mode=fully_async
    trainer_mode='fully_async': must be one of sync
+adaptive=greso +trainer.v1.rollout_level_dispatch=true
    rollout_level_dispatch=True: .*set it to false
+adaptive=grpo algorithm.adv_estimator=gae algorithm.use_pf_ppo=true
    use_pf_ppo=True: .*into the rows of others; set it to false
+adaptive=dapo actor_rollout_ref.rollout.full_determinism=true
    full_determinism=True: .*same seed and the same request id.*set it to false
+adaptive=greso {DISAGGREGATED} actor_rollout_ref.rollout.free_cache_engine=false
    free_cache_engine=False: .*stall after its first abort.*free_cache_engine=true
+adaptive=solo {SEPARATE} actor_rollout_ref.model.lora_rank=8
    lora\.merge=False: .*base model's weights alone.*set it to true
+adaptive=greso {SEPARATE} actor_rollout_ref.model.lora.rank=8
    lora\.merge=False: .*set it to true
+adaptive=greso {DISAGGREGATED} {SGLANG}
    disaggregation\.enabled=True: .*prefill server alone
# more is asked for than trains, or of the next step
+adaptive=grpo adaptive.sampler.round.prompts=2048 {DISAGGREGATED} {SGLANG}
    disaggregation\.enabled=True: .*prefill server alone
+adaptive=grpo adaptive/allocator=aero {DISAGGREGATED} {SGLANG}
    disaggregation\.enabled=True: .*prefill server alone
+adaptive=solo {COLOCATE} {DISAGGREGATED} {SGLANG}
    disaggregation\.enabled=True: .*prefill server alone
+adaptive=grpo adaptive.refill=false {COLOCATED} trainer.v1.trainer_mode=colocate_async
    enable_resource_pool=False: .*trainer_mode=colocate_async takes groups as they come; take sync, or set it to true
+adaptive=greso {OWN_POOL} {ASLEEP}=true
    rollout\.free_cache_engine=True: .*never wakes it.*set it to false
+adaptive=greso {OWN_POOL} {ASLEEP}=false
    custom_reward_function\.path=None: .*reward_extra_info.*issue 7368.*write a reward function
# older names, which main_ppo does not read
+adaptive=solo custom_reward_function.path=mine.py
    custom_reward_function\.path='mine\.py': .*does not read; write reward\.custom_reward_function\.path
+adaptive=dapo reward_model.reward_manager=dapo
    reward_model\.reward_manager='dapo': .*write reward\.reward_manager\.name
+adaptive=dapo +reward_model.reward_kwargs.max_resp_len=8
    reward_kwargs\.max_resp_len=8: .*write \+reward\.reward_kwargs\.max_resp_len
+adaptive=greso actor_rollout_ref.actor.ppo_mini_batch_size=6
    must divide data.train_batch_size=16
+adaptive=sao algorithm.adv_estimator=gae critic.ppo_mini_batch_size=6
    critic\.ppo_mini_batch_size=6: must divide 16
+adaptive=greso skip.rollout_tq.enable=true
    rollout_tq\.enable=True: recorded rollouts bypass the policy; set it to false
+adaptive=aero algorithm.adv_estimator=rloo
    adaptive/advantage=verl
+adaptive=cero adaptive.refill=true
    adaptive.refill
+adaptive=greso algorithm.adv_estimator=adaptive_beta
    matching adaptive/advantage
# verl would act on these in its own estimator, ours would not
+adaptive=aero algorithm.use_kl_in_reward=true
    algorithm\.use_kl_in_reward=True: .*use_kl_loss=true
+adaptive=aero algorithm.norm_adv_by_std_in_grpo=false
    adaptive\.advantage\.norm_by_std=True: .*write adaptive\.advantage\.norm_by_std=false
+adaptive=cero {COLOCATE}
    colocate_async\.num_warmup_batches=1: .*num_warmup_batches=0
+adaptive=pilot_commit adaptive.allocator.form=pipelined {COLOCATE}
    form='pipelined': .*take on_policy
+adaptive=dapo +trainer.v1.colocate_async.parameter_sync_step=3 {COLOCATE}
    must divide data.train_batch_size=16
+adaptive=dapo +trainer.v1.sync.parameter_sync_step=2
    sync\.parameter_sync_step=2: .*a step of sync is whole; leave it out
+adaptive=dapo {SEPARATE} trainer.n_gpus_per_node=3
    tensor_model_parallel_size=2: an engine takes 2 GPUs, .* the trainer's 3, too; choose sizes that divide 3
+adaptive=dapo trainer.v1.sampler.custom_sampler.path=mine.py {COLOCATE}
    brings its own replay buffer
"""


@pytest.mark.parametrize(("overrides", "message"), told(REFUSED))
def test_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_checks(overrides)


@pytest.mark.parametrize(
    ("words", "note", "said"),
    [
        ("+adaptive=solo data.shuffle=false", "data.shuffle=false has no effect: adaptive/sampler=", True),
        ("+adaptive=greso data.shuffle=false", "data.shuffle=false has no effect", False),
        ("+adaptive=solo", "data.shuffle=false has no effect", False),
        # the schedule of 1,740 steps stood at 0.81 of the first rate when a budget of 500 steps was spent
        (f"+adaptive=grpo {COSINE} adaptive.total_rollouts=256000", "lr_scheduler_type=cosine goes by verl's", True),
        (f"+adaptive=grpo {COSINE}", "goes by verl's number of steps", False),
        ("+adaptive=grpo adaptive.total_rollouts=256000", "goes by verl's number of steps", False),
        (
            f"+adaptive=grpo {COSINE} adaptive.total_rollouts=256000 trainer.total_training_steps=2000",
            "goes by verl's number of steps",
            False,
        ),
        # verl's default estimator has a critic
        (
            "+adaptive=grpo algorithm.adv_estimator=gae",
            "with a critic; for GRPO write algorithm.adv_estimator=grpo",
            True,
        ),
        ("+adaptive=grpo algorithm.adv_estimator=grpo", "PPO with a critic", False),
        # what a loss does that nobody has chosen
        (f"+adaptive=solo {BYPASS}=true {CORRECTION}.rollout_is=token", "rollout_is=token has no effect", True),
        (
            f"+adaptive=solo {BYPASS}=true {CORRECTION}.rollout_is=token actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
            "rollout_is=token has no effect",
            True,
        ),
        ("+adaptive=sao algorithm.adv_estimator=gae", "has no effect", False),
        (f"+adaptive=solo {BYPASS}=true", "has no effect", False),
        (f"+adaptive=solo {BYPASS}=false {CORRECTION}.rollout_is=token", "has no effect", False),
        (
            f"+adaptive=solo {BYPASS}=true {CORRECTION}.rollout_is=token " + BYPASS_LOSS.replace("'", ""),
            "has no effect",
            False,
        ),
        # a teacher that trains alone leaves the preset the prompts
        (f"+adaptive=solo {TEACHER}.use_task_rewards=false", "rewards and advantages train nothing", True),
        (f"+adaptive=solo {TEACHER}.use_task_rewards=true", "train nothing", False),
        # another loss than the policy's does not act on groups that are dropped
        *((f"+adaptive={preset} {KL}", "the KL penalty acts", True) for preset in ("greso", "pilot_commit")),
        (f"+adaptive=aero {KL}", "the KL penalty acts on the groups that train only; dropped groups", True),
        ("+adaptive=greso algorithm.use_kl_in_reward=true", "the KL penalty acts", True),
        ("+adaptive=greso actor_rollout_ref.actor.entropy_coeff=0.001", "the entropy bonus acts", True),
        ("+adaptive=greso distillation.enabled=true", "the distillation acts", True),
        *(
            (words, "dropped groups", False)
            for words in ("+adaptive=greso", f"+adaptive=grpo {KL}", f"+adaptive=cero {KL}")
        ),
        # whose number of rollouts
        ("+adaptive=cero adaptive/allocator=pilot_commit", "not the one that adaptive/sampler=cero plans", True),
        *(
            (f"+adaptive={words}", "not the one that", False)
            for words in ("cero", "cero adaptive/allocator=aero", "pilot_commit")
        ),
        # held groups
        (f"+adaptive=pilot_commit {FORM}=pipelined", "off-policy by a step", True),
        (f"+adaptive=pilot_commit {FORM}=pipelined", f"{FORM}=on_policy", True),
        (f"+adaptive=pilot_commit {FORM}=on_policy", "off-policy by a step", False),
    ],
)
def test_what_has_no_effect_or_another_is_said(words, note, said):
    assert any(note in one for one in RunPlan.of(composed(words)).notes) is said


@pytest.mark.parametrize(
    ("words", "rows"),
    [("+adaptive=greso", 288), ("+adaptive=solo", 256), (f"+adaptive=greso {COLOCATE}", 432), ("+adaptive=aero", 80)],
)
def test_a_queue_too_small_for_any_step_is_refused_before_a_model_is_loaded(words, rows):
    """``doctor`` says so, too."""
    size = "transfer_queue.backend.SimpleStorage.total_storage_size"
    RunPlan.of(composed(words, f"{size}={rows}")).sized(1000)
    with pytest.raises(
        ConfigError, match=rf"total_storage_size={rows - 1}: a step needs {rows} rows.*{2 * rows} or more"
    ):
        RunPlan.of(composed(words, f"{size}={rows - 1}")).sized(1000)


def test_a_training_set_as_large_as_what_is_in_flight_is_large_enough():
    plan, ahead = (RunPlan.of(composed("+adaptive=grpo", *mode.split())) for mode in ("", COLOCATE))
    assert (plan.sized(16).epoch, ahead.sized(32).prompts) == (1, 32)
    with pytest.raises(
        ConfigError, match="train_batch_size=16: the training set has only 15 prompts; use at most that"
    ):
        plan.sized(15)
    with pytest.raises(ConfigError, match="32 prompts would be in flight at once, the training set has 31 different"):
        ahead.sized(32, 31)
    assert RunPlan.of(composed("+adaptive=grpo", COLOCATE, "trainer.val_only=true")).sized(1).epoch == 0


@pytest.mark.parametrize(("asked", "steps", "said"), [(9, 8, True), (8, 8, False), (5, 5, False)])
def test_steps_that_verls_epochs_do_not_have_are_not_planned(asked, steps, said):
    plan = RunPlan.of(composed("+adaptive=grpo trainer.total_epochs=2", f"trainer.total_training_steps={asked}")).sized(
        64
    )
    assert plan.steps == steps and any("verl stops after 8 steps, before" in note for note in plan.notes) is said


@pytest.mark.parametrize(("words", "refill"), [("", True), (COLOCATED, False)])
def test_only_rewards_that_come_late_leave_no_time_to_refill(words, refill):
    """Where every group trains, a group that failed is replaced."""
    assert RunPlan.of(composed("+adaptive=grpo", *words.split())).adaptive.refill is refill


def test_every_estimator_of_verls_is_known_to_compare_or_not():
    """A single rollout of a prompt: those that compare give it its bare reward, or nothing, or fail; the others do not."""
    elsewhere = {"gae", "remax"}  # by a critic, by another rollout
    assert COMPARING | elsewhere <= {each.value for each in AdvantageEstimator}
    rewards = torch.tensor([[0.0, 2.0], [0.0, 5.0], [0.0, 3.0]])
    given = {
        "token_level_rewards": rewards,
        "response_mask": torch.ones(3, 2),
        "index": np.array(["a", "b", "c"], dtype=object),
    }
    for name in {each.value for each in AdvantageEstimator} - elsewhere:
        more = {}
        if name.endswith("optimal_token_baseline"):
            more = {"old_log_probs": torch.full((3, 2), -1.0), "sum_pi_squared": torch.full((3, 2), 0.5)}
        try:
            advantages, _ = get_adv_estimator_fn(name)(**given, config=AlgoConfig(), **more)
        except ValueError:
            compares = True
        else:
            compares = bool((advantages[:, -1] > 0).all() or (advantages == 0).all())
        assert compares == (name in COMPARING), name


@pytest.mark.parametrize(
    ("exported", "inside", "refused"),
    [("10.0.0.1:6379", "", True), ("local", "", False), ("10.0.0.1:6379", "7", False)],
)
def test_a_cluster_that_was_exported_is_one_that_runs_already(exported, inside, refused, monkeypatch):
    """`doctor` passed what Ray refuses; in Ray's own processes the variable is Ray's."""
    monkeypatch.setenv("RAY_ADDRESS", exported)
    monkeypatch.setenv("RAY_RAYLET_PID", inside) if inside else monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    with pytest.raises(ConfigError, match=r"\(10\.0\.0\.1:6379, by") if refused else nullcontext():
        run_checks("+adaptive=greso ray_kwargs.ray_init.num_cpus=8")


def test_an_estimator_that_verls_trainers_cannot_serve_is_refused():
    """verl's V1 trainer ends at its first advantages there, when the step has generated: its own function, its own fields."""
    (fields,) = re.findall(r"fields = \[(.*?rm_scores.*?)\]", inspect.getsource(PPOTrainer._compute_advantage))
    names = {*re.findall(r"\w+", fields), "token_level_scores", "token_level_rewards"} - {"uid"}
    refused = set()
    for name in (each.value for each in AdvantageEstimator):
        data = DataProto(batch=TensorDict({each: torch.ones(4, 2) for each in names}, batch_size=4))
        data.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
        keys, algorithm = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"], AlgoConfig(gdpo_reward_keys=["format"])
        try:
            compute_advantage_for_multi_trajectories(data, batch_keys=keys, adv_estimator=name, config=algorithm)
        except (AssertionError, KeyError, TypeError):
            refused.add(name)
            with pytest.raises(
                ConfigError, match=f"adv_estimator='{name}': asks for .*; take grpo, or {name} without a preset"
            ):
                run_checks("+adaptive=dapo", f"algorithm.adv_estimator={name}")
        else:
            run_checks("+adaptive=dapo", f"algorithm.adv_estimator={name}")
    assert refused == set(checks._ASKS)


OTHER_LOSSES = [
    ("actor_rollout_ref.actor.use_kl_loss=true", "the KL penalty (actor.use_kl_loss) acts on every row"),
    ("algorithm.use_kl_in_reward=true", "the KL penalty (algorithm.use_kl_in_reward) acts on every row"),
    ("actor_rollout_ref.actor.entropy_coeff=0.01", "actor.entropy_coeff=0.01 acts on every row"),
    (
        "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.entropy_coeff=0.01",
        "the KL penalty (actor.use_kl_loss) and actor.entropy_coeff=0.01 act on every row",
    ),
]
MUST_KEEP = [
    ("distillation.enabled=true", "distillation acts on every row"),
    ("algorithm.adv_estimator=gae", "the critic learns from every row"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "looks at every row"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "looks at every row"),
    ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_scale_factor=<a number"),
    (
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_batch_normalize=true",
        "takes the mean weight of every row",
    ),
    ("actor_rollout_ref.actor.shuffle=true", "mixes minibatches"),
    ("algorithm.adv_estimator=reinforce_plus_plus", "not known to give equal rewards zero advantages"),
]


@pytest.mark.parametrize(("overrides", "reason"), [*OTHER_LOSSES, *MUST_KEEP])
def test_zero_advantage_rows_stay_where_a_loss_acts_on_them(overrides, reason):
    """They are left out of a penalty by choice; no choice makes a wrong gradient."""
    config = composed("+adaptive=grpo", overrides)
    assert reason in why_not_skip_zero(config)
    assert zero_rows(config, None) == (False, f"stay in training: {why_not_skip_zero(config)}")
    if (overrides, reason) in OTHER_LOSSES:
        out, line = zero_rows(config, True)
        assert out and reason in line and "goes too" in line and "the policy gradient is the same" in line
    else:
        with pytest.raises(ConfigError, match=r"adaptive\.skip_zero_advantage=True: .*set it to null or false"):
            zero_rows(config, True)


@pytest.mark.parametrize(("overrides", "reason"), [*OTHER_LOSSES, MUST_KEEP[-2]])
def test_thinned_rows_are_refused_where_a_loss_acts_on_every_row(overrides, reason):
    run_checks("+adaptive=solo", "adaptive.advantage.thin=1")
    with pytest.raises(ConfigError, match=r"adaptive\.advantage\.thin=1.*set it to 0") as refused:
        run_checks("+adaptive=solo", "adaptive.advantage.thin=1", overrides)
    assert reason in str(refused.value)


def test_the_choice_to_keep_them_is_said():
    plain = composed("+adaptive=grpo")
    norm = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm actor_rollout_ref.actor.loss_scale_factor=512"
    assert why_not_skip_zero(plain) == why_not_skip_zero(composed("+adaptive=grpo", norm)) == ""
    assert (
        zero_rows(plain, None) == zero_rows(plain, True) == (True, "left out of training (same gradient, fewer tokens)")
    )
    assert zero_rows(plain, False) == (False, "stay in training: adaptive.skip_zero_advantage=false")


def test_every_method_of_verls_trainer_that_ours_replaces_is_looked_for() -> None:
    """One that a later verl renames would never be called, and nobody would be told."""
    ours = (AdaptiveMixin, MinibatchMixin, *TRAINERS.values())
    methods = {name for cls in ours for name, of in vars(cls).items() if callable(of) and not name.startswith("__")}
    replaced = {f"PPOTrainer.{name}" for name in methods if hasattr(PPOTrainer, name)}
    assert {"PPOTrainer._compute_metrics", "PPOTrainer.fit"} <= replaced <= {name.name for name in compat.NAMES}


def test_a_verl_that_lacks_a_name_is_refused_with_the_way_out():
    lacking = (compat.Name("verl.trainer.ppo.utils", "need_nothing", (), "nothing"),)
    moved = (compat.Name("verl.trainer.ppo.utils", "need_critic", ("config", "phase"), "the critic"),)
    with pytest.raises(AdaptiveError, match=r"need_nothing is missing .*needed for nothing[\s\S]*verl>=0.9.0"):
        compat.check_verl("sync", lacking)
    queue = (compat.Name("transfer_queue", "kv_nothing", (), "the queue"),)
    with pytest.raises(
        AdaptiveError, match=r"kv_nothing is missing[\s\S]*Install a supported one: .*TransferQueue>=0.1.10"
    ):
        compat.check_verl("sync", queue)
    with pytest.raises(AdaptiveError, match=r"need_critic does not take phase"):
        compat.check_verl("sync", moved)
    demanding = (compat.Name("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._compute_values", ("self", "batch"), "x"),)
    with pytest.raises(AdaptiveError, match="_compute_values now demands metrics"):
        compat.check_verl("sync", demanding)


def test_what_a_mode_lacks_refuses_that_mode_and_names_the_others(monkeypatch):
    lacking = (*compat.NAMES, compat.Name("verl.trainer.ppo.utils", "gone", (), "waiting", modes=("separate_async",)))
    with pytest.raises(AdaptiveError, match=r"trainer_mode=separate_async:\n.*gone.*\n.*=sync or colocate_async"):
        compat.check_verl("separate_async", lacking)
    for mode in ("sync", "colocate_async"):
        compat.check_verl(mode, lacking)
    (said,), _ = compat.lacks(lacking)
    assert said.endswith("needed for waiting in separate_async")
    monkeypatch.setattr(compat, "lacks", lambda *_: ([said], []))  # as of a verl that is not here
    with pytest.raises(AdaptiveError, match="gone is missing"):
        register.trainer_class.__wrapped__("separate_async")


def test_a_name_with_a_stand_in_is_said_and_not_refused():
    older = (compat.Name("verl.trainer.ppo.utils", "gone", (), "x", ("sync",), instead="something else"),)
    compat.check_verl("sync", older)
    assert compat.lacks(older) == ([], ["verl.trainer.ppo.utils.gone is missing in sync: something else"])
    assert compat.lacks(older, "sync") == ([], ["verl.trainer.ppo.utils.gone is missing: something else"])
    assert compat.lacks(older, "separate_async") == compat.lacks() == ([], [])


@pytest.mark.parametrize(("verl", "old"), [("0.7.1", True), ("0.8.0", True), ("0.9.0", False), ("0.10.0.dev0", False)])
def test_a_verl_without_plugins_is_told_so(verl, old, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda name: verl)
    assert bool(compat.too_old()) == old
    if not old:
        return
    with pytest.raises(SystemExit, match=rf"verl {verl} has neither plugins .*nor the V1 trainer.*verl>=0\.9\.0"):
        guard.Guard().on_job_start(composed("+adaptive=greso"), task_function=run_ppo)
    guard.Guard().on_job_start(composed(), task_function=run_ppo)  # nobody asked for a preset


def test_a_trainer_of_verls_own_cannot_use_our_buffer():
    """A trainer that is not ours, beside a preset, would train without the policy."""

    class Theirs(get_trainer_cls("sync")):
        def _build_replay_buffer(self):
            """Somebody's own, too."""

    with pytest.raises(
        AdaptiveError, match="Theirs knows nothing of presets and would train as if none had been named"
    ):
        Theirs(composed("+adaptive=greso"))
    with pytest.raises(
        ConfigError, match=r"trainer_mode='theirs': .*did not load the plugin: see `verl-adaptive doctor`"
    ):
        AdaptiveReplayBuffer(trainer_mode="theirs", refill_fn=lambda n: n)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_verls_mode_names_lead_to_our_trainers_only_where_a_preset_is_asked_for(mode, monkeypatch):
    made = []
    for base in (get_trainer_cls(mode).__mro__[1], TRAINERS[mode]):
        monkeypatch.setattr(base, "__init__", lambda self, config: made.append(type(self)))
    get_trainer_cls(mode)(config=composed(f"trainer.v1.trainer_mode={mode}"))
    get_trainer_cls(mode)(config=composed("+adaptive=greso", f"trainer.v1.trainer_mode={mode}"))
    assert [cls.__module__.partition(".")[0] for cls in made] == ["verl", "verl_adaptive"]
    assert made[1] is TRAINERS[mode]
    assert issubclass(made[1], made[0]) and issubclass(made[1], AdaptiveMixin)

    class Theirs(get_trainer_cls(mode)):
        """Somebody's own trainer, derived from the registered one."""

    assert type(Theirs(config=composed(f"trainer.v1.trainer_mode={mode}"))) is Theirs


def test_without_the_search_path_a_preset_is_a_loud_error(monkeypatch):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="train without it; install verl-adaptive again"):
        plugin._check_search_path()
    assert plugin._asks_for_adaptive(["main_ppo", "+adaptive=greso"])
    assert not plugin._asks_for_adaptive(["main_ppo", "trainer.nnodes=1"])
    with pytest.raises(ConfigError, match="in the defaults list of your YAML; .*reinstall verl-adaptive"):
        AdaptiveConfig.from_mapping("greso")
