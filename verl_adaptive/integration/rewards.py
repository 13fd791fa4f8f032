"""Reads the reward and the difficulty signal of trajectories from TransferQueue."""

from __future__ import annotations

import math

import numpy as np
import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from transfer_queue.metadata import BatchMeta

from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration.polling import PARTITION


def read(keys: list[str], fields: list[str], meta: BatchMeta | None = None) -> TensorDict:
    """Fields of these rows, of which there is at least one; a field that one of them lacks is missing.

    As ``tq.kv_batch_get``, which copies every row's tag and shapes in depth on the way, for half of its time.

    Args:
        keys: the rows.
        fields: their names.
        meta: where the rows are, if that is known.

    Raises:
        AdaptiveError: a row is not there.
    """
    client = tq.get_client()
    if meta is None:
        meta = client.kv_retrieve_meta(keys=keys, partition_id=PARTITION, create=False)
    if meta.size != len(keys):
        raise AdaptiveError(f"{len(keys) - meta.size} of {len(keys)} rows have left TransferQueue")
    schema = {name: meta.field_schema[name] for name in fields if name in meta.field_schema}
    meta = BatchMeta(
        meta.global_indexes,
        meta.partition_ids,
        schema,
        meta.production_status,
        _custom_backend_meta=meta._custom_backend_meta,
    )
    if not meta.is_ready:
        raise AdaptiveError(f"{', '.join(fields)} of {len(keys)} rows are not whole in TransferQueue")
    return client.get_data(meta)


def read_rewards(
    keys: list[str], signal: str, meta: BatchMeta | None = None, *, late: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Reward and difficulty signal of each trajectory; NaN for a row that came back without one.

    Args:
        keys: the last row of each trajectory.
        signal: ``adaptive.signal``.
        meta: where these rows are, if that is known.
        late: a colocated reward model has judged them, whose further results verl writes as fields of their own.

    Returns:
        Two float64 arrays of shape ``(len(keys),)``.

    Raises:
        ConfigError: the reward function gives no field of that name.
    """
    if not keys:
        return np.zeros(0), np.zeros(0)
    extra = signal if late else "extra_fields"
    fields = ["rm_scores"] if signal == "reward" else ["rm_scores", extra]
    data = read(keys, fields, meta)
    if late and signal not in ("reward", *data.keys()):
        raise _no_field(signal, [])
    if not set(data.keys()).issuperset(fields):
        if len(keys) == 1:
            return np.full(1, math.nan), np.full(1, math.nan)
        # A row without a reward hides the field of all the others: halve until it is found.
        half = len(keys) // 2
        left, right = read_rewards(keys[:half], signal, late=late), read_rewards(keys[half:], signal, late=late)
        return np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]])
    reward = sums(data["rm_scores"])
    if signal == "reward":
        return reward, reward
    found = [_number(value) if late else _field(value, signal) for value in data[extra]]
    return reward, np.array(found, dtype=np.float64)


def sums(scores: torch.Tensor) -> np.ndarray:
    """Sum of each row; rows of unequal length are one tensor of all their values."""
    if scores.is_nested and scores.layout == torch.jagged:
        values = scores.values()
        values = values.float() if values.dtype == torch.bfloat16 else values  # which numpy does not know
        ends, values = scores.offsets().numpy(), values.numpy()
        out, some = np.zeros(len(ends) - 1), ends[1:] > ends[:-1]
        out[some] = np.add.reduceat(values, ends[:-1][some], dtype=np.float64)
        return out
    if scores.is_nested:
        return np.array([float(row.double().sum()) for row in scores.unbind()], dtype=np.float64)
    return scores.double().reshape(len(scores), -1).sum(1).numpy()


def _field(extra: object, name: str) -> float:
    extra = getattr(extra, "data", extra)
    info = extra.get("reward_extra_info", {}) if isinstance(extra, dict) else {}
    if name not in info:
        raise _no_field(name, sorted(info))
    return _number(info[name])


def _number(value: object) -> float:
    try:
        return float(value.data if isinstance(value, NonTensorData) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of a tensor of several numbers, the last
        return math.nan  # counted as a failed rollout


def _no_field(name: str, given: list[str]) -> ConfigError:
    return ConfigError(
        "adaptive.signal",
        name,
        f"the reward function gives no such field; it gives: {', '.join(given) or 'a bare number'}. "
        "Choose one of them, or adaptive.signal=reward",
    )
