"""Warm start from every kind of source, at a discount."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stats.made import journal_of, make_keys
from verl_adaptive.config import SuccessConfig
from verl_adaptive.groups import Groups
from verl_adaptive.stats import Journal, StatsTable, StoreError, dataset_keys, open_run, warm_start, write_snapshot
from verl_adaptive.stats.keys import Identity, key_hex, keys_bytes
from verl_adaptive.stats.results import read_results
from verl_adaptive.stats.running_mean import Memory
from verl_adaptive.stats.snapshot import SnapshotError
from verl_adaptive.stats.visits import Visits

KEYS = make_keys(6)


def other_groups(step: int) -> tuple[list[int], Groups]:
    """What a step of another run finished, and of which prompts."""
    known = ([0, 1, 2, 3, 4], [0, 1, 4], [0, 1, 4], [0, 1, 2, 4])[step]
    rewards = [[1.0] * 8, [0, 1, 0, 1, 0, 0, 0, 0], [0.0] * 8, [1.0], [1.0]]
    tokens = [[100] * len(rewards[i]) for i in known]
    groups = Groups.from_lists(known, [rewards[i] for i in known], tokens=tokens, failed=[i == 4 for i in known])
    return known, groups


def other_run() -> StatsTable:
    """Prompt 0 easy four times, 1 mixed, 2 hard twice, 3 seen once, 4 only failed, 5 never."""
    table = StatsTable()
    table.rows_for(KEYS)
    for step in range(4):
        table.observe(other_groups(step)[1], step, tolerance=0.0)
    table.col("retired")[2] = 1
    return table


def fresh(*positions: int) -> StatsTable:
    table = StatsTable()
    table.rows_for(KEYS[list(positions)])
    return table


def numbers(table: StatsTable, *names: str) -> list[list[float]]:
    return [table.col(name).tolist() for name in names]


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The other run: its snapshot, unless a test asks for something else of it."""
    kind = getattr(request, "param", "snapshot")
    if kind in ("snapshot", "checkpoint"):
        folder = tmp_path / "global_step_9" / "adaptive"
        write_snapshot(folder, other_run(), {}, meta={"policy": "x"})
        return str(folder if kind == "snapshot" else tmp_path)
    with Journal(tmp_path / "run") as journal:
        journal.begin(-1)
        for step in range(4):
            known, groups = other_groups(step)
            journal.commit_step(step, groups, KEYS[known], ["k"] * len(known), sources=[""] * len(known))
    return str(tmp_path / "run")


@pytest.mark.parametrize("source", ["snapshot", "checkpoint", "journal"], indirect=True)
def test_evidence_becomes_pseudo_counts(source: str) -> None:
    table = fresh(5, 2, 1, 0, 3, 4)  # another order
    report = warm_start(table, source, discount=0.5)
    assert numbers(table, "rollouts", "successes") == [[0, 8, 16, 16, 1, 0], [0, 0, 4, 16, 1, 0]]
    assert numbers(table, "visits", "streak", "streak_kind") == [
        [0, 1, 2, 2, 1, 0],
        [0, 1, 0, 2, 1, 0],
        [0, -1, 0, 1, 1, 0],
    ]
    assert numbers(table, "tokens", "signal_sum", "reward_sum") == [
        [0, 800, 1600, 1600, 100, 0],
        [0, 0, 4, 16, 1, 0],
        [0, 0, 4, 16, 1, 0],
    ]
    assert np.array_equal(table.col("last_rate"), np.float32([np.nan, 0, 0.25, 1, 1, np.nan]), equal_nan=True)
    for name in ("first_step", "last_step"):
        assert (table.col(name) == -1).all()
    assert not table.col("retired").any() and not table.col("failures").any()
    assert (report.offered, report.matched, report.used, report.prompts, report.rollouts) == (4, 4, 4, 6, 41)
    assert "4 of 6 prompts (66.7%)" in str(report)


def test_the_first_step_is_this_runs(source: str) -> None:
    """It stayed -1 as if there had been no visit; the rate that the prompt began with is the earlier run's."""
    table = fresh(2)
    warm_start(table, source, discount=0.5)
    for step in (3, 5):
        table.observe(Groups.from_lists([0], [[1.0, 1.0]]), step, tolerance=0.0)
    assert numbers(table, "first_step", "last_step", "first_rate", "last_rate") == [[3], [5], [0.0], [1.0]]


def test_thin_evidence_vanishes_and_own_evidence_wins(source: str) -> None:
    table = fresh(0, 3)
    table.observe(Groups.from_lists([0], [[0.0, 1.0]]), 1, tolerance=0.0)
    before = {name: table.col(name).tobytes() for name in table.columns}
    report = warm_start(table, source, discount=0.1)  # one rollout of prompt 3 becomes none
    assert (report.matched, report.used) == (2, 0)
    assert before == {name: table.col(name).tobytes() for name in table.columns}


