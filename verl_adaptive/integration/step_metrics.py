"""What a run says of itself: the banner, and of each step its metrics and a line for people.

Metric names keep verl's reduction by substring in mind (``max``, ``min``, ``sum``/``total``, else mean): counters end
in ``_total`` or lie under a ``…_total/`` prefix.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from verl_adaptive import __version__
from verl_adaptive.engine import AsyncEngine, Engine, StepResult
from verl_adaptive.integration import compat
from verl_adaptive.integration.layout import Layout
from verl_adaptive.integration.notes import image_note
from verl_adaptive.stats.visits import difficulty, kind_of
from verl_adaptive.text import counted

logger = logging.getLogger(__name__)


def step_metrics(
    engine: Engine,
    result: StepResult,
    layouts: Sequence[Layout],
    *,
    updates: int,
    max_response_length: int | None = None,
    times: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Everything logged for a step, under ``adaptive/``; its progress line goes to our log here, in every trainer.

    Args:
        engine: after the step.
        result: the step's account.
        layouts: of its mini-steps.
        updates: of the actor's optimizer, in the step.
        max_response_length: ``data.max_response_length``; None: not known, and nothing is counted as clipped.
        times: seconds of the step's generation (:class:`~verl_adaptive.integration.timings.Timings`), which are logged, too.
    """
    groups, ledger = result.groups, result.ledger
    usable = ~groups.failed & (groups.n > 0)
    flat = groups.degenerate(engine.facts.tolerance) & usable
    seen = max(1, int(usable.sum()))
    kind, rate = kind_of(flat, groups.pass_rate), groups.pass_rate[usable]
    out: dict[str, float] = {}
    for unit, account in (("rollouts", ledger.rollouts), ("tokens", ledger.tokens)):
        out[f"adaptive/{unit}/generated_total"] = account.generated
        out[f"adaptive/{unit}/trained_total"] = account.trained
        out[f"adaptive/{unit}/dropped_total"] = account.dropped_in_all
        out[f"adaptive/{unit}/held"] = account.held
        for reason, amount in account.dropped.items():
            out[f"adaptive/{unit}/dropped_total/{reason}"] = amount
    run = engine.total
    out["adaptive/cumulative/rollouts_generated"] = run.rollouts.generated
    out["adaptive/cumulative/rollouts_trained"] = run.rollouts.trained
    out["adaptive/cumulative/tokens_generated"] = run.tokens.generated
    out["adaptive/cumulative/tokens_trained"] = run.tokens.trained
    out["adaptive/groups/finished_total"] = len(groups)
    out["adaptive/groups/trained_total"] = int(result.trained.sum())
    out["adaptive/groups/failed_total"] = int(groups.failed.sum())
    out["adaptive/groups/informative_total"] = informative = int((usable & ~flat).sum())
    out["adaptive/groups/informative_share"] = informative / seen
    out["adaptive/groups/all_correct_share"] = float((kind > 0).sum()) / seen
    out["adaptive/groups/all_wrong_share"] = float((kind < 0).sum()) / seen
    # over kept and dropped alike, so that curves with and without a filter can be compared
    out |= _generated("reward", groups.reward)
    out |= _generated("response_length", groups.tokens)
    clipped = groups.cut(max_response_length)
    out["adaptive/response_length/generated_clip_ratio"] = float(clipped.mean()) if len(clipped) else 0.0
    out["adaptive/pass_rate/generated_mean"] = float(rate.mean()) if len(rate) else 0.0
    out["adaptive/prompts/skipped_total"] = engine.skipped
    out["adaptive/prompts/epoch"] = engine.progress.epoch
    visited = _visited(engine)
    out["adaptive/prompts/visited_share"] = float(visited.mean()) if len(visited) else 0.0
    out["adaptive/updates_total"] = updates
    out["adaptive/padding_rows_total"] = sum(layout.padding for layout in layouts)
    if isinstance(engine, AsyncEngine):
        out["adaptive/async/in_flight"] = len(engine.flight)
        out["adaptive/async/ready"] = len(engine.ready)
    else:
        out["adaptive/rounds_total"] = result.rounds
    lag = groups.lag[result.trained]
    out["adaptive/trained_lag_mean"] = float(lag.mean()) if len(lag) else 0.0
    out["adaptive/trained_lag_max"] = float(lag.max()) if len(lag) else 0.0
    out.update(_forgetting(engine))
    out.update(engine.policy.metrics())
    out.update(times or {})
    metrics = {name: float(value) for name, value in out.items()}
    single = bool((groups.n + groups.lost <= 1).all())
    logger.info("%s", progress_line(metrics, engine.progress.step, engine.facts.steps, single=single))
    return metrics


