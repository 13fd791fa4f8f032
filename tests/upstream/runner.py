"""Runs pytest once per copy of verl, each time in a fork of a process that has imported what verl needs.

verl and all below it take many seconds to import, most of them not verl's own. Called with a JSON list of jobs::

    [{"tree": "/tmp/…", "tests": ["…/test_x_on_cpu.py"], "plugins": [], "rootdir": "…", "basetemp": "/tmp/…",
      "report": "/tmp/….xml", "output": "/tmp/….txt"}, …]

``tree`` comes first on ``sys.path``; null: verl as it is installed. ``plugins`` are pytest's. Exit status 0 once every job has been run, whatever
its tests say: that is in the reports.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading

import pytest

#: What verl's trainers import, verl itself aside; a name that is not installed costs nothing but the time saved.
SHARED = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torchdata.stateful_dataloader"),
    *("tensordict", "ray", "transformers", "accelerate", "peft", "datasets", "transfer_queue"),
    *("hydra", "aiohttp", "fastapi", "vllm"),
)


def _tests(job: dict) -> int:
    """Run a job's tests, in the child."""
    out = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if job["tree"] is not None:
        sys.path.insert(0, job["tree"])
    arguments = ["-q", "-c", os.devnull, "--rootdir", job["rootdir"], "--import-mode=importlib", "--tb=short"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "ignore", f"--junitxml={job['report']}"]
    for plugin in job["plugins"]:
        arguments += ["-p", plugin]
    return pytest.main([*arguments, "--basetemp", job["basetemp"], *job["tests"]])


def main(jobs: list[dict]) -> None:
    """Run the jobs, one after another."""
    for name in SHARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "verl" not in sys.modules, "one of verl's dependencies imports verl: a fork could not choose its own"
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    for job in jobs:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = _tests(job)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(int(status))
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
