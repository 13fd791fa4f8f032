"""Our advantage roles as verl estimators (``algorithm.adv_estimator``).

verl hands an estimator the rewards, the mask and each row's ``uid``; what it does not know is how many rollouts a group
was *observed* with, those left out of training included. The trainer lends that for the length of one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.roles import Advantage
from verl_adaptive.roles.answers import compute


@dataclass
class EstimatorContext:
    """What an estimator needs beyond verl's arguments.

    Attributes:
        role: the advantage role of the run.
        observed: the step's trained groups with all their rollouts.
        position: uid → position in ``observed``.
        keys: key of every row of the batch, in the batch's order.
    """

    role: Advantage
    observed: Groups
    position: Mapping[str, int]
    keys: list[str]


_CONTEXT: ContextVar[EstimatorContext] = ContextVar("verl_adaptive_context")


@contextmanager
def provide(context: EstimatorContext) -> Iterator[None]:
    """Make ``context`` visible to the estimators inside the ``with`` block."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def trajectory_rows(keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The row that holds each session's reward, and the session of every row.

    A session may have several outputs, rows ``{uid}_{session}_{i}``; the one with the largest ``i`` counts, as in
    verl's ``compute_advantage_for_multi_trajectories``.

    Returns:
        int64 ``(S,)`` last row of each session, in order of first appearance; int64 ``(rows,)`` session of each row.
    """
    last: dict[str, tuple[int, int]] = {}
    session_of_row = []
    for row, key in enumerate(keys):
        session, _, output = key.rpartition("_")
        session_of_row.append(session)
        if session not in last or int(output) > last[session][0]:
            last[session] = (int(output), row)
    number = {session: i for i, session in enumerate(last)}
    rows = np.fromiter((row for _, row in last.values()), dtype=np.int64, count=len(last))
    return rows, np.fromiter((number[s] for s in session_of_row), dtype=np.int64, count=len(keys))


def _estimate(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's estimator interface: ``(rows, response_length)`` in and out; padding rows get zeros."""
    context = _CONTEXT.get()
    rows, session_of_row = trajectory_rows(context.keys)
    uids = [str(index[row]) for row in rows]
    home = np.array([context.position.get(uid, -1) for uid in uids], dtype=np.int64)
    real = home >= 0
    lost = [uid for uid, row, known in zip(uids, rows, real, strict=True) if not known and response_mask[row].any()]
    if lost:
        raise AdaptiveError(
            f"{len(lost)} of {len(rows)} rollouts that train have a uid that the step's groups lack, the first {lost[0]!r}: "
            "something between generation and the advantage changed the column uid of the batch"
        )
    reward = token_level_rewards.sum(dim=-1).double().cpu().numpy()[rows]
    advantage = np.zeros(len(rows))
    advantage[real] = compute(context.role, reward[real], home[real], context.observed)
    spread = torch.as_tensor(advantage[session_of_row], dtype=torch.float32, device=response_mask.device)
    out = spread.unsqueeze(-1) * response_mask
    return out, out


def register_estimator(part: type[Advantage]) -> None:
    """Register the estimator that an advantage role names with verl; ConfigError: the name is taken."""
    from verl.trainer.ppo.core_algos import register_adv_est

    try:
        register_adv_est(part.estimator)(_estimate)
    except ValueError as error:
        hint = f"{part.__name__} has estimator = {part.estimator!r}, which verl has already; give it another name"
        raise ConfigError("adaptive.advantage.name", part.name, hint) from error
