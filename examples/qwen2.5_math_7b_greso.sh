#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. GRESO, Qwen2.5-Math-7B.
#
# The paper's setting (arXiv 2506.02177) for the larger model: as the 1.5B's, with 8 GPUs.
#
#   python examples/prepare_math.py --set dapo+math --out data/math
#   bash examples/qwen2.5_math_7b_greso.sh [further overrides]
#
# Everything else is examples/qwen2.5_math_1.5b_greso.sh, with its variables (MODEL, DATA, OUT, GPUS, NODES);
# DRY_RUN=1 prints the whole command. `verl-adaptive doctor -- $(DRY_RUN=1 bash examples/qwen2.5_math_7b_greso.sh)`
# checks it and shows the budget.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export MODEL=${MODEL:-Qwen/Qwen2.5-Math-7B} GPUS=${GPUS:-8}
export OUT=${OUT:-checkpoints/verl_adaptive/qwen2.5_math_7b_greso}

exec bash "$here/qwen2.5_math_1.5b_greso.sh" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.experiment_name=qwen2.5_math_7b_greso \
    "$@"
