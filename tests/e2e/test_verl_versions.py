"""Releases of verl other than the installed one, end to end."""

from __future__ import annotations

import pytest

from tests.e2e.faults import MODES
from tests.e2e.harness import Run, balanced, optimizer_updates, replays, train
from tests.e2e.older import verl_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

SHORT = ("trainer.total_training_steps=2", "trainer.save_freq=2", "adaptive.record=true")


def run(version: str, folder, *overrides: str) -> Run:
    made = train(folder, *overrides, *SHORT, PYTHONPATH=str(verl_folder(version)))
    assert made.code == 0, made.tail
    assert f"verl {version}" in made.log
    assert len(made.steps) == 2
    balanced(made)
    replays(made, 2)
    assert optimizer_updates(made, 2) == 4
    assert all(g > 0 for g in made.series("actor/grad_norm"))
    return made


def test_sync_on_0_9_0(tmp_path):
    """The default trainer, with requests that are aborted and rows that are left out."""
    made = run("0.9.0", tmp_path, "+adaptive=full")
    assert "_rollout_server_managers" in made.log  # what that release lacks is said
    assert sum(made.series("adaptive/padding_rows_total")) >= 0


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
def test_asynchronous_on_0_9_0(mode, tmp_path):
    run("0.9.0", tmp_path, "+adaptive=greso", *MODES[mode])
