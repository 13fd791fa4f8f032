"""Where a run will be at its end, if it goes on as of late."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_adaptive.report.course import History

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True)
class Forecast:
    """The end of a run; nan where it is not known.

    Attributes:
        steps: the last step.
        left: steps to go.
        rollouts: generated in all by then.
        hours: of training in all by then.
        hours_left: to go.
        pace: seconds a step, of the latest steps.
        per_step: rollouts a step, of the latest steps.
        by: what ends the run: ``steps`` or ``rollouts``.
    """

    steps: float
    left: float
    rollouts: float
    hours: float
    hours_left: float
    pace: float
    per_step: float
    by: str


def forecast(history: History, facts: dict[str, Any]) -> Forecast | None:
    """From the latest fifth of the run; None if the run never said what it plans, or has hardly begun."""
    done, generated = facts.get("last_step"), history.cumulative["generated"]
    plan = history.plan
    if not plan or done is None or not np.isfinite(generated[-1]):
        return None
    bins = max(1, len(generated) // 5)
    before = generated[-bins - 1] if len(generated) > bins else math.nan
    if np.isfinite(before):
        # the account has the steps that the journal lacks, too
        per_step = float(generated[-1] - before) / float(history.step[-1] - history.step[-bins - 1])
    else:
        per_step = sum(float(amount[-bins:].sum()) for amount in history.rollouts.values()) / float(
            history.steps[-bins:].sum()
        )
    left, by = plan.get("steps", math.inf) - done, "steps"
    if "rollouts" in plan and per_step > 0:
        by_budget = math.ceil(max(0.0, plan["rollouts"] - float(generated[-1])) / per_step)
        if by_budget < left:
            left, by = by_budget, "rollouts"
    if not math.isfinite(left):
        return None
    left = max(0.0, left)
    hours_left = left * history.pace / 3600
    return Forecast(
        steps=done + left,
        left=left,
        rollouts=float(generated[-1]) + left * per_step,
        hours=float(history.hours[-1]) + hours_left,
        hours_left=hours_left,
        pace=history.pace,
        per_step=per_step,
        by=by,
    )
