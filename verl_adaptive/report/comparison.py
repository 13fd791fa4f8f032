"""What is new of a run, without reading much of it."""

from __future__ import annotations

import time
from typing import Any

from verl_adaptive.report.learning_curve import headline
from verl_adaptive.report.overview import ledger_of, scalars_of
from verl_adaptive.stats import Run

__all__ = ["state_of"]


def state_of(run: Run) -> dict[str, Any]:
    """What is new of a run, quickly.

    Returns:
        ``version`` (changes with every step and validation), ``step``, ``plan``, ``generated``, ``validation``,
        ``best`` and ``curve`` (of the mean over sources), ``metric``, ``updated`` (seconds since 1970, or None), ``running``
        and ``done``.
    """
    newest, validations = run.newest(), run.validations()
    step = wall = plan = generated = None
    budget = float("inf")
    attempt, pace = 0, 0.0
    if newest:
        attempt, step, wall = (newest[-1][name] for name in ("attempt", "step", "wall_time"))
        if newest[0]["attempt"] == attempt:  # a pause between attempts is no pace
            pace = max(0.0, wall - newest[0]["wall_time"])
        generated = ledger_of(newest[-1]["ledger"]).get("run", {}).get("rollouts", {}).get("generated")
        scalars = scalars_of(newest[-1]["scalars"])
        planned = scalars.get("adaptive/plan/steps", 0.0)
        plan = int(planned) if 0 < planned < 1e15 else None
        budget = scalars.get("adaptive/plan/rollouts", budget)
    curve = next(iter(headline(validations)[-1:]), None)
    times = [w for w in (wall, validations[-1]["wall_time"] if validations else None) if w is not None]
    updated = max(times, default=None)
    return {
        "version": f"{attempt}.{step}.{len(validations)}",
        "step": step,
        "plan": plan,
        "generated": generated,
        "validation": None if curve is None else float(curve.values[-1]),
        "best": None if curve is None else float(curve.values.max()),
        "curve": [] if curve is None else curve.values[-200:].tolist(),
        "metric": None if curve is None else curve.metric,
        "updated": updated,
        "done": bool(plan and step and step >= plan) or (generated or 0) >= budget,
        "running": updated is not None and time.time() - updated < max(180.0, 5 * pace),
    }
