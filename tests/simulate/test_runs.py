"""Runs: what is measured against slow references, conservation, determinism, the oracles, the efficiency."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from verl_adaptive.config import RunFacts
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.significance import t95
from verl_adaptive.simulate import (
    REFERENCES,
    PoolConfig,
    Setting,
    compose_preset,
    make_simulation,
    preset_names,
    run_task,
    summarise,
    tasks,
)
from verl_adaptive.simulate.measure import Measure
from verl_adaptive.simulate.pools import make_pool
from verl_adaptive.simulate.presets import _composed
from verl_adaptive.simulate.worlds import StaticWorld

POOL = PoolConfig(prompts=200, failure=0.02)
SMALL = Setting(batch=8, n=8, steps=25, budget=25 * 64)
ALL = [*preset_names(), *REFERENCES]


def slow_row(preset: str, seed: int) -> dict[str, float]:
    """The same run, counted rollout by rollout and prompt by prompt."""
    world = make_pool(POOL, seed)
    simulation = make_simulation(preset, world, batch=8, n=8, steps=25, seed=seed, budget=SMALL.budget)
    last, gap, seen = dict.fromkeys(range(200), 0.0), dict.fromkeys(range(200), 0.0), set()
    signal = value = best = 0.0
    generated = trained = informative = trained_tokens = 0
    while not simulation.finished:
        passes, before = simulation.engine.total.rollouts.generated / 1600, world.rates().tolist()
        result = simulation.run_step()
        asked = 0
        for requests in simulation.requests:
            for i, n in zip(requests.index.tolist(), requests.n.tolist(), strict=True):
                value += n * 4 * before[i] * (1 - before[i])
                asked += n
                gap[i] = max(gap[i], passes - last[i])
                last[i] = passes
                seen.add(i)
        worth = sorted((4 * p * (1 - p) for p in before), reverse=True)
        best += asked * float(np.mean(worth[: -(-asked // 8)]))
        groups = result.groups
        generated += result.ledger.rollouts.generated
        for g in range(len(groups)):
            part = slice(groups.offsets[g], groups.offsets[g + 1])
            right = [s for s, t in zip(groups.success[part], result.trains[part], strict=True) if t]
            trained += len(right)
            trained_tokens += int(groups.tokens[part][result.trains[part]].sum())
            c, m = sum(right), len(right) - sum(right)
            signal += 4 * c * m / (c + m) if c + m else 0.0
            mixed = len(set(groups.signal[part])) > 1 and not groups.failed[g]
            informative += bool(mixed and result.trained[g])
    end = simulation.engine.total.rollouts.generated / 1600
    return {
        "generated": generated,
        "trained": trained,
        "trained_tokens": trained_tokens,
        "informative_groups": informative,
        "signal": signal / generated,
        "regret": 1 - value / best,
        "coverage": len(seen) / 200,
        "gap_longest": max(max(gap[i], end - last[i]) for i in gap),
        "pool_end": float(np.mean(world.rates())),
        "steps": simulation.step,
    }


@functools.cache
def row_of(preset: str) -> dict:
    """A small run's row."""
    return run_task(tasks([preset], [3], SMALL, POOL)[0])


@pytest.mark.parametrize("preset", ALL)
def test_a_row_equals_the_slow_count_and_every_rollout_is_accounted_for(preset) -> None:
    row = row_of(preset)
    slow = slow_row(preset, 3)
    assert {key: row[key] for key in slow} == pytest.approx(slow, rel=1e-9)
    assert row["generated"] == row["trained"] + sum(row["dropped"].values()) + row["held"] and row["held"] == 0
    assert row["generated"] >= SMALL.budget or row["ended"] == "sampler"


@pytest.mark.parametrize("preset", ["grpo", "greso", "pilot_commit", "oracle_best"])
def test_the_same_seed_gives_the_same_run_and_another_another(preset) -> None:
    rows = row_of(preset), *(run_task(tasks([preset], [seed], SMALL, POOL)[0]) for seed in (3, 0))
    one, again, other = ({k: v for k, v in row.items() if k not in ("seconds", "seed")} for row in rows)
    assert repr(one) == repr(again) != repr(other)  # a preset that keeps flat groups divides by none: nan


def test_a_run_of_fixed_steps_ends_there() -> None:
    row = run_task(tasks(["greso"], [0], Setting(8, 8, 7, None), POOL)[0])
    assert row["steps"] == 7 and row["ended"] == "steps"


