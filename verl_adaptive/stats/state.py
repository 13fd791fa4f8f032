"""Policy and engine state as two plain files: JSON for the structure, NPZ for the arrays in it. Never a pickle."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from io import BytesIO
from typing import Any

import numpy as np

_ARRAY = "__ndarray__"
_BYTES = "__bytes__"
#: What a file that :func:`split_state` has not written can cause.
_STRANGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    AttributeError,
    EOFError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
)


def split_state(state: dict[str, Any]) -> tuple[bytes, bytes]:
    """Encode a nested state.

    Args:
        state: dicts with string keys, lists, tuples (which come back as lists), strings, bytes, numbers, booleans,
            ``None``, numpy scalars (which come back as Python's) and numpy arrays of plain dtypes, nested at will.

    Returns:
        ``(JSON, NPZ)``.

    Raises:
        TypeError: something else; the message says where in the state.
    """
    arrays: dict[str, np.ndarray] = {}

    def plain(value: Any, where: str) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise TypeError(f"state{where}: an array of Python objects cannot be stored")
            name = f"a{len(arrays)}"
            arrays[name] = value
            return {_ARRAY: name}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return {_BYTES: value.hex()}
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"state{where}: the key {key!r} is a {type(key).__name__}, keys must be strings")
                if key in (_ARRAY, _BYTES):
                    raise TypeError(f"state{where}: the key {key!r} is reserved")
            return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        raise TypeError(f"state{where}: a {type(value).__name__} cannot be stored")

    document = json.dumps(plain(state, ""), indent=1).encode()
    npz = BytesIO()
    np.savez(npz, allow_pickle=False, **arrays)
    return document, npz.getvalue()


def join_state(document: bytes, npz: bytes) -> dict[str, Any]:
    """The inverse of :func:`split_state`.

    Raises:
        ValueError: the two do not belong together, or are damaged.
    """
    try:
        with np.load(BytesIO(npz), allow_pickle=False) as archive:
            arrays = dict(archive)
    except _STRANGE as error:
        raise ValueError(f"not a file of arrays: {error}") from error

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {_ARRAY}:
                name = value[_ARRAY]
                if not isinstance(name, str) or name not in arrays:
                    raise ValueError(f"array {name!r} is missing")
                return arrays[name]
            if value.keys() == {_BYTES}:
                return bytes.fromhex(str(value[_BYTES]))
            return {key: full(item) for key, item in value.items()}
        return [full(item) for item in value] if isinstance(value, list) else value

    try:
        return full(json.loads(document))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
