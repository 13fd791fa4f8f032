"""The reward: reasoning-gym's own verifiers, called by verl (``reward.custom_reward_function.path``)."""

from __future__ import annotations

import functools
import json
from typing import Any

# At the top: verl calls compute_score from several threads, and a thread that imports the submodule while another is
# still importing the package would find a factory without data sets.
from reasoning_gym.factory import create_dataset


@functools.cache
def _verifier(dataset: str) -> Any:
    """One data set object per task and process; only its ``score_answer`` is used."""
    return create_dataset(dataset, seed=0, size=1)


@functools.lru_cache(maxsize=8192)
def _entry(text: str) -> dict[str, Any]:
    return json.loads(text)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response.

    Some verifiers give partial marks for a good guess. Only full marks count here: a group of wrong answers is then a
    group without a learning signal, as with the usual rewards for mathematics.

    Args:
        data_source: The task's name.
        solution_str: The decoded response.
        ground_truth: The canonical answer; the verifier may accept other spellings of it.
        extra_info: The row's ``extra_info``, with the task's data set and the entry as JSON text.
        **kwargs: Whatever else verl passes.

    Returns:
        ``score``, the reward, and ``acc``, the same number under the name that verl's validation reports.
    """
    if extra_info is None:
        raise ValueError("extra_info is missing; were the data made by examples/cpu/make_data.py?")
    marks = _verifier(extra_info["dataset"]).score_answer(
        answer=solution_str.strip(), entry=_entry(extra_info["entry"])
    )
    # No tolerance: a near miss of spell_backward sums up to 0.9999999999999999.
    correct = float(marks >= 1.0)
    return {"score": correct, "acc": correct}
