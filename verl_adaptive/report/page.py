"""The report as one HTML file that needs no network; its style and its script are allowed by their hashes, nothing else is."""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import shlex
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from verl_adaptive import __version__
from verl_adaptive.ledger import Ledger
from verl_adaptive.report import figures
from verl_adaptive.report.collect import Collected
from verl_adaptive.report.course import Forecast, History, forecast
from verl_adaptive.report.learning_curve import headline
from verl_adaptive.report.pictures import learning, pictures
from verl_adaptive.stats.run import VALIDATE
from verl_adaptive.text import cell, clean, counted, number, share, span, step_range

#: Sources in the table.
_SOURCES = 100


@dataclass(frozen=True)
class Live:
    """What a served page knows of its server.

    Attributes:
        watch: where the script asks for news.
        version: what the page shows.
        every: seconds between two questions.
    """

    watch: str
    version: str
    every: int


@functools.cache
def _asset(name: str) -> str:
    return files("verl_adaptive.report").joinpath(name).read_text(encoding="utf-8")


def policy_of(live: bool) -> str:
    """The Content-Security-Policy: nothing but the page's own style and script; a served page may ask its server."""

    def digest(name: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() + "'"

    parts = ["default-src 'none'", f"style-src {digest('report.css')}", f"script-src {digest('report.js')}"]
    if live:
        parts.append("connect-src 'self'")
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


@functools.cache
def environment() -> jinja2.Environment:
    """Templates of this package: everything escaped, nothing undefined; each is compiled once."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"number": number, "share": share, "cell": cell, "safe_text": _safe_text, "plain": _plain}
    made.globals |= {
        "style": Markup(_asset("report.css")),
        "script": Markup(_asset("report.js")),
        "spark": figures.spark,
    }
    return made


def render(collected: Collected, *, live: Live | None = None) -> str:
    """The page, under the run's name; ``live`` is for one that a server shows and refreshes."""
    facts, history = collected.facts, collected.history
    end = None if history is None else forecast(history, facts)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            title=clean(facts.get("run") or facts["store"]),
            policy=policy_of(live is not None),
            live=live,
            facts=facts,
            subtitle=_subtitle(facts, history),
            cards=_cards(facts, history, end),
            learning=learning(collected),
            validate=VALIDATE,
            validated=history is not None and bool(headline(history.validations)),
            against=clean(", ".join(name for name, _ in collected.against)) or None,
            findings=collected.findings,
            alarms=[] if history is None else history.hearing.raised[::-1],
            forecast=None if end is None else _forecast_rows(end),
            going_on=end is not None and end.left > 0,
            pictures=pictures(collected),
            uniform=None if history is None else history.uniform,
            ledger=_ledger_rows(facts),
            sources=_sources(facts, history),
            source_count=len(facts["by_source"]),
            dead=sum(s["rollouts"] for s in facts["by_source"].values() if not s["successes"]),
            any_cut=history is not None and bool(history.sums["clipped"].any()),
            any_retired=bool(facts["retired"]),
            single=facts["single"],
            then_and_now=collected.then_and_now.tolist(),
            classes=("hard (< 0.25)", "middle", "easy (> 0.75)"),
            lists=[(each, _commands(facts, each.where, each.keep)) for each in collected.lists],
            conflicts=collected.conflicts,
            notes=collected.notes,
            stats=lambda where: _stats_command(facts, where),
            version=__version__,
            made=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )


def _stats_command(facts: dict[str, Any], where: str) -> str:
    """With the data set that the page has: of some stores it alone knows the data sources."""
    data = [] if facts["data"] is None else ["--data", facts["data"]]
    return _command(facts, "stats", *data, where=where)


def _commands(facts: dict[str, Any], where: str, keep: str) -> list[tuple[str, str]]:
    """To write all of them to a file, and to leave them out of the data set; each with what it does."""
    out, data = [], facts["data"] or "train.parquet"
    # to a list, export cannot add the data sources that only the data set knows
    if facts["data"] is None or facts["kind"] in ("journal", "snapshot"):
        command = _command(facts, "export", "list.csv", where=where)
        out.append(("write all of them to a file (.csv, .parquet, .jsonl)", command))
    if facts["kind"] != "rollouts":
        command = _command(facts, "export", "kept.parquet", "--keep-unseen", "--data", data, where=keep)
        out.append(("leave them out of the data set", command))
    return out


def _command(facts: dict[str, Any], name: str, *words: str, where: str) -> str:
    """A command about the page's store, which reads it as the page did."""
    return clean(shlex.join(["verl-adaptive", name, facts["argument"], *words, *facts["identity"], "--where", where]))


