"""``examples/gpu_first_hour.sh``: its lines compose, its page says what the runs left; the runs are the rehearsal's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples import gpu_first_hour as hour
from tests.cli.lines import composed
from tests.programs import ran
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.selftest import suite
from verl_adaptive.integration.selftest.runs import ProcessRun, call

ROOT = Path(__file__).parents[1]


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come in a minute")


@pytest.mark.parametrize("gib", [0, 12, 24, 47, 80])
def test_its_lines_compose_and_validate(gib, tmp_path) -> None:
    """Those for a GPU, too, which no test can run; and in a folder with letters that Hydra's grammar has not."""
    tmp_path = tmp_path / "x=1,é 项目 (2)#'~"
    sizes = hour.sizes_of(gib) if gib else hour.REHEARSAL
    words = hour.words(tmp_path / "solo-1", tmp_path, "model", sizes, int(gib > 0))
    config, _ = composed(["+adaptive=solo", "adaptive.seed=1", *words])
    assert config.data.train_files == f"{tmp_path}/train.parquet" and config.data.val_files == f"{tmp_path}/val.parquet"
    assert config.trainer.default_local_dir == f"{tmp_path}/solo-1/checkpoints"
    assert config.adaptive.total_rollouts == sizes.steps * sizes.batch * sizes.n
    assert config.actor_rollout_ref.actor.fsdp_config.param_offload == (0 < gib < 20)
    assert config.actor_rollout_ref.actor.strategy == ("fsdp" if gib else "fsdp2")


def test_the_page_says_what_the_runs_left(tmp_path) -> None:
    steps = [
        {"val-core/a/acc/mean@1": 0.25, "val-core/b/acc/mean@1": 0.35},
        {"training/global_step": 1, "adaptive/rollouts/generated_total": 1024, "timing_s/step": 12.4},
        {"training/global_step": 2, "timing_s/step": 11.6, "val-core/a/acc/mean@1": 0.4, "val-core/b/acc/mean@1": 0.5},
    ]
    lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
    (tmp_path / "metrics-0.jsonl").write_text("\n".join(lines))
    found = hour.summary(tmp_path)
    assert found == {"steps": 2, "rollouts": 1024, "trained": 0, "seconds": 24, "accuracy": [0.3, 0.45]}
    machine = {"accelerators": ["NVIDIA H100"], "cores": 16, "memory (GiB)": 128}
    selftest = {"passed": True, "machine": machine, "versions": {"verl": "0.9.1"}, "items": []}
    rows = [{"preset": "grpo", "seed": 1, "status": "", **found}]
    said = hour.page(rows, selftest, "solo minus grpo, final value")
    row = next(line for line in said.splitlines() if line.startswith("grpo"))
    assert row.split() == ["grpo", "1", "2", "1024", "0", "24", "0.300", "0.450"]
    assert "NVIDIA H100" in said and "selftest passed" in said and "solo minus grpo, final value" in said


