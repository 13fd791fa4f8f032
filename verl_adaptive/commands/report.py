"""Write one HTML file about a run: what it learned, what to look at, where the budget went. It opens without a server.

examples:
  verl-adaptive report checkpoints/project/experiment -o report.html
  verl-adaptive report checkpoints/project/greso -o report.html --data train.parquet --against checkpoints/project/grpo
  verl-adaptive report checkpoints/project/greso -o report.html --against "checkpoints/project/*"
  verl-adaptive report rollouts -o report.html

Prompt texts are left out unless --data names the training set; it also finds questions with different answers. With it,
the answers of listed prompts come from verl's trainer.rollout_data_dir, if the run had one. As RUN such a folder, of any verl
run, has a report, too: prompts, lists, answers, and the course of what trained.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from verl_adaptive.commands.arguments import (
    add_store_options,
    add_tries_option,
    count,
    identity_from,
    refuse_overwrite,
)
from verl_adaptive.commands.output import note
from verl_adaptive.errors import AdaptiveError, UsageError
from verl_adaptive.report.collect import Collected, collect
from verl_adaptive.report.page import render
from verl_adaptive.stats import Run, open_run, open_runs
from verl_adaptive.stats.atomic import write_file


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store",
        metavar="RUN",
        help="a store, as for `stats`; a journal has the most to show",
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        default="report.html",
        help="what to write, an .html; a page of that name is replaced (default report.html)",
    )
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="another run, or a folder or pattern of several, drawn dashed beside: --against checkpoints/p/grpo",
    )
    add_page_options(parser)
    add_store_options(parser)


def add_page_options(parser: argparse.ArgumentParser) -> None:
    """What the page shows; `serve` takes the same."""
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="the training set: adds rows, texts and expected answers of listed prompts, and questions with different "
        "answers: --data train.parquet",
    )
    parser.add_argument(
        "--rollouts",
        metavar="DIR",
        help="verl's trainer.rollout_data_dir, for the answers of listed prompts; needs --data (default: the run's own)",
    )
    add_tries_option(parser)
    parser.add_argument("--limit", metavar="N", type=count, default=100, help="prompts in each list (default 100)")


def rollouts_of(given: str | None, data: str | None, about: dict[str, object]) -> str | None:
    """The folder of verl's rollouts: the one that was named, or the run's own if it is there.

    AdaptiveError: what was named is no folder, or there is no data set to find prompts by.
    """
    if given is None:
        own = about.get("rollouts")
        return own if data is not None and isinstance(own, str) and os.path.isdir(own) else None
    if data is None:
        raise UsageError(f"--rollouts {given} needs --data: rollouts are found by the prompts' texts and answers")
    if not os.path.isdir(given):
        raise AdaptiveError(f"--rollouts {given} is not a folder; name the run's trainer.rollout_data_dir")
    return given


def collected_of(args: argparse.Namespace, opened: Run, against: Sequence[Run] = ()) -> Collected:
    """What the page of a run is made of, by the options of :func:`add_page_options`."""
    return collect(
        opened,
        tries=args.tries,
        limit=args.limit,
        data=args.data,
        rollouts=rollouts_of(args.rollouts, args.data, opened.about),
        against=against,
    )


def run(args: argparse.Namespace) -> int:
    refuse_overwrite(args.out, True)
    if os.path.splitext(args.out)[1].lower() != ".html":
        raise UsageError(f"{args.out}: the file's ending must be .html")
    if os.path.exists(args.out) and not os.path.isfile(args.out):
        raise AdaptiveError(f"{args.out} is no file that a page could replace; name another one")
    opened = open_run(args.store, identity=identity_from(args))
    others = [] if args.against is None else open_runs(args.against, damaged=note)
    against = [run for run in others if len(others) == 1 or run.id != opened.id]
    collected = collected_of(args, opened, against)
    page = render(collected)
    write_file(Path(args.out), lambda file: file.write(page.encode("utf-8", "backslashreplace")))
    note(f"{args.out} written ({os.path.getsize(args.out) / 1024:.0f} KiB)")
    return 0
