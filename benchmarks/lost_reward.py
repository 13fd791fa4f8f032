"""The reward of :mod:`benchmarks.lost_answers`, for verl: what stands before the dots, judged as in ``examples/cpu``."""

from __future__ import annotations

from typing import Any

from examples.cpu.reward import compute_score as judged


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response; its dots are no part of the answer."""
    return judged(data_source, solution_str.rstrip("."), ground_truth, extra_info, **kwargs)
