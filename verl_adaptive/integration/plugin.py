"""The ``verl.plugins`` entry point: loaded in every process that imports verl, while that import is still running.

So it does next to nothing. Our trainers register when verl's own sync trainer is first imported, which happens in the
driver alone; importing verl's trainers here would cost seconds in every worker and fails in vLLM's engine core. verl
swallows a plugin's exceptions at DEBUG level, so what must be heard ends the process (``SystemExit`` is not swallowed).
"""

from __future__ import annotations

import importlib.util
import os
import sys

import wrapt

from verl_adaptive.integration import guard, sglang, vllm

#: verl imports this module in the driver only, right before it looks a trainer up.
_DRIVER_MODULE = "verl.trainer.ppo.v1.trainer_sync"


def _register_trainers(_module: object) -> None:
    from verl_adaptive.integration import register

    register.register_all()


def _asks_for_adaptive(argv: list[str]) -> bool:
    return any(arg.lstrip("+").startswith(("adaptive=", "adaptive/")) for arg in argv[1:])


def _check_search_path() -> None:
    """Without our search path Hydra takes ``+adaptive=greso`` for a plain string and training runs un-adapted."""
    for name in ("hydra_plugins.verl_adaptive", "hydra_configs.verl_adaptive.adaptive"):
        try:
            there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # a parent package is missing altogether
            there = False
        if not there:
            raise SystemExit(
                f"verl-adaptive: the command line asks for an adaptive preset, but {name} cannot be found, so Hydra would take "
                f"the preset's name for a plain string and train without it; {guard.REINSTALL}"
            )


def _refuse_misread(argv: list[str]) -> None:
    """SystemExit if a word of the command line looks like ours, and nobody would read it; our own commands find theirs."""
    wrong = "" if "verl_adaptive.cli" in sys.modules else guard.misread(argv[1:])
    if wrong:
        raise SystemExit(f"verl-adaptive: {wrong}")


if _asks_for_adaptive(sys.argv):
    _check_search_path()

_refuse_misread(sys.argv)

if guard.asks_for_cpu(sys.argv[1:]) and "verl_adaptive.cli" not in sys.modules:
    # before verl loads the next plugin, verl_cpu's, in the order of their names; Ray's processes inherit it
    os.environ["VERL_PLATFORM"] = os.environ.get("VERL_PLATFORM", "").strip() or "cpu"

wrapt.register_post_import_hook(_register_trainers, _DRIVER_MODULE)
wrapt.register_post_import_hook(sglang.keep_requests, sglang.SERVER_MODULE)
wrapt.register_post_import_hook(vllm.accept_removed_parameter, vllm.SERVER_MODULE)
guard.watch()
