"""Many rows at once: what a step of tens of thousands of rollouts would otherwise spend most of its time on."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict

__all__ = ["stacked", "without_gc"]


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
    values = list(values)
    kinds = set(map(type, values))
    alike = kinds == {str} or kinds == {int}  # True is an int, too, and 1.0 equals 1
    names: list[Hashable] = values if alike else list(map(id, values))
    wrap = NonTensorData.from_tensordict
    wrapped = {name: wrap(nothing, {"data": value}) for name, value in dict(zip(names, values, strict=True)).items()}
    return NonTensorStack(*map(wrapped.__getitem__, names))
