"""One finished run, shared by the tests that only read it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.stores import make_run, write_dataset
from verl_adaptive.cli import main
from verl_adaptive.engine import Engine
from verl_adaptive.simulate import expected


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


@pytest.fixture(scope="session", autouse=True)
def simulated_once():
    """The same policy in the same small world costs the same: most command lines here differ in nothing that it knows."""
    known = {}

    def run(*arguments):
        key = pickle.dumps(arguments)
        if key not in known:
            known[key] = real(*arguments)
        return known[key]

    real = expected._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected, "_run", run)
        yield


@pytest.fixture
def call(capsys):
    """Run a command line: (status, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(w) for w in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run
