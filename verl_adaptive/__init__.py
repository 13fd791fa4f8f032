"""verl-adaptive: adaptive rollout allocation for verl. Importing this imports neither torch, ray nor verl.

What the author of a part needs is here by name (``from verl_adaptive import Sampler, Column, check``); see
:mod:`verl_adaptive.roles` and docs/custom_parts.md.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_adaptive.config import ConfigError, RunFacts, check
    from verl_adaptive.groups import Groups
    from verl_adaptive.progress import Progress
    from verl_adaptive.roles import CLOSE, HOLD, Advantage, Allocator, Filter, Pick, PolicyParts, Sampler, Verdict
    from verl_adaptive.roles.pooled import PooledAllocator
    from verl_adaptive.stats.table import Column

try:
    __version__ = version("verl-adaptive")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

#: Name → module; imported when first asked for, so that ``import verl_adaptive`` costs nothing in verl's processes.
_LAZY = {
    **dict.fromkeys(
        ("CLOSE", "HOLD", "Advantage", "Allocator", "Filter", "Pick", "PolicyParts", "Sampler", "Verdict"), "roles"
    ),
    "PooledAllocator": "roles.pooled",
    **dict.fromkeys(("ConfigError", "RunFacts", "check"), "config"),
    "Column": "stats.table",
    "Groups": "groups",
    "Progress": "progress",
}

__all__ = [
    "CLOSE",
    "HOLD",
    "Advantage",
    "Allocator",
    "Column",
    "ConfigError",
    "Filter",
    "Groups",
    "Pick",
    "PolicyParts",
    "PooledAllocator",
    "Progress",
    "RunFacts",
    "Sampler",
    "Verdict",
    "__version__",
    "check",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"verl_adaptive.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
