"""verl's own curves over every row of the batch's groups: what verl's function says when nothing is left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics

from verl_adaptive.integration.curves import RowFigures, curves

ROWS = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=30
)


def made(rows: list[tuple[float, int, int]], left_out: int) -> RowFigures:
    score, prompt, response = (np.array([row[i] for row in rows]) for i in range(3))
    return RowFigures(score, prompt, response, left_out)


def verls(rows: list[tuple[float, int, int]]) -> dict[str, float]:
    """What verl's trainer computes from rows that all train."""
    score, prompt, response = (torch.tensor([row[i] for row in rows]) for i in range(3))
    width = max(1, int(response.max()))
    mask = (torch.arange(width) < response[:, None]).long()
    scores = torch.zeros(len(rows), width)
    scores[torch.arange(len(rows)), (response - 1).clamp(min=0)] = score
    zero = torch.zeros(len(rows), width)
    batch = {
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "advantages": zero,
        "returns": zero,
        "response_mask": mask,
        "prompts": torch.zeros(len(rows), int(prompt.max())),
        "responses": torch.zeros(len(rows), int(response.max())),
        "prompt_length": prompt.float(),
        "response_length": response.float(),
    }
    return compute_data_metrics(DataProto.from_dict(tensors=batch), use_critic=False)


@settings(max_examples=60)
@given(rows=ROWS)
def test_the_same_as_verls(rows):
    mine, theirs = curves(made(rows, left_out=1)), verls(rows)
    for name, value in mine.items():
        assert value == pytest.approx(theirs[name], rel=1e-5, abs=1e-6, nan_ok=True), name
    # and all of verl's that rewards and lengths decide
    own = {n for n in theirs if n.startswith(("critic/score", "critic/rewards", "response", "prompt_length"))}
    assert own == set(mine)


def test_mini_steps_are_put_together():
    parts = [made([(1.0, 3, 4)], left_out=0), made([(0.0, 5, 8), (0.0, 5, 2)], left_out=2)]
    whole = RowFigures.join(parts)
    assert whole.left_out == 2 and curves(whole)["critic/score/mean"] == pytest.approx(1 / 3)
    assert curves(whole)["response_length/clip_ratio"] == pytest.approx(1 / 3)


def test_rewards_that_hold_a_penalty_are_left_to_verl():
    found = curves(made([(1.0, 3, 4)], left_out=0), rewards=False)
    assert "critic/score/mean" in found and not [name for name in found if name.startswith("critic/rewards")]
    assert np.isnan(curves(made([(1.0, 3, 0)], left_out=0))["critic/score/mean"])  # nothing but aborted rows
