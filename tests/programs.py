"""Programs that tests start: some to their end, and commands of ours that run until Ctrl-C ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def ran(
    *command: object,
    cwd: str | Path | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] = os.environ,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, whatever its status; it had these variables beside those of ``env``."""
    words, env = list(map(str, command)), {**env, **variables}
    return subprocess.run(words, cwd=cwd, timeout=timeout, env=env, capture_output=True, text=True, check=False)


def _heed_interrupts() -> None:
    """A background job of a shell ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def program(*words: object) -> subprocess.Popen[str]:
    """``verl-adaptive`` with these words."""
    return subprocess.Popen(
        [sys.executable, "-m", "verl_adaptive", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,  # noqa: PLW1509 - it makes one system call
    )


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its status after Ctrl-C, and what it still had to say of errors."""
    process.send_signal(signal.SIGINT)
    status = process.wait(60)
    said = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    return status, said
