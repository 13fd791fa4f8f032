"""Alarms and lists beside a run: through verl's own logger, and never in the way of training."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import transfer_queue as tq
from verl.utils import tensordict_utils as tu

from tests.world import keys_of, make_engine, run_step
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.integration import monitor
from verl_adaptive.integration.tables import lists_now
from verl_adaptive.report.lists import COLUMNS
from verl_adaptive.stats.state import decode_state, encode_state


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "verl_adaptive")
    return caplog


def watched(monkeypatch, steps: int, *, tracking=None, fields=frozenset(), **config):
    engine, world = make_engine(filter="keep_all", batch=16, n=8, M=60, p=np.where(np.arange(60) < 50, 0.6, 0.0))
    monkeypatch.setattr(monitor, "_fields", lambda keys: fields)
    made = AdaptiveConfig.from_mapping({"name": "t", **config})
    looker = monitor.Monitor(made, engine, longest=3, tracking=lambda: tracking)
    out = []
    for step in range(1, steps + 1):
        out.append(looker.step(step, run_step(engine, world, step), []))
    return engine, out


def test_metrics_and_lines_come_out(monkeypatch, told) -> None:
    _, out = watched(monkeypatch, 8)
    assert "adaptive/alarm/never_solved" in out[-1] and any(k.startswith("adaptive/source/") for k in out[-1])
    assert any("docs/metrics.md#alarms" in r.getMessage() for r in told.records) == any(
        out[-1][f"adaptive/alarm/{kind}"] for kind in ("cut", "never_solved", "jumped", "starved")
    )


def test_turned_off_it_is_off(monkeypatch) -> None:
    assert watched(monkeypatch, 2, alarms={"enabled": False})[1] == [{}, {}]


def test_trouble_is_said_once_and_training_goes_on(monkeypatch, told) -> None:
    def breaks(*_, **__):
        raise RuntimeError("no such field")

    monkeypatch.setattr(monitor.Judge, "step", breaks)
    _, out = watched(monkeypatch, 3)
    assert out == [{}, {}, {}]
    (line,) = [r.getMessage() for r in told.records if "off from now on" in r.getMessage()]
    assert "RuntimeError: no such field" in line and "training goes on" in line


@pytest.mark.parametrize(
    ("rewards", "accs", "differs"),
    [
        ([0.25, -1.5, 3.125], [0.25, -1.5, 3.125], False),  # a bare number, as verl has it
        ([0.0, 0.1, 0.1], [0.0, 0.1, 0.1], False),  # also where these rows have two values of it
        ([0.0, 1.0, 1.0], [False, True, None], False),
        ([0.25, -1.5, 3.125], [0.25, None, "no"], False),  # nothing that adaptive.signal could be
        ([0.0, 1.0, 0.5], [False, np.True_, np.False_], True),
        ([0.25, -1.5, 3.125], [0.0, -1.5, 3.125], True),
    ],
)
def test_an_acc_that_is_the_reward_is_no_other_field(queue, rewards, accs, differs) -> None:
    keys = [f"u_{i}_0" for i in range(len(rewards))]
    rows = [
        {"rm_scores": torch.tensor([0.0] * i + [reward]), "extra_fields": {"reward_extra_info": {"acc": acc}}}
        for i, (reward, acc) in enumerate(zip(rewards, accs, strict=True))
    ]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.list_of_dict_to_tensordict(rows), tags=[{}] * len(keys))
    assert monitor._fields(keys) == ({"acc"} if differs else frozenset())


@pytest.mark.parametrize(("differs", "expected"), [(5, [4, 5]), (99, [4, 5, 6])])
def test_a_bare_number_that_is_graded_late_is_no_unused_acc(monkeypatch, told, differs, expected) -> None:
    """Rewards of 0 and 0.1 at first, then 1: verl's ``acc`` was taken for another field, and setting it changes nothing."""
    engine, world = make_engine(batch=16, n=8, M=60, p=np.full(60, 0.5))
    looker = monitor.Monitor(AdaptiveConfig(), engine, longest=1000, tracking=lambda: None)
    asked = []
    fields = lambda keys: asked.append(step) or frozenset({"acc"} if step >= differs else ())  # noqa: E731
    monkeypatch.setattr(monitor, "_fields", fields)
    for step in range(1, 9):
        result = run_step(engine, world, step)
        result.groups.reward = np.append(0.1 * (step == 3), result.groups.reward[1:])
        out = looker.step(step, result, [])
    assert asked == expected  # once it is graded, until an acc differs, and three times at most
    assert out["adaptive/alarm/unused_acc"] == (differs == 5)
    assert sum("adaptive.signal=acc" in r.getMessage() for r in told.records) == (differs == 5)


