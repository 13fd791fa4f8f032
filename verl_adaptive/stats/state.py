"""Policy and engine state as JSON, arrays as their bytes in base 64. Never a pickle."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np

_ARRAY = "__ndarray__"
_BYTES = "__bytes__"


def state_to_json(state: dict[str, Any]) -> bytes:
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
            return {_ARRAY: [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
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
            return {key: plain(item, f"[{key!r}]") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        raise TypeError(f"state{where}: a {type(value).__name__} cannot be stored")

    return json.dumps(plain(state, ""), indent=1).encode()


def state_from_json(document: bytes) -> dict[str, Any]:
    """The inverse of :func:`state_to_json`.

    Raises:
        ValueError: it is damaged.
    """

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {_ARRAY}:
                dtype, shape, data = value[_ARRAY]
                raw, kind = bytearray(base64.b64decode(data, validate=True)), np.dtype(dtype)
                if kind.hasobject or min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != len(raw):
                    raise ValueError("an array is not what it says")
                return np.ndarray(shape, kind, raw)
            if value.keys() == {_BYTES}:
                return bytes.fromhex(str(value[_BYTES]))
            return {key: full(item) for key, item in value.items()}
        return [full(item) for item in value] if isinstance(value, list) else value

    try:
        return full(json.loads(document))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (TypeError, OverflowError, SyntaxError) as error:  # an array that is none
        raise ValueError(str(error)) from error
