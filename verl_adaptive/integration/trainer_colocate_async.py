"""Our ``colocate_async`` trainer, in a module of its own: the other modes run with a verl that lacks what it needs."""

from __future__ import annotations

from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from verl_adaptive.integration.trainer import AdaptiveMixin


class AdaptiveColocateAsync(AdaptiveMixin, PPOTrainerColocateAsync):
    """verl's ``colocate_async`` trainer, adaptive."""

    base_mode = "colocate_async"
