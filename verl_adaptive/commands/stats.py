"""What a store knows of its prompts: an overview, and lists of prompts.

STORE is a journal (path of a SQLite file, or sqlite:/// or postgresql+psycopg:// URL; #RUN at the end names one of
several runs), a checkpoint global_step_N or the snapshot in it, a directory of checkpoints, or a Parquet or JSONL file
of results. A journal can be read while training writes it.

  verl-adaptive stats checkpoints/project/experiment
  verl-adaptive stats runs.sqlite#project/experiment --where "visits > 3 and pass_rate < 0.1" --sort rollouts --desc
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from verl_adaptive.commands.arguments import add_store_options
from verl_adaptive.commands.text import clean
from verl_adaptive.errors import AdaptiveError

__all__ = ["configure", "run"]

_LISTED = ("key", "source", "visits", "rollouts", "pass_rate", "first_rate", "last_rate", "last_step")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="what to read; see above")
    add_store_options(parser)
    parser.add_argument("--where", metavar="CONDITION", help='list the prompts that satisfy it, as "pass_rate < 0.1"')
    parser.add_argument("--sort", metavar="COLUMN", help="list prompts in the order of a column")
    parser.add_argument("--desc", action="store_true", help="largest first")
    parser.add_argument("--limit", metavar="N", type=_count, help="prompts in a list (default 10)")
    parser.add_argument("--tries", metavar="N", type=_count, default=16, help="rollouts that make a prompt tried (16)")
    parser.add_argument("--data", metavar="FILE", help="the training set; shows the prompts' texts")
    parser.add_argument("--columns", action="store_true", help="list the columns that --where and --sort take")
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or greater")
    return value


def run(args: argparse.Namespace) -> int:
    from verl_adaptive.commands.output import print_json
    from verl_adaptive.report.expressions import Expression
    from verl_adaptive.report.overview import overview
    from verl_adaptive.report.prompts import open_prompts

    condition = Expression(args.where) if args.where else None  # before anything long
    opened = open_prompts(args.store, run=args.run, tolerance=args.tolerance, id_key=args.id_key)
    if args.columns:
        return _print_columns(opened.prompts)
    facts = overview(opened, tries=args.tries)
    prompts = opened.prompts
    limit = args.limit or 10
    lists: dict[str, tuple[np.ndarray, list[str]]] = {}
    if condition is not None or args.sort or args.limit:
        chosen = np.flatnonzero(condition.select(prompts)) if condition is not None else np.arange(len(prompts))
        facts["selected"] = len(chosen)
        if args.sort and args.sort not in prompts.names():
            raise AdaptiveError(f"no column {args.sort!r}; there are {', '.join(prompts.names())}")
        if args.sort:
            chosen = prompts.order(args.sort, chosen, args.desc)
        extra = [*(condition.names if condition else []), *([args.sort] if args.sort else [])]
        lists["selected prompts"] = (chosen[:limit], extra)
    else:
        lists.update(_standard(prompts, args.tries, limit))
    shown = {name: _records(prompts, rows, extra) for name, (rows, extra) in lists.items()}
    if args.data:
        _add_texts(shown, args.data, args.prompt_key, args.id_key)
    if args.json:
        print_json({**facts, "lists": shown})
    else:
        _print(facts, shown)
    return 0


def _standard(prompts: Any, tries: int, limit: int) -> dict[str, tuple[np.ndarray, list[str]]]:
    """The lists that people ask for first."""
    rollouts, successes = prompts.table.col("rollouts"), prompts.table.col("successes")
    never = np.flatnonzero((rollouts >= tries) & (successes <= 0))

    out: dict[str, tuple[np.ndarray, list[str]]]
    out = {f"never solved in {tries} rollouts or more": (prompts.order("rollouts", never, True)[:limit], [])}
    if "flips" in prompts.extra:
        flipping = np.flatnonzero(prompts.extra["flips"] >= 2)
        out["flip-flopping: crossed one half at least twice"] = (
            prompts.order("flips", flipping, True)[:limit],
            ["flips"],
        )
    return out


def _records(prompts: Any, rows: np.ndarray, extra: list[str]) -> list[dict[str, Any]]:
    names = [*_LISTED, *dict.fromkeys(name for name in extra if name not in _LISTED)]
    columns = {name: prompts.values(name, rows) for name in names}
    return [{name: columns[name][i] for name in names} for i in range(len(rows))]


def _add_texts(shown: dict[str, list[dict[str, Any]]], path: str, prompt_key: str, id_key: str | None) -> None:
    from verl_adaptive.report.dataset import texts_of

    wanted = {record["key"] for records in shown.values() for record in records}
    texts = texts_of(path, wanted, prompt_key=prompt_key, id_key=id_key)
    for records in shown.values():
        for record in records:
            record["text"] = texts.get(record["key"])


def _print_columns(prompts: Any) -> int:
    from verl_adaptive.commands.output import console, table
    from verl_adaptive.report.prompts import DERIVED

    rows = [(name, DERIVED[name][0] if name in DERIVED else "") for name in prompts.names()]
    console().print(table([("column", "left"), ("", "left")], [*rows, ("flips", "crossings of 1/2 (journals only)")]))
    return 0


def _print(facts: dict[str, Any], shown: dict[str, list[dict[str, Any]]]) -> None:
    from rich.text import Text

    from verl_adaptive.commands.output import console, number, share, table

    out = console()

    def line(label: str, text: str) -> None:
        out.print(Text(f"{label:<14}", style="bold") + Text(clean(text)))

    line("store", f"{facts['store']} ({facts['kind']})")
    if facts["run"]:
        attempts = f", attempt {facts['attempts']}" if facts.get("attempts", 1) > 1 else ""
        line("run", f"{facts['run']} ({facts.get('preset', '?')}, verl-adaptive {facts.get('package', '?')}{attempts})")
    if facts.get("steps"):
        line("steps", f"{number(facts['steps'])}: {facts['first_step']} to {facts['last_step']}")
    elif facts.get("step") is not None:
        line("step", f"{facts['step']} ({facts.get('policy', '?')})")
    for first, last, reason in facts.get("gaps") or []:
        line("missing", f"steps {first} to {last}: {reason}")
    line(
        "prompts",
        f"{number(facts['prompts'])}, {number(facts['visited'])} visited ({share(facts['visited'], facts['prompts'])}), "
        f"{number(facts['visits'])} visits, {number(facts['failed_groups'])} failed groups",
    )
    rate = "" if facts["pass_rate"] is None else f", pass rate {facts['pass_rate']:.3f}"
    line("rollouts", f"{number(facts['rollouts'])} judged, {number(facts['tokens'])} response tokens{rate}")
    ledger = (facts.get("ledger") or {}).get("rollouts")
    if ledger:
        line("generated", _account(ledger))
    line("never solved", f"{number(facts['never_solved'])} of those with {facts['tries']} rollouts or more")
    line("always solved", number(facts["always_solved"]))
    line("regressed", f"{number(facts['regressed'])} fell by half or more since their first visit")
    if facts["flip_flopping"] is not None:
        line("flip-flopping", f"{number(facts['flip_flopping'])} crossed one half at least twice")
    if facts["retired"] is not None:
        at = f" (snapshot of step {facts['retired_at_step']})" if facts["retired_at_step"] is not None else ""
        line("retired", number(facts["retired"]) + at)
    _print_histogram(out, facts)
    sources = sorted(facts["by_source"].items(), key=lambda item: (-item[1]["rollouts"], item[0]))
    if len(sources) > 1 or (sources and sources[0][0]):
        rows = [
            (name or "(unknown)", *(number(d[c]) for c in ("prompts", "visited", "rollouts")), share(d["pass_rate"]))
            + tuple(number(d[c]) for c in ("easy", "hard", "retired"))
            for name, d in sources[:30]
        ]
        heads = ("prompts", "visited", "rollouts", "pass rate", "all right", "all wrong", "retired")
        columns = [("data source", "left"), *((h, "right") for h in heads)]
        out.print(table(columns, rows, f"by data source{'' if len(sources) <= 30 else f' (30 of {len(sources)})'}"))
    for title, records in shown.items():
        selected = f": {number(facts['selected'])}" if "selected" in facts else ""
        if not records:
            if selected:
                out.print(Text(f"{title}{selected}"))
            continue
        names = list(records[0])
        columns = [(n.replace("_", " "), "left" if n in ("key", "source", "text") else "right") for n in names]
        cells = [[_cell(name, record[name]) for name in names] for record in records]
        out.print(table(columns, cells, f"{title}{selected}"))


def _cell(name: str, value: Any) -> str:
    from verl_adaptive.commands.output import number

    if isinstance(value, str):
        return clean(value, 60)
    if value is None or value != value:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) and ("rate" in name or not value.is_integer()) else number(value)


def _account(ledger: dict[str, Any]) -> str:
    from verl_adaptive.commands.output import number, share

    whole = ledger["generated"]
    dropped = ", ".join(f"{number(amount)} {reason}" for reason, amount in ledger["dropped"].items())
    parts = [f"{number(whole)} rollouts: {number(ledger['trained'])} trained ({share(ledger['trained'], whole)})"]
    parts.append(f"dropped {dropped or 'none'}")
    parts.append(f"{number(ledger['surplus'])} surplus")
    if ledger["held"]:
        parts.append(f"{number(ledger['held'])} held")
    return ", ".join(parts)


def _print_histogram(out: Any, facts: dict[str, Any]) -> None:
    from rich.text import Text

    from verl_adaptive.commands.output import number

    counts = facts["histogram"]["prompts"]
    if not sum(counts):
        return
    block = "█" if (out.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32") else "#"
    out.print(Text("\npass rate      prompts", style="bold"))
    widest = max(counts)
    for name, count in zip(facts["histogram"]["bins"], counts, strict=True):
        bar = block * max(round(40 * count / widest), 1 if count else 0)
        label = {"0": "0 (none)", "1": "1 (all)"}.get(name, name)
        out.print(Text(f"{label:<10}{number(count):>12} ") + Text(bar, style="cyan"))
