"""The GPU recipes: what they would run composes, validates, and has the budget of the paper that they name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.cli.lines import composed
from tests.cli.stores import make_run
from tests.programs import ran
from verl_adaptive.commands import cost as costing

ROOT = Path(__file__).parents[2]
#: Of one training run each; the first hour is a program (tests/test_first_hour.py).
OTHERS = {"gpu_first_hour.sh", *(p.name for p in (ROOT / "examples").glob("*_cpu.sh"))}
RECIPES = sorted({p.name for p in (ROOT / "examples").glob("*.sh")} - OTHERS)

ASYNC = "qwen2.5_math_7b_async.sh"

#: recipe → groups, n, optimizer updates, rollouts of the first round, steps
EXPECTED = {
    "qwen2.5_math_1.5b_greso.sh": (256, 8, 4, 384 * 8, 1001),
    "qwen2.5_math_7b_greso.sh": (256, 8, 4, 384 * 8, 1001),
    ASYNC: (256, 8, 4, 512 * 8, 1001),
    "r1_distill_qwen_1.5b_greso.sh": (128, 8, 2, 192 * 8, 1001),
    "qwen2.5_math_1.5b_aero.sh": (128, 16, 4, 128 * 8, 1001),
    "r1_distill_qwen_1.5b_cero.sh": (64, 8, 2, 528, 500),
    "qwen3_4b_pilot_commit.sh": (128, 64, 4, 384 * 16, 500),
    "qwen2.5_math_7b_solo.sh": (2048, 1, 4, 2048, 1001),
    "benchmark_gpu.sh": (256, 8, 4, 256 * 8, 2000),
    "warm_start.sh": (256, 8, 4, 384 * 8, 1001),
    "filter_dataset.sh": (256, 8, 4, 384 * 8, 1001),
}


def words_of(name: str, *extra: str, **env: str) -> list[str]:
    """The command that a recipe would run."""
    done = ran("bash", ROOT / "examples" / name, *extra, timeout=60, DRY_RUN="1", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_recipe_is_expected() -> None:
    assert set(RECIPES) == set(EXPECTED)


@pytest.mark.parametrize("name", RECIPES)
def test_it_says_first_that_it_never_ran_on_gpus(name) -> None:
    lines = (ROOT / "examples" / name).read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and lines[1].startswith("# Never run on GPUs here")
    assert os.access(ROOT / "examples" / name, os.X_OK)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> str:
    """A run to start from."""
    folder = tmp_path_factory.mktemp("earlier")
    make_run(folder, steps=3)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, None) for name in RECIPES), *((ASYNC, mode) for mode in ("separate_async", "colocate_async"))],
)
@pytest.mark.usefixtures("not_simulated")
def test_it_composes_validates_and_has_a_cost(name, mode, earlier) -> None:
    """The asynchronous one in both modes, with verl's own keys; and what verl asserts only when workers start."""
    inspect = pytest.importorskip("verl_adaptive.integration.inspect")
    words = words_of(name, FROM=earlier, **({"MODE": mode} if mode else {}))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    config, plan = composed(words)
    plan = inspect.foresee(config, plan)
    if mode:
        assert f"trainer.v1.trainer_mode={mode}" in words and plan.mode == mode
        assert ("4 devices generate while others train" in plan.schedule) == (mode == "separate_async")
    groups, n, updates, first_round, steps = EXPECTED[name]
    assert (plan.groups, plan.n, plan.updates, plan.steps) == (groups, n, updates, steps)
    assert first_round is None or plan.first_round == first_round
    assert plan.skip_zero and "left out" in plan.zero_rows
    cost = costing.cost_of(plan)
    assert cost.grpo_total == cost.grpo_step * steps and cost.step > 0 and not cost.why_not
    assert ("assumed" in cost.known_from) == (name not in ("warm_start.sh", "benchmark_gpu.sh"))
    assert Path(config.reward.custom_reward_function.path).is_file()
    # A name of its own, where a run and its checkpoints go; the last word counts where one is given twice.
    assert config.trainer.experiment_name in {name.removesuffix(".sh"), *OTHER_NAMES.values()}
    assert config.trainer.default_local_dir.endswith(f"/{config.trainer.experiment_name}")


OTHER_NAMES = {
    "warm_start.sh": "greso_warm",
    "filter_dataset.sh": "greso_kept",
    "benchmark_gpu.sh": "grpo-n8-lr1e-6-seed0",
}


def test_a_mode_that_does_not_exist_is_refused() -> None:
    done = ran("bash", ROOT / "examples" / ASYNC, MODE="fast")
    assert done.returncode == 2 and "MODE=fast" in done.stderr


#: They say what a setting is, and lean on no other recipe; the rest are another one's setting and a few words more.
WHOLE = {
    "qwen2.5_math_1.5b_greso.sh",
    "qwen2.5_math_1.5b_aero.sh",
    "qwen2.5_math_7b_solo.sh",
    ASYNC,
    "qwen3_4b_pilot_commit.sh",
    "r1_distill_qwen_1.5b_cero.sh",
    "r1_distill_qwen_1.5b_greso.sh",
    "benchmark_gpu.sh",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_copied_alone_or_says_what_it_needs(name) -> None:
    text = (ROOT / "examples" / name).read_text()
    leans = set(re.findall(r'bash "\$here/(\S+\.sh)"', text))
    assert len(leans) == (0 if name in WHOLE else 1)
    assert all(f"examples/{other}" in text and other in WHOLE for other in leans)


def test_further_overrides_come_last() -> None:
    assert words_of("filter_dataset.sh", "trainer.nnodes=3")[-1] == "trainer.nnodes=3"
