"""What a training command line composes to: read as Hydra reads it, on the search path that ``main_ppo`` has."""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NoReturn

from hydra import compose as hydra_compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_adaptive.errors import AdaptiveError, ConfigError, Misspelt, RefusedByVerl, nearest
from verl_adaptive.integration import guard
from verl_adaptive.policy import KINDS, option_hint


@dataclass(frozen=True)
class Command:
    """A training command line.

    Attributes:
        overrides: what follows the program, Hydra's options left out.
        program: the program named in it, as on the command line; None: overrides alone, as for ``main_ppo``.
        config_name, config_path, config_dir: Hydra's options of these names.
    """

    overrides: tuple[str, ...] = ()
    program: str | None = None
    config_name: str = "ppo_trainer"
    config_path: str = "config"
    config_dir: str | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Command:
        """Read words as the shell hands them over: overrides alone, or a whole command such as ``python -m …``.

        AdaptiveError: Hydra would not understand an option, or it asks for something else than one training run.
        """
        from hydra._internal.utils import get_args_parser

        program, rest = _split(list(words))
        parser = get_args_parser()

        def refuse(message: str) -> NoReturn:
            order = "Hydra's own options, as --config-dir, go before all overrides"
            raise AdaptiveError(f"Hydra does not understand the command line: {message}; {order}")

        parser.error = refuse  # type: ignore[method-assign]
        asked = parser.parse_args(rest)
        for option in ("help", "hydra_help", "cfg", "info", "shell_completion", "experimental_rerun", "multirun"):
            if getattr(asked, option):
                word = f"--{option.replace('_', '-')}"
                raise AdaptiveError(f"{word} does not start a training run; leave it out, and doctor looks at the run")
        return cls(
            tuple(asked.overrides),
            program,
            (asked.config_name or cls.config_name).removesuffix(".yaml"),
            asked.config_path or cls.config_path,
            asked.config_dir,
        )


def _split(words: list[str]) -> tuple[str | None, list[str]]:
    """The program of a command line and what follows it."""
    for at, word in enumerate(words):
        if guard.program_of(word) is not None:
            return guard.program_of(word), words[at + 1 :]
    for at, word in enumerate(words):
        if word.endswith(".py") and "=" not in word:
            return word, words[at + 1 :]
        if word == "-m" and at + 1 < len(words) and re.fullmatch(r"[A-Za-z_][\w.]*", words[at + 1]):
            return words[at + 1], words[at + 2 :]
    return None, words


@contextlib.contextmanager
def _hydra(command: Command) -> Iterator[Any]:
    """Hydra on the search path that ``main_ppo`` would have; yields its config loader."""
    from hydra import version as hydra_version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_automatic_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    verl = find_spec("verl")
    assert verl is not None and verl.submodule_search_locations  # else doctor asks nothing of it
    program = os.path.join(verl.submodule_search_locations[0], "trainer", "main_ppo.py")
    search_path = create_automatic_config_search_path(program, None, command.config_path)
    if command.config_dir is not None:
        folder = os.path.abspath(command.config_dir)
        if not os.path.isdir(folder):
            raise AdaptiveError(f"--config-dir={command.config_dir}: there is no such folder")
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    hydra_version.setbase(None)
    try:
        yield Hydra.create_main_hydra2(task_name="main_ppo", config_search_path=search_path).config_loader
    finally:
        GlobalHydra.instance().clear()


def group_options(group: str = "adaptive", command: Command = Command()) -> list[str]:
    """What Hydra would accept after ``+<group>=``, on verl's own search path."""
    from hydra.core.object_type import ObjectType

    with _hydra(command) as loader:
        return list(loader.get_group_options(group, ObjectType.CONFIG))


