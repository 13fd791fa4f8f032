"""Parts in a file of the user's own: ``adaptive.sampler.name=parts.py:Mine``."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from verl_adaptive.errors import ConfigError

__all__ = ["with_own_parts"]

_FILE = re.compile(r"(adaptive\.\w+\.name)=(['\"]?)([^\s'\"]+\.py):(\w+)\2")


def with_own_parts(words: str) -> str:
    """The words with ``FILE.py:Class`` as ``module:Class``, and the file's folder where Python looks for modules.

    Training takes ``module:Class``, with the module on ``PYTHONPATH``: what was tried here goes there unchanged but for
    that.

    Raises:
        ConfigError: no such file, or Python knows another module of its name.
    """

    def replaced(match: re.Match[str]) -> str:
        key, _, file, cls = match.groups()
        path = Path(file).resolve()
        if not path.is_file():
            raise ConfigError(key, f"{file}:{cls}", f"there is no file {path}")
        module, folder = path.stem, str(path.parent)
        if not module.isidentifier():
            raise ConfigError(key, f"{file}:{cls}", f"{module!r} cannot be the name of a module; rename the file")
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != path:
            where = "of Python itself" if spec is None or spec.origin is None else spec.origin
            raise ConfigError(key, f"{file}:{cls}", f"there is another module {module!r} ({where}); rename the file")
        return f"{key}={module}:{cls}"

    return _FILE.sub(replaced, words)
