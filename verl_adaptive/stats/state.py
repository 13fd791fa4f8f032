"""Policy and engine state as one JSON document, arrays in it as NumPy's own format. Never a pickle."""

from __future__ import annotations

import base64
import json
import tokenize
from io import BytesIO
from typing import Any

import numpy as np

_ARRAY = "__ndarray__"
_BYTES = "__bytes__"


def encode_state(state: dict[str, Any]) -> bytes:
    """Encode a nested state.

    Args:
        state: dicts with string keys, lists, tuples (which come back as lists), strings, bytes, numbers, booleans,
            ``None``, numpy scalars (which come back as Python's) and numpy arrays of plain dtypes, nested at will.

    Raises:
        TypeError: something else; the message says where in the state.
    """

    def plain(value: Any, where: str) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise TypeError(f"state{where}: an array of Python objects cannot be stored")
            file = BytesIO()
            np.lib.format.write_array(file, value, allow_pickle=False)
            return {_ARRAY: base64.b64encode(file.getvalue()).decode()}
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

    return json.dumps(plain(state, ""), indent=1).encode()


def decode_state(document: bytes) -> dict[str, Any]:
    """The inverse of :func:`encode_state`.

    Raises:
        ValueError: it is damaged.
    """

    def whole(value: dict[str, Any]) -> Any:
        if value.keys() == {_ARRAY}:
            file = BytesIO(base64.b64decode(str(value[_ARRAY]), validate=True))
            return np.lib.format.read_array(file, allow_pickle=False)
        return bytes.fromhex(str(value[_BYTES])) if value.keys() == {_BYTES} else value

    try:
        return json.loads(document, object_hook=whole)
    except (TypeError, EOFError, MemoryError, OverflowError, RecursionError, tokenize.TokenError) as error:
        raise ValueError(f"not a state: {error}") from error
