#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. The protocol of benchmarks/pretrained.py, with Qwen2.5-Math-1.5B.
#
# One cell a call: a preset, a learning rate, a seed. Equal for all cells: model, data, settings, optimizer updates for
# each trained batch, and the budget in generated rollouts (what GRPO generates in STEPS steps). Accuracy is sampled: 16
# answers to each validation prompt.
#
#   python examples/prepare_math.py --set dapo+math --out data/math
#   for seed in 0 1 2; do for lr in 5e-7 1e-6 2e-6; do for preset in grpo dapo greso aero cero pilot_commit solo; do
#       PRESET=$preset LR=$lr SEED=$seed bash examples/benchmark_gpu.sh
#   done; done; done
#   OUT=checkpoints/dapo-384 PRESET=dapo bash examples/benchmark_gpu.sh adaptive.sampler.round.prompts=384
#
# Compare runs at the same adaptive/cumulative/rollouts_generated, and at the same sum of adaptive/updates_total; both are
# logged with every step. `verl-adaptive compare` puts two runs side by side.
#
# PRESET, LR, SEED, STEPS, N, MODEL, DATA, OUT, GPUS and NODES are environment variables; DRY_RUN=1 prints the command.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
preset=${PRESET:-grpo}
lr=${LR:-1e-6}
seed=${SEED:-0}
steps=${STEPS:-500}
n=${N:-8}
batch=256
data=${DATA:-data/math}
name=$preset-n$n-lr$lr-seed$seed
out=${OUT:-checkpoints/benchmark}/$name

# CERO plans its budget over verl's number of steps; the others end with the rollouts, after more steps or fewer.
most=$((4 * steps))
if [ "$preset" = cero ]; then most=$steps; fi

command=(
    python -m verl.trainer.main_ppo

    # what is compared
    +adaptive="$preset"
    adaptive.total_rollouts=$((steps * batch * n))
    adaptive.seed="$seed"
    data.seed=$((seed + 1))
    actor_rollout_ref.actor.optim.lr="$lr"
    actor_rollout_ref.rollout.n="$n"

    # algorithm
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=false
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.entropy_coeff=0

    # data and reward
    data.train_files="$data/train.parquet"
    data.val_files="$data/val.parquet"
    data.train_batch_size="$batch"
    data.max_prompt_length=1536
    data.max_response_length=2560
    data.filter_overlong_prompts=true
    data.truncation=error
    reward.custom_reward_function.path="$here/reward_boxed.py"

    # model and training
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-Math-1.5B}"
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384

    # rollouts
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.n=16

    # the run
    trainer.n_gpus_per_node="${GPUS:-4}"
    trainer.nnodes="${NODES:-1}"
    trainer.total_epochs=2000
    trainer.total_training_steps="$most"
    trainer.save_freq=50
    trainer.test_freq=25
    trainer.max_actor_ckpt_to_keep=1
    trainer.project_name=benchmark
    trainer.experiment_name="$name"
    trainer.default_local_dir="$out"
    trainer.logger='[console,tensorboard]'
)

if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}" "$@"
else
    exec "${command[@]}" "$@"
fi
