"""Columns of many rows are what verl itself would have made of them."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
from tensordict import NonTensorData, NonTensorStack
from verl.utils import tensordict_utils as tu

from verl_adaptive.integration.bulk import stacked, without_gc

COLUMNS = {
    "uid": ["a", "b", "a", "c", "d"],
    "messages": [[{"role": "user", "content": f"question {i}"}] for i in range(5)],
    "reward_model": [{"ground_truth": str(i), "style": {"of": ["rule"]}} for i in range(5)],
    "mixed": [None, True, 1, 1.0, ("x", 2)],
    "numbers": [np.int64(3), np.float32(0.5), np.array([1, 2]), [], [1, [2]]],
}


def said(column) -> list:
    """What verl's agent loop reads of it, row by row."""
    assert isinstance(column, NonTensorStack)
    return [column[i].data for i in range(len(column))]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_as_verl_makes_it(name):
    values = COLUMNS[name]
    ours, theirs = (
        tu.get_tensordict({name: column, "row": list(range(len(values)))})
        for column in (stacked(values), NonTensorStack(*[NonTensorData(value) for value in values]))
    )
    for part in range(2):  # as it is sent to the agent loop's workers
        mine, verls = (pickle.loads(pickle.dumps(batch.chunk(2)[part])) for batch in (ours, theirs))
        assert [type(v) for v in said(mine.get(name))] == [type(v) for v in said(verls.get(name))]
        np.testing.assert_equal(said(mine.get(name)), said(verls.get(name)))
    np.testing.assert_equal(said(ours.get(name)), values)


def test_rows_of_a_column_are_written_one_by_one():
    column = stacked(["a", "b", "c"])
    column[1] = NonTensorData("x")
    assert said(column) == ["a", "x", "c"]


def test_garbage_is_collected_afterwards():
    with without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
