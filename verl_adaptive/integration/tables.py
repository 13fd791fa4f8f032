"""The lists of prompts to look at, through verl's logger: ``wandb.Table`` and TensorBoard text (``adaptive.log_lists``)."""

from __future__ import annotations

from typing import Any

from verl_adaptive.report.judge import TRIES
from verl_adaptive.report.lists import COLUMNS, lists_of
from verl_adaptive.stats import StatsTable
from verl_adaptive.stats.prompts import Prompts
from verl_adaptive.text import clean

#: Rows of a list.
LIMIT = 50
#: Backends of verl's logger that have a form for them.
WANDB, TENSORBOARD = ("wandb", "vemlp_wandb"), "tensorboard"


def lists_now(table: StatsTable) -> dict[str, list[list[Any]]]:
    """Name → rows of :data:`COLUMNS`, those to look at first."""
    prompts, out = Prompts(table), {}
    for each in lists_of(prompts, TRIES, 0):
        columns = [prompts.values(column, each.rows[:LIMIT]) for column in COLUMNS]
        out[each.title.lower().replace(" ", "_")] = [
            [clean(v, 80) if isinstance(v, str) else v for v in row] for row in zip(*columns, strict=True)
        ]
    return out


def log_lists(tracking: Any, table: StatsTable, step: int) -> None:
    """Log them with every backend of verl's ``Tracking`` that has a form for them."""
    backends = {name: made for name, made in getattr(tracking, "logger", {}).items() if name in (*WANDB, TENSORBOARD)}
    lists = lists_now(table) if backends else {}
    for backend, instance in backends.items():
        if backend in WANDB:
            made = {
                f"adaptive/lists/{n}": instance.Table(columns=list(COLUMNS), data=rows) for n, rows in lists.items()
            }
            instance.log(made, step=step)
        else:
            for name, rows in lists.items():
                instance.writer.add_text(f"adaptive/lists/{name}", _markdown(rows), step)
            instance.writer.flush()


def _markdown(rows: list[list[Any]]) -> str:
    """A table as TensorBoard shows it; what would be markup in it is escaped."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return "-" if value != value else f"{value:.3g}"
        return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+-.!|&" else c for c in str(value))

    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *([cell(v) for v in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else "none"
