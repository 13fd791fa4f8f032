"""One finished run, shared by the tests that only read it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.stores import make_run, write_dataset
from verl_adaptive.engine import Engine


class Run(NamedTuple):
    folder: Path
    data: Path
    rows: list
    engine: Engine


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    engine, rows = make_run(folder / "checkpoints")
    return Run(folder / "checkpoints", write_dataset(folder / "train.parquet", rows), rows, engine)
