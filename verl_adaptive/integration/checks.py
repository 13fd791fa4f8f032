"""What must hold between the ``adaptive`` group and verl's own settings; checked before any worker starts."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf

from verl_adaptive.advantages.verl import COMPARING, GROUP_RELATIVE
from verl_adaptive.config import AdaptiveConfig, check, flat
from verl_adaptive.engine.shape import step_shape
from verl_adaptive.integration.compat import MODES, queue_lacks
from verl_adaptive.integration.engines import keeps_rows
from verl_adaptive.integration.facts import (
    ahead_of,
    async_of,
    gpus_of,
    gpus_of_engine,
    has_critic,
    late_rewards,
    mode_of,
)
from verl_adaptive.integration.guard import is_preset
from verl_adaptive.policy import KINDS, Policy
from verl_adaptive.roles import Commits

#: The replay buffer that every preset names, as verl loads it.
OUR_BUFFER = {"path": "pkg://verl_adaptive.integration.replay_buffer", "name": "AdaptiveReplayBuffer"}
_CRITIC = "+adaptive=sao, one rollout a prompt with a critic (docs/solo.md#sao)"
#: The parts that a run has if it chooses none.
_PLAIN = tuple(getattr(AdaptiveConfig(), role)["name"] for role in KINDS)

#: Policy losses in which a row of zero advantage adds exactly nothing: each token's term is a multiple of A, and they are
#: summed with the batch's denominators. Not ``geo_mean``: it takes the mean over the rows of a micro batch.
_LINEAR_LOSSES = frozenset({"vanilla", "gspo", "cispo", "sapo", "gpg", "dppo_tv", "dppo_kl"})

#: Estimators of verl's that ask for what its V1 trainers (0.9) do not hand them.
_ASKS = {
    "remax": "the rewards of greedy answers",
    "gdpo": "rewards by component",
    "optimal_token_baseline": "sums of squared probabilities",
    "tir_optimal_token_baseline": "sums of squared probabilities",
}


#: Names that reward settings had before ``reward.*``, which verl still composes, and where ``main_ppo`` reads them.
_OLD_REWARD = {
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.model.path": "reward.reward_model.model_path",
    **{
        f"reward_model.{name}": f"reward.reward_model.{name}"
        for name in ("enable", "enable_resource_pool", "n_gpus_per_node", "nnodes", "rollout")
    },
}


#: verl's settings that it counts and divides by.
_COUNTS = (
    "data.train_batch_size",
    "data.max_response_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "critic.ppo_mini_batch_size",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.v1.separate_async.parameter_sync_step",
)

#: verl's settings that it compares with 0, some when its first step has trained, and what -1 means.
_LIMITS = {
    "data.train_max_samples": "all",
    "data.val_max_samples": "all",
    "trainer.save_freq": "never",
    "trainer.test_freq": "never",
}


def check_counts(config: Any) -> None:
    """Refuse what is no count where verl counts and divides: it would end in an error that names no setting."""
    for key in _COUNTS:
        value = OmegaConf.select(config, key, default=1)
        if value is None and key == "trainer.total_training_steps":  # verl counts epochs
            continue
        # verl multiplies by epochs and compares with them: 1e3 will do
        kinds = (int, float) if key == "trainer.total_epochs" else (int,)
        counts = isinstance(value, kinds) and not isinstance(value, bool) and value > 0 and value % 1 == 0
        check(counts, key, value, "must be a whole number, 1 or more")
    for key, means in _LIMITS.items():
        value = OmegaConf.select(config, key, default=-1)
        check(isinstance(value, int), key, value, f"must be a whole number, -1 for {means}")


def _check_old_rewards(config: Any) -> None:
    """Refuse reward settings under their older names: training would go on with another reward, in silence.

    verl's ``migrate_legacy_reward_impl`` moves them, but ``main_ppo`` does not call it (verl pull request 7331).
    """
    for old, new in _OLD_REWARD.items():
        found = OmegaConf.select(config, old)
        given = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        for name, value in (flat(given, ".") if isinstance(given, dict) else {"": given}).items():
            read = OmegaConf.select(config, new + name, default=_OLD_REWARD)
            plus = "+" if read is _OLD_REWARD else ""
            check(
                value is None or value == read,
                old + name,
                value,
                f"is an older name, which verl's main_ppo does not read; write {plus}{new}{name}",
            )


def check_run(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> None:
    """Refuse settings under which the policy cannot work: ConfigError with the key, its value and what to write instead.

    Of several, the first in this order.
    """
    check_counts(config)
    _check_ray(config)
    _check_old_rewards(config)
    _check_trainer(config)
    _check_group_size(config, adaptive, policy)
    _check_replaced(config)
    _check_name(config, adaptive, policy)
    _check_resume(config)
    _check_mode(config, adaptive, policy)
    _check_servers(config, policy)
    _check_reward_model(config, adaptive, policy)
    _check_estimator(config, adaptive, policy)
    _check_fetch(config, policy)
    _check_log_probs(config)
    _check_minibatches(config)


def _check_ray(config: Any) -> None:
    """A cluster that runs already has its resources, and Ray refuses to be told others."""
    ray_init = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    exported = (
        None if "RAY_RAYLET_PID" in os.environ else os.environ.get("RAY_ADDRESS")
    )  # in Ray's processes it is Ray's own
    address = ray_init.get("address") or exported or "local"
    for name in ("num_cpus", "num_gpus"):
        check(
            address == "local" or ray_init.get(name) is None,
            f"ray_kwargs.ray_init.{name}",
            ray_init.get(name),
            f"Ray takes no resources for a cluster that runs already ({address}, by ray_kwargs.ray_init.address or RAY_ADDRESS); "
            "set it to null",
        )


def _check_trainer(config: Any) -> None:
    """A mode that verl's V1 trainers have, and an estimator that gets what it asks for."""
    check(
        mode_of(config) in MODES,
        "trainer.v1.trainer_mode",
        config.trainer.v1.trainer_mode,
        f"must be one of {', '.join(MODES)}",
    )
    estimator = config.algorithm.adv_estimator
    check(
        not (lacking := _ASKS.get(str(estimator))),
        "algorithm.adv_estimator",
        estimator,
        f"asks for {lacking}, which verl's V1 trainers do not hand to it: with a preset or without, the run would end when its "
        f"first step has generated; take grpo, or {estimator} without a preset and with trainer.use_v1=false",
    )
    check(  # PPOTrainer._compute_advantage writes what comes back by the order of the rows that it sent
        estimator != "gae" or not config.algorithm.get("use_pf_ppo", False),
        "algorithm.use_pf_ppo",
        True,
        "draws rollouts by their rewards, and verl's V1 trainers, with a preset or without, would write the advantages of those drawn "
        "into the rows of others; set it to false",
    )


