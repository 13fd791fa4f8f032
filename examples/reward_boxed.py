"""Reward of the GPU recipes: 1 for the right answer in the last ``\\boxed{}``, by verl's own comparison of MATH answers.

verl chooses a scorer by the row's data source; the recipes mix sources and want one rule for all of them::

    reward.custom_reward_function.path=examples/reward_boxed.py
"""

from __future__ import annotations

from typing import Any

__all__ = ["compute_score"]

#: Looking for the last box does not need more of a response, and rambling ones are long.
_TAIL = 2000


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, wrong: float = 0.0, **_: Any
) -> dict[str, float]:
    """Score one response.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the answer.
        extra_info: not used.
        wrong: the reward of a wrong answer; -1 for rewards of ±1
            (``+reward.custom_reward_function.reward_kwargs.wrong=-1``).

    Returns:
        ``score``, the reward, and ``acc``, 0 or 1, which ``adaptive.signal=acc`` judges difficulty by.
    """
    from verl.utils.reward_score.math_reward import compute_score as boxed

    correct = float(boxed(solution_str[-_TAIL:], str(ground_truth)))
    return {"score": correct if correct else wrong, "acc": correct}
