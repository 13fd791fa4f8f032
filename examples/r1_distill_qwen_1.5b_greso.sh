#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. GRESO, DeepSeek-R1-Distill-Qwen-1.5B.
#
# Settings of the paper (arXiv 2506.02177) for its long-response model: batch 128, rounds of 192 prompts, prompts of 2,048
# and responses of 6,144 tokens, 8 GPUs.
#
#   python examples/prepare_math.py --set dapo+math --out data/math
#   bash examples/r1_distill_qwen_1.5b_greso.sh [further overrides]
#
# MODEL, DATA, OUT, GPUS and NODES are environment variables; DRY_RUN=1 prints the command.
# `verl-adaptive doctor -- $(DRY_RUN=1 bash examples/r1_distill_qwen_1.5b_greso.sh)` checks it and shows the budget.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data=${DATA:-data/math}
out=${OUT:-checkpoints/verl_adaptive/r1_distill_qwen_1.5b_greso}

command=(
    python -m verl.trainer.main_ppo

    # what this recipe is about
    +adaptive=greso
    adaptive.sampler.p_easy=0.5
    adaptive.sampler.p_hard=0.5
    adaptive.sampler.target=0.25
    adaptive.sampler.round.prompts=192

    # algorithm
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=false
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.entropy_coeff=0

    # data and reward
    data.train_files="$data/train.parquet"
    data.val_files="$data/val.parquet"
    data.train_batch_size=128
    data.max_prompt_length=2048
    data.max_response_length=6144
    data.filter_overlong_prompts=true
    data.truncation=error
    reward.custom_reward_function.path="$here/reward_boxed.py"

    # model and training
    actor_rollout_ref.model.path="${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}"
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.actor.optim.lr=1e-6

    # rollouts
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.n=4

    # the run
    trainer.n_gpus_per_node="${GPUS:-8}"
    trainer.nnodes="${NODES:-1}"
    trainer.total_epochs=2000
    trainer.total_training_steps=1001
    trainer.save_freq=50
    trainer.test_freq=50
    trainer.max_actor_ckpt_to_keep=2
    trainer.project_name=verl_adaptive
    trainer.experiment_name=r1_distill_qwen_1.5b_greso
    trainer.default_local_dir="$out"
    trainer.logger='[console,tensorboard]'
)

if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}" "$@"
else
    exec "${command[@]}" "$@"
fi
