"""Every name of verl's and of TransferQueue's that this package leans on, checked once when a run starts.

verl's version number decides nothing beyond the oldest one that has the V1 trainer: "0.10.0.dev" was the name of sources
older than 0.9.1. What decides is whether the names are there and take the parameters that they get. A trainer mode that
lacks one is refused with the name, the versions that have it and what to install, before any worker starts; the other
modes run. Names that came with 0.9.1 say what is done where they are missing.
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
        instead: what is done in verl 0.9.0, which lacks the name, or these parameters of it; empty: the modes are refused.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    why: str = ""
    modes: tuple[str, ...] = MODES
    instead: str = ""

    @property
    def where(self) -> str:
        """The full dotted name."""
        return f"{self.module}.{self.name}"


def _use(module: str, call: str, why: str, modes: tuple[str, ...] = MODES, instead: str = "") -> Name:
    """A name as it is called, ``Class.method(parameter, parameter)``; without brackets parameters are not checked."""
    name, brackets, inside = call.rstrip(")").partition("(")
    parameters = tuple(re.findall(r"\w+", inside))
    method = bool(brackets) and "." in name
    return Name(module, name, ("self", *parameters) if method else parameters, why, modes, instead)


_V1 = "verl.trainer.ppo.v1"
_BASE = f"{_V1}.trainer_base"
_BUFFER = f"{_V1}.replay_buffer"
_CLIENT = "verl.workers.rollout.llm_server"
_SERVERS = "verl.checkpoint_engine.base"
_TENSORS = "verl.utils.tensordict_utils"
_BALANCE = "verl.utils.seqlen_balancing"
_QUEUE = "transfer_queue"
_QUEUE_CLIENT = f"{_QUEUE}.client"
_UNASKED = "nobody asks: there is no trainer.v1.separate_async.hybrid_rollout.enable_switch yet"

NAMES: tuple[Name, ...] = (
    _use(_BASE, "TRAINER_REGISTRY", "verl's mode names lead to our trainers where a preset is asked for"),
    _use(_BASE, "PPOTrainer.__init__(config)", "the trainer mixin"),
    _use(_BASE, "PPOTrainer._init_dataloader()", "the prompt stream"),
    _use(_BASE, "PPOTrainer._submit_batch_to_rollout(batch)", "dispatch of rollouts"),
    _use(_BASE, "PPOTrainer._balance_batch(batch, metrics, logging_prefix, keep_minibatch)", "layout"),
    _use(_BASE, "PPOTrainer._compute_old_log_prob(batch, metrics)", "micro batches"),
    _use(_BASE, "PPOTrainer._compute_ref_log_prob(batch, metrics)", "micro batches"),
    _use(_BASE, "PPOTrainer._compute_values(batch, metrics)", "micro batches"),
    _use(_BASE, "PPOTrainer._compute_advantage(batch, metrics)", "our advantage estimators"),
    _use(_BASE, "PPOTrainer._update_actor(batch, metrics)", "minibatches"),
    _use(_BASE, "PPOTrainer._update_critic(batch, metrics)", "minibatches"),
    _use(
        _BASE,
        "PPOTrainer._log_rollout_data(batch, timing_raw, rollout_data_dir)",
        "rollouts without padding in trainer.rollout_data_dir",
    ),
    _use(_BASE, "PPOTrainer._compute_metrics", "rewards and lengths over all rows"),
    _use(_BASE, "PPOTrainer._load_checkpoint()", "resume"),
    _use(_BASE, "PPOTrainer._save_checkpoint()", "snapshots"),
    _use(_BASE, "PPOTrainer._validate()", "validation when the budget ends a run early"),
    _use(_BASE, "PPOTrainer._add_batch_to_generate()", "the first rollouts of a step"),
    _use(_BASE, "PPOTrainer._add_prompts_to_generate(num_prompts)", "the reviewing replay buffer"),
    _use(
        _BASE,
        "PPOTrainer._add_async_warmup_batches(num_warmup_batches)",
        "the window of groups in flight",
        _ASYNC,
        "what verl would send before the first step waits for the first step",
    ),
    _use(_BASE, "PPOTrainer._reissue_inflight_prompts(partition_id)", "prompts in flight after a resume", _ASYNC),
    _use(_BASE, "PPOTrainer.get_reward_handles()", "whether reward workers are alive"),
    _use(_BASE, "PPOTrainer._compute_reward_colocate(batch, metrics)", "a colocated reward model", _SYNC),
    _use(_BASE, "PPOTrainer.step(metrics, timing_raw)", "statistics after each step"),
    _use(_BASE, "PPOTrainer._step_once(metrics, timing_raw, sample_batch_size)", "mini-steps without groups", _ASYNC),
    _use(_BASE, "PPOTrainer.fit", "the journal's end"),
    _use(_BASE, "PPOTrainer.on_train_begin()", "the banner"),
    _use(_BASE, "PPOTrainer.on_step_end()", "the last checkpoint when the budget ends a run early"),
    _use(_BASE, "PPOTrainer.on_train_end()", "the end of a budget"),
    _use(_BASE, "PPOTrainer.get_llm_client()", "requests that can be aborted"),
    _use(f"{_V1}.trainer_sync", "PPOTrainerSync.on_step_end()", "verl's sync trainer", _SYNC),
    _use(_CLIENT, "LLMServerManager.get_client(client_cls)", "requests that can be aborted", _SYNC),
    _use(_CLIENT, "LLMServerClient._acquire_server(request_id)", "requests that can be aborted", _SYNC),
    _use(_CLIENT, "LLMServerClient._release_server(server_id)", "requests that are aborted", _SYNC),
    _use(
        _CLIENT,
        "LLMServerClient._release_server(request_id)",
        "requests that are aborted",
        _SYNC,
        "the load balancer gets back the server alone",
    ),
    _use(_SERVERS, "CheckpointEngineManager.abort_replicas()", "requests that are aborted", _SYNC),
    _use(
        _SERVERS,
        "CheckpointEngineManager.abort_replicas(reject_request)",
        "requests that are aborted",
        _SYNC,
        "a server pauses instead of closing its gate; its clients are cancelled before",
    ),
    _use(_SERVERS, "CheckpointEngineManager.resume_generation_replicas()", "requests that are aborted", _SYNC),
    _use(f"{_V1}.trainer_colocate_async", "PPOTrainerColocateAsync", "verl's colocated trainer", ("colocate_async",)),
    _use(f"{_V1}.trainer_separate_async", "PPOTrainerSeparateAsync", "verl's separate trainer", ("separate_async",)),
    _use(_BUFFER, "ReplayBufferAsync", "the reviewing replay buffer"),
    _use(
        _BUFFER,
        "ReplayBufferAsync.get_sampleable_count(global_steps, partition_id)",
        "how many groups wait",
        _ASYNC,
        _UNASKED,
    ),
    _use(
        _BUFFER,
        "ReplayBufferAsync.wait_for_sampleable(global_steps, partition_id, target_count)",
        "how many groups wait",
        _ASYNC,
        _UNASKED,
    ),
    _use(_BUFFER, "ReplayBuffer.sample(global_steps, partition_id, batch_size)", "the reviewing replay buffer"),
    _use(
        "verl.trainer.ppo.padding_utils",
        "construct_minimal_padding_template(source_td, source_tag, eos_token_id)",
        "padding rows",
    ),
    _use("verl.trainer.ppo.core_algos", "register_adv_est(name_or_enum)", "our advantage estimators"),
    _use("verl.trainer.ppo.utils", "create_rl_sampler(data_config, dataset)", "verl's prompt order"),
    _use("verl.trainer.ppo.utils", "need_critic(config)", "what the losses need"),
    _use("verl.utils.dataset.rl_dataset", "collate_fn(data_list)", "batches of prompts"),
    _use(_TENSORS, "get_tensordict(tensor_dict)", "batches of prompts"),
    _use(_TENSORS, "assign_non_tensor_data", "batches of prompts"),
    _use(_TENSORS, "list_of_dict_to_tensordict(list_of_dicts)", "padding rows"),
    _use(_BALANCE, "calculate_workload", "balance over ranks"),
    _use(_BALANCE, "get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size)", "balance over ranks"),
    _use(_BALANCE, "log_seqlen_unbalance(seqlen_list, partitions, prefix)", "balance over ranks"),
    _use(_QUEUE, "get_client", "whether the queue is alive"),
    _use(_QUEUE, "kv_list(partition_id)", "what is back"),
    _use(_QUEUE, "kv_batch_put(keys, partition_id, fields, tags)", "rows that train"),
    _use(_QUEUE, "async_kv_batch_put(keys, partition_id, tags)", "statuses that share messages"),
    _use(_QUEUE, "kv_batch_get(keys, partition_id, select_fields)", "rewards and rows"),
    _use(_QUEUE, "kv_clear(keys, partition_id)", "rows of groups that do not train"),
    _use(_QUEUE_CLIENT, "TransferQueueClient.kv_retrieve_meta(keys, partition_id, create)", "what is back"),
    _use(_QUEUE_CLIENT, "TransferQueueClient.get_data(metadata)", "rewards and rows"),
    _use(_QUEUE_CLIENT, "TransferQueueClient.put(data, metadata)", "one uid for all rows of a group"),
    _use(
        _QUEUE_CLIENT,
        "TransferQueueClient._run_coroutine(coro)",
        "a time limit for the queue's answers",
        instead="a run whose TransferQueue dies waits for ever",
    ),
    _use(
        f"{_QUEUE}.metadata",
        "BatchMeta.__init__(global_indexes, partition_ids, field_schema, production_status, _custom_backend_meta)",
        "rewards and rows",
    ),
)

#: TransferQueue's own checkpoint, which came with 0.1.10: rows of groups that wait for the next step go into it.
QUEUE_CHECKPOINT = (
    _use(_QUEUE, "save_checkpoint(checkpoint_dir, metadata)", "checkpoints with held groups"),
    _use(_QUEUE, "load_checkpoint(checkpoint_dir)", "checkpoints with held groups"),
)
INSTALL_QUEUE = 'pip install "TransferQueue>=0.1.10"'


def queue_lacks() -> str:
    """Why no checkpoint can hold the rows in the queue with the installed TransferQueue, and the cure; empty: it can."""
    found, _ = lacks(QUEUE_CHECKPOINT)
    return f"TransferQueue {version('TransferQueue')} has no save_checkpoint; {INSTALL_QUEUE}" if found else ""


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
        unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [name for name, p in has.items() if p.default is p.empty and p.kind not in unnamed]
        demanded = [name for name in required if name not in item.parameters]
        if demanded and not item.instead:
            return f"now demands {', '.join(demanded)}"
    return ""


def lacks(names: tuple[Name, ...] = NAMES, mode: str | None = None) -> tuple[list[str], list[str]]:
    """What the installed verl lacks with nothing to stand in for it, and what else is done instead.

    Both are empty with the newest verl that is known. ``mode`` asks for one trainer mode; None: for any, and what concerns some
    of them only says so.
    """
    missing, instead = [], []
    for item in names:
        if mode is not None and mode not in item.modes:
            continue
        if lack := _lack(item):
            where = "" if item.modes == MODES or mode is not None else f" in {' and '.join(item.modes)}"
            if item.instead:
                instead.append(f"{item.where} {lack.partition(' (')[0]}{where}: {item.instead}")
            else:
                missing.append(f"{item.where} {lack}; needed for {item.why}{where}")
    return missing, instead


def version_of(package: str) -> str:
    """The installed version; empty: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def too_old() -> str:
    """Why the installed verl cannot work whatever its names are; empty if it is new enough, or not installed.

    Cheap: imports nothing of verl's.
    """
    have = version_of("verl")
    numbers = re.match(r"(\d+)\.(\d+)", have)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= (0, 9):
        return ""
    return (
        f"verl {have} has neither plugins (the entry points verl.plugins) nor the V1 trainer, which came with 0.9.0 and "
        f"which everything here stands on: {INSTALL} (docs/verl_versions.md)"
    )


def cure(missing: list[str]) -> str:
    """What to install where these names are missing, as :func:`lacks` says them: all may be TransferQueue's."""
    return INSTALL_QUEUE if all(text.startswith(_QUEUE) for text in missing) else INSTALL


def check_verl(mode: str, names: tuple[Name, ...] = NAMES) -> None:
    """Refuse a verl that lacks a name we use in this trainer mode.

    The AdaptiveError has each name, the versions that have it and what to install.
    """
    found, _ = lacks(names, mode)
    if found:
        runs = [other for other in MODES if not lacks(names, other)[0]]
        raise AdaptiveError(
            f"verl {version('verl')} does not fit verl-adaptive in trainer.v1.trainer_mode={mode}:\n  "
            + "\n  ".join(found)
            + (f"\nWith this verl write trainer.v1.trainer_mode={' or '.join(runs)}." if runs else "")
            + f"\nverl {' and '.join(TRIED)} have been run, others are taken as far as they have these names "
            f"(docs/verl_versions.md). Install a supported one: {cure(found)}"
        )
