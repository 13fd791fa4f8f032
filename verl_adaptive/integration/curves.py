"""verl's own curves over all rollouts of the batch's groups, as if no row had been left out of training.

verl computes its metrics over the rows that train. Leaving rows of zero advantage out would turn ``critic/score/mean``
into the mean of informative groups, and a run with the plugin could not be laid over one without. What verl defines
per row from rewards and lengths alone is computed again here, over every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class RowFigures:
    """Every row of the trained groups, those left out of training included; arrays of shape ``(rows,)``.

    Attributes:
        score: float64, the reward (each output of a session has the session's, in verl too, but for a colocated reward model's).
        prompt: int64, prompt tokens.
        response: int64, response tokens.
        left_out: rows that do not train.
    """

    score: np.ndarray
    prompt: np.ndarray
    response: np.ndarray
    left_out: int

    @classmethod
    def join(cls, parts: Sequence[RowFigures]) -> RowFigures:
        """The rows of a step's mini-steps together."""
        score, prompt, response = (
            np.concatenate([getattr(p, name) for p in parts]) for name in ("score", "prompt", "response")
        )
        return cls(score, prompt, response, sum(p.left_out for p in parts))


def curves(rows: RowFigures, *, rewards: bool = True) -> dict[str, float]:
    """verl's metrics that rewards and lengths decide, as ``compute_data_metrics`` of verl 0.9.1 defines them.

    A response of length 0 counts as aborted; ``clip_ratio`` is the share of rows as long as the longest one.

    Args:
        rows: at least one.
        rewards: with ``critic/rewards``; not where a KL penalty is part of the reward, which left-out rows never get.
    """
    out: dict[str, float] = {}
    whole = rows.response > 0
    scores = rows.score[whole]
    for name in ("score", "rewards") if rewards else ("score",):
        out |= _three(f"critic/{name}", scores)
    for name, length in (
        ("response_length", rows.response),
        ("response_length_non_aborted", rows.response[whole]),
        ("prompt_length", rows.prompt),
    ):
        longest = (rows.prompt if name == "prompt_length" else rows.response).max()
        out |= _three(name, length)
        out[f"{name}/clip_ratio"] = float((length == longest).mean()) if len(length) else np.nan
    out["response/aborted_ratio"] = float((~whole).mean())
    return out


def _three(name: str, values: np.ndarray) -> dict[str, float]:
    kinds = ("mean", "max", "min")
    return {f"{name}/{kind}": float(getattr(values, kind)()) if len(values) else np.nan for kind in kinds}
