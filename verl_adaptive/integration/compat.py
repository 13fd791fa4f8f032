"""Every name of verl's and of TransferQueue's that this package leans on, checked once when a run starts.

verl's version number decides nothing beyond the oldest one that has the V1 trainer: "0.10.0.dev" was the name of sources
older than 0.9.1. What decides is whether the names are there and take the parameters that they get. A trainer mode that
lacks one is refused with the name, the versions that have it and what to install, before any worker starts; the other
modes run. Names that came with a later version than the oldest say what is done where they are missing.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_adaptive.errors import AdaptiveError

#: Versions of verl; setup.cfg's extra `verl` and the README's table say the same, which a test sees to. No upper bound:
#: later ones are judged by their names (docs/verl_versions.md).
SUPPORTED = ">=0.9.0"
#: Releases on which the pipeline was run.
TRIED = ("0.9.0", "0.9.1")
INSTALL = f'pip install "verl{SUPPORTED}"'

#: verl's trainer modes.
MODES = ("sync", "colocate_async", "separate_async")
_ASYNC = ("colocate_async", "separate_async")
_SYNC = ("sync",)


@dataclass(frozen=True)
class Name:
    """One name of verl's.

    Attributes:
        module: where it lives.
        name: dotted name inside the module.
        parameters: parameters it must accept; empty: not checked.
        why: what we use it for.
        modes: the trainer modes that need it.
        since: the version of verl that brought the name, or these parameters of it; empty: there from 0.9.0 on.
        instead: what is done in a verl that lacks it; empty: the modes are refused.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    why: str = ""
    modes: tuple[str, ...] = MODES
    since: str = ""
    instead: str = ""

    @property
    def where(self) -> str:
        """The full dotted name."""
        return f"{self.module}.{self.name}"


