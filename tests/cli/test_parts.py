"""``verl-adaptive parts``: everything that can be chosen is listed, with what it does."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib.metadata import EntryPoint

import verl_adaptive.policy as policy
from verl_adaptive.policy import PARTS, find_part


def test_every_part_and_preset_is_listed_with_a_sentence(call) -> None:
    status, out, _ = call("parts", "--json")
    found = json.loads(out)
    assert status == 0 and {role: set(found[role]) for role in PARTS} == {role: set(PARTS[role]) for role in PARTS}
    assert {"greso", "dapo", "grpo", "aero", "cero", "pilot_commit", "full"} <= set(found["presets"])
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
    greso = found["sampler"]["greso"]["options"]
    assert greso["p_easy"]["default"] == 0.5 and "exploration" in greso["p_easy"]["about"]
    assert greso["round.adaptive"]["default"] is True and "yield" in greso["round.adaptive"]["about"]


def test_a_name_shows_its_options(call) -> None:
    status, out, _ = call("parts", "pilot_commit")
    assert status == 0 and "adaptive.allocator.n_pilot" in out and "+adaptive=pilot_commit" in out
    assert "adaptive/sampler=epoch" not in out
    assert "adaptive/sampler=epoch" in call("parts", "sampler")[1]


def test_third_parties_parts_are_listed_and_a_broken_one_hides_nothing(call, monkeypatch) -> None:
    mine = {
        "sampler.mine": EntryPoint("sampler.mine", "verl_adaptive.samplers.epoch:Epoch", policy.ENTRY_POINT_GROUP),
        "filter.broken": EntryPoint("filter.broken", "no_such_module:Filter", policy.ENTRY_POINT_GROUP),
    }
    monkeypatch.setattr(policy, "_third_party", lambda: mine)
    found = json.loads(call("parts", "--json")[1])
    assert found["sampler"]["mine"]["about"].startswith("Epoch order")
    assert "no_such_module" in found["filter"]["broken"]["about"] and "greso" in found["sampler"]
