"""Find out in minutes whether training works here: a tiny model, through the real pipeline, in this environment.

Makes data and a model of 0.12 million parameters (nothing is downloaded) and runs, each a few steps and in a process of its
own: plain verl without this package, `greso` killed with SIGKILL and resumed, and `solo` and `greso` in the asynchronous
trainers. Checks: every rollout and token is accounted for, as many optimizer updates as plain GRPO's, the metrics are there,
the recorded decisions are made again, the engine gets the trained weights, and leaving rows of zero advantage out changes no
gradient. Uses verl's default strategy and all GPUs that CUDA_VISIBLE_DEVICES leaves (four of six: a power of two), or the CPU
platform where there is none; about twelve minutes on one GPU, six on two cores without. The same command goes on where it was
interrupted, and does not repeat what has passed; the page is also in FOLDER/selftest.txt, with selftest.json beside it. The
status is 1 if something is wrong.

if only this fails:
  gradient                  train with adaptive.skip_zero_advantage=false
  plain verl                look at verl, its engine and the GPU: training does not work without this package either
  greso, SIGKILL, resume    take grpo or solo, which abort no requests; or resume does not work: the findings say which
  an asynchronous trainer   train with trainer.v1.trainer_mode=sync

examples:
  verl-adaptive selftest
  verl-adaptive selftest --presets cero aero --folder selftest-2
  verl-adaptive selftest --json
  verl-adaptive selftest -- actor_rollout_ref.rollout.name=sglang
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from verl_adaptive.commands.arguments import add_json_option, count
from verl_adaptive.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--presets",
        nargs="+",
        metavar="NAME",
        help="plain verl and three steps of each of these, or of `all`, in place of the other runs: --presets cero aero",
    )
    parser.add_argument(
        "--folder",
        metavar="FOLDER",
        default="verl-adaptive-selftest",
        help="for page, data, checkpoints and logs; goes on with what is there: --folder selftest-2 "
        "(default: verl-adaptive-selftest)",
    )
    parser.add_argument(
        "--timeout", metavar="S", type=count, default=1200, help="seconds for a run: --timeout 3600 (default 1200)"
    )
    add_json_option(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="-- OVERRIDE",
        help="verl's, after ours: -- actor_rollout_ref.actor.strategy=fsdp2",
    )


def run(args: argparse.Namespace) -> int:
    from verl_adaptive.integration.selftest import runs, suite

    presets = suite.PRESETS if args.presets == ["all"] else tuple(args.presets or ())
    unknown = [name for name in presets if name not in suite.PRESETS]
    if unknown:
        raise UsageError(f"--presets {unknown[0]}: must be all, or among {', '.join(suite.PRESETS)}")
    for word in args.overrides:
        if word.lstrip("+~").startswith("adaptive"):
            raise UsageError(f"-- {word}: overrides are plain verl's, too; choose presets with --presets")
        if word.lstrip("+~").partition("=")[0] in suite.OWN:
            raise UsageError(f"-- {word}: each run of the self-test has its own, and is judged by it; leave it out")
    folder = Path(args.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs.end_on_signals()
    report = suite.examine(
        folder,
        presets=presets,
        overrides=args.overrides,
        timeout=args.timeout,
        say=lambda line: print(f"selftest: {line}", file=sys.stderr, flush=True),
    )
    print(json.dumps(report.as_json(), indent=1) if args.json else suite.page(report))
    print(f"selftest: page, JSON, logs and checkpoints are in {args.folder}", file=sys.stderr)
    return 0 if report.passed else 1
