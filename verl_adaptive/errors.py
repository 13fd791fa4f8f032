"""Errors a user can act on: each names the key or the file, the value, and what to do instead.

Presets of earlier versions are here too: whoever still names one is told what to write, wherever presets are named.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "REMOVED",
    "AdaptiveError",
    "ConfigError",
    "Exhausted",
    "Misspelt",
    "RefusedByVerl",
    "UsageError",
    "lacks_extra",
    "nearest",
    "removed",
    "removed_in",
]


class AdaptiveError(RuntimeError):
    """Base of every error this package raises on purpose.

    Attributes:
        complete: its text says what to write, so that nothing need be added.
    """

    complete = False


class UsageError(AdaptiveError):
    """A command line of ``verl-adaptive`` that is wrong in itself; status 2."""


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
        what: that needs it, e.g. ``"the report"``.
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


#: Preset → what became of it. Runs that it began go on under the same parts: a checkpoint does not know its name.
REMOVED = {
    "full": "was removed in 0.2.0, because solo does better by measurement: write +adaptive=solo, or the same parts, "
    "+adaptive=dapo adaptive/sampler=mopps_by_source adaptive/allocator=aero (docs/combinations.md)",
}


def removed(name: str) -> str:
    """What became of a preset of this name; empty if there was none."""
    return f"preset {name} {REMOVED[name]}" if name in REMOVED else ""


def removed_in(words: Iterable[str]) -> str:
    """The same of the first preset of a training command line that was removed.

    Folders of the user's own may have a preset of that name, and go before ours: nothing is said then.
    """
    found = ""
    for word in words:
        if word.startswith(("--config-dir", "-cd", "--config-path", "-cp", "hydra.searchpath")):
            return ""
        key, _, value = word.lstrip("+").partition("=")
        if key == "adaptive" and not found:
            found = removed(value.strip("'\""))
    return found
