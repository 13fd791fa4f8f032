"""Printing: tables through rich, JSON as it is, notes on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_adaptive.commands.text import clean

__all__ = ["console", "note", "number", "print_json", "share", "table"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process; the command line has its own status for this."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output. Markup and emoji codes are off: data must not be able to style what is printed."""
    wide = None if sys.stdout.isatty() else 140  # a pipe has no width; 80 would cut columns
    return _Console(markup=False, emoji=False, highlight=False, width=wide, soft_wrap=False)


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[object]], title: str | None = None) -> Table:
    """A table.

    Args:
        columns: heading and justification (``left`` or ``right``).
        rows: cells; they are made safe here.
        title: above it.
    """
    out = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for heading, justify in columns:
        out.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        out.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
    return out


def number(value: float | None) -> str:
    """A count or a measure for people: thousands apart, ``-`` for nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.1f}"


def share(part: float | None, whole: float | None = 1.0) -> str:
    """A percentage, ``-`` where there is nothing to divide."""
    if part is None or not whole or math.isnan(part):
        return "-"
    return f"{part / whole:.1%}"


def plain(value: Any) -> Any:
    """What JSON can hold: numpy scalars become Python's, not-a-number becomes null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(value: Any) -> None:
    """JSON on standard output; ASCII only, so nothing in it can steer a terminal."""
    print(json.dumps(plain(value), indent=2))


def note(message: str) -> None:
    """A remark on standard error."""
    print(clean(message), file=sys.stderr)