def _check_replaced(config: Any) -> None:
    """What verl has for what the policy does: dynamic sampling, refilling, another replay buffer, recorded rollouts."""
    groups, sampler = config.algorithm.get("filter_groups", None), config.trainer.v1.sampler
    metric = "reward" if groups is None else groups.get("metric")
    measured = "" if metric in (None, "reward") else f" with adaptive.signal={metric}"
    check(
        not (groups is not None and groups.get("enable", False)),
        "algorithm.filter_groups.enable",
        True,
        f"the adaptive filter does this: leave it false, and choose +adaptive=dapo{measured} for dynamic sampling",
    )
    check(
        not sampler.get("sync_refill_failed_groups", False) or mode_of(config) != "sync",
        "trainer.v1.sampler.sync_refill_failed_groups",
        True,
        "adaptive.refill does this, for groups below adaptive.min_sessions (where every group trains, from a tenth of a batch "
        "on); leave it false",
    )
    buffer = sampler.custom_sampler.path
    check(
        buffer in (None, OUR_BUFFER["path"]),
        "trainer.v1.sampler.custom_sampler.path",
        buffer,
        "an adaptive preset brings its own replay buffer; leave the key out, and write a filter instead "
        "(docs/custom_parts.md)",
    )
    check(
        not config.skip.rollout_tq.enable,
        "skip.rollout_tq.enable",
        True,
        "recorded rollouts bypass the policy; set it to false",
    )


