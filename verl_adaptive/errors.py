"""Errors a user can act on: each names the key or the file, the value, and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AdaptiveError(RuntimeError):
    """Base of every error this package raises on purpose.

    Attributes:
        complete: its text says what to write, so that nothing need be added.
    """

    complete = False


class UsageError(AdaptiveError):
    """A command line of ``verl-adaptive`` that is wrong in itself; status 2, as a :class:`ConfigError` there."""


class ConfigError(AdaptiveError, ValueError):
    """A setting that cannot work.

    Args:
        key: full name of the setting, as on the command line.
        value: what was given.
        hint: what to write instead.
    """

    complete = True

    def __init__(self, key: str, value: object, hint: str) -> None:
        self.key, self.value, self.hint = key, value, hint
        super().__init__(key, value, hint)

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.hint}"


class Misspelt(AdaptiveError):
    """A word of a training command line that nobody would read, and what was meant."""

    complete = True


class RefusedByVerl(AdaptiveError):
    """A command line that verl would not take without a preset, either."""


class Exhausted(AdaptiveError):
    """A step could not be completed and ``adaptive.on_exhausted=raise``."""


def lacks_extra(what: str, error: ModuleNotFoundError, extra: str) -> AdaptiveError:
    """A package of an extra of ``setup.cfg`` is not installed; how to install it from what people have: a clone or a wheel.

    Args:
        what: that needs it, e.g. ``"serve"``.
        error: the import that failed.
        extra: the extra's name.
    """
    return AdaptiveError(
        f"{what} needs {error.name}, which is not installed: in the clone pip install '.[{extra}]', or from the wheel "
        f"pip install '<the wheel>.whl[{extra}]'"
    )


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A hint for a name that is none of the known ones: the one that is nearest, else ``otherwise``, else all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(known)}" if otherwise is None else otherwise
