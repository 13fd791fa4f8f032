"""Reads the reward and the difficulty signal of trajectories from TransferQueue."""

from __future__ import annotations

import math

import numpy as np
import torch
import transfer_queue as tq

from verl_adaptive.config import SuccessConfig
from verl_adaptive.errors import ConfigError
from verl_adaptive.integration.waiting import PARTITION

__all__ = ["read_rewards", "success"]


def read_rewards(keys: list[str], signal: str) -> tuple[np.ndarray, np.ndarray]:
    """Reward and difficulty signal of each trajectory; NaN for a row that came back without one.

    Args:
        keys: the last row of each trajectory.
        signal: ``adaptive.signal``.

    Returns:
        Two float64 arrays of shape ``(len(keys),)``.

    Raises:
        ConfigError: the reward function gives no field of that name.
    """
    if not keys:
        return np.zeros(0), np.zeros(0)
    fields = ["rm_scores"] if signal == "reward" else ["rm_scores", "extra_fields"]
    data = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=fields)
    if not set(data.keys()).issuperset(fields):
        if len(keys) == 1:
            return np.full(1, math.nan), np.full(1, math.nan)
        # A row without a reward hides the field of all the others: halve until it is found.
        half = len(keys) // 2
        left, right = read_rewards(keys[:half], signal), read_rewards(keys[half:], signal)
        return np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]])
    reward = _sums(data["rm_scores"])
    if signal == "reward":
        return reward, reward
    return reward, np.array([_field(extra, signal) for extra in data["extra_fields"]], dtype=np.float64)


def success(signal: np.ndarray, config: SuccessConfig) -> np.ndarray:
    """float64: the signal as evidence of success in [0, 1]."""
    if config.mode == "threshold":
        return (signal >= config.threshold).astype(np.float64)
    return np.clip((signal - config.low) / (config.high - config.low), 0.0, 1.0)


def _sums(scores: torch.Tensor) -> np.ndarray:
    """Sum of each row; rows of unequal length are one tensor of all their values."""
    if scores.is_nested and scores.layout == torch.jagged:
        ends, values = scores.offsets().numpy(), scores.values().double().numpy()
        out, some = np.zeros(len(ends) - 1), ends[1:] > ends[:-1]
        out[some] = np.add.reduceat(values, ends[:-1][some])
        return out
    if scores.is_nested:
        return np.array([float(row.double().sum()) for row in scores.unbind()], dtype=np.float64)
    return scores.double().reshape(len(scores), -1).sum(1).numpy()


def _field(extra: object, name: str) -> float:
    extra = getattr(extra, "data", extra)
    info = extra.get("reward_extra_info", {}) if isinstance(extra, dict) else {}
    if name not in info:
        raise ConfigError(
            "adaptive.signal",
            name,
            f"the reward function gives no such field; it gives: {', '.join(sorted(info)) or 'a bare number'}. "
            "Choose one of them, or adaptive.signal=reward",
        )
    try:
        return float(info[name])
    except (TypeError, ValueError):
        return math.nan  # counted as a failed rollout
