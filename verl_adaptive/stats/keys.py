"""Identity of a prompt: 128 bits that name its content, the same in every process, on every machine, in every run.

A key is a BLAKE2b hash of (data source, messages, ground truth) in a canonical encoding: every value carries its type
and its length, so no two different values share an encoding. What must *not* make a difference does not:

* the order of a dict's entries, and entries that are ``None`` (Arrow fills them in when files are read together);
* list, tuple or one-dimensional array (pandas, ``datasets`` and JSON disagree about which they give);
* numpy scalar or Python scalar, ``1.0`` or ``1`` (JSON and pandas turn one into the other);
* the path beside an image whose bytes are given (``{"bytes": …, "path": …}``): the bytes are the image.

What a row has beside these is not part of its key: ``extra_info``, ``tools_kwargs``, ``interaction_kwargs`` and
``agent_name``. In most data sets they are book-keeping (a position, a split, an estimate of difficulty) that the next export
writes differently, and that the files of an evaluation do not have: statistics of the same question would not be found
again, in silence. Where such a column does tell rows apart (an environment's seed), only the user knows; so the first two rows
that have one key and differ there are said (:func:`first_difference`), and ``adaptive.id_key`` tells them apart.

Images are hashed as their encoded bytes, never decoded. A PIL image has no encoded bytes left, so its pixels are
hashed; :func:`dataset_keys` therefore asks a ``datasets.Dataset`` for the stored bytes, not for images.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_adaptive.text import counted

KEY_DTYPE = np.dtype([("hi", "<u8"), ("lo", "<u8")])
"""A key as two unsigned words; sorting by (hi, lo) is sorting by the 16 bytes, and by their hex form."""

MEDIA_FIELDS = ("images", "videos", "audios")
"""Fields of a row that hold what a placeholder such as ``<image>`` in the messages stands for, verl's default names."""

# The `person` field of BLAKE2b keeps the two kinds of key, and later versions of the encoding, apart.
_CONTENT = b"verl-adaptive.p1"
_CUSTOM = b"verl-adaptive.c1"


# -- canonical encoding ---------------------------------------------------------------------------------------------


def _sized(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "big") + payload


def _many(tag: bytes, parts: Sequence[bytes]) -> bytes:
    return tag + len(parts).to_bytes(8, "big") + b"".join(parts)


def _encode(value: Any) -> bytes:
    """The canonical encoding of what Parquet, JSON, pandas, ``datasets`` or verl may give; TypeError for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, bool):
        return {None: b"n", True: b"t", False: b"f"}[value]
    if isinstance(value, int):
        return _sized(b"i", format(value, "x").encode())  # hex: Python refuses to print very long integers in decimal
    if isinstance(value, float):
        return b"d" + (b"nan" if math.isnan(value) else struct.pack(">d", value))
    if isinstance(value, Mapping):
        return _encode_mapping(value)
    if isinstance(value, list | tuple):
        return _many(b"l", [_encode(item) for item in value])
    if isinstance(value, bytes | bytearray | memoryview):
        return _sized(b"b", bytes(value))
    if isinstance(value, decimal.Decimal | datetime.date | datetime.time | datetime.timedelta):
        return _sized(b"T", str(value).encode())
    if any(c.__module__ == "PIL.Image" and c.__name__ == "Image" for c in type(value).__mro__):
        return _sized(b"P", f"{value.mode}{tuple(value.size)}".encode()) + _sized(b"", value.tobytes())
    if hasattr(value, "__array__"):
        return _encode_array(np.asarray(value))
    raise TypeError(
        f"cannot make a stable key from a {type(value).__module__}.{type(value).__qualname__}; "
        "name a column of strings or integers with adaptive.id_key instead"
    )


def _encode_mapping(value: Mapping[Any, Any]) -> bytes:
    data = value.get("bytes")
    if isinstance(data, bytes | bytearray | memoryview) and value.keys() <= {"bytes", "path"}:
        return _encode(data)
    pairs = sorted((_encode(k), _encode(v)) for k, v in value.items() if v is not None)
    return _many(b"m", [k + v for k, v in pairs])


def _encode_array(value: np.ndarray) -> bytes:
    if value.ndim < 2 or value.dtype == object:
        return _encode(value.tolist())
    flat = np.ascontiguousarray(value)
    flat = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
    return _sized(b"a", f"{flat.dtype.str}{flat.shape}".encode()) + _sized(b"", flat.tobytes())


# -- keys -----------------------------------------------------------------------------------------------------------


def _canonical(value: Any) -> bytes:
    try:
        return _encode(value)
    except RecursionError:
        raise ValueError("a value is nested too deeply to be a prompt, or contains itself") from None


def prompt_key(data_source: Any, messages: Any, ground_truth: Any, media: Any = None) -> bytes:
    """The 16-byte key of a prompt's content.

    Args:
        data_source: the row's ``data_source``.
        messages: the chat messages (list of dicts), or a plain string.
        ground_truth: the reference answer, of any plain type.
        media: images, videos or audios that placeholders in the messages stand for, if they are kept beside them.

    Returns:
        16 bytes, stable across processes, machines and Python versions.

    Raises:
        TypeError: a value has no canonical form (an arbitrary object).
    """
    return _content_key(_content(data_source, messages, ground_truth, media))


def _content(data_source: Any, messages: Any, ground_truth: Any, media: Any) -> list[bytes]:
    """What makes a prompt's identity, encoded: data source, messages, answer, and media if there are any."""
    parts = [data_source, messages, ground_truth] if media is None else [data_source, messages, ground_truth, media]
    return [_canonical(part) for part in parts]


