"""The tiny in-process benchmark: its parts, and every policy for two steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import tiny_learner as tiny  # noqa: E402
import train_torch as bench  # noqa: E402
import train_torch_report as page  # noqa: E402

SMALL = bench.Settings(steps=2, batch=4, n=8, pool=48, held_out=32, warm_steps=2, hidden=32, evaluate_every=1)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_answers_are_right() -> None:
    made = tiny.make_questions(500, np.random.default_rng(0))
    for prompt, answer in zip(made.prompt.tolist(), made.answer.tolist(), strict=True):
        columns = [divmod(t - tiny.COLUMN, 10) for t in prompt[1:-1] if t != tiny.ABSENT]
        a, b = (sum(c[k] * 10**i for i, c in enumerate(columns)) for k in (0, 1))
        digits = answer[: answer.index(tiny.END)]
        value = sum(d * 10**i for i, d in enumerate(digits))
        scale = 10 ** len(columns)
        assert value == {tiny.PLUS: a + b, tiny.MINUS: a - b, tiny.TIMES: a * b % scale}[prompt[0]]
        assert len(digits) == len(columns) + (prompt[0] == tiny.PLUS and a + b >= scale)


def test_the_teacher_is_careless_only_where_there_is_something_to_carry() -> None:
    right = tiny.make_questions(400, np.random.default_rng(1))
    wrong = tiny.make_questions(400, np.random.default_rng(1), careless=True)
    assert wrong.answer.shape == right.answer.shape
    plain = np.array(
        [
            p[0] == tiny.PLUS and all((t - 16) // 10 + (t - 16) % 10 < 10 for t in p[1:-1] if t >= 16)
            for p in wrong.prompt.tolist()
        ]
    )
    for prompt, answer in zip(wrong.prompt[plain].tolist(), wrong.answer[plain].tolist(), strict=True):
        columns = [divmod(t - tiny.COLUMN, 10) for t in prompt[1:-1] if t != tiny.ABSENT]
        assert answer[: len(columns)] == [x + y for x, y in columns]


def test_exact_pass_rates_are_those_of_sampling() -> None:
    torch.manual_seed(0)
    model = tiny.TinyModel(hidden=32)
    question = tiny.make_questions(40, np.random.default_rng(2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):  # learn these by heart, halfway
        loss = -(model.log_probs(question.prompt, question.answer) * tiny.up_to_end(question.answer)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    exact = tiny.pass_rates(model, question)
    n = np.full(40, 200)
    made = tiny.sample(model, question, n, torch.Generator().manual_seed(0))
    seen = made.reward.reshape(40, 200).mean(1)
    assert 0.05 < exact.mean() < 0.999
    assert np.abs(seen - exact).max() < 5 * np.sqrt(0.25 / 200)
    again = model.log_probs(question.prompt.repeat_interleave(200, 0), made.response).detach()
    mask = tiny.up_to_end(made.response)
    assert torch.allclose(again[mask], made.log_prob[mask], atol=1e-4)
    assert made.tokens.max() <= tiny.RESPONSE


def test_group_relative_is_grpo() -> None:
    got = bench.group_relative(np.array([1.0, 0.0, 0.0, 1.0, 0.5]), np.array([0, 0, 0, 1, 3]), 4)
    assert got == pytest.approx([2 / 3 / 0.57735127, -1 / 3 / 0.57735127, -1 / 3 / 0.57735127, 1.0, 0.5], abs=1e-5)


def test_every_preset_is_in_it() -> None:
    shipped = {p.stem for p in Path(bench.HERE.parent, "hydra_configs/verl_adaptive/adaptive").glob("*.yaml")}
    assert shipped - {"base", "full"} <= set(bench.PRESETS)


@pytest.mark.parametrize("preset", bench.PRESETS)
def test_policy_trains_to_the_budget(preset, tmp_path_factory) -> None:
    cell = bench.run_cell(preset, 1e-3, 0, SMALL, tmp_path_factory.getbasetemp())
    rollouts = cell.rollouts
    assert rollouts["generated"] == rollouts["trained"] + sum(rollouts["dropped"].values()) + rollouts["surplus"]
    assert rollouts["generated"] >= SMALL.budget or cell.steps == SMALL.steps
    assert cell.curve[0][0] == 0 and cell.curve[-1][0] == rollouts["generated"]
    assert sum(count for count, _, _ in cell.by_start) == SMALL.held_out


def test_command_resumes_and_reports(tmp_path, capsys) -> None:
    words = ["--presets", "grpo;greso", "--seeds", "1", "--lrs", "1e-3", "--cache", str(tmp_path)]
    words += ["--results", str(tmp_path / "r.json"), "--page", str(tmp_path / "R.md"), "--steps", "2", "--batch", "4"]
    words += ["--pool", "48", "--held-out", "32", "--warm-steps", "2", "--hidden", "32"]
    bench.main(words)
    assert capsys.readouterr().out.count("held-out") == 2
    first = json.loads((tmp_path / "r.json").read_text())
    (tmp_path / "R.md").write_text("before\n" + (tmp_path / "R.md").read_text() + "after\n")
    bench.main(words)
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "r.json").read_text()) == first
    text = (tmp_path / "R.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and text.count("## A tiny model") == 1
    with pytest.raises(SystemExit, match="other settings"):
        bench.main([*words, "--n", "4"])


def test_smoothed_curve() -> None:
    cell = {"curve": [(0, 0, 0.0, 0.0), (100, 2, 1.0, 0.5)]}
    got = page.smoothed(cell, 100)
    assert got[0] == 0.0 and got[-1] == pytest.approx(0.95, abs=0.01)
