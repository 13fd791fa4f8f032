"""What a run says of itself: ten lines at the start, and one for each step."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import replace

import numpy as np
import pytest
from verl.trainer.ppo.v1 import get_trainer_cls

from tests.cli.stores import hostile_rows, write_dataset
from tests.world import Arrivals, World, make_async_engine, make_engine, run_step
from verl_adaptive.cli import main
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine import AsyncFacts, StepResult
from verl_adaptive.engine import make_engine as make
from verl_adaptive.errors import ConfigError
from verl_adaptive.integration import composing, inspect, monitor, step_metrics
from verl_adaptive.integration.replay_buffer import AdaptiveReplayBuffer
from verl_adaptive.stats import StatsTable

MINIMAL = (
    "+adaptive=greso algorithm.adv_estimator=grpo data.train_batch_size=8 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=4 trainer.n_gpus_per_node=2 "
    "actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.ppo_epochs=3"
)


def lines_of(steps: int, caplog, made) -> list[tuple[StepResult, dict[str, float], str]]:
    """Result, metrics and line of each step of an engine and its world."""
    engine, world = made
    arrivals, out = Arrivals(world), []
    for step in range(1, steps + 1):
        result = arrivals.step(engine, step)
        caplog.clear()
        with caplog.at_level(logging.INFO, "verl_adaptive"):
            metrics = step_metrics.step_metrics(engine, result, [], updates=0)
        (record,) = caplog.records
        out.append((result, metrics, record.getMessage()))
    return out


def test_every_step_has_a_line(caplog) -> None:
    engine, world = make_engine(sampler="greso", filter="informative", batch=8, n=8, M=40, p=np.linspace(0, 1, 40))
    for step, (result, metrics, line) in enumerate(lines_of(2, caplog, (engine, world)), 1):
        rollouts = result.ledger.rollouts
        informative = int(metrics["adaptive/groups/informative_total"])
        assert line.startswith(
            f"step {step}/{engine.facts.steps}: {len(result.groups)} groups: {informative} informative, {result.trained.sum()} train"
        )
        assert informative == round(metrics["adaptive/groups/informative_share"] * len(result.groups))
        shares = [(result.groups.pass_rate == rate).mean() for rate in (1, 0)]
        assert [metrics[f"adaptive/groups/all_{name}_share"] for name in ("correct", "wrong")] == shares
        for name, values in (("reward", result.groups.reward), ("response_length", result.groups.tokens)):
            found = [metrics[f"adaptive/{name}/generated_{kind}"] for kind in ("mean", "max")]
            assert found == [values.mean(), values.max()] and found[1] > 0
        assert f"| {rollouts.generated} rollouts, {rollouts.trained / rollouts.generated:.0%} trained | " in line
        assert line.endswith(f"epoch {metrics['adaptive/prompts/epoch']:.2f}") and "\n" not in line and len(line) < 160


def test_what_a_step_waited_for_is_said(caplog) -> None:
    engine, world = make_engine(batch=8, n=8, M=40, p=np.full(40, 0.5))
    times = {"adaptive/time/generation": 75.0, "adaptive/time/last_tenth": 30.0}
    with caplog.at_level(logging.INFO, "verl_adaptive"):
        metrics = step_metrics.step_metrics(engine, run_step(engine, world, 1), [], updates=0, times=times)
    assert metrics.items() >= times.items() and " | 75 s of generation, 30 s of them for" in caplog.text


def test_a_rollout_is_cut_when_one_of_its_outputs_is() -> None:
    """Three outputs of 400 tokens are 1,200, and none is cut at 1,000: for the step's metrics and for the alarms."""
    engine, world = make_engine(batch=8, n=8, M=40, p=np.full(40, 0.5))
    looker = monitor.Monitor(AdaptiveConfig(), engine, longest=1000, tracking=lambda: None)
    looker._asked = 3  # what the reward function gives is no matter here
    for step, cut in enumerate((0, 0, 16), 1):
        result = run_step(engine, world, step)
        result.groups.tokens, result.groups.shorter = np.full(64, 1200), np.repeat([200, 800], [cut, 64 - cut])
        found = step_metrics.step_metrics(engine, result, [], updates=0, max_response_length=1000)
        found |= looker.step(step, result, [])
        (share,) = (value for name, value in found.items() if name.startswith("adaptive/source/cut_share"))
        assert share == found["adaptive/response_length/generated_clip_ratio"] == cut / 64


def test_a_step_whose_groups_all_failed_has_no_informative_one() -> None:
    """A broken judge looked like the best data there is."""
    engine, world = make_engine(batch=8, n=8, M=40, p=np.full(40, 0.5))
    result = run_step(engine, world, 1)
    result.groups.failed = np.ones(8, dtype=bool)
    metrics = step_metrics.step_metrics(engine, result, [], updates=0)
    assert metrics["adaptive/groups/failed_total"] == 8 and metrics["adaptive/groups/informative_share"] == 0


