"""Text for people: counts and percentages, and what is safe to print of other people's words (prompts, names, paths)."""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

#: Control characters, formatting (bidirectional overrides, zero width), lone surrogates, line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def clean(text: object, limit: int | None = None) -> str:
    """``text`` with everything that a terminal would obey written as an escape, cut to ``limit`` characters.

    Args:
        text: anything; lone surrogates and control characters included.
        limit: the longest answer; a cut text ends in an ellipsis.
    """
    raw = str(text)[: None if limit is None else limit + 1]  # a prompt may be megabytes
    out = "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNSAFE else c for c in raw)
    return out if limit is None or len(out) <= limit else out[: max(0, limit - 1)] + "…"


def one_line(text: object) -> str:
    """A message on one line."""
    return clean(" ".join(str(text).split()))


def number(value: float | None) -> str:
    """A count or a measure for people: thousands apart, ``-`` for nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.1f}"


def short(value: float, digits: int = 3) -> str:
    """A number in few characters: 1.2k, 3M, 0.25."""
    if not math.isfinite(value):
        return "-"
    value = float(f"{value:.{digits}g}")  # 999,999 is 1M
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def cell(value: Any, column: str = "", limit: int | None = None) -> str:
    """A value of a column of prompts for people: rates and means with three decimals, ``-`` for nothing, text made safe.

    >>> cell(1.0, "pass_rate"), cell(1.0), cell(0.5), cell(3.21, "surprise"), cell(float("nan"))
    ('1.000', '1', '0.500', '3.2', '-')
    """
    if isinstance(value, str):
        return clean(value, limit)
    if isinstance(value, float) and math.isfinite(value) and ("rate" in column or not value.is_integer()):
        return f"{value:.1f}" if column == "surprise" else f"{value:.3f}"
    return number(value)


def counted(amount: float, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number(amount)} {noun}{'' if amount == 1 else 's'}"


def step_range(first: int, last: int) -> str:
    """A stretch of steps.

    >>> step_range(12, 12), step_range(998, 1000)
    ('step 12', 'steps 998 to 1,000')
    """
    return f"step {number(first)}" if first == last else f"steps {number(first)} to {number(last)}"


def share(part: float | None, whole: float | None = 1.0) -> str:
    """A percentage, ``-`` where there is nothing to divide."""
    if part is None or not whole or math.isnan(part):
        return "-"
    return f"{round(part / whole, 3) + 0.0:.1%}"  # never -0.0%


def plain(value: Any) -> Any:
    """What JSON can hold: numpy's values become Python's, dataclasses objects, nan and infinities null, the rest text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return plain(vars(value)) if dataclasses.is_dataclass(type(value)) else str(value)


def span(hours: float | None) -> str:
    """A stretch of time for people, ``-`` where it is not known.

    >>> [span(hours) for hours in (0.01, 0.5, 7.25, 72)]
    ['36 s', '30 min', '7.2 h', '3.0 days']
    """
    if hours is None or math.isnan(hours):
        return "-"
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min" if hours >= 1 / 60 else f"{3600 * hours:.0f} s"
