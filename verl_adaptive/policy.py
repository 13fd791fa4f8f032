"""A policy: one sampler, one allocator, one filter, one advantage, built from the configuration."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError, ConfigError, nearest
from verl_adaptive.roles import OUTCOMES, Advantage, Allocator, Filter, Policy, Role, Sampler, ask

__all__ = [
    "KINDS",
    "PARTS",
    "available",
    "build_policy",
    "find_part",
    "options_of",
    "settle",
    "shared_options",
    "stored_options",
]

#: The base class of each role's parts.
KINDS: dict[str, type[Role]] = {"sampler": Sampler, "allocator": Allocator, "filter": Filter, "advantage": Advantage}

#: Parts that ship with the package: role → name → "module:class"; imported when named.
PARTS: dict[str, dict[str, str]] = {
    "sampler": {
        "epoch": "verl_adaptive.samplers.epoch:Epoch",
        "greso": "verl_adaptive.samplers.greso:Greso",
        "cero": "verl_adaptive.samplers.cero:Cero",
        "retire": "verl_adaptive.samplers.retire:Retire",
        "mopps": "verl_adaptive.samplers.mopps:Mopps",
        "spread": "verl_adaptive.samplers.spread:Spread",
    },
    "allocator": {
        "fixed": "verl_adaptive.allocators.fixed:Fixed",
        "aero": "verl_adaptive.allocators.aero:AeroRescue",
        "pilot_commit": "verl_adaptive.allocators.pilot_commit:PilotCommit",
        "reinforce_ada": "verl_adaptive.allocators.reinforce_ada:ReinforceAda",
    },
    "filter": {
        "keep_all": "verl_adaptive.filters.keep_all:KeepAll",
        "informative": "verl_adaptive.filters.informative:Informative",
        "aero": "verl_adaptive.filters.aero:AeroRejection",
        "band": "verl_adaptive.filters.band:Band",
    },
    "advantage": {
        "verl": "verl_adaptive.advantages.verl:Verl",
        "beta": "verl_adaptive.advantages.beta:BetaPosterior",
        "discounted_beta": "verl_adaptive.advantages.discounted_beta:DiscountedBeta",
        "memory": "verl_adaptive.advantages.memory:MemoryBaseline",
    },
}

#: Third parties name their entry points "<role>.<name>" in this group.
ENTRY_POINT_GROUP = "verl_adaptive.policies"


@functools.cache
def _third_party() -> dict[str, EntryPoint]:
    """Parts of other packages, by entry-point name; scanning the environment takes tens of milliseconds."""
    return {ep.name: ep for ep in entry_points(group=ENTRY_POINT_GROUP)}


def available(role: str) -> list[str]:
    """Names that ``adaptive.<role>.name`` accepts in this environment."""
    extra = [name.split(".", 1)[1] for name in _third_party() if name.startswith(f"{role}.")]
    return sorted({*PARTS[role], *extra})


def find_part(role: str, name: str) -> type[Role]:
    """The class behind a part's name: a shipped one, another package's by entry point, or ``module:Class``.

    Raises:
        ConfigError: no such part, with the nearest name; or what is there is no part of that role.
    """
    if ":" in name:
        return _by_path(role, name)
    if f"{role}.{name}" in _third_party():
        try:
            part = _third_party()[f"{role}.{name}"].load()
        except Exception as error:
            raise ConfigError(
                f"adaptive.{role}.name", name, f"another package's part, and it does not load: {error}"
            ) from error
        return _checked(role, name, part)
    target = PARTS[role].get(name)
    if target is None:
        names = available(role)
        hint = nearest(name, names, "a class of your own is named module:Class")
        raise ConfigError(f"adaptive.{role}.name", name, f"no such {role}; there are {', '.join(names)}. {hint}")
    module, _, cls = target.partition(":")
    return getattr(importlib.import_module(module), cls)


def _by_path(role: str, path: str) -> type[Role]:
    """The class that ``module:Class`` names.

    Raises:
        ConfigError: it cannot be imported, or is no part of that role.
    """
    key = f"adaptive.{role}.name"
    module, _, cls = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            key,
            path,
            f"{error}; the module must be importable in the driver: pip install its package, or put its folder on "
            "PYTHONPATH",
        ) from error
    except Exception as error:
        raise ConfigError(key, path, f"importing {module} fails: {type(error).__name__}: {error}") from error
    if not hasattr(found, cls):
        parts = [name for name, value in vars(found).items() if inspect.isclass(value) and issubclass(value, Role)]
        near = difflib.get_close_matches(cls, parts, n=1) or [", ".join(parts) or "none"]
        raise ConfigError(key, path, f"{module} has no {cls!r}; parts in it: {near[0]}")
    return _checked(role, path, getattr(found, cls))


def _checked(role: str, name: str, part: Any) -> type[Role]:
    """A class that somebody else wrote, if it is a part of this role.

    Raises:
        ConfigError: with what it lacks.
    """
    key, kind = f"adaptive.{role}.name", KINDS[role].__name__
    if not (inspect.isclass(part) and issubclass(part, KINDS[role])):
        raise ConfigError(key, name, f"is no {role}: derive a class from verl_adaptive.{kind}")
    missing = sorted(getattr(part, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(key, name, f"{part.__name__} lacks {', '.join(missing)}, which every {role} has")
    if not isinstance(getattr(part, "name", None), str) or not part.name:
        raise ConfigError(
            key, name, f'{part.__name__} needs a name, as `name = "mine"`: its columns are saved under it'
        )
    if not is_dataclass(part.Config):
        raise ConfigError(key, name, f"{part.__name__}.Config must be a dataclass: write @dataclass above it")
    silent = _never_asked(part)
    if silent:
        raise ConfigError(key, name, f"{part.__name__} {silent}")
    return part


def _never_asked(part: type[Role]) -> str:
    """What a part's class attributes keep from ever being used, so that it would do nothing, or something else, in silence."""

    def own(method: str) -> bool:
        return getattr(part, method) is not getattr(KINDS[part.role], method)

    if issubclass(part, Sampler):
        if part.kind not in ("stream", "pool"):
            return f"has kind = {part.kind!r}; a sampler's kind is 'stream' or 'pool'"
        asked, other = ("admit", "pick") if part.kind == "stream" else ("pick", "admit")
        if own(other):
            kinds = {"admit": "stream", "pick": "pool"}
            return f"has {other}, which only a sampler with kind = {kinds[other]!r} is asked; its kind is {part.kind!r}"
        if asked == "pick" and not own(asked):
            return "has kind = 'pool' and no pick, which chooses from the pool"
    if issubclass(part, Allocator) and part.can_hold is True and not own("recall"):
        return "has can_hold = True and no recall, so that a group that it holds would be held for ever"
    if issubclass(part, Filter):
        names = part.reasons
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            return f'has reasons = {names!r}; they are a tuple of names, as reasons = ("flat",)'
        taken = [name for name in (*names, part.rollout_reason) if name in OUTCOMES]
        if taken:
            return f"gives the reason {taken[0]!r}, a word of the engine's own; take another than {', '.join(OUTCOMES)}"
    if issubclass(part, Advantage):
        if part.estimator is None and own("compute"):
            return 'has compute and no estimator, so that verl would never ask it; name one, as estimator = "mine"'
        if part.estimator is not None and not own("compute"):
            return f"has estimator = {part.estimator!r} and no compute"
    return ""


