"""Conditions: what they mean, and that they are nothing but conditions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.world import keys_of
from verl_adaptive.stats import StatsTable
from verl_adaptive.stats.expressions import Expression, ExpressionError
from verl_adaptive.stats.prompts import Prompts

RATES = [0.0, 0.1, 0.5, 0.9, 1.0, math.nan]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    table = StatsTable()
    table.rows_for(keys_of(6), sources=["a", "b", "a", "b", "a", "it's"])
    table.col("visits")[:] = [1, 2, 3, 4, 5, 0]
    table.col("rollouts")[:] = [10, 10, 10, 10, 10, 0]
    table.col("successes")[:] = [0, 1, 5, 9, 10, 0]
    table.declare("mine", {"x": (np.dtype("u2"), 7)})
    return Prompts(table)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0.1 <= pass_rate <= 0.9", [1, 2, 3]),
        ("not pass_rate < 0.5", [2, 3, 4]),  # unknown satisfies neither
        ("not (pass_rate < 0.5 or visits == 5)", [2, 3]),
        ("source != 'a'", [1, 3, 5]),
        ("source in ['b', \"it's\"]", [1, 3, 5]),
        ("source not in ('b',)", [0, 2, 4, 5]),
        ("visits in [-1, 5]", [4]),
        ("visits - 3 < -1", [0, 5]),  # unsigned columns do not wrap
        ("pass_rate / 0 > 1", [1, 2, 3, 4]),
        ("-visits >= -2", [0, 1, 5]),
        ("mine.x == 7 and True", [0, 1, 2, 3, 4, 5]),
        ("False", []),
        ("not " * 100 + "visits > 3" + " or visits == 1" * 500, [0, 3, 4]),
    ],
)
def test_meaning(text, rows, prompts) -> None:
    assert np.flatnonzero(Expression(text).select(prompts)).tolist() == rows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 + 1",
        "visits and pass_rate < 1",
        "source < 'a'",
        "source == 1",
        "visits == 'a'",
        "nothing > 1",
        "key == 'xyz'",
        "key == source",
        "visits in 3",
        "visits in [visits]",
        "visits ** 99 > 1",
        "visits is 1",
        "(visits > 1) + 1 > 1",
        "(visits > 1) == True",
        "visits > None",
        "__import__('os').system('true') == 0",
        "visits.__class__ == 1",
        "visits > 1\nimport os",
        "9" * 1500 + " > 1",
        "(" * 300 + "visits > 1" + ")" * 300,
        "visits > " + "-" * 500 + "1",
        "visits > 1 \x00",
    ],
)
def test_anything_else_is_refused(text, prompts) -> None:
    with pytest.raises(ExpressionError):
        Expression(text).select(prompts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pass_rat < 1", "did you mean pass_rate"),
        ("source = 'a'", "write == for equality"),
        ("source == math", "write 'math' in quotes"),
    ],
)
def test_what_was_meant_is_said(text, says, prompts) -> None:
    with pytest.raises(ExpressionError, match=says):
        Expression(text).select(prompts)


_number = st.sampled_from(["pass_rate", "visits", "rollouts", "0.5", "3", "-1.0"])
_compare = st.builds(
    lambda a, o, b: f"{a} {o} {b}", _number, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), _number
)
_condition = st.recursive(
    _compare,
    lambda inner: st.one_of(
        st.builds(lambda a, o, b: f"({a} {o} {b})", inner, st.sampled_from(["and", "or"]), inner),
        st.builds(lambda a: f"(not {a})", inner),
    ),
    max_leaves=6,
)


@given(_condition)
def test_it_agrees_with_python_where_everything_is_known(prompts, text) -> None:
    chosen = Expression(text).select(prompts)
    for row in range(5):
        known = {"pass_rate": RATES[row], "visits": float(row + 1), "rollouts": 10.0}
        assert chosen[row] == eval(text, {}, known)
