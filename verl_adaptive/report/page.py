"""The report as one HTML file: no script, no network, nothing but what is in it."""

from __future__ import annotations

import datetime
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np

from verl_adaptive import __version__
from verl_adaptive.report import figures
from verl_adaptive.report.collect import CLASSES, VISITS, Collected, History
from verl_adaptive.report.figures import Series
from verl_adaptive.text import clean, number, share

__all__ = ["render"]

_COLORS = dict(
    zip(CLASSES, ("var(--bad)", "var(--c4)", "var(--c2)", "var(--c6)", "var(--c1)", "var(--grey)"), strict=True)
)
#: Labels of the last bars are open upwards.
_VISITED = ("0", *map(str, range(1, 10)), "10+")
#: Labels of :data:`verl_adaptive.report.overview.BINS`: exactly 0, from above 0 on, from 0.1 on, …, exactly 1.
_BARS = ("0", ">0", *(f"{i / 10:.1f}" for i in range(1, 10)), "1")
_PALETTE = tuple(f"var(--c{i})" for i in range(1, 9))

#: Scalars that belong into one picture; what is not here gets one of its own.
_TOGETHER = (
    ("Exploration", ("adaptive/sampler/p_easy", "adaptive/sampler/p_hard")),
    ("Shares of groups without variance", ("adaptive/sampler/easy_share", "adaptive/sampler/hard_share")),
    ("Price of the budget", ("adaptive/sampler/nu",)),
    ("Ahead of pace, rollouts", ("adaptive/sampler/ahead_of_pace",)),
    ("Budget left, rollouts", ("adaptive/sampler/budget_left",)),
    ("Pilots in the band", ("adaptive/allocator/in_band_share",)),
    ("Pass rate of pilots and commits", ("adaptive/allocator/pilot_rate", "adaptive/allocator/commit_rate")),
    ("Retired prompts, share", ("adaptive/sampler/retired_share",)),
    ("Rescue", ("adaptive/allocator/rescue_topups_total", "adaptive/allocator/rescued_total")),
)


def render(collected: Collected, *, title: str | None = None) -> str:
    """The page.

    Args:
        collected: from :func:`verl_adaptive.report.collect.collect`.
        title: its heading; by default the run's name.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "share": share, "cell": _cell, "safe_text": _safe_text}
    template = environment.from_string(
        files("verl_adaptive.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    facts, history = collected.facts, collected.history
    return template.render(
        title=clean(title or facts.get("run") or facts["store"]),
        facts=facts,
        subtitle=_subtitle(facts),
        cards=_cards(facts, history),
        pictures=_pictures(facts, history),
        uniform=None if history is None else history.uniform,
        ledger=_ledger_rows(facts),
        sources=sorted(facts["by_source"].items(), key=lambda item: (-item[1]["rollouts"], item[0]))[:100],
        source_count=len(facts["by_source"]),
        then_and_now=collected.then_and_now.tolist(),
        classes=("hard (≤ 0.25)", "middle", "easy (≥ 0.75)"),
        lists=collected.lists,
        conflicts=collected.conflicts,
        notes=collected.notes,
        version=__version__,
        made=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _subtitle(facts: dict[str, Any]) -> str:
    words = [facts.get("preset") or facts.get("policy"), f"{facts['kind']} {facts['store']}"]
    if facts.get("steps"):
        words.append(f"steps {facts['first_step']} to {facts['last_step']}")
    elif facts.get("step") is not None:
        words.append(f"step {facts['step']}")
    if facts.get("hours"):
        hours = facts["hours"]
        words.append(
            f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min" if hours >= 1 / 60 else "under a minute"
        )
    if facts.get("attempts", 1) > 1:
        words.append(f"attempt {facts['attempts']}")
    return clean(" · ".join(str(word) for word in words if word))


def _safe_text(value: object, limit: int = 600) -> str:
    """Somebody's text: escapes for what a browser would obey (bidirectional overrides), line breaks kept."""
    lines = str(value)[: 8 * limit].replace("\r\n", "\n").split("\n")
    return "\n".join(clean(line) for line in lines)[:limit]


def _cell(value: Any, name: str = "") -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, float) and ("rate" in name or not value.is_integer()):
        return f"{value:.3f}"
    return clean(value) if isinstance(value, str) else number(value)


