"""Data preparation of the GPU recipes, on rows like the hub's: verl reads what it writes, and so does the store."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.programs import ran
from verl_adaptive.stats.dataset import keys_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    """Import one of the example scripts, which are not a package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepare():
    return load("prepare_math")


def test_rows_are_verls_and_have_numbers_of_their_own(prepare, tmp_path) -> None:
    rows = [{"prompt": f"What is {i}+1?", "solution": i + 1} for i in (1, 2, 3)]
    made = list(prepare.convert("dapo", [*rows, rows[0]]))
    assert [row["extra_info"]["index"] for row in made] == [0, 1, 2]  # the repetition is left out
    assert made[1]["reward_model"] == {"style": "rule", "ground_truth": "3"}
    prepare.write(made, tmp_path / "train.parquet")
    assert pq.read_table(tmp_path / "train.parquet").num_rows == 3
    assert len(set(keys_of(str(tmp_path / "train.parquet"))[0].tolist())) == 3


def test_the_answer_of_math_is_in_its_solution(prepare) -> None:
    rows = [
        {"problem": "q", "solution": r"so \boxed{1} or rather \boxed{\frac{1}{2}}."},
        {"problem": "r", "solution": "?"},
    ]
    made = list(prepare.convert("math", rows))
    assert [row["reward_model"]["ground_truth"] for row in made] == [r"\frac{1}{2}"]


def test_a_set_that_has_changed_says_which_columns_it_has(prepare) -> None:
    with pytest.raises(KeyError, match="no column 'question'; it has problem"):
        list(prepare.convert("deepmath", [{"problem": "q"}]))


def test_an_unknown_set_is_one_line() -> None:
    done = ran(sys.executable, EXAMPLES / "prepare_math.py", "--set", "maths", "--out", "x")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no set 'maths'" in done.stderr


def test_the_reward_is_that_of_the_last_box() -> None:
    pytest.importorskip("verl.utils.reward_score.math_reward")
    score = load("reward_boxed").compute_score
    assert score("math", r"\boxed{2} no, \boxed{\frac12}", r"\frac{1}{2}") == {"score": 1.0, "acc": 1.0}
    assert score("dapo", r"\boxed{2}", "3", wrong=-1.0) == {"score": -1.0, "acc": 0.0}
    assert score("dapo", "no answer", 3)["acc"] == 0.0