def compose(command: Command) -> DictConfig:
    """Compose as ``python -m verl.trainer.main_ppo`` would.

    RefusedByVerl: Hydra refuses the words that are verl's. AdaptiveError: it refuses others, or takes a word that nobody would
    read, or text for a number; the message has what is near a word below ``adaptive`` that it does not know.
    """
    wrong = guard.misread(command.overrides)
    if wrong:
        raise Misspelt(wrong)
    try:
        with _hydra(command):
            config = hydra_compose(command.config_name, overrides=list(command.overrides))
    except ValueError as error:  # what Hydra makes of null for a file of settings; its message has no key
        for group in (word.removesuffix("=null") for word in command.overrides if re.fullmatch(r"\w+=null", word)):
            raise ConfigError(group, None, "must be a group of settings; leave it out") from error
        raise
    except (HydraException, OmegaConfBaseException) as error:
        said, near = str(error).split("\nConfig search path")[0], _near(command)
        if near:
            raise Misspelt("; ".join(near)) from error
        _refuse_unknown(command, said)
        if _refused_without_preset(command):
            also = f"verl {version('verl')} refuses the line without the preset, too"
            raise RefusedByVerl("; ".join([said, also])) from error
        raise AdaptiveError(said) from error
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise _unresolved(config, error) from error
    _refuse_text(command, config)
    if not OmegaConf.is_dict(config.get("trainer")):  # which everything asks first
        refuse_no_group(command, config)
    return config


def _refuse_unknown(command: Command, said: str) -> None:
    """Misspelt, if verl has a key that is nearly the one that Hydra does not know; it says which one was meant."""
    unknown = re.search(r"Could not override '([\w.]+)'", said)
    if unknown is None or unknown[1].startswith("adaptive."):
        return
    key = unknown[1]
    parent, _, name = key.rpartition(".")
    known = [path for path, _ in _walk(OmegaConf.to_container(_plain(command), resolve=False))]
    beside = [path.rpartition(".")[2] for path in known if path.rpartition(".")[0] == parent]
    near = [f"{parent}.{other}" for other in difflib.get_close_matches(name, beside, n=1, cutoff=0.75)]
    if near:
        raise Misspelt(f"{key}: verl {version('verl')} has no such key; did you mean {near[0]}?")


def _plain(command: Command, choices: Sequence[str] = ()) -> DictConfig:
    """The configuration with these overrides alone, and Hydra's own: they say where to find it."""
    own = (word for word in command.overrides if word.startswith("hydra."))
    folder = os.path.abspath(command.config_dir) if command.config_dir else None
    return _composed(replace(command, overrides=(*own, *choices), program=None, config_dir=folder))


@functools.cache
def _composed(command: Command) -> DictConfig:
    """Hydra takes a second for verl's defaults, as long as for the line itself; each check and each line asks for the same."""
    with _hydra(command):
        return hydra_compose(command.config_name, overrides=list(command.overrides))


def _unresolved(config: DictConfig, error: OmegaConfBaseException) -> AdaptiveError:
    """The key and value of an interpolation that cannot be resolved: of the one that names what is missing, if any does."""
    found = []
    for path, value in _walk(OmegaConf.to_container(config, resolve=False)):
        if isinstance(value, str) and "${" in value:
            try:
                OmegaConf.select(config, path, throw_on_missing=False)
            except OmegaConfBaseException as why:
                missing = re.search(r"'([^']+)' not found", str(why))
                found.append((missing is None or missing[1] not in value, path, value, str(why).splitlines()[0]))
    if not found:
        return AdaptiveError(f"an interpolation cannot be resolved: {error}")
    _, path, value, said = min(found, key=lambda one: one[0])
    lacks = re.search(r"Environment variable '(\w+)' not found", said)
    hint = (
        f"the environment variable {lacks[1]} is not set; export it, or write ${{oc.env:{lacks[1]},<default>}}"
        if lacks
        else f"cannot be resolved: {said}"
    )
    return ConfigError(path, value, hint)


