"""What a resumed run has in common with the one that wrote its checkpoint: the list, and the comparison.

The data set and the policy with its options are compared by fingerprints (:mod:`verl_adaptive.stats.snapshot`); here is
everything else on the command line that shapes a decision or the meaning of a number in the statistics. Whatever is not in
:data:`IRRELEVANT` or :data:`LOGGED` must be equal, so that an option that is added later is compared unless somebody says
otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from verl_adaptive.config import AdaptiveConfig, flat
from verl_adaptive.errors import ConfigError
from verl_adaptive.policy import build_policy, find_part
from verl_adaptive.stats.snapshot import SnapshotError

__all__ = ["ALLOW", "IRRELEVANT", "LOGGED", "check_settings", "differences", "settings_of", "settled_otherwise"]

_LOG = logging.getLogger(__name__)

#: The word in ``adaptive.resume.allow`` that accepts differences.
ALLOW = "settings"

#: Not compared, and why.
IRRELEVANT: dict[str, str] = {
    **dict.fromkeys(
        ("sampler", "allocator", "filter", "advantage"),
        "the policy's fingerprint has them, but for options whose default has moved, which are compared",
    ),
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
    }
)


def settings_of(
    adaptive: AdaptiveConfig, *, batch: int, n: int, run: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What is compared, by its name on the command line; ready for JSON.

    Args:
        adaptive: the ``adaptive`` group.
        batch, n: ``data.train_batch_size`` and ``actor_rollout_ref.rollout.n``.
        run: other settings of verl's, by name.
    """
    found = {name: value for name, value in asdict(adaptive).items() if name not in IRRELEVANT}
    parts = {
        k: v for part in build_policy(adaptive) for k, v in _moved(part.config, part.role, adaptive.rounds).items()
    }
    return {
        **flat(found, "adaptive."),
        **parts,
        **(run or {}),
        "data.train_batch_size": batch,
        "actor_rollout_ref.rollout.n": n,
    }


def _moved(config: Any, name: str, rounds: bool) -> dict[str, Any]:
    """Options of a part whose default has moved: the policy's fingerprint takes the new default for the old one.

    In rounds the old one is what such a default means.
    """
    out: dict[str, Any] = {}
    for f in fields(config):
        key, value = f"{name}.{f.name}", getattr(config, f.name)
        if is_dataclass(value):
            out |= _moved(value, key, rounds)
        elif "was" in f.metadata:
            out[f"adaptive.{key}"] = f.metadata["was"] if rounds and value == f.default else value
    return out


def settled_otherwise(adaptive: AdaptiveConfig, digest: object, mode: str) -> str:
    """What to write where a snapshot's policy is this one but for an option that is left to the run (``form=auto``).

    That is so after a change of the trainer mode, and of snapshots of before the option had such a default.

    Args:
        adaptive: the ``adaptive`` group, settled.
        digest: the snapshot's fingerprint of its policy.
        mode: the trainer mode.

    Returns:
        The end of a sentence that begins with the snapshot; empty: something else differs.
    """
    for f in fields(find_part("allocator", adaptive.allocator["name"]).Config):
        for value in f.metadata.get("stands_for", ()):
            other = replace(adaptive, allocator={**adaptive.allocator, f.name: value})
            try:
                policy = build_policy(other)
            except ConfigError:  # a value that this run's other parts refuse
                continue
            if policy.digest() == digest:
                key = f"adaptive.allocator.{f.name}"
                as_before = f"{key}={value}"
                if policy.allocator.can_hold and mode != "sync":
                    as_before = "trainer.v1.trainer_mode=sync"
                return (
                    f"is of a run with {key}={value}, and this one has {key}={adaptive.allocator[f.name]}. To go on as it was: "
                    f"{as_before}. To change it within the run: adaptive.resume.allow=[policy]"
                )
    return ""


def differences(saved: object, now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What differs, in words: what must be equal, and what is only said.

    Args:
        saved: :func:`settings_of` of the run that wrote the checkpoint; 0.1.0 saved none, and what an older version did
            not know is not compared.
        now: :func:`settings_of` of this run.
    """
    if not isinstance(saved, Mapping):
        return [], []
    hard: list[str] = []
    soft: list[str] = []
    for key, value in now.items():
        if key in saved and saved[key] != value:
            (soft if key in LOGGED else hard).append(f"{key} was {saved[key]!r}, is {value!r}")
    return hard, soft


def check_settings(where: object, saved: object, now: Mapping[str, Any], allow: Collection[str]) -> None:
    """Compare, and log what is accepted.

    Args:
        where: the snapshot, for messages.
        saved, now: as in :func:`differences`.
        allow: ``adaptive.resume.allow``.

    Raises:
        SnapshotError: settings differ that must be equal; the message names each and the way out.
    """
    hard, soft = differences(saved, now)
    if hard and ALLOW not in allow:
        raise SnapshotError(
            f"{where} was written under other settings: {'; '.join(hard)}. Its statistics and its state mean something else "
            f"under these. Set them back, or go on with the new ones: adaptive.resume.allow=[{ALLOW}]"
        )
    for text in hard:
        _LOG.warning("%s: %s; accepted because of adaptive.resume.allow=[%s]", where, text, ALLOW)
    for text in soft:
        _LOG.info("%s: %s", where, text)
