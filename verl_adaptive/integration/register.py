"""Lead verl's trainer modes to our trainers; runs once, in the driver."""

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
    verl's own trainer, untouched, or ours. A run that does not use this package does not notice that it is installed.
    """
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

    guard.refuse_others(PPOTrainer)  # somebody's own V1 trainer may have a replay buffer of its own
    for mode in compat.MODES:
        if mode in TRAINER_REGISTRY:
            TRAINER_REGISTRY[mode] = _either(TRAINER_REGISTRY[mode], mode)


@functools.cache
def trainer_class(mode: str) -> Any:
    """``AdaptiveSync``, ``AdaptiveColocateAsync`` or ``AdaptiveSeparateAsync``, with no more of verl's modules than it needs.

    Raises:
        AdaptiveError: the installed verl lacks something that it needs.
    """
    compat.check_verl(mode)
    try:
        from verl_adaptive.integration.trainer import AdaptiveMixin, AdaptiveSync

        verls = importlib.import_module(f"verl.trainer.ppo.v1.trainer_{mode}")
    except ImportError as problem:
        raise AdaptiveError(
            f"verl {version('verl')} lacks something that compat.py does not list: {problem}; {compat.INSTALL}"
        ) from problem
    if mode == "sync":
        return AdaptiveSync
    name = "".join(word.title() for word in mode.split("_"))
    about = {"__module__": __name__, "__doc__": f"verl's ``{mode}`` trainer, adaptive."}
    return type(f"Adaptive{name}", (AdaptiveMixin, getattr(verls, f"PPOTrainer{name}")), about)


def _either(verls: Any, mode: str) -> Any:
    """A class that makes verl's trainer, or ours if the configuration asks for a preset."""

    class Either(verls):
        adaptive = staticmethod(functools.partial(trainer_class, mode))

        def __new__(cls, config: Any) -> Any:
            if cls is not Either:  # somebody's trainer that derives from the registered one
                return object.__new__(cls)
            # Not instances of Either: Python then leaves them as they are.
            return (verls if config.get("adaptive") is None else trainer_class(mode))(config)

    Either.__name__, Either.__qualname__, Either.__module__ = verls.__name__, verls.__qualname__, verls.__module__
    return Either
