"""Presets that are gone: the error says what to write, and their runs go on under their parts."""

from __future__ import annotations

import importlib
import sys

import pytest

from benchmarks.presets import FULL, INGREDIENTS, spelled
from verl_adaptive.errors import REMOVED, removed, removed_in
from verl_adaptive.integration.resume import settings_of
from verl_adaptive.policy import build_policy
from verl_adaptive.simulate import compose_preset, preset_names

#: Preset → the parts in words, and the fingerprint of the policy in the snapshots that 0.1.0 wrote.
PARTS = {"full": (["dapo", "adaptive/sampler=mopps_by_source", "adaptive/allocator=aero"], "76e39343575a62b5")}


def test_those_that_are_gone_are_none_that_there_are() -> None:
    assert not set(REMOVED) & set(preset_names()) and set(PARTS) == set(REMOVED)
    assert removed("greso") == "" and removed("full").startswith("preset full was removed in 0.2.0")


@pytest.mark.parametrize("name", REMOVED)
def test_a_run_that_0_1_0_began_goes_on_with_the_words_of_the_message(name) -> None:
    """A snapshot knows the parts and the settings; the preset's name is in neither."""
    words, digest = PARTS[name]
    assert " ".join(["+adaptive=" + words[0], *words[1:]]) in removed(name)
    made, named = compose_preset(words), compose_preset([*words, f"adaptive.name={name}"])
    assert build_policy(made).digest() == build_policy(named).digest() == digest
    assert settings_of(made, batch=8, n=8) == settings_of(named, batch=8, n=8)


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["+adaptive=full"], True),
        (["++adaptive='full'", "adaptive.seed=3"], True),
        (["trainer.nnodes=1", "adaptive=full"], True),
        (["+adaptive=fuller"], False),
        (["+adaptive=solo", "adaptive.name=full", "trainer.experiment_name=full"], False),
        # their own file of that name goes before ours
        (["--config-dir=mine", "+adaptive=full"], False),
        (["+adaptive=full", "hydra.searchpath=[file://mine]"], False),
    ],
)
def test_a_training_command_line_is_read(words, gone) -> None:
    assert bool(removed_in(words)) == gone


def test_the_plugin_refuses_it_in_training_and_leaves_it_to_our_own_commands(monkeypatch) -> None:
    pytest.importorskip("verl")
    plugin = importlib.import_module("verl_adaptive.integration.plugin")
    monkeypatch.delitem(sys.modules, "verl_adaptive.cli", raising=False)
    with pytest.raises(SystemExit, match=r"verl-adaptive: preset full .*write \+adaptive=solo"):
        plugin._refuse_removed(["main_ppo", "+adaptive=full"])
    plugin._refuse_removed(["main_ppo", "+adaptive=solo"])
    import verl_adaptive.cli  # noqa: F401

    plugin._refuse_removed(["verl-adaptive", "doctor", "--", "+adaptive=full"])


def test_the_benchmarks_row_of_that_name_is_the_parts() -> None:
    assert FULL["full"] == PARTS["full"][0]
    assert spelled("full adaptive.rounds=true") == f"{' '.join(FULL['full'])} adaptive.rounds=true"
    assert spelled("full adaptive/sampler=mopps").split() == INGREDIENTS["full-published_mopps"]
    assert spelled("greso adaptive/sampler=mopps") == "greso adaptive/sampler=mopps"
