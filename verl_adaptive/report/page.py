"""The report as one HTML file."""

from __future__ import annotations

import datetime
import shlex
from typing import Any

from verl_adaptive.report.collect import Collected
from verl_adaptive.report.course import History, forecast
from verl_adaptive.report.learning_curve import headline
from verl_adaptive.report.pictures import learning, pictures
from verl_adaptive.report.templates import Live, fill
from verl_adaptive.stats.run import VALIDATE
from verl_adaptive.text import clean

#: Sources in the table.
_SOURCES = 100


def render(collected: Collected, *, live: Live | None = None) -> str:
    """The page, under the run's name; ``live`` is for one that a server shows and refreshes."""
    facts, history = collected.facts, collected.history
    end = None if history is None else forecast(history)
    return fill(
        "report.html.j2",
        title=clean(facts.get("run") or facts["store"]),
        live=live,
        facts=facts,
        history=history,
        made=collected,
        learning=learning(collected),
        validate=VALIDATE,
        validated=next(iter(headline([] if history is None else history.validations)[-1:]), None),
        end=end,
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


def _sources(
    facts: dict[str, Any], history: History | None
) -> list[tuple[str, dict[str, Any], float | None, int | None]]:
    """Name, totals, share of cut answers and step of the first success of the sources with the most rollouts."""
    cut, solved = ({}, {}) if history is None else (history.hearing.judge.cut_shares(), history.first_solved)
    found = sorted(facts["by_source"].items(), key=lambda item: (-item[1]["rollouts"], item[0]))[:_SOURCES]
    return [(name or "(unknown)", totals, cut.get(name), solved.get(name)) for name, totals in found]
