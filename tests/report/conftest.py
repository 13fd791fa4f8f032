"""A finished run with hostile texts, its data set, and the report of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.stores import HOSTILE, make_run, write_dataset
from verl_adaptive.cli import main
from verl_adaptive.engine import Engine


class Reported(NamedTuple):
    folder: Path
    data: Path
    engine: Engine
    html: str
    path: Path


@pytest.fixture(scope="session")
def reported(tmp_path_factory) -> Reported:
    folder = tmp_path_factory.mktemp("report")
    engine, rows = make_run(folder / "run", prompts=150, steps=40, run_id=f"p/{HOSTILE}"[:60])
    other = {**rows[7], "reward_model": {"style": "rule", "ground_truth": "<b>7</b>"}}
    data = write_dataset(folder / "train.parquet", [*rows, other])
    out = folder / "report.html"
    assert main(["report", str(folder / "run"), "-o", str(out), "--data", str(data), "--limit", "60"]) == 0
    return Reported(folder / "run", data, engine, out.read_text(encoding="utf-8"), out)
