"""What a store knows of its prompts: an overview, and lists of prompts.

STORE is a run's folder of checkpoints (or one that has it as checkpoints), a journal (the folder adaptive in it), one
checkpoint global_step_N or the snapshot in it, a Parquet or JSONL file of results, or a folder or pattern that leads to
these; of several runs the list is printed. A journal can be read while training writes it.

examples:
  verl-adaptive stats checkpoints/project/experiment
  verl-adaptive stats checkpoints/project/experiment --sort tokens --desc --limit 20 --data train.parquet
  verl-adaptive stats checkpoints/project/experiment --watch
  verl-adaptive stats checkpoints/project/experiment --where "visits > 3 and pass_rate < 0.1" --sort rollouts --desc
  verl-adaptive stats checkpoints/project/experiment --where "visits == 0"
  verl-adaptive stats "checkpoints/project/*" --runs
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from datetime import datetime, timezone
from typing import Any

import numpy as np
from rich.text import Text

from verl_adaptive.commands.arguments import (
    add_json_option,
    add_store_options,
    add_tries_option,
    condition,
    count,
    identity_from,
)
from verl_adaptive.commands.output import console, facts, key_digits, note, note_gaps, print_json, table
from verl_adaptive.errors import AdaptiveError, UsageError
from verl_adaptive.ledger import Account
from verl_adaptive.report.judge import hear
from verl_adaptive.report.lists import COLUMNS, lists_of
from verl_adaptive.report.overview import overview
from verl_adaptive.stats import open_runs
from verl_adaptive.stats.expressions import Expression, check_columns
from verl_adaptive.stats.prompts import about_column
from verl_adaptive.text import cell, clean, counted, number, share, step_range

#: Lists of the report that people ask for first, and their further columns.
_FIRST: dict[str, list[str]] = {"Never solved": [], "Flip-flopping": ["flips"]}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="what to read; see above")
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        type=condition,
        help='list the prompts that satisfy it: --where "pass_rate < 0.1"',
    )
    parser.add_argument("--sort", metavar="COLUMN", help="list prompts in the order of a column: --sort flips")
    parser.add_argument("--desc", action="store_true", help="with --sort: largest first")
    parser.add_argument("--limit", metavar="N", type=count, help="prompts in a list: --limit 50 (default 10)")
    add_tries_option(parser)
    parser.add_argument(
        "--data", metavar="FILE", help="the training set; shows the texts of listed prompts: --data train.parquet"
    )
    parser.add_argument("--runs", action="store_true", help="list the runs of a folder or pattern, and stop")
    parser.add_argument(
        "--columns", action="store_true", help="list the columns that --where and --sort take, and stop"
    )
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=count,
        nargs="?",
        const=5,
        help="print again every so many seconds, until Ctrl-C: --watch 30 (default 5); in a pipe only what is new",
    )
    add_json_option(parser)
    add_store_options(parser)


def run(args: argparse.Namespace) -> int:
    wanted = None if args.where is None else Expression(args.where)  # before anything long
    if args.desc and not args.sort:
        raise UsageError("--desc needs --sort COLUMN")
    if args.watch is not None:
        return _watch(args, wanted)
    return _once(args, wanted)


def _watch(args: argparse.Namespace, wanted: Any) -> int:
    """Again and again, until interrupted: on a terminal in place, in a pipe whenever something is new."""
    before = ""
    with contextlib.suppress(KeyboardInterrupt):  # how it is meant to end
        while True:
            if sys.stdout.isatty():
                out = console()
                out.clear()
                _once(args, wanted)
                out.print(time.strftime("%H:%M:%S, Ctrl-C ends it"))
            else:
                held = io.StringIO()
                with contextlib.redirect_stdout(held):
                    _once(args, wanted)
                if held.getvalue() != before:
                    before = held.getvalue()
                    print(before, flush=True)
            time.sleep(args.watch)
    return 0


def _once(args: argparse.Namespace, wanted: Any) -> int:
    runs = open_runs(args.store, damaged=note, identity=identity_from(args))
    if args.runs or len(runs) > 1:
        options = {
            "--where": wanted,
            "--sort": args.sort,
            "--columns": args.columns,
            "--limit": args.limit,
            "--data": args.data,
        }
        if given := [name for name, value in options.items() if value]:
            names = ", ".join(run.source for run in runs[:4])
            many = f"{args.store} leads to {len(runs)} runs, whose prompts are not one list; name one: {names}"
            raise UsageError(f"{given[0]} is about a run's prompts, and --runs lists runs" if args.runs else many)
        return _print_runs(runs, args.json)
    opened = runs[0]
    if args.columns:
        return _print_columns(opened, args.json)
    if args.data:
        opened.beside(args.data)
    prompts = opened.prompts
    limit = args.limit or 10
    asked = wanted is not None or args.sort or args.limit
    # Whoever asks for prompts gets the answer alone; scripts get everything, as ever.
    facts = {} if asked and not args.json else overview(opened, tries=args.tries)
    if facts and opened.has_course:
        facts["alarms"] = [str(found) for found in hear(opened).judge.standing()]
    if asked:
        chosen = np.flatnonzero(wanted.select(prompts)) if wanted is not None else np.arange(len(prompts))
        rollouts = prompts.get("rollouts").astype(np.int64)
        facts["selected"], facts["selected_rollouts"] = len(chosen), int(rollouts[chosen].sum())
        share = f" ({facts['selected_rollouts'] / rollouts.sum():.1%} of all)" if rollouts.any() else ""
        if args.sort:
            check_columns([args.sort], prompts.names())
            chosen = prompts.order(args.sort, chosen, args.desc)
        extra = [*(wanted.names if wanted else []), *([args.sort] if args.sort else [])]
        lists = {"selected prompts": (chosen, extra)}
        found = f": {number(len(chosen))}, {counted(facts['selected_rollouts'], 'rollout')}{share}"
    else:
        known = {each.title: each.rows for each in lists_of(prompts, args.tries, 0)}
        lists, found = {title: (known[title], extra) for title, extra in _FIRST.items() if title in known}, ""
    shown = {
        name: prompts.records(dict.fromkeys([*COLUMNS, *extra]), rows[:limit]) for name, (rows, extra) in lists.items()
    }
    if args.data or opened.kind == "rollouts":
        _add_texts(shown, opened, args)
    if args.json:
        print_json({**facts, "lists": shown})
    elif asked:
        note_gaps(opened)
        _print_lists(shown, found)
    else:
        _print(facts)
        _print_lists(shown)
    return 0


def _add_texts(shown: dict[str, list[dict[str, Any]]], opened: Any, args: argparse.Namespace) -> None:
    wanted = {record["key"] for records in shown.values() for record in records}
    texts = opened.texts(wanted, data=args.data)
    for records in shown.values():
        for record in records:
            record["text"] = texts[record["key"]].text if record["key"] in texts else None


def _print_runs(runs: list[Any], as_json: bool) -> int:
    found = []
    for run in runs:
        try:
            steps = run.steps.column("step") if run.has_course else []
            note_gaps(run)
        except AdaptiveError as error:  # the others are listed all the same
            note(str(error))
            continue
        began = run.about.get("began")
        found.append(
            {
                "run": run.name or run.kind,
                "preset": run.about.get("preset", run.about.get("policy")),
                "began": None
                if began is None
                else datetime.fromtimestamp(began, timezone.utc).strftime("%Y-%m-%d %H:%M"),
                "attempts": run.about.get("attempts"),
                "steps": len(steps),
                "last_step": steps[-1].as_py() if len(steps) else run.about.get("step"),
                "store": run.source,
            }
        )
    if as_json:
        print_json(found)
        return 0
    rows = [
        (r["run"], r["preset"] or "-", r["began"] or "-")
        + tuple(number(r[name]) for name in ("attempts", "steps", "last_step"))
        + (r["store"],)
        for r in found
    ]
    heads = [("run", "left"), ("preset", "left"), ("began (UTC)", "left"), ("attempts", "right"), ("steps", "right")]
    console().print(table([*heads, ("last step", "right"), ("store", "left")], rows))
    return 0


def _print_columns(opened: Any, as_json: bool) -> int:
    names = opened.prompts.names()
    if as_json:
        print_json({name: about_column(name) for name in names})
    else:
        console().print(table([("column", "left"), ("what it is", "left")], [(n, about_column(n)) for n in names]))
    return 0


def _print(found: dict[str, Any]) -> None:
    out = console()
    out.print(facts(_overview_lines(found)))
    _print_histogram(out, found)
    sources = sorted(found["by_source"].items(), key=lambda item: (-item[1]["rollouts"], item[0]))
    if len(sources) > 1 or (sources and sources[0][0]):
        rows = [
            (name or "(unknown)", *(number(d[c]) for c in ("prompts", "visited", "rollouts")), share(d["pass_rate"]))
            + tuple("-" if found["single"] and c != "retired" else number(d[c]) for c in ("easy", "hard", "retired"))
            for name, d in sources[:30]
        ]
        heads = ("prompts", "visited", "rollouts", "pass rate", "now all right", "now all wrong", "retired")
        columns = [("data source", "left"), *((h, "right") for h in heads)]
        title = f"by data source{'' if len(sources) <= 30 else f' (30 of {len(sources)})'}"
        out.print()
        out.print(table(columns, rows, title, cut="data source", width=out.width))


def _print_lists(shown: dict[str, list[dict[str, Any]]], found: str = "") -> None:
    """Lists of prompts; ``found`` is how many there are of the one that was asked for, which is then named if empty, too."""
    out = console()
    for title, records in shown.items():
        if not records:
            if found:
                out.print(Text(f"{title}{found}"))
            continue
        digits = key_digits(out)
        names = [name for name in records[0] if name != "text"]
        columns = [(n.replace("_", " "), "left" if n in ("key", "source") else "right") for n in names]
        cells = [[r[n][:digits] if n == "key" else cell(r[n], n, 60) for n in names] for r in records]
        out.print(table(columns, cells, f"{title}{found}", cut="source", width=out.width))
        if "text" in records[0]:  # on lines of their own: beside eight columns there is no room for words
            for r in records:
                text = "(not in the data set)" if r["text"] is None else clean(r["text"], 4 * out.width)
                line = Text(f"{r['key'][:digits]}  ", style="bold") + Text(text)
                line.truncate(2 * out.width - 8, overflow="ellipsis")
                out.print(line)
            out.print()


def _overview_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("store", f"{found['store']} ({found['kind']})")]
    if found["run"]:
        attempts = f", {found['attempts']} attempts" if found.get("attempts", 1) > 1 else ""
        about = f"{found.get('preset', '?')}, verl-adaptive {found.get('package', '?')}{attempts}"
        lines.append(("run", f"{found['run']} ({about})" if "package" in found else found["run"]))
    if found.get("steps"):
        lines.append(("steps", f"{number(found['steps'])}: {found['first_step']} to {found['last_step']}"))
    elif found.get("step") is not None:
        lines.append(("step", f"{found['step']} ({found.get('policy', '?')})"))
    lines += [("missing", f"{step_range(first, last)}: {reason}") for first, last, reason in found.get("gaps") or []]
    prompts = f"{number(found['prompts'])}, {number(found['visited'])} visited"
    share_of = share(found["visited"], found["prompts"])
    rate = "" if found["pass_rate"] is None else f", pass rate {found['pass_rate']:.3f}"
    tokens = "" if found["tokens"] is None else f", {number(found['tokens'])} response tokens"
    failed = "" if found["failed_groups"] is None else f", {number(found['failed_groups'])} failed groups"
    lines += [
        ("prompts", f"{prompts} ({share_of}), {number(found['visits'])} visits{failed}"),
        ("rollouts", f"{number(found['rollouts'])} judged{tokens}{rate}"),
    ]
    if found.get("brought"):
        brought = (
            f"{counted(found['brought'], 'prompt')} with its evidence alone, which counts in these figures as visits"
        )
        lines.append(("warm start", brought))
    if found.get("ledger"):
        lines.append(("generated", _account(found["ledger"].rollouts)))
    rare = " (false discovery rate 5 %)"
    lines += [
        ("never solved", f"{number(found['never_solved'])} in {found['tries']} rollouts or more"),
        ("always solved", f"{number(found['always_solved'])} in {found['tries']} rollouts or more"),
        ("regressed", f"{number(found['regressed'])} fell by 0.5 or more since their first visit{rare}"),
    ]
    if found["flip_flopping"] is not None:
        lines.append(("flip-flopping", f"{number(found['flip_flopping'])} crossed one half at least twice{rare}"))
    if found["retired"] is not None:
        at = f" (snapshot of step {found['retired_at_step']})" if found["retired_at_step"] is not None else ""
        lines.append(("retired", number(found["retired"]) + at))
    return [*lines, *(("alarm", alarm) for alarm in found.get("alarms", ()))]


def _account(account: Account) -> str:
    whole, trained = account.generated, account.trained
    dropped = ", ".join(f"{number(amount)} {reason}" for reason, amount in account.dropped.items())
    parts = [f"{counted(whole, 'rollout')}: {number(trained)} trained ({share(trained, whole)})"]
    parts.append(f"dropped {dropped or 'none'}")
    if account.held:
        parts.append(f"{number(account.held)} held")
    return ", ".join(parts)


def _print_histogram(out: Any, facts: dict[str, Any]) -> None:
    counts = facts["histogram"]["prompts"]
    if not sum(counts):
        return
    block = "█" if (out.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32") else "#"
    out.print(Text("\npass rate      prompts", style="bold"))
    widest = max(counts)
    for name, prompts in zip(facts["histogram"]["bins"], counts, strict=True):
        bar = block * max(round(40 * prompts / widest), 1 if prompts else 0)
        label = {"0": "0 (none)", "1": "1 (all)"}.get(name, name)
        out.print(Text(f"{label:<10}{number(prompts):>12} ") + Text(bar, style="cyan"))
