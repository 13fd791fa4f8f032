"""Everything the report shows, worked out in one pass over a journal and a few over the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_adaptive.report.arms import names_of
from verl_adaptive.report.course import History
from verl_adaptive.report.findings import findings
from verl_adaptive.report.judge import TRIES, Finding
from verl_adaptive.report.lists import PromptList, add_texts, lists_of
from verl_adaptive.report.overview import overview
from verl_adaptive.stats import Run
from verl_adaptive.stats.dataset import conflicts
from verl_adaptive.stats.visits import difficulty


@dataclass
class Collected:
    """What the page is made of.

    Attributes:
        facts: the overview.
        history: None for a snapshot or results.
        lists: prompts to look at.
        then_and_now: prompts visited at least twice, by class at the first and at the latest visit, ``(3, 3)``.
        findings: what stands out.
        conflicts: prompts of the data set that appear with different answers; None if no data set was given.
        notes: what a reader should know.
        against: names and courses of other runs, to be drawn beside.
    """

    facts: dict[str, Any]
    history: History | None
    lists: list[PromptList]
    then_and_now: np.ndarray
    findings: list[Finding]
    conflicts: list[dict[str, Any]] | None = None
    notes: list[str] = field(default_factory=list)
    against: list[tuple[str, History]] = field(default_factory=list)


def collect(
    run: Run,
    *,
    tries: int = TRIES,
    limit: int = 100,
    data: str | None = None,
    rollouts: str | None = None,
    against: Sequence[Run] = (),
) -> Collected:
    """Work everything out.

    Args:
        run: the run.
        tries: rollouts without a success from which a prompt counts as never solved.
        limit: prompts in each list.
        data: the training set; adds texts, expected answers and the search for conflicting ones.
        rollouts: verl's ``trainer.rollout_data_dir``; with ``data``, adds what the listed prompts answered.
        against: other runs.
    """
    if data is not None:
        run.beside(data)
    facts = overview(run, tries=tries)
    facts["argument"], facts["data"], facts["identity"] = run.source, data, run.identity.words()
    history = History(run) if run.has_course else None
    notes = []
    if history is None:
        notes.append(f"{run.where} ({run.kind}) has no course over time. Give the journal for that.")
        if facts.get("brought"):
            notes.append(
                f"Of {facts['brought']:,} prompts it has a warm start's evidence alone, which counts here as visits."
            )
    lists = lists_of(run.prompts, tries, limit)
    out = Collected(
        facts,
        history,
        lists,
        _then_and_now(run),
        findings(run.prompts, history, facts, lists[0].total),
        notes=notes,
    )
    if data is not None or run.kind == "rollouts":
        notes += [remark] if (remark := add_texts(lists, run, data, rollouts)) else []
    if data is not None:
        out.conflicts = conflicts(data, limit, run.identity)
    if run.kind == "rollouts":
        notes += run.missing()
    drawn = [run, *(other for other in against if other.id != run.id)]  # a name of the run's own tells no other apart
    names = dict(zip((one.id for one in drawn), names_of(drawn), strict=True))
    for other in against:
        if other.has_course:
            out.against.append((names[other.id], History(other)))
            notes += other.missing()
        else:
            notes.append(f"{other.where} ({other.kind}) has no course to draw beside.")
    return out


def _then_and_now(run: Run) -> np.ndarray:
    first, last = run.prompts.get("first_rate"), run.prompts.get("last_rate")
    # of a single visit the first is the latest: it would fill the diagonal
    known = np.isfinite(first) & np.isfinite(last) & (run.prompts.get("visits") > 1)
    out = np.zeros((3, 3), dtype=np.int64)
    np.add.at(out, (difficulty(first[known]), difficulty(last[known])), 1)
    return out
