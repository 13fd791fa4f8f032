"""What ``verl-adaptive doctor`` asks of verl: is the plugin alive, does a command line compose, what would it do.

Nothing here trains or changes anything. Everything raises plain exceptions; the command makes findings of them.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_adaptive.config import AdaptiveConfig, RunFacts, check, flat
from verl_adaptive.engine import Engine, make_engine
from verl_adaptive.engine.shape import StepShape, step_shape
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration import guard
from verl_adaptive.integration.composing import Command, compose, group_options, refuse_text_for_numbers
from verl_adaptive.integration.facts import (
    MODES,
    adaptive_of,
    compared_of,
    distillation_note,
    dropped_note,
    held_note,
    image_note,
    journal_place,
    mode_of,
    model_kind,
    results_of,
    updates_of,
)
from verl_adaptive.policy import Policy, build_policy
from verl_adaptive.simulate.worlds import Stream
from verl_adaptive.stats.keys import KEY_DTYPE, dataset_keys
from verl_adaptive.stats.table import StatsTable

__all__ = [
    "Command",
    "Plan",
    "compose",
    "driver",
    "group_options",
    "make_plan",
    "ray_workers",
    "refuse_text_for_numbers",
    "validate",
    "validate_as_verl",
]

#: Prompts of the stand-in data set when the real one is not at hand; and the most, since only one step is planned.
_STAND_IN = 20_000


# -- the plugin -------------------------------------------------------------------------------------------------------


def driver() -> dict[str, Any]:
    """Import verl as a driver does.

    Returns:
        ``loaded``: verl loaded the plugin by itself; ``trainer``: the class behind ``adaptive_sync``; ``verl``: version.
    """
    import verl

    loaded = guard.PLUGIN in sys.modules
    from verl.trainer.ppo.v1 import get_trainer_cls

    try:
        trainer = get_trainer_cls("adaptive_sync")
        name = f"{trainer.__module__}.{trainer.__qualname__}"
    except Exception as error:
        name = f"not registered ({error})"
    return {"loaded": loaded, "trainer": name, "verl": verl.__version__}


def ray_workers(address: str | None = None) -> list[dict[str, Any]]:
    """Import verl in a Ray worker of each node that is alive.

    Args:
        address: a running cluster's; None starts a small one here and stops it.

    Returns:
        For each node ``node`` (its name), and ``error``, or ``loaded``, ``verl``, ``package`` (version of verl-adaptive
        there) and ``python``.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    _answers(address)
    if ray.is_initialized():
        raise AdaptiveError("Ray is already running in this process")
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        options |= {"address": "local", "num_cpus": 1, "include_dashboard": False}
    else:
        options |= {"address": address}
    ray.init(**options)
    try:
        calls = {}
        for node in ray.nodes():
            if node["Alive"]:
                here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = ray.remote(_in_worker).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
                calls[task.remote(guard.PLUGIN)] = node["NodeManagerHostname"]
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=180)
        return [{"node": name, **(_result(call) if call in done else _SILENT)} for call, name in calls.items()]
    finally:
        ray.shutdown()


_SILENT = {"error": "did not answer within 180 s"}


def _result(call: Any) -> dict[str, Any]:
    import ray

    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        return {"error": str(error).strip().splitlines()[-1]}


def _answers(address: str | None) -> None:
    """Somebody listens at ``host:port``; Ray itself would try for minutes, and may end the process.

    Raises:
        AdaptiveError: nobody does.
    """
    import socket

    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # none, or a name such as `auto`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise AdaptiveError(f"nothing answers at {address}: {error}") from error


def _in_worker(plugin: str) -> dict[str, Any]:
    import sys
    from importlib.metadata import version

    import verl

    return {
        "loaded": plugin in sys.modules,
        "verl": verl.__version__,
        "package": version("verl-adaptive"),
        "python": sys.executable,
    }


# -- a command line ---------------------------------------------------------------------------------------------------


