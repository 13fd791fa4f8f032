"""Releases of verl other than the installed one, end to end."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.e2e.faults import MODES
from tests.e2e.harness import ProcessRun, balanced, environment, optimizer_updates, replays, train
from tests.e2e.older import release
from tests.e2e.starts import MIXED
from tests.programs import ran
from verl_adaptive.integration.compat import NAMES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

#: A folder with verl's sources, to try a version that no package index has: ``VERL_CHECKOUT=<folder> pytest -k checkout``.
CHECKOUT = os.environ.get("VERL_CHECKOUT", "")
SHORT = ("trainer.total_training_steps=2", "trainer.save_freq=2", "adaptive.record=true")


def run(version: str, folder, *overrides: str) -> ProcessRun:
    made = train(folder, *SHORT, *overrides, PYTHONPATH=CHECKOUT if version == CHECKOUT else release(version))
    assert made.code == 0, made.tail
    assert version == CHECKOUT or f"verl {version}" in made.log
    assert len(made.steps) == 2
    balanced(made)
    replays(made, 2)
    assert "trainer.save_freq=-1" in overrides or optimizer_updates(made, 2) == 4
    assert all(g > 0 for g in made.series("actor/grad_norm"))
    return made


def test_sync_on_0_9_0(tmp_path):
    """The default trainer, with requests that are aborted and rows that are left out."""
    made = run("0.9.0", tmp_path, *MIXED)
    assert "a server pauses instead of closing its gate" in made.log  # what that release lacks is said
    assert len(made.series("adaptive/padding_rows_total")) == 2


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
def test_asynchronous_on_0_9_0(mode, tmp_path):
    """Without checkpoints: the TransferQueue that this release pins cannot save groups under way."""
    run("0.9.0", tmp_path, "+adaptive=greso", *MODES[mode], *(() if mode == "sync" else ("trainer.save_freq=-1",)))


@pytest.mark.matrix
def test_resume_on_0_9_0(tmp_path):
    run("0.9.0", tmp_path, "+adaptive=greso")
    longer = ("+adaptive=greso", *SHORT, "trainer.total_training_steps=4")
    again = train(tmp_path, *longer, PYTHONPATH=release("0.9.0"))
    assert again.code == 0, again.tail
    assert [int(m["training/global_step"]) for m in again.steps] == [3, 4]
    replays(again, 4)


@pytest.mark.matrix
@pytest.mark.skipif(not CHECKOUT, reason="VERL_CHECKOUT names no checkout of verl")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", ["greso", "solo", "pilot_commit"])
def test_checkout(preset, mode, tmp_path):
    run(CHECKOUT, tmp_path, f"+adaptive={preset}", *MODES[mode])


def test_doctor_says_what_is_done_instead_on_0_9_0(tmp_path):
    """Every name that came with 0.9.1, and no other."""
    words = (sys.executable, "-m", "verl_adaptive", "doctor", "--json")
    done = ran(*words, cwd=tmp_path, timeout=600, env=environment(PYTHONPATH=release("0.9.0")))
    lines = [c["detail"] for c in json.loads(done.stdout)["checks"] if c["name"] == "done instead"]
    assert [line.split()[2] for line in lines] == [name.where for name in NAMES if name.instead]
    assert all(line.startswith("verl 0.9.0: ") for line in lines)


@pytest.mark.parametrize("version", ["0.7.1", "0.8.0"])
def test_what_came_before_plugins_is_refused(version, tmp_path):
    """Before Ray starts, by the callback that every preset brings along; without a preset verl goes its own way."""
    words = (sys.executable, "-m", "verl.trainer.main_ppo", "+adaptive=greso", "trainer.n_gpus_per_node=1")
    env = environment(PYTHONPATH=release(version))
    del env["VERL_PLATFORM"]  # which these do not know
    done = ran(*words, cwd=tmp_path, timeout=600, env=env)
    assert done.returncode == 1
    assert f"verl-adaptive: +adaptive=greso: verl {version} has neither plugins" in done.stderr
    assert "Started a local Ray instance" not in done.stdout + done.stderr
