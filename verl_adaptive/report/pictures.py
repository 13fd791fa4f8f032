"""Which charts the page has, made of what was collected."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from verl_adaptive.report import figures
from verl_adaptive.report.collect import Collected
from verl_adaptive.report.course import CLASSES, VISITS, History
from verl_adaptive.report.figures import PALETTE, Series
from verl_adaptive.report.learning_curve import curves, smooth

#: Heading, chart, and a remark below it, which may be empty.
Picture = tuple[str, Any, str]

#: Of :data:`~verl_adaptive.report.course.CLASSES`.
_COLORS = ("var(--bad)", "var(--c4)", "var(--c2)", "var(--c6)", "var(--c1)", "var(--grey)")
#: Labels of the last bars are open upwards.
_VISITED = ("0", *map(str, range(1, 10)), "10+")
#: Labels of :data:`verl_adaptive.report.overview.BINS`: exactly 0, from above 0 on, from 0.1 on, …, exactly 1.
_BARS = ("0", ">0", *(f"{i / 10:.1f}" for i in range(1, 10)), "1")
#: Groups that one smoothed point stands for: a share of so many is within a few per cent of itself.
_ENOUGH = 1000

#: Ways to count progress: id → label, axis, and its names in a course and in a validation.
VIEWS = {
    "rollouts": ("by rollouts", "rollouts generated", "generated", "rollouts"),
    "steps": ("by steps", "step", "step", "step"),
    "hours": ("by time", "hours of training", "hours", "hours"),
}

#: The scalars that are drawn, by picture; verl's logger has all of them.
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


def learning(collected: Collected) -> list[tuple[str, str, list[Picture]]]:
    """The learning curves in every view: its id, label, and its pictures."""
    history = collected.history
    if history is None:
        return []
    shown = [view for view in VIEWS if np.isfinite(_axis(history, view)).any()]
    return [(view, VIEWS[view][0], _in_view(collected, history, view)) for view in shown]


def _in_view(collected: Collected, history: History, view: str) -> list[Picture]:
    label, out = VIEWS[view][1], []
    runs = [("", history, "")]
    runs += [
        (f" · {name}", course, dash)
        for (name, course), dash in zip(collected.against, itertools.cycle(figures.DASHES), strict=False)
    ]
    # of several other runs one curve each, in a colour of its own: four dashes tell no ten runs from one another
    several = {run[0]: PALETTE[i % len(PALETTE)] for i, run in enumerate(runs[1:], 1)} if len(runs) > 2 else {}
    for metric, own in list(curves(history.validations).items())[:3]:
        series, mean = [], next((c.sources for c in own if c.parts), None)
        # a source has one colour on the page; those that the other charts leave out get what is free here
        names = {c.name for c in own}
        colors = {name: color for name, color in zip(history.sources, PALETTE, strict=False) if name in names}
        free = itertools.cycle([color for color in PALETTE if color not in colors.values()] or PALETTE)
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


def pictures(collected: Collected) -> dict[str, list[Picture]]:
    """Every other chart: section → its pictures; a section that has none is left out."""
    facts, history = collected.facts, collected.history
    single = facts["single"]  # right or wrong: pass rates of a visit have two values
    out = {"prompts": _prompts(facts, single)}
    if history is not None:
        out |= {"difficulty": _difficulty(history, single), "policy": _scalars(history)}
        out |= {"calibration": _calibration(history)}
        if facts["kind"] != "rollouts":  # all of those trained
            out["budget"] = [("Over steps", _fate(history), "")]
    return {section: found for section, found in out.items() if found}


def _prompts(facts: dict[str, Any], single: bool) -> list[Picture]:
    def rates(heading: str, title: str, histogram: str, label: str, color: str) -> Picture:
        return heading, figures.bars(title, _BARS, facts[histogram]["prompts"], (label, "prompts"), color), ""

    title = "Prompts by pass rate over all visits"
    out = [rates("Pass rate over all visits", title, "histogram", "pass rate", "var(--c1)")]
    if not single:
        title, label = "Prompts by the pass rate of their latest visit", "pass rate at the latest visit"
        out.append(rates("Pass rate at the latest visit", title, "latest_histogram", label, "var(--c3)"))
    title, labels = "Prompts by the number of their visits", ("visits", "prompts")
    chart = figures.bars(title, _VISITED, facts["visits_histogram"], labels, "var(--c6)")
    remark = "Of the prompts that this store knows. Prompts at 0 were skipped or not reached yet."
    return [*out, ("How often prompts were visited", chart, remark)]


def _fate(history: History) -> Any:
    names = sorted(history.rollouts, key=lambda name: (name != "trained", name))
    dropped = itertools.cycle(f"var(--c{i})" for i in (2, 4, 7, 5, 8, 6, 3))
    colors = {name: "var(--c1)" if name == "trained" else next(dropped) for name in names}
    steps, wide = history.steps.astype(np.float64), width_of(history)
    series = [Series(name, smooth(history.rollouts[name] / steps, steps, wide), colors[name]) for name in names]
    step = history.step.astype(np.float64)
    return figures.stacked("Where rollouts went, over steps", step, series, ("step", "rollouts a step"))


def _difficulty(history: History, single: bool) -> list[Picture]:
    step, wide = history.step.astype(np.float64), width_of(history)
    groups = history.classes.sum(axis=1).astype(np.float64)
    share = history.classes / np.maximum(groups, 1)[:, None]
    classes = zip(CLASSES, share.T, _COLORS, strict=True)
    series = [Series(name, smooth(values, groups, wide), color) for name, values, color in classes]
    title = "Share of finished groups by difficulty, over steps"
    chart = figures.stacked(title, step, series, ("step", "share of finished groups"), percent=True)
    remark = "Groups that are all right or all wrong are uninformative."
    if single:
        remark = "Most groups are single rollouts, so each is all right or all wrong."
    out = [("What was rolled out", chart, f"{remark} Hard is a pass rate below 0.25, easy above 0.75.")]
    used = np.flatnonzero(history.visits.sum(axis=1) > 0)
    if len(used) and not single:
        rows = history.visits[: used[-1] + 1].astype(np.float64)
        with np.errstate(invalid="ignore"):
            heat = (rows / rows.sum(axis=1, keepdims=True)).T
        columns = [str(i + 1) for i in range(min(len(rows), VISITS))] + ([f">{VISITS}"] if len(rows) > VISITS else [])
        title = "Pass rates by visit: share of the groups of a visit"
        chart = figures.heatmap(title, columns, _BARS, heat, ("visit to the prompt: 1 is the first epoch", "pass rate"))
        remark = "Each column adds up to 100%; later visits are those of prompts that were chosen again."
        out.append(("Pass rate by visit", chart, remark))
    if len(history.sources) > 1:
        title, remark = (
            "Pass rate of the largest data sources",
            "Of what was rolled out, the largest sources, smoothed.",
        )
        out += _by_source(history, "successes", "rollouts", "Pass rate by data source", title, "pass rate", remark)
    heading = "Answers cut at the limit"
    remark = "Share of answers as long as data.max_response_length, by data source, smoothed."
    out += _by_source(history, "clipped", "known", heading, heading, "share of answers", remark)
    if history.sums["tokens"].any():
        heading, remark = "Length of answers", "Response tokens a rollout, by data source, smoothed."
        out += _by_source(history, "tokens", "rollouts", heading, heading, "response tokens", remark, percent=False)
    return out


def _by_source(
    history: History, top: str, bottom: str, heading: str, title: str, label: str, remark: str, *, percent: bool = True
) -> list[Picture]:
    """A curve for each of the largest sources; none where there is nothing to divide by."""
    step, values, weights = history.step, history.rate(top, bottom, axis=False), history.sums[bottom]
    wide = min(2 * width_of(history) + 1, max(1, len(step) // 5) | 1)
    series = [
        Series(name, smooth(values[:, i], weights[:, i], wide), PALETTE[i])
        for i, name in enumerate(history.sources[: len(PALETTE)])
        if weights[:, i].any()
    ]
    if not series:
        return []
    return [(heading, figures.lines(title, step.astype(np.float64), series, ("step", label), percent=percent), remark)]


def _calibration(history: History) -> list[Picture]:
    known = history.calibration[history.calibration[:, 2] > 0]
    if not len(known):
        return []
    predicted, observed, count = known.T
    title = "Predicted against observed pass rate"
    return [("Predicted and observed", figures.reliability(title, predicted / count, observed / count, count), "")]


def _scalars(history: History) -> list[Picture]:
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
            shown = [series(name, PALETTE[i]) for i, name in enumerate(found)]
            out.append((heading, figures.lines(heading, step, shown, ("step", "")), ""))
    return out