def test_a_streak_that_shrinks_to_nothing_has_no_kind(source: str) -> None:
    table = fresh(0, 2)
    warm_start(table, source, discount=0.2)
    assert numbers(table, "rollouts", "streak", "streak_kind") == [[6, 3], [1, 0], [1, 0]]


def test_nothing_matching_is_said_loudly(source: str, caplog: pytest.LogCaptureFixture) -> None:
    table = StatsTable()
    table.rows_for(make_keys(5, seed=7))
    caplog.set_level(logging.WARNING)
    report = warm_start(table, source, discount=0.5)
    assert report.matched == 0
    assert "Nothing matches" in caplog.text and "adaptive.id_key" in caplog.text


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 1)), min_size=1, max_size=6), st.floats(0.001, 1))
def test_rates_survive_any_discount(evidence: list[tuple[int, float]], discount: float) -> None:
    theirs = fresh(*range(len(evidence)))
    n, c = np.array([e[0] for e in evidence]), np.array([round(e[0] * e[1]) for e in evidence], dtype=float)
    flat = np.zeros(len(n), dtype=bool)
    theirs.observe_visits(Visits(np.arange(len(n)), np.zeros(len(n)), n, c, c, c, c, n * 10, flat, flat))
    with tempfile.TemporaryDirectory() as folder:
        write_snapshot(folder, theirs, {}, meta={})
        table = fresh(*range(len(evidence)))
        warm_start(table, folder, discount=discount)
    rollouts = table.col("rollouts")
    assert np.array_equal(rollouts, np.floor(discount * n + 0.5))
    some = rollouts > 0
    assert np.allclose(table.col("successes")[some] / rollouts[some], c[some] / n[some], rtol=1e-12, atol=0)
    assert np.array_equal(table.col("tokens")[some], 10 * rollouts[some])
    assert not table.col("visits")[~some].any()


# -- offline evaluations ----------------------------------------------------------------------------------------------


def rows() -> list[dict[str, Any]]:
    return [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"id": f"p{i}"},
        }
        for i in range(6)
    ]


def data_set(id_key: str | None = None) -> StatsTable:
    table = StatsTable()
    table.rows_for(dataset_keys(rows(), Identity(id_key=id_key)))
    return table


def save(path: Path, data: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(data), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in data) + "\n\n")
    return str(path)


#: Eight, four and none of eight rollouts right.
EVALUATED = list(zip(rows(), (8, 4, 0), strict=False))
FORMS: dict[str, list[dict[str, Any]]] = {
    "counts": [{**row, "n": 8, "successes": c, "tokens": 800} for row, c in EVALUATED],
    "rates": [{**row, "n": 8, "pass_rate": c / 8, "tokens": 800} for row, c in EVALUATED],
    "samples": [{**row, "score": float(i < c), "tokens": 100} for i in range(8) for row, c in EVALUATED],
    "lists": [{**row, "score": [1.0] * c + [0.0] * (8 - c), "tokens": 800} for row, c in EVALUATED],
    "two rows a prompt": [{**row, "n": 4, "successes": c / 2, "tokens": 400} for row, c in EVALUATED * 2],
}


