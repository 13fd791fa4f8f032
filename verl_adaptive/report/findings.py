"""What to look at today: the few things on the page that call for somebody, with the numbers and the command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_adaptive.report.course import History
from verl_adaptive.report.learning import headline
from verl_adaptive.stats.prompts import Prompts

__all__ = ["CUT", "NEVER", "Finding", "findings"]

#: Rollouts of a source without a success from which the format or the verifier is suspected (as the alarm has it).
NEVER = 256
#: Share of a source's answers cut at the limit (as the alarm has it).
CUT = 0.25
#: Prompts visited twice from which a source is said to stand still.
_PAIRS = 30
#: Reasons of groups that were too easy or too hard to learn from.
_FLAT = frozenset({"all_correct", "all_wrong", "too_easy", "too_hard", "no_variance", "zero_advantage"})
#: Findings of one kind that are spelt out.
_ALIKE = 6


@dataclass(frozen=True)
class Finding:
    """One thing.

    Attributes:
        grave: it spoils training; else it is worth a look.
        what: in one line.
        why: what it may be, and what to do.
        where: a condition for ``stats --where`` and ``filter-dataset``, or an empty string.
    """

    grave: bool
    what: str
    why: str
    where: str = ""


def findings(prompts: Prompts, history: History | None, facts: dict[str, Any], suspected: int) -> list[Finding]:
    """Everything that stands out, the grave things first."""
    found = [_never(facts), _moves(prompts, history)]
    if history is not None:
        found += [_validation(history), _cut(history), _waste(history)]
    out = [finding for alike in found for finding in _capped(alike)]
    if suspected:
        out.append(
            Finding(
                False,
                f"{suspected:,} prompts fail although their source's others are solved",
                "A wrong label, an answer in another form, or a truncated question: see the list, the first ones first.",
            )
        )
    for first, last, reason in facts.get("gaps") or []:
        out.append(Finding(False, f"Steps {first} to {last} are not in the journal", f"{reason}."))
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


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _never(facts: dict[str, Any]) -> list[Finding]:
    out = []
    for name, s in facts["by_source"].items():
        if s["rollouts"] >= NEVER and s["successes"] <= 0:
            out.append(
                Finding(
                    True,
                    f"{name or '(unknown)'}: not one success in {int(s['rollouts']):,} rollouts",
                    "The answer's format, or the reward function of this source? Read a few of its rollouts.",
                    f"source == {_quoted(name)}",
                )
            )
    return out


def _moves(prompts: Prompts, history: History | None) -> list[Finding]:
    """Sources that stand still or get worse, by prompts that were visited at least twice."""
    table = prompts.table
    change, rate = prompts.number("last_rate") - prompts.number("first_rate"), prompts.get("pass_rate")
    twice = (table.col("visits") > 1) & np.isfinite(change)
    if history is not None and len(history.step) > 3:
        twice &= table.col("last_step") > history.step[len(history.step) // 2]  # lately
    assert isinstance(rate, np.ndarray)
    code, moved, size = table.col("source").astype(np.int64)[twice], change[twice], len(table.sources)
    counts = np.bincount(code, minlength=size)
    with np.errstate(all="ignore"):
        means = np.bincount(code, moved, minlength=size) / counts
        spread = np.bincount(code, (moved - means[code]) ** 2, minlength=size) / (counts - 1)
        levels = np.bincount(code, rate[twice], minlength=size) / counts
    out = []
    for source in np.flatnonzero(counts >= _PAIRS).tolist():
        count, mean, level = int(counts[source]), float(means[source]), float(levels[source])
        error = float(np.sqrt(spread[source] / count))
        name, where = table.sources[source] or "(unknown)", f"source == {_quoted(table.sources[source])}"
        said = f"{round(mean, 3) + 0.0:+.3f} ± {2 * error:.3f} over {count:,} prompts visited at least twice"
        if mean + 2 * error < 0:
            out.append(
                Finding(
                    mean < -0.05,
                    f"{name}: prompts get worse ({said})",
                    "Forgetting, or a reward that pulls elsewhere.",
                    f"{where} and change < 0",
                )
            )
        elif mean + 2 * error < 0.02 and 0 < level < 0.9:
            out.append(
                Finding(False, f"{name}: stands still ({said})", "Nothing is learned from it at present.", where)
            )
    return out


def _validation(history: History) -> list[Finding]:
    out = []
    for curve in headline(history.validations):
        if len(curve.values) < 3:
            continue
        best = int(np.argmax(curve.values))
        drop = float(curve.values[best] - curve.values[-1])
        # a reward has a scale of its own
        enough = max(0.02, 2 * (curve.error(-1) or 0.0)) if curve.shares else 0.25 * float(np.abs(curve.values).max())
        if drop > enough:
            step = history.validations[curve.at[best]]["step"]
            out.append(
                Finding(
                    curve.shares and drop > 0.1,
                    f"Validation of {curve.name} is {drop:.3f} below its best, {curve.values[best]:.3f} at step {step:,}",
                    "Over-training or a reward that drifts: the checkpoint of that step may be the better one.",
                )
            )
    return out


def _cut(history: History) -> list[Finding]:
    late = max(1, len(history.step) // 4)
    out = []
    for i, name in enumerate(history.sources):
        known = float(history.sums["known"][-late:, i].sum())
        clipped = float(history.sums["clipped"][-late:, i].sum())
        if known >= NEVER and clipped > CUT * known:
            out.append(
                Finding(
                    clipped > 0.5 * known,
                    f"{name}: {clipped / known:.0%} of the answers are cut at the limit of late",
                    "Raise data.max_response_length, or penalise length: a cut answer is wrong whatever it thought.",
                )
            )
    return out


def _waste(history: History) -> list[Finding]:
    late = max(1, len(history.step) // 4)
    amounts = {name: float(values[-late:].sum()) for name, values in history.rollouts.items()}
    whole = sum(amounts.values())
    lost = {name: amount for name, amount in amounts.items() if name != "trained" and amount > 0}
    if not whole or not lost:
        return []
    name = max(lost, key=lambda reason: lost[reason])
    if lost[name] < 0.5 * whole:
        return []
    if name.removeprefix("dropped: ") not in _FLAT:
        why = "What that reason means is in docs/metrics.md, or with the filter that gives it."
    elif any(metric.startswith("adaptive/sampler/") for metric in history.scalars):
        # of a sampler that decides by what prompts have shown
        why = (
            "The run's sampler avoids such prompts once it knows them: a past (adaptive.warm_start), or a data set filtered by "
            "this store (filter-dataset), would save the first visits."
        )
    else:
        why = "A sampler that skips such prompts (+adaptive=greso), or a filtered data set, would save most of them."
    return [Finding(False, f"{lost[name] / whole:.0%} of the latest rollouts went to “{name}”", why)]