_V1 = "verl.trainer.ppo.v1"
_BASE = f"{_V1}.trainer_base"
_CLIENT = "verl.workers.rollout.llm_server"
_SERVERS = "verl.checkpoint_engine.base"

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
    Name(
        _BASE,
        "PPOTrainer._log_rollout_data",
        ("self", "batch", "timing_raw", "rollout_data_dir"),
        "rollouts without padding in trainer.rollout_data_dir",
    ),
    Name(_BASE, "PPOTrainer._load_checkpoint", ("self",), "resume"),
    Name(_BASE, "PPOTrainer._save_checkpoint", ("self",), "snapshots"),
    Name(_BASE, "PPOTrainer._validate", ("self",), "validation when the budget ends a run early"),
    Name(_BASE, "PPOTrainer._build_replay_buffer", ("self",), "the reviewing replay buffer"),
    Name(_BASE, "PPOTrainer._add_batch_to_generate", ("self",), "the first rollouts of a step"),
    Name(_BASE, "PPOTrainer._add_prompts_to_generate", ("self", "num_prompts"), "the reviewing replay buffer"),
    Name(
        _BASE,
        "PPOTrainer._add_async_warmup_batches",
        ("self", "num_warmup_batches"),
        "the window of groups in flight",
        modes=_ASYNC,
        since="0.9.1",
        instead="what verl would send before the first step waits for the first step",
    ),
    Name(
        _BASE,
        "PPOTrainer._reissue_inflight_prompts",
        ("self", "partition_id"),
        "prompts in flight after a resume",
        modes=_ASYNC,
    ),
    Name(
        _BASE,
        "PPOTrainer._rollout_server_managers",
        ("self",),
        "whether rollout servers are alive",
        since="0.9.1",
        instead="the trainer's own server managers are asked",
    ),
    Name(_BASE, "PPOTrainer.get_reward_handles", ("self",), "whether reward workers are alive"),
    Name(
        _BASE,
        "PPOTrainer._compute_reward_colocate",
        ("self", "batch", "metrics"),
        "a colocated reward model",
        modes=_SYNC,
    ),
    Name(_BASE, "PPOTrainer.step", ("self", "metrics", "timing_raw"), "statistics after each step"),
    Name(
        _BASE,
        "PPOTrainer._step_once",
        ("self", "metrics", "timing_raw", "sample_batch_size"),
        "mini-steps without groups",
        modes=_ASYNC,
    ),
    Name(_BASE, "PPOTrainer.on_train_begin", ("self",), "the banner"),
    Name(_BASE, "PPOTrainer.on_step_end", ("self",), "the last checkpoint when the budget ends a run early"),
    Name(_BASE, "PPOTrainer.on_train_end", ("self",), "the end of a budget"),
    Name(_BASE, "PPOTrainer.get_llm_client", ("self",), "requests that can be aborted"),
    Name(f"{_V1}.trainer_sync", "PPOTrainerSync.on_step_end", ("self",), "verl's sync trainer", modes=_SYNC),
    Name(
        _CLIENT, "LLMServerClient._acquire_server", ("self", "request_id"), "requests that can be aborted", modes=_SYNC
    ),
    Name(_CLIENT, "LLMServerClient._release_server", ("self", "server_id"), "requests that are aborted", modes=_SYNC),
    Name(
        _CLIENT,
        "LLMServerClient._release_server",
        ("request_id",),
        "requests that are aborted",
        modes=_SYNC,
        since="0.9.1",
        instead="the load balancer gets back the server alone",
    ),
    Name(_SERVERS, "CheckpointEngineManager.abort_replicas", ("self",), "requests that are aborted", modes=_SYNC),
    Name(
        _SERVERS,
        "CheckpointEngineManager.abort_replicas",
        ("reject_request",),
        "requests that are aborted",
        modes=_SYNC,
        since="0.9.1",
        instead="a server pauses instead of closing its gate; its clients are cancelled before",
    ),
    Name(
        _SERVERS,
        "CheckpointEngineManager.resume_generation_replicas",
        ("self",),
        "requests that are aborted",
        modes=_SYNC,
    ),
    Name(
        f"{_V1}.trainer_colocate_async",
        "PPOTrainerColocateAsync",
        (),
        "verl's colocated trainer",
        modes=("colocate_async",),
    ),
    Name(
        f"{_V1}.trainer_separate_async",
        "PPOTrainerSeparateAsync",
        (),
        "verl's separate trainer",
        modes=("separate_async",),
    ),
    Name(f"{_V1}.replay_buffer", "ReplayBufferAsync", (), "the reviewing replay buffer"),
    Name(
        f"{_V1}.replay_buffer",
        "ReplayBufferAsync.get_sampleable_count",
        ("self", "global_steps", "partition_id"),
        "how many groups wait",
        modes=_ASYNC,
        since="0.9.1",
        instead="nobody asks: there is no trainer.v1.separate_async.hybrid_rollout.enable_switch yet",
    ),
    Name(
        f"{_V1}.replay_buffer",
        "ReplayBufferAsync.wait_for_sampleable",
        ("self", "global_steps", "partition_id", "target_count"),
        "how many groups wait",
        modes=_ASYNC,
        since="0.9.1",
        instead="nobody asks: there is no trainer.v1.separate_async.hybrid_rollout.enable_switch yet",
    ),
    Name(
        f"{_V1}.replay_buffer",
        "ReplayBuffer.__init__",
        (
            "self",
            "trainer_mode",
            "trainer_config",
            "max_off_policy_threshold",
            "max_off_policy_strategy",
            "sampler_kwargs",
            "refill_fn",
        ),
        "the reviewing replay buffer",
    ),
    Name(
        f"{_V1}.replay_buffer",
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


_QUEUE = "transfer_queue"

NAMES += (
    Name(_QUEUE, "get_client", (), "whether the queue is alive"),
    Name(_QUEUE, "kv_list", ("partition_id",), "what is back"),
    Name(_QUEUE, "kv_batch_put", ("keys", "partition_id", "fields", "tags"), "rows that train"),
    Name(_QUEUE, "kv_batch_get", ("keys", "partition_id", "select_fields"), "rewards and rows"),
    Name(_QUEUE, "kv_clear", ("keys", "partition_id"), "rows of groups that do not train"),
)

#: TransferQueue's own checkpoint, which came with 0.1.10: rows of groups that wait for the next step go into it.
QUEUE_CHECKPOINT = (
    Name(_QUEUE, "save_checkpoint", ("checkpoint_dir", "metadata"), "checkpoints with held groups"),
    Name(_QUEUE, "load_checkpoint", ("checkpoint_dir",), "checkpoints with held groups"),
)
INSTALL_QUEUE = 'pip install "TransferQueue>=0.1.10"'


def queue_lacks() -> str:
    """Why groups cannot be held for a later step with the installed TransferQueue; empty: they can."""
    found = problems(QUEUE_CHECKPOINT)
    return f"TransferQueue {version('TransferQueue')} has no save_checkpoint ({INSTALL_QUEUE})" if found else ""


def _lack(item: Name) -> str:
    """What a name of the installed verl lacks; empty if nothing."""
    try:
        target: Any = importlib.import_module(item.module)
        for part in item.name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        return f"is missing ({error})"
    if item.parameters:
        has = inspect.signature(target).parameters
        lost = [p for p in item.parameters if p not in has]
        if lost:
            return f"does not take {', '.join(lost)}"
        empty, named = (
            inspect.Parameter.empty,
            (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY),
        )
        demanded = [n for n, p in has.items() if p.default is empty and p.kind in named and n not in item.parameters]
        if demanded and not item.instead:
            return f"now demands {', '.join(demanded)}"
    return ""


def _only(item: Name, mode: str | None) -> str:
    """The trainer modes that a name is for, where not all of them and nobody has asked for one."""
    return "" if item.modes == MODES or mode is not None else f" in {' and '.join(item.modes)}"


def problems(names: tuple[Name, ...] = NAMES, mode: str | None = None) -> list[str]:
    """What the installed verl lacks and nothing stands in for; empty when all is well.

    Args:
        names: what to look for.
        mode: for one trainer mode; None: for any.
    """
    found = []
    for item in names:
        if item.instead or (mode is not None and mode not in item.modes):
            continue
        lack = _lack(item)
        if lack:
            found.append(f"{item.where} {lack}; needed for {item.why}{_only(item, mode)}")
    return found


def substitutes(names: tuple[Name, ...] = NAMES, mode: str | None = None) -> list[str]:
    """What the installed verl lacks, and what is done instead; empty with the newest verl that is known.

    Args:
        names: what to look for.
        mode: for one trainer mode; None: for any, and what concerns some of them only says so.
    """
    found = []
    for item in names:
        if item.instead and (mode is None or mode in item.modes) and (lack := _lack(item)):
            found.append(f"{item.where} {lack.partition(' (')[0]}{_only(item, mode)}: {item.instead}")
    return found


def too_old() -> str:
    """Why the installed verl cannot work whatever its names are; empty if it is new enough, or not installed.

    Cheap: imports nothing of verl's.
    """
    try:
        have = version("verl")
    except PackageNotFoundError:
        return ""
    numbers = re.match(r"(\d+)\.(\d+)", have)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= (0, 9):
        return ""
    return (
        f"verl {have} has neither plugins (the entry points verl.plugins) nor the V1 trainer, which came with 0.9.0 and "
        f"which everything here stands on: {INSTALL} (docs/verl_versions.md)"
    )


def check_verl(names: tuple[Name, ...] = NAMES, mode: str | None = None) -> None:
    """Refuse a verl that lacks a name we use.

    Args:
        names: what to look for.
        mode: for one trainer mode; None: for any.

    Raises:
        AdaptiveError: naming each name, the versions that have it and what to install.
    """
    found = problems(names, mode)
    if found:
        runs = [other for other in MODES if mode is not None and other != mode and not problems(names, other)]
        raise AdaptiveError(
            f"verl {version('verl')} does not fit verl-adaptive"
            + (f" in trainer.v1.trainer_mode={mode}" if mode is not None else "")
            + ":\n  "
            + "\n  ".join(found)
            + (f"\nWith this verl write trainer.v1.trainer_mode={' or '.join(runs)}." if runs else "")
            + f"\nverl {' and '.join(TRIED)} have been run, others are taken as far as they have these names "
            f"(docs/verl_versions.md). Install a supported one: {INSTALL}"
        )
