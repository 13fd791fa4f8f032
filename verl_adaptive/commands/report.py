"""Write one HTML file about a run. It opens without a server or network, and contains no script.

examples:
  verl-adaptive report checkpoints/project/experiment -o report.html
  verl-adaptive report runs.sqlite#project/experiment -o report.html --data train.parquet --tries 64 --limit 50

Prompt texts are left out unless --data names the training set; it also finds questions with different answers.
"""

from __future__ import annotations

import argparse
import os

from verl_adaptive.commands.arguments import add_store_options, count, refuse_overwrite
from verl_adaptive.errors import AdaptiveError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="RUN", help="a store, as for `stats`; a journal has the most to show")
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        default="report.html",
        help="what to write, replaced if it exists (default report.html)",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="the training set: adds the texts of listed prompts, and questions with different answers: --data train.parquet",
    )
    parser.add_argument(
        "--title", metavar="TEXT", help="the heading: --title 'GRESO, seed 1' (default: the run's name)"
    )
    parser.add_argument(
        "--tries",
        metavar="N",
        type=count,
        default=16,
        help="rollouts from which a prompt without a success counts as never solved: --tries 64 (default 16)",
    )
    parser.add_argument("--limit", metavar="N", type=count, default=20, help="prompts in each list (default 20)")
    add_store_options(parser)


def run(args: argparse.Namespace) -> int:
    from verl_adaptive.commands.output import note
    from verl_adaptive.report.collect import collect
    from verl_adaptive.report.opening import open_prompts

    try:
        from verl_adaptive.report.page import render
    except ModuleNotFoundError as error:
        raise AdaptiveError(
            f"the report needs {error.name}, which is not installed: pip install 'verl-adaptive[report]'"
        ) from None
    refuse_overwrite(args.out, True)
    opened = open_prompts(args.store, run=args.run, tolerance=args.tolerance, id_key=args.id_key)
    collected = collect(
        opened,
        tries=args.tries,
        limit=args.limit,
        data=args.data,
        prompt_key=args.prompt_key,
        id_key=args.id_key,
        media_keys=dict(args.media_key),
    )
    page = render(collected, title=args.title)
    part = f"{args.out}.part"
    with open(part, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(page)
    os.replace(part, args.out)
    note(f"{args.out} written ({os.path.getsize(args.out) / 1024:.0f} KiB)")
    return 0