def _walk(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of a tree of mappings and lists, its branches included."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        path = f"{prefix}[{key}]" if isinstance(tree, list) else f"{prefix}.{key}" if prefix else str(key)
        yield path, value
        yield from _walk(value, path)


#: Where verl's default is a number and text will do: a range as 0.5_2.0.
_NUMBER_OR_TEXT = {"algorithm.rollout_correction.rollout_is_threshold"}


def _given(command: Command, config: DictConfig) -> Iterator[tuple[str, Any, Any]]:
    """The keys that the line sets: the default and the value of each; none where its words choose what the defaults are."""
    try:
        plain = _plain(command)
    except (HydraException, OmegaConfBaseException):
        return
    for key in sorted({word.partition("=")[0].lstrip("+") for word in command.overrides}):
        usual, value = (OmegaConf.select(c, key, throw_on_resolution_failure=False) for c in (plain, config))
        yield key, usual, value


def _refuse_text(command: Command, config: DictConfig) -> None:
    """Refuse text where verl has a number: it may load the models before it fails."""
    for key, usual, value in _given(command, config):
        if isinstance(usual, int | float) and isinstance(value, str) and key not in _NUMBER_OR_TEXT:
            kind = "true or false" if isinstance(usual, bool) else "a number"
            raise ConfigError(key, value, f"must be {kind}; verl's default is {usual}")


def refuse_no_group(command: Command, config: DictConfig) -> None:
    """Refuse what is no group where verl has one, and where it must be one: its checks end in a TypeError or an AttributeError."""
    for key, usual, value in _given(command, config):
        if OmegaConf.is_dict(usual) and not OmegaConf.is_dict(value):
            raise ConfigError(key, value, "must be a group of settings; leave it out")


def _refused_without_preset(command: Command) -> bool:
    """Whether the words that are verl's do not compose by themselves."""
    words = [word for word in command.overrides if not re.match(r"[+~]*adaptive[./@=]", word)]
    try:
        with _hydra(command):
            hydra_compose(command.config_name, overrides=words)
    except (HydraException, OmegaConfBaseException):
        return True
    return False


def _near(command: Command) -> list[str]:
    """The nearest presets, components and keys below ``adaptive`` to misspelt ones."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, groups = OverridesParser.create(), [f"adaptive/{group}" for group in guard.GROUPS]
    hints, choices, keys = [], [], []
    for word in command.overrides:
        try:
            (override,) = parser.parse_overrides([word])
        except HydraException:
            continue
        name = override.key_or_group
        if name.startswith("adaptive."):
            if not (override.is_add() or override.is_force_add()):  # those are new by intent
                keys.append(name)
        elif name == "adaptive" or name.startswith("adaptive/"):
            options, value = group_options(name, command), str(override.value())
            if options and value not in options:
                hints.append(f"{name}={value}: {nearest(value, options)}")
            elif options or name in groups:
                choices.append(word)
            else:
                hints += [f"did you mean {near}=?" for near in difflib.get_close_matches(name, groups, n=1)]
    return hints or _near_keys(command, choices, keys)


def _near_keys(command: Command, choices: list[str], keys: list[str]) -> list[str]:
    """What to write instead of those of ``keys`` that the line's ``choices`` of presets and components do not have."""
    if not keys:
        return []
    try:
        made = _plain(command, choices)
    except (HydraException, OmegaConfBaseException):  # something else is wrong: the caller's error says what
        return []
    if "adaptive" not in made:
        return [f"{key}: no preset is chosen; write +adaptive=<preset> before it" for key in keys]
    if not OmegaConf.is_config(made.adaptive):
        return [f"adaptive={made.adaptive}: {guard.not_a_preset(made.adaptive)}"]
    chosen = OmegaConf.to_container(made.adaptive)
    for role in KINDS:
        for word in command.overrides:
            if word.startswith(f"adaptive.{role}.name="):
                chosen[role] = {**(chosen.get(role) or {}), "name": word.partition("=")[2]}
    hints = [(key, option_hint(key, chosen)) for key in keys]
    return [f"{key}: {hint}" for key, hint in hints if hint]
