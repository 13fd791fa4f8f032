"""A policy: one sampler, one allocator, one filter, one advantage; the registry of parts, and how they are made."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts, check
from verl_adaptive.errors import AdaptiveError, ConfigError, nearest
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.roles import Advantage, Allocator, Commits, Filter, PolicyParts, Role, Sampler
from verl_adaptive.roles.answers import ask, who
from verl_adaptive.roles.pooled import PooledAllocator
from verl_adaptive.stats.state import encode_state
from verl_adaptive.stats.table import StatsTable

#: What becomes of groups and rollouts, in the engine's words; a filter's reasons are others.
OUTCOMES = (
    *("trained", "failed", "lost", "zero_advantage"),
    *("aborted", "expired", "stale", "gone", "incomplete"),
)

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
        "aero": "verl_adaptive.allocators.aero_rescue:AeroRescue",
        "pilot_commit": "verl_adaptive.allocators.pilot_commit:PilotCommit",
        "reinforce_ada": "verl_adaptive.allocators.reinforce_ada:ReinforceAda",
    },
    "filter": {
        "keep_all": "verl_adaptive.filters.keep_all:KeepAll",
        "informative": "verl_adaptive.filters.informative:Informative",
        "aero": "verl_adaptive.filters.aero_rejection:AeroRejection",
        "band": "verl_adaptive.filters.band:Band",
        "stack": "verl_adaptive.filters.stack:Stack",
    },
    "advantage": {
        "verl": "verl_adaptive.advantages.verl:Verl",
        "beta": "verl_adaptive.advantages.beta:BetaPosterior",
        "memory": "verl_adaptive.advantages.memory:MemoryBaseline",
    },
}

#: Third parties name their entry points "<role>.<name>" in this group.
ENTRY_POINT_GROUP = "verl_adaptive.policies"


@functools.cache
def _third_party() -> dict[str, list[EntryPoint]]:
    """Parts of other packages, by entry-point name; scanning the environment takes tens of milliseconds."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def available(role: str) -> list[str]:
    """Names that ``adaptive.<role>.name`` accepts in this environment."""
    extra = [name.split(".", 1)[1] for name in _third_party() if name.startswith(f"{role}.")]
    return sorted({*PARTS[role], *extra})


def find_part(role: str, name: str) -> type[Role]:
    """The class behind a part's name: a shipped one, another package's by entry point, ``module:Class`` or ``FILE.py:Class``.

    Raises:
        ConfigError: no such part, with the nearest name; or what is there is no part of that role.
    """
    if ":" in name:
        return _by_path(role, name)
    theirs = _third_party().get(f"{role}.{name}")
    if theirs is not None:
        values = sorted({entry.value for entry in theirs})
        hint = f"is the name of a {role} that ships with verl-adaptive, and of the entry point {values[0]}; rename that one"
        check(name not in PARTS[role], f"adaptive.{role}.name", name, hint)
        hint = f"is the name of the entry points {' and '.join(values)}; rename one, or uninstall its package"
        check(len(values) == 1, f"adaptive.{role}.name", name, hint)
        try:
            part = theirs[0].load()
        except Exception as error:
            raise ConfigError(
                f"adaptive.{role}.name", name, f"is of another package, which fails to load: {error}; reinstall it"
            ) from error
        return checked(role, name, part)
    target = PARTS[role].get(name)
    if target is None:
        names = available(role)
        hint = nearest(name, names, "a class of your own is named module:Class or FILE.py:Class")
        raise ConfigError(f"adaptive.{role}.name", name, f"no such {role}; there are {', '.join(names)}. {hint}")
    module, _, cls = target.partition(":")
    return getattr(importlib.import_module(module), cls)


