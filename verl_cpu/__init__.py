"""verl's whole pipeline on a machine without a GPU: ``VERL_PLATFORM=cpu``.

verl has a platform registry but no CPU platform. :func:`register` adds one, for unmodified verl 0.9, together with the
few fixes that FSDP2 on gloo and vLLM's CPU build need (``fixes.py`` lists them with their reasons). It is for tests,
tutorials and debugging of the control flow; it says nothing about GPU throughput.

Nothing here runs unless the user asked for it: the CPU platform is never auto-detected, and importing this package
changes nothing and imports neither torch nor verl.
"""

from __future__ import annotations

import os
import sys
import traceback

PLATFORM_VARIABLE = "VERL_PLATFORM"

#: Set in the driver before Ray starts, so that every process of a local Ray cluster inherits them. A value that the
#: user has set wins. On a cluster started beforehand with ``ray start``, export them (and VERL_PLATFORM) there.
ENVIRONMENT_DEFAULTS: dict[str, str] = {
    # Dynamo would spend 20 s compiling C++ at the first generation and the first update; models here are tiny.
    "TORCHDYNAMO_DISABLE": "1",
    # TransferQueue asks for 8 threads on every access and warns when there are fewer cores: hundreds of lines in a step.
    "TQ_NUM_THREADS": "1",
    # GiB of KV cache. Unset, vLLM takes a share of the machine's memory, for each replica.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Every worker of Ray 2.60 starts a thread each 10 s to export Ray's own metrics. Such threads have crashed workers:
    # they read the environment while another thread writes it (ray-project/ray#61281, merged; #62028, closed). A worker
    # that died in a thread of that kind, once, is why this is here. Nobody reads those metrics here, so: once a day.
    "RAY_metrics_report_interval_ms": str(24 * 60 * 60 * 1000),
    # Seconds. The first worker waits until the process that it is forked from has imported verl (see worker.py): on a busy
    # machine longer than Ray's minute, after which it would start another in its place.
    "RAY_worker_register_timeout_seconds": "600",
}

VLLM_PLUGIN_GROUP = "vllm.general_plugins"
VLLM_PLUGIN_TARGET = "verl_cpu.vllm_plugin:register"

_registered = False


def requested() -> bool:
    """Whether the user asked for the CPU platform."""
    return os.environ.get(PLATFORM_VARIABLE, "").strip().lower() == "cpu"


def register() -> None:
    """Make verl run on CPU in this process. Does nothing unless ``VERL_PLATFORM=cpu``; safe to call twice.

    Called by the ``verl.plugins`` entry point while ``import verl`` is still running, in every process.

    Raises:
        SystemExit: If the platform was asked for and cannot be set up. verl logs a plugin's exceptions at DEBUG level
            only and would go on to fail with "Unknown platform 'cpu'", or, worse, hang at the first weight sync.
    """
    global _registered
    if _registered or not requested():
        return
    try:
        for name, value in ENVIRONMENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        _check_vllm_plugin()

        from verl_cpu import fixes, platform

        platform.register()
        fixes.apply()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        print(
            f"verl-cpu: {PLATFORM_VARIABLE}=cpu was asked for, but the CPU platform could not be set up: "
            f"{type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1) from None  # an Exception would be swallowed; the traceback is printed already
    _registered = True


def _check_vllm_plugin() -> None:
    """Refuse to start where vLLM would not load our plugin: the first weight sync would hang for ever."""
    from importlib.metadata import entry_points

    names = {point.name for point in entry_points(group=VLLM_PLUGIN_GROUP) if point.value == VLLM_PLUGIN_TARGET}
    if not names:
        raise RuntimeError(
            f"the entry point '{VLLM_PLUGIN_TARGET}' is not installed, so vLLM could not reload its weights. Install "
            "verl-adaptive with pip (`pip install -e .` in a checkout) instead of putting it on PYTHONPATH, and install "
            "it again if it was installed before this entry point existed."
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and names.isdisjoint(name.strip() for name in allowed.split(",")):
        raise RuntimeError(f"VLLM_PLUGINS={allowed!r} leaves out {min(names)!r}, needed to reload vLLM's weights")
