#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. CERO, DeepSeek-R1-Distill-Qwen-1.5B.
#
# Settings of arXiv 2610.09679, appendix G: half of DAPO-Math-17K, 64,000 units of 4 rollouts over 500 rounds, at most 132 a
# round and 2 a prompt, Beta(1, 1), clip 0.2/0.28, dual clip 10, mean over tokens, no KL, lr 1e-6, weight decay 0.
# Where it differs: advantages are not clipped to [-5, 5] and importance ratios are not capped at 2, and overlong prompts
# are left out rather than truncated.
#
#   python examples/prepare_math.py --set dapo --half --out data/dapo_half
#   bash examples/r1_distill_qwen_1.5b_cero.sh [further overrides]
#
# MODEL, DATA, OUT, GPUS and NODES are environment variables; DRY_RUN=1 prints the command.
# `verl-adaptive doctor -- $(DRY_RUN=1 bash examples/r1_distill_qwen_1.5b_cero.sh)` checks it and shows the budget.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data=${DATA:-data/dapo_half}
out=${OUT:-checkpoints/verl_adaptive/r1_distill_qwen_1.5b_cero}

command=(
    python -m verl.trainer.main_ppo

    # what this recipe is about
    +adaptive=cero
    adaptive.sampler.g=4
    adaptive.sampler.n_max=2
    adaptive.sampler.capacity=132
    adaptive.sampler.budget=64000
    adaptive.sampler.rounds=500
    adaptive.sampler.nu0=0.5

    # algorithm
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=false
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.loss_agg_mode=token-mean

    # data and reward
    data.train_files="$data/train.parquet"
    data.val_files="$data/val.parquet"
    data.train_batch_size=64
    data.max_prompt_length=2048
    data.max_response_length=2048
    data.filter_overlong_prompts=true
    data.truncation=error
    reward.custom_reward_function.path="$here/reward_boxed.py"

    # model and training
    actor_rollout_ref.model.path="${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}"
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.weight_decay=0.0

    # rollouts
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6
    actor_rollout_ref.rollout.val_kwargs.top_p=1.0
    actor_rollout_ref.rollout.val_kwargs.n=16

    # the run
    trainer.n_gpus_per_node="${GPUS:-2}"
    trainer.nnodes="${NODES:-1}"
    trainer.total_epochs=2000
    trainer.total_training_steps=500
    trainer.save_freq=50
    trainer.test_freq=50
    trainer.max_actor_ckpt_to_keep=2
    trainer.project_name=verl_adaptive
    trainer.experiment_name=r1_distill_qwen_1.5b_cero
    trainer.default_local_dir="$out"
    trainer.logger='[console,tensorboard]'
)

if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}" "$@"
else
    exec "${command[@]}" "$@"
fi