def test_the_policy_is_told_what_it_is_told_in_training() -> None:
    words = "pilot_commit adaptive/sampler=mopps adaptive.allocator.form=pipelined adaptive.allocator.n_pilot=2"
    kept = {}
    for discount in (1.0, 0.5):
        line = f"{words} adaptive.stale_discount={discount} adaptive.tolerance=0.25"
        simulation = make_simulation(line, StaticWorld(np.full(60, 0.5)), batch=8, n=8, steps=12, seed=3)
        engine = simulation.engine
        assert engine.facts == RunFacts.of(engine.config, batch=8, n=8, steps=12, prompts=60)
        assert (engine.facts.seed, engine.facts.tolerance, engine.facts.stale_discount) == (3, 0.25, discount)
        list(simulation)
        learned = engine.policy.sampler.col("wins") + engine.policy.sampler.col("losses")
        kept[discount] = learned.sum() / engine.table.col("rollouts").sum()
    assert kept[1.0] == pytest.approx(1.0) and kept[0.5] < 0.9  # pilots wait for a step and count half


def test_nobody_puts_a_runs_facts_together_by_hand() -> None:
    """Three places did, and one of them forgot `adaptive.stale_discount`; a record gives back what it wrote."""
    root = Path(__file__).parents[2]
    files = [p for folder in ("verl_adaptive", "benchmarks") for p in (root / folder).rglob("*.py")]
    by_hand = {str(p.relative_to(root)) for p in files if "RunFacts(" in p.read_text().replace("class RunFacts(", "")}
    suites = {f"verl_adaptive/testing/{name}.py" for name in ("samplers", "components")}
    assert by_hand - suites <= {"verl_adaptive/record.py"}


# -- estimates --------------------------------------------------------------------------------------------------------


def test_estimates_are_the_samplers_own_where_it_keeps_some() -> None:
    world = StaticWorld(np.linspace(0, 1, 40))
    for preset, own in (("greso", False), ("grpo adaptive/sampler=mopps", True), ("cero", True)):
        simulation = make_simulation(preset, world, batch=8, n=8, steps=10)
        list(simulation)
        engine = simulation.engine
        table, made = engine.table, engine.policy.sampler.estimate(np.arange(len(engine.table)))
        plain = (1 + table.col("successes")) / (2 + table.col("rollouts"))
        if own:
            wins, losses = engine.policy.sampler.col("wins"), engine.policy.sampler.col("losses")
            assert made.tolist() == ((1 + wins) / (2 + wins + losses)).tolist()
        assert made == pytest.approx(plain, abs=1e-12)  # nothing is forgotten by default, so they agree


@pytest.mark.parametrize("preset", ["solo", "spo", "grpo adaptive/sampler=mopps_by_source"])
def test_estimates_of_one_rollout_a_prompt_know_the_data_source(preset) -> None:
    """A prompt with a single success is not at 2/3 where its source is hard."""
    world = StaticWorld(np.full(200, 0.1))
    simulation = make_simulation(preset, world, batch=8, n=2, steps=12)
    list(simulation)
    engine = simulation.engine
    seen = engine.row_of[engine.table.col("rollouts")[engine.row_of] > 0]
    plain = (1 + engine.table.col("successes")[seen]) / (2 + engine.table.col("rollouts")[seen])
    assert np.abs(engine.policy.sampler.estimate(seen) - 0.1).mean() < 0.7 * np.abs(plain - 0.1).mean()


def test_estimates_are_judged_on_every_prompt_seen() -> None:
    simulation = make_simulation("grpo", StaticWorld(np.linspace(0, 1, 80)), batch=8, n=8, steps=5)
    measure = Measure(simulation, 5)
    while not simulation.finished:
        measure.look()
        measure.count(simulation.run_step())
    row = measure.row()
    assert row["coverage"] == 0.5
    truth, engine = simulation.world.rates(), simulation.engine
    made = engine.policy.sampler.estimate(engine.row_of)
    off = np.array([made[i] - truth[i] for i in range(80) if measure.seen[i]])
    assert row["estimate_error"] == pytest.approx(np.sqrt((off**2).mean()))
    assert row["estimate_bias"] == pytest.approx(off.mean())


# -- oracles ----------------------------------------------------------------------------------------------------------


def test_the_best_oracle_has_no_regret_and_every_other_policy_some() -> None:
    rows = {preset: row_of(preset) for preset in ALL}
    assert rows["oracle_best"]["regret"] == pytest.approx(0.0, abs=1e-9)
    assert all(row["regret"] > 0.05 for name, row in rows.items() if name != "oracle_best")
    signal = {name: row["signal"] for name, row in rows.items()}
    assert max(signal, key=signal.__getitem__) == "oracle_best"


