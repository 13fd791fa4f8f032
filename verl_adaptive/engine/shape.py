"""How a step is cut into groups: as verl's settings say, or the same rollouts spread over more prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from verl_adaptive.config import AdaptiveConfig, check
from verl_adaptive.policy import find_part, make_part
from verl_adaptive.roles import Allocator, Sampler

#: Asynchronous trainers, rollouts spread over prompts: the data set is at least so many times what is in flight. A prompt in
#: flight is not drawn, so the nearer the two are, the more the answers that train are short ones.
ROOM = 3


@dataclass(frozen=True)
class StepShape:
    """A step.

    Attributes:
        groups: groups that it trains.
        n: rollouts of a group, as the parts are told (an allocator may give more or fewer).
        config: the ``adaptive`` group, its allocator told the same.
        ahead: groups of further batches in flight.
        note: what is otherwise than asked for, or an empty string.
    """

    groups: int
    n: int
    config: AdaptiveConfig
    ahead: int = 0
    note: str = ""


def step_shape(config: AdaptiveConfig, batch: int, n: int, prompts: int, ahead: float = 0.0) -> StepShape:
    """The shape of a step under ``adaptive.batch_unit`` and the allocator's own group size.

    Args:
        config: the ``adaptive`` group.
        batch: ``data.train_batch_size``.
        n: ``actor_rollout_ref.rollout.n``.
        prompts: different prompts of the data set; no prompt is in two groups at a time.
        ahead: further batches in flight (``num_warmup_batches``).

    Returns:
        With ``batch_unit=groups`` groups of the allocator's own size, where it has one, else of ``n``. With
        ``batch_unit=rollouts`` groups of the smallest size, from the allocator's up, that divides ``n`` and
        needs no more prompts than there are, with batches ahead a third of them (``ROOM``); of size ``n`` if none does.

    Raises:
        ConfigError: there is no step; with ``batch_unit=rollouts`` the sampler plans group sizes, or the allocator does not
            give every prompt the same number, or one that does not divide ``n``.
    """
    for key, value in (("data.train_batch_size", batch), ("actor_rollout_ref.rollout.n", n)):
        check(value >= 1, key, value, "must be 1 or greater")
    allocator = cast(Allocator, make_part("allocator", config.allocator))
    fixed = allocator.fixed_size(n)
    plans = cast(type[Sampler], find_part("sampler", config.sampler["name"])).plans_rollouts
    if config.batch_unit == "groups":
        # A sampler that plans rollouts has a budget of n for each prompt, whatever an allocator makes of its plan.
        size = n if plans and fixed is None else allocator.group_size(n)
        return StepShape(batch, size, config, int(ahead * batch))
    check(
        not plans,
        "adaptive.batch_unit",
        "rollouts",
        f"adaptive/sampler={config.sampler['name']} plans each prompt's rollouts by itself; write adaptive.batch_unit=groups",
    )
    check(
        fixed is not None,
        "adaptive.batch_unit",
        "rollouts",
        f"adaptive/allocator={allocator.name} decides on group sizes as it goes; take adaptive/allocator=fixed, or "
        "adaptive.batch_unit=groups",
    )
    return _spread(config, batch, n, fixed or n, prompts, ahead)


def _spread(config: AdaptiveConfig, batch: int, n: int, wanted: int, prompts: int, ahead: float) -> StepShape:
    """``batch_unit=rollouts``: batch · n rollouts over groups of the size ``wanted``, or the next one that fits."""
    sizes = [k for k in range(1, n + 1) if n % k == 0]
    check(
        wanted in sizes,
        "adaptive.allocator.n",
        wanted,
        f"a step's rollouts are spread over groups that divide actor_rollout_ref.rollout.n={n}: "
        f"{', '.join(map(str, sizes))}",
    )
    room = ROOM * (1 + ahead) if ahead else 1
    fits = [k for k in sizes if k >= wanted and math.ceil(batch * (n // k) * room) <= prompts]
    size = fits[0] if fits else n
    note = ""
    if size != wanted:
        groups = batch * (n // wanted)
        short = f"are too few for {groups:,} groups of {wanted}"
        if ahead:
            short = f"are fewer than {ROOM} times the {math.ceil(groups * (1 + ahead)):,} groups of {wanted} in flight"
        note = f"{prompts:,} prompts {short}: groups of {size} instead"
    if "n" in config.allocator:
        config = replace(config, allocator={**config.allocator, "n": size})
    groups = batch * (n // size)
    return StepShape(groups, size, config, int(ahead * groups), note)
