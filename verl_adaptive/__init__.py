"""verl-adaptive: adaptive rollout allocation for verl. Importing this imports neither torch, ray nor verl."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("verl-adaptive")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