def _check_name(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> None:
    """A preset's name where no preset was chosen."""
    preset = config.trainer.v1.sampler.custom_sampler.path is not None
    chosen = preset or tuple(part.name for part in policy) != _PLAIN or adaptive.name == "grpo"
    check(
        chosen or not is_preset(adaptive.name),
        "adaptive.name",
        adaptive.name,
        f"is a name for people and chooses no part: this run would be plain GRPO. Write +adaptive={adaptive.name}",
    )


def _check_resume(config: Any) -> None:
    """What verl could not resume from."""
    data, saves = config.data, config.trainer.save_freq > 0
    check(
        not saves or not (config.actor_rollout_ref.actor.get("checkpoint") or {}).get("async_save"),
        "actor_rollout_ref.actor.checkpoint.async_save",
        True,
        "verl's V1 trainers never complete an asynchronous checkpoint, so no run could be resumed from one; leave it false",
    )
    resumable = saves and config.trainer.resume_mode != "disable"
    check(  # verl draws them with a generator of no seed
        not resumable or data.get("seed") is not None or data.get("train_max_samples", -1) <= 0 or not data.shuffle,
        "data.train_max_samples",
        data.get("train_max_samples", -1),
        "every start draws other prompts while data.seed is null, so no checkpoint could be resumed; set data.seed=1, or "
        "data.shuffle=false to take the first ones",
    )


def _check_estimator(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> None:
    """Two estimators, verl's and the policy's own; and what verl's would do with the reward, and the own would not."""
    advantage, algorithm, thin = policy.advantage, config.algorithm, policy.advantage.option("thin")
    own, estimator = advantage.estimator, algorithm.adv_estimator
    check(
        not thin or not why_not_skip_zero(config),
        "adaptive.advantage.thin",
        thin,
        f"leaves rows out of training, but {why_not_skip_zero(config)}; set it to 0",
    )
    if own is None:
        check(
            not str(estimator).startswith("adaptive_"),
            "algorithm.adv_estimator",
            estimator,
            f"is not of adaptive/advantage={advantage.name}; choose the matching adaptive/advantage, or grpo",
        )
        check(
            estimator != "gae" or has_critic(config),
            "critic.enable",
            False,
            "algorithm.adv_estimator=gae takes the values of a critic, and the run would end when its first step has generated; leave it "
            "out, or write algorithm.adv_estimator=grpo",
        )
        return
    if str(estimator) == "gae" and not advantage.needs_groups:
        instead = f"or take {_CRITIC}"
    else:
        keeping = _keeping(str(estimator), config.actor_rollout_ref.rollout.n, adaptive, policy)
        instead = f"or, to keep {estimator}, {keeping}"
    check(  # GRPO is what everybody's command line says, and ours what a preset does: the part that is chosen replaces it
        estimator in ("grpo", own) or str(estimator).startswith("adaptive_"),
        "algorithm.adv_estimator",
        estimator,
        f"adaptive/advantage={advantage.name} brings its own estimator ({own}) in place of grpo: write "
        f"algorithm.adv_estimator=grpo, {instead}",
    )
    check(
        not has_critic(config),
        "critic.enable",
        True,
        f"adaptive/advantage={advantage.name} has no use for a critic; take "
        + ("adaptive/advantage=verl with gae" if advantage.needs_groups else _CRITIC),
    )
    check(
        advantage.takes_penalties or not algorithm.get("use_kl_in_reward", False),
        "algorithm.use_kl_in_reward",
        True,
        f"adaptive/advantage={advantage.name} compares whole rewards and would lose the penalty; write "
        "algorithm.use_kl_in_reward=false actor_rollout_ref.actor.use_kl_loss=true, or adaptive/advantage=verl",
    )
    check(
        algorithm.get("norm_adv_by_std_in_grpo", True) or not advantage.option("norm_by_std"),
        "adaptive.advantage.norm_by_std",
        True,
        f"algorithm.norm_adv_by_std_in_grpo=false acts on verl's own estimator, and adaptive/advantage={advantage.name} "
        "takes its place; write adaptive.advantage.norm_by_std=false as well",
    )


def _check_log_probs(config: Any) -> None:
    """The rollout's own log-probabilities, where verl's correction of rollouts takes them."""
    correction = config.algorithm.get("rollout_correction") or {}
    bypass = correction.get("bypass_mode", False)
    asked = [name for name in ("rollout_is", "rollout_rs") if correction.get(name) is not None]
    check(
        config.actor_rollout_ref.rollout.calculate_log_probs or not (bypass or asked),
        "actor_rollout_ref.rollout.calculate_log_probs",
        False,
        "algorithm.rollout_correction.bypass_mode=true trains with the rollout's own log-probabilities, and the run would end when "
        "its first step has generated; set it to true"
        if bypass
        else f"algorithm.rollout_correction.{' and '.join(asked)} would be off, and nothing would say so: verl corrects by the "
        "rollout's own log-probabilities; set it to true",
    )


def _check_minibatches(config: Any) -> None:
    """A step is a whole number of mini-steps, and each of these a whole number of updates."""
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    mini_steps = async_of(config).mini_steps
    key = f"trainer.v1.{mode_of(config)}.parameter_sync_step"
    hint = "is for trainer.v1.trainer_mode=separate_async: under a preset a step of sync is whole; leave it out"
    check(mini_steps == 1 or mode_of(config) != "sync", key, mini_steps, hint)
    check(batch % mini_steps == 0, key, mini_steps, f"must divide data.train_batch_size={batch}")
    size = batch // mini_steps
    check(
        size % mini == 0,
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        mini,
        f"must divide {'data.train_batch_size' if mini_steps == 1 else 'data.train_batch_size / parameter_sync_step'}={size}, so that "
        "a step is a whole number of updates",
    )
    if has_critic(config):
        check(
            size % config.critic.ppo_mini_batch_size == 0,
            "critic.ppo_mini_batch_size",
            config.critic.ppo_mini_batch_size,
            f"must divide {size}, the prompts of an update's batch",
        )


def _check_reward_model(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> None:
    """A colocated reward model judges whole steps; in a pool of its own two of verl's faults would lose every rollout."""
    model = config.reward.reward_model
    if not model.enable:
        return
    if late_rewards(config):
        _check_late_rewards(config, adaptive, policy)
        return
    check(
        # RewardModelManager sleeps after it has started; only RewardLoopManager.compute_rm_score, for colocated, wakes
        not model.rollout.free_cache_engine,
        "reward.reward_model.rollout.free_cache_engine",
        True,
        "verl puts a reward model to sleep when it has started and in its own pool never wakes it: its first request "
        "would never return; set it to false",
    )
    check(
        config.reward.custom_reward_function.path is not None,
        "reward.custom_reward_function.path",
        None,
        "every rollout would fail: what verl gives for a classifier's score lacks the reward_extra_info that its agent loop "
        "reads (verl issue 7368); write a reward function that asks the model (docs/faq.md)",
    )


def _check_late_rewards(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> None:
    """Nothing may be decided by rewards before all rollouts of the step are there."""
    key, pool = "reward.reward_model.enable_resource_pool", "set it to true (docs/faq.md)"
    late = "a colocated reward model judges when all rollouts of a step are there"
    check(
        mode_of(config) == "sync",
        key,
        False,
        f"{late}, and trainer.v1.trainer_mode={mode_of(config)} takes groups as they come; take sync, or {pool}",
    )
    check(
        not policy.allocator.tops_up,
        key,
        False,
        f"{late}, too late for adaptive/allocator={policy.allocator.name}, which tops groups up by their rewards; take "
        f"adaptive/allocator=fixed (presets grpo, solo), or {pool}",
    )
    check(
        not adaptive.refill,
        "adaptive.refill",
        True,
        f"{late}, too late to generate others in the place of any; write adaptive.refill=false (a step trains what it has "
        f"generated, without the groups that its filter drops), or {key}=true (docs/faq.md)",
    )


def _check_fetch(config: Any, policy: Policy) -> None:
    """``data.gen_batch_size`` is how many prompts DAPO generates at a time; here the policy asks for prompts by itself."""
    fetch, batch, mode = config.data.get("gen_batch_size", None), config.data.train_batch_size, mode_of(config)
    commits = isinstance(policy.allocator, Commits)
    first = mode == "sync" and hasattr(policy.sampler.config, "round") and not commits
    sized = {"adaptive.sampler.round.prompts": _first_request(policy)}
    if commits:
        sized["adaptive.allocator.factor"] = policy.allocator.option("factor")
    for key, value in sized.items():
        check(
            mode == "sync" or value is None,
            key,
            value,
            f"has no effect with trainer.v1.trainer_mode={mode}, whose steps have no first request: a window says how many "
            "groups are in flight; leave it out",
        )
    check(
        fetch in (None, 1, batch),
        "data.gen_batch_size",
        fetch,
        "has no effect under a preset, which asks for as many prompts as the step is short of; leave it out"
        + (f", and set what a step first asks for with adaptive.sampler.round.prompts={fetch}" if first else ""),
    )


def _keep_degenerate_key(policy: Policy) -> str:
    """Where AERO's option stands: it may be a filter of a stack."""
    stacked = policy.filter.option("filters") is not None
    return "adaptive.filter.filters: aero.keep_degenerate" if stacked else "adaptive.filter.keep_degenerate"


def _group_size(n: int, policy: Policy) -> tuple[int, str]:
    """Rollouts of a group at first, and the key that says so."""
    size = policy.allocator.fixed_size(n) or n
    return size, "actor_rollout_ref.rollout.n" if size == n else "adaptive.allocator.n"


def _keeping(estimator: str, n: int, adaptive: AdaptiveConfig, policy: Policy) -> str:
    """What to write to keep one of verl's estimators."""
    if estimator in COMPARING and _group_size(n, policy)[0] < 2:
        return f"which compares a prompt's rollouts where +adaptive={adaptive.name} has one, take +adaptive=dapo"
    return "choose adaptive/advantage=verl"


def _check_group_size(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> None:
    """Refuse group size 1 unless nothing in the policy compares rollouts within a group."""
    n, estimator = config.actor_rollout_ref.rollout.n, str(config.algorithm.adv_estimator)
    size, key = _group_size(n, policy)
    # GRPO as verl has it, or a baseline that needs no group; and nothing else that would look at a group's variance.
    advantage = policy.advantage
    alone = not policy.filter.needs_groups and (policy.sampler.whole_batches or not advantage.needs_groups)
    without = (
        ""
        if estimator == "grpo" or estimator.startswith("adaptive_")
        else f" without algorithm.adv_estimator={estimator}"
    )
    check(
        size >= 2 or alone,
        key,
        size,
        f"a group of one has no variance to judge by; use at least 2 (8 is usual), or a preset that needs no groups, with its own "
        f"sampler, filter and advantage: +adaptive=grpo, +adaptive=solo{without}, +adaptive=sao with algorithm.adv_estimator=gae",
    )
    least, key = policy.allocator.least(n), policy.allocator.least_key
    fixed = policy.allocator.fixed_size(n) is not None
    check(
        n < 2 or least >= 2 or fixed or not advantage.centres,
        f"adaptive.allocator.{key}",
        least,
        f"closes groups with one rollout at actor_rollout_ref.rollout.n={n}, which {estimator} would train on its bare reward; "
        f"use adaptive.allocator.{key}=2 or more",
    )
    cap, whole = adaptive.max_rollouts_per_step, size if fixed else least
    check(
        cap is None or cap >= whole or policy.sampler.plans_rollouts,
        "adaptive.max_rollouts_per_step",
        cap,
        f"no step would have a group, which takes {whole} rollouts; use {whole} or more, or null for no ceiling",
    )
    check(  # of GROUP_RELATIVE the missing baseline is known (advantages/verl.py)
        not policy.filter.may_leave_one or not advantage.centres or estimator in GROUP_RELATIVE,
        _keep_degenerate_key(policy),
        1,
        f"leaves one rollout of a group, which {estimator} would train on its bare reward; use 0, or 2 or more",
    )
    check(  # what the others imply for it is of rewards, not penalties
        not policy.filter.may_leave_one
        or not config.algorithm.get("use_kl_in_reward", False)
        or advantage.estimator is not None
        or estimator not in GROUP_RELATIVE,
        _keep_degenerate_key(policy),
        1,
        f"leaves one rollout of a group, whose penalty (algorithm.use_kl_in_reward=true) {estimator} has no other to compare "
        "with: it would train on nothing; use 0, or 2 or more",
    )
    step_shape(adaptive, 1, n, n)  # refuses sizes that do not fit


def _check_mode(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> None:
    """What a method needs that a trainer mode cannot give."""
    mode, save_freq = mode_of(config), config.trainer.save_freq
    holds = policy.allocator.can_hold
    lacks, backend = "", config.transfer_queue.backend.storage_backend
    if save_freq > 0 and (holds or mode != "sync"):
        lacks = queue_lacks()
        if not lacks and backend != "SimpleStorage":  # the other stores' checkpoints have the keys alone
            lacks = f"transfer_queue.backend.storage_backend={backend} does not write them; set it to SimpleStorage"
    key, instead = getattr(policy.allocator, "on_policy", None) or ("name", "another allocator")
    value = adaptive.allocator.get(key)
    if mode == "sync":
        check(
            not lacks,
            f"adaptive.allocator.{key}",
            value,
            f"holds groups for a later step, and a checkpoint could not hold their rows: {lacks}, take "
            f"{instead}, or write no checkpoints (trainer.save_freq=-1)",
        )
        return
    check(
        not lacks,
        "trainer.save_freq",
        save_freq,
        f"trainer.v1.trainer_mode={mode} has groups under way at every step's end, and a checkpoint could not hold their "
        f"rows: {lacks}, or write no checkpoints (-1)",
    )
    check(
        not holds,
        f"adaptive.allocator.{key}",
        value,
        f"holds groups back for the next step's generation, but trainer.v1.trainer_mode={mode} generates all the time; take "
        f"{instead}, or trainer.v1.trainer_mode=sync",
    )
    check(
        not policy.sampler.plans_steps or ahead_of(config) == 0,
        f"trainer.v1.{mode}.num_warmup_batches",
        ahead_of(config),
        f"adaptive/sampler={policy.sampler.name} plans a step from the results of all steps before it, so nothing may be "
        f"generated ahead: trainer.v1.{mode}.num_warmup_batches=0",
    )


def _aborts(config: Any, policy: Policy) -> bool:
    """Whether steps end with requests in flight: always in the asynchronous modes, else where more is asked for than trains."""
    sized = _first_request(policy) is not None
    return mode_of(config) != "sync" or not policy.filter.keeps_all or policy.allocator.tops_up or sized


def _first_request(policy: Policy) -> int | None:
    """Prompts of a step's first request, where ``adaptive.sampler.round.prompts`` says how many."""
    return getattr(policy.sampler.option("round"), "prompts", None)


def _check_servers(config: Any, policy: Policy) -> None:
    """What verl's servers and dispatch do with adapters, and with requests that are aborted, or sent rollout by rollout."""
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    model = config.actor_rollout_ref.model
    lora = model.get("lora") or {}
    check(  # ActorRolloutRefWorker.update_weights asks for the weights without base_sync_done
        mode_of(config) != "separate_async"
        or max(model.get("lora_rank", 0), lora.get("rank", 0)) <= 0
        or lora.get("merge", False),
        "actor_rollout_ref.model.lora.merge",
        False,
        "with trainer.v1.trainer_mode=separate_async verl sends its rollout servers the base model's weights alone: nothing would "
        "be generated with the adapter that trains; set it to true",
    )
    check(
        not config.trainer.v1.get("rollout_level_dispatch", False),
        "trainer.v1.rollout_level_dispatch",
        True,
        "dispatches single rollouts, and a preset sends, tops up and aborts prompts with all of theirs; set it to false",
    )
    check(  # the request id is made of the priority, which AgentLoopWorkerTQ gives nobody; the seed is the server's own
        not rollout.get("full_determinism", False) or rollout.name != "vllm" or _group_size(rollout.n, policy)[0] < 2,
        f"{key}.full_determinism",
        True,
        "verl's V1 trainers ask vLLM for every rollout with the same seed and the same request id: all rollouts of a prompt would be "
        "one answer, so that no group has a signal, and one server would generate them all; set it to false",
    )
    apart = (rollout.get("disaggregation") or {}).get("enabled", False)
    gpus, engine = gpus_of(config), gpus_of_engine(config)
    check(  # verl makes none of more than there are, and every rollout fails; its workers refuse a rest once models are loaded
        apart or gpus % engine == 0 or (mode_of(config) == "separate_async" and gpus > engine),
        f"{key}.tensor_model_parallel_size",
        rollout.tensor_model_parallel_size,
        f"an engine takes {engine} GPUs (tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size), and there "
        f"are {gpus} to generate on; choose sizes that divide {gpus}",
    )
    training = config.trainer.n_gpus_per_node * config.trainer.nnodes
    check(  # as above, of the trainer's own engines, which generate while it waits
        apart
        or training % engine == 0
        or mode_of(config) != "separate_async"
        or not config.actor_rollout_ref.get("hybrid_engine", True),
        f"{key}.tensor_model_parallel_size",
        rollout.tensor_model_parallel_size,
        f"an engine takes {engine} GPUs, and verl's separate_async has engines on the trainer's {training}, too; choose sizes that "
        f"divide {training}",
    )
    if not apart or not _aborts(config, policy):
        return
    check(
        rollout.name != "sglang",
        f"{key}.disaggregation.enabled",
        True,
        "verl aborts requests at an SGLang replica's prefill server alone, and its decode servers would be put to sleep while "
        "they generate; set it to false, or take a preset that drops nothing (solo, grpo) in trainer.v1.trainer_mode=sync",
    )
    check(
        rollout.name != "vllm" or rollout.free_cache_engine,
        f"{key}.free_cache_engine",
        False,
        f"with {key}.disaggregation.enabled=true the run would stall after its first abort: verl resumes the prefill engine "
        f"alone, and the decode engines wake with their cache; write {key}.free_cache_engine=true",
    )


def check_manager(config: Any, manager: Any, policy: Policy) -> None:
    """Refuse a manager without ``agent_loop_workers`` where a policy asks for more than it trains.

    Requests in flight must then be aborted at the end of a ``sync`` step. verl's contract of ``agent_loop_manager_class`` is
    ``generate_sequences`` alone; that is enough where every group trains.
    """
    check(
        hasattr(manager, "agent_loop_workers") or not _aborts(config, policy),
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        config.actor_rollout_ref.rollout.get("agent", {}).get("agent_loop_manager_class") or type(manager).__name__,
        f"has no agent_loop_workers, by which requests in flight are aborted, and adaptive/filter={policy.filter.name} with "
        f"adaptive/allocator={policy.allocator.name} asks for more than it trains; derive it from verl's AgentLoopManagerTQ, "
        "or take a preset that drops nothing (solo, grpo), or trainer.v1.trainer_mode=colocate_async",
    )


def why_not_skip_zero(config: Any) -> str:
    """Why rows of zero advantage stay in training unless the user says otherwise; empty: they are left out.

    They are where the loss is a policy gradient alone, summed with a denominator that is known beforehand: then they
    add exactly nothing to the gradient. Every other loss acts on them too.
    """
    return _must_keep_zero(config) or _other_losses(config)


def zero_rows(config: Any, choice: bool | None) -> tuple[bool, str]:
    """Whether rows of zero advantage are left out of training, and a line that says so and why.

    ``config`` is verl's, with the estimator that will be used; ``choice`` is ``adaptive.skip_zero_advantage``. ConfigError: the
    choice is to leave them out where that would be wrong, whatever one prefers.
    """
    must, others = _must_keep_zero(config), _other_losses(config)
    check(not (choice and must), "adaptive.skip_zero_advantage", True, f"{must}; set it to null or false")
    if choice and others:
        return True, (
            f"left out of training by adaptive.skip_zero_advantage=true: the policy gradient is the same, but {others}, "
            "and for these rows that term goes too"
        )
    if choice is False or must or others:
        return False, f"stay in training: {must or others or 'adaptive.skip_zero_advantage=false'}"
    return True, "left out of training (same gradient, fewer tokens)"


def _must_keep_zero(config: Any) -> str:
    """Why leaving rows of zero advantage out would be wrong; empty: it would not."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    estimator, loss_mode = str(algorithm.adv_estimator), actor.policy_loss.get("loss_mode", "vanilla")
    distillation, correction = config.get("distillation"), algorithm.get("rollout_correction") or {}
    reasons = (
        (has_critic(config), "the critic learns from every row"),
        (
            estimator not in GROUP_RELATIVE and not estimator.startswith("adaptive_"),
            f"algorithm.adv_estimator={estimator} is not known to give equal rewards zero advantages",
        ),
        (bool(distillation is not None and distillation.get("enabled", False)), "distillation acts on every row"),
        (loss_mode not in _LINEAR_LOSSES, f"actor.policy_loss.loss_mode={loss_mode} looks at every row"),
        (
            actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None,
            "actor.loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of each micro batch, so every "
            "row counts (actor.loss_scale_factor=<a number, as data.max_response_length> makes it a constant)",
        ),
        (
            bool(correction.get("rollout_is_batch_normalize", False)) and correction.get("rollout_is") is not None,
            "algorithm.rollout_correction.rollout_is_batch_normalize=true takes the mean weight of every row",
        ),
        (actor.shuffle, "actor.shuffle=true mixes minibatches, so their loss denominators are not known beforehand"),
    )
    return next((reason for applies, reason in reasons if applies), "") or keeps_rows(config)


def _other_losses(config: Any) -> str:
    """Losses beside the policy gradient, whose part from rows of zero advantage a user may do without; empty: none."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    names = []
    if actor.use_kl_loss:
        names.append("the KL penalty (actor.use_kl_loss)")
    if algorithm.get("use_kl_in_reward", False):
        names.append("the KL penalty (algorithm.use_kl_in_reward)")
    if actor.entropy_coeff != 0:
        names.append(f"actor.entropy_coeff={actor.entropy_coeff}")
    return f"{' and '.join(names)} act{'s' if len(names) == 1 else ''} on every row" if names else ""
