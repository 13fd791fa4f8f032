"""A preset that nobody would read is refused: verl can be started in ways that know nothing of this package.

verl composes the same configuration for several programs, and ``+adaptive=greso`` composes in all of them. Only
``main_ppo`` with ``trainer.use_v1=true`` makes our trainers; the others would train, plainly, under a preset's name.
Three looks, from the earliest to the last:

* :class:`Guard`, a Hydra callback of verl's programs and of every preset: in the driver, before Ray starts;
* :func:`watch`, import hooks on what the other programs train with: in the process that would train, however its
  configuration came about;
* verl's own V1 base class (:mod:`~verl_adaptive.integration.register`); and, where this plugin was not loaded, the replay buffer
  that every preset names (:class:`~verl_adaptive.integration.replay_buffer.AdaptiveReplayBuffer`).

Cheap to import: verl is still importing when the plugin calls :func:`watch`, in every process.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import PurePath
from typing import Any

from verl_adaptive.errors import AdaptiveError

_log = logging.getLogger(__name__)

PLUGIN = "verl_adaptive.integration.plugin"
#: How verl gets to know it.
REINSTALL = (
    "install verl-adaptive again in this environment: pip install --force-reinstall --no-deps <its clone or wheel>"
)

#: The one program that makes our trainers.
MAIN = "verl.trainer.main_ppo"

#: What Hydra knows below ``adaptive/``: the parts, and what a machine needs.
GROUPS = ("sampler", "allocator", "filter", "advantage", "platform")

#: Lets a preset through in a program that is none of verl's.
ANY_PROGRAM = "hydra.callbacks.verl_adaptive.any_program=true"

_ASYNC = f"python -m {MAIN} trainer.v1.trainer_mode=separate_async"
_PLAIN = "leave +adaptive=… out"

#: verl's programs that compose a configuration, and what to write instead of each; empty: ours.
PROGRAMS: dict[str, str] = {
    MAIN: "",
    "verl.trainer.main_ppo_v0": f"take python -m {MAIN}",
    "verl.experimental.fully_async_policy.fully_async_main": f"take {_ASYNC} (docs/order.md#asynchronous-trainers), or {_PLAIN}",
    "verl.experimental.one_step_off_policy.main_ppo": f"take {_ASYNC} or trainer.v1.trainer_mode=colocate_async "
    f"(docs/order.md#asynchronous-trainers), or {_PLAIN}",
    "verl.trainer.sft_trainer": f"presets are for GRPO and PPO: {_PLAIN}",
    "verl.trainer.sft_trainer_ray": f"presets are for GRPO and PPO: {_PLAIN}",
    "verl.trainer.main_generation_server": f"it only generates: {_PLAIN}",
    "verl.trainer.main_eval": f"it only scores: {_PLAIN}",
}


def asks_for_cpu(words: Iterable[str]) -> bool:
    """Whether the line has ``+adaptive/platform=cpu`` or another of the CPU's."""
    return any(re.fullmatch(r"\+?adaptive/platform(@_global_)?=cpu\w*", word) for word in words)


def program_of(word: str) -> str | None:
    """The module of verl's that a word of a command line or a file's path names; None if it is none of them."""
    if word in PROGRAMS:
        return word
    parts = PurePath(word).with_suffix("").parts if word.endswith(".py") else ()
    return next((name for name in PROGRAMS if parts[-name.count(".") - 1 :] == tuple(name.split("."))), None)


def is_preset(name: object) -> bool:
    """Whether a file of this package has that name; imports nothing but the folder's package."""
    spec = importlib.util.find_spec("hydra_configs.verl_adaptive.adaptive") if isinstance(name, str) else None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return any(os.path.isfile(os.path.join(folder, f"{name}.yaml")) for folder in folders)


def unread(config: Any, program: str | None, *, any_program: bool = False) -> str:
    """Why the program would run without the preset that its configuration names; empty if all is well.

    ``program`` is one of :data:`PROGRAMS`, or None: another's, which makes verl's V1 trainers if its user says so
    (``any_program``).
    """
    if config.get("adaptive") is None:
        return ""
    if program is None:
        return (
            ""
            if any_program
            else f"only python -m {MAIN} is known to read presets, and another program may train plainly, as if none had "
            f"been named; take {MAIN}, or {_PLAIN}. A program of your own that makes verl's V1 trainers: {ANY_PROGRAM}"
        )
    if PROGRAMS[program]:
        return (
            f"{program} knows nothing of presets and would run plainly, as if none had been named; {PROGRAMS[program]}"
        )
    if not config.trainer.get("use_v1", True):
        return (
            "trainer.use_v1=False: verl's legacy trainer knows nothing of presets and would train plain GRPO or PPO; "
            f"{_use_v1()}, or {_PLAIN}"
        )
    return ""


