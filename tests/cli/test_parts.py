"""``verl-adaptive parts``: everything that can be chosen is listed, with what it does."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib.metadata import EntryPoint

import pytest

import verl_adaptive.policy as policy
from verl_adaptive.commands.parts import options_of_config
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.filters.keep_all import KeepAll
from verl_adaptive.policy import PARTS, find_part


@pytest.fixture
def found(call) -> dict:
    return json.loads(call("parts", "--json")[1])


@pytest.fixture
def third_party(call, monkeypatch):
    """What is listed where these entry points, by name, are installed."""

    def listed(**points: str) -> dict:
        made = {name: [EntryPoint(name, value, policy.ENTRY_POINT_GROUP)] for name, value in points.items()}
        monkeypatch.setattr(policy, "_third_party", lambda: made)
        return json.loads(call("parts", "--json")[1])

    return listed


def test_every_part_and_preset_is_listed_with_a_sentence(found) -> None:
    own = {role: {name for name, item in found[role].items() if "of" not in item} for role in PARTS}
    assert own == {role: set(PARTS[role]) for role in PARTS}
    assert {"greso", "dapo", "grpo", "aero", "cero", "pilot_commit", "solo"} <= set(found["presets"])
    for section in found.values():
        for name, item in section.items():
            assert len(item["about"]) > 20 and item["about"].endswith("."), name
    for name, preset in found["presets"].items():
        for role, part in preset["parts"].items():
            assert part in found[role], f"{name}: adaptive/{role}={part}"
    assert found["presets"]["greso"]["parts"]["sampler"] == "greso"


def test_every_option_is_described(found) -> None:
    for role, parts in PARTS.items():
        for name in parts:
            options = found[role][name]["options"]
            assert {key.split(".")[0] for key in options} == {f.name for f in fields(find_part(role, name).Config)}
            assert all(len(option["about"]) > 10 for option in options.values()), name
            # each key, not each pair
            assert len({option["about"] for option in options.values()}) == len(options), name
    shared = options_of_config(AdaptiveConfig)
    assert len(shared) > 30 and all(len(option["about"]) > 10 for option in shared.values())
    greso = found["sampler"]["greso"]["options"]
    assert greso["p_easy"]["default"] == 0.5 and "all right" in greso["p_easy"]["about"]
    assert greso["round.prompts"]["default"] is None and "yield" in greso["round.prompts"]["about"]


def test_a_name_shows_its_options(call) -> None:
    status, out, _ = call("parts", "pilot_commit")
    assert status == 0 and "adaptive.allocator.n_pilot" in out and "+adaptive=pilot_commit" in out
    assert "adaptive/sampler=epoch" not in out
    assert "adaptive/sampler=epoch" in call("parts", "sampler")[1]


def test_a_part_with_options_set_shows_them_and_the_part_it_is(call, found) -> None:
    mine = found["sampler"]["mopps_by_source"]
    assert mine["of"] == "mopps"
    assert {key: option["default"] for key, option in mine["options"].items()} == {"decay": 0.8, "source_prior": 4.0}
    status, out, _ = call("parts", "mopps_by_source")
    assert status == 0 and "adaptive.sampler.source_prior" in out
    assert "Its other options are those of adaptive/sampler=mopps." in out
    assert "keep_all has no options." in call("parts", "keep_all")[1]


def test_third_parties_parts_are_listed_and_a_broken_one_hides_nothing(third_party) -> None:
    broken = dict.fromkeys(("filter.broken", "sampler.mopps"), "no_such_module:Part")
    found = third_party(**{"sampler.mine": "verl_adaptive.samplers.epoch:Epoch"}, **broken)
    assert found["sampler"]["mine"]["about"].startswith("Epoch order")
    assert "no_such_module" in found["filter"]["broken"]["about"] and "greso" in found["sampler"]
    assert "no_such_module" in found["sampler"]["mopps"]["about"]
    assert found["sampler"]["mopps_by_source"]["options"]["decay"]["default"] == 0.8


class Long(KeepAll):
    """Drops groups whose answers are short. Not really."""

    name = "Long"


class Short(KeepAll):
    """Drops groups whose answers are long. Not really."""

    name = "Short"


def test_a_part_is_described_in_its_classes_own_words(third_party) -> None:
    """A module may hold several parts; what it says of itself is said of none of them."""
    found = third_party(**{f"filter.{name}": f"{__name__}:{name}" for name in ("Long", "Short")})["filter"]
    assert found["Long"]["about"] == "Drops groups whose answers are short."
    assert found["Short"]["about"] == "Drops groups whose answers are long."
