"""The numbers that sum a store up: what ``stats`` prints, ``compare`` sets side by side and the report begins with."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_adaptive.report.accounts import ledgers_of
from verl_adaptive.report.judge import FLIPPING, REGRESSED, TRIES, never_solved
from verl_adaptive.stats import Run

#: Pass rates: exactly 0 and exactly 1 by themselves, since those are the prompts that are not informative.
BINS = ("0", *(f"{i / 10:.1f}-{(i + 1) / 10:.1f}" for i in range(10)), "1")


def bins_of(rate: np.ndarray) -> np.ndarray:
    """int64: the place of each pass rate among :data:`BINS`. A bin includes its lower end."""
    # 0.3 * 10 is 3.0000000000000004 and 0.29999999999999998 * 10 is 3.0: rounding keeps k/n in its bin
    inner = 1 + np.clip(np.floor(np.round(rate * 10, 9)), 0, 9).astype(np.int64)
    return np.where(rate <= 0, 0, np.where(rate >= 1, len(BINS) - 1, inner))


def histogram(rate: np.ndarray) -> list[int]:
    """Prompts in each of :data:`BINS`; nan counts nowhere."""
    return np.bincount(bins_of(rate[np.isfinite(rate)]), minlength=len(BINS)).tolist()


def overview(run: Run, *, tries: int = TRIES) -> dict[str, Any]:
    """Everything about a store as a whole, for :func:`~verl_adaptive.text.plain`; ``ledger`` is the run's ``Ledger``.

    A prompt counts as never solved after ``tries`` rollouts without a success.
    """
    prompts, table = run.prompts, run.table
    visits, rollouts, successes = (table.col(name) for name in ("visits", "rollouts", "successes"))
    visited = visits > 0
    rate = prompts.get("pass_rate")
    out: dict[str, Any] = {
        "store": run.where,
        "kind": run.kind,
        "run": run.name,
        **{name: run.about[name] for name in ("preset", "policy", "package", "attempts", "step") if name in run.about},
        "prompts": len(prompts),
        "visited": int(visited.sum()),
        "visits": int(visits.sum(dtype=np.int64)),
        "rollouts": int(rollouts.sum(dtype=np.int64)),
        "successes": float(successes.sum()),
        "pass_rate": float(successes.sum() / max(1, int(rollouts.sum(dtype=np.int64)))) if visited.any() else None,
        "tokens": int(table.col("tokens").sum(dtype=np.uint64)) or None,  # verl's rollouts do not say
        "failed_groups": None if "failures" in prompts.unknown else int(table.col("failures").sum(dtype=np.int64)),
        "tries": tries,
        "never_solved": len(prompts.where(never_solved(tries))),
        "always_solved": int(((rollouts >= tries) & (successes >= rollouts)).sum()),
        "regressed": len(prompts.where(REGRESSED)),
        "retired": None if run.retired is None else run.retired[0],
        "retired_at_step": None if run.retired is None else run.retired[1],
        # One rollout a visit, as solo has it: a visit is all right or all wrong by chance, whatever the prompt is.
        "single": bool(0 < rollouts.sum(dtype=np.int64) < 2 * visits.sum(dtype=np.int64)),
        "brought": len(table.brought()) if run.kind == "snapshot" else None,
        "flip_flopping": None,
        "histogram": {"bins": list(BINS), "prompts": histogram(rate)},
        "latest_histogram": {"bins": list(BINS), "prompts": histogram(prompts.get("last_rate"))},
        "visits_histogram": np.bincount(np.minimum(visits, 10), minlength=11).tolist(),
    }
    unknown = dict.fromkeys([*prompts.unknown, *(["tokens"] if out["tokens"] is None else [])])
    out["by_source"] = {name: {**totals, **unknown} for name, totals in table.view_by_source().items()}
    if run.has_course:
        steps = run.steps
        if "flips" in prompts.further:
            out["flip_flopping"] = len(prompts.where(FLIPPING))
        out["steps"] = steps.num_rows
        if steps.num_rows:
            numbers = steps.column("step").to_pylist()
            out["first_step"], out["last_step"] = numbers[0], numbers[-1]
            if run.kind == "journal":  # verl's rollouts do not say what was generated
                out["ledger"] = ledgers_of(steps.column("ledger")[-1].as_py())[1]
        out["gaps"] = [list(gap) for gap in run.gaps()]
    return out
