"""What these tests share: verl's configuration, and the rows of the queue."""

from __future__ import annotations

import copy
import functools

import transfer_queue as tq
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig


@functools.cache
def _of_files(choices: tuple[str, ...]) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(choices))


def composed(*words: str) -> DictConfig:
    """verl's configuration with these overrides, several in a string or one.

    Hydra reads and merges thirty files, once for each choice of files; what is set beside it sets here as it does.
    """
    words = " ".join(words).split()
    choices = tuple(word for word in words if "." not in word.partition("=")[0])
    config = copy.deepcopy(_of_files(choices))
    values = OverridesParser.create().parse_overrides([word for word in words if word not in choices])
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


def listed() -> dict[str, dict]:
    """The tags of the queue's rows."""
    return (tq.kv_list("train") or {}).get("train", {})


def left() -> set[str]:
    return set(listed())


def empty() -> None:
    if keys := list(left()):
        tq.kv_clear(keys=keys, partition_id="train")