def _by_path(role: str, path: str) -> type[Role]:
    """The class that ``module:Class`` or ``FILE.py:Class`` names.

    ConfigError: it cannot be imported, or is no part of that role.
    """
    key = f"adaptive.{role}.name"
    module, _, cls = path.rpartition(":")
    if module.endswith(".py"):
        module = _module_in(Path(module), key, path)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            key,
            path,
            f"{error}; install what is missing where training runs, or name the file: {key}=FILE.py:{cls}",
        ) from error
    except Exception as error:
        raise ConfigError(key, path, f"importing {module} fails: {type(error).__name__}: {error}") from error
    if not hasattr(found, cls):
        parts = [
            name
            for name, value in vars(found).items()
            if inspect.isclass(value) and issubclass(value, Role) and value.__module__.partition(".")[0] != __package__
        ]
        near = difflib.get_close_matches(cls, parts, n=1) or [", ".join(parts) or "none"]
        raise ConfigError(key, path, f"{module} has no {cls!r}; parts in it: {near[0]}")
    return checked(role, path, getattr(found, cls))


def _module_in(file: Path, key: str, value: str) -> str:
    """The module that a file is, its folder put where Python looks for modules.

    ConfigError: no such file, or Python knows another module of its name.
    """
    file = file.expanduser().resolve()
    module, folder = file.stem, str(file.parent)
    if not file.is_file():
        raise ConfigError(key, value, f"there is no file {file}")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        other = f"there is another module {module!r}" if spec is not None else f"{module!r} is no name of a module"
        raise ConfigError(key, value, f"{other}; rename the file")
    return module


