"""The lists of prompts that somebody has to look at, each with the condition that names all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_adaptive.report.judge import FLIPPING, REGRESSED, SUSPECTED, never_solved
from verl_adaptive.stats import Run
from verl_adaptive.stats.dataset import Row
from verl_adaptive.stats.prompts import Prompts

#: Columns of every list where there is no room for more: a terminal's, a logger's.
COLUMNS = ("key", "source", "visits", "rollouts", "pass_rate", "first_rate", "last_rate", "last_step")
_SHOWN = ("key", "source", "visits", "rollouts", "pass_rate", "last_step")


@dataclass
class PromptList:
    """One list.

    Attributes:
        title: its heading.
        about: what is in it, and why one would look.
        rows: of the table, all that belong to it, those to look at first in front.
        records: of the first ones, column → value, a dict a prompt.
        where: a condition for ``stats --where`` that names all of them.
    """

    title: str
    about: str
    rows: np.ndarray
    records: list[dict[str, Any]]
    where: str

    @property
    def total(self) -> int:
        """Prompts that belong to it."""
        return len(self.rows)

    @property
    def keep(self) -> str:
        """A condition for ``export --data --where`` that leaves them out."""
        return f"not ({self.where})"


def lists_of(prompts: Prompts, tries: int, limit: int) -> list[PromptList]:
    """Likely wrong labels, never solved, regressed, and (of journals) flip-flopping prompts."""
    out: list[PromptList] = []

    def add(title: str, about: str, where: str, by: str, *extra: str, largest_first: bool = True) -> None:
        rows = prompts.order(by, prompts.where(where), largest_first)
        out.append(PromptList(title, about, rows, prompts.records((*_SHOWN, *extra), rows[:limit]), where))

    add(
        "Likely wrong labels",
        "Failed again and again, though their data source's other prompts are solved. Surprise is minus log₁₀ of the chance "
        "that a prompt of the source does as badly; an answer on which the rollouts agree against the label speaks against the "
        "label.",
        SUSPECTED,
        "surprise",
        "surprise",
    )
    add(
        "Never solved",
        f"Not one success in {tries} rollouts or more: too hard, or a wrong label.",
        never_solved(tries),
        "rollouts",
    )
    add(
        "Regressed",
        "Latest pass rate lower than the first by 0.5 or more, and significantly lower than over all of the prompt's "
        "rollouts. Regression is minus log₁₀ of the false discovery rate: 1.3 is one in twenty.",
        REGRESSED,
        "change",
        *("first_rate", "last_rate", "regression"),
        largest_first=False,
    )
    if "flips" in prompts.further:
        add(
            "Flip-flopping",
            "Pass rate crossed one half at least twice, and jumps significantly from visit to visit: a fragile verifier, or a "
            "reward with a state. Flipping is minus log₁₀ of the false discovery rate.",
            FLIPPING,
            "flips",
            *("flips", "flipping"),
        )
    return out


def add_texts(lists: list[PromptList], run: Run, data: str | None, rollouts: str | None) -> str:
    """Give the listed prompts their row, text and expected answer and, where verl wrote rollouts down, what they said.

    Args:
        lists: as :func:`lists_of` made them; their records get ``row``, ``expected``, ``said`` and ``text``;
            ``row`` and ``source`` are left out where none is known.
        run: whose prompts they are.
        data, rollouts: as :meth:`verl_adaptive.stats.Run.texts`.

    Returns:
        A remark if the data set has none of the prompts, else nothing.
    """
    wanted = {record["key"] for each in lists for record in each.records}
    texts, nothing = run.texts(wanted, data=data, rollouts=rollouts), Row(None, "", "")
    answered = rollouts is not None or run.kind == "rollouts"
    for each in lists:
        for at, record in enumerate(each.records):
            row = texts.get(record["key"], nothing)
            said = {"said": row.said.answers if row.said else ""} if answered else {}
            first = {"row": row.row, "key": "", "source": "", "expected": row.answer, **said}
            each.records[at] = {**first, **record, "text": row.text}
        unknown = {n for n in ("row", "source") if all(record[n] in (None, "") for record in each.records)}
        each.records = [{n: v for n, v in record.items() if n not in unknown} for record in each.records]
    if not wanted or texts:
        return ""
    return (
        f"None of the {len(wanted):,} listed prompts is in {data}, so no texts are shown. A prompt is found by its data "
        "source, messages and ground truth together, or by --id-key: is this the run's data set?"
    )
