"""The table: keys to rows, growth, columns, and `observe` against a slow reference."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stats.made import make_keys
from verl_adaptive.groups import Groups
from verl_adaptive.stats import StatsTable
from verl_adaptive.stats.keys import KEY_DTYPE, keys_bytes
from verl_adaptive.stats.table import SHARED_COLUMNS, Column

# -- rows -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.lists(st.integers(0, 60), max_size=50), st.booleans()), max_size=8), st.booleans())
def test_rows_for_against_a_dict(batches: list[tuple[list[int], bool]], alike: bool) -> None:
    keys = make_keys(61, alike=alike)
    table, model = StatsTable(), {}
    for numbers, create in batches:
        wanted = keys[np.array(numbers, dtype=np.int64)]
        if create:
            for key in keys_bytes(wanted):
                model.setdefault(key, len(model))
        rows = table.rows_for(wanted, create=create)
        assert rows.dtype == np.int64 and rows.tolist() == [model.get(key, -1) for key in keys_bytes(wanted)]
        assert keys_bytes(table.keys) == list(model)
        assert len(table) == len(model)


def test_growth_keeps_the_data() -> None:
    keys = make_keys(20_000)
    table = StatsTable()
    table.declare("p", {"x": Column("f4", -1)})
    for begin in range(0, 20_000, 50):
        rows = table.rows_for(keys[begin : begin + 50])
        table.col("visits")[rows] = rows
        table.col("p.x")[rows[::2]] = rows[::2]
    assert np.array_equal(table.rows_for(keys, create=False), np.arange(20_000))
    assert np.array_equal(table.col("visits"), np.arange(20_000))
    assert np.array_equal(table.col("p.x"), np.where(np.arange(20_000) % 2 == 0, np.arange(20_000), -1))
    assert np.isnan(table.col("last_rate")).all() and (table.col("last_step") == -1).all()


def test_at_most_104_bytes_a_prompt() -> None:
    table = StatsTable()
    table.rows_for(make_keys(2**18))
    table.rows_for(table.keys)  # what a search needs is made for the first one
    arrays = [table._keys, table._order, table._firsts, *table._data.values()]
    assert sum(array.nbytes for array in arrays) / len(table) <= 104


def test_keys_must_be_keys() -> None:
    table = StatsTable()
    for wrong in (np.arange(3), np.zeros((2, 2), dtype=KEY_DTYPE), ["x"]):
        with pytest.raises(ValueError, match="KEY_DTYPE"):
            table.rows_for(wrong)  # type: ignore[arg-type]
    assert len(table.rows_for(np.empty(0, dtype=KEY_DTYPE))) == 0
    table.rows_for(make_keys(3))
    with pytest.raises(ValueError, match="read-only"):
        table.keys["hi"][0] = 1
    assert np.array_equal(table.key_hi, make_keys(3)["hi"]) and np.array_equal(table.key_lo, make_keys(3)["lo"])


# -- columns and sources --------------------------------------------------------------------------------------------


def test_policies_declare_columns_of_their_own() -> None:
    table = StatsTable()
    table.rows_for(make_keys(3))
    table.declare("a", {"x": Column("i2", 7), "ok": Column(bool, True)})
    table.declare("b", {"x": Column(np.float64, math.nan)})
    assert table.col("a.x").tolist() == [7, 7, 7] and table.col("a.ok").dtype == bool
    assert np.isnan(table.col("b.x")).all()
    table.col("a.x")[1] = 9
    table.declare("a", {"x": Column("<i2", 7.0)})
    table.declare("b", {"x": Column("f8", float("nan"))})
    assert table.col("a.x").tolist() == [7, 9, 7]
    with pytest.raises(ValueError, match=r"a\.x is declared as int32 .* the table has it as int16"):
        table.declare("a", {"y": Column("f4"), "x": Column("i4", 7)})
    with pytest.raises(ValueError, match="default 8"):
        table.declare("a", {"x": Column("i2", 8)})
    assert "a.y" not in table.columns  # all or nothing
    for bad in (Column("O"), Column("S4"), Column("u1", -1), Column("u1", 300), Column("i4", math.nan)):
        with pytest.raises(ValueError, match="column|default"):
            table.declare("c", {"x": bad})
    for bad in ("f4", 3.0):
        with pytest.raises(ValueError, match=r'write a type and a default: Column\("f4", 0\.0\)'):
            table.declare("c", {"x": bad})
    with pytest.raises(ValueError, match="namespace"):
        table.declare("", {"x": Column("f4")})
    with pytest.raises(KeyError, match=r"no column 'nope'.*visits.*a\.x"):
        table.col("nope")


def test_sources() -> None:
    table, keys = StatsTable(), make_keys(6)
    assert table.sources == [""] and table.source_id("math") == 1 == table.source_id("math")
    table.rows_for(keys[:2], sources=["math", "code"])
    table.rows_for(keys[:4], sources=["code", "math", "code", ""])  # the first word stays
    table.rows_for(keys[[4, 4]], sources=["web", "math"])
    assert table.source_names() == ["math", "code", "code", "", "web"]
    table.rows_for(keys[[3, 5]], create=False, sources=["math", "math"])
    assert len(table) == 5 and table.col("source")[3] == 1
    with pytest.raises(ValueError, match="1 sources for 2 keys"):
        table.rows_for(keys[:2], sources=["math"])


def test_one_long_name_of_a_source_costs_its_own_length() -> None:
    """Each row's name took the room of the longest one: 3 GB for 200,000 prompts and a name of 1,000 characters."""
    table, keys = StatsTable(), make_keys(2000)
    tracemalloc.start()
    table.rows_for(keys, sources=["math"] * 1999 + ["x" * 10_000])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000 and table.sources == ["", "math", "x" * 10_000]


