"""Every worker and server has the package before anything is sent to it."""

from __future__ import annotations

import sys

import pytest
import ray

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.guard import PLUGIN
from verl_adaptive.integration.polling import check_installed

pytestmark = pytest.mark.timeout(1500)  # two processes import verl, and Ray starts


class Actor:
    """A process of verl's; without the plugin verl has not loaded it, without the package no module of ours can be imported."""

    def __init__(self, *, package: bool = True, plugin: bool = True) -> None:
        import verl  # noqa: F401

        if not plugin:
            del sys.modules[PLUGIN]
        if not package:
            for name in [name for name in sys.modules if name.startswith("verl_adaptive")]:
                del sys.modules[name]
            sys.modules["verl_adaptive"] = None


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ({"package": False}, r"server 1 does not have verl-adaptive .*verl_adaptive.*every node"),
        ({"plugin": False}, r"server 1 does not have verl-adaptive .*VERL_USE_EXTERNAL_PLUGINS"),
    ],
    ids=["package", "plugin"],
)
def test_a_process_that_lacks_it_is_named(started, lacks, says) -> None:
    whole, lacking = ray.remote(Actor).remote(), ray.remote(Actor).remote(**lacks)
    check_installed({"server 0": whole}, 600)
    with pytest.raises(AdaptiveError, match=says):
        check_installed({"server 0": whole, "server 1": lacking}, 600)
    check_installed({}, 1)
