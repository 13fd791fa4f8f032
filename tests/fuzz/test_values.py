"""Keys of prompts of any kind: the same ones again, or an error of ours that names what is wrong."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.common import examples
from verl_adaptive.stats import dataset_keys

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=8)
    | st.decimals()
    | st.datetimes()
    | st.timedeltas()
    | st.builds(object)
    | st.sampled_from([np.float32("nan"), np.datetime64("NaT"), np.int8(-1), np.array(3), np.zeros((2, 2)), "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=8,
)


@examples(100)
@given(values, values, values)
def test_keys_of_anything(messages, answer, source) -> None:
    row = {"prompt": messages, "data_source": source, "reward_model": {"ground_truth": answer}}
    try:
        first, again = dataset_keys([row]), dataset_keys([row])
    except (TypeError, ValueError) as error:  # callers add the file and the row
        assert str(error)
    else:
        assert np.array_equal(first, again)


def test_keys_of_what_is_endless_or_odd() -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    around: list = []
    around.append(around)
    for messages in (deep, around):
        with pytest.raises(ValueError, match="nested too deeply"):
            dataset_keys([{"prompt": messages}])
    dataset_keys([{"prompt": decimal.Decimal("sNaN")}, {"prompt": datetime.date.max}])
