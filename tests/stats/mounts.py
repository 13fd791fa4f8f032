"""Small file systems of their own, for tests of full and read-only disks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(folder: Path, size: str, remount: str | None = None) -> Iterator[Path]:
    """Mount a tmpfs on ``folder`` (or remount the one there, then back to writable), or skip with the reason."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder.mkdir(exist_ok=True)
    options = f"size={size}" if remount is None else f"remount,{remount}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        if remount is None:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        else:
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
