#!/usr/bin/env bash
# Two steps of plain verl, without this project's presets, on CPU: the quickest proof that an installation works
# (a minute and a half on two quiet cores). Any further arguments are verl's own overrides.
#
#   examples/cpu/smoke.sh [overrides]
#
# PYTHON chooses the interpreter (default: python), WORK the folder for data and model (default: outputs/smoke_cpu).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
work=${WORK:-outputs/smoke_cpu}
mkdir -p "$work"
work=$(cd "$work" && pwd)
export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 RAY_ADDRESS=local
unset PYTHONDONTWRITEBYTECODE

if [ ! -f "$work/model/config.json" ]; then
    "$python" "$here/make_data.py" --out "$work/data"
    "$python" "$here/make_model.py" --out "$work/untrained"
    "$python" "$here/warm_start.py" --model "$work/untrained" --data "$work/data" --out "$work/model" --steps 200
fi

cd "$work"
time "$python" -m verl.trainer.main_ppo +adaptive/platform=cpu \
    actor_rollout_ref.model.path="'$work/model'" \
    data.train_files="'$work/data/train.parquet'" data.val_files="'$work/data/val.parquet'" \
    data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=12 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.optim.lr=3e-4 algorithm.adv_estimator=grpo \
    reward.custom_reward_function.path="'$here/reward.py'" \
    trainer.logger='["console"]' trainer.total_training_steps=2 trainer.val_before_train=false \
    trainer.save_freq=-1 trainer.test_freq=-1 trainer.resume_mode=disable "$@"
