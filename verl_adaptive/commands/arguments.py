"""Options that several commands share."""

from __future__ import annotations

import argparse

__all__ = ["add_store_options", "refuse_overwrite"]


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """How to read a store."""
    parser.add_argument("--run", metavar="NAME", help="one of a journal's runs, if it has several")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        default=1e-6,
        help="a group has no variance if its signals differ by at most this (adaptive.tolerance, 1e-6)",
    )
    parser.add_argument("--prompt-key", metavar="NAME", default="prompt", help="column of messages (data.prompt_key)")
    parser.add_argument("--id-key", metavar="PATH", help="dotted path of your own prompt id (adaptive.id_key)")


def refuse_overwrite(path: str, overwrite: bool) -> None:
    """Refuse to replace a file unless asked to.

    Raises:
        AdaptiveError: the file exists, or its folder does not.
    """
    import os

    from verl_adaptive.errors import AdaptiveError

    if os.path.isdir(path):
        raise AdaptiveError(f"{path} is a directory; name a file")
    if os.path.exists(path) and not overwrite:
        raise AdaptiveError(f"{path} exists; name another file, or add --overwrite")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise AdaptiveError(f"{folder} does not exist")
