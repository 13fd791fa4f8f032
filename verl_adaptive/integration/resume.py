"""What a resumed run has in common with the one that wrote its checkpoint: the list, and the comparison.

The data set and the policy with its options are compared by fingerprints (:mod:`verl_adaptive.stats.snapshot`); here is
everything else on the command line that shapes a decision or the meaning of a number in the statistics. Whatever is not in
:data:`IRRELEVANT` or :data:`LOGGED` must be equal, so that an option that is added later is compared unless somebody says
otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from verl_adaptive.config import AdaptiveConfig, flat
from verl_adaptive.stats.snapshot import SnapshotError

__all__ = ["ALLOW", "IRRELEVANT", "LOGGED", "check_settings", "differences", "settings_of"]

_LOG = logging.getLogger(__name__)

#: The word in ``adaptive.resume.allow`` that accepts differences.
ALLOW = "settings"

#: Not compared, and why.
IRRELEVANT: dict[str, str] = {
    **dict.fromkeys(
        ("sampler", "allocator", "filter", "advantage"),
        "the policy's fingerprint has them",
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
    return {
        **flat(found, "adaptive."),
        **(run or {}),
        "data.train_batch_size": batch,
        "actor_rollout_ref.rollout.n": n,
    }


def differences(saved: object, now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What differs, in words: what must be equal, and what is only said.

    Args:
        saved: :func:`settings_of` of the run that wrote the checkpoint; what it did not know is not compared.
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
