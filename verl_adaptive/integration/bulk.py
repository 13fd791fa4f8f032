"""Many rows at once: what a step of tens of thousands of rollouts would otherwise spend most of its time on."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict


@contextmanager
def without_gc() -> Iterator[None]:
    """While rows are made, which are in no cycles, the garbage collector would look all objects over again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def stacked(values: Iterable[Any]) -> NonTensorStack:
    """A column as :func:`verl.utils.tensordict_utils.get_tensordict` makes it, for a third of the time.

    The constructor of a value's wrapper looks for tensors in it and makes it a TensorDict of its own. These values are
    none (verl's collation has made columns of tensors of those): they share one, and each is wrapped once only.
    """
    nothing = TensorDict({}, batch_size=[])
    wrapped: dict[Hashable, NonTensorData] = {}
    column = []
    for value in values:
        name = (type(value), value) if isinstance(value, str | int) else id(value)
        if name not in wrapped:
            wrapped[name] = NonTensorData.from_tensordict(nothing, {"data": value})
        column.append(wrapped[name])
    return NonTensorStack(*column)
