"""Makes ``+adaptive=greso`` and ``adaptive/sampler=cero`` known to Hydra, in every program that composes with it.

The presets are files of this package, put on the search path. What they are made of are dataclasses, which
:class:`PartsSource` reads: the options of every part, other packages' parts included, and what all presets share.

Every Hydra program of the environment imports this module. So it imports Hydra alone: the package behind it is imported
when a configuration first asks for something below ``adaptive``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

__all__ = ["BASE", "AdaptiveSearchPath", "PartsSource"]

#: Hydra's callback that refuses a preset in programs that would not read it.
_GUARD = {"verl_adaptive": {"_target_": "verl_adaptive.integration.guard.Guard", "any_program": False}}

#: What every preset brings to verl's own configuration.
BASE: dict[str, Any] = {
    "hydra": {"callbacks": _GUARD},
    "trainer": {
        "v1": {
            # trainer_mode stays the user's: sync, colocate_async or separate_async
            "sampler": {
                "custom_sampler": {
                    "path": "pkg://verl_adaptive.integration.replay_buffer",
                    "name": "AdaptiveReplayBuffer",
                }
            }
        }
    },
}


class AdaptiveSearchPath(SearchPathPlugin):
    """Appends the presets and their parts; last, so that the user's own files of the same name win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-adaptive", path="pkg://hydra_configs.verl_adaptive")
        search_path.append(provider="verl-adaptive", path=f"{PartsSource.scheme()}://")
        _guard_verls()


def _guard_verls() -> None:
    """Watch verl's programs without a preset, too: its word may stand where Hydra does not take it for one."""
    store = ConfigStore.instance()
    if "verl" in sys.modules and store.get_type("hydra/config.yaml") is ObjectType.CONFIG:
        node = store.load("hydra/config.yaml").node
        OmegaConf.update(node, "callbacks", _GUARD, merge=True)
        store.store(name="config", group="hydra", node=node, provider="hydra")


class PartsSource(ConfigSource):
    """Parts as ``adaptive/<role>=<name>``, and what presets share as ``verl_adaptive/base``."""

    @functools.cached_property
    def _parts(self) -> dict[str, Any]:
        """Path → node."""
        from verl_adaptive.policy import PARTS, available, shared_options, stored_options

        return {
            "verl_adaptive/base": {**BASE, "adaptive": shared_options()},
            **{f"adaptive/{role}/{name}": stored_options(role, name) for role in PARTS for name in available(role)},
            # no options yet: for a class that adaptive.<role>.name=module:Class names
            **{f"adaptive/{role}/custom": {"name": None} for role in PARTS},
        }

    @staticmethod
    def scheme() -> str:
        return "verl-adaptive"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        path = config_path.strip("/")
        return _is_ours(path) and any(name.startswith(f"{path}/") for name in self._parts)

    def is_config(self, config_path: str) -> bool:
        path = _name(config_path)
        return _is_ours(path) and path in self._parts

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"verl-adaptive has no {config_path}")
        path = _name(config_path)
        package = "_global_" if path == "verl_adaptive/base" else None
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(self._parts[path]),
            header={"package": package},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        path = config_path.strip("/")
        below = [name[len(path) :].strip("/") for name in self._parts if not path or name.startswith(f"{path}/")]
        groups = {name.partition("/")[0] for name in below if "/" in name}
        configs = {name for name in below if "/" not in name}
        wanted = {None: groups | configs, ObjectType.GROUP: groups, ObjectType.CONFIG: configs}
        return sorted(wanted.get(results_filter, set()))


def _is_ours(path: str) -> bool:
    return path.partition("/")[0] in ("adaptive", "verl_adaptive")


def _name(config_path: str) -> str:
    return config_path.strip("/").removesuffix(".yaml")