def test_the_oracle_sees_each_prompt_of_a_data_set_with_repetitions() -> None:
    """Equal keys share a row; the oracle must look the rate up at the row's own position."""
    p = np.array([0.0, 0.0, 0.5, 0.0, 0.45, 0.0])
    world = StaticWorld(p)
    world.keys = world.keys[[0, 0, 2, 3, 4, 0]]
    simulation = make_simulation("oracle_best", world, batch=2, n=4, steps=3)
    for result in simulation:
        assert sorted(result.groups.index.tolist()) == [2, 4]


# -- side by side -----------------------------------------------------------------------------------------------------


def fake(preset: str, seed: int, signal: float, pool: float = 0.5, compute: float = 1.0) -> dict:
    row = run_task(tasks(["grpo"], [0], Setting(4, 4, 1, None), PoolConfig(prompts=10))[0])
    return {**row, "preset": preset, "seed": seed, "signal": signal, "pool_end": pool, "compute": compute}


def test_efficiency_is_the_share_of_the_oracles_gain() -> None:
    rows = [fake("grpo", 0, 0.2), fake("grpo", 1, 0.3), fake("oracle_best", 0, 0.6), fake("oracle_best", 1, 0.7)]
    rows += [fake("x", 0, 0.4, compute=2.0), fake("x", 1, 0.6, compute=4.0)]
    by = {entry["preset"]: entry for entry in summarise(rows)}
    assert by["grpo"]["efficiency_signal"] == 0.0 and by["oracle_best"]["efficiency_signal"] == 1.0
    assert by["x"]["efficiency_signal"] == pytest.approx((0.2 + 0.3) / 2 / 0.4)
    assert by["x"]["efficiency_signal_half"] == pytest.approx(t95(2) * np.std([0.2, 0.3], ddof=1) / np.sqrt(2) / 0.4)
    assert by["x"]["signal"] == pytest.approx(0.5) and by["x"]["signal_half"] == pytest.approx(1.2706)
    assert by["x"]["compute_ratio"] == pytest.approx(3.0)
    assert by["x"]["efficiency_pool_end"] is None  # the oracle gained nothing
    alone = summarise([row for row in rows if row["preset"] == "x"])[0]
    assert alone["efficiency_signal"] is None and alone["compute_ratio"] is None
    nothing = summarise([fake("grpo", 0, 0.2, compute=0.0), fake("x", 0, 0.2, compute=0.0)])
    assert [entry["compute_ratio"] for entry in nothing] == [
        None,
        None,
    ]  # no rollout trained, and no warning of numpy's


# -- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("gres", "did you mean greso"),
        ("orakle_best", "did you mean oracle_best"),
        ("", "must name a preset"),
        ("greso 'x", "No closing quotation"),
        ("greso adaptive.sampler.p_eazy=1", r"did you mean adaptive.sampler.p_easy\?"),
        ("greso data.train_batch_size=8", "write --batch 8"),
        ("greso trainer.nnodes=8", "adaptive.* only"),
        ("greso adaptive.total_rollouts=512", "write --budget 512"),
        ("greso adaptive.seed=3", "write --seeds 3"),
        ("greso adaptive.warm_start=earlier.parquet", "begins with nothing known"),
        ("greso adaptive.success.threshold=2", "a simulated rollout succeeds or does not"),
        ("greso adaptive.signal=acc", "a simulated rollout succeeds or does not"),
        ("greso adaptive.min_sessions=1.0", "a group fails or is whole"),
        ("greso adaptive.sampler.p_easy=[", "no viable alternative"),
        ("oracle_best adaptive.seed=3", "takes no overrides"),
    ],
)
def test_a_preset_that_cannot_be_is_refused(preset, message) -> None:
    with pytest.raises(AdaptiveError, match=message):
        make_simulation(preset, StaticWorld(np.zeros(10)), batch=2, n=4, steps=2)


def test_rows_of_zero_advantage_train_where_they_are_said_to() -> None:
    trained = {}
    for words in ("grpo", "grpo adaptive.skip_zero_advantage=false"):
        run = list(make_simulation(words, StaticWorld(np.linspace(0, 1, 40)), batch=8, n=4, steps=5))
        trained[words] = sum(result.ledger.rollouts.trained for result in run)
    first, second = trained.values()
    assert first < second == 5 * 8 * 4


def test_composing_leaves_hydra_as_it_was() -> None:
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    _composed.cache_clear()
    with initialize_config_module("hydra_configs.verl_adaptive", version_base=None):
        compose_preset(["greso"])
        assert compose(overrides=["+adaptive=cero"]).adaptive.name == "cero"
    assert not GlobalHydra.instance().is_initialized()
    compose_preset(["dapo"])
    assert not GlobalHydra.instance().is_initialized()
