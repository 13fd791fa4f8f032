"""The quickstart's data and reward: deterministic, held out, and judged by reasoning-gym."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.test_prepare_math import load

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def data() -> ModuleType:
    return load("cpu/make_data")


@pytest.fixture(scope="module")
def sets(data: ModuleType) -> dict[str, list[dict]]:
    return data.build(seed=1)


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    return load("cpu/reward")


def question(row: dict) -> str:
    return row["prompt"][0]["content"]


def score(reward: ModuleType, row: dict, answer: str) -> dict[str, float]:
    return reward.compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"])


def test_deterministic(data: ModuleType, sets: dict[str, list[dict]]) -> None:
    assert data.build(seed=1) == sets
    assert data.build(seed=2) != sets


def test_sizes(data: ModuleType, sets: dict[str, list[dict]]) -> None:
    for name in ("train", "val", "warm"):
        assert len(sets[name]) == sum(getattr(task, name) for task in data.TASKS)
    assert 600 <= len(sets["train"]) <= 2000
    assert {row["data_source"] for row in sets["val"]} == {task.name for task in data.TASKS}


def test_no_question_twice(sets: dict[str, list[dict]]) -> None:
    asked = [question(row) for rows in sets.values() for row in rows]
    assert len(asked) == len(set(asked))


def test_rows_are_short_and_identified(data: ModuleType, sets: dict[str, list[dict]]) -> None:
    for rows in sets.values():
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        for row in rows:
            assert len(question(row).encode()) + 4 <= 64
            assert len(row["reward_model"]["ground_truth"].encode()) + 1 <= 12


def test_canonical_answers_get_full_marks(reward: ModuleType, sets: dict[str, list[dict]]) -> None:
    for row in sets["train"] + sets["val"]:
        answer = row["reward_model"]["ground_truth"]
        assert answer == json.loads(row["extra_info"]["entry"])["answer"]
        assert score(reward, row, f" {answer}\n") == {"score": 1.0, "acc": 1.0}


def test_wrong_answers_get_nothing(reward: ModuleType, data: ModuleType, sets: dict[str, list[dict]]) -> None:
    for row in sets["val"]:
        answer = row["reward_model"]["ground_truth"]
        for wrong in ("", "x", answer + "9", data._slip(answer)):
            assert score(reward, row, wrong)["score"] == 0.0, (question(row), wrong)


def no_fixed_answer_pays(rows: list[dict]) -> None:
    """Two scorers of reasoning-gym's pay ``0.`` or ``nan`` in full: a run learned to say that, and not the task."""
    reward = load("cpu/reward")
    for source in {row["data_source"] for row in rows}:
        mine = [row for row in rows if row["data_source"] == source]
        answers = [row["reward_model"]["ground_truth"] for row in mine]
        earned = max(map(answers.count, answers))
        for fixed in ("0", "0.", "1", "-1", "nan", "inf", "a"):
            paid = sum(score(reward, row, fixed)["score"] for row in mine)
            assert paid <= earned + 0.05 * len(mine), (source, fixed, paid)


def test_no_fixed_answer_pays(sets: dict[str, list[dict]]) -> None:
    no_fixed_answer_pays(sets["val"] + sets["train"])


def test_the_teacher_slips_as_often_as_it_should(data: ModuleType, sets: dict[str, list[dict]]) -> None:
    for task in data.TASKS:
        rows = [row for row in sets["warm"] if row["data_source"] == task.name]
        wrong = [
            row["reward_model"]["ground_truth"] != json.loads(row["extra_info"]["entry"])["answer"] for row in rows
        ]
        assert abs(sum(wrong) / len(wrong) - task.slips) < 0.1


def test_reward_says_what_is_missing(reward: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"make_data\.py"):
        reward.compute_score("gcd", "1", "1", None)


def test_parquet_round_trip(
    data: ModuleType, reward: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(tmp_path)])
    data.main()
    for row in pandas.read_parquet(tmp_path / "val.parquet").to_dict("records"):
        assert score(reward, row, row["reward_model"]["ground_truth"])["acc"] == 1.0
