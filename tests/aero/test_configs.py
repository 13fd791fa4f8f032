"""The YAML of allocators, filters and advantages says what the parts' dataclasses say."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources

import pytest
import yaml

from verl_adaptive.policy import find_part

FILES = {
    "allocator": ["fixed", "aero", "reinforce_ada"],
    "filter": ["keep_all", "informative", "aero"],
    "advantage": ["verl", "beta", "discounted_beta"],
}


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in FILES.items() for name in names])
def test_every_key_with_its_default(role: str, name: str) -> None:
    folder = resources.files(f"hydra_configs.verl_adaptive.adaptive.{role}")
    options = yaml.safe_load(folder.joinpath(f"{name}.yaml").read_text())
    assert options.pop("name") == name
    part = find_part(role, name)
    assert part.name == name and part.role == role
    assert options == asdict(part(options).config) == asdict(part().config)
