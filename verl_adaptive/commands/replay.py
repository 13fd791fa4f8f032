"""Make a recorded run's decisions again and compare: they depend on rewards and their order of arrival, and on nothing else.

examples:
  verl-adaptive replay checkpoints/project/experiment/record
  verl-adaptive replay checkpoints/project/experiment/record/attempt-1 --json

A run writes its record with adaptive.record=true. A record that was changed since is refused; an empty one shows nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from verl_adaptive.commands.arguments import add_json_option
from verl_adaptive.commands.output import print_json
from verl_adaptive.record import EVENTS, RecordError, attempts, replay
from verl_adaptive.text import clean


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="RECORD", help="a record's folder, or one attempt in it")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    root = Path(args.record)
    if not root.exists():
        raise RecordError(f"{root} does not exist; a run writes its record with adaptive.record=true")
    # an attempt that was killed as it began has no events yet
    chosen = [folder for folder in (root, *attempts(root)) if (folder / EVENTS).exists()]
    if not chosen:
        raise RecordError(f"{root} holds no attempt; name the folder that a run with adaptive.record=true wrote")
    reports = [replay(folder) for folder in chosen]
    if args.json:
        print_json(
            [
                {**asdict(r), "identical": r.identical, "empty": r.empty, "ledgers": [x.as_dict() for x in r.ledgers]}
                for r in reports
            ]
        )
    else:
        print("\n".join(clean(report) for report in reports))
    # An attempt that was killed before its first step shows nothing; the others still do.
    compared = [report for report in reports if not report.empty]
    return 0 if compared and all(report.identical for report in compared) else 1