def test_the_lag_is_that_of_groups_that_train() -> None:
    engine, world = make_engine(batch=8, n=8, M=40, p=np.full(40, 0.5))
    result = run_step(engine, world, 1)
    result.groups.lag, result.outcome[7] = np.arange(8), "uninformative"
    metrics = step_metrics.step_metrics(engine, result, [], updates=0)
    assert [metrics[f"adaptive/trained_lag_{kind}"] for kind in ("mean", "max")] == [3.0, 6.0]


def test_a_warm_start_visits_nothing() -> None:
    """What it brought are another run's visits: the share began at 1, and never told how far this run had come."""
    engine, world = make_engine(batch=8, n=8, M=40, p=np.full(40, 0.5))
    table = engine.table
    for name, value in (("visits", 2), ("rollouts", 16), ("successes", 0.0), ("first_rate", 0.0), ("last_rate", 0.0)):
        table.col(name)[:] = value
    metrics = step_metrics.step_metrics(engine, run_step(engine, world, 1), [], updates=0)
    assert metrics["adaptive/prompts/visited_share"] == 8 / 40
    assert metrics["adaptive/pass_rate/started_hard"] == metrics["adaptive/pass_rate/generated_mean"] > 0


def test_prompts_started_hard_or_easy_are_those_that_the_report_calls_so() -> None:
    engine, world = make_engine(batch=4, n=4, M=4, p=np.full(4, 0.5))
    run_step(engine, world, 1)
    engine.table.col("first_rate")[engine.pool] = [0.2, 0.25, 0.75, 0.8]
    engine.table.col("last_rate")[engine.pool] = [0.125, 0.25, 0.5, 1.0]
    found = step_metrics._forgetting(engine)
    assert {name.rpartition("_")[2]: value for name, value in found.items()} == {
        "hard": 0.125,
        "middle": 0.375,
        "easy": 1.0,
    }


def test_a_step_without_rollouts_has_a_line() -> None:
    names = ("groups/trained_total", "groups/finished_total", "groups/informative_total")
    names += ("pass_rate/generated_mean",)
    names += ("rollouts/dropped_total", "rollouts/trained_total", "rounds_total", "prompts/epoch")
    line = step_metrics.progress_line({f"adaptive/{name}": 0.0 for name in names}, 3, None)
    assert line.startswith("step 3: 0 groups: 0 informative, 0 train | 0 rollouts | pass rate")
    ones = step_metrics.progress_line({f"adaptive/{name}": 1.0 for name in names}, 3, None)
    assert ones.startswith("step 3: 1 group: 1 informative, all train | 2 rollouts, 50% trained")
    single = {f"adaptive/{name}": float("dropped" not in name) for name in names}
    assert "1 prompt of one rollout, all train | 1 rollout," in step_metrics.progress_line(single, 3, None, single=True)


def test_groups_of_one_are_prompts_and_not_called_uninformative(caplog) -> None:
    """Also where a session raised, which returns nothing: there were 15 rollouts of 16 groups, "0 informative"."""
    world = World(np.full(64, 0.5), failure=0.1)
    steps = lines_of(4, caplog, make_engine("spread", advantage="memory", batch=16, n=1, world=world))
    assert sum(metrics["adaptive/groups/failed_total"] for _, metrics, _ in steps) > 0
    for step, (result, _, line) in enumerate(steps, 1):
        train = "all" if result.trained.all() else result.trained.sum()
        assert line.startswith(f"step {step}/100: {len(result)} prompts of one rollout, {train} train | ")


def test_an_asynchronous_step_trains_no_more_than_there_was(caplog) -> None:
    """Of its groups, not of what was generated meanwhile: the last step's are there before it, and it said "400% trained"."""
    made = make_async_engine(batch=8, n=4, steps=6, async_facts=AsyncFacts(warmup=16), skip_zero=False)
    steps = lines_of(6, caplog, made)
    for result, _, line in steps:
        rollouts = result.ledger.rollouts
        assert (
            f"| {result.groups.rollouts} rollouts, {rollouts.trained / result.groups.rollouts:.0%} trained | " in line
        )
        assert "groups: " in line and rollouts.trained + rollouts.dropped_in_all == result.groups.rollouts
    assert any(result.ledger.rollouts.generated < result.ledger.rollouts.trained for result, _, _ in steps)


