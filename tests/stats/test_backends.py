"""What differs between databases is in one place: a module of ``verl_adaptive.stats.backends`` each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sqlalchemy import make_url

import verl_adaptive
from verl_adaptive.stats import JournalError
from verl_adaptive.stats.backends import Backend, find_backend, known_backends
from verl_adaptive.stats.database import local_file, parse_url

ROOT = Path(verl_adaptive.__file__).parent


def test_nobody_else_asks_which_database_it_is() -> None:
    asked = []
    for path in sorted(ROOT.rglob("*.py")):
        if "backends" in path.parts or "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = (
                node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
            )
            if name in ("dialect", "sqlite", "postgresql", "drivername"):
                asked.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    # a path is the URL of a SQLite file
    assert [at.split(":")[0] for at in asked] == ["stats/database.py"], asked


def test_every_backend_says_what_is_needed_of_it() -> None:
    assert known_backends() == ["postgresql", "sqlite"]
    for name in known_backends():
        backend = find_backend(name)
        assert backend is not None and issubclass(backend, Backend) and backend.name == name and backend.title
        assert backend.normal(parse_url(backend.example)) == parse_url(backend.example)
        assert make_url(backend.example).get_backend_name() == name


@pytest.mark.parametrize("name", ["mysql", "", "os", "..", "sqlite.evil", "__init__", "SQLITE"])
def test_there_are_no_others(name: str) -> None:
    assert find_backend(name) is None


def test_which_databases_are_files() -> None:
    assert local_file("/data/a.sqlite") == Path("/data/a.sqlite")
    assert local_file("sqlite:////data/a.sqlite?journal_mode=delete") == Path("/data/a.sqlite")
    assert local_file("postgresql://h/d") is None
    with pytest.raises(JournalError, match="only PostgreSQL"):
        local_file("mysql://h/d")