def _content_key(parts: Sequence[bytes]) -> bytes:
    """The key of content whose parts are encoded already: that of their sequence."""
    return hashlib.blake2b(_many(b"l", parts), digest_size=16, person=_CONTENT).digest()


def custom_key(value: Any) -> bytes:
    """The 16-byte key for a user's own identifier (``adaptive.id_key``); ``7`` and ``"7"`` are different prompts.

    Raises:
        ValueError: the identifier is ``None``.
        TypeError: it has no canonical form.
    """
    if value is None:
        raise ValueError("adaptive.id_key: an identifier must not be None")
    return hashlib.blake2b(_canonical(value), digest_size=16, person=_CUSTOM).digest()


def keys_array(keys: Sequence[bytes]) -> np.ndarray:
    """16-byte keys as an array of :data:`KEY_DTYPE`, shape ``(len(keys),)``.

    Raises:
        ValueError: a key is not 16 bytes long.
    """
    for key in keys:
        if len(key) != 16:
            raise ValueError(f"a key has 16 bytes, got {len(key)}: {key!r}")
    words = np.frombuffer(b"".join(keys), dtype=">u8").astype("<u8")
    return words.view(KEY_DTYPE)


def keys_bytes(keys: np.ndarray) -> list[bytes]:
    """The inverse of :func:`keys_array`: one 16-byte string a key."""
    raw = np.ascontiguousarray(keys).view("<u8").astype(">u8").tobytes()
    return [raw[i : i + 16] for i in range(0, len(raw), 16)]


def key_hex(keys: np.ndarray) -> list[str]:
    """32 hex digits a key."""
    return [key.hex() for key in keys_bytes(keys)]


# -- data sets ------------------------------------------------------------------------------------------------------


