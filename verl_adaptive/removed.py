"""Presets of earlier versions, and what to write instead: whoever still names one is told, wherever presets are named."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["REMOVED", "removed", "removed_in"]

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
