"""``verl-adaptive selftest`` on the CPU platform, where it is the same code as on a GPU."""

from __future__ import annotations

import json
import sys

import pytest

from tests.e2e.harness import environment
from tests.programs import ran
from verl_adaptive.integration.selftest.suite import PRESETS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]


def selftest(folder, *words: str) -> dict:
    command = (sys.executable, "-m", "verl_adaptive", "selftest", "--json", "--timeout", "3600", *words)
    done = ran(*command, cwd=folder, timeout=5000, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(folder) not in done.stdout  # it is to be sent
    return json.loads(done.stdout)


def test_a_preset_beside_plain_verl(tmp_path):
    report = selftest(tmp_path, "--presets", "greso")
    items = {item["name"]: item for item in report["items"]}
    assert report["passed"] and list(items) == ["tiny model", "gradient", "plain verl", "+adaptive=greso"]
    greso, plain = (items[name]["facts"] for name in ("+adaptive=greso", "plain verl"))
    assert greso["aborted"] > 0  # it is really tried
    assert greso["updates"] == 6 and greso["rollouts"] >= 3 * 128
    assert plain["s/step"] > 0 and plain["probs diff"] < 1e-3 > greso["probs diff"]
    assert {"every rollout and token is accounted for", "optimizer updates", "metrics are there"} <= set(
        items["+adaptive=greso"]["checks"]
    )
    gradient = items["gradient"]["facts"]  # two ranks, under both of FSDP's forms
    assert gradient["ranks"] == 2
    for strategy in ("fsdp", "fsdp2"):
        found = gradient[f"{strategy} float32"]
        assert found["difference"] <= found["allowed"] < 1e-4 and found["left_out"] == 32 and found["balance"] < 1.2
    assert report["settings"]["strategy"] == "fsdp2" and report["settings"]["engine"].startswith("vllm ")
    assert (
        (tmp_path / "verl-adaptive-selftest" / "selftest.txt").read_text().startswith("verl-adaptive selftest: passed")
    )


@pytest.mark.matrix
def test_all_presets(tmp_path):
    names = {item["name"] for item in selftest(tmp_path, "--presets", "all")["items"]}
    assert names >= {f"+adaptive={preset}" for preset in PRESETS}


@pytest.mark.matrix
def test_a_kill_and_the_asynchronous_trainers(tmp_path):
    items = {item["name"]: item["facts"] for item in selftest(tmp_path)["items"]}
    killed, thinned, separate = list(items)[3:]
    assert [killed, thinned, separate] == [
        "greso, SIGKILL, resume",
        "solo in colocate_async",
        "greso in separate_async",
    ]
    assert items[killed]["aborted"] > 0 < items[thinned]["left out"]  # they are really tried
    log = tmp_path / "verl-adaptive-selftest" / "runs" / "solo-in-colocate_async" / "log.txt"
    assert "trains 128 groups of 1;" in log.read_text()
    assert items[killed]["updates"] == 8 and items[thinned]["updates"] == items[separate]["updates"] == 6