def dig(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; ``None`` if any part is missing. A column whose name has dots wins."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return None
    return value


@dataclass(frozen=True)
class Identity:
    """Which columns of a data set say which prompt a row is.

    Attributes:
        prompt_key: the messages (verl's ``data.prompt_key``).
        id_key: dotted path of the user's own identifier (``adaptive.id_key``), which then counts instead of the content.
        media_keys: the columns of ``images``, ``videos`` and ``audios`` (``data.image_key`` and so on), where they are not
            called that.
    """

    prompt_key: str = "prompt"
    id_key: str | None = None
    media_keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def media(self) -> dict[str, str]:
        """The column of each of :data:`MEDIA_FIELDS`."""
        return {name: self.media_keys.get(name, name) for name in MEDIA_FIELDS}

    @property
    def columns(self) -> set[str]:
        """What has to be read: the content's columns, and the root of the user's own identifier."""
        own = () if self.id_key is None else (self.id_key, self.id_key.split(".")[0])
        return {"data_source", self.prompt_key, "reward_model", *self.media.values(), *own}

    def words(self) -> list[str]:
        """The options of ``verl-adaptive`` that say the same."""
        named = [("--prompt-key", self.prompt_key)] * (self.prompt_key != "prompt")
        named += [("--id-key", self.id_key)] if self.id_key is not None else []
        named += [("--media-key", f"{kind}={name}") for kind, name in self.media_keys.items()]
        return [word for pair in named for word in pair]

    def media_of(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Images, videos and audios of a row, as stored and by verl's default names, so that a column may be renamed.

        An empty list is none, as for verl: files with and without the column are read together.
        """
        stored = {name: row.get(column) for name, column in self.media.items()}
        found = {name: media for name, media in stored.items() if media is not None}
        return {name: media for name, media in found.items() if not isinstance(media, Sized) or len(media)} or None


CONTENT = Identity()
"""verl's default columns."""


def _leaves(row: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[str]:
    out = []
    for name, value in row.items():
        if isinstance(value, Mapping) and depth < 2:
            out += _leaves(value, f"{prefix}{name}.", depth + 1)
        else:
            out.append(f"{prefix}{name}")
    return out


def _stored_rows(rows: Iterable[Mapping[str, Any]], columns: set[str]) -> Iterator[Mapping[str, Any]]:
    """Rows as they are stored: a ``datasets.Dataset`` would decode every image on the way."""
    if hasattr(rows, "select_columns") and hasattr(rows, "column_names"):
        wanted = [name for name in rows.column_names if name in columns]
        for batch in rows.select_columns(wanted).with_format("arrow").iter(batch_size=1000):
            yield from batch.to_pylist()
    else:
        yield from rows


def dataset_keys(rows: Iterable[Mapping[str, Any]], identity: Identity = CONTENT) -> np.ndarray:
    """One key a row of a data set, in its order.

    Args:
        rows: dicts with ``data_source``, the prompt's messages and ``reward_model.ground_truth``, as verl stores them
            (any iterable; a ``datasets.Dataset`` is read without decoding its images).
        identity: the columns.

    Returns:
        Array of :data:`KEY_DTYPE`, shape ``(rows,)``.

    Raises:
        ValueError: a row lacks the messages or the identifier; the message names the row and what it does have.
    """
    if identity.id_key is not None:
        return keys_array([custom_key(value) for value in _identifiers(rows, identity.id_key)])
    return keys_array([_content_key(parts) for parts in _contents(rows, identity)])


def dataset_identity(rows: Iterable[Mapping[str, Any]], identity: Identity = CONTENT) -> tuple[np.ndarray, np.ndarray]:
    """:func:`dataset_keys`, and the keys of the questions, which leave the answer out: one question may have two answers.

    With the user's own identifiers both are these.
    """
    if identity.id_key is not None:
        keys = dataset_keys(rows, identity)
        return keys, keys
    made = [
        (_content_key(parts), _content_key([*parts[:2], _encode(None), *parts[3:]]))
        for parts in _contents(rows, identity)
    ]
    return keys_array([key for key, _ in made]), keys_array([question for _, question in made])


def _contents(rows: Iterable[Mapping[str, Any]], identity: Identity) -> Iterator[list[bytes]]:
    """:func:`_content` of every row."""
    for number, row in enumerate(_stored_rows(rows, identity.columns)):
        messages = row.get(identity.prompt_key)
        if messages is None:
            raise ValueError(
                f"data.prompt_key={identity.prompt_key!r}: row {number} has no such value; it has: "
                f"{', '.join(_leaves(row))}"
            )
        answer = dig(row, "reward_model.ground_truth")
        yield _content(row.get("data_source"), messages, answer, identity.media_of(row))


def _identifiers(rows: Iterable[Mapping[str, Any]], id_key: str) -> Iterator[Any]:
    """The user's own identifier of every row."""
    roots, columns = {id_key, id_key.split(".")[0]}, getattr(rows, "column_names", None)
    if columns is not None and not roots & set(columns):
        raise ValueError(f"adaptive.id_key={id_key!r} is not in the data set; it has: {', '.join(columns)}")
    for number, row in enumerate(_stored_rows(rows, roots)):
        value = dig(row, id_key)
        if value is None:
            raise ValueError(
                f"adaptive.id_key={id_key!r}: row {number} has no such value; it has: {', '.join(_leaves(row))}"
            )
        yield value


def sort_order(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions that sort ``keys`` (equal keys in their order), and bool ``(n,)``: first of its kind in that order."""
    order = np.argsort(keys["hi"])  # unstable but fast; ties, which content hashes do not have, take the slow way
    if (np.diff(keys["hi"][order]) == 0).any():
        order = np.lexsort((keys["lo"], keys["hi"]))
    ranked = keys[order]
    first = np.ones(len(keys), dtype=bool)
    first[1:] = ranked[1:] != ranked[:-1]
    return order, first


def fingerprint(keys: np.ndarray) -> str:
    """32 hex digits that name a *set* of keys: order and repetition make no difference.

    Args:
        keys: array of :data:`KEY_DTYPE`.
    """
    order, first = sort_order(keys)
    return hashlib.blake2b(keys[order[first]].tobytes(), digest_size=16, person=b"verl-adaptive.f1").hexdigest()


def _leaders(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64, of each row of a data set the first row that has its key; and the rows for which that is an earlier one."""
    order, first = sort_order(keys)
    leader = np.empty(len(keys), dtype=np.int64)
    leader[order] = order[first][np.cumsum(first) - 1]
    return leader, np.flatnonzero(leader != np.arange(len(keys)))


def repeated_rows(keys: np.ndarray) -> str:
    """How many rows of a data set repeat an earlier one, in words, with the first example; empty: none does."""
    leader, again = _leaders(keys)
    if not len(again):
        return ""
    example = again[np.argmin(leader[again])]
    return (
        f"{len(keys)} rows hold {len(keys) - len(again)} different prompts: {counted(len(again), 'row')} with an earlier one's "
        f"prompt and statistics (first: row {example} repeats row {leader[example]})"
    )


#: Where a row says where it comes from.
_BOOKKEEPING = frozenset({"index", "split", "extra_info.index", "extra_info.split"})


def first_difference(
    rows: Iterable[Mapping[str, Any]], keys: np.ndarray, identity: Identity
) -> tuple[int, int, list[str]] | None:
    """The first two rows that have one key and differ in something else that verl hands to the agent loop.

    Position and split (``extra_info.index``, ``extra_info.split``) are no difference.

    Args:
        rows, identity: as in :func:`dataset_keys`.
        keys: theirs.

    Returns:
        Both rows and the dotted paths of what differs; None if there are no such rows.
    """
    leader, again = _leaders(keys)
    apart = {"data_source", identity.prompt_key, "raw_prompt", *identity.media.values()}
    columns = set(getattr(rows, "column_names", ())) - apart
    if not len(again):
        return None
    wanted = set(again.tolist()) | set(leader[again].tolist())
    seen: dict[int, dict[str, bytes]] = {}
    for number, row in enumerate(_stored_rows(rows, columns)):
        if number not in wanted:
            continue
        values = _beside(row, apart)
        head = seen.setdefault(int(leader[number]), values)
        if head != values:
            paths = sorted(path for path in head.keys() | values.keys() if head.get(path) != values.get(path))
            return int(leader[number]), number, paths
    return None


def _beside(row: Mapping[str, Any], apart: set[str]) -> dict[str, bytes]:
    """What a row has beside its identity: dotted path → encoded value, what is empty or has no canonical form left out."""
    found = {}
    for path in _leaves({name: value for name, value in row.items() if name not in apart}):
        value = dig(row, path)
        if value is None or path in _BOOKKEEPING or path == "reward_model.ground_truth":
            continue
        with contextlib.suppress(TypeError, ValueError):
            found[path] = _canonical(value)
    return found
