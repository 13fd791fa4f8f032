"""The platform class: what verl asks of ``torch.cuda``, answered for a CPU."""

from __future__ import annotations

import os
import resource
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux


def _nothing(*_: Any, **__: Any) -> None:
    """What verl asks and a CPU has nothing to do for: there is one device, which is done when it returns, without a caching
    allocator, IPC handles, a limit on memory, a peak that could be reset, or a profiler of its own."""


class CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` plus the names that verl uses from ``torch.cuda``.

    Memory is this process's resident set, so that verl's ``perf/max_memory_*`` metrics mean something.
    """

    def __init__(self) -> None:
        super().__init__("verl_cpu.device_module")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    empty_cache = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = _nothing

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, device: Any = None) -> int:
        import psutil

        return psutil.Process().memory_info().rss

    def max_memory_allocated(self, device: Any = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total


class PlatformCPU(PlatformBase):
    """A CPU that plays the part of one accelerator per Ray "GPU" slot."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDeviceModule()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Never auto-detected: a GPU machine whose driver is broken must not train on CPU unasked.
        return False

    def current_device(self) -> torch.device:
        # An index would mean "the n-th accelerator" to torch; a device is accepted wherever verl passes this on.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for a "GPU" slot; nothing on CPU reads it

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        # Pretend slots, from `ray_kwargs.ray_init.num_gpus`: verl's placement groups ask for accelerators, and a
        # custom resource would have to be declared at `ray.init`, where verl's config does not reach.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights go to vLLM through shared memory

    def rollout_env_vars(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("VLLM_CPU_")}

    def cudart(self) -> None:
        return None


def register() -> None:
    """Add the platform to verl's registry."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