def _generated(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean and maximum over all rollouts of a step's groups, kept and dropped."""
    mean, most = (float(values.mean()), float(values.max())) if len(values) else (0.0, 0.0)
    return {f"adaptive/{name}/generated_mean": mean, f"adaptive/{name}/generated_max": most}


def progress_line(metrics: dict[str, float], step: int, steps: int | None, *, single: bool = False) -> str:
    """A step in one line for people. Its rollouts are those decided about: of an asynchronous trainer's batch, many were
    generated in earlier steps.

    Args:
        metrics: from :func:`step_metrics`.
        step: the step they are of.
        steps: planned ones; None: not known.
        single: groups are of one rollout.

    Example:
        >>> progress_line({"adaptive/groups/trained_total": 256.0, "adaptive/groups/finished_total": 402.0,
        ...     "adaptive/groups/informative_total": 262.0,
        ...     "adaptive/rollouts/trained_total": 2048.0, "adaptive/rollouts/dropped_total": 1168.0,
        ...     "adaptive/pass_rate/generated_mean": 0.407, "adaptive/prompts/epoch": 0.83}, 12, 1001)
        'step 12/1001: 402 groups: 262 informative, 256 train | 3,216 rollouts, 64% trained \
| pass rate 0.41, epoch 0.83'
    """

    def of(name: str) -> float:
        return metrics[f"adaptive/{name}"]

    trained = of("rollouts/trained_total")
    decided = trained + of("rollouts/dropped_total")
    share = f", {trained / decided:.0%} trained" if decided else ""
    return (
        f"step {step}{f'/{steps}' if steps else ''}: {_groups(metrics, single)} | {counted(decided, 'rollout')}{share} "
        f"| pass rate {of('pass_rate/generated_mean'):.2f}, epoch {of('prompts/epoch'):.2f}"
        f"{_waiting(metrics)}"
    )


def _groups(metrics: Mapping[str, float], single: bool) -> str:
    """What became of a step's groups, in words; a group of one is a prompt, and never informative by itself."""
    finished, informative, trained = (
        metrics[f"adaptive/groups/{name}_total"] for name in ("finished", "informative", "trained")
    )
    words = f"{counted(finished, 'group')}: {informative:,.0f} informative"
    if finished and single:
        words = f"{counted(finished, 'prompt')} of one rollout"
    train = "all train" if finished and trained == finished else f"{trained:,.0f} train"
    return f"{words}, {train}"


def _waiting(metrics: Mapping[str, float]) -> str:
    """How long a ``sync`` step generated, and what of it was in vain, in words; empty where nobody measured it.

    Example:
        >>> _waiting({"adaptive/time/generation": 75.0, "adaptive/time/last_tenth": 30.0, "adaptive/time/idle_share": 0.3,
        ...     "adaptive/rollouts/dropped_total/aborted": 41.0, "adaptive/tokens/dropped_total/aborted": 80_000.0})
        ' | 75 s of generation, 30 s of them for the last tenth, slots 30% idle, 41 rollouts (80,000 tokens) aborted'
    """
    seconds = metrics.get("adaptive/time/generation")
    if seconds is None:
        return ""
    said = f" | {round(seconds, 1):g} s of generation, {round(metrics['adaptive/time/last_tenth'], 1):g} s of them for the last tenth"
    if "adaptive/time/idle_share" in metrics:
        said += f", slots {metrics['adaptive/time/idle_share']:.0%} idle"
    if rollouts := metrics.get("adaptive/rollouts/dropped_total/aborted"):
        said += (
            f", {counted(rollouts, 'rollout')} ({metrics['adaptive/tokens/dropped_total/aborted']:,.0f} tokens) aborted"
        )
    return said


def _visited(engine: Engine) -> np.ndarray:
    """bool, one a prompt of the data set: this run has visited it; what a warm start brought are another run's visits."""
    return engine.table.col("last_step")[engine.pool] >= 0


def _forgetting(engine: Engine) -> dict[str, float]:
    """Latest pass rate by the pass rate of a prompt's first visit: a method that starves easy prompts shows here."""
    first, last = engine.table.col("first_rate")[engine.pool], engine.table.col("last_rate")[engine.pool]
    visited = ~np.isnan(first) & _visited(engine)
    out = {}
    for place, name in enumerate(("hard", "middle", "easy")):
        if (chosen := visited & (difficulty(first) == place)).any():
            out[f"adaptive/pass_rate/started_{name}"] = float(last[chosen].mean())
    return out


def banner(trainer: Any) -> list[str]:
    """Some ten lines at the start: the plan, the data, what was resumed, which curves to read how."""
    engine, plan, run_store = trainer.engine, trainer.plan, trainer.run_store
    repeated = len(engine.row_of) - len(engine.pool)
    again = f" ({counted(repeated, 'row')} with an earlier row's prompt and statistics)" if repeated else ""
    said = dict(plan.lines())
    said |= {
        "store": run_store.where,
        "data": f"{len(engine.row_of):,} rows, {len(engine.pool):,} distinct prompts{again}",
        "start": run_store.origin,
        "look": f"verl-adaptive stats {shlex.quote(run_store.argument)}",
    }
    notes = (*plan.notes, image_note(trainer.config, type(trainer.processor).__name__))  # the model is known by now
    more = [("verl", text) for text in compat.lacks(mode=plan.mode)[1]]
    more += [("note", text) for text in dict.fromkeys(notes) if text]
    if plan.skip_zero:
        text = (
            "reward and length curves cover every rollout of the batch's groups; actor/entropy, pg_clipfrac, ppo_kl, "
            "throughput and mfu only the rows that train (docs/metrics.md)"
        )
        more.append(("curves", text))
    head = f"verl-adaptive {__version__} on {type(trainer).__name__}, verl {version('verl')}"
    return [head, *(f"  {label:<8} {text}" for label, text in [*said.items(), *more])]
