"""scripts/check_verl.py: finds what moved in a verl that it only reads."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

verl = pytest.importorskip("verl")
REPO = Path(__file__).resolve().parents[1]
SITE = Path(verl.__file__).resolve().parents[1]
BASE = "verl/trainer/ppo/v1/trainer_base.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check_verl", REPO / "scripts" / "check_verl.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_verl"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_verl"]


@pytest.fixture
def recorded(check):
    return json.loads(check.RECORD.read_text())


@pytest.fixture
def copy(tmp_path):
    """A copy of the installed verl's sources, to be changed."""
    shutil.copytree(SITE / "verl", tmp_path / "verl", ignore=lambda _, names: {n for n in names if n.endswith(".pyc")})
    return tmp_path


def edit(root: Path, old: str, new: str, path: str = BASE) -> None:
    text = (root / path).read_text()
    assert text.count(old) >= 1, old
    (root / path).write_text(text.replace(old, new, 1))


def test_the_installed_verl_is_as_recorded(check, recorded, capsys) -> None:
    assert check.main([str(SITE)]) == 0, capsys.readouterr().out
    assert verl.__version__ == recorded["verl"]


def test_the_record_is_complete(check, recorded) -> None:
    found = check.examine(SITE, {})
    assert found.digests == recorded["names"], "python scripts/check_verl.py --record 0.9.1"


def test_a_method_that_is_gone(check, recorded, copy) -> None:
    edit(copy, "def fit(self", "def fit_all(self")
    out = check.examine(copy, recorded["names"])
    assert out.status == 1
    assert {line.split()[0].rsplit(".", 1)[1] for line in out.missing} == {"fit"}


def test_a_parameter_that_was_renamed_and_one_that_is_new(check, recorded, copy) -> None:
    edit(copy, "def _compute_values(self, batch", "def _compute_values(self, rows")
    edit(copy, "def _save_checkpoint(self)", "def _save_checkpoint(self, where)")
    out = check.examine(copy, recorded["names"])
    assert out.status == 1 and not out.missing
    assert any("_compute_values no longer takes batch" in line for line in out.parameters)
    assert any("_save_checkpoint now demands where" in line for line in out.parameters)


def test_a_body_that_changed_and_a_comment_that_did(check, recorded, copy) -> None:
    edit(
        copy,
        "def fit(self, agent_loop_manager: AgentLoopManager):",
        "def fit(self, agent_loop_manager: AgentLoopManager):\n        # another comment\n",
    )
    assert check.examine(copy, recorded["names"]).status == 0
    edit(
        copy,
        "def fit(self, agent_loop_manager: AgentLoopManager):",
        "def fit(self, agent_loop_manager: AgentLoopManager):\n        self.other = 1",
    )
    out = check.examine(copy, recorded["names"])
    assert out.status == 3 and not out.missing and not out.parameters
    assert {line.split()[0].rsplit(".", 1)[1] for line in out.changed} == {"fit"}


def test_nothing_of_verl_runs(check, recorded, copy, tmp_path) -> None:
    trap = tmp_path / "ran"
    edit(copy, "import logging", f"import pathlib\npathlib.Path({str(trap)!r}).touch()\nimport logging")
    check.examine(copy, recorded["names"])
    assert not trap.exists()


@pytest.mark.parametrize("what", ["nowhere", "README.md"])
def test_what_is_no_verl(check, what, tmp_path, capsys) -> None:
    (tmp_path / "README.md").write_text("not a wheel")
    assert check.main([str(tmp_path / what)]) == 2
    assert capsys.readouterr().err.startswith("check_verl: ")
