"""Warm start: begin with what an earlier run or an offline evaluation learned, at a discount."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl_adaptive.groups import success_by_default
from verl_adaptive.stats.files import StoreError
from verl_adaptive.stats.keys import CONTENT, Identity
from verl_adaptive.stats.run import open_runs
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.text import share

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmStartReport:
    """What a warm start found.

    Attributes:
        source: what was read.
        kind: ``journal``, ``snapshot`` or ``results``.
        offered: prompts that the source has evidence for.
        matched: of those, prompts of this data set.
        used: of those, prompts that got pseudo-counts: the discount left at least one rollout, and the table had
            nothing of its own.
        prompts: prompts of this data set.
        rollouts: pseudo-rollouts given out in all.
        rewarded: of the prompts used, those whose rewards the source knows, too.
        missing: steps whose evidence the source lacks, in words.
    """

    source: str
    kind: str
    offered: int
    matched: int
    used: int
    prompts: int
    rollouts: int
    rewarded: int
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"{self.matched} of {self.prompts} prompts ({share(self.matched, self.prompts)}) found among {self.offered} "
            f"of {self.kind} {self.source}; {self.used} start with {self.rollouts} pseudo-rollouts"
        )
        if self.rewarded < self.used:
            text += (
                f". Of {self.used - self.rewarded} it tells successes and no rewards: what is expected of these in units of "
                "the reward (solo, spo) is learned from their first visits; a column score or reward_sum would tell it"
            )
        text = ". ".join([text, *self.missing])
        if self.offered and not self.matched:
            text += (
                ". Nothing matches: a prompt is found by its data source, messages and ground truth together, or by "
                "adaptive.id_key; compare them between the two"
            )
        return text


def warm_start(
    table: StatsTable,
    source: str | os.PathLike[str],
    *,
    discount: float,
    identity: Identity = CONTENT,
    success: Callable[[np.ndarray], np.ndarray] = success_by_default,
    tolerance: float = 0.0,
) -> WarmStartReport:
    """Fill the statistics of prompts that have none with discounted evidence from elsewhere.

    A prompt with ``n`` rollouts there starts with ``round(discount * n)`` pseudo-rollouts at the same success rate and
    the same mean signal, reward and tokens; visits and zero-variance streaks shrink alike (at least one visit remains).
    Steps (``first_step``, ``last_step``) stay unset, since they counted another run's, and neither retirement nor
    failures are taken over. What a part makes of these columns is its own: see :meth:`StatsTable.brought`.

    Args:
        table: this run's table, its data set's prompts already in it.
        source: what :func:`verl_adaptive.stats.run.open_runs` takes: another run's checkpoints (the newest counts), one
            checkpoint, a journal, or a Parquet or JSONL file with the columns that :mod:`verl_adaptive.stats.results`
            describes. Of several runs the newest that knows a prompt counts for it.
        discount: weight of the evidence, in (0, 1].
        identity: as in :func:`verl_adaptive.stats.dataset_keys`, for files.
        success: as in :func:`verl_adaptive.stats.results.read_results`, for files.
        tolerance: as in :meth:`StatsTable.observe`, for files and journals.

    Returns:
        What matched. Prompts without a match are no error; none at all is a warning in the log.

    Raises:
        StoreError, SnapshotError, JournalError: the source cannot be read.
        ValueError: the discount is not in (0, 1].
    """
    if not 0 < discount <= 1:
        raise ValueError(f"adaptive.warm_start_discount={discount!r} must be in (0, 1]")
    text = os.fspath(source)
    runs = open_runs(text, prefer="snapshot", tolerance=tolerance, identity=identity, success=success)[::-1]
    for run in runs:
        if run.kind == "rollouts":
            raise StoreError(
                f"{run.source} has verl's rollouts, which do not say which prompt of the data set each is of; give a run's "
                "checkpoints or journal, an export, or results with a prompt, a data source and a ground truth"
            )
    offered, matched, rollouts = StatsTable(), np.zeros(len(table), dtype=bool), 0
    used: list[np.ndarray] = []
    for run in runs:
        evidence = run.table
        seen = np.flatnonzero(evidence.col("rollouts") > 0)
        rows = table.rows_for(evidence.keys[seen], create=False)
        offered.rows_for(evidence.keys[seen])
        matched[rows[rows >= 0]] = True
        pseudo = np.floor(discount * evidence.col("rollouts")[seen] + 0.5)
        use = (rows >= 0) & (pseudo > 0) & (table.col("visits")[np.maximum(rows, 0)] == 0)
        _transfer(table, rows[use], evidence, seen[use], pseudo[use], discount)
        rollouts += int(pseudo[use].sum())
        used.append(rows[use])
    given = np.concatenate(used)
    report = WarmStartReport(
        source=text,
        kind=runs[0].kind if len(runs) == 1 else f"{len(runs)} runs",
        offered=len(offered),
        matched=int(matched.sum()),
        used=len(given),
        prompts=len(table),
        rollouts=rollouts,
        rewarded=int(np.isfinite(table.col("reward_sum")[given]).sum()),
        missing=tuple(text for run in runs for text in run.missing()),
    )
    (_LOG.info if report.matched else _LOG.warning)("warm start: %s", report)
    return report


def _transfer(
    table: StatsTable, rows: np.ndarray, evidence: StatsTable, seen: np.ndarray, rollouts: np.ndarray, discount: float
) -> None:
    def theirs(name: str) -> np.ndarray:
        return evidence.col(name)[seen]

    scale = rollouts / theirs("rollouts")  # the rounded discount, so that rates stay what they were
    table.col("rollouts")[rows] = rollouts.astype(np.uint32)
    for name in ("successes", "signal_sum", "signal_sqsum", "reward_sum"):
        table.col(name)[rows] = theirs(name) * scale
    table.col("tokens")[rows] = np.floor(theirs("tokens") * scale + 0.5).astype(np.uint64)
    table.col("visits")[rows] = np.maximum(np.floor(discount * theirs("visits") + 0.5), 1).astype(np.uint32)
    table.col("last_n")[rows] = np.maximum(np.floor(theirs("last_n") * scale + 0.5), 1).astype(np.uint32)
    streak = np.floor(discount * theirs("streak") + 0.5).astype(np.uint16)
    table.col("streak")[rows] = streak
    table.col("streak_kind")[rows] = np.where(streak > 0, theirs("streak_kind"), 0)
    for name in ("first_rate", "last_rate"):
        table.col(name)[rows] = theirs(name)
