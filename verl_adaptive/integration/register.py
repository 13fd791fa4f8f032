"""Register our trainers and advantage estimators with verl; runs once, in the driver."""

from __future__ import annotations

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration import compat

__all__ = ["register_all"]


def register_all() -> None:
    """Register ``adaptive_<mode>`` beside verl's ``<mode>``.

    With a verl that lacks something we need, a trainer is registered that says so when it is asked for: a run that does
    not use this package must not notice that it is installed.
    """
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer

    try:
        compat.check_verl()
    except AdaptiveError as problem:
        message = str(problem)

        @register_trainer("adaptive_sync")
        class Refused(PPOTrainer):
            def __init__(self, config: object) -> None:
                raise AdaptiveError(message)

            on_step_end = on_sample_end = lambda self: None

        return
    from verl_adaptive.integration import advantage
    from verl_adaptive.integration.trainer import AdaptiveSync

    register_trainer("adaptive_sync")(AdaptiveSync)
    advantage.register()