def options_of(part: type[Role]) -> dict[str, Any]:
    """The options of a part that have defaults, as plain values."""
    out = {}
    for field in fields(part.Config):
        if field.default is not MISSING:
            value: Any = field.default
        elif field.default_factory is not MISSING:
            value = field.default_factory()
        else:
            continue
        out[field.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return out


def stored_options(role: str, name: str) -> dict[str, Any]:
    """What ``adaptive/<role>=<name>`` stands for: the part's name and its options.

    Another package's part that does not load keeps its name alone: other runs do not notice, and a run that chooses it
    is told why.
    """
    try:
        return {"name": name, **options_of(find_part(role, name))}
    except Exception:
        if f"{role}.{name}" not in _third_party():
            raise
        return {"name": name}


def shared_options() -> dict[str, Any]:
    """What every preset has below ``adaptive``, the four roles left out."""
    return {key: value for key, value in asdict(AdaptiveConfig()).items() if key not in PARTS}


def _own_options(role: str, name: str, part: type[Role], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options meant for a class that ``module:Class`` names, without those that the preset's part left there.

    Raises:
        ConfigError: it cannot be told which of the two an option is meant for.
    """
    own, kept = options_of(part), dict(options)
    known = {field.name for field in fields(part.Config)}
    for other in available(role):
        theirs = stored_options(role, other)
        del theirs["name"]
        if not theirs or not set(theirs) <= set(options):
            continue
        for key in theirs:
            if key in known and options[key] == theirs[key] != own.get(key):
                raise ConfigError(
                    f"adaptive.{role}.{key}",
                    options[key],
                    f"is left from adaptive/{role}={other}, and {name} has an option of that name: write "
                    f"adaptive/{role}=custom adaptive.{role}.name={name} to start without the preset's {role}",
                )
            if key not in known and options[key] == theirs[key]:
                kept.pop(key, None)
    for key, value in kept.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"adaptive.{role}.{key}",
                value,
                f"{name} has no such option; "
                + (f"did you mean {near[0]}? " if near else "")
                + f"If it is left from the preset's {role}, write adaptive/{role}=custom too",
            )
    return kept


def settle(config: AdaptiveConfig, *, holds: bool = True) -> AdaptiveConfig:
    """The configuration with every option that is left to the run as it is in this run.

    Done once, before anything is made of the configuration, so that fingerprints, snapshots, records and messages all have
    the same word. What is settled stays.

    Args:
        config: the ``adaptive`` group.
        holds: groups may be held for a later step, as in the ``sync`` trainer.

    Raises:
        ConfigError: no such part.
    """
    options = dict(config.allocator)
    allocator = cast(type[Allocator], find_part("allocator", options.pop("name")))
    sampler = cast(type[Sampler], find_part("sampler", config.sampler["name"]))
    found = allocator.settled(options, holds=holds and not sampler.plans_steps)
    return replace(config, allocator={**config.allocator, **found}) if found else config


def build_policy(config: AdaptiveConfig) -> Policy:
    """The policy that the configuration names; what is not settled (:func:`settle`) is as in the ``sync`` trainer.

    Raises:
        ConfigError: unknown part or option, or parts that make no sense together.
    """
    config = settle(config)
    parts = {}
    for role in PARTS:
        options = dict(getattr(config, role))
        name = options.pop("name")
        part = find_part(role, name)
        parts[role] = _made(role, name, part, _own_options(role, name, part, options) if ":" in name else options)
    policy = Policy(
        sampler=cast(Sampler, parts["sampler"]),
        allocator=cast(Allocator, parts["allocator"]),
        filter=cast(Filter, parts["filter"]),
        advantage=cast(Advantage, parts["advantage"]),
    )
    for part_made in policy:
        ask(part_made, "check_policy", policy, config)
    return policy


def _made(role: str, name: str, part: type[Role], options: Mapping[str, Any]) -> Role:
    """A part with these options.

    Raises:
        ConfigError: an option is wrong, or the class cannot be made.
    """
    try:
        return part(options)
    except AdaptiveError:
        raise
    except Exception as error:
        raise ConfigError(
            f"adaptive.{role}.name",
            name,
            f"making a {part.__name__} of its options fails: {type(error).__name__}: {error}",
        ) from error
