"""Errors a user can act on: each names the key or the file, the value, and what to do instead."""

from __future__ import annotations

from verl_adaptive.redact import redact

__all__ = ["AdaptiveError", "ConfigError", "Exhausted", "UsageError", "lacks_extra"]


class AdaptiveError(RuntimeError):
    """Base of every error this package raises on purpose. Its text never shows the password of a URL."""

    def __str__(self) -> str:
        return redact(super().__str__())


class UsageError(AdaptiveError):
    """A command line of ``verl-adaptive`` that is wrong in itself; status 2."""


class ConfigError(AdaptiveError, ValueError):
    """A setting that cannot work.

    Args:
        key: full name of the setting, as on the command line.
        value: what was given.
        hint: what to write instead.
    """

    def __init__(self, key: str, value: object, hint: str) -> None:
        self.key, self.value, self.hint = key, value, hint
        super().__init__(key, value, hint)

    def __str__(self) -> str:
        return redact(f"{self.key}={self.value!r}: {self.hint}")


class Exhausted(AdaptiveError):
    """A step could not be completed and ``adaptive.on_exhausted=raise``."""


def lacks_extra(what: str, error: ModuleNotFoundError, extra: str) -> AdaptiveError:
    """A package of an extra of ``setup.cfg`` is not installed; how to install it from what people have: a clone or a wheel.

    Args:
        what: that needs it, e.g. ``"the report"``.
        error: the import that failed.
        extra: the extra's name.
    """
    return AdaptiveError(
        f"{what} needs {error.name}, which is not installed: in the clone pip install '.[{extra}]', or from the wheel "
        f"pip install '<the wheel>.whl[{extra}]'"
    )
