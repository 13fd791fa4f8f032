"""What kind of file system a path is on: SQLite's write-ahead log needs shared memory, which only a local disk has."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["filesystem_of", "wal_is_safe"]

# A list of what is known to work, not of what is known to fail: an unknown file system gets the rollback journal.
_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "tmpfs", "ramfs"}
)


def _unescape(field: str) -> str:
    # mountinfo writes blanks in paths as octal: `\040`.
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), os.fsencode(field)))


def _mounts(text: str) -> list[tuple[str, str, str]]:
    """``(mount point, type, superblock options)`` of every line of a mountinfo file."""
    out = []
    for line in text.splitlines():
        left, found, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if found and len(fields) >= 6 and len(tail) >= 3:
            out.append((_unescape(fields[4]), tail[0], tail[2]))
    return out


def filesystem_of(path: str | os.PathLike[str], mountinfo: str | None = None) -> str:
    """The type of the file system that holds ``path``, as the kernel names it; ``"unknown"`` where it does not say.

    An overlay (containers) is named after the layer that is written to, if that can be found: ``"overlay:ext4"``.

    Args:
        path: need not exist; its nearest existing parent counts.
        mountinfo: the text of ``/proc/self/mountinfo``, for tests.
    """
    real = os.path.realpath(path)
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return "unknown"
    mounts = _mounts(mountinfo)

    def holder(where: str, skip_overlay: bool = False) -> tuple[str, str, str] | None:
        best = None
        for mount in mounts:  # of several mounts on one point the last one hides the others
            point = mount[0].rstrip("/") or ""
            inside = where == mount[0] or where.startswith(point + "/")
            if (
                inside
                and not (skip_overlay and mount[1] == "overlay")
                and (best is None or len(mount[0]) >= len(best[0]))
            ):
                best = mount
        return best

    mount = holder(real)
    if mount is None:
        return "unknown"
    if mount[1] != "overlay":
        return mount[1]
    for option in mount[2].split(","):
        if option.startswith("upperdir="):
            upper = option.removeprefix("upperdir=")
            # A container sees the host's path of the layer, which usually does not exist inside it.
            if os.path.isdir(upper) and (under := holder(os.path.realpath(upper), skip_overlay=True)):
                return f"overlay:{under[1]}"
    return "overlay"


def wal_is_safe(kind: str) -> bool:
    """Whether SQLite may use its write-ahead log there."""
    return kind.removeprefix("overlay:") in _LOCAL
