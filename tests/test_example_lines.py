"""``benchmarks/example_lines.py`` on a clone made here: what scripts would run, and what doctor says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

from benchmarks.example_lines import lines_of, main, unpacked
from benchmarks.sections import RECORDS

BATCHES = (
    "data.train_batch_size=64 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.ppo_mini_batch_size=32 "
    "actor_rollout_ref.actor.use_dynamic_bsz=true trainer.n_gpus_per_node=2 trainer.total_epochs=2"
)
SCRIPTS = {
    "grpo/run.sh": f"""#!/usr/bin/env bash
set -xeuo pipefail
ulimit -n 4294967296
device=$(python3 -c 'import torch_npu' && echo npu || echo gpu)
[ "$device" = gpu ]
rm -rf "$HOME" && pip install nothing
EXTRA=(trainer.experiment_name="two words $MODEL_NAME")
LAUNCH=(uv run --extra vllm python3)
"${{LAUNCH[@]}}" -m verl.trainer.main_ppo {BATCHES} actor_rollout_ref.rollout.n=8 "${{EXTRA[@]}}" "$@" 2>&1 | tee log.txt
""",
    "grpo/old.sh": f"python3 -m verl.trainer.main_ppo {BATCHES} actor_rollout_ref.no_such_key=1",
    "ppo/run.sh": f"python3 -m verl.trainer.main_ppo {BATCHES} actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=rloo",
    "sft/run.sh": "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_batch_size=8",
    "get.sh": "git clone https://example.com/x && cd x",
    "usage.sh": "echo 'usage: $0 NODES'; exit 1",
}


@pytest.fixture
def clone(tmp_path) -> Path:
    root = tmp_path / "clone"
    for name, text in SCRIPTS.items():
        (root / "examples" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "examples" / name).write_text(text)
    author = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "Scripts")):
        subprocess.run(["git", "-C", root, *words], check=True)
    return root


def test_scripts_run_nothing_but_stand_ins(clone, tmp_path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    unpacked(clone, "HEAD", tmp_path / "copy")
    lines = {line.script: line for line in lines_of(tmp_path / "copy", home)}
    assert len(lines) == len(SCRIPTS) and home.is_dir()
    words = lines["examples/grpo/run.sh"].words
    assert words[:6] == ["uv", "run", "--extra", "vllm", "python3", "-m"] and "actor_rollout_ref.rollout.n=8" in words
    assert words[-1] == f"trainer.experiment_name=two words {home}/MODEL_NAME"
    assert lines["examples/sft/run.sh"].words[0] == "torchrun"
    assert (
        lines["examples/get.sh"].why == "only runs git clone https://example.com/x"
        and not lines["examples/get.sh"].words
    )
    assert lines["examples/usage.sh"].why == "usage: $0 NODES"
    assert not (clone / "log.txt").exists()
    with pytest.raises(SystemExit, match="no clone of verl with a commit v9"):
        unpacked(clone, "v9", tmp_path / "none")


def test_each_line_has_its_class(clone, tmp_path, monkeypatch, not_simulated) -> None:
    out = tmp_path / "lines.json"
    monkeypatch.setattr(sys, "argv", ["example_lines", str(clone), "--presets", "solo", "--json", str(out)])
    for name in ("HF_HUB_OFFLINE", "VERL_PLATFORM"):  # it sets the one, and takes the other away
        monkeypatch.setenv(name, "1")
    main()
    data = json.loads(out.read_text())
    found = {line["script"].removeprefix("examples/"): line["solo"] for line in data["lines"]}
    assert data["counts"] == {"solo": {"priced": 1, "verl refuses": 1, "refused": 1, "another program": 1}}
    assert found["grpo/run.sh"]["grpo_step"] == 64 * 8
    assert found["grpo/run.sh"]["grpo_total"] == 64 * 8 * 2 * (data["prompts"] // 64)
    assert "no_such_key" in found["grpo/old.sh"]["reason"] and found["grpo/old.sh"]["class"] == "verl refuses"
    assert "algorithm.adv_estimator='rloo'" in found["ppo/run.sh"]["reason"]
    assert str(tmp_path) not in out.read_text()
    (section,) = (records for records in RECORDS if records.file == "example_lines.json")
    assert "| `solo` | 1 | 1 | 1 | 1 | 0 |" in section.lines(data)
