#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. GRESO in verl's asynchronous trainers, 7B.
#
# MODE=separate_async (default): ROLLOUT_GPUS devices a node generate while GPUS others train; new weights go over after
# every 4 minibatches. MODE=colocate_async: the same devices take turns, with prompts generated ahead; ROLLOUT_GPUS is not
# used. Not a published setting: GRESO's (arXiv 2506.02177) data, batch and lengths. Rollouts may be some updates old, so
# verl's truncated importance sampling is on; older than 8 versions are dropped.
#
#   python examples/prepare_math.py --set dapo+math --out data/math
#   bash examples/qwen2.5_math_7b_async.sh [further overrides]
#
# MODE, MODEL, DATA, OUT, GPUS, ROLLOUT_GPUS and NODES are environment variables; DRY_RUN=1 prints the command.
# `verl-adaptive doctor -- $(DRY_RUN=1 bash examples/qwen2.5_math_7b_async.sh)` checks it and shows the budget.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data=${DATA:-data/math}
out=${OUT:-checkpoints/verl_adaptive/qwen2.5_math_7b_async}

mode=${MODE:-separate_async}

case $mode in
separate_async)
    trainer=(
        trainer.v1.separate_async.parameter_sync_step=4 # times ppo_mini_batch_size is train_batch_size
        trainer.v1.separate_async.num_warmup_batches=1
        actor_rollout_ref.rollout.nnodes="${NODES:-1}"
        actor_rollout_ref.rollout.n_gpus_per_node="${ROLLOUT_GPUS:-4}"
        actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
    )
    ;;
colocate_async)
    trainer=(trainer.v1.colocate_async.num_warmup_batches=1)
    ;;
*)
    echo "qwen2.5_math_7b_async.sh: MODE=$mode; it is separate_async or colocate_async" >&2
    exit 2
    ;;
esac

command=(
    python -m verl.trainer.main_ppo

    # what this recipe is about
    +adaptive=greso
    trainer.v1.trainer_mode="$mode"
    "${trainer[@]}"
    trainer.v1.sampler.max_off_policy_threshold=8
    trainer.v1.sampler.max_off_policy_strategy=drop
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.0
    adaptive.sampler.p_easy=0.5
    adaptive.sampler.p_hard=0.5
    adaptive.sampler.target=0.25

    # algorithm
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=false
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.entropy_coeff=0

    # data and reward
    data.train_files="$data/train.parquet"
    data.val_files="$data/val.parquet"
    data.train_batch_size=256
    data.max_prompt_length=1536
    data.max_response_length=2560
    data.filter_overlong_prompts=true
    data.truncation=error
    reward.custom_reward_function.path="$here/reward_boxed.py"

    # model and training
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-Math-7B}"
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6

    # rollouts
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.n=4

    # the run
    trainer.n_gpus_per_node="${GPUS:-4}"
    trainer.nnodes="${NODES:-1}"
    trainer.total_epochs=2000
    trainer.total_training_steps=1001
    trainer.save_freq=50
    trainer.test_freq=50
    trainer.max_actor_ckpt_to_keep=2
    trainer.project_name=verl_adaptive
    trainer.experiment_name=qwen2.5_math_7b_async
    trainer.default_local_dir="$out"
    trainer.logger='[console,tensorboard]'
)

if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}" "$@"
else
    exec "${command[@]}" "$@"
fi
