"""Warm start: begin with what an earlier run or an offline evaluation learned, at a discount."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_adaptive.redact import redact
from verl_adaptive.stats.api import Store
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.locate import locate
from verl_adaptive.stats.results import at_least_half, read_results
from verl_adaptive.stats.table import StatsTable

__all__ = ["WarmStartReport", "warm_start"]

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
    """

    source: str
    kind: str
    offered: int
    matched: int
    used: int
    prompts: int
    rollouts: int
    rewarded: int

    @property
    def match_rate(self) -> float:
        """Fraction of this data set's prompts that the source knows."""
        return self.matched / self.prompts if self.prompts else 0.0

    def __str__(self) -> str:
        text = (
            f"{self.matched} of {self.prompts} prompts ({self.match_rate:.1%}) found among {self.offered} "
            f"of {self.kind} {self.source}; {self.used} start with {self.rollouts} pseudo-rollouts"
        )
        if self.rewarded < self.used:
            text += (
                f". Of {self.used - self.rewarded} it tells successes and no rewards: what is expected of these in units of "
                "the reward (solo, spo) is learned from their first visits; a column score or reward_sum would tell it"
            )
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
    run: str | None = None,
    prompt_key: str = "prompt",
    id_key: str | None = None,
    success: Callable[[np.ndarray], np.ndarray] = at_least_half,
    tolerance: float = 0.0,
    media_keys: Mapping[str, str] | None = None,
) -> WarmStartReport:
    """Fill the statistics of prompts that have none with discounted evidence from elsewhere.

    A prompt with ``n`` rollouts there starts with ``round(discount * n)`` pseudo-rollouts at the same success rate and
    the same mean signal, reward and tokens; visits and zero-variance streaks shrink alike (at least one visit remains).
    Steps (``first_step``, ``last_step``) stay unset, since they counted another run's, and neither retirement nor
    failures are taken over. What a part makes of these columns is its own: see :meth:`StatsTable.brought`.

    Args:
        table: this run's table, its data set's prompts already in it.
        source: another run's journal (database URL or SQLite file, ``#run`` at the end to name one of several runs), a
            snapshot directory, a checkpoint ``global_step_N`` or a directory of them (the newest counts), or a
            Parquet or JSONL file with the columns that :mod:`verl_adaptive.stats.results` describes.
        discount: weight of the evidence, in (0, 1].
        run: names the run in a journal of several.
        prompt_key, id_key, media_keys: as in :func:`verl_adaptive.stats.dataset_keys`, for files.
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
    found = locate(text, prefer="snapshot")
    if found.kind == "results":
        evidence = read_results(
            Path(found.where),
            prompt_key=prompt_key,
            id_key=id_key,
            success=success,
            tolerance=tolerance,
            media_keys=media_keys,
        )
    else:
        evidence = Store(found).table(run, tolerance=tolerance)
    seen = np.flatnonzero(evidence.col("rollouts") > 0)
    rows = table.rows_for(np.ascontiguousarray(evidence.keys[seen], dtype=KEY_DTYPE), create=False)
    matched = rows >= 0
    rollouts = np.floor(discount * evidence.col("rollouts")[seen] + 0.5)
    use = matched & (rollouts > 0) & (table.col("visits")[np.maximum(rows, 0)] == 0)
    _transfer(table, rows[use], evidence, seen[use], rollouts[use], discount)
    report = WarmStartReport(
        source=redact(text),
        kind=found.kind,
        offered=len(seen),
        matched=int(matched.sum()),
        used=int(use.sum()),
        prompts=len(table),
        rollouts=int(rollouts[use].sum()),
        rewarded=int(np.isfinite(table.col("reward_sum")[rows[use]]).sum()),
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
    streak = np.floor(discount * theirs("streak") + 0.5).astype(np.uint16)
    table.col("streak")[rows] = streak
    table.col("streak_kind")[rows] = np.where(streak > 0, theirs("streak_kind"), 0)
    for name in ("first_rate", "last_rate"):
        table.col(name)[rows] = theirs(name)
