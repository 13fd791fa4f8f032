"""The command line as a whole: help, version, and every failure on one line."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.lines import parsed
from tests.programs import ran
from verl_adaptive import __version__
from verl_adaptive.cli import COMMANDS
from verl_adaptive.simulate import compose_preset
from verl_adaptive.text import clean, one_line


def test_version(call) -> None:
    assert call("--version") == (0, f"verl-adaptive {__version__}\n", "")


def test_no_command_shows_all_of_them(call) -> None:
    status, out, _ = call()
    assert status == 0 and all(f"  {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, call) -> None:
    status, out, _ = call(name, "--help")
    assert status == 0 and out.startswith(f"usage: verl-adaptive {name}")
    assert f"examples:\n  verl-adaptive {name}" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described_with_an_example_or_its_default(name) -> None:
    module = importlib.import_module(f"verl_adaptive.commands.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser()
    module.configure(parser)
    for action in parser._actions[1:]:
        assert action.help and len(action.help) > 15, action.option_strings
        if action.option_strings and action.nargs != 0:
            shown = any(f"{option} " in action.help for option in action.option_strings)
            shown |= f"{action.option_strings[0]} " in (module.__doc__ or "")
            assert shown or "default" in action.help, action.option_strings


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_help_are_right(name) -> None:
    """They parse, conditions are conditions, and what `simulate` is told composes: one named a setting that is refused."""
    module = importlib.import_module(f"verl_adaptive.commands.{name.replace('-', '_')}")
    text = re.sub(r" *\\\n *", " ", module.__doc__)
    lines = re.findall(rf"^  verl-adaptive {name}(.*)$", text, flags=re.M)
    assert lines
    for line in lines:
        args = parsed([name, *shlex.split(re.sub(r" {2,}\S.*$", "", line))])
        for preset in (args.preset or ["grpo", "greso"]) if name == "simulate" else ():
            if "custom" not in preset:
                compose_preset([*preset.split(), *args.overrides])


def test_the_module_is_the_command() -> None:
    program = Path(sys.executable).with_name("verl-adaptive")
    if not program.exists():
        pytest.skip("the package is not installed with its command")
    for start in ([sys.executable, "-m", "verl_adaptive"], [program]):
        done = ran(*start, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"verl-adaptive {__version__}\n", "")


def test_the_command_imports_nothing_heavy() -> None:
    code = "import sys, verl_adaptive.cli as c; c.main(['parts']); print([m for m in %r if m in sys.modules])"
    heavy = ("verl", "torch", "ray", "transformers", "pandas")
    done = ran(sys.executable, "-c", code % (heavy,))
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["sats"], 2, "did you mean stats?"),
        (["nothing-like-it"], 2, "there are doctor, selftest"),
        (["stats"], 2, "required: STORE"),
        (["stats", "/no/such/place"], 1, "/no/such/place does not exist"),
        (["stats", "x", "--limit", "0"], 2, "must be 1 or greater"),
        (["stats", "x", "--limit", "many"], 2, "'many' is not a whole number"),
        (["stats", "x", "--lim", "3"], 2, "unrecognized arguments: --lim"),
        (["stats", "x", "--where", ""], 2, "the condition is empty"),
        (["stats", "x", "--desc"], 2, "--desc needs --sort"),
        (["stats", ""], 1, "name is empty"),
        (["stats", "/dev/null"], 1, "holds no run"),
        (["stats", "/proc/self/mem"], 1, "/proc/self/mem holds no run"),
        (["report", "x", "-o", ""], 1, "no name"),
        (["export", "x", "y.csv", "--what", "steps", "--where", "visits > 0"], 2, "--where is about prompts"),
        (["stats", "x", "--", "y"], 2, "takes nothing after --"),
        (["export", "x", "y.xlsx"], 2, ".parquet, .csv, .jsonl"),
        (["export", "x", "y.csv", "--keep-unseen"], 2, "--keep-unseen needs --data"),
        (["serve", "x", "--rollouts", "y"], 2, "needs --data"),
        (["stats", "x", "--where", "visits >"], 2, "cannot read the condition"),
        (["compare"], 2, "RUN"),
        (["--nonsense"], 2, "--nonsense"),
        (["parts", "gresso"], 2, "did you mean greso?"),
    ],
)
def test_a_failure_is_one_line(words, status, says, refusal) -> None:
    said = refusal(*words, status=status)
    assert said.startswith("verl-adaptive: ") and says in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody who may not read")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_may_not_be_read_is_one_line(what, finished, tmp_path) -> None:
    """As another user, who sees the packages but not the store."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    secret = tmp_path / "run.parquet" if what == "file" else tmp_path / "run"
    if what == "file":
        shutil.copy(finished.data, secret)
    else:
        secret.mkdir()
    secret.chmod(0)
    code = (
        "import verl_adaptive.cli as c, os, sys, importlib; "  # imported while still allowed to
        "[importlib.import_module(f'verl_adaptive.{m}') for m in ('commands.stats', 'commands.output', "
        "'report.overview', 'stats.run')]; import pandas; os.setgid(65534); os.setuid(65534); sys.exit(c.main(['stats', sys.argv[1]]))"
    )
    done = ran(sys.executable, "-c", code, secret)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert secret.name in done.stderr and "defect" not in done.stderr


def test_an_unexpected_failure_is_one_line_too(call, refusal, monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("verl_adaptive.commands.parts.describe", broken)
    monkeypatch.delenv("VERL_ADAPTIVE_DEBUG", raising=False)
    assert "RuntimeError: first second" in refusal("parts")
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


@pytest.mark.parametrize(
    ("where", "status", "said"),
    [(">/dev/full", 1, "No space left on device"), ("2>/dev/full", 0, None), (">&-", 0, None)],
)
def test_output_that_goes_nowhere(where, status, said) -> None:
    line = f"'{sys.executable}' -m verl_adaptive parts greso {where}"
    done = ran("sh", "-c", line)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert "defect" not in done.stderr and "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert said is None or (said in done.stderr and done.stderr.count("\n") == 1)


def test_remarks_are_no_part_of_the_answer_where_nobody_hears_them(finished, tmp_path) -> None:
    line = f"'{sys.executable}' -m verl_adaptive export '{finished.folder}' '{tmp_path / 'a.csv'}' 2>&-"
    done = ran("sh", "-c", line)
    assert (done.returncode, done.stdout) == (0, "") and (tmp_path / "a.csv").exists()


def test_text_is_made_safe() -> None:
    assert clean("a\x1b[31m\u202eb\n\x9bc\ud800\u2028") == "a\\x1b[31m\\u202eb\\n\\x9bc\\ud800\\u2028"
    assert clean("é 漢字 ∑ 😀") == "é 漢字 ∑ 😀"
    assert clean("x" * 100, 10) == "x" * 9 + "…"
    assert one_line("a\n  b\x07") == "a b\\x07"


def test_an_encoding_without_our_signs_is_no_failure() -> None:
    """In a Latin-1 or ASCII locale every table with ± or λ ended with a UnicodeEncodeError."""
    done = ran(sys.executable, "-m", "verl_adaptive", "parts", "mopps", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and "\\u03b3*, the pass rate" in done.stdout
