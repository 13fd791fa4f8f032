"""Reads the reward and the difficulty signal of trajectories from TransferQueue."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from transfer_queue.metadata import BatchMeta

from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration.polling import PARTITION


def read(keys: list[str], fields: list[str], meta: BatchMeta | None = None) -> TensorDict:
    """Fields of these rows, of which there is at least one; a field that one of them lacks is missing.

    As ``tq.kv_batch_get``, which copies every row's tag and shapes in depth on the way, for half of its time. ``meta`` says where
    the rows are, if that is known. AdaptiveError: a row is not there.
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
) -> tuple[np.ndarray, np.ndarray, set[str]]:
    """Reward and difficulty signal of each trajectory; NaN for a row that came back without one (a judge timed out, say).

    Args:
        keys: the last row of each trajectory.
        signal: ``adaptive.signal``.
        meta: where these rows are, if that is known.
        late: a colocated reward model has judged them, whose further results verl writes as fields of their own.

    Returns:
        Two float64 arrays of shape ``(len(keys),)``, and the names of what the reward function gave beside the reward, if
        one of them was asked for.

    Raises:
        ConfigError: the colocated reward model gives no such field.
    """
    if not keys:
        return np.zeros(0), np.zeros(0), set()
    extra = signal if late else "extra_fields"
    fields = ["rm_scores"] if signal == "reward" else ["rm_scores", extra]
    data = read(keys, fields, meta)
    if late and signal not in ("reward", *data.keys()):
        raise no_field(signal, ())
    if not set(data.keys()).issuperset(fields):
        if len(keys) == 1:
            return np.full(1, math.nan), np.full(1, math.nan), set()
        # A row without a reward hides the field of all the others: halve until it is found.
        half = len(keys) // 2
        left, right = (read_rewards(part, signal, late=late) for part in (keys[:half], keys[half:]))
        return np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]]), left[2] | right[2]
    reward = sums(data["rm_scores"])
    if signal == "reward":
        return reward, reward, set()
    if late:
        return reward, np.array([_number(value) for value in data[extra]], dtype=np.float64), {signal}
    infos = [info_of(value) for value in data[extra]]
    given = {name for info in infos for name in info}
    return reward, np.array([_number(info.get(signal)) for info in infos], dtype=np.float64), given


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


def info_of(extra: object) -> dict[str, object]:
    """What the reward function gave beside the reward, of a row's ``extra_fields``."""
    extra = getattr(extra, "data", extra)
    return (extra.get("reward_extra_info") if isinstance(extra, dict) else None) or {}


def _number(value: object) -> float:
    try:
        return float(value.data if isinstance(value, NonTensorData) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of a tensor of several numbers, the last
        return math.nan  # counted as a failed rollout


def no_field(name: str, given: Collection[str]) -> ConfigError:
    """No rollout has the field that ``adaptive.signal`` names; they have these."""
    return ConfigError(
        "adaptive.signal",
        name,
        f"the reward function gives no such field; it gives: {', '.join(sorted(given)) or 'a bare number'}. "
        "Choose one of them, or adaptive.signal=reward",
    )