def test_view_by_source() -> None:
    table, keys = StatsTable(), make_keys(5)
    rows = table.rows_for(keys, sources=["math", "math", "code", "code", "new"])
    table.observe(
        Groups.from_lists(rows[:4], [[1, 1], [1, 0], [0, 0, 0], [1]], failed=[False, False, False, True]),
        1,
        tolerance=0.0,
    )
    table.col("retired")[rows[0]] = 1
    view = table.view_by_source()
    assert set(view) == {"math", "code", "new"}
    math_ = {"prompts": 2, "visited": 2, "visits": 2, "rollouts": 4, "successes": 3, "tokens": 4, "retired": 1}
    assert view["math"] == {**math_, "failures": 0, "easy": 1, "hard": 0, "pass_rate": 0.75}
    code = {"prompts": 2, "visited": 1, "visits": 1, "rollouts": 3, "successes": 0, "tokens": 3, "retired": 0}
    assert view["code"] == {**code, "failures": 1, "easy": 0, "hard": 1, "pass_rate": 0.0}
    assert math.isnan(view["new"]["pass_rate"]) and view["new"]["prompts"] == 1


# -- observe --------------------------------------------------------------------------------------------------------

_COUNT = 5


def slow_observe(model: list[dict[str, Any]], groups: Groups, step: int, tolerance: float) -> None:
    """`StatsTable.observe`, one group at a time, in plain Python. Sums within a group are numpy's."""
    for g in range(len(groups)):
        row = model[int(groups.row[g])]
        part = slice(int(groups.offsets[g]), int(groups.offsets[g + 1]))
        signal, reward, success = groups.signal[part], groups.reward[part], groups.success[part]

        def total(values: np.ndarray) -> float:
            with np.errstate(invalid="ignore"):
                return float(np.add.reduceat(values, [0])[0])

        row["last_try"] = step
        finite = len(signal) and all(math.isfinite(total(v)) for v in (signal, reward, success))
        if groups.failed[g] or not finite:
            row["failures"] = min(row["failures"] + 1, 65535)
            continue
        rate = total(success) / len(signal)
        kind = 0
        if float(signal.max()) - float(signal.min()) <= tolerance:
            kind = 1 if rate > 0.5 else -1
        if kind == 0:
            row["streak"] = 0
        elif kind == row["streak_kind"]:
            row["streak"] = min(row["streak"] + 1, 65535)
        else:
            row["streak"] = 1
        row["streak_kind"] = kind
        if row["visits"] == 0:
            row["first_step"], row["first_rate"] = step, float(np.float32(rate))
        row["last_step"], row["last_rate"] = step, float(np.float32(rate))
        row["last_n"] = len(signal)
        row["visits"] += 1
        row["rollouts"] += len(signal)
        row["tokens"] += int(groups.tokens[part].sum())
        row["successes"] += total(success)
        row["signal_sum"] += total(signal)
        row["signal_sqsum"] += total(signal * signal)
        row["reward_sum"] += total(reward)


def fresh_model(**columns: int) -> list[dict[str, Any]]:
    return [{name: column.default for name, column in SHARED_COLUMNS.items()} | columns for _ in range(_COUNT)]


def same(table: StatsTable, model: list[dict[str, Any]]) -> None:
    for name, column in SHARED_COLUMNS.items():
        want = np.array([row[name] for row in model]).astype(column.dtype)
        assert table.col(name).tobytes() == want.tobytes(), (name, table.col(name), want)


