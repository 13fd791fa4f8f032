"""Identity of prompts: canonical, stable across processes, blind to what must not matter."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stats.made import make_keys
from verl_adaptive.stats import dataset_identity, dataset_keys, fingerprint, repeated_rows
from verl_adaptive.stats.keys import KEY_DTYPE, Identity, custom_key, key_hex, keys_array, keys_bytes, prompt_key

VECTORS = json.loads((Path(__file__).parent / "fixtures" / "key_vectors.json").read_text(encoding="utf-8"))


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("vector", VECTORS["content"], ids=lambda v: v["name"])
def test_content_vectors(vector: dict[str, Any]) -> None:
    assert prompt_key(vector["data_source"], vector["messages"], vector["ground_truth"]).hex() == vector["key"]


@pytest.mark.parametrize("vector", VECTORS["custom"], ids=lambda v: repr(v["value"]))
def test_custom_vectors(vector: dict[str, Any]) -> None:
    assert custom_key(vector["value"]).hex() == vector["key"]


def test_every_value_type_has_a_frozen_encoding() -> None:
    value = {
        "bytes": b"\x00\xff",
        "bool": True,
        "big": 2**200,
        "small": -(2**70),
        "float": 0.1,
        "inf": float("-inf"),
        "nan": float("nan"),
        "matrix": np.arange(6, dtype=np.int32).reshape(2, 3),
        "surrogate": "\ud800",
        "image": {"bytes": b"png", "path": "a.png"},
    }
    assert prompt_key("s", value, None).hex() == VECTORS["types"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": 1, "b": None}),
        ([1, 2], (1, 2)),
        ([1, 2], np.array([1, 2])),
        ([[1, 2], [3]], np.array([np.array([1, 2]), np.array([3])], dtype=object)),
        (1, 1.0),
        (7, np.int64(7)),
        (b"x", bytearray(b"x")),
        ({"bytes": b"img", "path": None}, {"bytes": b"img"}),
        ({"bytes": b"img", "path": "a.png"}, b"img"),
        (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        (np.arange(4, dtype="<i4").reshape(2, 2), np.arange(4, dtype=">i4").reshape(2, 2)),
    ],
)
def test_what_must_not_matter(one: Any, other: Any) -> None:
    assert prompt_key("s", one, "a") == prompt_key("s", other, "a")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"bytes": None, "path": "a.png"}, {"bytes": None, "path": "b.png"}),
        ([1, None], [1]),
        (np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2)),
        (0.1, np.float32(0.1)),
        (datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29)),
        (Decimal("1.5"), Decimal("2.5")),
    ],
)
def test_what_must_matter(one: Any, other: Any) -> None:
    """Types, lengths and fields that must not run into each other: the frozen vectors above."""
    assert prompt_key("s", one, "a") != prompt_key("s", other, "a")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def canonical(value: Any) -> Any:
    """What two values have in common if their keys may be equal."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, int | float):
        return ("number", value)
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes) and value.keys() <= {"bytes", "path"}:
            return ("bytes", value["bytes"])
        return ("dict", {k: canonical(v) for k, v in value.items() if v is not None})
    if isinstance(value, list):
        return ("list", [canonical(v) for v in value])
    return (type(value).__name__, value)


@given(plain, plain)
def test_equal_keys_mean_equal_values(one: Any, other: Any) -> None:
    same = canonical(one) == canonical(other)
    assert (prompt_key("s", one, None) == prompt_key("s", other, None)) == same


@given(plain)
def test_a_trip_through_json_or_arrow_does_not_matter(value: Any) -> None:
    try:
        text = json.dumps(value)
    except TypeError:
        return  # bytes
    assert custom_key([json.loads(text)]) == custom_key([value])


def test_a_value_without_canonical_form_is_an_error_that_helps() -> None:
    with pytest.raises(TypeError, match=r"object.*adaptive\.id_key"):
        prompt_key("s", object(), None)
    with pytest.raises(ValueError, match="None"):
        custom_key(None)
    assert custom_key(["s", "m", "a"]) != prompt_key("s", "m", "a")


# -- images ---------------------------------------------------------------------------------------------------------


def test_pil_images_are_hashed_by_pixels() -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    again = image_module.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    turned = image.transpose(image_module.Transpose.ROTATE_90)
    keys = [prompt_key("s", [{"type": "image", "image": i}], "a") for i in (image, again, turned, image.convert("L"))]
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.parametrize("none", [None, [], (), np.array([], dtype=object)])
def test_an_empty_list_of_images_is_none(none: Any) -> None:
    """A text prompt of a mixed data set is the one of an evaluation that has no such column."""
    row = {"data_source": "geo", "prompt": chat("2 + 2?"), "reward_model": {"ground_truth": "4"}}
    shown = {**row, "images": [{"bytes": b"one", "path": None}]}
    one, two = dataset_keys([{**row, "images": none}, {**shown, "videos": none}])
    assert [one, two] == [dataset_keys([row])[0], dataset_keys([shown])[0]]


