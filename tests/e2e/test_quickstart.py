"""The README's first command, in small: what people run before anything else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.harness import REPO

pytestmark = pytest.mark.e2e


def test_the_quickstart_trains_and_shows_what_came_of_it(tmp_path) -> None:
    arguments = ["--arms", "grpo,solo", "--seeds", "1", "--rollouts", "256", "--work", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(REPO / "examples" / "cpu" / "quickstart.py"), *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(result["preset"], result["n"]) for result in results] == [("grpo", 8), ("solo", 8)]
    assert all(result["curve"][-1][0] == 256 for result in results)
    assert (tmp_path / "accuracy.svg").exists()
    report = next(line for line in done.stdout.splitlines() if line.strip().startswith("verl-adaptive report"))
    page = tmp_path / "report.html"
    command = [*report.split()[1:-1], str(page)]
    subprocess.run([sys.executable, "-m", "verl_adaptive", *command], cwd=tmp_path, check=True, timeout=300)
    assert page.stat().st_size > 10_000
