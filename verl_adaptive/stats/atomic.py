"""Files that are either whole or not there: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"
"""Suffix of files that are still being written; a crashed writer leaves them behind."""


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that readers see all of it or none; the process's umask decides its permissions.

    The rename is durable only after :func:`sync_directory`.

    Args:
        path: the file's final name.
        write: writes the content to the open file it is given.

    Raises:
        OSError: the file system refused; the temporary file is removed if possible.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_file(path: Path, limit: int, tail: int | None = None) -> bytes:
    """Read a file whole; a pipe or a device, which could block or never end, is refused.

    Args:
        path: the file; a link to one will do.
        limit: bytes beyond which it is refused unread.
        tail: so many of its last bytes only.

    Raises:
        OSError: not there, not a regular file, larger than ``limit``, or the file system refused.
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if about.st_size > limit:
            raise OSError(errno.EFBIG, f"{about.st_size} bytes, more than the {limit} expected", str(path))
        if tail is not None:
            file.seek(max(0, about.st_size - tail))
        return file.read(tail)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power cut, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a directory; the files themselves are synced already.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES):
            raise
    finally:
        os.close(descriptor)