def _use_v1() -> str:
    """What to write instead of ``trainer.use_v1=false``; verl's branch ``neo`` has that by default, and refuses ``true``."""
    from omegaconf import OmegaConf

    text = importlib.resources.files("verl.trainer.config").joinpath("ppo_trainer.yaml").read_text()
    if OmegaConf.select(OmegaConf.create(text), "trainer.use_v1"):
        return "leave trainer.use_v1 out (true is verl's default)"
    return "this verl has no V1 trainers: take verl 0.9.1 (docs/verl_versions.md#where-verl-is-going)"


def not_loaded() -> tuple[str, str] | None:
    """Why verl will not load the plugin in this environment, and what to do; None: it will, or the import fails."""
    points = [p.name for p in entry_points(group="verl.plugins") if p.value.partition(":")[0] == PLUGIN]
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if not points:
        return "verl loads what is installed, and verl-adaptive is only importable here", REINSTALL
    if policy == "auto" or points[0] in {p.strip() for p in policy.split(",")}:
        return None
    fix = f"unset VERL_USE_EXTERNAL_PLUGINS, or add {points[0]} to it"
    return f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading it", fix


def other_plugins() -> str:
    """``VERL_USE_EXTERNAL_PLUGINS`` for verl without this one: a platform may be a plugin, too."""
    return ",".join(p.name for p in entry_points(group="verl.plugins") if p.value.partition(":")[0] != PLUGIN) or "none"


class Guard:
    """Hydra's callback in verl's programs and in every preset (``hydra.callbacks.verl_adaptive``).

    Hydra turns a callback's exceptions into warnings, but not ``SystemExit``. ``any_program`` lets a preset through in a program
    that is none of verl's.
    """

    def __init__(self, any_program: bool = False) -> None:
        self.any_program = any_program

    def on_job_start(self, config: Any, *, task_function: Callable[..., Any], **_: Any) -> None:
        """The application is about to run: SystemExit where it would run as if no preset had been named."""
        code = getattr(task_function, "__code__", None)
        program = program_of(code.co_filename) if code is not None else None
        chosen = dict(config.get("hydra", {}).get("runtime", {}).get("choices", {}))
        misplaced = _misplaced(chosen)
        if misplaced:
            raise SystemExit(f"verl-adaptive: {misplaced}")
        asks = config.get("adaptive")
        if asks is None or (program is None and "adaptive" not in chosen and not is_preset(asks)):
            return  # plain verl, or another's key of that name in a program of theirs
        from verl_adaptive.integration.compat import too_old

        reason = too_old() or unread(config, program, any_program=self.any_program) or _lacks_platform(config)
        if not reason and not hasattr(asks, "items"):
            reason = not_a_preset(asks)
        if not reason and PLUGIN not in sys.modules:
            why, fix = not_loaded() or ("its import failed", f"`python -c 'import {PLUGIN}'` shows why")
            reason = f"verl did not load the plugin, so no trainer would read the preset: {why}; {fix}"
        if reason:
            raise SystemExit(f"verl-adaptive: {_named(config)}: {reason}")
        if program is None:
            _log.warning(
                "verl-adaptive: %s: %s lets the preset through in a program that is none of verl's; the banner at the "
                "start of training says that it is read",
                _named(config),
                ANY_PROGRAM,
            )

    def _nothing(self, **_: Any) -> None:
        """Hydra calls every event of every callback."""

    on_run_start = on_run_end = on_multirun_start = on_multirun_end = on_job_end = on_compose_config = _nothing


def _lacks_platform(config: Any) -> str:
    """A platform that is chosen in a file is known too late for verl, which picks one when it is imported."""
    device = config.get("trainer", {}).get("device") if hasattr(config.get("adaptive"), "get") else None
    if device == "cpu" and os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return "trainer.device=cpu needs VERL_PLATFORM=cpu in the environment, or +adaptive/platform=cpu on the command line"
    return ""


def not_a_preset(value: object) -> str:
    """What to write instead of a plain value at ``adaptive``."""
    if is_preset(value):
        return (
            f"this is a plain value, not a preset; write +adaptive={value} on the command line, or `- adaptive: {value}` in "
            "the defaults list of your YAML"
        )
    return "must be a preset: write +adaptive=solo or another; `verl-adaptive parts` lists them"


def _misplaced(chosen: Mapping[str, Any]) -> str:
    """A preset or part that stands below another key (``+adaptive@x=solo``), where nobody reads it."""
    for group, name in chosen.items():
        path, at, package = group.partition("@")
        first, _, role = path.partition("/")
        if first == "adaptive" and at and package not in ("_global_", f"adaptive.{role}"):
            return f"+{group}={name}: it has no effect below {package}; write +{path}={name}"
    return ""


