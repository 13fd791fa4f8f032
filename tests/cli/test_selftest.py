"""``verl-adaptive selftest``: its words and its page; the runs are tests/e2e/test_selftest.py's."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.cli.lines import composed
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration import guard
from verl_adaptive.integration.selftest import suite, verdicts
from verl_adaptive.integration.selftest.runs import ProcessRun
from verl_adaptive.integration.selftest.suite import PLAIN, Item, Report


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--presets", "gresso"], "--presets gresso: must be all, or among aero, cero"),
        (["--timeout", "0"], "0 must be 1 or greater"),
        # the page said that verl itself did not train, or that steps were missing
        (
            ["--", "+adaptive=solo"],
            "-- +adaptive=solo: overrides are plain verl's, too; choose presets with --presets",
        ),
        (
            ["--", "trainer.total_training_steps=9"],
            "total_training_steps=9: each run of the self-test has its own, and is judged by it; leave it out",
        ),
    ],
)
def test_wrong_words(words, says, call) -> None:
    code, _, said = call("selftest", *words)
    assert code == 2 and says in said


def test_a_package_that_is_only_importable_is_refused_before_anything_runs(monkeypatch, tmp_path) -> None:
    """On PYTHONPATH alone plain verl trained for minutes, and each preset was then told to unset a variable that was not set."""
    monkeypatch.setattr(guard, "entry_points", lambda group: ())
    with pytest.raises(AdaptiveError, match="only importable here; install verl-adaptive again"):
        suite.examine(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_said_in_one_line(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(suite, "_installed", lambda module: module not in ("torch", "vllm", "sglang"))
    with pytest.raises(AdaptiveError, match="^torch, vllm or sglang: not installed in this environment; activate"):
        suite.examine(tmp_path)


def test_the_page_names_what_failed_and_nobody() -> None:
    plain = Item(PLAIN, 30.2, ["trains"], [], {"s/step": 2.0, "probs diff": 1.2e-7})
    greso = Item("+adaptive=greso", 33.0, ["trains"], [], {"s/step": 3.0, "aborted": 17})
    report = Report({"verl": "0.9.1"}, {"cores": 2}, {"strategy": "fsdp"}, [plain, greso], finished=True)
    said = suite.page(report)
    assert report.passed and said.startswith("verl-adaptive selftest: passed, 2 checks of 2 items")
    row = next(line for line in said.splitlines() if "+adaptive=greso" in line).split()
    assert row[:6] == ["ok", "+adaptive=greso", "33", "s", "1.50", "3"] and "17" in row
    assert "strategy: fsdp" in said and "1.2e-07" in said and "if plain verl failed" not in said
    report.items.append(Item("greso in separate_async", 1150.0, facts={"s/step": 1.5}, mode="separate_async"))
    # no space between; and half of a step in which generation and training take turns is no half of the time
    assert re.search(r"greso in separate_async 1150 s +1\.5$", suite.page(report), re.MULTILINE)
    report.items.append(Item("+adaptive=solo", findings=["status 1: RuntimeError: out of memory"]))
    assert not report.passed and "FAILED (+adaptive=solo)" in suite.page(report)
    assert "out of memory" in suite.page(report) and json.dumps(report.as_json())
    assert not Report({}, {}).passed  # nothing was tried


@pytest.fixture
def stages(monkeypatch):
    """The suite with its runs replaced by what they are called; ``broken`` names those that fail."""
    made: list[str] = []
    broken: set[str] = set()

    def tool(item, folder, env, timeout, module, *said):
        made.append(item.name)
        if module == "gradient":
            settings = {"strategy": "fsdp"}
            found = {"machine": {"accelerators": []}, "settings": settings, "ranks": 2, "gradient": {}}
            (folder / "gradient.json").write_text(json.dumps(found))

    def train(folder, said, env, timeout, kill_at=None):
        name = Path(folder).name
        made.append(f"{name}{' killed' * bool(kill_at)}")
        return ProcessRun(folder, 1 if name in broken else 0, "RuntimeError: no device", [])

    monkeypatch.setattr(suite, "missing", str)
    monkeypatch.setattr(suite, "_tool", tool)
    monkeypatch.setattr(suite, "count_gpus", lambda env, timeout: (0, ""))
    monkeypatch.setattr(suite, "_train", train)
    monkeypatch.setattr(suite, "_ended", lambda item, run: not run.code or item.findings.append(run.log))
    monkeypatch.setattr(suite, "_judged", lambda item, run, *_: suite._ended(item, run))
    monkeypatch.setattr(suite, "_resumed", lambda item, folder, *_: suite._ended(item, train(folder, [], {}, 1, 3)))
    return made, broken


def test_the_same_command_goes_on_where_it_was_interrupted(stages, tmp_path) -> None:
    made, broken = stages
    last = ["solo-in-colocate_async", "greso-in-separate_async"]
    broken |= {*last}
    assert not suite.examine(tmp_path).passed
    first = [*made]
    assert first == ["tiny model", "gradient", "plain-verl", "killed killed", *last]
    for failing in ([last[1]], []):  # each attempt goes on where the one before it failed
        heard: list[str] = []
        tried = sorted(broken, reverse=True)
        made.clear()
        broken.clear()
        broken |= {*failing}
        report = suite.examine(tmp_path, say=heard.append)
        assert made == tried and report.passed == (not failing) and len(report.items) == len(first)
    assert report.machine["accelerators"] == []
    assert "plain verl: passed earlier, in this folder" in heard
    assert json.loads((tmp_path / "selftest.json").read_text())["passed"]
    assert (tmp_path / "selftest.txt").read_text().startswith("verl-adaptive selftest: passed")
    suite.examine(tmp_path, presets=["greso"], overrides=["trainer.nnodes=1"])
    assert made[1:3] == ["tiny model", "gradient"]  # other overrides begin anew


def test_what_passed_without_a_gpu_is_tried_again_where_there_is_one(stages, tmp_path, monkeypatch) -> None:
    """A folder on shared storage, begun on a login node."""
    made, _ = stages
    assert suite.examine(tmp_path, presets=["greso"]).passed
    first = [*made]
    made.clear()
    monkeypatch.setattr(suite, "count_gpus", lambda env, timeout: (6, ""))
    report = suite.examine(tmp_path, presets=["greso"])
    assert made == first and "2 of 6 GPUs" in suite.page(report)


def test_a_page_that_is_read_while_it_runs_does_not_say_passed(stages, tmp_path, monkeypatch) -> None:
    def train(folder, *_, **__):
        said = (tmp_path / "selftest.txt").read_text()
        assert said.startswith("verl-adaptive selftest: unfinished, nothing wrong so far")
        assert not json.loads((tmp_path / "selftest.json").read_text())["passed"]
        return ProcessRun(folder, 0, "", [])

    monkeypatch.setattr(suite, "_train", train)
    assert suite.examine(tmp_path, presets=["greso"]).passed


def test_where_torch_cannot_be_imported_there_may_be_gpus(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    with pytest.raises(AdaptiveError, match=r"libcudart\.so\.13"):
        suite.count_gpus({**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60)


def test_a_gpu_that_torch_cannot_use_is_no_machine_without_one(tmp_path) -> None:
    (tmp_path / "torch.py").write_text(
        "import sys, types\ncuda = types.SimpleNamespace(is_available=lambda: False)\n"
        "print('x.py:1: UserWarning: CUDA initialization: the driver is too old (12040).', file=sys.stderr)\n"
        "print('  return torch._C._cuda_getDeviceCount() > 0', file=sys.stderr)\n"
    )
    found = suite.count_gpus({**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60)
    assert found == (0, " (CUDA initialization: the driver is too old (12040).)")


def test_flash_attn_4_is_not_what_transformers_asks_for(monkeypatch, tmp_path) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)  # its module has flash-attn 2's name
    monkeypatch.syspath_prepend(tmp_path)
    assert suite._installed("flash_attn") and not suite.has_flash_attn()


def test_of_an_engine_that_does_not_start_the_cause_is_said() -> None:
    """The page said: Engine core initialization failed. See root cause above."""
    cause = "ValueError: Free memory on device cuda:0 (20.1/79.2 GiB) on startup is less than desired"
    actor = "\x1b[36m(vLLMHttpServer pid=553)\x1b[0m"
    failed = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    remote = "ray.exceptions.RayTaskError(RuntimeError): \x1b[36mray::vLLMHttpServer.launch_server()\x1b[39m (pid=553)"
    log = f"{actor} {cause}\n{remote}\n{failed}\n"
    assert suite.last_words(log) == f"(vLLMHttpServer pid=553) {cause}"
    assert (
        suite.last_words(f"{remote}\n{failed}") == failed and suite.last_words(log + "KeyError: 'x'") == "KeyError: 'x'"
    )


def test_a_queue_that_cannot_be_saved_is_not_asked_to_be(stages, tmp_path, monkeypatch) -> None:
    """With verl 0.9.0 and the TransferQueue that it pins, our own refusal failed the asynchronous runs."""
    saved = {}
    train = suite._train

    def note(folder, said, *rest, **more):
        saved[Path(folder).name] = [word for word in said if word.startswith("trainer.save_freq=")]
        return train(folder, said, *rest, **more)

    monkeypatch.setattr(suite, "_train", note)
    monkeypatch.setattr(suite.compat, "queue_lacks", lambda: "TransferQueue 0.1.8 has no save_checkpoint")
    suite.examine(tmp_path)
    assert saved["plain-verl"] == ["trainer.save_freq=3"]
    assert saved["solo-in-colocate_async"] == saved["greso-in-separate_async"] == ["trainer.save_freq=-1"]


def test_where_no_process_group_can_be_made_the_trainings_are_tried_all_the_same(stages, tmp_path, monkeypatch) -> None:
    """The page did not say that no preset had been tried."""
    made, _ = stages
    monkeypatch.setattr(suite, "_gradient", lambda item, *a: item.findings.append("NCCL error"))
    report = suite.examine(tmp_path)
    assert made[:2] == ["tiny model", "plain-verl"] and made[-1] == "greso-in-separate_async"
    assert report.finished and "FAILED (gradient)" in suite.page(report)


def test_a_gradient_that_ended_in_a_crash_has_said_on_what_machine(tmp_path, monkeypatch) -> None:
    """The first hour's page, and its sizes, need it."""
    from verl_adaptive.integration.selftest import gradient

    monkeypatch.setattr(gradient, "machine", lambda: {"accelerators": ["NVIDIA H100"], "memory of one (GiB)": 79})
    monkeypatch.setattr(gradient.torch.multiprocessing, "spawn", lambda *_, **__: pytest.fail("NCCL error"))
    monkeypatch.setattr(sys, "argv", ["gradient", "model", str(tmp_path / "gradient.json")])

    def crash(item, folder, *_):
        with pytest.raises(pytest.fail.Exception):
            gradient.main()
        item.findings.append("failed: NCCL error")

    monkeypatch.setattr(suite, "_tool", crash)
    item = suite.Item("gradient")
    (tmp_path / "gradient.json").write_text("an earlier attempt's")
    suite._gradient(item, tmp_path, {}, 1, [])
    assert item.facts["machine"]["memory of one (GiB)"] == 79 and item.findings == ["failed: NCCL error"]
    monkeypatch.setattr(suite, "_tool", lambda item, *_: item.findings.append("no torch"))
    suite._gradient(other := suite.Item("gradient"), tmp_path, {}, 1, [])
    assert not other.facts  # nothing of what another attempt left


