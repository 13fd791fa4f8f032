"""Every verl name this package leans on, checked once when a run starts.

A verl that lacks one, or whose signature moved, is refused with the name, the supported versions and what to install,
before any worker starts.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from verl_adaptive.errors import AdaptiveError

__all__ = ["NAMES", "SUPPORTED", "Name", "check_verl", "problems"]

#: Versions of verl; setup.cfg's extra `verl` and the README's table say the same, which a test sees to.
SUPPORTED = ">=0.9.1,<0.10"
INSTALL = f'pip install "verl{SUPPORTED}"'


@dataclass(frozen=True)
class Name:
    """One name of verl's.

    Attributes:
        module: where it lives.
        name: dotted name inside the module.
        parameters: parameters it must accept; empty: not checked.
        why: what we use it for.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    why: str = ""


_BASE = "verl.trainer.ppo.v1.trainer_base"

NAMES: tuple[Name, ...] = (
    Name(_BASE, "register_trainer", ("name",), "our trainers stand beside verl's"),
    Name(_BASE, "TRAINER_REGISTRY", (), "verl's mode names lead to our trainers where a preset is asked for"),
    Name(_BASE, "PPOTrainer.__init__", ("self", "config"), "the trainer mixin"),
    Name(_BASE, "PPOTrainer._init_dataloader", ("self",), "the prompt stream"),
    Name(_BASE, "PPOTrainer._submit_batch_to_rollout", ("self", "batch"), "dispatch of rollouts"),
    Name(
        _BASE, "PPOTrainer._balance_batch", ("self", "batch", "metrics", "logging_prefix", "keep_minibatch"), "layout"
    ),
    Name(_BASE, "PPOTrainer._compute_old_log_prob", ("self", "batch", "metrics"), "micro batches"),
    Name(_BASE, "PPOTrainer._compute_ref_log_prob", ("self", "batch", "metrics"), "micro batches"),
    Name(_BASE, "PPOTrainer._compute_values", ("self", "batch", "metrics"), "micro batches"),
    Name(_BASE, "PPOTrainer._compute_advantage", ("self", "batch", "metrics"), "our advantage estimators"),
    Name(_BASE, "PPOTrainer._update_actor", ("self", "batch", "metrics"), "minibatches"),
    Name(_BASE, "PPOTrainer._update_critic", ("self", "batch", "metrics"), "minibatches"),
    Name(_BASE, "PPOTrainer._load_checkpoint", ("self",), "resume"),
    Name(_BASE, "PPOTrainer._save_checkpoint", ("self",), "snapshots"),
    Name(_BASE, "PPOTrainer._validate", ("self",), "validation when the budget ends a run early"),
    Name(_BASE, "PPOTrainer._build_replay_buffer", ("self",), "the reviewing replay buffer"),
    Name(_BASE, "PPOTrainer._add_batch_to_generate", ("self",), "the first rollouts of a step"),
    Name(_BASE, "PPOTrainer._add_prompts_to_generate", ("self", "num_prompts"), "the reviewing replay buffer"),
    Name(
        _BASE, "PPOTrainer._add_async_warmup_batches", ("self", "num_warmup_batches"), "the window of groups in flight"
    ),
    Name(_BASE, "PPOTrainer._reissue_inflight_prompts", ("self", "partition_id"), "prompts in flight after a resume"),
    Name(_BASE, "PPOTrainer._rollout_server_managers", ("self",), "whether rollout servers are alive"),
    Name(_BASE, "PPOTrainer.get_reward_handles", ("self",), "whether reward workers are alive"),
    Name(_BASE, "PPOTrainer.step", ("self", "metrics", "timing_raw"), "statistics after each step"),
    Name(_BASE, "PPOTrainer.on_train_begin", ("self",), "the banner"),
    Name(_BASE, "PPOTrainer.on_train_end", ("self",), "the end of a budget"),
    Name(_BASE, "PPOTrainer.get_llm_client", ("self",), "requests that can be aborted"),
    Name("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync.on_step_end", ("self",), "verl's sync trainer"),
    Name(
        "verl.workers.rollout.llm_server",
        "LLMServerClient._acquire_server",
        ("self", "request_id"),
        "requests that can be aborted",
    ),
    Name("verl.workers.rollout.llm_server", "LLMServerClient._release_server", ("self", "server_id", "request_id")),
    Name(
        "verl.checkpoint_engine.base",
        "CheckpointEngineManager.abort_replicas",
        ("self", "reject_request"),
        "requests that are aborted",
    ),
    Name("verl.checkpoint_engine.base", "CheckpointEngineManager.resume_generation_replicas", ("self",)),
    Name("verl.trainer.ppo.v1.trainer_colocate_async", "PPOTrainerColocateAsync", (), "verl's colocated trainer"),
    Name("verl.trainer.ppo.v1.trainer_separate_async", "PPOTrainerSeparateAsync", (), "verl's separate trainer"),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBufferAsync.get_sampleable_count",
        ("self", "global_steps", "partition_id"),
        "how many groups wait",
    ),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBufferAsync.wait_for_sampleable",
        ("self", "global_steps", "partition_id", "target_count"),
        "how many groups wait",
    ),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.__init__",
        ("self", "trainer_mode", "trainer_config", "max_off_policy_threshold", "sampler_kwargs", "refill_fn"),
        "the reviewing replay buffer",
    ),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.sample",
        ("self", "global_steps", "partition_id", "batch_size"),
        "the reviewing replay buffer",
    ),
    Name(
        "verl.trainer.ppo.padding_utils",
        "construct_minimal_padding_template",
        ("source_td", "source_tag", "eos_token_id"),
        "padding rows",
    ),
    Name("verl.trainer.ppo.core_algos", "register_adv_est", ("name_or_enum",), "our advantage estimators"),
    Name("verl.trainer.ppo.utils", "create_rl_sampler", ("data_config", "dataset"), "verl's prompt order"),
    Name("verl.trainer.ppo.utils", "need_critic", ("config",), "what the losses need"),
    Name("verl.utils.dataset.rl_dataset", "collate_fn", ("data_list",), "batches of prompts"),
    Name("verl.utils.tensordict_utils", "get_tensordict", ("tensor_dict",), "batches of prompts"),
    Name("verl.utils.tensordict_utils", "assign_non_tensor_data", (), "batches of prompts"),
    Name("verl.utils.tensordict_utils", "list_of_dict_to_tensordict", ("list_of_dicts",), "padding rows"),
    Name("verl.utils.seqlen_balancing", "calculate_workload", (), "balance over ranks"),
    Name(
        "verl.utils.seqlen_balancing", "get_seqlen_balanced_partitions", ("seqlen_list", "k_partitions", "equal_size")
    ),
    Name("verl.utils.seqlen_balancing", "log_seqlen_unbalance", ("seqlen_list", "partitions", "prefix"), "balance"),
)


def problems(names: tuple[Name, ...] = NAMES) -> list[str]:
    """What is missing or moved in the installed verl; empty when all is well."""
    found = []
    for item in names:
        where = f"{item.module}.{item.name}"
        try:
            target: Any = importlib.import_module(item.module)
            for part in item.name.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            found.append(f"{where} is missing ({error}); needed for {item.why}")
            continue
        if item.parameters:
            has = inspect.signature(target).parameters
            lost = [p for p in item.parameters if p not in has]
            if lost:
                found.append(f"{where} no longer takes {', '.join(lost)}; needed for {item.why}")
    return found


def check_verl(names: tuple[Name, ...] = NAMES) -> None:
    """Refuse a verl that lacks a name we use.

    Raises:
        AdaptiveError: naming each name, the versions that have it and what to install.
    """
    found = problems(names)
    if found:
        raise AdaptiveError(
            f"verl {version('verl')} does not fit verl-adaptive, which supports verl {SUPPORTED}:\n  "
            + "\n  ".join(found)
            + f"\nInstall a supported one: {INSTALL}"
        )
