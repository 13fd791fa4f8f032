"""What verl's configuration says of a run: said once, for the trainers, the run's store, the banner and ``doctor``."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from verl_adaptive.config import AdaptiveConfig, check
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.integration.engines import model_of
from verl_adaptive.policy import Policy
from verl_adaptive.stats.keys import Identity
from verl_adaptive.stats.snapshot import FOLDER
from verl_adaptive.text import counted

#: verl's agent loop of one turn (``experimental/agent_loop/single_turn_agent_loop.py``).
SINGLE_TURN = "single_turn_agent"

#: The loss that applies ``algorithm.rollout_correction`` with ``bypass_mode=true``; verl does not choose it by itself.
BYPASS_LOSS = (
    "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode "
    "'+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}'"
)


def mode_of(config: Any) -> str:
    """The trainer mode: ``sync``, ``colocate_async`` or ``separate_async``."""
    return str(config.trainer.v1.trainer_mode)


def adaptive_of(config: Any) -> AdaptiveConfig:
    """The ``adaptive`` group of verl's configuration, checked, with ``data.seed`` where it has no seed of its own.

    ConfigError: it is no group, or a key or value in it is wrong.
    """
    node = config.get("adaptive")
    data = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    made, seed = AdaptiveConfig.from_mapping(data), config.data.get("seed") or 0
    check(isinstance(seed, int), "data.seed", seed, "must be a whole number, or null")
    return made if made.seed is not None else replace(made, seed=int(seed))


def ahead_of(config: Any) -> float:
    """Batches that the trainer mode generates ahead; verl takes fewer than none for none."""
    mode = mode_of(config)
    if mode == "sync":
        return 0
    ahead = config.trainer.v1[mode].num_warmup_batches
    check(
        isinstance(ahead, int | float), f"trainer.v1.{mode}.num_warmup_batches", ahead, "must be a number; 0 for none"
    )
    return max(0, ahead)


def async_of(config: Any) -> AsyncFacts:
    """How the asynchronous trainer that the configuration chooses takes its batches; what it generates ahead is the plan's."""
    options, sampler = config.trainer.v1[mode_of(config)], config.trainer.v1.sampler
    return AsyncFacts(
        parts=int(options.get("parameter_sync_step", 1)),
        threshold=sampler.max_off_policy_threshold,
        strategy=sampler.max_off_policy_strategy,
    )


def schedule_of(config: Any) -> str:
    """What the trainer mode means for the run.

    ConfigError: a setting that verl's trainer of this mode refuses, which verl itself asserts only when workers start.
    """
    v1, rollout, mode = config.trainer.v1, config.actor_rollout_ref.rollout, mode_of(config)
    if mode == "sync":
        return "generation and training take turns"
    ahead = ahead_of(config)
    warmup = f"{ahead:g} warm-up batch{'' if ahead == 1 else 'es'}"
    if mode == "colocate_async":
        return f"generation and training take turns on the same devices, {warmup} ahead"
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    sync = v1.separate_async.parameter_sync_step
    check(
        batch == sync * mini,
        "data.train_batch_size",
        batch,
        f"verl's separate_async wants trainer.v1.separate_async.parameter_sync_step={sync} times "
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}, which is {sync * mini}",
    )
    for name in ("nnodes", "n_gpus_per_node"):
        value = rollout[name]
        hint = "separate_async generates on separate devices: say how many"
        check(bool(value) and value > 0, f"actor_rollout_ref.rollout.{name}", value, hint)
    backend = rollout.checkpoint_engine.backend
    hint = "separate_async sends weights between processes: choose nccl, hccl, nixl or mooncake"
    check(backend != "naive", "actor_rollout_ref.rollout.checkpoint_engine.backend", backend, hint)
    where = f"{rollout.nnodes}x{rollout.n_gpus_per_node} devices generate while others train"
    return f"{where}; new weights after every {'minibatch' if sync == 1 else f'{sync} minibatches'}, {warmup} ahead"


def updates_of(config: Any) -> int:
    """Optimizer updates of the actor in a step, epochs of PPO included; GRPO's own number with the same settings."""
    actor = config.actor_rollout_ref.actor
    return int(config.data.train_batch_size) // int(actor.ppo_mini_batch_size) * int(actor.ppo_epochs)


def gpus_of(config: Any) -> int:
    """GPUs that generate: the rollout's in ``separate_async``, else the trainer's."""
    where = config.actor_rollout_ref.rollout if mode_of(config) == "separate_async" else config.trainer
    return int((where.n_gpus_per_node or 0) * (where.nnodes or 0))  # none of separate_async's: see schedule_of


def gpus_of_engine(config: Any) -> int:
    """GPUs of one replica of the inference engine."""
    rollout = config.actor_rollout_ref.rollout
    return int(rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size)


