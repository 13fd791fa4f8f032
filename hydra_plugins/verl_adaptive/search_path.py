"""Makes ``+adaptive=greso`` and ``adaptive/sampler=cero`` known to Hydra, in every program that composes with it.

The presets are files of this package, put on the search path. What they are made of are dataclasses, put into Hydra's
ConfigStore: the options of every part, other packages' parts included, and what all presets share.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

__all__ = ["BASE", "AdaptiveSearchPath"]

#: What every preset brings to verl's own configuration.
BASE = {
    # refuses the preset in programs of verl's that would not read it
    "hydra": {"callbacks": {"verl_adaptive": {"_target_": "verl_adaptive.integration.guard.Guard"}}},
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
    """Appends ``pkg://hydra_configs.verl_adaptive``; last, so that the user's own files of the same name win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-adaptive", path="pkg://hydra_configs.verl_adaptive")
        _store_options()


def _store_options() -> None:
    """Parts as ``adaptive/<role>=<name>``, what presets share as ``verl_adaptive/base``; numpy is all that this imports."""
    from verl_adaptive.policy import PARTS, available, shared_options, stored_options

    store = ConfigStore.instance()

    def put(name: str, group: str, node: object, package: str | None = None) -> None:
        store.store(name=name, group=group, node=node, package=package, provider="verl-adaptive")

    put("base", "verl_adaptive", {**BASE, "adaptive": shared_options()}, package="_global_")
    for role in PARTS:
        for name in available(role):
            put(name, f"adaptive/{role}", stored_options(role, name))
        # no options yet: for a class that adaptive.<role>.name=module:Class names
        put("custom", f"adaptive/{role}", {"name": None})