def test_a_hugging_face_dataset_is_read_without_decoding(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {
            "data_source": "geo",
            "prompt": chat("<image>Find x."),
            "images": [{"bytes": b"this is no image and cannot be decoded", "path": f"{i}.png"}],
            "reward_model": {"ground_truth": "3", "style": "rule"},
            "extra_info": {"index": i},
        }
        for i in range(3)
    ]
    images = datasets.List(datasets.Image()) if hasattr(datasets, "List") else [datasets.Image()]
    data = datasets.Dataset.from_list(rows).cast_column("images", images)
    keys = dataset_keys(data)
    assert len(np.unique(keys)) == 1 and keys[0] == dataset_keys(rows)[0]
    by_id = dataset_keys(data, Identity(id_key="extra_info.index"))
    assert keys_bytes(by_id) == [custom_key(i) for i in range(3)]
    with pytest.raises(ValueError, match=r"adaptive\.id_key='nope\.x'.*data_source"):
        dataset_keys(data, Identity(id_key="nope.x"))


# -- arrays and data sets -------------------------------------------------------------------------------------------


def test_keys_as_arrays_bytes_and_hex() -> None:
    raw = [bytes(range(16)), bytes(range(16, 32)), b"\xff" * 16]
    keys = keys_array(raw)
    assert keys.dtype == KEY_DTYPE and keys["hi"][0] == 0x0001020304050607 and keys["lo"][0] == 0x08090A0B0C0D0E0F
    assert keys_bytes(keys) == raw
    assert key_hex(keys) == [k.hex() for k in raw]
    assert len(keys_array([])) == 0 and keys_bytes(keys[:0]) == [] and key_hex(keys[:0]) == []
    with pytest.raises(ValueError, match="16 bytes, got 3"):
        keys_array([b"abc"])


def test_a_data_set_split_into_files_with_different_columns_keeps_its_keys(tmp_path: Path) -> None:
    """Arrow joins files by filling in ``None`` for what one of them lacks, down in the messages too."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    plain = [{"data_source": "a", "prompt": chat(f"q{i}"), "reward_model": {"ground_truth": str(i)}} for i in range(3)]
    rich = [
        {
            "data_source": "b",
            "prompt": [{"role": "user", "content": f"t{i}", "name": "me"}, {"role": "tool", "content": None, "id": i}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "ability": "tools",
        }
        for i in range(3)
    ]
    tables = [pa.Table.from_pylist(rows) for rows in (plain, rich)]
    for name, table in zip(("plain", "rich"), tables, strict=True):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    joined = pa.concat_tables(tables, promote_options="permissive").to_pylist()
    assert joined[0]["prompt"][0].keys() == {"role", "content", "name", "id"}
    apart = [dataset_keys(pq.read_table(tmp_path / f"{name}.parquet").to_pylist()) for name in ("plain", "rich")]
    assert np.array_equal(dataset_keys(joined), np.concatenate(apart))
    assert np.array_equal(dataset_keys(joined), dataset_keys(plain + rich))


def test_rows_without_what_is_needed_are_named() -> None:
    rows = [{"data_source": "s", "prompt": chat("x"), "extra_info": {"id": 3}}, {"data_source": "s", "text": "x"}]
    with pytest.raises(ValueError, match=r"data\.prompt_key='prompt': row 1 .*data_source, text"):
        dataset_keys(rows)
    with pytest.raises(ValueError, match=r"adaptive\.id_key='extra_info\.id': row 1 .*data_source, text"):
        dataset_keys(rows, Identity(id_key="extra_info.id"))
    assert len(dataset_keys(rows[:1], Identity(id_key="extra_info.id"))) == 1
    assert dataset_keys([{"text": "x", "a.b": 1}], Identity("text", "a.b"))[0] == keys_array([custom_key(1)])[0]


def test_one_question_with_two_answers_is_two_prompts() -> None:
    rows = [{"prompt": chat("x"), "reward_model": {"ground_truth": answer}} for answer in ("1", "2", "1")]
    keys, questions = dataset_identity(rows)
    assert np.array_equal(keys, dataset_keys(rows)) and len(np.unique(keys)) == 2
    assert "(first: row 1 repeats row 0)" in repeated_rows(questions)
    assert "(first: row 2 repeats row 0)" in repeated_rows(keys)


@given(st.lists(st.integers(0, 12), max_size=40), st.booleans())
def test_repeated_rows_against_a_dict(numbers: list[int], alike: bool) -> None:
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(numbers):
        rows.setdefault(number, []).append(row)
    said = repeated_rows(make_keys(13, alike=alike)[np.array(numbers, dtype=np.int64)])
    again = sorted(r for r in rows.values() if len(r) > 1)
    if again:
        more = len(numbers) - len(rows)
        assert said.startswith(
            f"{len(numbers)} rows hold {len(rows)} different prompts: {more} row{'s' * (more != 1)} with"
        )
        assert f"row {again[0][1]} repeats row {again[0][0]}" in said
    assert bool(said) == bool(again)


@given(st.lists(st.integers(0, 12), max_size=40), st.randoms(), st.booleans())
def test_a_fingerprint_names_a_set(numbers: list[int], draw: Any, alike: bool) -> None:
    keys = make_keys(13, alike=alike)
    shuffled = numbers + numbers[:5]
    draw.shuffle(shuffled)
    one = fingerprint(keys[np.array(numbers, dtype=np.int64)])
    assert one == fingerprint(keys[np.array(shuffled, dtype=np.int64)])
    missing = sorted(set(range(13)) - set(numbers))
    if missing:
        assert one != fingerprint(keys[np.array([*numbers, missing[0]], dtype=np.int64)])
