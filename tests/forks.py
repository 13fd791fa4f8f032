"""Programs in forks of one process, which has imported what takes long: a start takes seconds fewer than Python's own.

Run as a program it imports the modules that it is given and serves: each line of its input is a job of JSON, a program as
``python`` would be given it; each line of its output the exit status. A fork ends without an interpreter's clean-up.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
#: What verl's trainers import, verl itself aside: a fork chooses its own platform, plugins and copy of verl.
BELOW_VERL = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torchdata.stateful_dataloader"),
    *("tensordict", "ray", "transformers", "accelerate", "peft", "datasets", "transfer_queue"),
    *("hydra", "aiohttp", "fastapi", "vllm", "pytest"),
)


@contextlib.contextmanager
def forks(modules: Iterable[str] = BELOW_VERL, **env: str | None) -> Iterator[Callable]:
    """Start the process; yields ``python(*words, cwd=…, **env)``, which gives what ``python WORDS`` came to.

    Args:
        modules: what it imports before it forks; one that is not installed costs nothing but the time saved.
        env: its environment beside this process's own; a program's comes on top. A variable that is None is not set.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forks", *modules],
        cwd=ROOT,
        env={k: v for k, v in {**os.environ, "PYTHONPATH": str(ROOT), **env}.items() if v is not None},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def python(*words: object, cwd: Path, **env: str | None) -> subprocess.CompletedProcess[str]:
        said = [cwd / f".fork-{name}" for name in ("out", "err")]
        job = {"words": list(map(str, words)), "cwd": str(cwd), "env": env, "said": list(map(str, said))}
        print(json.dumps(job), file=process.stdin, flush=True)
        status = process.stdout.readline()
        assert status, "the process that forks is gone"
        return subprocess.CompletedProcess(words, int(status), *(path.read_text(errors="replace") for path in said))

    yield python
    process.communicate(timeout=60)


def _next_job(answers: TextIO) -> dict:
    """Serve; returns in a fork only."""
    for line in sys.stdin:
        job: dict = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            return job
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
    os._exit(0)


def _prepare(job: dict) -> None:
    """Have the streams, the folder, the environment and the path of a job's program."""
    for number, path in enumerate([os.devnull, *job["said"]]):
        os.dup2(os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if number else 0)), number)
    os.chdir(job["cwd"])
    for name, value in job["env"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    first = job["words"][0]
    folder = job["cwd"] if first.startswith("-") else os.path.dirname(os.path.abspath(first))
    sys.path[:1] = [folder, *filter(None, (job["env"].get("PYTHONPATH") or "").split(os.pathsep))]


def _run(words: list[str]) -> int:
    """Be the program.

    Returns:
        Its exit status.
    """
    first, *rest = words
    try:
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = words
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0)
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints when it is imported is no answer
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "verl" in sys.argv or "verl" not in sys.modules, "one of verl's dependencies imports verl"
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    gc.freeze()  # a million objects, which no fork need look at, nor copy by looking
    job = _next_job(said)
    status = 1
    try:
        _prepare(job)
        status = _run(job["words"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
