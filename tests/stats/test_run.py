"""One door to what is known: every kind of source, and what is said of one that is none."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.cli.stores import make_run, write_dataset
from tests.stats.made import written
from tests.stats.test_journal import attempt, begun, commit
from tests.stats.test_table import equal
from verl_adaptive.cli import main
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats import (
    Journal,
    StatsTable,
    StoreError,
    dumps,
    find_runs,
    open_run,
    open_runs,
    warm_start,
    write_snapshot,
)
from verl_adaptive.stats.dataset import Row, conflicts, keys_of
from verl_adaptive.stats.dumps import said_of
from verl_adaptive.stats.keys import dataset_keys, key_hex
from verl_adaptive.stats.snapshot import MANIFEST


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StatsTable]:
    folder = tmp_path_factory.mktemp("run")
    engine, _ = make_run(folder / "checkpoints", steps=6)
    lines = [json.dumps({"key": key.hex(), "n": 4, "successes": 1}) for key in (b"a" * 16, b"b" * 16)]
    (folder / "eval.jsonl").write_text("\n".join(lines))
    return folder, engine.table


def test_every_source_has_prompts(made: tuple[Path, StatsTable]) -> None:
    folder, table = made
    checkpoints = folder / "checkpoints"
    for source, kind in (
        (folder, "journal"),
        (checkpoints, "journal"),
        (checkpoints / "adaptive", "journal"),
        (f"{folder}/check*", "journal"),
        (checkpoints / "global_step_6", "snapshot"),
        (checkpoints / "global_step_6" / "adaptive" / "manifest.json", "snapshot"),
        (folder / "eval.jsonl", "results"),
    ):
        run = open_run(source)
        assert run.kind == kind and len(run.prompts) == (2 if kind == "results" else 60)
        frame = run.prompts.to_arrow().to_pandas().set_index("key")
        assert np.isclose(frame["pass_rate"], frame["successes"] / frame["n"], equal_nan=True).all()
        if kind == "snapshot":
            equal(run.table, table)
        if kind != "journal":
            with pytest.raises(StoreError, match=rf"\({kind}\) has prompts"):
                run.steps  # noqa: B018
        else:
            assert len(run.steps) == 6 and run.retired == (run.table.col("retired").sum(), 6) == (3, 6)
            rows = run.table.rows_for(table.keys, create=False)
            assert (run.table.col("visits")[rows] == table.col("visits")).all() and len(run.table) == len(table)
    assert open_run(checkpoints, prefer="snapshot").kind == "snapshot"
    assert [run.kind for run in open_runs(f"{folder}/*")] == ["journal"]  # a table is meant where there is nothing else
    assert open_run(f"{folder}/*.jsonl").kind == "results"


def test_a_run_cut_at_a_step_has_its_prompts_of_then(made: tuple[Path, StatsTable]) -> None:
    whole = open_run(made[0])
    cut = whole.until(3)
    assert cut.table.col("last_step").max() == 3 and whole.table.col("last_step").max() == 6 and cut.retired is None
    assert {step for page in cut.observations() for step in page.column("step").to_pylist()} == {1, 2, 3}
    assert cut.steps.column("step").to_pylist() == [1, 2, 3]


def test_steps_that_a_checkpoint_has_and_the_journal_has_not_are_missing(tmp_path: Path) -> None:
    """Whose disk was full until the run ended: it looked like a run that had ended earlier."""
    first = attempt(tmp_path / "adaptive", 1, 2)
    snapshot = tmp_path / "global_step_4" / "adaptive"
    write_snapshot(snapshot, StatsTable(), {}, meta={"step": 4, "attempt": first})
    assert open_run(tmp_path).gaps() == [(3, 4, "not written when global_step_4 was saved")]
    assert open_run(tmp_path).until(2).gaps() == []
    with begun(tmp_path / "one", 1, 2) as journal:
        meta = {"step": 3, "attempt": journal.id}
        write_snapshot(tmp_path / "one" / "global_step_3" / "adaptive", StatsTable(), {}, meta=meta)
        read_before = open_run(tmp_path / "one")
        assert read_before.steps.num_rows == 2
        commit(journal, 3)
        assert written(journal) and read_before.gaps() == []
    attempt(
        tmp_path / "adaptive", 3, after=2, of=first
    )  # from an earlier checkpoint: what came after it does not count
    assert open_run(tmp_path).gaps() == []
    (snapshot / MANIFEST).write_text("")
    assert open_run(tmp_path).gaps() == []


def test_a_copy_of_a_run_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    """It was said to lack the steps that the original had trained since."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    with Journal(run / "adaptive", {"checkpoints": str(run)}) as journal:
        journal.begin(0)
        for step in (1, 2):
            commit(journal, step)
            meta = {"step": step, "attempt": journal.id}
            write_snapshot(run / f"global_step_{step}" / "adaptive", StatsTable(), {}, meta=meta)
            if step == 1:
                assert written(journal)
                shutil.copytree(run, copy)
    assert open_run(copy).gaps() == open_run(run).gaps() == []
    shutil.rmtree(copy / "global_step_1")  # it lacks them now: what is saved elsewhere is told
    assert open_run(copy).gaps() == [(2, 2, "not written when global_step_2 was saved")]