@pytest.mark.parametrize(
    ("form", "name", "suffix"),
    [
        *((form, "content", ".jsonl") for form in FORMS),
        *((form, "hex", ".parquet") for form in FORMS),
        *(("samples", name, ".jsonl") for name in ("ground_truth", "id")),
        *(("counts", name, ".parquet") for name in ("ground_truth", "id", "bytes")),  # JSON has no bytes
    ],
)
def test_every_documented_form(form: str, suffix: str, name: str, tmp_path: Path) -> None:
    id_key = "extra_info.id" if name == "id" else None
    by_content = dict(zip(map(repr, rows()), dataset_keys(rows(), Identity(id_key=id_key)), strict=True))
    out = []
    for entry in FORMS[form]:
        row = {k: entry[k] for k in rows()[0]}
        key = np.array(by_content[repr(row)])
        rest = {k: v for k, v in entry.items() if k not in row}
        if name == "ground_truth":
            row = {"data_source": "gsm8k", "prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]}
        elif name == "hex":
            row = {"key": key_hex(key)[0]}
        elif name == "bytes":
            row = {"key": keys_bytes(key.reshape(1))[0]}
        elif name == "id":
            row = {"extra_info": row["extra_info"]}
        out.append({**row, **rest})
    table = data_set(id_key)
    report = warm_start(table, save(tmp_path / f"eval{suffix}", out), discount=0.5, identity=Identity(id_key=id_key))
    assert (report.kind, report.offered, report.matched, report.used) == ("results", 3, 3, 3)
    assert numbers(table, "rollouts", "successes", "tokens") == [
        [4, 4, 4, 0, 0, 0],
        [4, 2, 0, 0, 0, 0],
        [400, 400, 400, 0, 0, 0],
    ]
    assert numbers(table, "visits", "streak", "streak_kind") == [
        [1, 1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, -1, 0, 0, 0],
    ]
    assert table.col("signal_sqsum").tolist() == [4, 2, 0, 0, 0, 0]


def test_scores_need_not_be_zero_or_one(tmp_path: Path) -> None:
    data = [{**rows()[0], "score": [0.1, 0.1, 0.6]}, {**rows()[1], "score": [0.3, 0.35]}]
    table = data_set()
    warm_start(table, save(tmp_path / "e.jsonl", data), discount=1, tolerance=0.1)
    assert numbers(table, "successes", "streak_kind")[0][:2] == [1, 0]
    assert table.col("streak_kind")[:2].tolist() == [0, -1]
    assert table.col("signal_sum")[0] == pytest.approx(0.8) and table.col("signal_sqsum")[0] == pytest.approx(0.38)


def test_an_export_of_shaped_rewards_has_variance_where_the_run_saw_it(tmp_path: Path) -> None:
    """No success and no variance are two things: rewards of .1 and .3 are hard for a threshold of .5, and informative."""
    keys, lines = make_keys(2), []
    for key, group in zip(key_hex(keys), ([0.1, 0.3, 0.1, 0.1], [0.1] * 4), strict=True):
        sums = dict.fromkeys(("reward_sum", "signal_sum"), sum(group)) | {"signal_sqsum": sum(x * x for x in group)}
        lines.append({"key": key, "n": 4, "successes": 0.0, **sums})
    table = read_results(Path(save(tmp_path / "export.jsonl", lines)), tolerance=1e-6)
    at = table.rows_for(keys, create=False)
    assert table.col("streak")[at].tolist() == [0, 1] and table.col("streak_kind")[at].tolist() == [0, -1]


@pytest.mark.parametrize(
    ("config", "successes"),
    [
        (SuccessConfig(), 3),
        (SuccessConfig(threshold=1.0), 2),  # at least, as in training
        (SuccessConfig("value"), 2.5),
        (SuccessConfig("value", low=-1.0), 3.25),
    ],
)
def test_a_score_succeeds_as_in_training(tmp_path: Path, config: SuccessConfig, successes: float) -> None:
    table = data_set()
    path = save(tmp_path / "e.jsonl", [{**rows()[0], "score": [1.0, 1.0, 0.0, 0.5]}])
    warm_start(table, path, discount=1, success=config.of)
    assert table.col("successes")[0] == successes
    assert open_run(path, success=config.of).prompts.table.col("successes").tolist() == [successes]


def test_a_count_of_successes_says_nothing_of_rewards(tmp_path: Path) -> None:
    """Four of eight right is a reward of 4 where rewards are 0 and 1, and of 0 where they are ±1."""
    mine = rows()
    data = [
        {**mine[0], "n": 8, "successes": 4},
        {**mine[1], "n": 8, "successes": 4, "reward_sum": 0.0, "signal_sum": 0.0, "signal_sqsum": 8.0},
        {**mine[2], "score": [1.0, -1.0, -1.0, -1.0]},
    ]
    table = data_set()
    report = warm_start(table, save(tmp_path / "e.jsonl", data), discount=1)
    assert table.col("successes")[:3].tolist() == [4, 4, 1]
    assert np.array_equal(table.col("reward_sum")[:3], [np.nan, 0, -2], equal_nan=True)
    assert table.col("signal_sqsum")[:3].tolist() == [4, 8, 4]
    assert (report.used, report.rewarded) == (3, 2) and "Of 1 it tells successes and no rewards" in str(report)
    memory = Memory(table, "m", decay=0.9, strength=4.0, centre=None)
    memory.begin_with(table.col("reward_sum"))
    assert memory.col("count")[:3].tolist() == [0, 8, 4]
    # the source's prior: latest visits of two prompts, 0 and -½, and twice their mean
    assert memory.value(np.array([0]))[0] == pytest.approx((2 * -0.25 + 0 - 0.5) / 4)


def test_an_expectation_counts_for_four_rollouts_and_is_no_streak(tmp_path: Path) -> None:
    data = [{**rows()[0], "prior": 0.25}, {**rows()[1], "prior": 0}, {**rows()[2], "prior": 0.9, "score": [1.0]}]
    table = data_set()
    report = warm_start(table, save(tmp_path / "e.jsonl", data), discount=0.5)
    assert table.col("rollouts")[:3].tolist() == [4, 4, 1]  # what was seen comes before what was expected
    assert table.col("successes")[:3].tolist() == [1, 0, 1] == table.col("reward_sum")[:3].tolist()
    assert table.col("streak")[:2].tolist() == [0, 0]
    assert (report.used, report.rewarded) == (3, 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prior": 1.5, "score": None}, "prior=1.5 is not an expected reward"),
        ({"prior": math.nan, "score": None}, "prior=nan"),
        ({"n": -1, "successes": 0}, "n=-1 is not a positive whole number"),
        ({"n": 2.5, "successes": 0}, "n=2.5"),
        ({"n": 4}, "successes or pass_rate"),
        ({"n": 4, "successes": 5}, "successes=5: 5.0 successes in 4"),
        ({"n": 4, "successes": "five"}, "successes='five' is not a number"),
        ({"n": 4, "pass_rate": -0.1}, "pass_rate=-0.1: -0.4 successes"),
        ({"n": 4, "pass_rate": math.nan}, "nan successes"),
        ({"score": []}, "score="),
        ({"score": "good"}, "score='good' is not a finite number or a list of them"),
        ({"score": 1, "tokens": "many"}, "tokens='many' is not a number"),
        ({"score": [1, math.inf]}, "score="),
        ({"n": None, "pass_rate": 0.5}, "says how it went; n is null"),  # as pandas writes a row without a match
        ({"reward": 1}, "neither n .beside pass_rate or successes., score nor prior"),
        ({"key": "abc", "score": 1}, "32 hex digits"),
        ({"key": "00 " * 16, "score": 1}, "32 hex digits"),
        ({"prompt": None, "score": 1}, "neither key nor prompt"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save(tmp_path / "e.jsonl", [{**rows()[0], "score": 1}, {**rows()[1], **row}])
    with pytest.raises(StoreError, match=message) as caught:
        warm_start(data_set(), path, discount=0.5)
    assert f"{path}, row 1" in str(caught.value)


def test_bad_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"n": 1}\nnot json\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    write_snapshot(tmp_path / "torn", other_run(), {}, meta={})
    (tmp_path / "torn" / "manifest.json").write_text("{")
    (tmp_path / "nothing.jsonl").write_text("")
    pq.write_table(pa.table({"key": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for name, message in [
        ("bad.jsonl", "neither key nor prompt"),
        ("list.jsonl", "line 1: not an object"),
        ("bad.parquet", "not a Parquet file"),
        ("nothing.jsonl", "has no results"),
        ("none.parquet", "has no rows"),
        ("gone", "does not exist"),
    ]:
        with pytest.raises(StoreError, match=message) as caught:
            warm_start(data_set(), tmp_path / name, discount=0.5)
        assert str(tmp_path / name) in str(caught.value)
    (tmp_path / "bad.jsonl").write_text(json.dumps({**rows()[0], "score": 1}) + "\nnot json\n")
    with pytest.raises(StoreError, match="line 2: not JSON"):
        warm_start(data_set(), tmp_path / "bad.jsonl", discount=0.5)
    with pytest.raises(SnapshotError, match="damaged"):
        warm_start(data_set(), tmp_path / "torn", discount=0.5)
    for discount in (0, -1, 1.5, math.nan):
        with pytest.raises(ValueError, match="warm_start_discount"):
            warm_start(data_set(), tmp_path / "nothing.jsonl", discount=discount)


def test_of_several_runs_the_newest_that_knows_a_prompt_counts(tmp_path: Path) -> None:
    for run, known, rewards in (("a", [0, 1], [[1.0], [1.0]]), ("b", [1], [[0.0]])):
        journal_of(tmp_path / run, Groups.from_lists(known, rewards), KEYS[known])
    for source in (tmp_path, tmp_path / "*"):
        table = fresh(0, 1, 2)
        report = warm_start(table, source, discount=1)
        assert (report.used, report.offered, report.matched, report.kind) == (2, 2, 2, "2 runs")
        assert table.col("successes").tolist() == [1, 0, 0]


def test_of_checkpoints_the_newest_run_and_the_one_that_verl_resumes_from_count(tmp_path: Path) -> None:
    """By their age: their names are in another order. A resume from an older checkpoint leaves a higher number behind."""

    def save(run: str, step: int, reward: float) -> None:
        table = fresh(0)
        table.observe(Groups.from_lists([0], [[reward] * 2]), step, tolerance=0.0)
        folder = tmp_path / run / f"global_step_{step}" / "adaptive"
        write_snapshot(folder, table, {}, meta={"step": step, "began": 10 - ord(run[0]) / 100})
        (tmp_path / run / "latest_checkpointed_iteration.txt").write_text(str(step))

    save("b", 1, 0.0)
    save("a", 1, 1.0)
    save("a", 40, 0.0)
    save("a", 30, 1.0)
    for source, successes in ((tmp_path, 2), (tmp_path / "a", 2), (tmp_path / "b", 0)):
        table = fresh(0)
        warm_start(table, source, discount=1)
        assert table.col("successes").tolist() == [successes]