def checked(role: str, name: str, part: Any) -> type[Role]:
    """A class that somebody else wrote, if it is a part of this role; ConfigError with what it lacks."""
    key, kind = f"adaptive.{role}.name", KINDS[role].__name__
    if not (inspect.isclass(part) and issubclass(part, KINDS[role])):
        raise ConfigError(key, name, f"is no {role}: derive a class from verl_adaptive.{kind}")
    missing = sorted(getattr(part, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(key, name, f"{part.__name__} lacks {', '.join(missing)}, which every {role} has")
    if not isinstance(getattr(part, "name", None), str) or not part.name.isidentifier():
        hint = 'of letters, digits and underscores, as `name = "mine"`: its columns are saved and asked for under it'
        raise ConfigError(key, name, f"{part.__name__} needs a name {hint}")
    if not is_dataclass(part.Config):
        raise ConfigError(key, name, f"{part.__name__}.Config must be a dataclass: write @dataclass above it")
    ours = PARTS[role].get(part.name, f"{part.__module__}:{part.__qualname__}")
    if ours != f"{part.__module__}:{part.__qualname__}":
        raise ConfigError(
            key, name, f"{part.__name__} has name = {part.name!r}, which is {ours}: give it a name of its own"
        )
    silent = _never_asked(part)
    if silent:
        raise ConfigError(key, name, f"{part.__name__} {silent}")
    return part


#: Per role: what a class says, how to tell, what is used only then, and what is then needed.
_USED: tuple[tuple[type[Role], str, Callable[[Any], bool], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        Role,
        "state_dict",
        lambda part: part.state_dict is not Role.state_dict,
        ("load_state_dict",),
        ("load_state_dict",),
    ),
    (Sampler, "kind = 'pool'", lambda part: part.kind == "pool", ("pick",), ("pick",)),
    (Sampler, "kind = 'stream'", lambda part: part.kind == "stream", ("admit", "decided"), ("admit",)),
    (
        Allocator,
        "the base class PooledAllocator",
        lambda part: issubclass(part, PooledAllocator),
        ("can_hold", "needs_place", "fund", "prompts", "affordable", "complete", "reserve", "recall"),
        (),
    ),
    (Allocator, "review", lambda part: part.review is not Allocator.review, ("most",), ("most",)),
    (Allocator, "can_hold = True", lambda part: part.can_hold is True, (), ("recall",)),
    (Advantage, 'estimator = "…"', lambda part: part.estimator is not None, ("compute",), ("compute",)),
)


def _never_asked(part: type[Role]) -> str:
    """What a part's class attributes keep from ever being used, so that it would do nothing, or something else, in silence."""

    def own(name: str) -> bool:  # and not what a base class of ours says
        return all(
            getattr(part, name, None) is not getattr(base, name, None) for base in (KINDS[part.role], PooledAllocator)
        )

    shipped = [base for base in part.__mro__ if base.__module__.partition(".")[0] == __package__]
    others = (PooledAllocator, Commits) if issubclass(part, Allocator) else ()
    known = {"name", *(name for base in (*shipped, *others) for name in dir(base))}
    for base in part.__mro__:
        for name, value in vars(base).items() if issubclass(base, Role) and base not in shipped else ():
            if not name[0].islower():  # constants and classes
                continue
            if name not in known:
                meant = nearest(name, known, "a typing error?")
                return f"has {name}, which no {part.role} has: {meant} A name of your own begins with an underscore"
            ours = next((getattr(one, name) for one in (KINDS[part.role], *others) if hasattr(one, name)), value)
            if inspect.isfunction(value):
                if not inspect.isfunction(ours):
                    return f"has {name} as a method, and it is a value: write @property above it, or {name} = …"
                asked = inspect.signature(ours).parameters
                try:
                    inspect.signature(value).bind(*asked)
                except TypeError:
                    return f"has {name}{inspect.signature(value)}, and is asked for {name}({', '.join(asked)})"
    if issubclass(part, Sampler) and part.kind not in ("stream", "pool"):
        return f"has kind = {part.kind!r}; a sampler's kind is 'stream' or 'pool'"
    for kind, says, said, only, needed in _USED:
        if issubclass(part, kind):
            unused = [name for name in only if own(name) and not said(part)]
            if unused:
                return f"has {unused[0]}, which is used only with {says}"
            if said(part) and not all(map(own, needed)):
                return f"has {says} and no {needed[0]}"
    if issubclass(part, Filter):
        names = part.reasons
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            return f'has reasons = {names!r}; they are a tuple of names, as reasons = ("flat",)'
        names = (*names, part.rollout_reason)
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            return (
                f"gives the reason {twice[0]!r} twice, in reasons or as its rollout_reason: their counts would be one"
            )
        taken = [name for name in names if name in OUTCOMES]
        if taken:
            return f"gives the reason {taken[0]!r}, a word of the engine's own; take another than {', '.join(OUTCOMES)}"
        bent = [(name, word) for name in names for word in ("max", "min") if word in name.lower()]
        if bent:
            name, word = bent[0]
            return f"gives the reason {name!r}, with {word!r} in it: verl would take its counts' {word}, not their sum; rename it"
    return ""


def options_of(part: type[Role]) -> dict[str, Any]:
    """The options of a part that have defaults, as plain values."""
    out = {}
    for option in fields(part.Config):
        if option.default is not MISSING:
            value: Any = option.default
        elif option.default_factory is not MISSING:
            value = option.default_factory()
        else:
            continue
        out[option.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
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


def option_hint(key: str, chosen: Mapping[str, Any]) -> str:
    """What to write instead of an option that a configuration does not have; empty where it has it.

    Args:
        key: as on the command line, ``adaptive.sampler.p_easy``.
        chosen: what is below ``adaptive`` without the option.
    """
    known = set(_paths(chosen))
    path = key.removeprefix("adaptive.")
    if path in known:
        return ""
    above, _, name = path.rpartition(".")
    role, _, option = path.partition(".")
    part = chosen.get(role)
    if isinstance(part, Mapping) and ":" in str(part.get("name")):
        return f"write +{key}=…, for Hydra does not know the options of a part of your own"
    others = [other for other in PARTS.get(role, ()) if option in _paths(options_of(find_part(role, other)))]
    beside = sorted(k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == above)
    if others:
        return (
            f"is an option of {' and '.join(f'adaptive/{role}={other}' for other in others)}, and adaptive.{role}.name is "
            f"{chosen[role]['name']}; leave it out, or choose that {role}"
        )
    near = [f"{above}.{found}".lstrip(".") for found in difflib.get_close_matches(name, beside, n=1)]
    if not near and (above not in known or not beside):
        near = difflib.get_close_matches(path, known, n=1)
    otherwise = f"there is no such option; beside it are {', '.join(beside) or 'none'}"
    return f"did you mean adaptive.{near[0]}?" if near else otherwise


def _paths(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of a tree of mappings, its branches included."""
    out = []
    for key, value in tree.items():
        out += [prefix + key, *(_paths(value, f"{prefix}{key}.") if isinstance(value, Mapping) else ())]
    return out


def shared_options() -> dict[str, Any]:
    """What every preset has below ``adaptive``, the four roles left out."""
    return {key: value for key, value in asdict(AdaptiveConfig()).items() if key not in PARTS}


def _own_options(role: str, name: str, part: type[Role], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options meant for a class of the user's own, without those that the preset's part left there.

    ConfigError: it cannot be told which of the two an option is meant for.
    """
    own, kept = options_of(part), dict(options)
    known = {option.name for option in fields(part.Config)}
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


def make_part(role: str, chosen: Mapping[str, Any]) -> Role:
    """The part that ``adaptive.<role>`` names, with its options.

    Raises:
        ConfigError: no such part, an option is wrong, or the class cannot be made.
    """
    options = dict(chosen)
    name = options.pop("name")
    part = find_part(role, name)
    try:
        made = part(_own_options(role, name, part, options) if ":" in name else options)
    except AdaptiveError:
        raise
    except Exception as error:
        raise ConfigError(
            f"adaptive.{role}.name",
            name,
            f"making a {part.__name__} of its options fails: {type(error).__name__}: {error}",
        ) from error
    hint = f"{part.__name__}.__init__ must call super().__init__(options)"
    check(hasattr(made, "config"), f"adaptive.{role}.name", name, hint)
    return made


def build_policy(config: AdaptiveConfig) -> Policy:
    """The policy that the configuration names.

    Raises:
        ConfigError: unknown part or option, or parts that make no sense together.
    """
    made: dict[str, Any] = {role: make_part(role, getattr(config, role)) for role in PARTS}
    policy = Policy(**made)
    owners: dict[str, str] = {}
    for part in policy:
        for column in part.columns:
            owner = owners.setdefault(f"{part.name}.{column}", part.role)
            hint = f"has the column {column!r}, and so has the {owner} of that name: they would share it; rename one of the two"
            check(owner == part.role, f"adaptive.{part.role}.name", part.name, hint)
        ask(part, "check_policy", policy, config)
    return policy


@dataclass
class Policy(PolicyParts):
    """The four roles as one object; what the trainers and the simulator drive (through the engine)."""

    _ended: bool = field(default=False, init=False, repr=False)

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        """Join a run; see :meth:`Role.bind`."""
        for part in self:
            ask(part, "bind", table, facts)
            if getattr(part, "table", None) is not table:
                raise AdaptiveError(f"{who(part)}.bind must call super().bind(table, facts)")

    def observe(self, groups: Groups, progress: Progress) -> None:
        """Show closed groups to every role."""
        for part in self:
            ask(part, "observe", groups, progress)

    def end_step(self, progress: Progress) -> None:
        """Tell every role that the step is complete."""
        for part in self:
            ask(part, "end_step", progress)
        if not self._ended:  # else what no checkpoint can hold shows at the first one, hours later
            self.state_dict()
            self.metrics()
        self._ended = True

    def metrics(self) -> dict[str, float]:
        """All roles' metrics, ``adaptive/<role>/<name>``.

        Raises:
            AdaptiveError: a value is no number, which loggers would choke on or pass over.
        """
        out: dict[str, Any] = {}
        for part in self:
            found = ask(part, "metrics")
            if not isinstance(found, dict):
                raise AdaptiveError(f"{who(part)}.metrics must answer a dict; it answered {type(found).__name__}")
            for key, value in found.items():
                if not isinstance(value, Real | np.bool_):
                    kind = type(value).__name__
                    raise AdaptiveError(f"{who(part)}.metrics gives {key!r} as a {kind}: a metric is one number")
                out[f"adaptive/{part.role}/{key}"] = value
        return out

    def state_dict(self) -> dict[str, Any]:
        """Every role's state.

        Raises:
            AdaptiveError: a checkpoint cannot hold it.
        """
        out = {}
        for part in self:
            state = ask(part, "state_dict")
            try:
                encode_state(state)
            except TypeError as error:
                raise AdaptiveError(
                    f"{who(part)}.state_dict: {error}; numbers, text, lists, dicts with text as keys, and numpy arrays can"
                ) from error
            out[part.role] = {"name": part.name, "state": state}
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part in self:
            saved = state.get(part.role, {})
            if saved.get("name") == part.name:  # another part's state means nothing here: start afresh
                ask(part, "load_state_dict", saved["state"])
