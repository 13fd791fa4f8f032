"""The command line as a whole: help, version, and every failure on one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from verl_adaptive import __version__
from verl_adaptive.cli import COMMANDS
from verl_adaptive.commands.text import clean, one_line


def test_version(call) -> None:
    assert call("--version") == (0, f"verl-adaptive {__version__}\n", "")


def test_no_command_shows_all_of_them(call) -> None:
    status, out, _ = call()
    assert status == 0 and all(f"  {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, call) -> None:
    status, out, _ = call(name, "--help")
    assert status == 0 and out.startswith(f"usage: verl-adaptive {name}")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "verl_adaptive", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"verl-adaptive {__version__}\n")


def test_the_command_imports_nothing_heavy() -> None:
    code = "import sys, verl_adaptive.cli as c; c.main(['parts']); print([m for m in %r if m in sys.modules])"
    heavy = ("verl", "torch", "ray", "transformers", "pandas")
    done = subprocess.run([sys.executable, "-c", code % (heavy,)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["sats"], 2, "did you mean stats?"),
        (["nothing-like-it"], 2, "there are doctor, parts"),
        (["stats"], 2, "required: STORE"),
        (["stats", "/no/such/place"], 1, "/no/such/place does not exist"),
        (["stats", "x", "--limit", "0"], 2, "must be 1 or greater"),
        (["stats", "x", "--limit", "many"], 2, "--limit"),
        (["stats", "x", "--what"], 2, "--what"),
        (["stats", "x", "--", "y"], 2, "takes nothing after --"),
        (["stats", "mysql://h/d"], 1, "only SQLite"),
        (["stats", "sqlite:///"], 1, "SQLite needs a file"),
        (["stats", "://"], 1, "not a database URL"),
        (["export", "x", "y.xlsx"], 1, ".parquet, .csv, .jsonl"),
        (["filter-dataset", "a", "b"], 2, "--stats"),
        (["compare", "a"], 2, "B"),
        (["--nonsense"], 2, "--nonsense"),
        (["parts", "gresso"], 1, "did you mean greso?"),
        (["doctor", "--", "--multirun"], 1, "does not understand --multirun"),
    ],
)
def test_a_failure_is_one_line(words, status, says, call) -> None:
    got, out, err = call(*words)
    assert got == status and out == ""
    assert err.startswith("verl-adaptive: ") and err.count("\n") == 1 and says in err


def test_an_unexpected_failure_is_one_line_too(call, monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("verl_adaptive.commands.parts.describe", broken)
    monkeypatch.delenv("VERL_ADAPTIVE_DEBUG", raising=False)
    status, out, err = call("parts")
    assert (status, out, err.count("\n")) == (1, "", 1) and "RuntimeError: first second" in err
    monkeypatch.setenv("VERL_ADAPTIVE_DEBUG", "1")
    with pytest.raises(RuntimeError):
        call("parts")


def test_a_closed_pipe_is_quiet(finished) -> None:
    """``verl-adaptive stats … | head -1``."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "verl_adaptive", "stats", str(finished.folder)],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 141 and done.stderr == ""


def test_text_is_made_safe() -> None:
    assert clean("a\x1b[31m\u202eb\n\x9bc\ud800\u2028") == "a\\x1b[31m\\u202eb\\n\\x9bc\\ud800\\u2028"
    assert clean("é 漢字 ∑ 😀") == "é 漢字 ∑ 😀"
    assert clean("x" * 100, 10) == "x" * 9 + "…"
    assert one_line("a\n  b\x07") == "a b\\x07"
