"""How a step's rollouts are spread over groups (``adaptive.batch_unit``)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine.shape import step_shape
from verl_adaptive.errors import ConfigError


def config(unit: str = "rollouts", n: int | None = 1, allocator: str = "fixed") -> AdaptiveConfig:
    options = {"name": allocator} | ({"n": n} if allocator == "fixed" else {})
    return AdaptiveConfig.from_mapping({"batch_unit": unit, "allocator": options})


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ({}, 8),
        ({"allocator": {"name": "fixed", "n": 2}}, 2),
        ({"allocator": {"name": "aero", "n": 16}}, 16),
        ({"allocator": {"name": "aero", "n": 16}, "sampler": {"name": "cero"}, "refill": False}, 8),
        ({"allocator": {"name": "reinforce_ada"}}, 8),
    ],
)
def test_groups_are_as_large_as_the_allocator_makes_them(parts, size) -> None:
    """A pool's epochs and the weights of ``mixed`` go by it: of groups of 2 they went by ``rollout.n``."""
    shape = step_shape(AdaptiveConfig.from_mapping({"batch_unit": "groups", **parts}), 16, 8, 10)
    assert (shape.groups, shape.n, shape.note) == (16, size, "")


def test_too_few_prompts_make_larger_groups() -> None:
    shape = step_shape(config(), 16, 8, 127)
    assert (shape.groups, shape.n) == (64, 2)
    assert shape.note == "127 prompts are too few for 128 groups of 1: groups of 2 instead"
    assert step_shape(config(), 16, 8, 128).n == 1


def test_batches_ahead_leave_most_prompts_to_be_drawn() -> None:
    """With 1.3 prompts to each in flight trained answers were 14 % shorter; with 3 see ``tests/test_inclusion.py``."""
    ahead = step_shape(config(), 16, 8, 767, ahead=1)
    assert ahead.n == 2
    assert ahead.note == "767 prompts are fewer than 3 times the 256 groups of 1 in flight: groups of 2 instead"
    assert step_shape(config(), 16, 8, 768, ahead=1).n == 1
    assert step_shape(config(), 16, 8, 10, ahead=4).n == 8  # what verl asks for, at least


@given(
    batch=st.integers(1, 600),
    n=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    own=st.sampled_from([1, 2, 4, None]),
    prompts=st.integers(1, 5000),
    ahead=st.floats(0, 3),
)
def test_rollouts_and_divisibility_are_kept(batch, n, own, prompts, ahead) -> None:
    size = own or n
    assume(n % size == 0)
    shape = step_shape(config(n=own), batch, n, prompts, ahead)
    assert shape.groups * shape.n == batch * n and shape.groups % batch == 0
    assert shape.config.allocator == {"name": "fixed", "n": shape.n} and shape.n >= size
    assert shape.n == n or shape.groups * (3 * (1 + ahead) if ahead else 1) <= prompts
    assert bool(shape.note) == (shape.n != size)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"^data\.train_batch_size=0: must be 1 or greater"):  # it was divided by
        step_shape(config(), 0, 8, 1000)
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.rollout\.n=0: must be 1 or greater"):
        step_shape(config(), 16, 0, 1000)
    with pytest.raises(ConfigError, match=r"^adaptive\.allocator\.n=3: .*rollout\.n=8: 1, 2, 4, 8"):
        step_shape(config(n=3), 16, 8, 1000)
    with pytest.raises(ConfigError, match=r"^adaptive\.batch_unit='rollouts': .*allocator=aero"):
        step_shape(config(allocator="aero"), 16, 8, 1000)
    planned = replace(config(), sampler={"name": "cero"})  # the size set here was then refused as the user's own
    with pytest.raises(ConfigError, match=r"^adaptive\.batch_unit='rollouts': .*sampler=cero plans"):
        step_shape(planned, 16, 8, 1000)
