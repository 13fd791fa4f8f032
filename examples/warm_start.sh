#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. Start with what an earlier run learned of the prompts.
#
# FROM is an earlier run's checkpoints, its journal, an export, or an offline evaluation as Parquet or JSON lines
# (docs/store.md lists the columns). Its evidence counts half (adaptive.warm_start_discount).
#
#   python examples/prepare_math.py --set dapo+math --out data/math
#   bash examples/warm_start.sh [further overrides]
#
# Everything else is examples/qwen2.5_math_1.5b_greso.sh, with its variables (MODEL, DATA, OUT, GPUS, NODES);
# DRY_RUN=1 prints the whole command. `verl-adaptive doctor -- $(DRY_RUN=1 bash examples/warm_start.sh)`
# checks it and shows the budget.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OUT=${OUT:-checkpoints/verl_adaptive/greso_warm}

exec bash "$here/qwen2.5_math_1.5b_greso.sh" \
    adaptive.warm_start="${FROM:-checkpoints/verl_adaptive/qwen2.5_math_1.5b_greso}" \
    adaptive.warm_start_discount=0.5 \
    adaptive.sampler.warmup_epochs=0 \
    trainer.experiment_name=greso_warm \
    "$@"