def test_where_plain_verl_fails_nothing_else_is_tried(stages, tmp_path) -> None:
    made, broken = stages
    broken.add("plain-verl")
    report = suite.examine(tmp_path)
    assert made[-1] == "plain-verl" and "FAILED (plain verl)" in suite.page(report)
    assert "verl itself does not train here" in suite.page(report)


def test_a_run_that_is_killed_without_a_checkpoint_is_found(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(suite, "_train", lambda folder, *_, **__: ProcessRun(folder, -9, ""))
    item = Item("greso, SIGKILL, resume")
    suite._resumed(item, tmp_path / "killed", [], {}, 1)
    assert "there is no checkpoints/global_step_2/adaptive" in item.findings[0]


def metrics(step: int, **other: float) -> dict:
    made = dict.fromkeys(verdicts.METRICS, 1.0) | {"training/global_step": step}
    for unit in ("rollouts", "tokens"):
        own = {"generated_total": 10, "trained_total": 6, "dropped_total": 4, "dropped_total/informative": 4}
        made |= {f"adaptive/{unit}/{k}": v for k, v in {**own, "held": 0}.items()}
        made[f"adaptive/cumulative/{unit}_generated"] = 10 * step
    return {**made, **other}


@pytest.mark.parametrize(
    ("code", "log", "steps", "found"),
    [
        (
            *(1, "Traceback\nRuntimeError: it is away\nbye\n", []),
            "status 1 after steps [] of [1, 2, 3]: RuntimeError",  # its last error
        ),
        (
            *(0, "", [metrics(i, **{"training/rollout_probs_diff_mean": 0.1}) for i in (1, 2, 3)]),
            "log-probs of rollout and actor differ by 0.1 in the first step",
        ),
        # every run of a preset: only the one that was resumed was judged by what is lost, and the page said it of all
        (
            *(0, "", [metrics(1), metrics(2, **{"adaptive/rollouts/trained_total": 5}), metrics(3)]),
            "step 2: 10 rollouts generated or held, 9 accounted for",
        ),
    ],
    ids=["ends early", "log-probs", "lost"],
)
def test_what_is_wrong_with_a_run_is_found(code, log, steps, found, tmp_path) -> None:
    item = Item("+adaptive=greso")
    suite._judged(item, ProcessRun(tmp_path, code, log, steps))
    assert any(finding.startswith(found) for finding in item.findings), item.findings


@pytest.mark.parametrize(
    ("differences", "mode", "dead"),
    [
        ((3e-7, 0.0039, 0.0061), "sync", True),  # on the CPU, an engine that never gets the trained weights
        ((3e-7, 0.0230, 0.0500), "sync", True),
        ((2.5e-7, 2.7e-7, 2.9e-7), "sync", False),
        ((0.00035, 0.00059, 0.00038), "sync", False),  # bfloat16
        ((0.0100, 0.0102, 0.0097), "sync", False),
        ((3e-7, 0.0140, 0.0145), "separate_async", False),  # which trains on what older weights generated
    ],
)
def test_an_engine_that_does_not_get_the_trained_weights_is_found(differences, mode, dead, tmp_path) -> None:
    """The mean over the steps was compared with 0.02: a selftest passed in which no weights were ever sent."""
    item = Item("+adaptive=greso", mode=mode)
    steps = [metrics(i, **{"training/rollout_probs_diff_mean": d}) for i, d in enumerate(differences, 1)]
    assert suite._ended(item, ProcessRun(tmp_path, 0, "", steps))
    assert bool(item.findings) == dead and ("does not get the trained weights" in " ".join(item.findings)) == dead


@pytest.mark.parametrize(
    ("log", "slept"),
    [("(vLLMHttpServer pid=1) It took 0.5 seconds to fall asleep.", 1), ("(SGLangHttpServer pid=1)", None)],
)
def test_an_engine_that_does_not_say_when_it_sleeps_is_not_said_to_stay_awake(log, slept, tmp_path) -> None:
    item = Item("+adaptive=greso")
    assert suite._ended(item, ProcessRun(tmp_path, 0, log, [metrics(i) for i in (1, 2, 3)]))
    assert item.facts.get("slept") == slept


def test_what_is_not_accounted_for_is_found(tmp_path) -> None:
    whole = ProcessRun(tmp_path, 0, "", [metrics(1), metrics(2)])
    assert verdicts.imbalance(whole) == []
    unnamed = ProcessRun(tmp_path, 0, "", [metrics(1, **{"adaptive/tokens/dropped_total": 5})])
    assert verdicts.imbalance(unnamed) == ["step 1: 5 tokens dropped, 4 with a reason"]
    del whole.metrics[1]["adaptive/updates_total"]
    assert verdicts.absent(whole) == ["adaptive/updates_total is missing in some step"]
    assert verdicts.differences(whole) == ["nothing was recorded"]


@pytest.mark.parametrize(
    ("gpus", "flash", "preset"), [(0, False, True), (1, True, True), (suite.usable(6), False, True), (1, True, False)]
)
def test_the_words_of_a_run_compose_and_validate(gpus, flash, preset, tmp_path, monkeypatch) -> None:
    """Those for GPUs, too, which no test can run."""
    inspect = pytest.importorskip("verl_adaptive.integration.inspect")
    composing = pytest.importorskip("verl_adaptive.integration.composing")
    from verl_adaptive.integration.selftest.gradient import settings

    monkeypatch.setattr(suite, "_installed", lambda module: True)
    monkeypatch.setattr(suite, "has_flash_attn", lambda: flash)
    presets = {"sync": ["+adaptive=greso"], **suite._modes(gpus)}
    for mode, more in presets.items() if preset else [("sync", [])]:
        if more is None:
            assert gpus == 1 and mode == "separate_async"
            continue
        words = [*suite.words(tmp_path, gpus, mode), *suite._own(tmp_path, 4, 2), *more]
        config = composing.compose(composing.Command.parse([*words, *[suite.RECORD] * preset]))
        if preset:
            inspect.validate(config)
        found = settings(words)
        assert found["strategy"] == ("fsdp" if gpus else "fsdp2") and found["engine"].startswith("vllm")
        assert found["actor dtype"] == ("bfloat16" if gpus else "float32")  # the page said bfloat16 of both
        assert found["ranks"] == (max(1, gpus) if mode != "separate_async" or not gpus else 2)
        sdpa = config.actor_rollout_ref.model.override_config.get("attn_implementation") == "sdpa"
        assert sdpa == (not gpus or not flash) and config.actor_rollout_ref.model.use_remove_padding == (not sdpa)


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_words_of_every_preset_compose_and_validate(gpus, stages, tmp_path, monkeypatch) -> None:
    """Those of `sao` were refused: it has a critic, and not the estimator of the others."""
    said: list[list[str]] = []
    monkeypatch.setattr(suite, "count_gpus", lambda env, timeout: (gpus, ""))
    monkeypatch.setattr(suite, "has_flash_attn", lambda: False)
    monkeypatch.setattr(
        suite, "_train", lambda folder, words, *_, **__: said.append(words) or ProcessRun(folder, 0, "")
    )
    assert suite.examine(tmp_path, presets=suite.PRESETS).passed
    for name, words in zip(suite.PRESETS, said[1:], strict=True):  # after plain verl
        config, _ = composed(words)
        assert config.adaptive.name == name and config.critic.model.override_config.attn_implementation == "sdpa"
        assert config.adaptive.stall_timeout == 300  # the run is ended after 1200 s, which say nothing of the cause


def test_what_was_exported_for_something_else_does_not_reach_the_runs(monkeypatch) -> None:
    """`ray job submit` hands its job's packages on, which another cluster does not have; a CPU platform is none of a GPU's."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}')
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    mine = suite.own_ray()
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" not in mine and mine["RAY_ADDRESS"] == "local"
    assert "VERL_PLATFORM" not in suite.on_platform(mine, 1) and suite.on_platform(mine, 0)["VERL_PLATFORM"] == "cpu"
    assert suite.on_platform({"VERL_PLATFORM": "npu"}, 1) == {"VERL_PLATFORM": "npu"}
    assert guard.other_plugins() == "cpu"


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_platform_that_was_exported_reaches_no_item_on_a_gpu(gpus, stages, tmp_path, monkeypatch) -> None:
    """The gradient had it: verl's collectives would have had tensors of the CPU there, for NCCL."""
    platforms: list[str | None] = []
    tool = suite._tool

    def noted(item, folder, env, *said):
        platforms.append(env.get("VERL_PLATFORM"))
        tool(item, folder, env, *said)

    monkeypatch.setattr(suite, "_tool", noted)
    monkeypatch.setattr(suite, "count_gpus", lambda env, timeout: (gpus, ""))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    suite.examine(tmp_path)
    assert platforms == [None if gpus else "cpu"] * 2
