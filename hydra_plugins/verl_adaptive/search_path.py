"""Puts the presets on Hydra's search path, so that ``+adaptive=greso`` names a file of this package."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

__all__ = ["AdaptiveSearchPath"]


class AdaptiveSearchPath(SearchPathPlugin):
    """Appends ``pkg://hydra_configs.verl_adaptive``; last, so that the user's own files of the same name win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-adaptive", path="pkg://hydra_configs.verl_adaptive")
