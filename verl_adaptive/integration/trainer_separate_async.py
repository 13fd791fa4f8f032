"""Our ``separate_async`` trainer, in a module of its own: the other modes run with a verl that lacks what it needs."""

from __future__ import annotations

from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from verl_adaptive.integration.trainer import AdaptiveMixin


class AdaptiveSeparateAsync(AdaptiveMixin, PPOTrainerSeparateAsync):
    """verl's ``separate_async`` trainer, adaptive."""

    base_mode = "separate_async"