def is_lacking(program: str) -> bool:
    """Whether a program is named as a module of verl's that this verl does not have."""
    from importlib.util import find_spec

    try:
        return program.startswith("verl.") and find_spec(program) is None
    except ModuleNotFoundError:  # nor its package
        return True


def validate(config: DictConfig) -> tuple[AdaptiveConfig, Policy, str, list[str]]:
    """verl's own validation, then ours.

    Returns:
        The ``adaptive`` group, its policy, what becomes of rows of zero advantage, and what could not be looked at here.

    Raises:
        ConfigError: a setting of ours; ValueError, AssertionError: one of verl's.
    """
    from verl_adaptive.integration.checks import check_run, zero_rows

    remarks = validate_as_verl(config)
    adaptive = adaptive_of(config)
    policy = build_policy(adaptive)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_run(config, adaptive, policy)
        if policy.advantage.estimator is not None:  # as the trainer does
            with open_dict(config):
                config.algorithm.adv_estimator = policy.advantage.estimator
        return adaptive, policy, zero_rows(config, adaptive.skip_zero_advantage)[1], remarks


def validate_as_verl(config: DictConfig) -> list[str]:
    """verl's own validation; what was left out of it because something that the run will have is not on this machine."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config, remarks = _without_lora(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns each time it is asked whether there is a critic
        reference, critic = need_reference_policy(config), need_critic(config)
        try:
            # It opens the critic's model alone: one that is named as on the hub, half a minute at a time without a network.
            with _no_wait_for_the_hub() if critic else nullcontext():
                validate_config(config, use_reference_policy=reference, use_critic=critic)
        except InstantiationException as error:
            # Of all models only the critic's is opened before the workers start. Training may run where it can be.
            if not (critic and isinstance(error.__cause__, OSError)):
                raise
            validate_config(config, use_reference_policy=reference, use_critic=False)
            name = config.critic.model.path
            remarks.append(
                f"critic.model.path={name}: cannot be opened here, so verl's own check of the critic was left out"
            )
    return remarks


@contextmanager
def _no_wait_for_the_hub() -> Iterator[None]:
    """Where Hugging Face's hub cannot be reached, models are looked for in its cache alone, as ``HF_HUB_OFFLINE=1`` does."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    was, hub = constants.HF_HUB_OFFLINE, urlsplit(constants.ENDPOINT)
    if not was and not getproxies():  # a proxy has its own ways
        try:
            socket.create_connection((hub.hostname or "", hub.port or 443), timeout=5).close()
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was


def _without_lora(config: DictConfig) -> tuple[DictConfig, list[str]]:
    """The configuration without its adapter where verl could not check that: it imports vLLM for the ranks that vLLM takes."""
    model = config.actor_rollout_ref.model
    rank = model.lora.rank if model.lora.rank > 0 else model.lora_rank
    if rank <= 0 or model.lora.get("merge", False) or config.actor_rollout_ref.rollout.name != "vllm":
        return config, []
    try:
        import verl.workers.rollout.vllm_rollout.utils  # noqa: F401
    except Exception as error:  # a login node may have no vLLM, or one that finds no driver
        config = config.copy()
        config.actor_rollout_ref.model.lora.rank = config.actor_rollout_ref.model.lora_rank = 0
        why = f"{type(error).__name__}: {error}"
        key = "lora.rank" if model.lora.rank > 0 else "lora_rank"
        return config, [
            f"actor_rollout_ref.model.{key}={rank}: vLLM cannot be imported here ({why}), so verl's own check of it was left out"
        ]
    return config, []