def test_a_resumed_run_says_nothing_twice(monkeypatch, told) -> None:
    """A never-solved source is said before the checkpoint, so the run that goes on from it does not say it again."""

    def steps(count: int, state: dict | None) -> tuple[dict, list[str]]:
        told.clear()
        twice = keys_of(60)[np.arange(60) % 40]
        engine, world = make_engine(filter="keep_all", batch=16, n=8, p=np.zeros(60), keys=twice)
        config = AdaptiveConfig.from_mapping({"name": "t"})
        looker = monitor.Monitor(config, engine, longest=1000, tracking=lambda: None)
        if state is not None:
            looker.load_state_dict(decode_state(encode_state(state)))
        for step in range(1, count + 1):
            looker.step(step, run_step(engine, world, step), [])
        return looker.state_dict(), [r.getMessage() for r in told.records if "alarm:" in r.getMessage()]

    monkeypatch.setattr(monitor, "_fields", lambda keys: frozenset({"acc"}))
    state, lines = steps(3, None)
    assert len(lines) == 2 and "repeat" in lines[0] and "not one success" in lines[1]
    again, lines = steps(3, state)
    assert lines == []
    assert again["alarms"]["counts"]["all"].sum() == 2 * state["alarms"]["counts"]["all"].sum()


def test_a_state_that_cannot_be_taken_up_stops_no_run(monkeypatch, told) -> None:
    engine, _ = make_engine()
    looker = monitor.Monitor(AdaptiveConfig(), engine, longest=3, tracking=lambda: None)
    looker.load_state_dict({"alarms": {"names": ["a"]}})
    (line,) = [r.getMessage() for r in told.records]
    assert "alarms are off from now on, training goes on: KeyError" in line


def test_lists_name_the_prompts_that_nobody_solves(monkeypatch) -> None:
    engine, _ = watched(monkeypatch, 20)
    lists = lists_now(engine.table)
    assert len(lists["never_solved"]) == 10
    assert all(dict(zip(COLUMNS, row, strict=True))["pass_rate"] == 0 for row in lists["never_solved"])
    assert lists["likely_wrong_labels"]


def test_lists_go_to_tensorboard_through_verls_logger(monkeypatch, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    tracking = Tracking("p", "e", ["tensorboard", "console"])
    engine, _ = watched(monkeypatch, 20, tracking=tracking, log_lists=10)
    tracking.finish()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert sorted(tags) == [f"adaptive/lists/{n}/text_summary" for n in sorted(lists_now(engine.table))]
    written = events.Tensors("adaptive/lists/never_solved/text_summary")
    assert [e.step for e in written] == [10, 20]
    text = written[-1].tensor_proto.string_val[0].decode()
    (first, *_) = lists_now(engine.table)["never_solved"]
    assert first[0] in text and text.count("\n") == 11


def test_lists_go_to_wandb_through_verls_logger(monkeypatch, tmp_path) -> None:
    wandb = pytest.importorskip("wandb")
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracking = Tracking("p", "e", ["wandb"], config={})
    try:
        alerts = []
        monkeypatch.setattr(wandb, "alert", lambda **what: alerts.append(what["text"]))
        engine, _ = watched(monkeypatch, 10, tracking=tracking, log_lists=10)
    finally:
        tracking.finish()
    found = sorted(p.name for p in tmp_path.rglob("*.table.json"))
    assert len(found) == 3 and alerts and "(unknown)" in alerts[0]
    text = next(p for p in tmp_path.rglob("never_solved*.table.json")).read_text()
    assert all(row[0] in text for row in lists_now(engine.table)["never_solved"])