numbers = st.sampled_from([0.0, 1.0, 0.1, 0.5, 1 / 3, -2.0, 1e-7, 1e6]) | st.floats(-1e3, 1e3)
odd = numbers | st.sampled_from([math.nan, math.inf, -math.inf])
rollout = st.tuples(odd, odd, st.floats(0, 1), st.integers(0, 10**9))
group = st.tuples(st.integers(0, _COUNT - 1), st.lists(rollout, max_size=9), st.integers(0, 9).map(lambda n: n == 0))


def build(items: list[Any]) -> Groups:
    return Groups.from_lists(
        [row for row, _, _ in items],
        [[r[0] for r in rollouts] for _, rollouts, _ in items],
        signal=[[r[1] for r in rollouts] for _, rollouts, _ in items],
        success=[[r[2] for r in rollouts] for _, rollouts, _ in items],
        tokens=[[r[3] for r in rollouts] for _, rollouts, _ in items],
        failed=[failed for _, _, failed in items],
    )


@settings(max_examples=80)
@given(st.lists(st.lists(group, max_size=12), max_size=4), st.sampled_from([0.0, 0.15, 2.0]), st.booleans())
def test_observe_against_the_slow_reference(batches: list[list[Any]], tolerance: float, full: bool) -> None:
    """``full``: counters of 16 bits are nearly at their end, where they stay."""
    counts = {"failures": 65534, "streak": 65534} if full else {}
    table, model = StatsTable(), fresh_model(**counts)
    table.rows_for(make_keys(_COUNT))
    for name, count in counts.items():
        table.col(name)[:] = count
    for step, items in enumerate(batches):
        groups = build(items)
        table.observe(groups, step, tolerance=tolerance)
        slow_observe(model, groups, step, tolerance)
        same(table, model)


def test_rows_outside_the_table_are_an_error() -> None:
    table = StatsTable()
    table.rows_for(make_keys(2))
    for row in (-1, 2):
        with pytest.raises(IndexError, match="table of 2 rows"):
            table.observe(Groups.from_lists([row], [[1.0]]), 0, tolerance=0.0)
    table.observe(Groups.empty(), 0, tolerance=0.0)
    assert not table.col("visits").any()


# -- Arrow ----------------------------------------------------------------------------------------------------------


def filled() -> StatsTable:
    table = StatsTable()
    table.rows_for(make_keys(100), sources=["math"] * 60 + ["code"] * 40)
    table.declare("greso", {"p": Column("f4", math.nan), "ok": Column(bool, True), "n": Column("i8", -5)})
    draw = np.random.default_rng(1)
    for step in range(5):
        rows = draw.integers(0, 100, 50)
        table.observe(Groups.from_lists(rows, draw.integers(0, 2, (50, 3)).tolist()), step, tolerance=0.0)
    table.col("greso.p")[::3] = draw.random(34)
    table.col("greso.ok")[::2] = False
    return table


def equal(one: StatsTable, other: StatsTable) -> None:
    assert keys_bytes(one.keys) == keys_bytes(other.keys)
    assert one.sources == other.sources and one.columns.keys() == other.columns.keys()
    for name in one.columns:
        assert one.columns[name].same(other.columns[name]), name
        assert one.col(name).tobytes() == other.col(name).tobytes(), name


def test_arrow_that_is_no_table_is_refused() -> None:
    data = filled().to_arrow()
    with pytest.raises(ValueError, match="a key occurs twice"):
        StatsTable.from_arrow(data, data.slice(0, 1))
    with pytest.raises(ValueError, match="not a statistics table"):
        StatsTable.from_arrow(pa.table({"key": [b"x" * 16]}))
    with pytest.raises(ValueError, match="not a statistics table"):
        StatsTable.from_arrow()
    other = StatsTable()
    with pytest.raises(ValueError, match="different statistics tables"):
        StatsTable.from_arrow(data, other.to_arrow())
    nameless = json.loads(data.schema.metadata[b"verl_adaptive.table"]) | {"sources": [""]}
    with pytest.raises(ValueError, match="data source has no name"):
        StatsTable.from_arrow(data.replace_schema_metadata({b"verl_adaptive.table": json.dumps(nameless)}))
    position = data.schema.get_field_index("visits")
    with pytest.raises(ValueError, match="visits has missing values"):
        StatsTable.from_arrow(data.set_column(position, "visits", pa.nulls(100, pa.uint32())))
    with pytest.raises(ValueError, match="visits holds int64"):
        StatsTable.from_arrow(data.set_column(position, "visits", pa.array(range(100), pa.int64())))
