"""One finished run, shared by the tests that only read it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.stores import make_run, write_dataset
from verl_adaptive.cli import main
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


@pytest.fixture
def call(capsys):
    """Run a command line: (status, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(w) for w in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def refusal(call):
    """Run a command line that must fail with one line; the line."""

    def run(*words: object, status: int = 1) -> str:
        got, out, err = call(*words)
        assert (got, out, err.count("\n")) == (status, "", 1), (got, out, err)
        return err

    return run
