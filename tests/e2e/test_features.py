"""What setups have beside text, GRPO and one turn: on the real pipeline, as far as it runs without a GPU."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.faults import MODES
from tests.e2e.harness import REPO, ProcessRun, assets, optimizer_updates, several, train, trains
from tests.e2e.images import COLOURS, images, square
from tests.e2e.starts import MIXED
from verl_adaptive.integration.selftest import tiny
from verl_adaptive.stats import read_snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(3600)]

SHORT = ("trainer.total_training_steps=2", "trainer.save_freq=2", "adaptive.record=true")
every_mode = pytest.mark.parametrize("mode", MODES)
#: verl sends the base model alone (tests/integration/test_refusals.py).
REFUSED = ("adapter", "separate_async")
ahead = pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])


@pytest.mark.parametrize(
    ("form", "mode"), [(form, mode) for form in ("adapter", "merged") for mode in MODES if (form, mode) != REFUSED]
)
def test_lora(form, mode, tmp_path):
    """Adapters are trained, and go to vLLM by themselves or merged into the weights; the reference is the actor without."""
    run = train(
        tmp_path,
        "+adaptive=greso",
        *MODES[mode],
        *("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"),
        *("actor_rollout_ref.model.target_modules=all-linear", "actor_rollout_ref.rollout.load_format=safetensors"),
        f"actor_rollout_ref.model.lora.merge={form == 'merged'}",
        *SHORT,
    )
    trains(run, 2)
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


@every_mode
def test_tools_in_several_turns(mode, tmp_path):
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
        *MODES[mode],
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        *("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "data.max_response_length=160"),
        *("actor_rollout_ref.rollout.multi_turn.enable=true", "actor_rollout_ref.rollout.multi_turn.format=hermes"),
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}",
        *SHORT,
    )
    trains(run, 2)
    turns = run.series("training/num_turns/mean")
    assert all(2 < t < 8 for t in turns) and max(run.series("training/num_turns/max")) > 2, turns


TWO_OUTPUTS = """
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class TwoOutputs(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        first, second = [await super(TwoOutputs, self).run(sampling_params, **kwargs) for _ in range(2)]
        return [first, second] if len(first.response_ids) % 2 else [second]
"""


@every_mode
def test_several_outputs_a_session(mode, tmp_path):
    """An agent loop that begins anew: some sessions leave two outputs, of which the last has the reward."""
    (tmp_path / "two_outputs.py").write_text(TWO_OUTPUTS)
    (tmp_path / "loops.yaml").write_text("- name: two_outputs\n  _target_: two_outputs.TwoOutputs\n")
    agent = "actor_rollout_ref.rollout.agent"
    words = (f"{agent}.agent_loop_config_path={tmp_path / 'loops.yaml'}", f"{agent}.default_agent_loop=two_outputs")
    run = train(tmp_path, *MIXED, *MODES[mode], *words, *SHORT, PYTHONPATH=str(tmp_path))
    trains(run, 2)
    assert optimizer_updates(run, 2) == 4
    sessions = Counter(row["uid"].rpartition("_")[0] for row in trained_rows(run))
    assert len(sessions) == sum(run.series("adaptive/rollouts/trained_total"))
    assert set(sessions.values()) == {1, 2}


@every_mode
def test_distillation(mode, tmp_path):
    """A teacher in a pool of its own beside the rewards: the actor before its first update, so that they agree at first."""
    teacher = "distillation.teacher_models.teacher_model"
    run = train(
        tmp_path,
        "+adaptive=greso",
        *MODES[mode],
        *("distillation.enabled=true", "distillation.nnodes=1", "distillation.n_gpus_per_node=1"),
        *(f"{teacher}.model_path={assets() / 'model'}", f"{teacher}.num_replicas=1"),
        *(f"{teacher}.inference.tensor_model_parallel_size=1", f"{teacher}.inference.max_model_len=128"),
        # a CPU has no memory to free
        *(f"{teacher}.inference.free_cache_engine=false", f"+{teacher}.inference.enable_sleep_mode=false"),
        *SHORT,
    )
    trains(run, 2)
    assert optimizer_updates(run, 2) == 4
    first, second = run.series("actor/distillation/loss")
    assert 0 <= first < second


RIGHT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(solution_str.strip() == ground_truth)
"""


@every_mode
def test_images(mode, tmp_path):
    """Prompts that only their picture tells apart, through verl's processor, vLLM and the actor.

    A micro batch is a row, so that padding is on its own in one: what verl does of Qwen2.5-VL fails there without pictures.
    """
    folder, env = images()
    (tmp_path / "reward.py").write_text(RIGHT)
    words = (
        *MODES[mode],
        f"actor_rollout_ref.model.path={folder / 'model'}",
        *(f"data.train_files={folder / 'train.parquet'}", f"data.val_files={folder / 'val.parquet'}"),
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        *("actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",  # four are hardly ever equally full, so that there is padding
        *(["trainer.v1.separate_async.parameter_sync_step=4"] if mode == "separate_async" else []),
        # verl's default, dummy, overwrites what vLLM 0.28 normalizes pictures by, and no later weights restore it
        "actor_rollout_ref.rollout.load_format=safetensors",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        *SHORT,
    )
    runs = {name: train(tmp_path / name, f"+adaptive={name}", *words, **env) for name in ("greso", "grpo")}
    rows = pq.read_metadata(folder / "train.parquet").num_rows
    for run in runs.values():
        trains(run, 2)
        assert optimizer_updates(run, 2) == 8
        table, _, _ = read_snapshot(run.folder / "checkpoints" / "global_step_2" / "adaptive")
        assert len(table) == rows and f"{rows} rows, {rows} distinct prompts" in run.log
        # vLLM and the actor look at the same pictures, where both have the same weights; who sees none is right in a third
        # of the cases
        apart = run.series("training/rollout_probs_diff_max")
        assert max(apart if mode == "sync" else apart[:1]) < 0.01, apart
        assert min(run.series("critic/score/mean")) > 0.5
    assert sum(runs["greso"].series("adaptive/rollouts/dropped_total/all_correct")) > 0
    every = runs["grpo"]
    assert "rows of zero advantage left out of training" in every.log
    assert sum(every.series("adaptive/rollouts/dropped_total/zero_advantage")) > 0
    # a mini-step of that mode is one minibatch: padded where it has one row left, and that is chance
    assert mode == "separate_async" or sum(every.series("adaptive/padding_rows_total")) > 0


@every_mode
def test_videos(mode, tmp_path):
    """Prompts that only their video tells apart, of four frames each."""
    folder, env = images()
    (tmp_path / "reward.py").write_text(RIGHT)
    rng, rows = random.Random(0), []
    for index in range(48):
        colour = list(COLOURS)[index % len(COLOURS)]
        frames = [tmp_path / f"{index}_{frame}.png" for frame in range(4)]
        for frame in frames:
            square(rng, colour).save(frame)
        rows.append(
            {
                "data_source": "squares",
                "prompt": [{"role": "user", "content": "<video>colour?"}],
                "videos": [{"video": [f"file://{frame}" for frame in frames]}],
                "reward_model": {"style": "rule", "ground_truth": colour},
                "extra_info": {"index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    run = train(
        tmp_path,
        "+adaptive=greso",
        *MODES[mode],
        f"actor_rollout_ref.model.path={folder / 'model'}",
        *(f"data.train_files={tmp_path / 'train.parquet'}", f"data.val_files={tmp_path / 'train.parquet'}"),
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "actor_rollout_ref.rollout.load_format=safetensors",
        *SHORT,
        **env,
    )
    trains(run, 2)
    assert optimizer_updates(run, 2) == 4
    assert "48 rows, 48 distinct prompts" in run.log


def test_an_update_of_one_row_with_an_image(tmp_path):
    """Its axes of positions look like its length to torch: a longer row of padding stands beside it."""
    folder, env = images()
    (tmp_path / "reward.py").write_text(RIGHT.replace("float(solution_str.strip() == ground_truth)", "1.0"))
    run = train(
        tmp_path,
        "+adaptive=grpo",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        *(f"data.train_files={folder / 'train.parquet'}", f"data.val_files={folder / 'val.parquet'}"),
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.load_format=safetensors",
        *SHORT,
        **env,
    )
    assert run.code == 0 and len(run.steps) == 2, run.tail
    assert optimizer_updates(run, 2) == 2
    assert run.series("adaptive/padding_rows_total") == [1.0, 1.0]
    assert set(run.series("actor/pg_loss")) == {0.0}


@ahead
def test_a_reference_model(mode, tmp_path):
    """KL and entropy losses, beside which rows of zero advantage stay."""
    run = train(
        tmp_path,
        "+adaptive=solo",
        *MODES[mode],
        *("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coeff=0.001"),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
        *SHORT,
    )
    trains(run, 2)
    assert all(kl >= 0 for kl in run.series("actor/kl_loss"))


@ahead
def test_two_ranks(mode, tmp_path):
    """Minibatches are cut alike on both data-parallel ranks."""
    run = train(
        tmp_path,
        *MIXED,
        *MODES[mode],
        "trainer.n_gpus_per_node=2",
        *("actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"),
        *SHORT,
    )
    trains(run, 2)
    assert optimizer_updates(run, 2) == 4


JUDGE = """
from pathlib import Path

import aiohttp

HANGS = Path({hangs!r})


async def judge(solution_str, extra_info, reward_router_address, model, **_):
    question = [{{"role": "user", "content": extra_info["question"]}}]
    async with aiohttp.ClientSession(f"http://{{reward_router_address}}", raise_for_status=True) as session:
        if HANGS.exists():
            HANGS.unlink()  # once is enough
            await session.post("/pause?mode=keep")
        what = {{"model": model, "messages": question, "temperature": 0, "max_tokens": 12}}
        async with session.post("/v1/chat/completions", json=what) as answer:
            said = (await answer.json())["choices"][0]["message"]["content"]
    return float(solution_str == said)
"""


def reward_model(folder: Path, model: Path, function: str, code: str) -> tuple[str, ...]:
    """A reward model in a pool of its own, and a reward function that asks it, once it may see the question."""
    rows = pq.read_table(assets() / "data" / "train.parquet").to_pylist()
    for row in rows:
        row["extra_info"]["question"] = row["prompt"][0]["content"]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(code)
    return (
        *("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true"),
        *("reward.reward_model.nnodes=1", "reward.reward_model.n_gpus_per_node=1"),
        f"reward.reward_model.model_path={model}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"reward.custom_reward_function.name={function}",
        f"+reward.custom_reward_function.reward_kwargs.model={model}",
        f"data.train_files={folder / 'train.parquet'}",
    )


def trained_rows(run: ProcessRun) -> list[dict]:
    """verl's dump of what trained."""
    return [json.loads(line) for step in (1, 2) for line in (run.folder / "rollouts" / f"{step}.jsonl").open()]


def test_a_judge_in_a_pool_of_its_own(tmp_path):
    """A generative reward model: right is what it says itself. In the second run it hangs, and the error says so."""
    code = JUDGE.format(hangs=str(tmp_path / "hangs" / "metrics-0.begun"))
    runs = several(
        tmp_path,
        {"judge": SHORT, "hangs": ("adaptive.stall_timeout=15",)},
        "+adaptive=dapo",
        *reward_model(tmp_path, assets() / "model", "judge", code),
        VLLM_SERVER_DEV_MODE="1",  # for its route to pause a model
    )
    run = runs["judge"]
    trains(run, 2)
    assert optimizer_updates(run, 2) == 4
    rows = trained_rows(run)
    said = {row["input"]: row["output"] for row in rows if row["score"] == 1}
    assert {row["score"] for row in rows} == {0, 1}
    assert all((said[row["input"]] == row["output"]) == row["score"] for row in rows)
    assert any(row["score"] == 1 and row["output"] != row["gts"] for row in rows)  # the judge errs: no rule did this
    assert runs["hangs"].code != 0
    assert re.search(
        r"no rollout has finished for adaptive\.stall_timeout=15 s; .*reward model 0: [1-9]",
        runs["hangs"].log,
    ), runs["hangs"].tail


def classifier(folder: Path) -> tuple:
    """A discriminative reward model that nobody trained, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(assets() / "model", num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(assets() / "model")
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def logit(model, tokenizer, text: str) -> float:
    import torch

    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits.item()


@every_mode
def test_a_classifier_in_a_pool_of_its_own(mode, tmp_path):
    """A discriminative reward model, asked by the function of docs/faq.md: its logit is the reward."""
    model, tokenizer = classifier(tmp_path / "grader")
    (code,) = re.findall(r"```python\n(.*?async def grade.*?)```", (REPO / "docs" / "faq.md").read_text(), re.DOTALL)
    words = reward_model(tmp_path, tmp_path / "grader", "grade", code)
    run = train(tmp_path, "+adaptive=greso", *MODES[mode], *words, *SHORT)
    trains(run, 2)
    assert optimizer_updates(run, 2) == 4
    rows = trained_rows(run)
    assert len({row["score"] for row in rows}) > 8
    for row in rows:
        assert logit(model, tokenizer, row["input"] + row["output"]) == pytest.approx(row["score"], abs=1e-3)


def test_a_colocated_classifier(tmp_path):
    """It judges when all rollouts of a step are there, as with verl alone; what trains of them is decided then."""
    classifier(tmp_path / "grader")
    runs = several(
        tmp_path,
        {
            "verls": SHORT[:1],
            "grpo": ("+adaptive=grpo", "adaptive.refill=false", *SHORT),
            "solo": ("+adaptive=solo", *SHORT),
            "drops": ("+adaptive=dapo", "adaptive.refill=false", "adaptive.tolerance=0.2", *SHORT),
        },
        *("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=false"),
        *(f"reward.reward_model.model_path={tmp_path / 'grader'}", "reward.custom_reward_function.path=null"),
        *("trainer.val_before_train=true", "trainer.test_freq=2"),
    )
    assert runs["verls"].code == 0, runs["verls"].tail
    known = {(row["input"], row["output"]): row["score"] for row in trained_rows(runs["verls"])}
    same = 0
    for name in ("grpo", "solo", "drops"):
        trains(runs[name], 2)
        assert "val-core" in str(runs[name].steps[-1])
        assert runs[name].series("adaptive/rollouts/generated_total") == [128, 128]
        for row in trained_rows(runs[name]):
            if (row["input"], row["output"]) in known:
                assert row["score"] == pytest.approx(known[row["input"], row["output"]], abs=1e-3)
                same += 1
    assert same > 16
    assert runs["solo"].series("adaptive/groups/trained_total") == [128, 128]
    assert all(0 < kept < 16 for kept in runs["drops"].series("adaptive/groups/trained_total"))