@pytest.mark.parametrize(
    ("given", "gpus", "said"),
    [
        ([], 0, "no GPU was found (the driver is too old); --cpu-rehearsal runs without"),
        (["--cpu-rehearsal"], 1, "leave --cpu-rehearsal out"),
        (["--data", "nowhere"], 1, "--data nowhere: train.parquet"),
        (None, None, "No module named 'numpy'"),
    ],
)
def test_what_cannot_run_is_refused_before_the_selftest(given, gpus, said, tmp_path, monkeypatch, capsys) -> None:
    def count(env, timeout):
        if gpus is None:  # a broken environment is no machine without a GPU
            raise AdaptiveError("torch cannot be asked for GPUs in this environment: No module named 'numpy'")
        return gpus, " (the driver is too old)" * (not gpus)

    monkeypatch.setattr(hour, "count_gpus", count)
    assert hour.main(["--out", str(tmp_path / "out"), *(given or [])]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_padded_rows_get_smaller_micro_batches_and_fewer_steps() -> None:
    for gib in (12, 24, 47, 80):
        packed, padded = hour.sizes_of(gib), hour.sizes_of(gib, packed=False)
        assert padded.tokens == packed.tokens // 2 and 4 <= padded.steps < packed.steps


def test_what_cannot_be_fetched_is_said_before_the_selftest(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(hour, "count_gpus", lambda env, timeout: (1, ""))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hour, "make_gsm8k", lambda folder: 1 / 0)
    monkeypatch.setattr(hour, "_call", lambda *words, log: pytest.fail("the selftest began"))
    (tmp_path / "model").mkdir()
    assert hour.main(["--out", str(tmp_path / "out"), "--model", str(tmp_path / "model")]) == 2
    assert (
        "cannot be fetched (ZeroDivisionError" in (said := capsys.readouterr().err) and "name --model <folder>" in said
    )


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """The status and the page of an hour whose selftest found one item wrong, and whose trainings end as one is told to."""
    out = tmp_path / "out"
    for name in ("train", "val"):
        (tmp_path / f"{name}.parquet").touch()
    machine = {"accelerators": ["NVIDIA H100"], "memory of one (GiB)": 79, "cores": 16, "memory (GiB)": 128}
    item = suite.Item("greso in separate_async", findings=["wrong"], mode="separate_async")

    def call(*words, log):
        if words[1] != "selftest":
            return int(words[1] == "compare")
        (out / "selftest").mkdir()
        made = suite.Report({"verl": "0.9.1"}, machine, items=[item], finished=True).as_json()
        (out / "selftest" / "selftest.json").write_text(json.dumps(made))
        return 1

    def run(trained: ProcessRun, *words: str) -> tuple[int, str]:
        def train(folder, said, env, timeout):
            assert (
                timeout == 18000
            )  # 100 steps were ended after an hour, before their first checkpoint, again and again
            return trained

        monkeypatch.setattr(hour, "train", train)
        status = hour.main(["--out", str(out), "--model", str(tmp_path), "--data", str(tmp_path), *words])
        return status, (out / "page.txt").read_text()

    monkeypatch.setattr(hour, "count_gpus", lambda env, timeout: (1, ""))
    monkeypatch.setattr(hour, "end_on_signals", lambda: None)
    monkeypatch.setattr(hour, "_call", call)
    return run


def test_a_run_that_fails_the_page_says_what_is_missing_and_what_to_do(page_of, tmp_path) -> None:
    """It said nothing of the runs that were not begun, nor which item of the selftest had failed."""
    status, said = page_of(ProcessRun(tmp_path, 1, "torch.OutOfMemoryError: CUDA out of memory."), "--steps", "100")
    assert status == 1 and "selftest FAILED (greso in separate_async: see selftest/selftest.txt), 1 run\n" in said
    assert "CUDA out of memory. (see grpo-1/log.txt)" in said
    assert (
        "no comparison: a run or its report failed, and 5 were not begun; after a mend the same command goes on" in said
    )


def test_one_preset_is_compared_with_nothing(page_of, tmp_path) -> None:
    """`compare` takes two arms, and the hour ended with "compare failed"."""
    _, said = page_of(ProcessRun(tmp_path, 0, ""), "--steps", "100", "--presets", "solo")
    assert "no comparison: there is one preset" in said and "failed:" not in said


@pytest.mark.parametrize(
    ("failed", "overrides", "trains"),
    [
        ("greso in separate_async", [], True),
        ("greso, SIGKILL, resume", [], True),  # grpo and solo abort nothing
        ("gradient", [], False),
        ("gradient", ["adaptive.skip_zero_advantage=false"], True),
        (suite.PLAIN, ["adaptive.skip_zero_advantage=false"], False),
    ],
)
def test_what_must_have_passed_before_the_trainings(failed, overrides, trains) -> None:
    """One preset that failed kept all from training, and no option led past it."""
    names = ("gradient", suite.PLAIN, "greso, SIGKILL, resume", "greso in separate_async")
    items = [suite.Item(name, findings=["wrong"] * (name == failed)) for name in names]
    made = suite.Report({}, {}, items=items, finished=True)
    assert hour.may_train(made.as_json(), overrides) == trains
    made.finished = False
    assert not hour.may_train(made.as_json(), overrides) and not hour.may_train({}, overrides)


def test_gsm8k_is_what_verls_own_reward_scores(tmp_path, monkeypatch) -> None:
    """The hub's rows are stand-ins, since no test reaches it; format and answers are GSM8K's."""
    datasets = pytest.importorskip("datasets")
    scorer = pytest.importorskip("verl.utils.reward_score")
    asked = [
        {"question": f"How many is {n}?", "answer": f"It is <<{n}={n}>>{n}.\n#### {n:,}"} for n in range(998, 1003)
    ]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: asked)
    hour.make_gsm8k(tmp_path, val=2)
    train, val = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert (len(train), len(val)) == (5, 2) and hour.INSTRUCTION in train[0]["prompt"][0]["content"]
    truth = train[2]["reward_model"]["ground_truth"]
    assert truth == "1000" and train[2]["data_source"] == "openai/gsm8k"
    said = ("so\n#### 1,000", "so\n#### 1000", "so\n#### 999")
    assert [scorer.default_compute_score("openai/gsm8k", answer, truth) for answer in said] == [1.0, 1.0, 0.0]