@pytest.mark.parametrize("make_one", [make_engine, make_async_engine])
@pytest.mark.parametrize("sampler", ["epoch", "spread"])
def test_passes_over_the_data_include_this_step(caplog, make_one, sampler) -> None:
    """Of prompts picked from the pool the first step said 0.00."""
    for step, (_, metrics, line) in enumerate(lines_of(3, caplog, make_one(sampler, batch=8, n=4, M=32)), 1):
        generated = metrics["adaptive/cumulative/rollouts_generated"]
        passes = step / 4 if sampler == "epoch" else generated / (4 * 32)
        assert metrics["adaptive/prompts/epoch"] == passes > 0 and line.endswith(f"epoch {passes:.2f}")


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_parts_without_a_preset_get_the_buffer_that_presets_name(mode) -> None:
    """verl builds what ``custom_sampler`` names, and nothing but a preset names ours."""
    words = [word for word in MINIMAL.split() if not word.startswith("+adaptive=")]
    words += [f"trainer.v1.trainer_mode={mode}", "+adaptive={sampler:{name:greso}}"]
    trainer = get_trainer_cls(mode).adaptive()(composing.compose(composing.Command(tuple(words))))
    assert isinstance(trainer.replay_buffer, AdaptiveReplayBuffer)


def test_the_trainer_and_doctor_have_one_plan(tmp_path, capsys, monkeypatch) -> None:
    """Of verl's own trainer, before its workers; and the last line is a command that works."""
    monkeypatch.chdir(tmp_path)
    data = write_dataset(tmp_path / "train.parquet", hostile_rows(40))
    words = [
        *MINIMAL.split(),
        f"trainer.default_local_dir={tmp_path}/ck pt",
        f"data.train_files={data}",
        f"data.val_files={data}",
    ]
    words += [
        "actor_rollout_ref.model.path=some/model",
        "data.filter_overlong_prompts=false",
        "adaptive.total_rollouts=100000",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "trainer.total_epochs=3",
    ]
    config = composing.compose(composing.Command(tuple(words)))
    seen = inspect.foresee(config, inspect.validate(config))
    trainer = get_trainer_cls("sync").adaptive()(config)
    policy = trainer.plan.policy
    trainer.tokenizer = trainer.processor = None
    trainer._init_dataloader()
    plan, engine = trainer.plan, trainer.engine
    # verl's own: separate_async takes a step that waits longer for an idle one
    assert trainer.replay_buffer.poll_interval == 2.0
    assert trainer.replay_buffer.rollout_client is trainer.rollout_client
    assert trainer.train_dataloader is trainer.stream.loader  # verl checkpoints it
    assert engine.policy is plan.policy is policy and engine.facts == plan.facts == seen.facts
    assert seen.first_round == 64 and "no checkpoint" in seen.resume  # what only doctor looks at
    seen = replace(seen, first_round=None, resume="")
    assert plan.as_dict() == seen.as_dict() and plan.lines() == seen.lines()
    assert (plan.steps, plan.groups, plan.n, plan.prompts) == (15, 8, 8, 40)
    lines = step_metrics.banner(trainer)
    assert lines[0].startswith("verl-adaptive ") and {f"  {k:<8} {v}" for k, v in plan.lines()} <= set(lines)
    assert "the learning rate would not have decayed" in "".join(plan.notes)
    labels = [line.split()[0] for line in lines[1:]]
    assert labels == [*dict(plan.lines()), "data", "start", "look", *["note"] * len(plan.notes), "curves"]
    said = "\n".join(lines)
    assert "100,000 rollouts" in said and "6 optimizer updates" in said  # two minibatches, three epochs of PPO
    assert "left out of training (same gradient" in said and "40 distinct prompts" in said and "pg_clipfrac" in said
    trainer.run_store.begin(0)
    trainer.run_store.commit(1, run_step(engine, World(np.full(40, 0.5)), 1), engine)
    trainer.run_store.close()
    capsys.readouterr()
    look = shlex.split(next(line for line in lines if line.split()[0] == "look"))
    assert look[:3] == ["look", "verl-adaptive", "stats"]
    assert main([*look[2:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["preset"] == "greso"
    config.adaptive.warm_start = f"{tmp_path}/gone"
    other = get_trainer_cls("sync").adaptive()(config)
    other.tokenizer = other.processor = None
    with pytest.raises(ConfigError, match=r"^adaptive\.warm_start=.*/gone"):  # before a model is loaded
        other._init_dataloader()


def test_what_a_resume_begins_with_is_bound_once_more(tmp_path) -> None:
    """A policy is built once a run; a checkpoint brings another table, and decisions are those of a fresh policy."""
    for words in ("sampler=greso", "sampler=cero", "sampler=spread advantage=memory", "sampler=retire allocator=aero"):
        parts = dict(word.split("=") for word in words.split())
        first, twice = (make_engine(batch=8, n=8, M=40, refill=False, **parts)[0] for _ in range(2))
        table = StatsTable()
        row_of = table.rows_for(twice.table.keys)
        again = make(twice.policy, table, twice.config, twice.facts, row_of, World(np.full(40, 0.5)).source)
        first.prompt_source.stream = World(np.full(40, 0.5)).source
        asked = [engine.begin(1) for engine in (first, again)]
        assert np.array_equal(asked[0].row, asked[1].row) and np.array_equal(asked[0].n, asked[1].n), words
