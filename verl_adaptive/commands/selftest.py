"""Find out in minutes whether training works here: a tiny model, through the real pipeline, in this environment.

Makes data and a model of 0.12 million parameters (nothing is downloaded), runs every preset three steps, kills a run with
SIGKILL and resumes it, and checks: every rollout and token is accounted for, as many optimizer updates as plain GRPO's,
the metrics are there, the recorded decisions are made again, and leaving rows of zero advantage out changes no gradient.
Uses one GPU where there is one, and the CPU platform (VERL_PLATFORM=cpu) where there is none. The status is 1 if something
is wrong.

examples:
  verl-adaptive selftest
  verl-adaptive selftest --quick
  verl-adaptive selftest --presets greso solo --keep selftest-runs
  verl-adaptive selftest --json > selftest.json
  verl-adaptive selftest -- actor_rollout_ref.rollout.name=sglang
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from verl_adaptive.commands.arguments import add_json_option, count
from verl_adaptive.errors import AdaptiveError, UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one preset and no kill, two minutes on a CPU: verl-adaptive selftest --quick",
    )
    parser.add_argument(
        "--presets", nargs="+", metavar="NAME", help="these presets only: --presets greso solo (default: all)"
    )
    parser.add_argument("--no-kill", action="store_true", help="no run that is killed and resumed (default: one)")
    parser.add_argument(
        "--alone", action="store_true", help="a start-up of verl for each run, instead of one for all (default: one)"
    )
    parser.add_argument(
        "--keep", metavar="FOLDER", help="keep data, checkpoints and logs: --keep selftest-runs (default: on failure)"
    )
    parser.add_argument(
        "--timeout", metavar="S", type=count, default=1200, help="seconds for a start-up and its runs (default 1200)"
    )
    add_json_option(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="-- OVERRIDE", help="verl's, after ours: -- trainer.n_gpus_per_node=2"
    )


def run(args: argparse.Namespace) -> int:
    from verl_adaptive.integration.selftest import suite

    if args.quick and args.presets:
        raise UsageError("--quick and --presets: --quick is one preset, leave one of them out")
    presets = ("greso",) if args.quick else tuple(args.presets or suite.PRESETS)
    unknown = [name for name in presets if name not in suite.PRESETS]
    if unknown:
        raise UsageError(f"--presets {unknown[0]}: must be among {', '.join(suite.PRESETS)}")
    if args.keep and Path(args.keep).exists():
        raise AdaptiveError(f"{args.keep} exists; name another folder, runs would go on in it")
    folder = Path(args.keep or tempfile.mkdtemp(prefix="verl-adaptive-selftest-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = suite.examine(
        folder,
        presets=presets,
        kill=not (args.quick or args.no_kill),
        shared=not args.alone,
        overrides=args.overrides,
        timeout=args.timeout,
        say=lambda line: print(f"selftest: {line}", file=sys.stderr, flush=True),
    )
    print(json.dumps(report.as_json(), indent=1) if args.json else suite.page(report))
    if not report.passed:
        print(f"selftest: logs and checkpoints are in {folder}", file=sys.stderr)
    elif not args.keep:
        shutil.rmtree(folder)
    return 0 if report.passed else 1
