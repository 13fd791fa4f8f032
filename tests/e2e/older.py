"""Other releases of verl, fetched from the package index and put in front of the installed one."""

from __future__ import annotations

import compileall
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.e2e.harness import ASSETS


def verl_folder(version: str) -> Path:
    """A folder with a release of verl and its metadata, for PYTHONPATH; fetched once and kept.

    Its dependencies are those of the installed release. Only ``verl`` itself is taken from the wheel: 0.9.0's also brings
    top-level packages ``tests`` and ``scripts``.
    """
    folder = ASSETS / f"verl-{version}"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run(
            [*pip, "--only-binary=:all:", "--dest", str(folder), f"verl=={version}"], check=True, timeout=600
        )
        (wheel,) = folder.glob("verl-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            wanted = ("verl/", f"verl-{version}.dist-info/")
            packed.extractall(folder, [name for name in packed.namelist() if name.startswith(wanted)])
        compileall.compile_dir(folder / "verl", quiet=2)  # a dozen processes import it
        (folder / "complete").touch()
    return folder
