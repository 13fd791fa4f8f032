#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. Pilot-Commit, Qwen3-4B-Base.
#
# Settings of the authors' scripts (arXiv 2605.26606): Polaris-53K, 16 pilots and 48 commits, 384 pilots a round, band
# 0.125 to 0.75, solved prompts retired for good, rewards of +1 and -1, lr 1e-6 with 10 warm-up steps, clip 0.2/0.28, dual
# clip 10, 500 steps, 4 nodes. Where it differs: the number of optimizer updates equals GRPO's (theirs: 6 for its 4), and
# there is no overlong penalty.
#
#   python examples/prepare_math.py --set polaris --out data/polaris
#   bash examples/qwen3_4b_pilot_commit.sh [further overrides]
#
# MODEL, DATA, OUT, GPUS and NODES are environment variables; DRY_RUN=1 prints the command.
# `verl-adaptive doctor -- $(DRY_RUN=1 bash examples/qwen3_4b_pilot_commit.sh)` checks it and shows the budget.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data=${DATA:-data/polaris}
out=${OUT:-checkpoints/verl_adaptive/qwen3_4b_pilot_commit}

command=(
    python -m verl.trainer.main_ppo

    # what this recipe is about
    +adaptive=pilot_commit
    adaptive.signal=acc
    adaptive.allocator.n_pilot=16
    adaptive.allocator.lower=0.125
    adaptive.allocator.upper=0.25
    adaptive.allocator.factor=3.0
    adaptive.allocator.form=pipelined
    adaptive.sampler.after=1
    adaptive.sampler.threshold=1.0
    adaptive.sampler.recheck=0

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
    data.train_batch_size=128
    data.max_prompt_length=2048
    data.max_response_length=4096
    data.filter_overlong_prompts=true
    data.truncation=error
    reward.custom_reward_function.path="$here/reward_boxed.py"
    +reward.custom_reward_function.reward_kwargs.wrong=-1.0

    # model and training
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-4B-Base}"
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1

    # rollouts
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=64
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=1.0
    actor_rollout_ref.rollout.val_kwargs.n=32

    # the run
    trainer.n_gpus_per_node="${GPUS:-8}"
    trainer.nnodes="${NODES:-4}"
    trainer.total_epochs=2000
    trainer.total_training_steps=500
    trainer.save_freq=50
    trainer.test_freq=5
    trainer.max_actor_ckpt_to_keep=2
    trainer.project_name=verl_adaptive
    trainer.experiment_name=qwen3_4b_pilot_commit
    trainer.default_local_dir="$out"
    trainer.logger='[console,tensorboard]'
)

if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}" "$@"
else
    exec "${command[@]}" "$@"
fi