def _subtitle(facts: dict[str, Any], history: History | None) -> str:
    words = [facts.get("preset") or facts.get("policy"), f"{facts['kind']} {facts['store']}"]
    if facts.get("steps"):
        words.append(step_range(facts["first_step"], facts["last_step"]))
    elif facts.get("step") is not None:
        words.append(f"step {facts['step']}")
    if history is not None and history.hours[-1]:
        words.append(span(float(history.hours[-1])))
    if facts.get("attempts", 1) > 1:
        words.append(f"{facts['attempts']} attempts")
    return clean(" · ".join(str(word) for word in words if word))


def _safe_text(value: object, limit: int = 600) -> str:
    """Somebody's text: escapes for what a browser would obey (bidirectional overrides), line breaks kept."""
    lines = str(value)[: 8 * limit].replace("\r\n", "\n").split("\n")
    return "\n".join(clean(line) for line in lines)[:limit]


def _plain(value: Any) -> str:
    """A value to sort by."""
    return "" if value is None or value != value else str(value)


def _cards(facts: dict[str, Any], history: History | None, end: Forecast | None) -> list[tuple[str, str, str]]:
    """Number, what it is, and a remark."""
    ledger = facts.get("ledger")
    out = []
    for curve in headline(history.validations if history is not None else [])[-1:]:
        assert history is not None
        best = int(curve.values.argmax())
        step = history.validations[curve.at[best]]["step"]
        remark = f"{curve.metric}, {curve.name}; best {curve.values[best]:.3f} at step {number(step)}"
        out.append((f"{curve.values[-1]:.3f}", "validation", clean(remark)))
    if ledger:
        generated = ledger.rollouts.generated
        trained = f"{share(ledger.rollouts.trained, generated)} of them trained"
        out.append((figures.short(generated), "rollouts generated", f"{counted(facts['steps'], 'step')}, {trained}"))
    if history is not None and "saved" in history.uniform:
        more = round(-history.uniform["saved"], 2) + 0.0  # never -0
        out.append((f"{more:+.0%}", "rollouts against uniform", "estimate, see below"))
    if end is not None:
        finished = not end.left
        out.append(
            (
                "done" if finished else span(end.hours_left) if end.hours_left == end.hours_left else "-",
                "" if finished else "to go",
                f"{'' if finished else 'of '}{counted(end.steps, 'step')}, {figures.short(end.rollouts)} rollouts",
            )
        )
    rate = facts["pass_rate"]
    out.append(("-" if rate is None else f"{rate:.3f}", "pass rate", "all rollouts judged"))
    out.append((_large(facts["visited"]), "prompts visited", f"of {number(facts['prompts'])} known to this store"))
    out.append((_large(facts["never_solved"]), "never solved", f"in {facts['tries']} rollouts or more"))
    if facts["retired"]:
        out.append((_large(facts["retired"]), "retired", f"snapshot of step {facts['retired_at_step']}"))
    return out


def _large(value: int) -> str:
    """A number that fits a card: there is room for six digits."""
    return number(value) if value < 1_000_000 else figures.short(value)


def _forecast_rows(end: Forecast) -> list[tuple[str, str]]:
    why = "the planned steps" if end.by == "steps" else "adaptive.total_rollouts"
    left = f"{number(round(end.left))} to go, " if end.left else ""
    hours_left = f", {span(end.hours_left)} to go" if end.left else ""
    return [
        ("steps", f"{number(round(end.steps))} ({left}set by {why})"),
        ("rollouts", figures.short(end.rollouts)),
        ("time", "-" if end.hours != end.hours else f"{span(end.hours)}{hours_left}"),
        ("rollouts per step, recently", number(round(end.per_step))),
        ("seconds per step, recently", "-" if end.pace != end.pace else f"{round(end.pace, 1):g}"),
    ]


def _ledger_rows(facts: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Destination, rollouts, tokens."""
    ledger: Ledger | None = facts.get("ledger")
    if ledger is None:
        return []
    rollouts, tokens = ledger.rollouts, ledger.tokens
    rows = [("generated", rollouts.generated, tokens.generated), ("trained", rollouts.trained, tokens.trained)]
    rows += [(f"dropped: {name}", n, tokens.dropped.get(name, 0)) for name, n in rollouts.dropped.items()]
    if rollouts.held:
        rows.append(("held for a later step", rollouts.held, tokens.held))
    return rows


def _sources(
    facts: dict[str, Any], history: History | None
) -> list[tuple[str, dict[str, Any], float | None, int | None]]:
    """Name, totals, share of cut answers and step of the first success of the sources with the most rollouts."""
    known = {} if history is None else history.of_source
    found = sorted(facts["by_source"].items(), key=lambda item: (-item[1]["rollouts"], item[0]))[:_SOURCES]
    return [(name or "(unknown)", totals, *known.get(name, (None, None))) for name, totals in found]
