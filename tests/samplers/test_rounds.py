"""How much a step first asks for."""

from __future__ import annotations

import pytest

from tests.samplers.bound import progress_at
from tests.world import make_engine
from verl_adaptive.errors import ConfigError
from verl_adaptive.samplers.epoch import Epoch


def at(need: int, opened: int = 0, keep_rate: float | None = None, batch: int = 256):
    return progress_at(1, batch=batch, kept=batch - need, open=opened, keep_rate=keep_rate)


@pytest.mark.parametrize(
    ("config", "progress", "size"),
    [
        ({}, at(256), 256),
        ({}, at(0), 0),
        ({}, at(256, opened=256), 0),  # what waits for a top-up fills the batch
        ({}, at(256, opened=200), 56),
        ({}, at(256, keep_rate=0.5), 564),  # 1.1 · 256 / 0.5
        ({"safety": 1.25}, at(56, keep_rate=0.52), 135),  # GRESO: 1.25 · 56 / 0.52
        # a yield of nearly all asks for nearly as many as are missing
        *(
            ({}, at(100, keep_rate=rate), size)
            for rate, size in ((1.0, 100), (1 - 4e-16, 100), (0.99, 103), (0.9, 123))
        ),
        ({"safety": 1.25}, at(100, keep_rate=0.95), 111),  # 1.05 / 0.95, and not 1.25 / 0.95
        ({"prompts": 384}, at(256), 384),
        ({"prompts": 384}, at(0), 0),
    ],
)
def test_sizes(config, progress, size):
    assert Epoch({"round": config}).round_size(progress) == size


@pytest.mark.parametrize("sampler", ["epoch", "greso", "mopps", "retire"])
def test_a_first_request_smaller_than_the_batch_is_refused(sampler):
    """Without refill a step trained what was asked for, 4 of 8 groups."""
    with pytest.raises(ConfigError, match=r"adaptive\.sampler\.round\.prompts=4"):
        make_engine({"name": sampler, "round": {"prompts": 4}}, batch=8, refill=False)
