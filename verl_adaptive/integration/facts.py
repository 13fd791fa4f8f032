"""What verl's configuration says of a run: said once, for the trainers, the run's store, the banner and ``doctor``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from verl_adaptive.config import AdaptiveConfig, check
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.stats.keys import Identity
from verl_adaptive.stats.snapshot import FOLDER

#: verl's agent loop of one turn (``experimental/agent_loop/single_turn_agent_loop.py``).
SINGLE_TURN = "single_turn_agent"


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
        mini_steps=int(options.get("parameter_sync_step", 1)),
        threshold=sampler.max_off_policy_threshold,
        strategy=sampler.max_off_policy_strategy,
    )


def schedule_of(config: Any) -> str:
    """What the trainer mode means for the run.

    ConfigError: a setting that verl's trainer of this mode refuses when it is made, which ``doctor`` does not do.
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


def media_columns(data: Mapping[str, Any]) -> dict[str, str]:
    """Where verl looks for images, videos and audios: ``data.image_key``, ``data.video_key``, ``data.audio_key``."""
    return {f"{kind}s": data.get(f"{kind}_key", None) or f"{kind}s" for kind in ("image", "video", "audio")}


def identity_of(config: Any, id_key: str | None = None) -> Identity:
    """Which columns of the data say which prompt a row is; ``id_key``: ``adaptive.id_key``."""
    return Identity(config.data.get("prompt_key", "prompt"), id_key, media_columns(config.data))
