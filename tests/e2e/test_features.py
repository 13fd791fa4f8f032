"""What setups have beside text, GRPO and one turn: on the real pipeline, as far as it runs without a GPU."""

from __future__ import annotations

import random

import pyarrow.parquet as pq
import pytest

from tests.e2e.harness import Run, assets, balanced, optimizer_updates, replays, several, train
from tests.e2e.images import images
from tests.e2e.starts import MIXED
from verl_adaptive.integration.selftest import tiny
from verl_adaptive.stats import read_snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(3600)]

SHORT = ("trainer.total_training_steps=2", "trainer.save_freq=2", "adaptive.record=true")


def trained(run: Run) -> None:
    assert run.code == 0, run.tail
    assert len(run.steps) == 2
    balanced(run)
    replays(run, 2)
    assert all(g > 0 for g in run.series("actor/grad_norm"))


@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_lora(merge, tmp_path):
    """Adapters are trained, and go to vLLM by themselves or merged into the weights; the reference is the actor without."""
    run = train(
        tmp_path,
        "+adaptive=greso",
        *("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"),
        *("actor_rollout_ref.model.target_modules=all-linear", "actor_rollout_ref.rollout.load_format=safetensors"),
        f"actor_rollout_ref.model.lora.merge={merge}",
        *SHORT,
    )
    trained(run)
    assert optimizer_updates(run, 2) == 4


TOOLS = """
from verl.tools.function_tool import function_tool


@function_tool
def look() -> str:
    \"\"\"Looks something up.\"\"\"
    return "abc"
"""

REWARD = """
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(zlib.crc32(solution_str.encode()) % 2)
"""


def test_tools_in_several_turns(tmp_path):
    """verl's own tool loop: the model calls a tool, reads what it says, and goes on; tool tokens are not trained on."""
    rng = random.Random(0)
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    prompts = pq.read_table(assets() / "data" / "train.parquet")["prompt"].to_pylist()
    lessons = [(prompt[0]["content"], call if rng.random() < 0.5 else "abc") for prompt in prompts]
    tiny.make_model(tmp_path / "fresh")
    tiny.teach(tmp_path / "fresh", tmp_path / "model", lessons, steps=250)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "reward.py").write_text(REWARD)
    run = train(
        tmp_path,
        *MIXED,
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        *("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "data.max_response_length=160"),
        *("actor_rollout_ref.rollout.multi_turn.enable=true", "actor_rollout_ref.rollout.multi_turn.format=hermes"),
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}",
        *SHORT,
    )
    trained(run)
    turns = run.series("training/num_turns/mean")
    assert all(2 < t < 8 for t in turns) and max(run.series("training/num_turns/max")) > 2, turns


RIGHT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(solution_str.strip() == ground_truth)
"""


def test_images(tmp_path):
    """Prompts that only their picture tells apart, through verl's processor, vLLM and the actor.

    A micro batch is a row, so that padding is on its own in one: what verl does of Qwen2.5-VL fails there without pictures.
    """
    folder, env = images()
    (tmp_path / "reward.py").write_text(RIGHT)
    runs = several(
        tmp_path,
        {"greso": ("+adaptive=greso",), "grpo": ("+adaptive=grpo",)},
        f"actor_rollout_ref.model.path={folder / 'model'}",
        *(f"data.train_files={folder / 'train.parquet'}", f"data.val_files={folder / 'val.parquet'}"),
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        *("actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",  # four are hardly ever equally full, so that there is padding
        # verl's default, dummy, overwrites what vLLM 0.28 normalizes pictures by, and no later weights restore it
        "actor_rollout_ref.rollout.load_format=safetensors",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        *SHORT,
        **env,
    )
    rows = pq.read_metadata(folder / "train.parquet").num_rows
    for run in runs.values():
        trained(run)
        assert optimizer_updates(run, 2) == 8
        table, _, _ = read_snapshot(run.folder / "checkpoints" / "global_step_2" / "adaptive")
        assert len(table) == rows and f"{rows} rows, {rows} distinct prompts" in run.log
        # vLLM and the actor look at the same pictures; who sees none is right in a third of the cases
        assert max(run.series("training/rollout_probs_diff_max")) < 0.01
        assert min(run.series("critic/score/mean")) > 0.5
    assert sum(runs["greso"].series("adaptive/rollouts/dropped_total/all_correct")) > 0
    every = runs["grpo"]
    assert "rows of zero advantage left out of training" in every.log
    assert sum(every.series("adaptive/rollouts/dropped_total/zero_advantage")) > 0
    assert sum(every.series("adaptive/padding_rows_total")) > 0
