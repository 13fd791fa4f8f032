"""kill -9 at random moments, resume, compare with the run that was left alone: zero differences, zero corrupt files.

``VERL_ADAPTIVE_KILLS`` sets how often (10 by default).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ran

KILLS = int(os.environ.get("VERL_ADAPTIVE_KILLS", "10"))
ROOT = Path(__file__).resolve().parents[2]


def supervise(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: it forks, which a test process full of threads had better not.
    return ran(sys.executable, "-m", "tests.stats.driver", folder, *options, cwd=ROOT)


@pytest.mark.timeout(120 + 5 * KILLS)
def test_killed_runs_decide_as_if_nothing_had_happened(tmp_path: Path) -> None:
    done = supervise(tmp_path, "--kills", str(KILLS), "--seed", "100")
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["kills"] == KILLS
    assert report["repeated"] > 0, "no kill ever made a step run twice"


def test_the_comparison_notices_what_a_careless_resume_loses(tmp_path: Path) -> None:
    done = supervise(tmp_path, "--kills", "1000", "--forget")
    assert done.returncode == 1 and "differ" in done.stderr
