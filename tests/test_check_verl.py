"""scripts/check_verl.py: finds what moved in a verl that it only reads."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "check_verl", module)  # dataclasses look their module up
        patch.setattr(ast, "parse", functools.cache(ast.parse))  # nearly all of a copy's files are the installed ones
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def recorded(check):
    return json.loads(check.RECORD.read_text())


@pytest.fixture
def copy(tmp_path):
    """A copy of the installed verl's sources."""
    shutil.copytree(SITE / "verl", tmp_path / "verl", ignore=lambda _, names: {n for n in names if n.endswith(".pyc")})
    return tmp_path


@pytest.fixture
def edited(check, recorded, copy):
    """What is found in the copy, in a file of which these words are others now."""

    def examine(words: dict[str, str], path: str = BASE):
        text = (copy / path).read_text()
        for old, new in words.items():
            assert text.count(old) >= 1, old
            text = text.replace(old, new, 1)
        (copy / path).write_text(text)
        return check.examine(check.Source(copy), recorded["names"])

    return examine


def test_the_installed_verl_is_as_recorded(check, recorded, capsys) -> None:
    assert check.main([str(SITE)]) == 0, capsys.readouterr().out
    assert verl.__version__ == recorded["verl"]


def test_the_record_is_complete(check, recorded) -> None:
    found = check.examine(check.Source(SITE), {})
    assert found.digests == recorded["names"], "python scripts/check_verl.py --record 0.9.1"


def test_a_method_that_is_gone(edited) -> None:
    out = edited({"def fit(self": "def fit_all(self"})
    assert out.status == 1
    assert {line.split()[0].rsplit(".", 1)[1] for line in out.missing} == {"fit"}


def test_a_parameter_that_was_renamed_and_one_that_is_new(edited) -> None:
    renamed = {"def _compute_values(self, batch": "def _compute_values(self, rows"}
    out = edited({**renamed, "def _save_checkpoint(self)": "def _save_checkpoint(self, where)"})
    assert out.status == 1 and not out.missing
    assert any("_compute_values does not take batch" in line for line in out.parameters)
    assert any("_save_checkpoint now demands where" in line for line in out.parameters)


def test_a_body_that_changed_and_a_comment_that_did(edited) -> None:
    fit = "def fit(self, agent_loop_manager: AgentLoopManager):"
    assert edited({fit: f"{fit}\n        # another comment\n"}).status == 0
    out = edited({fit: f"{fit}\n        self.other = 1"})
    assert out.status == 3 and not out.missing and not out.parameters
    assert {line.split()[0].rsplit(".", 1)[1] for line in out.changed} == {"fit"}


def test_nothing_of_verl_runs(edited, tmp_path) -> None:
    trap = tmp_path / "ran"
    edited({"import logging": f"import pathlib\npathlib.Path({str(trap)!r}).touch()\nimport logging"})
    assert not trap.exists()


@pytest.mark.parametrize("what", ["nowhere", "README.md"])
def test_what_is_no_verl(check, what, tmp_path, capsys) -> None:
    (tmp_path / "README.md").write_text("not a wheel")
    assert check.main([str(tmp_path / what)]) == 2
    assert capsys.readouterr().err.startswith("check_verl: ")


def test_what_one_trainer_mode_lacks_leaves_the_others(edited) -> None:
    words = {"class PPOTrainerSeparateAsync": "class Renamed"}
    out = edited(words, "verl/trainer/ppo/v1/trainer_separate_async.py")
    assert out.status == 1 and out.modes == ["sync", "colocate_async"]


def test_what_has_a_stand_in_is_no_fault(check, edited) -> None:
    out = edited({"def _add_async_warmup_batches(self": "def _warm_up(self"})
    assert not out.missing and out.modes == list(check.MODES)
    assert any("_add_async_warmup_batches is missing: what verl would send" in line for line in out.instead)


def test_dates_of_a_repository_with_and_without_a_work_tree(check, copy, tmp_path, capsys) -> None:
    git = ["git", "-C", str(copy), "-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "verl"], check=True)
    dated = {
        "GIT_COMMITTER_DATE": "2026-08-22T12:00:00",
        "GIT_AUTHOR_DATE": "2026-08-22T12:00:00",
        "PATH": os.environ["PATH"],
    }
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True, env=dated)
    subprocess.run([*git, "tag", "v1"], check=True)
    bare = tmp_path / "bare"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(copy), str(bare)], check=True)
    for place in (copy, bare, f"{bare}@v1"):
        assert check.main([str(place)]) == 0, capsys.readouterr().out
        said = capsys.readouterr().out.splitlines()[0]
        assert f"verl {verl.__version__} (2026-08-22, commit " in said and f"{verl.__version__} (built 20" in said
    assert check.main([f"{bare}@nothing"]) == 2
    assert "no commit nothing" in capsys.readouterr().err


def test_a_wheel_tells_when_it_was_built(check, copy, tmp_path, capsys) -> None:
    path = tmp_path / "verl-9.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in (copy / "verl").rglob("*.py"):
            name = str(file.relative_to(copy))
            wheel.writestr(zipfile.ZipInfo(name, (2026, 9, 20, 1, 2, 4)), file.read_bytes())
        wheel.writestr(zipfile.ZipInfo("verl-9.dist-info/METADATA", (2026, 9, 20, 1, 2, 4)), "Version: 9")
    assert check.main([str(path)]) == 0
    assert capsys.readouterr().out.startswith("verl 9 (built 2026-09-20), compared with")
