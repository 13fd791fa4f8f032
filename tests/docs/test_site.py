"""docs/ builds as a site: every page is in its menu, and every link and anchor of a page leads somewhere on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_site_builds_and_holds_the_results(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        call, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Accuracy at equal rollouts" in (tmp_path / "site" / "benchmarks" / "RESULTS" / "index.html").read_text()
    assert "RESULTS" in (tmp_path / "site" / "search" / "search_index.json").read_text()
