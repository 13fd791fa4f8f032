"""Which settings a resumed run has in common with the one that wrote its checkpoint.

Everything on the command line that shapes a decision or the meaning of a number in the statistics is compared by its value.
Whatever is not in :data:`IRRELEVANT` or :data:`LOGGED` must be equal, so that an option that is added later is compared unless
somebody says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from verl_adaptive.config import AdaptiveConfig, flat
from verl_adaptive.integration.facts import mode_of
from verl_adaptive.policy import KINDS, Policy

#: Not compared, and why.
IRRELEVANT: dict[str, str] = {
    "name": "for people",
    "record": "writes down, decides nothing",
    "poll_interval": "when to look, not what to find",
    "stall_timeout": "when to give up",
    "longest_first": "in which order to send, not what",
    "alarms": "say, decide nothing",
    "log_lists": "shows, decides nothing",
    "store": "where the journal is",
    "resume": "what to accept",
    "warm_start": "counts before the first step only",
    "warm_start_discount": "counts before the first step only",
}

#: Differences that are said and accepted: limits, which people change in order to go on, what leaves gradients alone, and
#: what verl itself lets change.
LOGGED = frozenset(
    {
        "adaptive.max_rounds",
        "adaptive.max_rollouts_per_step",
        "adaptive.total_rollouts",
        "adaptive.on_exhausted",
        "adaptive.skip_zero_advantage",
        "trainer.v1.trainer_mode",
        "algorithm.adv_estimator",
        "data.shuffle",
    }
)


def settings_of(config: Any, adaptive: AdaptiveConfig, policy: Policy) -> dict[str, Any]:
    """What is compared, by its name on the command line; as JSON has it.

    Args:
        config: verl's configuration.
        adaptive: the ``adaptive`` group.
        policy: built from it; its parts know the defaults of the options that the group leaves out.
    """
    parts = {part.role: {"name": part.name, **asdict(part.config)} for part in policy}
    found = {name: value for name, value in (asdict(adaptive) | parts).items() if name not in IRRELEVANT}
    verls = {
        "trainer.v1.trainer_mode": mode_of(config),
        "data.train_batch_size": int(config.data.train_batch_size),
        "actor_rollout_ref.rollout.n": int(config.actor_rollout_ref.rollout.n),
        "data.shuffle": bool(config.data.get("shuffle", True)),
    }
    if policy.advantage.estimator is None:
        verls["algorithm.adv_estimator"] = str(config.algorithm.adv_estimator)
    return json.loads(json.dumps({**flat(found, "adaptive."), **verls}, default=str))


def is_policy(key: str) -> bool:
    """Whether a setting is the name or an option of a part."""
    return key.startswith(tuple(f"adaptive.{role}." for role in KINDS))


def differences(saved: object, now: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """What differs, in words: of the policy and of the other settings that must be equal, and what is only said.

    Args:
        saved: :func:`settings_of` of the run that wrote the checkpoint; what it did not know is not compared.
        now: :func:`settings_of` of this run.
    """
    if not isinstance(saved, Mapping):
        return [], [], []
    policy: list[str] = []
    hard: list[str] = []
    soft: list[str] = []
    for key, value in now.items():
        if key in saved and saved[key] != value:
            kind = policy if is_policy(key) else soft if key in LOGGED else hard
            kind.append(f"{key} was {saved[key]!r}, is {value!r}")
    return policy, hard, soft
