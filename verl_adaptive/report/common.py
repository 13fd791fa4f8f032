"""Two runs by their prompts: both cut where they had generated the same number of rollouts, prompt by prompt.

The prompts that both runs visited are compared one by one, so what makes a prompt easy drops out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_adaptive.report.course import spent
from verl_adaptive.report.overview import overview
from verl_adaptive.stats import Run
from verl_adaptive.stats.chance import LISTED, fdr_score, two_rates
from verl_adaptive.stats.prompts import Prompts


def cut_at_common(runs: Sequence[Run], *, whole: bool) -> tuple[list[Run], list[dict[str, Any]]]:
    """Runs up to the last step at which none had generated more than another generated in all.

    Args:
        runs: stores; where one has no course, all are taken as they are.
        whole: take all as they are.

    Returns:
        The runs as they were then, and their overviews, with ``hours`` and whether they were ``cut``.
    """
    courses = [spent(run) for run in runs]
    known = [course for course in courses if "rollouts" in course]
    limit = np.inf if whole or len(known) < len(runs) else min(float(course["rollouts"][-1]) for course in known)
    out, facts = [], []
    for run, course in zip(runs, courses, strict=True):
        hours, cut, then = None, False, run
        if "rollouts" in course:
            at = max(0, int(np.searchsorted(course["rollouts"], limit, side="right")) - 1)
            hours, cut = float(course["hours"][at]), at < len(course["step"]) - 1
            hours = None if np.isnan(hours) else hours
            then = run.until(int(course["step"][at])) if cut else run
        out.append(then)
        facts.append({**overview(then), "hours": hours, "cut": cut})
    return out, facts


def matched(one: Prompts, other: Prompts, limit: int, least: int = 1) -> dict[str, Any]:
    """Prompts that both visited often enough.

    Args:
        one, other: A's prompts and B's.
        limit: prompts in each list.
        least: visits that both need.

    Returns:
        Counts, mean latest pass rates with the standard error of their difference, how many prompts differ at all and
        significantly, and those that differ most clearly, in both directions.
    """
    rows = other.table.rows_for(one.table.keys, create=False)
    seen = one.table.col("visits") >= least
    both = (rows >= 0) & seen
    both[both] = other.table.col("visits")[rows[both]] >= least
    mine = np.flatnonzero(both)
    theirs = rows[mine]
    a, b = one.get("last_rate")[mine], other.get("last_rate")[theirs]
    n, m = one.get("last_n")[mine], other.get("last_n")[theirs]
    difference, chance = b - a, two_rates(np.round(a * n), n, np.round(b * m), m)
    # The least likely first: where one run has single rollouts, differences of 1 are many and mean nothing.
    score = -np.sign(difference) * np.log(np.maximum(chance, 1e-300))
    order = np.lexsort((one.table.key_lo[mine], one.table.key_hi[mine], difference, score))
    clear = fdr_score(chance) >= LISTED
    count = len(mine)

    def listed(chosen: np.ndarray) -> list[dict[str, Any]]:
        keys, sources = one.values("key", mine[chosen]), one.values("source", mine[chosen])
        return [
            {"key": k, "source": s, "a": float(a[i]), "b": float(b[i])}
            for k, s, i in zip(keys, sources, chosen.tolist(), strict=True)
        ]

    error = float(difference.std(ddof=1) / np.sqrt(count)) if count > 1 else None
    return {
        "prompts": count,
        "least_visits": least,
        "only_a": int(seen.sum()) - count,
        "only_b": int((other.table.col("visits") >= least).sum()) - count,
        "mean_rate_a": float(a.mean()) if count else None,
        "mean_rate_b": float(b.mean()) if count else None,
        "standard_error": error,
        "better_in_b": int((difference > 0).sum()),
        "worse_in_b": int((difference < 0).sum()),
        "clearly_better_in_b": int((clear & (difference > 0)).sum()),
        "clearly_worse_in_b": int((clear & (difference < 0)).sum()),
        "largest_gains_in_b": listed(np.array([i for i in order[::-1][:limit] if difference[i] > 0], dtype=np.int64)),
        "largest_losses_in_b": listed(np.array([i for i in order[:limit] if difference[i] < 0], dtype=np.int64)),
    }
