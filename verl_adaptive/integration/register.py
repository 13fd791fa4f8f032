"""Register our trainers with verl; runs once, in the driver."""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import version
from typing import Any

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration import compat, guard


def register_all() -> None:
    """Let verl's mode names lead to our trainers where the configuration has an ``adaptive`` group.

    A user keeps ``trainer.v1.trainer_mode`` as it is. In verl's registry each mode's entry becomes a class that makes
    verl's own trainer, untouched, or ours; ``adaptive_<mode>`` names ours outright. With a verl that lacks something we
    need, asking for a preset says so, and a run that does not use this package does not notice that it is installed.
    """
    from verl.trainer.ppo.v1 import trainer_base

    registry = trainer_base.TRAINER_REGISTRY
    ours: dict[str, Any] = {mode: _trainer(trainer_base.PPOTrainer, mode) for mode in compat.MODES}
    _refuse_others(trainer_base.PPOTrainer)
    for mode, adaptive in ours.items():
        trainer_base.register_trainer(f"adaptive_{mode}")(adaptive)
        if mode in registry:
            registry[mode] = _either(registry[mode], adaptive)


def _trainer(base: Any, mode: str) -> Any:
    """Our trainer of a mode, or one that says why it cannot be made with this verl."""
    try:
        compat.check_verl(mode=mode)
        return _class(mode)
    except (AdaptiveError, ImportError) as problem:
        message = (
            str(problem)
            if isinstance(problem, AdaptiveError)
            else f"verl {version('verl')} lacks something that compat.py does not list: {problem}; {compat.INSTALL}"
        )

    class Refused(base):
        def __init__(self, config: object) -> None:
            raise AdaptiveError(message)

        on_step_end = on_sample_end = lambda self: None

    return Refused


def _class(mode: str) -> Any:
    """``AdaptiveSync``, ``AdaptiveColocateAsync`` or ``AdaptiveSeparateAsync``, with no more of verl's modules than it needs."""
    from verl_adaptive.integration.trainer import AdaptiveMixin, AdaptiveSync

    if mode == "sync":
        return AdaptiveSync
    name = "".join(word.title() for word in mode.split("_"))
    verls = getattr(importlib.import_module(f"verl.trainer.ppo.v1.trainer_{mode}"), f"PPOTrainer{name}")
    about = {"base_mode": mode, "__module__": __name__, "__doc__": f"verl's ``{mode}`` trainer, adaptive."}
    return type(f"Adaptive{name}", (AdaptiveMixin, verls), about)


def _refuse_others(base: Any) -> None:
    """A V1 trainer of somebody else's does not read the preset either."""
    real = base.__init__

    @functools.wraps(real)
    def guarded(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(self, "is_adaptive", False):
            guard.refuse_other(
                config, f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: {type(self).__name__}"
            )
        real(self, config, *args, **kwargs)

    base.__init__ = guarded


def _either(verls: Any, adaptive: Any) -> Any:
    """A class that makes verl's trainer, or ours if the configuration asks for a preset."""

    class Either(verls):
        def __new__(cls, config: Any) -> Any:
            if cls is not Either:  # somebody's trainer that derives from the registered one
                return object.__new__(cls)
            # Not instances of Either: Python then leaves them as they are.
            return (verls if config.get("adaptive") is None else adaptive)(config)

    Either.__name__, Either.__qualname__, Either.__module__ = verls.__name__, verls.__qualname__, verls.__module__
    Either.__doc__ = verls.__doc__
    return Either
