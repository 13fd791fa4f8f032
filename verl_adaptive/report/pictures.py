"""Which charts the page has, made of what was collected."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from verl_adaptive.report import figures
from verl_adaptive.report.collect import Collected
from verl_adaptive.report.course import CLASSES, VISITS, History
from verl_adaptive.report.figures import Series
from verl_adaptive.report.learning_curve import curves, smooth

_COLORS = dict(
    zip(CLASSES, ("var(--bad)", "var(--c4)", "var(--c2)", "var(--c6)", "var(--c1)", "var(--grey)"), strict=True)
)
#: Labels of the last bars are open upwards.
_VISITED = ("0", *map(str, range(1, 10)), "10+")
#: Labels of :data:`verl_adaptive.report.overview.BINS`: exactly 0, from above 0 on, from 0.1 on, …, exactly 1.
_BARS = ("0", ">0", *(f"{i / 10:.1f}" for i in range(1, 10)), "1")
_PALETTE = tuple(f"var(--c{i})" for i in range(1, 9))
#: Groups that one smoothed point stands for: a share of so many is within a few per cent of itself.
_ENOUGH = 1000

#: Ways to count progress: id → label, axis, and its names in a course and in a validation.
VIEWS = {
    "rollouts": ("by rollouts", "rollouts generated", "generated", "rollouts"),
    "steps": ("by steps", "step", "step", "step"),
    "hours": ("by time", "hours of training", "hours", "hours"),
}

#: Scalars that belong into one picture; what is not here gets one of its own.
_TOGETHER = (
    ("Exploration", ("adaptive/sampler/p_easy", "adaptive/sampler/p_hard")),
    ("Shares of uninformative groups", ("adaptive/sampler/easy_share", "adaptive/sampler/hard_share")),
    ("Price of the budget", ("adaptive/sampler/nu",)),
    ("Ahead of pace, rollouts", ("adaptive/sampler/ahead_of_pace",)),
    ("Budget left, rollouts", ("adaptive/sampler/budget_left",)),
    ("Pilots in the band", ("adaptive/allocator/in_band_share",)),
    ("Pass rate of pilots and commits", ("adaptive/allocator/pilot_rate", "adaptive/allocator/commit_rate")),
    ("Retired prompts, share", ("adaptive/sampler/retired_share",)),
    ("Rescue", ("adaptive/allocator/rescue_topups_total", "adaptive/allocator/rescued_total")),
    ("Variance that the baselines explain", ("adaptive/advantage/explained_share",)),
    ("Expected spread of the prompts visited", ("adaptive/sampler/expected_spread",)),
)


def width_of(history: History) -> int:
    """Points to smooth over, odd: 1 where every bin has groups enough, or the run has few."""
    bins = len(history.step)
    each = max(1.0, float(np.median(history.sums["judged"].sum(axis=1))))
    return 1 if bins < 15 else 2 * int(min(_ENOUGH / each, bins / 6) / 2) + 1


def _axis(history: History, view: str) -> np.ndarray:
    return np.asarray(getattr(history, VIEWS[view][2]), dtype=np.float64)


def learning(collected: Collected) -> list[tuple[str, str, list[tuple[str, Any, str]]]]:
    """The learning curves in every view: its id, label, and its pictures (heading, chart, remark)."""
    history = collected.history
    if history is None:
        return []
    shown = [view for view in VIEWS if np.isfinite(_axis(history, view)).any()]
    return [(view, VIEWS[view][0], _in_view(collected, history, view)) for view in shown]


def _in_view(collected: Collected, history: History, view: str) -> list[tuple[str, Any, str]]:
    label, out = VIEWS[view][1], []
    runs = [("", history, "")]
    runs += [
        (f" · {name}", course, dash)
        for (name, course), dash in zip(collected.against, itertools.cycle(figures.DASHES), strict=False)
    ]
    # of several other runs one curve each, in a colour of its own: four dashes tell no ten runs from one another
    several = {run[0]: _PALETTE[i % len(_PALETTE)] for i, run in enumerate(runs[1:], 1)} if len(runs) > 2 else {}
    for metric, own in list(curves(history.validations).items())[:3]:
        series, mean = [], next((c.sources for c in own if c.parts), None)
        # a source has one colour on the page; those that the other charts leave out get what is free here
        names = {c.name for c in own}
        colors = {name: color for name, color in zip(history.sources, _PALETTE, strict=False) if name in names}
        free = itertools.cycle([color for color in _PALETTE if color not in colors.values()] or _PALETTE)
        for suffix, run, dash in runs:
            at = np.array([one[VIEWS[view][3]] for one in run.validations], dtype=np.float64)
            found = curves(run.validations).get(metric, [])
            # a mean over other sources beside ours would look like a difference between the runs
            found = [c for c in found if not c.parts or c.sources == mean]
            for i, c in enumerate(found[-1:] if suffix in several else found):
                color = "var(--ink)" if c.parts else colors.get(c.name) or colors.setdefault(c.name, next(free))
                color = several.get(suffix, color)
                key = (suffix.removeprefix(" · ") if not i else "") if dash else None
                series.append(Series(c.name + suffix, c.values, color, at[c.at], dash=dash, key=key))
        chart = figures.lines(f"Validation, {metric}", np.zeros(0), series, (label, metric), from_zero=False)
        alone = sum(not c.parts for c in own)
        remark = (
            f"The {alone} largest data sources, and the mean over {len(mean)}." if mean and len(mean) > alone else ""
        )
        out.append((f"Validation: {metric}", chart, remark))
    remark, over = "", "Over all rollouts, trained and dropped, of the prompts that the sampler chose."
    if collected.facts["kind"] == "rollouts":  # those that trained
        over = ""
    for top, heading in (("reward", "Training reward"), ("successes", "Training pass rate")):
        if top == "successes" and all(np.allclose(c.sums["reward"], c.sums[top]) for _, c, _ in runs):
            continue  # rewards of 0 and 1: the same curve
        series = []
        for suffix, run, dash in runs:
            values, wide = run.rate(top, "rollouts"), width_of(run)
            if wide > 1 and not dash:
                remark = f"Each point is the mean of {wide} neighbours; the faint line is not smoothed. "
            smoothed = smooth(values, run.sums["rollouts"].sum(axis=1), wide)
            color = several.get(suffix, "var(--c2)" if top == "reward" else "var(--c3)")
            raw = values if wide > 1 and not dash else None
            key = suffix.removeprefix(" · ") if dash else None
            series.append(Series(heading.lower() + suffix, smoothed, color, _axis(run, view), raw, dash, key))
        chart = figures.lines(heading, _axis(history, view), series, (label, heading.lower()), from_zero=False)
        out.append((heading, chart, remark + over))
    return out


def pictures(collected: Collected) -> dict[str, Any]:
    """Every other chart, by the name that the template uses."""
    facts, history = collected.facts, collected.history
    out: dict[str, Any] = {
        "rates": _bars("Prompts by pass rate over all visits", facts["histogram"], "pass rate", "var(--c1)"),
        "latest": None
        if facts["single"]
        else _bars(
            "Prompts by the pass rate of their latest visit",
            facts["latest_histogram"],
            "pass rate at the latest visit",
            "var(--c3)",
        ),
        "visited": figures.bars(
            "Prompts by the number of their visits",
            _VISITED,
            facts["visits_histogram"],
            ("visits", "prompts"),
            "var(--c6)",
        ),
        "scalars": [],
    }
    if history is not None:
        out |= {**_course(history), **_answers(history), **_calibration(history), "scalars": _scalars(history)}
    if facts["kind"] == "rollouts":  # all of them trained
        del out["fate"]
    if facts["single"]:  # right or wrong: it would show two values
        out.pop("visits", None)
    return out


def _bars(title: str, histogram: dict[str, Any], label: str, color: str) -> Any:
    return figures.bars(title, _BARS, histogram["prompts"], (label, "prompts"), color)


def _course(history: History) -> dict[str, Any]:
    out: dict[str, Any] = {}
    step = history.step.astype(np.float64)
    groups, wide = history.classes.sum(axis=1).astype(np.float64), width_of(history)
    share = history.classes / np.maximum(groups, 1)[:, None]
    series = [Series(name, smooth(share[:, i], groups, wide), _COLORS[name]) for i, name in enumerate(CLASSES)]
    title = "Share of finished groups by difficulty, over steps"
    out["difficulty"] = figures.stacked(title, step, series, ("step", "share of finished groups"), percent=True)
    names = sorted(history.rollouts, key=lambda name: (name != "trained", name))
    dropped = iter([f"var(--c{i})" for i in (2, 4, 7, 5, 8, 6, 3)] * 3)
    colors = {name: "var(--c1)" if name == "trained" else next(dropped) for name in names}
    steps = history.steps.astype(np.float64)
    series = [Series(name, smooth(history.rollouts[name] / steps, steps, wide), colors[name]) for name in names]
    out["fate"] = figures.stacked("Where rollouts went, over steps", step, series, ("step", "rollouts a step"))
    visits = history.visits.astype(np.float64)
    used = np.flatnonzero(visits.sum(axis=1) > 0)
    if len(used):
        rows = visits[: used[-1] + 1]
        with np.errstate(invalid="ignore"):
            heat = (rows / rows.sum(axis=1, keepdims=True)).T
        columns = [str(i + 1) for i in range(min(len(rows), VISITS))] + ([f">{VISITS}"] if len(rows) > VISITS else [])
        out["visits"] = figures.heatmap(
            "Pass rates by visit: share of the groups of a visit",
            columns,
            _BARS,
            heat,
            ("visit to the prompt: 1 is the first epoch", "pass rate"),
        )
    return out


def _answers(history: History) -> dict[str, Any]:
    """By source: pass rates, lengths, and what was cut; None where there is nothing to see."""
    step, wide = history.step.astype(np.float64), width_of(history)
    shown = range(min(len(history.sources), len(_PALETTE)))

    def by_source(top: str, bottom: str, heading: str, label: str, percent: bool) -> Any:
        values, weights = history.rate(top, bottom, axis=False), history.sums[bottom]
        series = [
            Series(
                history.sources[i],
                smooth(values[:, i], weights[:, i], min(2 * wide + 1, max(1, len(step) // 5) | 1)),
                _PALETTE[i],
            )
            for i in shown
            if weights[:, i].any()
        ]
        return figures.lines(heading, step, series, ("step", label), percent=percent) if series else None

    out = {"sources": None, "cut": None, "length": None}
    if len(history.sources) > 1:
        out["sources"] = by_source("successes", "rollouts", "Pass rate of the largest data sources", "pass rate", True)
    if history.sums["known"].any():
        out["cut"] = by_source("clipped", "known", "Answers cut at the limit", "share of answers", True)
    if history.sums["tokens"].any():
        out["length"] = by_source("tokens", "rollouts", "Length of answers", "response tokens", False)
    return out


def _calibration(history: History) -> dict[str, Any]:
    known = history.calibration[history.calibration[:, 2] > 0]
    if not len(known):
        return {}
    predicted, observed, count = known.T
    title = "Predicted against observed pass rate"
    return {"calibration": figures.reliability(title, predicted / count, observed / count, count)}


def _scalars(history: History) -> list[tuple[str, Any]]:
    step, wide = history.step.astype(np.float64), width_of(history)
    weights = history.steps.astype(np.float64)

    def series(name: str, color: str) -> Series:
        values = history.scalars[name]
        noisy = wide > 1 and "share" in name  # of a step's few groups; what the policy sets itself stays as it is
        return Series(
            name.rsplit("/", 1)[-1],
            smooth(values, weights, wide) if noisy else values,
            color,
            raw=values if noisy else None,
        )

    out = []
    for heading, names in _TOGETHER:
        found = [name for name in names if name in history.scalars and np.isfinite(history.scalars[name]).any()]
        if found:
            shown = [series(name, _PALETTE[i]) for i, name in enumerate(found)]
            out.append((heading, figures.lines(heading, step, shown, ("step", ""))))
    return out
