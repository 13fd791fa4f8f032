"""What a step costs, guessed before a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from verl_adaptive.errors import ConfigError
from verl_adaptive.simulate import ClockConfig, LengthConfig, Machine, compose_preset, expected_waiting
from verl_adaptive.simulate.expected import _pool

#: Plain GRPO, of which everything is a share, runs once in each setting.
pytestmark = pytest.mark.usefixtures("simulated_once")

CLOCK = ClockConfig(Machine(2, 16), LengthConfig(median=80, sigma=0.8, cap=600))


def waiting(words: str, **setting):
    return expected_waiting(compose_preset(words.split()), **{"batch": 16, "n": 8, "clock": CLOCK, **setting})


def test_grpo_costs_what_grpo_costs() -> None:
    found = waiting("grpo")
    assert (found.rollouts, found.seconds, found.informative, found.seconds_per_informative) == (1, 1, 1, 1)
    assert found.waves == 1 and found.share == pytest.approx(0.5, abs=0.06)


def test_dropping_groups_costs_rollouts_and_time_the_more_there_are_to_drop() -> None:
    few, many = waiting("dapo", share=0.9), waiting("dapo", share=0.3)
    assert 1.0 < few.rollouts < many.rollouts and few.seconds < many.seconds
    assert 1 / 0.3 < 1.05 * many.rollouts < 1.4 / 0.3  # 1/share, and what was asked for beyond it
    assert many.informative == pytest.approx(1 / 0.3, rel=0.15)


def test_a_sparse_pool_is_no_thrift() -> None:
    """With eight batches of prompts in the pool a step ran out of them, and cost less where fewer were informative."""
    some, few = (waiting("dapo", share=share, passes=0.5, most=512) for share in (0.3, 0.1))
    assert some.rollouts < 0.6 * few.rollouts and few.informative > 0.75 / few.share


def test_a_rescue_costs_by_the_groups_that_are_all_wrong() -> None:
    """AERO tries them again, and no solved one. Of the simulator's pools that stay it needs 0.55 (easy, where 12 % of the
    other groups are all wrong) and 0.85 (hard, 93 %); at 60 % of both it was said to need 0.69 and 0.72."""
    easy, hard = (waiting("aero", batch=64, share=s, hopeless=h, most=512) for s, h in ((0.43, 0.12), (0.33, 0.93)))
    assert easy.rollouts == pytest.approx(0.55, abs=0.04) and hard.rollouts == pytest.approx(0.85, abs=0.06)


def test_small_groups_find_their_prompts_however_large_n_is() -> None:
    """A step of solo's takes n times as many prompts as GRPO's; with too few its groups would be of two and more."""
    assert waiting("solo", n=32, passes=0.5).informative == 0
    assert waiting("solo adaptive.allocator.n=2", n=32, passes=0.5).informative > 0


def test_an_allocator_of_ones_own_finds_its_prompts_whatever_its_options_are_called(tmp_path) -> None:
    """Its groups of one were taken to be of 32: the pool had too few prompts, and a quarter of the rollouts was simulated."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom verl_adaptive import Allocator\n\nclass Single(Allocator):\n    name = 'single'\n"
        "    def fixed_size(self, n):\n        return 1\n"
        "    def first(self, rows, planned, progress):\n        return np.ones(len(rows), dtype=np.int64)\n"
    )
    own = f"adaptive/allocator=custom adaptive.allocator.name={tmp_path}/mine.py:Single"
    assert waiting(f"solo {own}", n=32, passes=0.5).rollouts == 1


def test_a_large_step_is_made_smaller_with_its_machine() -> None:
    """Eight times the batch on eight times the slots, simulated at a quarter of that, costs what the small one costs."""
    small, large = (
        waiting("dapo", batch=64 * k, n=8, clock=replace(CLOCK, machine=m), most=1024)
        for k, m in ((1, Machine(8, 16)), (8, Machine(64, 16)))
    )
    assert large.rollouts == pytest.approx(small.rollouts, rel=0.15)
    assert large.seconds == pytest.approx(small.seconds, rel=0.3)


@pytest.mark.parametrize(("n", "share"), [(2, 0.3), (8, 0.05), (8, 0.5), (16, 0.9), (16, 1.0), (2, 1.0)])
def test_the_pool_has_the_share_asked_for(n, share) -> None:
    p = _pool(20_000, n, share)
    mixed = float((1 - p**n - (1 - p) ** n).mean())
    assert mixed == pytest.approx(share, abs=0.01) or (mixed < share and (p > 0).all() and (p < 1).all())
    assert np.isin(p, (0.0, 1.0)).any() or mixed <= share + 0.01


def test_a_runs_settings_say_what_generation_takes() -> None:
    clock = ClockConfig.guess(replicas=4, slots=128, cap=8192)
    assert (clock.machine.replicas, clock.machine.slots, clock.machine.base) == (4, 128, ClockConfig().machine.base)
    assert (clock.lengths.median, clock.lengths.cap, clock.lengths.sigma) == (1024, 8192, ClockConfig().lengths.sigma)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_that_cannot_be_is_refused(share) -> None:
    with pytest.raises(ConfigError, match="share"):
        waiting("grpo", share=share)


@pytest.mark.parametrize(
    "words",
    [
        "dapo adaptive.sampler.round.prompts=192",
        "greso adaptive.sampler.round.prompts=96",
        "dapo adaptive.max_rollouts_per_step=640",
        "cero adaptive.sampler.capacity=150 adaptive.sampler.budget=4000",
    ],
)
def test_options_that_count_prompts_or_rollouts_are_as_large_beside_a_smaller_batch(words) -> None:
    """They stayed as they were, and a price at an eighth of the batch was up to four times too high."""
    whole, part = (waiting(words, batch=64, share=0.6, passes=1.0, most=most, run=32) for most in (512, 128))
    assert part.rollouts == pytest.approx(whole.rollouts, rel=0.12)
    assert part.seconds == pytest.approx(whole.seconds, rel=0.2)


@pytest.mark.parametrize("preset", ["greso", "cero"])
def test_doctor_and_the_readme_have_one_cost(preset) -> None:
    """The README's figure is of the benchmark, after the first pass; ``doctor``'s is of this short simulation."""
    stored = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "clock.json").read_text())["policies"]
    found = expected_waiting(compose_preset([preset]), batch=128, n=16, share=0.49, passes=30.0)
    assert found.later[1] == pytest.approx(stored[preset]["time"], abs=0.06)
    assert found.seconds == pytest.approx(found.later[1], abs=0.05)  # of thirty passes one is the first


def test_the_first_pass_and_the_others_make_the_run() -> None:
    one, two = (waiting("greso", passes=passes) for passes in (1.0, 2.0))
    assert one.later is None and one.first == (one.rollouts, one.seconds)
    assert two.first == pytest.approx(one.first, abs=0.1)
    for first, later, mean in zip(two.first, two.later, (two.rollouts, two.seconds), strict=True):
        assert later <= mean <= first and later < first