def misread(words: Iterable[str]) -> str:
    """The first override that Hydra takes and nobody reads, with what to write instead; empty if there is none.

    Hydra adds any key that begins with a plus sign: ``+adaptve=greso``, ``+adaptive_seed=1`` and ``+adaptive/seed=1`` would change
    nothing. ``+adaptive=greso +adaptive/sampler=cero`` it refuses with advice for a YAML file, so it is answered here too.
    """
    words = list(words)
    preset = any(re.match(r"\+*adaptive[.=/]", word) for word in words)
    preset_chosen = any(re.match(r"\+*adaptive=", word) for word in words)
    for word in words:
        found = re.match(r"(\+*)([^=.@/]+)([^=]*)=(.*)$", word)
        if found is None:
            continue
        plus, name, rest, value = found.groups()
        if name == "adaptive":
            if not rest and (value.lower() in ("true", "false", "null", "none", "") or value.isdigit()):
                return f"{word}: {not_a_preset(value)}"
            if misplaced := _misplaced({f"adaptive{rest}": value}):
                return misplaced
            group = re.match(r"/([^/@]*)", rest)
            if plus and group and group[1] != "platform":
                near = difflib.get_close_matches(group[1], GROUPS, n=1, cutoff=0.75)
                meant = _choice(near[0], value) if near else f"adaptive.{group[1]}={value}"
                if group[1] not in GROUPS:
                    return f"{word}: there is no adaptive/{group[1]}; did you mean {meant}?"
                if preset_chosen:
                    return f"{word}: the preset has a {group[1]} already; write {meant}, without the +"
        elif plus and (meant := _meant(name, rest, value, preset)):
            return f"{word}: there is no {name}; did you mean {meant}?"
    return ""


def _meant(name: str, rest: str, value: str, preset: bool) -> str:
    """What a key that is nobody's was meant to be; empty: it may be the user's own.

    Of ``+adaptve.seed=1`` the arguments are ``adaptve``, ``.seed`` and ``1``. With a preset on the line, a key that begins with
    ``adaptive`` is taken for ours.
    """
    # One letter too many, or one that is missing, is above 0.9; letters in another order are as near.
    likeness = difflib.SequenceMatcher(None, "adaptive", name.lower()).ratio()
    if sorted(name.lower()) == sorted("adaptive"):
        likeness = 1.0
    glued = likeness < 0.9 and name.lower().startswith("adaptive")
    if glued:
        rest = f".{name[8:].strip('_-').lower()}{rest}"
    head = re.split(r"[./@]", rest)[1] if rest else value
    near = glued or likeness >= 0.8
    if likeness < 0.9 and not ((glued and preset) or (near and (_is_ours(head) or is_preset(value)))):
        return ""
    if not rest or (is_preset(value) and head not in GROUPS):
        return f"+adaptive={value}"
    if is_preset(rest[1:]):  # +adaptive_solo=1
        return f"+adaptive={head}"
    return _choice(head, value) if glued and rest[1:] in GROUPS else f"adaptive{rest}={value}"


def _choice(group: str, value: str) -> str:
    """How a line chooses of a group: a preset has one of each role, and no platform."""
    return f"{'+' if group == 'platform' else ''}adaptive/{group}={value}"


def _is_ours(name: str) -> bool:
    """Whether this is a preset, a role or an option of ours, or nearly one."""
    from verl_adaptive.config import AdaptiveConfig  # numpy; for a word like this alone

    known = [*AdaptiveConfig.__dataclass_fields__, *GROUPS]
    return is_preset(name) or bool(difflib.get_close_matches(name, known, n=1, cutoff=0.8))


def refuse_other(config: Any, trainer: str) -> None:
    """Refuse a configuration with a preset in front of a trainer that is not ours; ``trainer`` is its name, for the message."""
    get = getattr(config, "get", None)
    if get is not None and get("adaptive") is not None:
        raise AdaptiveError(
            f"{_named(config)}: {trainer} knows nothing of presets and would train as if none had been named; take "
            f"python -m {MAIN} with trainer.v1.trainer_mode=sync, colocate_async or separate_async, or {_PLAIN}"
        )


def refuse_others(base: Any) -> None:
    """Refuse presets in front of every trainer that derives from this class of verl's, unless it is ours."""
    real = base.__init__

    @functools.wraps(real)
    def guarded(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(self, "is_adaptive", False):
            refuse_other(config, type(self).__name__)
        real(self, config, *args, **kwargs)

    base.__init__ = guarded


def watch() -> None:
    """Refuse presets where verl's other trainers are made, whoever composed the configuration."""
    import wrapt

    @wrapt.when_imported("verl.trainer.ppo.ray_trainer")
    def _legacy(module: Any) -> None:  # every legacy trainer of verl's and of its recipes is one of these
        trainer = getattr(module, "RayPPOTrainer", None)
        if trainer is not None:  # a later verl has done with it
            refuse_others(trainer)

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
    return f"+adaptive={preset.get('name', 'custom')}" if hasattr(preset, "get") else f"adaptive={preset}"
