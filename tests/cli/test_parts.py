"""``verl-adaptive parts``: everything that can be chosen is listed, with what it does."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib.metadata import EntryPoint

import pytest

import verl_adaptive.policy as policy
from verl_adaptive.policy import PARTS, find_part


def test_every_part_and_preset_is_listed_with_a_sentence(call) -> None:
    status, out, _ = call("parts", "--json")
    found = json.loads(out)
    assert status == 0 and {
        role: {name for name, item in found[role].items() if "of" not in item} for role in PARTS
    } == {role: set(PARTS[role]) for role in PARTS}
    assert {"greso", "dapo", "grpo", "aero", "cero", "pilot_commit", "solo"} <= set(found["presets"])
    for section in found.values():
        for name, item in section.items():
            assert len(item["about"]) > 20 and item["about"].endswith("."), name
    assert found["presets"]["greso"]["parts"]["sampler"] == "greso"


def test_every_option_is_described(call) -> None:
    found = json.loads(call("parts", "--json")[1])
    for role, parts in PARTS.items():
        for name in parts:
            options = found[role][name]["options"]
            assert {key.split(".")[0] for key in options} == {f.name for f in fields(find_part(role, name).Config)}
            assert all(len(option["about"]) > 10 for option in options.values()), name
            assert len({option["about"] for option in options.values()}) == len(options), (
                name
            )  # each key, not each pair
    shared = call("parts", "--markdown")[1].partition("## Every preset")[2].partition("\n## ")[0].splitlines()[4:]
    assert len(shared) > 30 and all(len(row.split(" | ", 2)[2]) > 12 for row in shared if row.startswith("|"))
    greso = found["sampler"]["greso"]["options"]
    assert greso["p_easy"]["default"] == 0.5 and "all right" in greso["p_easy"]["about"]
    assert greso["round.prompts"]["default"] is None and "yield" in greso["round.prompts"]["about"]


def test_a_name_shows_its_options(call) -> None:
    status, out, _ = call("parts", "pilot_commit")
    assert status == 0 and "adaptive.allocator.n_pilot" in out and "+adaptive=pilot_commit" in out
    assert "adaptive/sampler=epoch" not in out
    assert "adaptive/sampler=epoch" in call("parts", "sampler")[1]


def test_every_part_that_a_preset_names_is_listed(call) -> None:
    found = json.loads(call("parts", "--json")[1])
    for name, preset in found["presets"].items():
        for role, part in preset["parts"].items():
            assert part in found[role], f"{name}: adaptive/{role}={part}"


def test_a_part_with_options_set_shows_them_and_the_part_it_is(call) -> None:
    found = json.loads(call("parts", "--json")[1])["sampler"]["mopps_by_source"]
    assert found["of"] == "mopps" and {k: o["default"] for k, o in found["options"].items()} == {
        "decay": 0.8,
        "source_prior": 4.0,
    }
    status, out, _ = call("parts", "mopps_by_source")
    assert status == 0 and "adaptive.sampler.source_prior" in out and "adaptive/sampler=mopps" in out


def test_third_parties_parts_are_listed_and_a_broken_one_hides_nothing(call, monkeypatch) -> None:
    mine = {
        "sampler.mine": EntryPoint("sampler.mine", "verl_adaptive.samplers.epoch:Epoch", policy.ENTRY_POINT_GROUP),
        "filter.broken": EntryPoint("filter.broken", "no_such_module:Filter", policy.ENTRY_POINT_GROUP),
    }
    monkeypatch.setattr(policy, "_third_party", lambda: mine)
    found = json.loads(call("parts", "--json")[1])
    assert found["sampler"]["mine"]["about"].startswith("Epoch order")
    assert "no_such_module" in found["filter"]["broken"]["about"] and "greso" in found["sampler"]


def test_a_part_that_cannot_be_loaded_takes_none_of_its_settings_with_it(call, monkeypatch) -> None:
    broken = {"sampler.mopps": EntryPoint("sampler.mopps", "no_such_module:Mopps", policy.ENTRY_POINT_GROUP)}
    monkeypatch.setattr(policy, "_third_party", lambda: broken)
    status, out, _ = call("parts", "--json")
    found = json.loads(out)["sampler"]
    assert status == 0 and "no_such_module" in found["mopps"]["about"]
    assert found["mopps_by_source"]["options"]["decay"]["default"] == 0.8


def test_a_part_is_described_in_its_classes_own_words(call, monkeypatch) -> None:
    """A module may hold several parts; what it says of itself is said of none of them."""
    mine = {
        f"filter.{name}": EntryPoint(f"filter.{name}", f"tests.cli.parts_of_two:{name}", policy.ENTRY_POINT_GROUP)
        for name in ("Long", "Short")
    }
    monkeypatch.setattr(policy, "_third_party", lambda: mine)
    found = json.loads(call("parts", "--json")[1])["filter"]
    assert found["Long"]["about"] == "Drops groups whose answers are short."
    assert found["Short"]["about"] == "Drops groups whose answers are long."


@pytest.mark.parametrize("word", ["sampler", "solo", "--json"])
def test_the_reference_is_of_everything(word, call) -> None:
    """`parts sampler --markdown` ended with a KeyError."""
    status, out, err = call("parts", word, "--markdown")
    assert (status, out) == (2, "") and f"leave {word} out" in err
