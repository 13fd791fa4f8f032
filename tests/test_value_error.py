"""The memory's values against exact pass rates, on a run recorded from the tiny model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
from benchmarks.torch_cells import Settings
from benchmarks.value_error import Visits, batch_mean_error, record, value_error

OURS = {"decay": 0.9, "strength": 4.0}


def test_values_come_before_the_rewards_and_get_better_with_them() -> None:
    rng = np.random.default_rng(0)
    exact = rng.beta(0.3, 0.3, 200)
    steps = []
    for _ in range(40):
        rows = rng.permutation(200)[:100]
        steps.append(Visits(rows, (rng.random(100) < exact[rows]).astype(float), np.ones(100), exact[rows]))
    error = value_error(["a"] * 200, steps, **OURS)
    assert error[0] == pytest.approx(((exact[steps[0].row] - 0.5) ** 2).mean())  # nothing was known
    assert error[-5:].mean() < 0.35 * batch_mean_error(steps)[-5:].mean()


def test_a_run_of_the_tiny_model(tmp_path) -> None:
    settings = Settings(batch=4, steps=4, pool=40, held_out=16, judged=16, warm_steps=2, hidden=32)
    sources, steps = record("solo", 3, settings, tmp_path)
    assert len(sources) == 40 and len(steps) == 4 and {len(s.row) for s in steps} == {32}
    assert all(((s.exact >= 0) & (s.exact <= 1)).all() for s in steps)
    assert np.isfinite(value_error(sources, steps, **OURS)).all()
