"""A policy: one sampler, one allocator, one filter, one advantage, built from the configuration."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from verl_adaptive._role import Role
from verl_adaptive.advantages._base import Advantage
from verl_adaptive.allocators._base import Allocator
from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.errors import ConfigError
from verl_adaptive.filters._base import Filter
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.samplers._base import Sampler
from verl_adaptive.stats.table import StatsTable

__all__ = ["PARTS", "Policy", "available", "build_policy", "find_part"]

#: Parts that ship with the package: role → name → "module:class"; imported when named.
PARTS: dict[str, dict[str, str]] = {
    "sampler": {
        "epoch": "verl_adaptive.samplers.epoch:Epoch",
        "greso": "verl_adaptive.samplers.greso:Greso",
        "cero": "verl_adaptive.samplers.cero:Cero",
        "retire": "verl_adaptive.samplers.retire:Retire",
        "mopps": "verl_adaptive.samplers.mopps:Mopps",
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
    """The class behind a part's name.

    Raises:
        ConfigError: no such part, with the nearest name.
    """
    if f"{role}.{name}" in _third_party():
        return _third_party()[f"{role}.{name}"].load()
    target = PARTS[role].get(name)
    if target is None:
        names = available(role)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"adaptive.{role}.name", name, f"no such {role}; there are {', '.join(names)}. {hint}".strip()
        )
    module, _, cls = target.partition(":")
    return getattr(importlib.import_module(module), cls)


@dataclass
class Policy:
    """The four roles as one object; what the trainers and the simulator drive (through the engine)."""

    sampler: Sampler
    allocator: Allocator
    filter: Filter
    advantage: Advantage

    def __iter__(self) -> Iterator[Role]:
        return iter((self.sampler, self.allocator, self.filter, self.advantage))

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        """Join a run; see :meth:`Role.bind`."""
        for part in self:
            part.bind(table, facts)

    def observe(self, groups: Groups, progress: Progress) -> None:
        """Show closed groups to every role."""
        for part in self:
            part.observe(groups, progress)

    def end_step(self, progress: Progress) -> None:
        """Tell every role that the step is complete."""
        for part in self:
            part.end_step(progress)

    def metrics(self) -> dict[str, float]:
        """All roles' metrics, ``adaptive/<role>/<name>``."""
        return {f"adaptive/{part.role}/{key}": value for part in self for key, value in part.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        return {part.role: {"name": part.name, "state": part.state_dict()} for part in self}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part in self:
            saved = state.get(part.role, {})
            if saved.get("name") == part.name:  # another part's state means nothing here: start afresh
                part.load_state_dict(saved["state"])

    def digest(self) -> str:
        """Short hash of the parts and their options, to notice a resume under another policy."""
        text = json.dumps({p.role: [p.name, _plain(p.config)] for p in self}, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(config: Any) -> Any:
    return {k: _plain(v) if hasattr(v, "__dict__") else v for k, v in vars(config).items()}


def build_policy(config: AdaptiveConfig) -> Policy:
    """The policy that the configuration names.

    Raises:
        ConfigError: unknown part or option, or parts that make no sense together.
    """
    parts = {}
    for role in ("sampler", "allocator", "filter", "advantage"):
        options = dict(getattr(config, role))
        parts[role] = find_part(role, options.pop("name"))(options)
    policy = Policy(
        sampler=cast(Sampler, parts["sampler"]),
        allocator=cast(Allocator, parts["allocator"]),
        filter=cast(Filter, parts["filter"]),
        advantage=cast(Advantage, parts["advantage"]),
    )
    for part in policy:
        part.check_policy(policy, config)
    return policy
