"""The policies that are simulated: the shipped presets, composed by Hydra as on verl's command line."""

from __future__ import annotations

import copy
import functools
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import ConfigError, UsageError, nearest
from verl_adaptive.policy import KINDS, option_hint

#: References that no command line of verl can name: they see the true pass rates.
REFERENCES = ("oracle_best",)

#: What verl does by itself: no policy of this package (:mod:`verl_adaptive.simulate.verl_filter`).
PEERS = ("verl_filter_groups",)


def preset_names() -> list[str]:
    """Shipped presets."""
    folder = files("hydra_configs.verl_adaptive.adaptive")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def split_words(text: str) -> list[str]:
    """``"greso adaptive.sampler.p_easy=0.3"`` as the preset's name and its overrides.

    Raises:
        ConfigError: the text is empty, or its quotes do not match.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError("--preset", text, str(error)) from None
    if not words:
        raise ConfigError("--preset", text, f"must name a preset: {', '.join(preset_names())}")
    return [words[0].removeprefix("+adaptive="), *words[1:]]


def compose_preset(words: Sequence[str]) -> AdaptiveConfig:
    """The configuration that ``+adaptive=<word> <further words>`` means.

    Args:
        words: a preset's name, and overrides in Hydra's syntax, of which the last of a key wins.

    Raises:
        ConfigError: no such preset, with the nearest name.
        UsageError: Hydra cannot make sense of an override.
    """
    name, overrides = words[0], tuple(words[1:])
    for word in overrides if name in preset_names() else ():
        _refuse_foreign(word)
    return AdaptiveConfig.from_mapping(copy.deepcopy(_composed(name, overrides)[0]))


def foreign_estimator(words: Sequence[str]) -> str | None:
    """verl's own estimator that a preset trains with, arguments as :func:`compose_preset`; None: GRPO's, or a component's."""
    adaptive, estimator = _composed(words[0], tuple(words[1:]))
    return estimator if adaptive["advantage"]["name"] == AdaptiveConfig().advantage["name"] else None


@functools.cache
def _composed(name: str, overrides: tuple[str, ...]) -> tuple[Any, str | None]:
    """The ``adaptive`` group as plain values, and the estimator that stands beside it.

    Hydra takes a tenth of a second, and every seed of a preset asks.
    """
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    held = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("hydra_configs.verl_adaptive", version_base=None):
            made = compose(overrides=[f"+adaptive={name}", *overrides])
            return OmegaConf.to_container(made.adaptive, resolve=True), OmegaConf.select(
                made, "algorithm.adv_estimator"
            )
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if name in preset_names():
            words = " ".join([name, *overrides])
            said = str(error)
            if unknown := re.search(r"Could not override '(adaptive\.[\w.]+)'", said):
                chooses = ("adaptive/", *(f"adaptive.{role}.name=" for role in KINDS))
                chosen, _ = _composed(name, tuple(word for word in overrides if word.startswith(chooses)))
                said = f"{unknown[1]}: {option_hint(unknown[1], chosen)}"
            elif isinstance(error, MissingConfigException) and error.missing_cfg_file:
                group, _, value = error.missing_cfg_file.rpartition("/")
                said = f"{group}={value}: {nearest(value, error.options or ())}"
            raise UsageError(f"{words}: {said}; overrides of one preset go into its own quotes") from error
        hint = nearest(name, [*preset_names(), *REFERENCES, *PEERS])
        raise ConfigError("--preset", name, f"no such preset; {hint}") from None
    finally:
        GlobalHydra.instance().hydra = held


def _refuse_foreign(word: str) -> None:
    """Refuse settings of verl itself, and of a run: they have options of their own here, or no meaning."""
    ours = {
        "data.train_batch_size": "--batch",
        "actor_rollout_ref.rollout.n": "--n",
        "trainer.total_training_steps": "--steps",
        "adaptive.total_rollouts": "--budget",
        "adaptive.seed": "--seeds",
    }
    key, _, value = word.lstrip("+~").partition("=")
    if key in ours:
        raise ConfigError(key, value, f"write {ours[key]} {value}: its value would be used in place of this one")
    if key in ("adaptive.warm_start", "adaptive.warm_start_discount"):
        raise ConfigError(key, value, "a simulated run begins with nothing known of its prompts; leave it out")
    if key in ("adaptive.signal", "adaptive.min_sessions") or key.split(".")[:2] == ["adaptive", "success"]:
        raise ConfigError(
            key, value, "a simulated rollout succeeds or does not, and a group fails or is whole; leave it out"
        )
    if word in preset_names():
        raise UsageError(f"{word} is a preset: write --preset {word}; overrides at the end are adaptive.<key>=<value>")
    if not key.startswith("adaptive"):
        raise ConfigError(key, value, "a simulation takes overrides of adaptive.* only")
