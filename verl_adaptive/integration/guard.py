"""A preset that nobody would read is refused: verl can be started in ways that know nothing of this package.

verl composes the same configuration for several programs, and ``+adaptive=greso`` composes in all of them. Only
``main_ppo`` with ``trainer.use_v1=true`` makes our trainers; the others would train, plainly, under a preset's name.
Three looks, from the earliest to the last:

* :class:`Guard`, a Hydra callback that every preset brings along: in the driver, before Ray starts;
* :func:`watch`, import hooks on what the other programs train with: in the process that would train, however its
  configuration came about;
* verl's own V1 base class (:func:`~verl_adaptive.integration.register.register_all`).

Cheap to import: verl is still importing when the plugin calls :func:`watch`, in every process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from verl_adaptive.errors import AdaptiveError

__all__ = ["MAIN", "PLUGIN", "PROGRAMS", "Guard", "program_of", "refuse_other", "unread", "watch"]

PLUGIN = "verl_adaptive.integration.plugin"

#: The one program that makes our trainers.
MAIN = "verl.trainer.main_ppo"

_ASYNC = f"python -m {MAIN} trainer.v1.trainer_mode=separate_async"
_PLAIN = "leave +adaptive=… out"

#: verl's programs that compose a configuration, and what to write instead of each; empty: ours.
PROGRAMS: dict[str, str] = {
    MAIN: "",
    "verl.trainer.main_ppo_v0": f"take python -m {MAIN}",
    "verl.experimental.fully_async_policy.fully_async_main": f"take {_ASYNC} (docs/async.md), or {_PLAIN}",
    "verl.experimental.one_step_off_policy.main_ppo": f"take {_ASYNC} or trainer.v1.trainer_mode=colocate_async "
    f"(docs/async.md), or {_PLAIN}",
    "verl.trainer.sft_trainer": f"presets are for GRPO and PPO: {_PLAIN}",
    "verl.trainer.sft_trainer_ray": f"presets are for GRPO and PPO: {_PLAIN}",
    "verl.trainer.main_generation_server": f"it only generates: {_PLAIN}",
    "verl.trainer.main_eval": f"it only scores: {_PLAIN}",
}


def program_of(word: str) -> str | None:
    """The module of verl's that a word of a command line or a file's path names; None if it is none of them."""
    if word in PROGRAMS:
        return word
    parts = PurePath(word).with_suffix("").parts if word.endswith(".py") else ()
    return next((name for name in PROGRAMS if parts[-name.count(".") - 1 :] == tuple(name.split("."))), None)


def unread(config: Any, program: str | None) -> str:
    """Why the program would run without the preset that its configuration names; empty if all is well.

    Args:
        config: verl's configuration.
        program: one of :data:`PROGRAMS`, or None for another's, which is judged when it makes a trainer.
    """
    if config.get("adaptive") is None or program is None:
        return ""
    if PROGRAMS[program]:
        return (
            f"{program} knows nothing of presets and would run plainly, as if none had been named; {PROGRAMS[program]}"
        )
    if not config.trainer.get("use_v1", True):
        return (
            "trainer.use_v1=False: verl's legacy trainer knows nothing of presets and would train plain GRPO or PPO; "
            f"leave trainer.use_v1 out (true is verl's default), or {_PLAIN}"
        )
    return ""


class Guard:
    """Hydra's callback in every preset (``hydra.callbacks.verl_adaptive``).

    Hydra turns a callback's exceptions into warnings, but not ``SystemExit``.
    """

    def on_job_start(self, config: Any, *, task_function: Callable[..., Any], **_: Any) -> None:
        """The application is about to run.

        Raises:
            SystemExit: it would run as if no preset had been named.
        """
        from verl_adaptive.integration.compat import too_old

        old = too_old() if config.get("adaptive") is not None else ""
        if old:
            raise SystemExit(f"verl-adaptive: {_named(config)}: {old}")
        code = getattr(task_function, "__code__", None)
        program = program_of(code.co_filename) if code is not None else None
        reason = unread(config, program)
        if not reason and program == MAIN and PLUGIN not in sys.modules:
            reason = (
                "verl did not load the plugin in this process, so no trainer would read the preset; unset "
                "VERL_USE_EXTERNAL_PLUGINS, or add `adaptive` to it (`verl-adaptive doctor` shows more)"
            )
        if reason:
            raise SystemExit(f"verl-adaptive: {_named(config)}: {reason}")

    def _nothing(self, **_: Any) -> None:
        """Hydra calls every event of every callback."""

    on_run_start = on_run_end = on_multirun_start = on_multirun_end = on_job_end = on_compose_config = _nothing


def refuse_other(config: Any, trainer: str) -> None:
    """Refuse a preset in front of a trainer that is not ours.

    Args:
        config: what the trainer is made with.
        trainer: its name, for the message.

    Raises:
        AdaptiveError: the configuration asks for a preset.
    """
    get = getattr(config, "get", None)
    if get is not None and get("adaptive") is not None:
        raise AdaptiveError(
            f"{_named(config)}: {trainer} knows nothing of presets and would train as if none had been named; take "
            f"python -m {MAIN} with trainer.v1.trainer_mode=sync, colocate_async or separate_async, or {_PLAIN}"
        )


def watch() -> None:
    """Refuse presets where verl's other trainers are made, whoever composed the configuration."""
    import wrapt

    @wrapt.when_imported("verl.trainer.ppo.ray_trainer")
    def _legacy(module: Any) -> None:  # every legacy trainer of verl's and of its recipes is one of these
        trainer = getattr(module, "RayPPOTrainer", None)
        if trainer is None:  # a later verl has done with it
            return
        real = trainer.__init__

        @functools.wraps(real)
        def guarded(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            refuse_other(config, type(self).__name__)
            real(self, config, *args, **kwargs)

        trainer.__init__ = guarded

    @wrapt.when_imported("verl.experimental.separation.utils")
    def _separate(module: Any) -> None:  # fully_async_policy's trainers never call that __init__, but this first
        real = getattr(module, "create_role_worker_mapping", None)
        if real is None:
            return

        @functools.wraps(real)
        def guarded(config: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_other(config, "verl.experimental")
            return real(config, *args, **kwargs)

        module.create_role_worker_mapping = guarded


def _named(config: Any) -> str:
    preset = config.get("adaptive")
    return f"+adaptive={preset if isinstance(preset, str) else preset.get('name', 'custom')}"
