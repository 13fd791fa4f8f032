"""Command lines: what stands for ``<your overrides>``, and what a command of ours understands."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from verl_adaptive.cli import _Parser
from verl_adaptive.stats.expressions import Expression

#: The least that verl accepts.
MINIMAL = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=64",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "trainer.n_gpus_per_node=2",
)


def told(text: str) -> list[tuple[str, str]]:
    """Command lines and what is said of each: below it and indented; ``#`` begins a remark."""
    out, command = [], ""
    for line in text.splitlines():
        if line.startswith(" "):
            out.append((command, line.strip()))
        elif line and not line.startswith("#"):
            command = line
    return out


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command, up to ``--``; a condition among them is one."""
    name, *words = words
    module = importlib.import_module(f"verl_adaptive.commands.{name.replace('-', '_')}")
    parser = _Parser(prog="x")
    module.configure(parser)
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    if getattr(args, "where", None):
        Expression(args.where)
    return args


def composed(words: Sequence[str]) -> tuple[Any, Any]:
    """The configuration of a training's command line, and its plan: it is valid. Skips where verl is not installed."""
    inspect = pytest.importorskip("verl_adaptive.integration.inspect")
    composing = pytest.importorskip("verl_adaptive.integration.composing")
    config = composing.compose(composing.Command.parse(words))
    return config, inspect.validate(config)
