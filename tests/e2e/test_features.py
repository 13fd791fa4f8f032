"""What setups have beside text, GRPO and one turn: on the real pipeline, as far as it runs without a GPU."""

from __future__ import annotations

import random

import pyarrow.parquet as pq
import pytest

from tests.e2e.harness import Run, assets, balanced, optimizer_updates, replays, train
from tests.e2e.starts import MIXED
from verl_adaptive.integration.selftest import tiny

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
