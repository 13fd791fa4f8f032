"""The reward of the tiny model: the answer, and nothing else (``reward.custom_reward_function.path``)."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    """``score``, 1 for the right answer, and the same as ``acc``."""
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}
