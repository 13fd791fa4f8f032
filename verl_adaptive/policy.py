"""A policy: one sampler, one allocator, one filter, one advantage, built from the configuration."""

from __future__ import annotations

import difflib
import functools
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import ConfigError
from verl_adaptive.roles import Advantage, Allocator, Filter, Policy, Role, Sampler

__all__ = ["PARTS", "available", "build_policy", "find_part"]

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
