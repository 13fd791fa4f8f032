"""``verl-adaptive export``: files that other tools, and training, can use."""

from __future__ import annotations

import csv
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.stores import HOSTILE, hostile_rows, last_ledger, make_run, write_dataset
from verl_adaptive.commands import export
from verl_adaptive.stats import StatsTable, dataset_keys, open_run, warm_start
from verl_adaptive.stats.atomic import TEMPORARY
from verl_adaptive.stats.keys import Identity, key_hex
from verl_adaptive.stats.prompts import DERIVED


def test_prompts_in_three_formats_agree(finished, tmp_path, call) -> None:
    for suffix in ("parquet", "csv", "jsonl"):
        status, out, err = call("export", finished.folder, tmp_path / f"p.{suffix}")
        assert (status, out) == (0, "") and "prompts written to" in err
    parquet = pq.read_table(tmp_path / "p.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["key"] for r in parquet] == [r["key"] for r in lines] == [r["key"] for r in rows]
    assert [r["pass_rate"] for r in parquet] == [r["pass_rate"] for r in lines]
    assert [r["pass_rate"] for r in parquet] == [float(r["pass_rate"]) if r["pass_rate"] else None for r in rows]
    table = finished.engine.table
    by_key = dict(zip(key_hex(table.keys), table.col("successes").tolist(), strict=True))
    assert all(r["successes"] == by_key[r["key"]] for r in parquet) and len(parquet) == (table.col("visits") > 0).sum()
    assert {r["source"] for r in parquet} == {r["source"] for r in rows} == {"gsm8k", "math", HOSTILE}


def test_a_column_that_follows_from_all_prompts_is_made_once(finished, tmp_path, call, monkeypatch) -> None:
    about, surprise = DERIVED["surprise"]
    made = []
    monkeypatch.setitem(DERIVED, "surprise", (about, lambda prompts: made.append(prompts) or surprise(prompts)))
    whole, pages = tmp_path / "whole.parquet", tmp_path / "pages.parquet"
    call("export", finished.folder, whole)
    monkeypatch.setattr(export, "_BATCH", 10)
    call("export", finished.folder, pages)
    assert len(made) == 2 and pq.read_table(pages).equals(pq.read_table(whole))


def test_an_export_is_a_warm_start(tmp_path, call) -> None:
    """Prompts that were never rolled out are in it, too, and say nothing."""
    engine, rows = make_run(tmp_path / "run", steps=3)
    rolled_out = engine.table.col("rollouts") > 0
    assert not rolled_out.all()
    assert call("export", tmp_path / "run", tmp_path / "w.parquet")[0] == 0
    assert call("export", tmp_path / "run", tmp_path / "w.jsonl")[0] == 0
    for name in ("w.parquet", "w.jsonl"):
        table = StatsTable()
        table.rows_for(dataset_keys(rows))
        report = warm_start(table, tmp_path / name, discount=1.0)
        assert report.matched == report.used == rolled_out.sum()
        assert table.col("rollouts").tolist() == engine.table.col("rollouts").tolist()
        assert table.col("successes").tolist() == engine.table.col("successes").tolist()
        assert table.col("last_n").tolist() == engine.table.col("last_n").tolist()
        for sums in ("reward_sum", "signal_sum", "signal_sqsum"):
            assert table.col(sums).tolist() == pytest.approx(engine.table.col(sums).tolist())
        found = open_run(tmp_path / name).table
        at = found.rows_for(engine.table.keys[rolled_out], create=False)
        assert found.source_names(at) == engine.table.source_names(rolled_out)


def test_observations_and_steps(finished, tmp_path, call) -> None:
    assert call("export", finished.folder, tmp_path / "o.parquet", "--what", "observations")[0] == 0
    observations = pq.read_table(tmp_path / "o.parquet")
    good = observations.filter(pa.compute.invert(observations.column("failed")))
    assert sum(good.column("n").to_pylist()) == finished.engine.table.col("rollouts").sum()
    assert call("export", finished.folder, tmp_path / "s.jsonl", "--what", "steps")[0] == 0
    assert last_ledger(tmp_path / "s.jsonl")["run"]["rollouts"]["generated"] == finished.engine.total.rollouts.generated


def test_conditions_and_empty_answers(finished, tmp_path, call) -> None:
    for suffix in ("parquet", "csv", "jsonl"):
        assert call("export", finished.folder, tmp_path / f"n.{suffix}", "--where", "visits > 10 ** 1")[0] == 2
        assert call("export", finished.folder, tmp_path / f"n.{suffix}", "--where", "visits > 9999")[0] == 0
    assert pq.read_table(tmp_path / "n.parquet").num_rows == 0 and (tmp_path / "n.jsonl").read_text() == ""
    assert call("export", finished.folder, tmp_path / "f.parquet", "--where", "flips >= 2")[0] == 0
    flipping = pq.read_table(tmp_path / "f.parquet").column("flips").to_pylist()
    assert 0 < len(flipping) < 60 and min(flipping) >= 2


@pytest.fixture
def pictured(tmp_path):
    """One question over five pictures, under names of the user's own, and the results of an evaluation of it."""
    rows = [
        {
            "data_source": "m",
            "messages": [{"role": "user", "content": "<image>?"}],
            "pictures": [f"/p/{i}.png"],
            "reward_model": {"ground_truth": "cat"},
        }
        for i in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    results = [{**row, "n": 4, "successes": i % 5} for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(results), tmp_path / "eval.parquet")
    return tmp_path / "train.parquet", tmp_path / "eval.parquet"


NAMED = ("--prompt-key", "messages", "--media-key", "images=pictures")


def test_a_file_of_results_is_read_by_the_same_names(pictured, tmp_path, call, refusal) -> None:
    """What tells the pictures apart in the data set tells them apart in the evaluation, and in training."""
    data, results = pictured
    found = json.loads(call("stats", results, *NAMED, "--json")[1])
    assert (found["visited"], found["rollouts"]) == (5, 20)
    assert call("export", results, tmp_path / "x.parquet", *NAMED)[0] == 0
    assert pq.read_table(tmp_path / "x.parquet").column("n").to_pylist() == [4] * 5
    found = json.loads(call("compare", results, results, *NAMED, "--visits", "1", "--json")[1])
    assert found["matched"]["prompts"] == 5
    words = ("export", results, tmp_path / "o.parquet", "--data", data, "--where", "successes == 2")
    assert call(*words, *NAMED)[0] == 0
    assert pq.read_table(tmp_path / "o.parquet").column("pictures").to_pylist() == [["/p/2.png"]]
    assert "images, videos, audios" in refusal(*words, "--overwrite", "--media-key", "image=pictures", status=2)
    said = refusal("stats", tmp_path / "x.parquet", "--data", data)
    assert (
        "has no column 'prompt' (data.prompt_key or --prompt-key names another); it has: " in said
        and "messages" in said
    )
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    assert "to_parquet" in refusal("stats", results, *NAMED, "--data", tmp_path / "train.jsonl")
    table, named = StatsTable(), Identity("messages", media_keys={"images": "pictures"})
    table.rows_for(dataset_keys(pq.read_table(data).to_pylist(), named))
    assert warm_start(table, results, discount=1.0, identity=named).used == 5


def test_nothing_is_overwritten_unasked(finished, tmp_path, call, refusal) -> None:
    target = tmp_path / "p.csv"
    target.write_text("mine")
    assert "--overwrite" in refusal("export", finished.folder, target) and target.read_text() == "mine"
    assert call("export", finished.folder, target, "--overwrite")[0] == 0 and target.read_text() != "mine"
    assert "does not exist" in refusal("export", finished.folder, tmp_path / "no" / "p.csv")
    assert call("export", finished.folder, tmp_path / "q.csv", "--where", "--what", "steps")[0] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.csv"]  # no half-written files


def test_a_full_disk_leaves_nothing_behind(finished, tmp_path, refusal) -> None:
    (tmp_path / f"p.jsonl.{os.getpid()}{TEMPORARY}").symlink_to("/dev/full")
    assert "No space left" in refusal("export", finished.folder, tmp_path / "p.jsonl")
    assert list(tmp_path.iterdir()) == []


# -- rows of a data set -------------------------------------------------------------------------------------


def rates(finished) -> np.ndarray:
    table = finished.engine.table
    rows = table.rows_for(dataset_keys(finished.rows), create=False)
    with np.errstate(invalid="ignore"):
        return table.col("successes")[rows] / table.col("rollouts")[rows]


def test_rows_are_kept_as_they_are(finished, tmp_path, call) -> None:
    """The same rows in the same order; columns of any type, and the schema's metadata."""
    table = pq.read_table(finished.data)
    table = table.append_column("kind", pa.array(["a", "b"] * 30).dictionary_encode())
    table = table.append_column("image", pa.array([b"\x00\xff"] * 60, pa.large_binary()))
    table = table.append_column("when", pa.array([0] * 60, pa.timestamp("us", "UTC")))
    table = table.replace_schema_metadata({"huggingface": '{"info": 1}', "mine": "yes"})
    data, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(table, data, row_group_size=7)
    status, _, err = call("export", finished.folder, out, "--data", data, "--where", "0.1 <= pass_rate <= 0.9")
    assert status == 0 and "rows kept" in err
    wanted = [row for row, rate in zip(table.to_pylist(), rates(finished), strict=True) if 0.1 <= rate <= 0.9]
    assert 0 < len(wanted) < 60 and pq.read_table(out).to_pylist() == wanted
    one, other = pq.read_schema(data), pq.read_schema(out)
    assert one.equals(other, check_metadata=True) and other.metadata[b"mine"] == b"yes"


def test_unseen_rows_are_left_out_or_kept(finished, tmp_path, call) -> None:
    rows = [*finished.rows, *({**r, "data_source": "new"} for r in hostile_rows(5))]
    data = write_dataset(tmp_path / "more.parquet", rows)
    words = ("export", finished.folder, tmp_path / "o.parquet", "--data", data, "--overwrite")

    def sources(*more: str) -> list[str]:
        assert call(*words, *more)[0] == 0
        return pq.read_table(tmp_path / "o.parquet").column("data_source").to_pylist()

    assert "new" not in sources("--where", "pass_rate >= 0")
    assert "new" not in sources("--where", "not pass_rate < 0.5")
    assert sources("--where", "pass_rate > 0.5", "--keep-unseen").count("new") == 5
    assert sources("--where", "visits == 0").count("new") == 5


def test_an_export_does_not_replace_what_it_reads(finished, tmp_path, refusal) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"key": "' + 32 * "a" + '", "score": [1, 0]}\n')
    assert "is what is read" in refusal("export", path, path, "--overwrite", status=2) and "score" in path.read_text()
    words = ("--data", finished.data, "--where", "visits > 0", "--overwrite")
    assert "is what is read" in refusal("export", finished.folder, finished.data, *words, status=2)
    assert pq.read_table(finished.data).num_rows == 60


def test_a_list_and_what_is_exported_are_of_the_same_prompts(tmp_path, call) -> None:
    """An evaluation without data sources: a hopeless prompt surprises among easy ones only, and the data tell these."""
    rows = [{**row, "data_source": "easy" if i < 150 else "hard"} for i, row in enumerate(hostile_rows(300))]
    data, out = write_dataset(tmp_path / "d.parquet", rows), tmp_path / "o.parquet"
    made = ((key, 0 if i == 3 or i >= 150 else 10 + i % 7) for i, key in enumerate(key_hex(dataset_keys(rows))))
    lines = [json.dumps({"key": key, "n": 16, "successes": right}) for key, right in made]
    (tmp_path / "e.jsonl").write_text("\n".join(lines))
    words = (tmp_path / "e.jsonl", "--data", data, "--where", "surprise >= 0.4")
    assert json.loads(call("stats", *words, "--json")[1])["selected"] == 1
    assert call("export", words[0], out, *words[1:])[0] == 0 and pq.read_table(out).to_pylist() == [rows[3]]


def test_rows_that_were_never_rolled_out_have_a_data_source(tmp_path, call) -> None:
    """The journal knows those that were; `source != "math"` kept math's others, `source == "math"` left them out."""
    rows = [{**row, "data_source": ("gsm8k", "math")[i % 2]} for i, row in enumerate(hostile_rows(60))]
    make_run(tmp_path / "run", rows=rows, steps=2, snapshot=False)
    data = write_dataset(tmp_path / "in.parquet", rows)
    for condition, kept in (("source != 'math'", "gsm8k"), ("source == 'math'", "math")):
        words = ("--data", data, "--where", condition, "--overwrite")
        assert call("export", tmp_path / "run", tmp_path / "o.parquet", *words)[0] == 0
        found = pq.read_table(tmp_path / "o.parquet").column("data_source").to_pylist()
        assert found == [kept] * 30


def test_a_foreign_data_set_and_an_empty_answer_are_refused(finished, tmp_path, refusal) -> None:
    foreign = write_dataset(tmp_path / "f.parquet", [{**r, "data_source": "other"} for r in hostile_rows(3)])
    words = ("--data", finished.data, "--where", "pass_rate > 2")
    for some, rows in ((("--data", foreign, "--where", "visits > 0"), 3), (words, 60)):
        assert f"none of the {rows} rows" in refusal("export", finished.folder, tmp_path / "o.parquet", *some)
    for name, some in (("o.csv", words), ("o.parquet", words[:2])):
        said = refusal("export", finished.folder, tmp_path / name, *some, status=2)
        assert "needs --where CONDITION, and a file to write that ends in .parquet" in said
    assert [path.name for path in tmp_path.iterdir()] == ["f.parquet"]


def test_data_without_rows_are_one_line(finished, tmp_path, refusal) -> None:
    """Damaged ones: tests/fuzz/test_files.py; that lack a column: above; that are not there: tests/report/test_report.py."""
    data = tmp_path / "d.parquet"
    pq.write_table(pq.read_table(finished.data).slice(0, 0), data)
    words = (finished.folder, tmp_path / "o.parquet", "--data", data, "--where", "visits > 0")
    assert data.name in refusal("export", *words)
