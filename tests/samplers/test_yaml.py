"""The Hydra files name every option of their part, with the part's own defaults."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources

import pytest
import yaml

from verl_adaptive.policy import PARTS, find_part


@pytest.mark.parametrize("name", sorted(PARTS["sampler"]))
def test_file_equals_the_parts_defaults(name):
    text = (resources.files("hydra_configs.verl_adaptive.adaptive.sampler") / f"{name}.yaml").read_text()
    options = yaml.safe_load(text)
    assert options.pop("name") == name
    part = find_part("sampler", name)({})
    assert options == asdict(part.config)
    assert asdict(find_part("sampler", name)(options).config) == options