def test_a_preset_that_does_not_exist_is_refused_before_the_selftest(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        hour.main(["--out", str(tmp_path / "out"), "--presets", "grpo", "soloo"])
    assert "invalid choice: 'soloo'" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # it was taken for the default
        hour.main(["--out", str(tmp_path / "out"), "--steps", "0"])
    assert "--steps: 0 must be 1 or greater" in capsys.readouterr().err


def test_steps_that_an_interrupted_run_made_again_count_once(tmp_path) -> None:
    def attempt(number: int, steps: range) -> None:
        made = [
            {"training/global_step": step, "adaptive/rollouts/generated_total": 1024, "timing_s/step": 10.0 + number}
            for step in steps
        ]
        lines = [json.dumps({"step": one["training/global_step"], "data": one}) for one in made]
        (tmp_path / f"metrics-{number}.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "da')

    attempt(0, range(1, 4))
    attempt(1, range(3, 5))
    found = hour.summary(tmp_path)
    assert (found["steps"], found["rollouts"], found["seconds"]) == (4, 4096, 42)
    words = hour.words(tmp_path, tmp_path, "model", hour.sizes_of(80), 1)
    assert "trainer.save_freq=7" in words  # of 14: there is a checkpoint to go on from


def test_a_folder_is_not_gone_on_with_under_other_options(tmp_path) -> None:
    assert not hour.begun_otherwise(tmp_path / "grpo-1", ["trainer.save_freq=2"])
    assert not hour.begun_otherwise(tmp_path / "grpo-1", ["trainer.save_freq=2"])
    assert hour.begun_otherwise(tmp_path / "grpo-1", ["trainer.save_freq=20"])


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP])
def test_ended_by_a_scheduler_or_a_lost_terminal_it_leaves_no_training_behind(ends, tmp_path) -> None:
    """First hour, its selftest, the training that has a session of its own: the signal reaches the first alone."""
    (tmp_path / "middle.py").write_text(
        "import os, pathlib\n"
        "from verl_adaptive.integration.selftest.runs import call, end_on_signals\n"
        "end_on_signals()\n"
        "said = 'import os, pathlib, time; pathlib.Path(\"pid\").write_text(str(os.getpid())); time.sleep(600)'\n"
        "here = pathlib.Path.cwd()\n"
        "call(here, ['-c', said], here / 'metrics-0.jsonl', 600, None, os.environ)\n"
    )
    said = (
        "import pathlib, signal; from examples.gpu_first_hour import _call, end_on_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # these tests may run under nohup, which ignores it
        "end_on_signals(); _call('middle', log=pathlib.Path('middle.log'))"
    )
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    first = subprocess.Popen([sys.executable, "-c", said], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        training = int((tmp_path / "pid").read_text())
        first.send_signal(ends)
        assert first.wait(timeout=60) == 128 + ends
        wait_for(lambda: not Path(f"/proc/{training}").exists())
    finally:
        first.kill()


def test_it_trains_with_what_the_selftest_trained_with(tmp_path, monkeypatch) -> None:
    """Without flash-attn, and with SGLang in vLLM's place, the self-test passes: the runs after it must not fail for that."""
    monkeypatch.setattr(suite, "_installed", lambda module: module == "sglang")
    monkeypatch.setattr(suite, "has_flash_attn", lambda: False)
    tested, trained = suite.words(tmp_path, 2), hour.words(tmp_path, tmp_path, "model", hour.sizes_of(80), 2)
    assert set(suite.on_gpus(2)) <= set(tested) & set(trained)
    assert "actor_rollout_ref.rollout.name=sglang" in trained
    assert "+actor_rollout_ref.model.override_config.attn_implementation=sdpa" in trained
    assert "ray_kwargs.ray_init.num_cpus=32" in trained  # on eight cores verl would wait for slots that never come
    assert suite._modes(2)["separate_async"] is None  # no cupy: verl's way to send weights there


@pytest.mark.parametrize(
    ("difference", "said"), [(0.1, "differ by 0.1 in the first step"), (float("nan"), "no number in any step")]
)
def test_a_plain_verl_whose_engine_and_trainer_disagree_has_not_passed(difference, said, tmp_path) -> None:
    step = {"actor/grad_norm": 1.0, "training/rollout_probs_diff_mean": difference}
    item = suite.Item(suite.PLAIN)
    suite._plain(item, ProcessRun(tmp_path, 0, "", [{"training/global_step": i, **step} for i in (1, 2, 3)]))
    assert said in item.findings[0]


def test_a_run_out_of_time_says_so_what_it_had_made_and_where_its_log_is(tmp_path) -> None:
    made = json.dumps({"step": 1, "data": {"training/global_step": 1}})
    code = f"import os, time; open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write({made!r}); time.sleep(600)"
    status, said = call(tmp_path, ["-c", code], tmp_path / "metrics-0.jsonl", 5, None, os.environ)
    remote = "ray.exceptions.RayTaskError(OutOfMemoryError): no memory"
    assert suite.last_words(f"{remote}\nbye") == remote
    item = suite.Item("+adaptive=solo")
    suite._ended(item, ProcessRun(tmp_path, status, said, hour.read_metrics(tmp_path / "metrics-0.jsonl")))
    where = f"runs/{tmp_path.name}/log.txt"
    assert item.findings == [
        f"status 124 after steps [1] of [1, 2, 3]: TimeoutError: it did not end within 5 s (see {where})"
    ]


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_the_rehearsal(tmp_path) -> None:
    from tests.e2e.harness import environment

    command = ("bash", ROOT / "examples" / "gpu_first_hour.sh", "--cpu-rehearsal", "--out", "hour")
    done = ran(*command, cwd=tmp_path, timeout=7000, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "hour" / "page.json").read_text())["runs"]
    assert [run["preset"] for run in runs] == ["grpo", "solo", "greso"]
    assert all(run["rollouts"] >= 2 * 16 * 8 - 8 and len(run["accuracy"]) == 2 for run in runs)
    assert all((tmp_path / "hour" / f"{run['preset']}-1" / "report.html").exists() for run in runs)
    assert "selftest passed" in (tmp_path / "hour" / "page.txt").read_text()