def replicas_of(config: Any) -> int:
    """Replicas of the inference engine (``LLMServerManager``): GPUs that generate over the GPUs of one; 0: not told by these."""
    disaggregation = config.actor_rollout_ref.rollout.get("disaggregation")
    if disaggregation is not None and disaggregation.get("enabled", False):
        return 0  # prefill and decoding on engines of their own
    return gpus_of(config) // gpus_of_engine(config)


def engines_of(config: Any) -> int:
    """Inference engines with slots of their own: a replica has ``data_parallel_size`` of them; 0: not known."""
    return replicas_of(config) * int(config.actor_rollout_ref.rollout.data_parallel_size)


def row_limit(config: Any) -> int | None:
    """Rows that TransferQueue can hold; None: as many as there is memory for."""
    backend = config.transfer_queue.backend
    return backend.SimpleStorage.total_storage_size if backend.storage_backend == "SimpleStorage" else None


def check_room(limit: int | None, rows: int, step: str) -> None:
    """Refuse a queue that does not hold a step's rows, with a size that does."""
    check(
        limit is None or rows <= limit,
        "transfer_queue.backend.SimpleStorage.total_storage_size",
        limit,
        f"{step} needs {rows} rows in TransferQueue at once (a row a prompt and one an output); set it to {2 * rows} or more, "
        "or null for no limit",
    )


def late_rewards(config: Any) -> bool:
    """Whether rewards come when all rollouts of a step are there: a reward model on the trainer's GPUs has to wait for them."""
    model = config.reward.reward_model
    return bool(model.enable and not model.enable_resource_pool)


def has_critic(config: Any) -> bool:
    """Whether verl trains a critic; without verl's warning, which each question brings and verl's trainer shows itself."""
    from verl.trainer.ppo.utils import need_critic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return need_critic(config)


def single_turn(config: Any) -> bool:
    """Whether a prompt that names no agent loop goes to verl's own of one turn, whose loss mask is as long as the answer."""
    agent = config.actor_rollout_ref.rollout.agent
    return agent.default_agent_loop == SINGLE_TURN and not agent.get("agent_loop_config_path")


def only_validates(config: Any) -> bool:
    """Whether verl ends after its first validation."""
    return bool(config.trainer.get("val_only", False) and config.trainer.get("val_before_train", True))


@dataclass(frozen=True)
class JournalPlace:
    """Where a run's journal is.

    Attributes:
        folder: its own folder; None: there is none.
        run: the run's name.
        checkpoints: the run's checkpoints.
        why_none: the setting because of which there is none.
    """

    folder: str | None
    run: str
    checkpoints: str
    why_none: str = ""


def journal_place(config: Any, adaptive: AdaptiveConfig) -> JournalPlace:
    """The journal that ``adaptive.store`` means: in a folder of several runs, or beside the checkpoints."""
    store, trainer = adaptive.store, config.trainer
    checkpoints = os.path.abspath(trainer.default_local_dir)
    run = f"{trainer.project_name}/{trainer.experiment_name}"
    if not store.enabled:
        return JournalPlace(None, run, checkpoints, "adaptive.store.enabled=false")
    if only_validates(config):
        # It may start from any checkpoint, beside the run itself: nothing of it belongs on the run's line.
        return JournalPlace(None, run, checkpoints, "trainer.val_only=true")
    if store.dir is None:
        return JournalPlace(os.path.join(checkpoints, FOLDER), run, checkpoints)
    names = [part for part in run.split("/") if part not in ("", ".", "..")]
    return JournalPlace(os.path.join(os.path.abspath(os.path.expanduser(store.dir)), *names), run, checkpoints)


def model_kind(config: Any) -> str:
    """What kind of model it is, as far as that is known before it is loaded: its own word, else the end of its path."""
    path = str(config.actor_rollout_ref.model.path).rstrip("/")
    return str((model_of(config) or {}).get("model_type") or path.rpartition("/")[2])


