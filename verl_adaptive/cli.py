"""The command line: ``verl-adaptive COMMAND``, also ``python -m verl_adaptive COMMAND``.

Each command is a module of :mod:`verl_adaptive.commands`, imported when it is asked for. A failure is one line on
standard error and a non-zero status: 1 for what was found, 2 for how it was asked.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from verl_adaptive import __version__
from verl_adaptive.errors import AdaptiveError, ConfigError, UsageError, nearest
from verl_adaptive.text import one_line

#: Command → what it does. The module is ``verl_adaptive.commands.<command with underscores>``.
COMMANDS: dict[str, str] = {
    "doctor": "check this environment, and a training command line before it costs GPU time",
    "selftest": "a tiny model through the real pipeline, in this environment: does training work here?",
    "parts": "list the presets, the parts of each role and their options",
    "stats": "a run's statistics of its prompts; works while training runs",
    "report": "write one HTML file about a run",
    "serve": "show the same page live, for all runs of a folder",
    "replay": "make a recorded run's decisions again, and compare",
    "compare": "arms of an experiment over seeds, or two runs prompt by prompt",
    "export": "write a store to Parquet, CSV or JSON lines, or the rows of a data set by their statistics",
    "bench": "compare methods at equal budgets: tiny model, real pipeline on CPU",
    "simulate": "what the policies would do with your rollouts, on a trace or a parametric pool",
}

#: Set to see the traceback of a failure.
DEBUG = "VERL_ADAPTIVE_DEBUG"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; never raises.

    Args:
        argv: the words after the program's name; by default those of this process.

    Returns:
        The exit status.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; print() would write remarks to the other one
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # ± where the terminal's encoding has none is no failure
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except SystemExit as stop:  # argparse after --help; the plugin when presets cannot be found
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        return _failed(str(stop.code), 1)
    except (UsageError, ConfigError) as error:  # a setting that raises here was given on this line
        return _failed(str(error), 2, error)
    except BrokenPipeError:  # `verl-adaptive stats … | head`
        _forget_output()
        return 141
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except AdaptiveError as error:
        return _failed(str(error), 1, error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _forget_output()
        return _failed(f"{where}{error.strerror or error}", 1, error)
    except MemoryError as error:
        return _failed("out of memory", 1, error)
    except ModuleNotFoundError as error:
        return _failed(f"{error}; it is needed for this command and not installed here", 1, error)
    except Exception as error:
        hint = f"this is a defect; {DEBUG}=1 shows where"
        return _failed(f"{type(error).__name__}: {error} ({hint})", 1, error)


def _failed(message: str, status: int, error: Exception | None = None) -> int:
    if error is not None and os.environ.get(DEBUG):
        raise error
    with contextlib.suppress(OSError):  # nobody listens; the status still tells
        print(f"verl-adaptive: {one_line(message)}", file=sys.stderr)
    return status


def _forget_output() -> None:
    """What cannot be written now cannot be written at exit either, where Python would complain once more."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # a stream without a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    parser = _Parser(
        prog="verl-adaptive",
        usage="verl-adaptive [--version] COMMAND ...",
        description="Adaptive rollout allocation for verl. Training itself needs none of these commands:\n"
        "add +adaptive=solo (or another preset) to your verl command line.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:<16}{text}" for name, text in COMMANDS.items())
        + "\n\nverl-adaptive COMMAND --help tells more.",
    )
    parser.add_argument("--version", action="version", version=f"verl-adaptive {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", help=argparse.SUPPRESS)
    # Only what stands before the command's name is ours: its own options are its own parser's.
    head = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    chosen = parser.parse_args(argv[: head + 1]).command
    if chosen is None:
        parser.print_help()
        return 0
    if chosen not in COMMANDS:
        raise UsageError(f"no command {chosen!r}; {nearest(chosen, COMMANDS)}")
    module = importlib.import_module(f"verl_adaptive.commands.{chosen.replace('-', '_')}")
    words = argv[head + 1 :]
    rest: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, rest = words[:cut], words[cut + 1 :]
    command = _Parser(
        prog=f"verl-adaptive {chosen}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a script that says --lim would break with the next option of that beginning
    )
    module.configure(command)
    args = command.parse_args(words)
    if rest and not hasattr(args, "overrides"):
        raise UsageError(f"{chosen} takes nothing after --: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return module.run(args)
