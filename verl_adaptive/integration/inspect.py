"""What ``verl-adaptive doctor`` asks of verl: is the plugin alive, does a command line compose, what would it do.

Nothing here trains or changes anything. Everything raises plain exceptions; the command makes findings of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from verl_adaptive.config import check
from verl_adaptive.engine import make_engine
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration import guard
from verl_adaptive.integration.checks import check_counts
from verl_adaptive.integration.dataloader import refuse_own_numbers
from verl_adaptive.integration.facts import has_critic, identity_of
from verl_adaptive.integration.resume import resume_of
from verl_adaptive.integration.run_plan import STAND_IN, RunPlan
from verl_adaptive.simulate.worlds import WorldPrompts
from verl_adaptive.stats import warm_start
from verl_adaptive.stats.dataset import keys_of
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.text import counted

#: Bytes of training files from which they are not read: it would take minutes.
_READ = 4e9


# -- the plugin -------------------------------------------------------------------------------------------------------


def driver() -> dict[str, Any]:
    """Import verl as a driver does.

    Returns:
        ``loaded``: verl loaded the plugin by itself; ``trainer``: the class behind ``sync`` with a preset; ``verl``: version.
    """
    import verl

    loaded = guard.PLUGIN in sys.modules
    from verl.trainer.ppo.v1 import get_trainer_cls

    try:
        trainer = get_trainer_cls("sync").adaptive()
        name = f"{trainer.__module__}.{trainer.__qualname__}"
    except Exception as error:
        name = f"not registered ({error})"
    return {"loaded": loaded, "trainer": name, "verl": verl.__version__}


def ray_workers(address: str | None) -> list[dict[str, Any]]:
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
    own = {"num_cpus": 1, "include_dashboard": False} if address is None else {}
    ray.init(address=address or "local", logging_level="ERROR", log_to_driver=False, **own)
    try:
        calls = {}
        for node in ray.nodes():
            if node["Alive"]:
                here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = ray.remote(_in_worker).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
                calls[task.remote(guard.PLUGIN)] = node["NodeManagerHostname"]
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=180)
        found = []
        for call, name in calls.items():
            try:
                said = ray.get(call) if call in done else {"error": "did not answer within 180 s"}
            except ray.exceptions.RayError as error:
                said = {"error": str(error).strip().splitlines()[-1]}
            found.append({"node": name, **said})
        return found
    finally:
        ray.shutdown()


def _answers(address: str | None) -> None:
    """Refuse an address at which nobody listens; Ray itself would try for minutes, and may end the process."""
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


def validate(config: DictConfig) -> RunPlan:
    """verl's own validation and ours; the plan, in which what could not be looked at here is a note.

    ConfigError: a setting of ours; ValueError, AssertionError: one of verl's.
    """
    check_counts(config)  # verl trips over them
    plan = RunPlan.of(config)  # before verl's: what an author has to mend is not hidden by what else is missing
    remarks = validate_as_verl(config)
    _try_words(config)
    return replace(plan, notes=(*remarks, *plan.notes))


def validate_as_verl(config: DictConfig) -> list[str]:
    """verl's own validation; what was left out of it because something that the run will have is not on this machine."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config, remarks = _without_lora(config)
    reference, critic = need_reference_policy(config), has_critic(config)
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
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # as workers do, once the models are loaded
    v1 = config.trainer.v1  # as its trainers do, once Ray has started
    ReplayBuffer("sync", {}, v1.sampler.max_off_policy_threshold, v1.sampler.max_off_policy_strategy, {})
    if lends := v1.separate_async.get("hybrid_rollout"):
        omega_conf_to_dataclass(lends)
    return remarks


def _try_words(config: DictConfig) -> None:
    """Have verl take, for one token, the words that it looks up once models are loaded, or the first step has generated.

    ConfigError: it does not know one.
    """
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn, kl_penalty
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.tracking import Tracking

    actor, algorithm, one = config.actor_rollout_ref.actor, config.algorithm, torch.zeros(1, 1)
    correction = algorithm.get("rollout_correction") or {}
    asked = {name: correction.get(name) for name in ("rollout_is", "rollout_rs")}
    how = {f"{name}_threshold": correction.get(f"{name}_threshold") for name in asked}

    def log(names: Any) -> None:
        known = {*Tracking.supported_backend, "tracking"}
        if unknown := {names} - known if isinstance(names, str) else {*names} - known:
            raise ValueError(f"{', '.join(map(str, unknown))}: none of {', '.join(sorted(known))}")

    tries: tuple[tuple[str, bool, Callable[[Any], Any]], ...] = (
        ("algorithm.adv_estimator", not str(algorithm.adv_estimator).startswith("adaptive_"), get_adv_estimator_fn),
        # a library of the model's may bring a loss of its own to the workers
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            config.actor_rollout_ref.model.external_lib is None,
            get_policy_loss_fn,
        ),
        ("actor_rollout_ref.actor.kl_loss_type", actor.use_kl_loss, lambda kind: kl_penalty(one, one, kind)),
        ("algorithm.kl_penalty", algorithm.use_kl_in_reward, lambda kind: kl_penalty(one, one, kind)),
        (
            "algorithm.rollout_correction",
            any(asked.values()),
            lambda _: compute_rollout_correction_and_rejection_mask(one, one, one + 1, **asked, **how),
        ),
        ("trainer.logger", True, log),
    )
    for key, applies, attempt in tries:
        value = OmegaConf.select(config, key)
        try:
            if applies:
                attempt(value)
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise ConfigError(key, value, f"verl will not take it: {str(error) or 'it has no such word'}") from error


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


