"""What a user should know of a run that nothing refuses; the banner and ``doctor`` say it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.integration.engines import model_of
from verl_adaptive.policy import Policy
from verl_adaptive.text import counted

#: The loss that applies ``algorithm.rollout_correction`` with ``bypass_mode=true``; verl does not choose it by itself.
BYPASS_LOSS = (
    "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode "
    "'+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}'"
)


def notes_of(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> Iterator[str]:
    """The notes of a run, by verl's configuration, the ``adaptive`` group and its policy."""
    actor, algorithm, allocator = config.actor_rollout_ref.actor, config.algorithm, policy.allocator
    if policy.sampler.plans_rollouts and not allocator.follows_plan:
        yield (
            f"adaptive/allocator={allocator.name} gives each prompt its own number of rollouts, not the one that "
            f"adaptive/sampler={policy.sampler.name} plans; adaptive/allocator=fixed follows the plan"
        )
    if allocator.can_hold:
        age, instead = allocator.option("max_age"), getattr(allocator, "on_policy", None)
        most = "" if age is None else f" ({counted(age, 'step')} at most: adaptive.allocator.max_age)"
        own = "" if instead is None else f"; adaptive.allocator.{'='.join(instead)} makes each group within its step"
        yield (
            f"off-policy by a step: held groups train with first rollouts of older weights{most}; algorithm.rollout_correction "
            f"corrects for that{own}"
        )
    distillation = config.get("distillation") or {}
    distills = distillation.get("enabled", False)
    losses = [
        *(["KL penalty"] if actor.use_kl_loss or algorithm.use_kl_in_reward else []),
        *(["entropy bonus"] if actor.entropy_coeff != 0 else []),
        *(["distillation"] if distills else []),
    ]
    if losses and policy.filter.reasons:
        one = len(losses) == 1
        yield (
            f"the {' and the '.join(losses)} act{'s' * one} on the groups that train only; dropped groups do not add to "
            f"{'it' if one else 'them'}"
        )
    yield image_note(config, model_kind(config))
    if distills and not distillation["distillation_loss"].use_task_rewards:
        yield (
            "distillation.distillation_loss.use_task_rewards=false: rewards and advantages train nothing; by its rewards the "
            "preset only chooses which prompts are rolled out, how often, and which groups train"
        )
    yield _rate(config, adaptive.total_rollouts)
    if policy.sampler.kind != "stream" and not config.data.get("shuffle", True):
        yield f"data.shuffle=false has no effect: adaptive/sampler={policy.sampler.name} picks from the whole data set"
    correction, loss = algorithm.get("rollout_correction") or {}, actor.policy_loss
    told = loss.get("loss_mode") == "bypass_mode" and loss.get("rollout_correction") is not None
    if correction.get("bypass_mode", False) and not told:  # verl's V1 trainers leave these to a loss that is not chosen
        usual = {"rollout_is": None, "rollout_rs": None, "loss_type": "ppo_clip"}
        given = {name: correction.get(name, default) for name, default in usual.items()}
        lost = [f"{name}={value}" for name, value in given.items() if value != usual[name]]
        if lost:
            yield (
                f"algorithm.rollout_correction.bypass_mode=true: {', '.join(lost)} ha{'s' if len(lost) == 1 else 've'} no effect: "
                f"verl's V1 trainers leave it to the loss; add {BYPASS_LOSS}"
            )
    if adaptive.name == "grpo" and algorithm.adv_estimator == "gae":
        yield "algorithm.adv_estimator=gae, verl's default: PPO with a critic; for GRPO write algorithm.adv_estimator=grpo"


def _rate(config: Any, budget: int | None) -> str:
    """That a budget ends the run before the learning rate has decayed; empty where there is none, or the rate is constant."""
    trainer, optim = config.trainer, config.actor_rollout_ref.actor.optim
    styles = {name: optim.get(name) for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style", "decay_type")}
    name = next((name for name, style in styles.items() if style not in (None, "constant")), None)
    steps, spent = (
        trainer.get("total_training_steps"),
        config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
    )
    if budget is None or name is None or optim.get("lr_decay_steps") or (steps is not None and steps * spent <= budget):
        return ""
    return (
        f"actor_rollout_ref.actor.optim.{name}={styles[name]} goes by verl's number of steps, and adaptive.total_rollouts may end the run long before: "
        "the learning rate would not have decayed; write trainer.total_training_steps=<about the steps of the budget>"
    )


def model_kind(config: Any) -> str:
    """What kind of model it is, as far as that is known before it is loaded: its own word, else the end of its path."""
    path = str(config.actor_rollout_ref.model.path).rstrip("/")
    return str((model_of(config) or {}).get("model_type") or path.rpartition("/")[2])


def image_note(config: Any, kind: str) -> str:
    """What vLLM makes of images that it loads no weights for; empty where that is no matter.

    Seen with vLLM 0.28's CPU build (docs/verl_versions.md): loading dummy weights overwrites what it normalizes pixels by,
    which is no weight, so the actor's never put it right. Nothing fails: the model answers about pictures it sees wrongly.
    ``kind`` is the class of the model's processor, or :func:`model_kind`.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or not str(rollout.load_format).startswith("dummy"):
        return ""
    if not re.sub(r"\W|_", "", kind.lower()).startswith(("qwen2vl", "qwen25vl")):
        return ""
    return (
        f"actor_rollout_ref.rollout.load_format={rollout.load_format} with Qwen2-VL or Qwen2.5-VL: rollouts may see every image wrongly, "
        "without an error; write actor_rollout_ref.rollout.load_format=safetensors (docs/verl_versions.md)"
    )
