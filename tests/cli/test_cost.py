"""``verl-adaptive doctor`` says what a command line costs beside plain GRPO, and what it knows that from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from tests.cli.lines import MINIMAL
from tests.cli.stores import hostile_rows, make_run, write_dataset
from tests.stats.made import journal_of
from verl_adaptive import simulate
from verl_adaptive.commands import cost as costing
from verl_adaptive.commands import doctor
from verl_adaptive.commands.cost import ASSUMED, Cost, group_shares
from verl_adaptive.errors import Exhausted
from verl_adaptive.groups import Groups
from verl_adaptive.integration import composing, inspect
from verl_adaptive.stats import dataset_keys


@pytest.fixture(autouse=True)
def no_platform(monkeypatch, simulated_once) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(costing, "_SIZE", 128)  # a quarter of the rollouts of a simulated step


@pytest.fixture
def cost(call, tmp_path):
    """The cost of a command line with 128 prompts, and what is printed of it."""
    data = write_dataset(tmp_path / "train.parquet", hostile_rows(128))

    def run(*overrides: str) -> tuple[Cost, dict[str, str]]:
        words = (*MINIMAL, f"trainer.default_local_dir={tmp_path}/ckpt", f"data.train_files={data}", *overrides)
        status, out, err = call("doctor", "--json", "--", *words)
        assert status == 0 and err == "", out
        found = Cost(**json.loads(out)["plan"]["cost"])
        return found, dict(found.lines())

    return run


@given(rates=st.lists(st.floats(0, 1), min_size=200, max_size=200), n=st.integers(2, 8), more=st.integers(0, 8))
@settings(max_examples=20)
def test_the_share_is_that_of_the_pass_rates(rates, n, more) -> None:
    """Without bias: over many prompts it is the mean of 1 - p^n - (1 - p)^n."""
    p = np.tile(rates, 30)
    right = np.random.default_rng(n).binomial(n + more, p)
    mixed, hopeless = group_shares(np.full(len(p), n + more), right, n)
    assert mixed == pytest.approx(max(1e-3, np.mean(1 - p**n - (1 - p) ** n)), abs=0.03)
    if mixed < 0.5:
        assert hopeless == pytest.approx(np.mean((1 - p) ** n) / np.mean(p**n + (1 - p) ** n), abs=0.1)


def test_the_share_of_prompts_with_few_rollouts_and_of_none() -> None:
    assert group_shares(np.zeros(3), np.zeros(3), 8) is None
    mixed, hopeless = group_shares(np.ones(4), np.array([0.0, 1.0, 1.0, 0.0]), 8)
    assert 0 < mixed < 1 and hopeless == pytest.approx(0.5)
    assert group_shares(np.full(4, 16), np.zeros(4), 8) == (1e-3, 1.0)
    assert group_shares(np.full(4, 16), np.full(4, 16.0), 8) == (1e-3, 0.0)


@pytest.mark.parametrize("rewards", [True, False])
def test_graded_rewards_vary_where_nobody_succeeds(tmp_path, rewards) -> None:
    """Rewards of 0 to 0.4 are no success and all the variance that GRPO needs; the cost was that of a hopeless pool."""
    keys, rng = dataset_keys(hostile_rows(128)), np.random.default_rng(0)
    values = rng.random((128, 16)) * 0.4 if rewards else np.zeros((128, 16))
    groups = Groups.from_lists(np.arange(128), values.tolist(), success=np.zeros((128, 16)).tolist())
    journal_of(tmp_path / "earlier", groups, keys)
    config = composing.compose(
        composing.Command((*MINIMAL, "+adaptive=dapo", f"adaptive.warm_start={tmp_path}/earlier"))
    )
    share, _, known_from = costing.yield_of(inspect.foresee(config, inspect.validate(config)))
    assert share == pytest.approx(1.0 if rewards else 0.0, abs=0.1) and "of the warm start" in known_from


def test_a_rescue_costs_by_what_the_warm_start_failed(cost, tmp_path) -> None:
    """Half of the prompts are half right; the cost was the same whether the others were all wrong or all right."""
    keys, found = dataset_keys(hostile_rows(128)), {}
    for rest in (0.0, 1.0):
        groups = Groups.from_lists(np.arange(128), [[0.0, 1.0] * 8 if i % 2 else [rest] * 16 for i in range(128)])
        journal_of(tmp_path / f"earlier-{rest:g}", groups, keys)
        found[rest] = cost("+adaptive=aero", f"adaptive.warm_start={tmp_path}/earlier-{rest:g}")[0]
    assert found[0.0].share == pytest.approx(found[1.0].share) and found[0.0].factor > found[1.0].factor + 0.15


def test_the_share_where_the_signal_is_known_is_no_other_for_zeros_and_ones() -> None:
    right = np.random.default_rng(0).binomial(16, np.linspace(0, 1, 500))
    varied = (right > 0) & (right < 16)
    assert group_shares(np.full(500, 16), right, 8, varied)[0] == group_shares(np.full(500, 16), right, 8)[0]
    halves = np.full(4, 8.0)  # success in parts: every rollout half right
    assert group_shares(np.full(4, 16), halves, 8, np.zeros(4, dtype=bool)) == (1e-3, 0.5)


def test_grpo_costs_what_grpo_costs(cost) -> None:
    found, lines = cost("+adaptive=grpo", "trainer.total_epochs=5")
    assert (found.grpo_step, found.grpo_total, found.step, found.factor) == (1024, 10_240, 1024, 1.0)
    assert lines["cost"] == "the same: this is GRPO's cost" and "equal cost" not in lines
    assert found.passes == 5.0
    found, lines = cost("+adaptive=grpo", "adaptive.max_rollouts_per_step=512")
    assert found.step == 512 and "the same" not in lines["cost"]


def test_a_preset_that_refills_costs_more_and_says_how_to_spend_the_same(cost) -> None:
    found, lines = cost("+adaptive=dapo", "trainer.total_epochs=10")
    assert found.grpo_total == 20_480 and found.factor > 1.5 and found.step > 1.5 * 1024
    assert found.total == found.step * 20 and found.share == ASSUMED
    assert "if 50% of GRPO's groups are informative" in lines["cost"] and "assumed" in lines["cost"]
    assert "generation time" in lines["time"]
    assert found.equal == "adaptive.total_rollouts=20480" and 0 < found.equal_steps < 20
    assert "spends what GRPO would" in lines["equal cost"]
    assert found.range[0] < found.factor < found.range[1]
    assert f"about {costing._two(found.time_factor)} x GRPO's generation time" in lines["time"]
    assert cost("+adaptive=dapo", "adaptive.max_rounds=1")[0].range is None  # "1 x if 70% are, 1 x if 30% are"
    spent, lines = cost("+adaptive=dapo", "trainer.total_epochs=10", found.equal)
    assert spent.total == 20_480 and "equal cost" not in lines


def test_what_was_measured_stands_beside_it_for_the_preset_as_shipped(cost) -> None:
    found, lines = cost("+adaptive=greso", "trainer.total_epochs=10")
    assert lines["measured"].startswith(found.measured) and "x GRPO's rollouts" in found.measured
    assert lines["cost"].startswith("simulated: ") and lines["time"].startswith("simulated: ")
    first, later = map(costing._two, found.by_pass)
    assert f"(first pass {first} x, later {later} x)" in lines["cost"] and "(first pass " in lines["time"]
    table = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"| {found.measured.split(' ±')[0]} |" in re.search(r"^.*adaptive=greso`.*$", table, flags=re.M)[0]
    for other in ("adaptive.sampler.target=0.1", "adaptive.max_rollouts_per_step=1024", "adaptive.max_rounds=1"):
        found, lines = cost("+adaptive=greso", other, "trainer.total_epochs=10")
        assert found.measured == "" and "measured" not in lines
    assert "measured" not in cost("+adaptive=grpo", "trainer.total_epochs=5")[1]


def test_a_preset_that_generates_less_needs_more_steps_and_epochs_for_the_same(cost) -> None:
    """verl ends with the epochs or with the steps, whichever comes first; both words are needed."""
    found, _ = cost("+adaptive=aero", "trainer.total_epochs=10")
    assert found.equal_steps > 20
    words = dict(word.split("=") for word in found.equal.split())
    assert int(words["trainer.total_training_steps"]) == found.equal_steps
    assert 2 * int(words["trainer.total_epochs"]) >= found.equal_steps > 2 * (int(words["trainer.total_epochs"]) - 1)
    spent, _ = cost("+adaptive=aero", *found.equal.split())
    assert spent.total == 20_480
    assert "trainer.total_epochs" not in cost("+adaptive=aero", "trainer.total_epochs=90", *STEPS)[0].equal


def test_a_run_that_ends_before_its_rollouts_are_spent_says_what_else_to_set(cost) -> None:
    early, lines = cost("+adaptive=aero", "trainer.total_epochs=10", "adaptive.total_rollouts=20480")
    assert early.total < 20_480 and "spends what GRPO would" in lines["equal cost"]
    assert "trainer.total_training_steps=" in early.equal and "trainer.total_epochs=" in early.equal
    more, lines = cost("+adaptive=grpo", "trainer.total_epochs=5", "adaptive.total_rollouts=20480")
    assert more.equal == "adaptive.total_rollouts=20480 trainer.total_training_steps=20 trainer.total_epochs=10"
    assert "spends all of its rollouts, in about 20 steps" in lines["equal cost"]
    least, _ = cost("+adaptive=aero", "adaptive.total_rollouts=100")
    assert least.total == least.step > 100, "a step ends whole"


def test_an_epoch_goes_through_rows_of_which_several_are_of_one_prompt(cost, tmp_path) -> None:
    """DAPO-Math-17k has each prompt a hundred times; of fewer prompts than a batch, the run was said to need no epochs."""
    data = write_dataset(tmp_path / "twice.parquet", hostile_rows(40) * 2)
    words = ("trainer.total_epochs=3", "adaptive.total_rollouts=20480")
    found, _ = cost("+adaptive=grpo", f"data.train_files={data}", *words)
    assert found.passes == 3.0
    assert found.equal == "adaptive.total_rollouts=20480 trainer.total_training_steps=20 trainer.total_epochs=20"


STEPS = ("trainer.total_training_steps=20",)


def test_steps_are_those_that_verl_takes(call, cost, tmp_path) -> None:
    assert cost("+adaptive=grpo", "trainer.total_epochs=5", *STEPS)[0].grpo_total == 10_240
    found, _ = cost("+adaptive=grpo", "trainer.total_epochs=10", "data.train_max_samples=64")
    assert found.grpo_total == 10_240 and found.passes == 10.0
    data = tmp_path / "train.parquet"
    words = (*MINIMAL, f"trainer.default_local_dir={tmp_path}/ckpt", f"data.train_files={data}", "+adaptive=grpo")
    _, out, _ = call("doctor", "--json", "--", *words, "trainer.total_epochs=5", *STEPS)
    plan = json.loads(out)["plan"]
    assert plan["steps"] == 10 and any("trainer.total_epochs=5: verl stops after 10 steps" in n for n in plan["notes"])


@pytest.mark.usefixtures("not_simulated")
def test_one_epoch_is_too_short_for_what_learns_from_earlier_visits(cost, tmp_path) -> None:
    found, lines = cost("+adaptive=greso", "trainer.total_epochs=1")
    assert found.passes == 1.0 and "one epoch: greso will skip nothing" in lines["epochs"]
    assert cost("+adaptive=greso", "trainer.total_epochs=2")[0].sense == []
    make_run(tmp_path / "earlier", steps=4, run_id="p/e")
    warm, lines = cost("+adaptive=greso", "trainer.total_epochs=1", f"adaptive.warm_start={tmp_path / 'earlier'}")
    assert warm.sense == [] and "of the warm start" in lines["cost"]
    make_run(tmp_path / "runs" / "one", steps=4, run_id="p/e")
    make_run(tmp_path / "runs" / "two", steps=4, run_id="p/f", seed=1)
    several, lines = cost("+adaptive=greso", f"adaptive.warm_start={tmp_path / 'runs'}")
    assert "of the warm start" in lines["cost"] and several.range is None


@pytest.mark.usefixtures("not_simulated")
def test_epochs_are_known_where_the_data_are_not(cost) -> None:
    """A line is priced on any machine; without the data set nothing was said of a run of one epoch."""
    words = ("+adaptive=greso", "data.train_files=/no/such/train.parquet")
    found, lines = cost(*words, "trainer.total_epochs=1")
    assert (found.grpo_step, found.grpo_total, found.total, found.passes) == (1024, None, None, 1.0)
    assert "one epoch: greso will skip nothing" in lines["epochs"] and "<steps of GRPO x 1024>" in lines["equal cost"]
    found, _ = cost(*words, *STEPS)
    assert found.grpo_total == 20_480 and found.passes is None


@pytest.mark.usefixtures("not_simulated")
def test_where_no_prompt_comes_twice_solo_is_not_sent_away(cost, tmp_path) -> None:
    """It is what docs/choosing.md says to take there: 4,096 prompts, 2 steps of 1,024 rollouts, one apiece."""
    data = write_dataset(tmp_path / "large.parquet", hostile_rows(4096))
    _, lines = cost("+adaptive=solo", f"data.train_files={data}", "trainer.total_training_steps=2")
    assert "0.5 epochs: solo will know a prompt by its data source only" in lines["epochs"]
    assert "name data sources" in lines["epochs"] and "aero" not in lines["epochs"]


@pytest.mark.usefixtures("not_simulated")
def test_what_an_earlier_part_of_the_run_saw_takes_the_place_of_the_assumption(cost, tmp_path) -> None:
    make_run(tmp_path / "ckpt", steps=4, run_id="p/e", snapshot=False)
    mine = ("+adaptive=dapo", "trainer.project_name=p", "trainer.experiment_name=e")
    assert "this run's earlier steps" in cost(*mine)[0].known_from
    elsewhere = f"adaptive.store.dir={tmp_path / 'others'}"
    assert "assumed" in cost(*mine, elsewhere)[0].known_from  # another run's journal says nothing of this one


@pytest.mark.usefixtures("not_simulated")
def test_engines_are_counted_as_verl_starts_them(cost) -> None:
    """Of 4 engines, each in two parts with slots of their own; how many there are: test_facts.py."""
    sizes = (f"actor_rollout_ref.rollout.{kind}_parallel_size=2" for kind in ("tensor_model", "data"))
    _, lines = cost("+adaptive=dapo", "trainer.n_gpus_per_node=8", "trainer.nnodes=2", *sizes)
    assert "a model of 8 engines with" in lines["time"]
    words = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.disaggregation.enabled=true")
    found, lines = cost("+adaptive=solo", *words)
    assert found.time_factor is None and lines["time"].startswith("not known: rollout.disaggregation")


def test_groups_of_two_are_not_said_to_be_informative_as_often_as_no_pool_allows(cost) -> None:
    """A half is assumed; two answers of prompts of all difficulties differ in two groups of five."""
    found, lines = cost("+adaptive=dapo", "actor_rollout_ref.rollout.n=2")
    assert (
        0.3 < found.share < ASSUMED - 0.05 and f"if {found.share:.0%} of GRPO's groups are informative" in lines["cost"]
    )


def test_groups_are_of_the_size_that_the_data_set_allows(cost, call) -> None:
    """64 x 16 rollouts: one apiece where there are prompts enough, of eight where there are 128."""
    found, lines = cost("+adaptive=solo", "trainer.total_epochs=2")
    assert found.factor == 1 and "for each informative group" in lines["time"]
    status, out, _ = call("doctor", "--json", "--", *MINIMAL, "+adaptive=solo", "data.train_files=/no/such.parquet")
    plan = json.loads(out)["plan"]
    assert (status, plan["n"]) == (0, 1) and "for each informative group" not in plan["cost"]["time"]


def test_a_policy_that_cannot_be_simulated_says_why(cost, monkeypatch) -> None:
    def refuse(*_, **__):
        raise Exhausted("nothing is left")

    monkeypatch.setattr(simulate, "expected_waiting", refuse)
    found, lines = cost("+adaptive=dapo")
    assert found.step is None and "Exhausted: nothing is left" in lines["cost"]


def test_a_cost_stands_though_a_share_of_its_range_would_end_training(cost, monkeypatch) -> None:
    """`doctor` failed, and said that a component was to be corrected."""
    real = simulate.expected_waiting

    def ends(*args, **setting):
        if setting["share"] == 0.3:
            raise Exhausted("step 20: 30 of 39 groups")
        return real(*args, **setting)

    monkeypatch.setattr(simulate, "expected_waiting", ends)
    found, lines = cost("+adaptive=dapo", "adaptive.on_exhausted=raise")
    assert found.step > 1024 and found.range[1] is None
    assert " x if 70% are, an error (on_exhausted=raise) if 30% are" in lines["cost"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("+adaptive=grpo",), "left out of training (same gradient, fewer tokens)"),
        (("+adaptive=solo",), "are few, since the baseline is not the group's"),
        (("+adaptive=solo", "adaptive.advantage.thin=1"), "include those that adaptive.advantage.thin=1 sets to zero"),
        (("+adaptive=spo",), "are not known beforehand (adaptive.advantage.scale=whiten"),
        (
            ("+adaptive=solo", "actor_rollout_ref.actor.use_kl_loss=true", "adaptive.skip_zero_advantage=true"),
            "left out of training by adaptive.skip_zero_advantage=true: the policy gradient is the same, but",
        ),
    ],
)
@pytest.mark.usefixtures("not_simulated")
def test_rows_of_zero_advantage_are_told_as_the_advantage_makes_them(call, words, says) -> None:
    status, out, _ = call("doctor", "--json", "--", *MINIMAL, *words, "data.train_files=/no/such.parquet")
    assert status == 0 and json.loads(out)["plan"]["zero_rows"].startswith(says)


def test_findings_are_printed_as_they_come(call, monkeypatch) -> None:
    def fail(self) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor.Examination, "verl", fail)
    status, out, _ = call("doctor")
    assert status == 130 and "python" in out and "hydra-core" in out


def test_numbers_are_written_as_people_read_them() -> None:
    lines = dict(Cost(1024, None, 0.5, "", step=1024, factor=1.0, passes=417.3).lines())
    assert "are 420 passes over" in lines["epochs"]
    assert "are 1 pass over" in dict(Cost(1024, None, 0.5, "", passes=1.0).lines())["epochs"]