def foresee(config: DictConfig, plan: RunPlan) -> RunPlan:
    """The plan from :func:`validate` with what is on this machine: the training set, checkpoints, a warm start."""
    adaptive = plan.adaptive
    rows, table, unknown = _training_set(config, adaptive.id_key)
    prompts = None if table is None else len(table)
    notes = [f"data.train_files: {unknown}"] if unknown else []
    unseen = _unseen(config)
    if unseen:
        notes.append(f"not found here, so not looked at: {', '.join(unseen)}")
    most = int(config.data.get("train_max_samples", -1))
    if rows is not None and 0 < most < rows:
        rows, prompts = most, None if prompts is None else min(most, prompts)
    uncounted = ""
    if config.data.get("filter_overlong_prompts", False):  # to count them takes the run's tokenizer, and minutes
        uncounted = f"before verl drops prompts of more than {config.data.max_prompt_length:,} tokens"
    plan = plan.sized(rows, prompts, uncounted)
    resume, known = resume_of(config.trainer, plan)
    if adaptive.warm_start is not None and not known:
        notes.append(f"warm start, weighted {adaptive.warm_start_discount:g}: {_warm_start(plan, table)}")
    return replace(plan, notes=(*plan.notes, *notes), first_round=_first_round(plan), resume=resume)


def _first_round(plan: RunPlan) -> int:
    """Rollouts that the policy asks for first, on a stand-in for the data set."""
    prompts = max(plan.groups, min(plan.prompts or STAND_IN, STAND_IN))
    keys = np.empty(prompts, dtype=KEY_DTYPE)
    keys["hi"], keys["lo"] = np.arange(prompts), 0
    table = StatsTable()
    facts = replace(plan.facts, prompts=prompts)
    row_of, stream = table.rows_for(keys), WorldPrompts(prompts)
    first = make_engine(plan.policy, table, plan.adaptive, facts, row_of, stream, async_facts=plan.async_facts).begin(1)
    return 0 if first is None else first.rollouts


def _training_set(config: DictConfig, id_key: str | None) -> tuple[int | None, StatsTable | None, str]:
    """Rows of the training files, their different prompts as training finds them, and why one of the two is not known.

    ConfigError: no rows; a row without what prompts are identified by; too many data sources.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    key, files, table = "data.train_files", config.data.train_files, StatsTable()
    names = list(files) if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    check(all(isinstance(name, str) for name in names), key, files, "must be a file, or a list of files")
    paths = [Path(os.path.expanduser(name)) for name in names]
    if missing := [str(path) for path in paths if not path.is_file()]:
        return None, None, f"not found here: {', '.join(missing)}; numbers assume {STAND_IN:,} prompts"
    try:
        found = [pq.read_metadata(path) for path in paths]
        rows = sum(metadata.num_rows for metadata in found)
        refuse_own_numbers(name for metadata in found for name in metadata.schema.to_arrow_schema().names)
    except pa.ArrowException:  # JSON, or another format that verl reads
        rows = sum(1 for path in paths for line in path.open("rb") if line.strip())
        if rows and not all(path.suffix == ".jsonl" for path in paths):
            return None, None, f"only .parquet and .jsonl files are counted; numbers assume {STAND_IN:,} prompts"
    check(rows != 0, key, [*map(str, paths)], "has no rows; give files with one prompt a row")
    if config.data.custom_cls.path is not None:  # it may make what the files lack; a class of the user's own is not run
        return rows, None, ""
    if (size := sum(path.stat().st_size for path in paths)) > _READ:
        return rows, None, f"{size / 1e9:.0f} GB are not read; numbers take each row for a prompt of its own"
    if paths[0].suffix == ".jsonl":
        return rows, None, "of JSON lines, numbers take each row for a prompt of its own"
    try:
        for path in paths:
            keys, sources = keys_of(str(path), identity_of(config, id_key))
            table.rows_for(keys, sources=sources)
    except (AdaptiveError, ValueError) as error:
        key, value = (key, [*map(str, paths)]) if id_key is None else ("adaptive.id_key", id_key)
        raise ConfigError(key, value, str(error)) from error
    return rows, table, ""


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


def _warm_start(plan: RunPlan, table: StatsTable | None) -> str:
    """Read what ``adaptive.warm_start`` names, into the training set's prompts, if they are known; what training's log will say.

    ConfigError: it cannot be read.
    """
    source, discount = plan.adaptive.warm_start, plan.adaptive.warm_start_discount
    assert source is not None
    nobody = StatsTable()
    nobody.rows_for(np.zeros(1, dtype=KEY_DTYPE))
    try:
        found = warm_start(nobody if table is None else table, source, discount=discount, **plan.results)
        if table is not None:
            return str(found)
        return f"{counted(found.offered, 'prompt')} of {source}; how many of them are in the training set is said when the run starts"
    except (AdaptiveError, OSError, ValueError) as error:
        raise ConfigError("adaptive.warm_start", source, str(error)) from error