def _cards(facts: dict[str, Any], history: History | None) -> list[tuple[str, str, str]]:
    """Number, what it is, and a remark."""
    ledger = (facts.get("ledger") or {}).get("rollouts") or {}
    out = [(number(facts["visited"]), "prompts visited", f"of {number(facts['prompts'])} known to this store")]
    if ledger:
        generated = ledger["generated"]
        out.append((figures.short(generated), "rollouts generated", f"{number(facts.get('steps'))} steps"))
        out.append((share(ledger["trained"], generated), "of them trained", f"{number(ledger['trained'])} rollouts"))
    if history is not None and "saved" in history.uniform:
        saved = history.uniform["saved"]
        word = "fewer rollouts than uniform" if saved >= 0 else "more rollouts than uniform"
        if abs(saved) < 0.005:
            word = "as many rollouts as uniform"
        out.append((f"{abs(saved):.0%}" if abs(saved) >= 0.005 else "about", word, "estimate, see below"))
    rate = facts["pass_rate"]
    out.append(("-" if rate is None else f"{rate:.3f}", "pass rate", "all rollouts judged"))
    out.append((number(facts["never_solved"]), "never solved", f"in {facts['tries']} rollouts or more"))
    if facts["retired"] is not None:
        out.append((number(facts["retired"]), "retired", f"snapshot of step {facts['retired_at_step']}"))
    return out


def _ledger_rows(facts: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Destination, rollouts, tokens."""
    ledger = facts.get("ledger")
    if not ledger:
        return []
    rollouts, tokens = ledger["rollouts"], ledger["tokens"]
    rows = [
        ("generated", rollouts["generated"], tokens["generated"]),
        ("trained", rollouts["trained"], tokens["trained"]),
    ]
    rows += [(f"dropped: {name}", n, tokens["dropped"].get(name, 0)) for name, n in rollouts["dropped"].items()]
    rows.append(("surplus", rollouts["surplus"], tokens["surplus"]))
    if rollouts["held"]:
        rows.append(("held for a later step", rollouts["held"], tokens["held"]))
    return rows


def _pictures(facts: dict[str, Any], history: History | None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "rates": figures.bars(
            "Prompts by pass rate over all visits",
            _BARS,
            facts["histogram"]["prompts"],
            ("pass rate", "prompts"),
            "var(--c1)",
        ),
        "latest": figures.bars(
            "Prompts by the pass rate of their latest visit",
            _BARS,
            facts["latest_histogram"]["prompts"],
            ("pass rate at the latest visit", "prompts"),
            "var(--c3)",
        ),
    }
    out["visited"] = figures.bars(
        "Prompts by the number of their visits", _VISITED, facts["visits_histogram"], ("visits", "prompts"), "var(--c6)"
    )
    if history is None:
        return out
    step = history.step.astype(np.float64)
    groups = np.maximum(history.classes.sum(axis=1), 1)
    out["difficulty"] = figures.stacked(
        "Share of finished groups by difficulty, over steps",
        step,
        [Series(name, history.classes[:, i] / groups, _COLORS[name]) for i, name in enumerate(CLASSES)],
        ("step", "share of finished groups"),
        percent=True,
    )
    names = sorted(history.rollouts, key=lambda name: (name != "trained", name == "surplus", name))
    dropped = iter([f"var(--c{i})" for i in (2, 4, 7, 5, 8, 6, 3)] * 3)
    colors = {
        name: "var(--c1)" if name == "trained" else "var(--grey)" if name == "surplus" else next(dropped)
        for name in names
    }
    out["fate"] = figures.stacked(
        "Where rollouts went, over steps",
        step,
        [Series(name, history.rollouts[name] / history.steps, colors[name]) for name in names],
        ("step", "rollouts a step"),
    )
    out["budget"] = figures.lines(
        "Rollouts generated and trained since the beginning",
        step,
        [
            Series("generated", history.cumulative["generated"], "var(--c1)"),
            Series("trained", history.cumulative["trained"], "var(--c3)"),
        ],
        ("step", "rollouts, cumulative"),
    )
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
    count = history.calibration[:, 3]
    if count.any():
        some = count > 0
        mean = history.calibration[some] / count[some, None]
        out["calibration"] = figures.reliability(
            "Predicted against observed pass rate", mean[:, 0], mean[:, 1], count[some]
        )
        variance = np.full(10, np.nan)
        variance[some] = mean[:, 2]
        out["variance"] = figures.lines(
            "Groups with variance, by predicted pass rate",
            np.arange(10) / 10 + 0.05,
            [Series("share of groups with variance", variance, "var(--c2)")],
            ("predicted pass rate", "share"),
        )
    out["scalars"] = _scalars(history)
    return out


def _scalars(history: History) -> list[tuple[str, Any]]:
    step = history.step.astype(np.float64)
    out = []
    for heading, names in _TOGETHER:
        found = [name for name in names if name in history.scalars]
        if found:
            series = [Series(n.rsplit("/", 1)[-1], history.scalars[n], _PALETTE[i]) for i, n in enumerate(found)]
            out.append((heading, figures.lines(heading, step, series, ("step", ""))))
    return out
