"""Printing: tables through rich, JSON as it is, notes on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_adaptive.text import clean, plain

if TYPE_CHECKING:
    from verl_adaptive.stats import Run


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process; the command line has its own status for this."""
        raise BrokenPipeError

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich prints, without the blanks at the ends of lines."""
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().splitlines()))


def console() -> Console:
    """Standard output. Markup and emoji codes are off: data must not be able to style what is printed."""
    # A pipe has no width of its own, and 80 would cut columns.
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else 140
    return _Console(markup=False, emoji=False, highlight=False, width=wide)


def table(
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[object]],
    title: str | None = None,
    *,
    cut: str | None = None,
    width: int = 140,
) -> Table:
    """A table. Cells break at their blanks. Numbers are never broken, and end in an ellipsis where there is no room; words fold.

    Args:
        columns: heading and justification (``left``: words, ``right``: numbers, whose headings break at their blanks).
        rows: cells; they are made safe here.
        title: above it.
        cut: heading of a column that loses its end instead of folding, so that the table is at most ``width`` wide.
        width: of the terminal.
    """
    gap = 2 if width < 100 else 3  # with 3, `compare` has no room for its mark of significance in 80 columns
    out = Table(
        box=SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        collapse_padding=gap == 2,
    )
    made = [[cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row] for row in rows]
    heads = ["\n".join(heading.split()) if justify == "right" else heading for heading, justify in columns]
    taken = 0
    for at, (heading, _) in enumerate(columns):
        if heading != cut:
            taken += gap + max(*map(len, heads[at].split("\n")), *(row[at].cell_len for row in made), 0)
    for head, (heading, justify) in zip(heads, columns, strict=True):
        out.add_column(
            head,
            justify=justify,  # type: ignore[arg-type]
            # a number without its last digits is another number: where there is no room, it must show
            overflow="ellipsis" if heading == cut or justify == "right" else "fold",
            no_wrap=heading in (cut, "key"),
            max_width=max(4, width - taken - gap) if heading == cut else None,
        )
    for row in made:
        out.add_row(*row)
    return out


def key_digits(out: Console) -> int:
    """Digits of a prompt's key that there is room for; the first ones find it too."""
    return 32 if out.width >= 120 else 12


def facts(lines: Sequence[tuple[str, str]]) -> Table:
    """Label and text, a line each; a long text goes on below itself."""
    out = Table.grid(padding=(0, 2, 0, 0))
    out.add_column(style="bold", no_wrap=True)
    out.add_column(overflow="fold")
    for label, text in lines:
        out.add_row(Text(label), Text(clean(text)))
    return out


def print_json(value: Any) -> None:
    """JSON on standard output; ASCII only, so nothing in it can steer a terminal."""
    print(json.dumps(plain(value), indent=2))


def note(message: str) -> None:
    """A remark on standard error, if anybody listens there."""
    with contextlib.suppress(OSError):
        print(clean(message), file=sys.stderr)


def note_gaps(run: Run) -> None:
    """Say which steps a run's journal lacks."""
    for text in run.missing():
        note(text)
