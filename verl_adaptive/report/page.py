"""The report as one HTML file."""

from __future__ import annotations

import datetime
import shlex
from typing import Any

from verl_adaptive.report import figures
from verl_adaptive.report.collect import Collected
from verl_adaptive.report.course import Forecast, History, forecast
from verl_adaptive.report.learning_curve import headline
from verl_adaptive.report.pictures import learning, pictures
from verl_adaptive.report.templates import Live, fill
from verl_adaptive.stats.run import VALIDATE
from verl_adaptive.text import clean, counted, number, share, span, step_range

#: Sources in the table.
_SOURCES = 100


def render(collected: Collected, *, live: Live | None = None) -> str:
    """The page, under the run's name; ``live`` is for one that a server shows and refreshes."""
    facts, history = collected.facts, collected.history
    end = None if history is None else forecast(history, facts)
    return fill(
        "report.html.j2",
        title=clean(facts.get("run") or facts["store"]),
        live=live,
        facts=facts,
        history=history,
        made=collected,
        subtitle=_subtitle(facts, history),
        cards=_cards(facts, history, end),
        learning=learning(collected),
        validate=VALIDATE,
        validated=history is not None and bool(headline(history.validations)),
        end=end,
        short=figures.short,
        pictures=pictures(collected),
        sources=_sources(facts, history),
        lists=[(each, _commands(facts, each.where, each.keep)) for each in collected.lists],
        stats=lambda where: _stats_command(facts, where),
        now=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
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
                "done" if finished else span(end.hours_left),
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


def _sources(
    facts: dict[str, Any], history: History | None
) -> list[tuple[str, dict[str, Any], float | None, int | None]]:
    """Name, totals, share of cut answers and step of the first success of the sources with the most rollouts."""
    known = {} if history is None else history.of_source
    found = sorted(facts["by_source"].items(), key=lambda item: (-item[1]["rollouts"], item[0]))[:_SOURCES]
    return [(name or "(unknown)", totals, *known.get(name, (None, None))) for name, totals in found]
