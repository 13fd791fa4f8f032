"""What to look at today: the few things on the page that call for somebody, with the numbers and the command."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_adaptive.config import AlarmConfig
from verl_adaptive.report.course import CLASSES, History
from verl_adaptive.report.judge import SOLVED, SUSPECTED, Finding, dead, fallen, of_source, unsolved
from verl_adaptive.report.learning_curve import headline
from verl_adaptive.significance import sampling
from verl_adaptive.stats.chance import LISTED, fdr_score, upper_tail
from verl_adaptive.stats.prompts import Prompts
from verl_adaptive.text import step_range

#: Prompts visited twice from which a source is said to stand still.
_PAIRS = 30
#: Reasons of groups that were too easy or too hard to learn from.
_FLAT = frozenset({"all_correct", "all_wrong", "too_easy", "too_hard", "zero_advantage"})
#: Share of the latest groups from which failures are said.
_FAILED = 0.05
#: Findings of one kind that are spelt out.
_ALIKE = 6


def findings(prompts: Prompts, history: History | None, facts: dict[str, Any], suspected: int) -> list[Finding]:
    """Everything that stands out, the grave things first."""
    if history is None:
        found = [_never(facts), _moves(prompts, history)]
    else:
        standing = history.hearing.judge.standing()
        found = [standing, _moves(prompts, history), _validation(history), _failures(history), _waste(history)]
    out = [finding for alike in found for finding in _capped(alike)]
    if suspected:
        out.append(
            Finding(
                False,
                f"{suspected:,} prompt{'s fail' if suspected > 1 else ' fails'} although others of the same source are solved",
                "A wrong label, an answer in another form, or a truncated question: see the list, the first ones first.",
                SUSPECTED,
            )
        )
    for first, last, reason in facts.get("gaps") or []:
        out.append(Finding(False, f"The journal lacks {step_range(first, last)}", f"{reason}."))
    return sorted(out, key=lambda finding: not finding.grave)


def _capped(alike: list[Finding]) -> list[Finding]:
    """The first few of one kind, and how many more there are."""
    alike = sorted(alike, key=lambda finding: not finding.grave)
    if len(alike) <= _ALIKE:
        return alike
    rest = len(alike) - _ALIKE
    return [
        *alike[:_ALIKE],
        Finding(False, f"{rest:,} more like the last one", "The table by data source has all of them."),
    ]


def _never(facts: dict[str, Any]) -> list[Finding]:
    """Sources never solved, of a store without a course."""
    totals = facts["by_source"]
    counts = np.array([(s["rollouts"], s["successes"]) for s in totals.values()]).reshape(-1, 2)
    hopeless = [
        name for name, on in zip(totals, dead(counts[:, 0], counts[:, 1], AlarmConfig().rollouts), strict=True) if on
    ]
    return [unsolved(name, totals[name]["rollouts"]) for name in hopeless]


def _moves(prompts: Prompts, history: History | None) -> list[Finding]:
    """Sources that stand still or get worse, by prompts that were visited at least twice."""
    table = prompts.table
    change, rate = prompts.get("last_rate") - prompts.get("first_rate"), prompts.get("pass_rate")
    twice = (table.col("visits") > 1) & np.isfinite(change)
    if history is not None and len(history.step) > 3:
        twice &= table.col("last_step") > history.step[len(history.step) // 2]  # lately
    code, moved, size = table.col("source").astype(np.int64)[twice], change[twice], len(table.sources)
    counts = np.bincount(code, minlength=size)
    with np.errstate(all="ignore"):
        means = np.bincount(code, moved, minlength=size) / counts
        spread = np.bincount(code, (moved - means[code]) ** 2, minlength=size) / (counts - 1)
        levels = np.bincount(code, rate[twice], minlength=size) / counts
        z = np.where(counts >= _PAIRS, means / np.sqrt(spread / counts), np.nan)
    # of many sources some fall by chance, so each is judged among all
    fall = fdr_score(upper_tail(-z))
    out = []
    for source in np.flatnonzero(counts >= _PAIRS).tolist():
        count, mean, level = int(counts[source]), float(means[source]), float(levels[source])
        half = sampling(float(np.sqrt(spread[source] / count)))
        name, where = table.sources[source] or "(unknown)", of_source(table.sources[source])
        said = f"{round(mean, 3) + 0.0:+.3f} ± {half:.3f} over {count:,} prompts visited at least twice"
        if fall[source] >= LISTED:
            out.append(
                Finding(
                    mean < -0.05,
                    f"{name}: prompts get worse ({said})",
                    "Forgetting, or a reward that pulls elsewhere.",
                    f"{where} and change < 0",
                )
            )
        elif 0 <= mean + half < 0.02 and 0 < level < SOLVED:
            out.append(
                Finding(False, f"{name}: stands still ({said})", "Nothing is learned from it at present.", where)
            )
    return out


def _validation(history: History) -> list[Finding]:
    out, judged = [], history.hearing.judge.fell is not None  # of the last curve, the judge has said it
    for curve in headline(history.validations)[: -1 if judged else None]:
        found = fallen(curve, history.hearing.judge.spread)
        if found is not None:
            best, drop = found
            step = history.validations[curve.at[best]]["step"]
            out.append(
                Finding(
                    curve.shares and drop > 0.1,
                    f"Validation of {curve.name} is {drop:.3f} below its best, {curve.values[best]:.3f} at step {step:,}",
                    "Over-training or a reward that drifts: the model of that step may be the better one.",
                )
            )
    return out


def _failures(history: History) -> list[Finding]:
    groups = history.classes[-max(1, len(history.step) // 4) :].sum(axis=0)
    share = float(groups[CLASSES.index("failed")] / max(1, groups.sum()))
    if share < _FAILED:
        return []
    why = (
        "Sessions raised or returned nothing, or rewards or adaptive.signal were missing or not finite: the training's log has a "
        "warning in each such step."
    )
    return [Finding(True, f"{share:.0%} of the latest groups failed", why, "failures > 0")]


def _waste(history: History) -> list[Finding]:
    late = max(1, len(history.step) // 4)
    amounts = {name: float(values[-late:].sum()) for name, values in history.rollouts.items()}
    whole = sum(amounts.values())
    lost = {name: amount for name, amount in amounts.items() if name != "trained"}
    name, most = max(lost.items(), key=lambda item: item[1], default=("", 0.0))
    if most <= 0.5 * whole:
        return []
    if name.removeprefix("dropped: ") not in _FLAT:
        why = "docs/metrics.md#reasons says what it means."
    elif any(metric.startswith("adaptive/sampler/") for metric in history.scalars):
        # of a sampler that decides by what prompts have shown
        why = (
            "The run's sampler avoids such prompts once it has met them. To save the first visits, start with an earlier run "
            "(adaptive.warm_start) or a data set filtered by this one (verl-adaptive export --data)."
        )
    else:
        why = (
            "+adaptive=solo needs no informative groups; +adaptive=greso skips such prompts once it has met them, and a filtered "
            "data set (verl-adaptive export --data) leaves them out."
        )
    return [Finding(False, f"{most / whole:.0%} of the latest rollouts went to “{name}”", why)]