def image_note(config: Any, kind: str) -> str:
    """What vLLM makes of images that it loads no weights for; empty where that is no matter.

    Seen with vLLM 0.28's CPU build (docs/verl_versions.md): loading dummy weights overwrites what it normalizes pixels by,
    which is no weight, so the actor's never put it right. Nothing fails: the model answers about pictures it sees wrongly.
    ``kind`` is the class of the model's processor, or :func:`model_kind`.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or not str(rollout.load_format).startswith("dummy"):
        return ""
    if not re.sub(r"\W|_", "", kind.lower()).startswith(("qwen2vl", "qwen25vl")):
        return ""
    return (
        f"actor_rollout_ref.rollout.load_format={rollout.load_format} with Qwen2-VL or Qwen2.5-VL: rollouts may see every image wrongly, "
        "without an error; write actor_rollout_ref.rollout.load_format=safetensors (docs/verl_versions.md)"
    )


def media_columns(data: Mapping[str, Any]) -> dict[str, str]:
    """Where verl looks for images, videos and audios: ``data.image_key``, ``data.video_key``, ``data.audio_key``."""
    return {f"{kind}s": data.get(f"{kind}_key", None) or f"{kind}s" for kind in ("image", "video", "audio")}


def identity_of(config: Any, id_key: str | None = None) -> Identity:
    """Which columns of the data say which prompt a row is; ``id_key``: ``adaptive.id_key``."""
    return Identity(config.data.get("prompt_key", "prompt"), id_key, media_columns(config.data))


def distillation_note(config: Any) -> str:
    """What is left of a preset where a teacher alone trains; empty where rewards do, too."""
    distillation = config.get("distillation")
    if not (distillation and distillation.enabled) or distillation.distillation_loss.use_task_rewards:
        return ""
    return (
        "distillation.distillation_loss.use_task_rewards=false: rewards and advantages train nothing; by its rewards the preset "
        "only chooses which prompts are rolled out, how often, and which groups train"
    )


def bypass_note(config: Any) -> str:
    """What of ``algorithm.rollout_correction`` verl's V1 trainers leave to a loss that is not chosen; empty: nothing."""
    correction, loss = config.algorithm.get("rollout_correction") or {}, config.actor_rollout_ref.actor.policy_loss
    told = loss.get("loss_mode") == "bypass_mode" and loss.get("rollout_correction") is not None
    if told or not correction.get("bypass_mode", False):
        return ""
    usual = {"rollout_is": None, "rollout_rs": None, "loss_type": "ppo_clip"}
    lost = [f"{name}={value}" for name, default in usual.items() if (value := correction.get(name, default)) != default]
    if not lost:
        return ""
    return (
        f"algorithm.rollout_correction.bypass_mode=true: {', '.join(lost)} ha{'s' if len(lost) == 1 else 've'} no effect: verl's V1 trainers leave it to the loss; "
        f"add {BYPASS_LOSS}"
    )


def estimator_note(config: Any, name: str) -> str:
    """That ``+adaptive=grpo`` is not GRPO; empty where it is, or another preset."""
    estimator = config.algorithm.adv_estimator
    if name != "grpo" or estimator != "gae":
        return ""
    return "algorithm.adv_estimator=gae, verl's default: PPO with a critic; for GRPO write algorithm.adv_estimator=grpo"


def rate_note(config: Any, budget: int | None) -> str:
    """That a budget ends the run before the learning rate has decayed; empty where there is none, or the rate is constant."""
    trainer, optim = config.trainer, config.actor_rollout_ref.actor.optim
    styles = {name: optim.get(name) for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style", "decay_type")}
    name = next((name for name, style in styles.items() if style not in (None, "constant")), None)
    steps, spent = (
        trainer.get("total_training_steps"),
        config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
    )
    if budget is None or name is None or optim.get("lr_decay_steps") or (steps is not None and steps * spent <= budget):
        return ""
    return (
        f"actor_rollout_ref.actor.optim.{name}={styles[name]} goes by verl's number of steps, and adaptive.total_rollouts may end the run long before: "
        "the learning rate would not have decayed; write trainer.total_training_steps=<about the steps of the budget>"
    )


def order_note(config: Any, policy: Policy) -> str:
    """That the order of the file is nobody's; empty where it is kept, or verl shuffles anyway."""
    if policy.sampler.kind == "stream" or config.data.get("shuffle", True):
        return ""
    return f"data.shuffle=false has no effect: adaptive/sampler={policy.sampler.name} picks from the whole data set"


def held_note(policy: Policy) -> str:
    """That a part of what trains is of older weights; empty where every group is made within its step."""
    allocator = policy.allocator
    if not allocator.can_hold:
        return ""
    age, instead = allocator.option("max_age"), getattr(allocator, "on_policy", None)
    most = "" if age is None else f" ({counted(age, 'step')} at most: adaptive.allocator.max_age)"
    own = "" if instead is None else f"; adaptive.allocator.{'='.join(instead)} makes each group within its step"
    return (
        f"off-policy by a step: held groups train with first rollouts of older weights{most}; algorithm.rollout_correction "
        f"corrects for that{own}"
    )


def dropped_note(config: Any, policy: Policy) -> str:
    """What dropping groups does to losses beside the policy gradient; empty where there is none, or nothing is dropped."""
    actor, distillation = config.actor_rollout_ref.actor, config.get("distillation") or {}
    names = [
        *(["KL penalty"] if actor.use_kl_loss or config.algorithm.use_kl_in_reward else []),
        *(["entropy bonus"] if actor.entropy_coeff != 0 else []),
        *(["distillation"] if distillation.get("enabled", False) else []),
    ]
    if not (names and policy.filter.reasons):
        return ""
    one = len(names) == 1
    return (
        f"the {' and the '.join(names)} act{'s' * one} on the groups that train only; dropped groups do not add to "
        f"{'it' if one else 'them'}"
    )
