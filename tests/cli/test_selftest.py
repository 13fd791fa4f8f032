"""``verl-adaptive selftest``: its words and its page; the runs are tests/e2e/test_selftest.py's."""

from __future__ import annotations

import json

import pytest

from verl_adaptive.integration.selftest import suite, verdicts
from verl_adaptive.integration.selftest.runs import Run
from verl_adaptive.integration.selftest.suite import Item, Report


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--presets", "gresso"], 2, "--presets gresso: must be among greso, grpo"),
        (["--quick", "--presets", "solo"], 2, "--quick is one preset"),
        (["--keep", "."], 1, ". exists; name another folder"),
        (["--timeout", "0"], 2, "0 must be 1 or greater"),
    ],
)
def test_wrong_words(words, status, says, call) -> None:
    code, _, said = call("selftest", *words)
    assert code == status and says in said


def test_every_preset_is_tried() -> None:
    from verl_adaptive.commands.parts import describe

    assert set(suite.PRESETS) == set(describe()["presets"])


def test_the_page_names_what_failed_and_nobody() -> None:
    report = Report({"verl": "0.9.1"}, {"cores": 2}, [Item("gradient", 3.2, ["same"], [], {"float32": {"x": 1.2e-7}})])
    assert report.passed and suite.page(report).startswith("verl-adaptive selftest: passed, 1 checks of 1 items")
    assert "x 1.2e-07" in suite.page(report)
    report.items.append(Item("+adaptive=greso", findings=["status 1: RuntimeError: out of memory"]))
    assert not report.passed and "FAILED (+adaptive=greso)" in suite.page(report)
    assert "out of memory" in suite.page(report) and json.dumps(report.as_json())
    assert not Report({}, {}).passed  # nothing was tried


def test_a_run_that_ends_early_is_told_by_its_last_error(tmp_path) -> None:
    run = Run(tmp_path, 1, "Traceback\nRuntimeError: it is away\nbye\n")
    item = suite._judged("+adaptive=greso", run, 3, 1.0)
    assert "status 1 after 0 of 3 steps: RuntimeError" in item.findings[0]


def metrics(step: int, **other: float) -> dict:
    made = {"training/global_step": step}
    for unit in ("rollouts", "tokens"):
        own = {"generated_total": 10, "trained_total": 6, "dropped_total": 4, "dropped_total/informative": 4}
        made |= {f"adaptive/{unit}/{k}": v for k, v in {**own, "surplus_total": 0, "held": 0}.items()}
        made[f"adaptive/cumulative/{unit}_generated"] = 10 * step
    return {**made, **other}


def test_what_is_not_accounted_for_is_found(tmp_path) -> None:
    whole = Run(tmp_path, 0, "", [metrics(1), metrics(2)])
    assert verdicts.imbalance(whole) == []
    lost = Run(tmp_path, 0, "", [metrics(1), metrics(2, **{"adaptive/rollouts/trained_total": 5})])
    assert verdicts.imbalance(lost) == ["step 2: 10 rollouts generated or held, 9 accounted for"]
    unnamed = Run(tmp_path, 0, "", [metrics(1, **{"adaptive/tokens/dropped_total": 5})])
    assert verdicts.imbalance(unnamed) == ["step 1: 5 tokens dropped, 4 with a reason"]
    assert "adaptive/updates_total is missing in some step" in verdicts.absent(whole)
    assert verdicts.differences(whole) == ["nothing was recorded"]


@pytest.mark.parametrize(("on_cpu", "flash"), [(True, False), (False, True), (False, False)])
def test_the_words_of_a_run_compose_and_validate(on_cpu, flash, tmp_path, monkeypatch) -> None:
    """Those for a GPU, too, which no test can run."""
    inspect = pytest.importorskip("verl_adaptive.integration.inspect")
    monkeypatch.setattr(suite, "_installed", lambda module: flash if module == "flash_attn" else True)
    words = [*suite._words(tmp_path, on_cpu), "+adaptive=greso", "trainer.total_training_steps=3"]
    config = inspect.compose(inspect.Command.parse(words))
    inspect.validate(config)
    assert config.adaptive.record is True and config.actor_rollout_ref.actor.strategy == "fsdp2"
    sdpa = config.actor_rollout_ref.model.override_config.get("attn_implementation") == "sdpa"
    assert sdpa == (on_cpu or not flash) and config.actor_rollout_ref.model.use_remove_padding == (not sdpa)