@pytest.mark.parametrize("name", ["pipe", "1.jsonl", "attempt-0/attempt.json", "global_step_1/adaptive/manifest.json"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    for source in (tmp_path, path):
        with pytest.raises(AdaptiveError):
            open_run(source)


def test_what_is_no_run_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    for source, says in (
        ("", "name is empty"),
        (tmp_path / "none", "does not exist"),
        (tmp_path / "*.none", "does not exist"),
        (tmp_path / "*", "is not one of"),
        (tmp_path / "x.txt", "is not one of"),
        (tmp_path, "holds no run.*rollout_data_dir"),
    ):
        with pytest.raises(StoreError, match=says):
            open_run(source)
    for name, meta in (("a", {"began": "of anybody"}), ("b", {"began": 1.7e9})):  # runs are sorted by it
        write_snapshot(tmp_path / name / "global_step_1" / "adaptive", StatsTable(), {}, meta=meta)
    with pytest.raises(StoreError, match="leads to 2 runs, name one"):
        open_run(tmp_path / "?")


def test_a_folder_leads_to_the_runs_that_its_pattern_does(tmp_path: Path) -> None:
    """Runs without a journal were left out of a folder and found by a pattern, and a folder took no snapshot of one with both."""
    make_run(tmp_path / "both", steps=2)
    make_run(tmp_path / "own" / "checkpoints", steps=2)
    write_snapshot(tmp_path / "bare" / "global_step_1" / "adaptive", StatsTable(), {}, meta={})
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "log.jsonl").write_text("no JSON")
    (tmp_path / "rollouts").mkdir()  # of one of these runs, perhaps: not counted beside it
    (tmp_path / "rollouts" / "1.jsonl").write_text('{"input": "?", "output": "!", "score": 1.0}\n')
    for prefer, kinds in (("journal", ["snapshot", "journal", "journal"]), ("snapshot", ["snapshot"] * 3)):
        below, matched = (open_runs(f"{tmp_path}{rest}", prefer=prefer) for rest in ("", "/*"))
        assert [run.kind for run in below] == kinds
        assert [(run.source, run.where) for run in below] == [(run.source, run.where) for run in matched]
    assert len(find_runs(str(tmp_path))[0]) == 2  # for `serve`: with a journal


def test_a_folder_of_verls_rollouts_is_a_run(tmp_path, capsys) -> None:
    """Of any verl run, without this plugin: prompts, their texts and answers, and a course."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in (1, 2, 10):
        lines = []
        for prompt, right in ((0, 0), (1, step % 2 * 4), (2, 4)):
            lines += [
                {"input": f"user: what is {prompt}?", "gts": str(prompt), "step": step, "score": float(i < right)}
                | {"output": f"\\boxed{{{prompt if i < right else 7}}}"}
                for i in range(4)
            ]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def listed(page: str) -> list[str]:
        """The columns of the first list of prompts."""
        return re.findall(">([^<]+)</th>", re.findall(r'id="list-\d+">\s*<thead>(.*?)</thead>', page)[0])

    run = open_run(folder)
    assert (run.kind, run.steps.column("step").to_pylist()) == ("rollouts", [1, 2, 10]) and run.gaps() == []
    assert sorted(run.table.col("successes").tolist()) == [0, 4, 12] and set(run.table.col("rollouts").tolist()) == {12}
    assert sorted(run.table.col("streak").tolist()) == [2, 3, 3]  # of groups that were all wrong, or all right
    assert sum(map(len, run.observations(2, 2))) == 3 and run.until(1).table.col("visits").tolist() == [1, 1, 1]
    (never,) = run.prompts.values("key", run.prompts.where("successes == 0"))
    text = run.texts({never})[never]
    assert (text.text, text.answer, text.said.answers) == ("user: what is 0?", "0", "7 100%")
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html"), "--tries", "8"]) == 0, capsys.readouterr().err
    page = (tmp_path / "r.html").read_text()
    assert "what is 0?" in page and "Difficulty over time" in page and "that trained" in page
    assert "rollouts generated<small>" not in page and "Where every rollout went" not in page  # nobody wrote it down
    assert ">tokens</th>" not in page  # they are not written down: not 0
    assert "trained and dropped" not in page and listed(page)[:2] == ["key", "expected"]
    assert "Row numbers and data sources appear with --data" in page  # texts and answers are there
    rows = [
        {"data_source": "sums", "prompt": f"what is {i}?", "reward_model": {"ground_truth": str(i)}} for i in range(3)
    ]
    data = str(write_dataset(tmp_path / "d.parquet", rows))
    beside = open_run(folder)
    beside.beside(data)
    (never,) = beside.prompts.values("key", beside.prompts.where("successes == 0"))
    assert never == key_hex(dataset_keys(rows))[0]  # as training finds it
    row = beside.texts({never})[never]
    assert (row.row, row.text, row.source, row.said.answers) == (0, "what is 0?", "sums", "7 100%")
    assert set(beside.table.source_names()) == {"sums"}  # what is said of sources, too
    kept = str(tmp_path / "kept.parquet")
    assert main(["export", str(folder), kept, "--data", data, "--where", "successes > 0"]) == 0
    assert keys_of(kept)[0].tolist() == dataset_keys(rows)[1:].tolist()
    with pytest.raises(StoreError, match=r"verl's rollouts, which do not say .*; give a run's checkpoints"):
        warm_start(StatsTable(), folder, discount=0.5)
    words = ["report", str(folder), "--data", data, "-o", str(tmp_path / "r.html"), "--tries", "8"]
    assert main(words) == 0 and listed((tmp_path / "r.html").read_text())[:3] == ["row", "key", "source"]
    assert main(["stats", str(folder), "--where", "successes == 0"]) == 0
    assert "what is 0?" in capsys.readouterr().out and main(["report"]) == 2
    assert main(["stats", str(folder)]) == 0 and not re.search(r"response tokens|\?", capsys.readouterr().out)
    for seed in (1, 2):  # with the file of verl's logger in it, runs of plain verl are compared
        shutil.copytree(folder, tmp_path / f"plain-{seed}")
        lines = [{"step": s, "data": {"val-core/sums/acc/mean@1": s * seed / 20, "actor/lr": 1.0}} for s in (0, 2, 10)]
        (tmp_path / f"plain-{seed}" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert [one["step"] for one in open_run(tmp_path / "plain-1").validations()] == [0, 2, 10]
    curves = str(tmp_path / "curves.csv")
    assert main(["compare", f"a={tmp_path}/plain-1", f"b={tmp_path}/plain-2", "--csv", curves]) == 0
    with open(curves) as file:
        assert {row["tokens"] for row in csv.DictReader(file)} == {""}  # they were 0
    out, err = capsys.readouterr()
    assert "+0.500" in out and "rollouts generated" not in out and err.count("the rollouts that trained") == 2
    assert main(["compare", f"a={tmp_path}/plain-1", f"b={tmp_path}/plain-2", "--by", "tokens", "--plot", "x.svg"]) == 1
    (folder / "3.jsonl").write_text('{"input": "x"}')
    assert main(["stats", str(folder)]) == 1 and "3.jsonl, line 1: no score" in capsys.readouterr().err


def test_only_so_much_of_the_rollouts_is_looked_through(tmp_path, monkeypatch) -> None:
    """Where no prompt was found, as beside another data set, all of a run's rollouts were read."""
    for step in range(3, 11):
        (tmp_path / f"{step}.jsonl").write_text(
            json.dumps({"input": f"what is {step}?", "gts": "", "score": 0.0}) + "\n"
        )
    monkeypatch.setattr(dumps, "MOST", 100)
    texts = {f"{step:032}": Row(None, f"what is {step}?", "") for step in range(3, 11)}
    first, last = next(iter(texts)), list(texts)[-2:]
    assert sorted(said_of(str(tmp_path), texts)) == last and not said_of(str(tmp_path), {first: texts[first]})
    monkeypatch.setattr(dumps, "MOST", 10)
    assert sorted(said_of(str(tmp_path), texts)) == last[1:]


def test_a_rollout_of_several_outputs_is_one_answer(tmp_path) -> None:
    """A call of a tool counted as a wrong answer. Only the first output has the prompt alone, only the last one the reward."""
    lines = [
        {"input": f"what is 1+1?{' 2 is' * turn}", "output": ("call", "two")[turn], "gts": "2", "score": float(turn)}
        | {"uid": f"abc_{rollout}_{turn}"}
        for rollout in range(4)
        for turn in range(2)
    ]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert said_of(str(tmp_path), {"0" * 32: Row(None, "what is 1+1?", "2")})["0" * 32].answers == "right 100%"
    table = open_run(tmp_path).table
    assert (table.col("rollouts").tolist(), table.col("successes").tolist()) == ([4], [4])


def test_a_rollout_belongs_to_one_of_all_prompts(tmp_path) -> None:
    """It was counted for a shorter question, if that alone was listed; those without an expected answer were nobody's."""
    questions = {"is 12 even?": "yes", "is 12 even? is 2 even?": "yes", "write a poem": None}
    rows = [{"prompt": text, "reward_model": {"ground_truth": answer}} for text, answer in questions.items()]
    data = str(write_dataset(tmp_path / "d.parquet", rows))
    lines = [
        {"input": text, "output": "done", "gts": answer, "score": float(number), "uid": f"{number}_0_0"}
        for number, (text, answer) in enumerate(questions.items())
    ]
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = key_hex(dataset_keys(rows))
    evaluation = tmp_path / "evaluation.jsonl"
    evaluation.write_text("".join(json.dumps({"key": key, "n": 1, "successes": 0}) + "\n" for key in keys))
    run = open_run(evaluation)
    for wanted, said in zip(keys, ("done 100%", "right 100%", "right 100%"), strict=True):
        (row,) = run.texts({wanted}, data=data, rollouts=str(folder)).values()
        assert row.said.answers == said
    beside = open_run(folder)
    beside.beside(data)
    assert sorted(beside.texts(set(keys))) == sorted(keys)


def test_what_fills_a_batch_up_is_no_rollout(tmp_path) -> None:
    """verl writes it down with the rest: it was a prompt that always failed."""
    line = {"input": "what is 1?", "output": "1", "score": 1.0, "uid": "abc_0_0"}
    pads = [{"input": "", "output": "", "score": 0.0, "uid": f"pad{uuid.uuid4().hex}_{i}_0"} for i in range(3)]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (line, *pads)))
    table = open_run(tmp_path).table
    assert (table.col("rollouts").tolist(), table.col("successes").tolist()) == ([1], [1])


