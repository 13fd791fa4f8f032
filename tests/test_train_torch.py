"""The tiny in-process benchmark: its parts, and every policy for two steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import tiny_learner as tiny  # noqa: E402
from benchmarks import torch_run  # noqa: E402
from benchmarks import train_torch as bench  # noqa: E402

SMALL = bench.Settings(
    steps=2, batch=4, n=8, pool=48, held_out=32, judged=16, warm_steps=2, hidden=32, evaluate_every=1
)


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


def test_every_preset_is_in_it_and_composes() -> None:
    shipped = {p.stem for p in Path(bench.HERE.parent, "hydra_configs/verl_adaptive/adaptive").glob("*.yaml")}
    for words in bench.PRESETS.values():
        torch_run.compose_preset(words)
    settled = {"adaptive.allocator.form=pipelined"}  # what the preset has in this process anyway
    assert shipped <= {words[0] for words in bench.PRESETS.values() if settled.issuperset(words[1:])}


#: One of each kind.
TRAINED = [
    "grpo",
    "dapo",
    "greso-tight",
    "aero",
    "cero",
    "pilots",
    "full",
    "full-published_mopps",
    "solo",
    "oracle+full",
]


@pytest.mark.parametrize("preset", TRAINED)
def test_policy_trains_to_the_budget(preset, tmp_path_factory) -> None:
    cell = bench.run_cell(("base", preset, 1e-3, 0), SMALL, tmp_path_factory.getbasetemp())
    rollouts = cell.rollouts
    used = rollouts["trained"] + sum(rollouts["dropped"].values()) + rollouts["held"]
    assert rollouts["generated"] == used
    assert rollouts["generated"] >= SMALL.budget or preset.startswith("cero")  # which plans its own end
    last = dict(zip(bench.COLUMNS, cell.curve[-1], strict=True))
    assert last["rollouts"] == rollouts["generated"] and last["updates"] == cell.steps * SMALL.updates
    assert last["tokens_trained"] + last["tokens_zero_advantage"] <= last["tokens_generated"]
    assert 0 <= last["informative"] <= last["groups"]


def test_a_cell_is_the_same_every_time(tmp_path) -> None:
    one, two = (bench.run_cell(("base", "greso", 1e-3, 1), SMALL, tmp_path) for _ in range(2))
    assert one.curve == two.curve and one.rollouts == two.rollouts


def test_few_questions_of_the_sparse_pool_are_informative(tmp_path) -> None:
    pools = {}
    for variant in ("base", "sparse"):
        run = torch_run.Run(bench.Cell(variant, "grpo", 1e-3, 0), bench.settings_of(variant, SMALL), tmp_path)
        rate = tiny.pass_rates(run.model, run.pool)
        pools[variant] = np.sort(rate * (1 - rate))
        assert len(rate) == SMALL.pool and len(run.held_out) == SMALL.held_out and len(run.judged) == SMALL.judged
        assert not set(run.pool.code.tolist()) & set(run.held_out.code.tolist())
    assert pools["sparse"].mean() < pools["base"].mean()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("greso", "is no cell; write"),
        ("base/nope/lr=1/seed=0", "no preset 'nope'; there are"),
        ("huge/greso/lr=1/seed=0", "no variant 'huge'; there are"),
        ("base/greso/lr=fast/seed=0", "must be a number"),
    ],
)
def test_a_wrong_name_says_what_is_right(text, message, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(["--cell", text])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_command_lists_its_cells(capsys) -> None:
    bench.main(["--list", "--presets", "grpo", "--lrs", "1e-3", "--seeds", "1", "--fresh"])
    assert capsys.readouterr().out == "base/grpo/lr=0.001/seed=0\n"


def test_command_resumes_and_checks(tmp_path, capsys) -> None:
    words = ["--lrs", "1e-3", "--cache", str(tmp_path), "--results", str(tmp_path / "r.json")]
    bench.main(["--presets", "greso", "--seeds", "2", *words], SMALL)
    assert capsys.readouterr().out.count("held-out") == 2
    first = (tmp_path / "r.json").read_text()
    bench.main(["--presets", "greso", "--seeds", "2", *words], SMALL)
    assert capsys.readouterr().out == "" and (tmp_path / "r.json").read_text() == first

    data = json.loads(first)
    assert [c["command"].split('"')[1] for c in data["cells"]] == [
        f"base/greso/lr=0.001/seed={seed}" for seed in (0, 1)
    ]

    again = ["--cell", "base/greso/lr=0.001/seed=1", "--check", *words]
    bench.main(again, SMALL)
    assert "inside" in capsys.readouterr().out and (tmp_path / "r.json").read_text() == first
    for cell in data["cells"]:
        for point in cell["curve"]:
            point[2] += 0.5
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(SystemExit, match="OUTSIDE"):
        bench.main(again, SMALL)
    with pytest.raises(SystemExit, match="other settings"):
        bench.main([*words, "--presets", "grpo"], replace(SMALL, n=4))