@dataclass
class Plan:
    """What a command line would do.

    Attributes:
        preset: ``adaptive.name``.
        mode: verl's trainer mode, whatever our names for it: ``sync``, ``colocate_async`` or ``separate_async``.
        schedule: what the mode means for this run.
        parts: role → part → options that differ from the part's defaults.
        groups, n: groups and rollouts a group that a step trains on.
        updates: optimizer updates a step, epochs of PPO included.
        first_round: rollouts of the very first generation round.
        cap: most rollouts of that step; None: no ceiling but ``max_rounds``.
        refill: further prompts are drawn until the batch is full.
        steps: planned steps; None: not known here.
        prompts: rows of the training set; None: not known here.
        uncounted: what verl will still do to them, so that prompts and steps may be fewer.
        total_rollouts: ``adaptive.total_rollouts``.
        keeps_all: every group trains, so that none is drawn in the place of another.
        zero_rows: what becomes of rows of zero advantage.
        store: the journal's folder, or why there is none.
        store_path: that folder.
        resume: what the run would start from.
        notes: what a user should know.
    """

    preset: str
    mode: str
    schedule: str
    parts: dict[str, dict[str, Any]]
    groups: int
    n: int
    updates: int
    first_round: int
    cap: int | None
    refill: bool
    steps: int | None
    prompts: int | None
    uncounted: str
    total_rollouts: int | None
    keeps_all: bool
    zero_rows: str
    store: str
    store_path: str | None
    resume: str
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    config: DictConfig, adaptive: AdaptiveConfig, policy: Policy, zero_rows: str, remarks: Sequence[str] = ()
) -> Plan:
    """Work out budget, updates, store and resume behaviour.

    Args:
        config: composed and valid.
        adaptive, policy, zero_rows, remarks: from :func:`validate`.
    """
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    batch = int(config.data.train_batch_size)
    mode, schedule = _mode(config, policy)
    notes = list(remarks)
    prompts, missing = _prompts(config.data.train_files)
    if missing:
        notes.append(f"data.train_files: not found here: {', '.join(missing)}; numbers assume {_STAND_IN:,} prompts")
    if adaptive.id_key is not None and prompts is not None:
        _check_ids(config, adaptive.id_key)
    unseen = _unseen(config)
    if unseen:
        notes.append(f"not found here, so not looked at: {', '.join(unseen)}")
    most = int(config.data.get("train_max_samples", None) or -1)
    if prompts is not None and 0 < most < prompts:
        prompts = most
    steps = trainer.get("total_training_steps")
    if prompts is not None:
        by_epochs = trainer.total_epochs * (prompts // batch)
        if steps is not None and by_epochs < steps:
            notes.append(
                f"trainer.total_epochs={trainer.total_epochs}: verl stops after {by_epochs:,} steps, before "
                f"trainer.total_training_steps={steps:,}, and saves and validates no last step"
            )
        steps = by_epochs if steps is None else min(steps, by_epochs)
    if prompts is not None and prompts < batch:
        raise AdaptiveError(
            f"data.train_batch_size={batch}: the training set has only {prompts} prompts; use at most that"
        )
    ahead = 0.0 if mode == "sync" else float(config.trainer.v1[mode].get("num_warmup_batches", 0))
    shape = step_shape(adaptive, batch, int(rollout.n), prompts or _STAND_IN, ahead)
    if shape.note:
        notes.append(shape.note)
    engine = _first_step(shape, steps or 1000, max(shape.groups, min(prompts or _STAND_IN, _STAND_IN)))
    first = engine.begin(1)
    said = (
        dropped_note(config, policy),
        image_note(config, model_kind(config)),
        distillation_note(config),
    )
    notes += [note for note in said if note]
    if adaptive.warm_start is not None:
        known = _warm_start(config, adaptive)
        notes.append(
            f"starts with the statistics of {adaptive.warm_start} ({known:,} prompts there), weighted "
            f"{adaptive.warm_start_discount:g}; how many of them are in the training set is said when the run starts"
        )
    place = journal_place(config, adaptive)
    return Plan(
        preset=adaptive.name,
        mode=mode,
        schedule=schedule,
        parts={part.role: {part.name: _changed(part)} for part in policy},
        groups=shape.groups,
        n=shape.n,
        updates=updates_of(config),
        first_round=0 if first is None else first.rollouts,
        cap=engine.progress.cap,
        refill=adaptive.refill,
        steps=None if steps is None else int(steps),
        prompts=prompts,
        uncounted="" if prompts is None else _uncounted(config),
        total_rollouts=adaptive.total_rollouts,
        keeps_all=policy.filter.keeps_all,
        zero_rows=zero_rows,
        store=place.folder or f"none ({place.why_none}); statistics live in the checkpoints",
        store_path=place.folder,
        resume=_resume(config, adaptive, policy),
        notes=notes,
    )


def _mode(config: DictConfig, policy: Policy) -> tuple[str, str]:
    """The trainer mode, and what it means for the run; what verl asserts of it only when workers start is checked here.

    Raises:
        ConfigError: a setting that verl's trainer of this mode refuses.
    """
    v1, rollout = config.trainer.v1, config.actor_rollout_ref.rollout
    mode = mode_of(config)
    check(mode in MODES, "trainer.v1.trainer_mode", v1.trainer_mode, f"verl has {', '.join(MODES)}")
    if mode == "sync":
        trains = "every rollout trains under the weights that made it"
        if held_note(policy):
            trains = "groups held from the step before train with their first rollouts of then: off-policy by a step"
        return mode, f"generation and training take turns; {trains}"
    ahead = v1[mode].num_warmup_batches
    warmup = f"{ahead:g} warm-up batch{'' if ahead == 1 else 'es'}"
    if mode == "colocate_async":
        return mode, f"generation and training take turns on the same devices, {warmup} ahead"
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
        hint = "separate_async generates on devices of its own: say how many"
        check(bool(value) and value > 0, f"actor_rollout_ref.rollout.{name}", value, hint)
    backend = rollout.checkpoint_engine.backend
    hint = "separate_async sends weights between processes: choose nccl, hccl, nixl or mooncake"
    check(backend != "naive", "actor_rollout_ref.rollout.checkpoint_engine.backend", backend, hint)
    where = f"{rollout.nnodes}x{rollout.n_gpus_per_node} devices generate while others train"
    return mode, f"{where}; new weights after every {sync} minibatches, {warmup} ahead"


def _first_step(shape: StepShape, steps: int, prompts: int) -> Engine:
    """An engine in front of its first step, on a stand-in for the data set."""
    keys = np.empty(prompts, dtype=KEY_DTYPE)
    keys["hi"], keys["lo"] = np.arange(prompts), 0
    table = StatsTable()
    row_of = table.rows_for(keys)
    adaptive = shape.config
    facts = RunFacts.of(adaptive, batch=shape.groups, n=shape.n, steps=steps, prompts=prompts)
    return make_engine(build_policy(adaptive), table, adaptive, facts, row_of, Stream(prompts, shuffle=False))


def _changed(part: Any) -> dict[str, Any]:
    """Options that are not the part's defaults, by their dotted names."""
    default, given = flat(asdict(type(part)().config)), flat(asdict(part.config))
    return {key: given[key] for key in given if given[key] != default.get(key)}


def _paths(files: Any) -> list[Path]:
    names = [files] if isinstance(files, str) else list(files or [])
    return [Path(os.path.expanduser(name)) for name in names]


def _prompts(files: Any) -> tuple[int | None, list[str]]:
    """Rows of the training files, if all are here; and those that are not.

    Raises:
        ConfigError: they have no rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = _paths(files)
    missing = [str(p) for p in paths if not p.is_file()]
    if missing or not paths:
        return None, missing or ["(none given)"]
    try:
        prompts = sum(pq.read_metadata(p).num_rows for p in paths)
    except pa.ArrowException:  # JSON, or another format that verl reads
        prompts = None if any(p.stat().st_size for p in paths) else 0
    check(prompts != 0, "data.train_files", [str(p) for p in paths], "has no rows; give files with one prompt a row")
    return prompts, []


def _check_ids(config: DictConfig, id_key: str) -> None:
    """The first row of each training file has what ``adaptive.id_key`` names; a data set class of the user's own is not run.

    Raises:
        ConfigError: with what the row does have.
    """
    import pyarrow.parquet as pq

    if config.data.custom_cls.path is not None:
        return
    for path in _paths(config.data.train_files):
        with pq.ParquetFile(path) as file:
            rows = next(file.iter_batches(batch_size=1)).to_pylist() if file.metadata.num_rows else []
        try:
            dataset_keys(rows, id_key=id_key)
        except (TypeError, ValueError) as error:
            raise ConfigError("adaptive.id_key", id_key, f"{path}: {error}") from error


def _uncounted(config: DictConfig) -> str:
    """What verl leaves out when it reads the training set: to count it takes the run's tokenizer, and minutes."""
    if not config.data.get("filter_overlong_prompts", False):
        return ""
    return f"before verl drops prompts of more than {config.data.max_prompt_length:,} tokens"


def _unseen(config: DictConfig) -> list[str]:
    """Files and folders of this machine, by their looks, that the run reads and that are not here; the training set apart."""
    keys = ("data.val_files", "actor_rollout_ref.model.path", "reward.custom_reward_function.path")
    found = []
    for key in keys:
        value = OmegaConf.select(config, key)
        for name in [value] if isinstance(value, str) else list(value or []):
            if str(name).startswith(("/", "~", "./", "../")) and not os.path.exists(os.path.expanduser(str(name))):
                found.append(f"{key}={name}")
    return found


def _warm_start(config: DictConfig, adaptive: AdaptiveConfig) -> int:
    """Read what ``adaptive.warm_start`` names, into nothing; the prompts that it has evidence for.

    Raises:
        ConfigError: it cannot be read.
    """
    from verl_adaptive.stats import warm_start

    assert adaptive.warm_start is not None
    nobody = StatsTable()
    nobody.rows_for(np.zeros(1, dtype=KEY_DTYPE))
    try:
        report = warm_start(
            nobody,
            adaptive.warm_start,
            discount=adaptive.warm_start_discount,
            **results_of(config, adaptive),
        )
    except (AdaptiveError, OSError, ValueError) as error:
        raise ConfigError("adaptive.warm_start", adaptive.warm_start, str(error)) from error
    return report.offered


def _resume(config: DictConfig, adaptive: AdaptiveConfig, policy: Policy) -> str:
    """What verl's ``resume_mode`` leads to, and which statistics would be read."""
    from verl_adaptive.integration.resume import ALLOW, differences, settings_of
    from verl_adaptive.stats.snapshot import SnapshotMissing, read_manifest

    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return "starts at step 0 (trainer.resume_mode=disable)"
    if trainer.resume_mode == "resume_path":
        folder = Path(str(trainer.resume_from_path))
        if not folder.is_dir():
            raise AdaptiveError(f"trainer.resume_from_path={folder}: there is no such checkpoint")
    else:
        root = Path(os.path.abspath(trainer.default_local_dir))
        marker = root / "latest_checkpointed_iteration.txt"
        if not marker.is_file():
            return f"starts at step 0: no checkpoint in {root}"
        folder = root / f"global_step_{marker.read_text().strip()}"
    try:
        meta = read_manifest(folder / "adaptive").get("meta", {})
    except SnapshotMissing:
        return f"resumes {folder}, which has no statistics: they start empty"
    known = f"resumes {folder} with its statistics (step {meta.get('step')}, {meta.get('policy')})"
    if meta.get("policy_digest") not in (None, policy.digest()) and "policy" not in adaptive.resume.allow:
        raise AdaptiveError(
            f"{folder} was written under another policy or other options ({meta.get('policy')}): training would refuse to "
            "resume. Start elsewhere with trainer.default_local_dir, or accept it with adaptive.resume.allow=[policy]"
        )
    batch, n = int(config.data.train_batch_size), int(config.actor_rollout_ref.rollout.n)
    hard, soft = differences(meta.get("settings"), settings_of(adaptive, batch=batch, n=n, run=compared_of(config)))
    if hard and ALLOW not in adaptive.resume.allow:
        raise AdaptiveError(
            f"{folder} was written under other settings ({'; '.join(hard)}): training would refuse to resume. Set them back, "
            f"start elsewhere with trainer.default_local_dir, or accept it with adaptive.resume.allow=[{ALLOW}]"
        )
    return "; ".join([known, *hard, *soft])