def test_what_verls_logger_measured_is_a_number(tmp_path) -> None:
    (tmp_path / "1.jsonl").write_text('{"input": "?", "output": "!", "score": 1.0}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"val-a": NaN, "val-b": true, "val-c": 0.5}}\n')
    assert [one["metrics"] for one in open_run(tmp_path).validations()] == [{"val-c": 0.5}]


def test_a_row_that_lacks_its_prompt_is_found(tmp_path) -> None:
    """Its number was that within a thousand rows, and read as that in the file."""
    rows = [{"data_source": "s", "prompt": None if i == 1500 else "x"} for i in range(1600)]
    with pytest.raises(StoreError, match=r"d\.parquet, counted from row 1000: data\.prompt_key='prompt': row 500 has"):
        keys_of(str(write_dataset(tmp_path / "d.parquet", rows)))


def test_a_question_with_different_answers_is_found(tmp_path) -> None:
    rows = [
        {"data_source": "sums", "prompt": question, "reward_model": {"ground_truth": answer}}
        for question, answer in (("1 + 1?", "2"), ("2 + 2?", "4"), ("1 + 1?", "3"), ("2 + 2?", "4"))
    ]
    data = str(write_dataset(tmp_path / "d.parquet", rows))
    assert conflicts(data, 5) == [{"text": "1 + 1?", "answers": ["2", "3"], "rows": [0, 2], "of": 1}]
