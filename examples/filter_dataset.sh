#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. Train on the prompts that an earlier run found worth it.
#
# FROM is the earlier run (checkpoints, journal or export), WHERE the condition on a prompt's statistics. Prompts that the
# run never saw are kept.
#
#   bash examples/filter_dataset.sh [further overrides]
#
# The rest is examples/qwen2.5_math_1.5b_greso.sh with its variables; DRY_RUN=1 prints the commands.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data=${DATA:-data/math}
kept=${KEPT:-data/math_kept}
from=${FROM:-checkpoints/verl_adaptive/qwen2.5_math_1.5b_greso}
where=${WHERE:-0.05 <= pass_rate <= 0.95}

filter=(
    verl-adaptive export "$from" "$kept/train.parquet"
    --data "$data/train.parquet" --where "$where" --keep-unseen --overwrite
)

if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${filter[@]}" >&2
    echo >&2
else
    mkdir -p "$kept"
    cp "$data/val.parquet" "$kept/val.parquet"
    "${filter[@]}"
fi
DATA=$kept OUT=${OUT:-checkpoints/verl_adaptive/greso_kept} exec bash "$here/qwen2.5_math_1.5b_greso.sh" \
    trainer.experiment_name=greso_kept "$@"
