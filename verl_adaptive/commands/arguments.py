"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import argparse
import math
import os

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats.keys import Identity


def count(text: str) -> int:
    """A whole number from 1 on; an argparse type."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be 1 or greater")
    return value


def finite(text: str) -> float:
    """A number that is neither infinite nor nan; an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def condition(text: str) -> str:
    """A condition that is not empty, as that of an unset shell variable is; an argparse type."""
    if not text.strip():
        raise argparse.ArgumentTypeError('the condition is empty; write one, as "pass_rate < 0.1"')
    return text


def _media_key(text: str) -> tuple[str, str]:
    from verl_adaptive.stats.keys import MEDIA_FIELDS  # slow to import

    kind, _, name = text.partition("=")
    if kind not in MEDIA_FIELDS or not name:
        kinds = ", ".join(MEDIA_FIELDS)
        raise argparse.ArgumentTypeError(
            f"{text!r} must be one of {kinds}, an equals sign and a column: images=pictures"
        )
    return kind, name


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """How to read a store."""
    reading = parser.add_argument_group("how the store is read")
    reading.add_argument(
        "--prompt-key",
        metavar="NAME",
        default="prompt",
        help="column of messages, the run's data.prompt_key: --prompt-key messages (default prompt)",
    )
    reading.add_argument(
        "--id-key", metavar="PATH", help="your own prompt id, the run's adaptive.id_key: --id-key extra_info.id"
    )
    reading.add_argument(
        "--media-key",
        metavar="KIND=NAME",
        type=_media_key,
        action="append",
        default=[],
        help="column of images, videos or audios, the run's data.image_key, video_key or audio_key: "
        "--media-key images=pictures (may be repeated; default: columns of those names)",
    )


def identity_from(args: argparse.Namespace) -> Identity:
    """What the options of :func:`add_store_options` say of a prompt's identity."""
    return Identity(args.prompt_key, args.id_key, dict(args.media_key))


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Machine-readable output."""
    parser.add_argument("--json", action="store_true", help="print JSON instead, for scripts: --json | jq .")


def add_tries_option(parser: argparse.ArgumentParser) -> None:
    """From when on a prompt is never solved."""
    from verl_adaptive.report.judge import TRIES

    parser.add_argument(
        "--tries",
        metavar="N",
        type=count,
        default=TRIES,
        help="rollouts from which a prompt without a success counts as never solved: --tries 64 (default %(default)s)",
    )


def refuse_overwrite(path: str, overwrite: bool) -> None:
    """Refuse a file whose folder does not exist, and one that exists unless asked to replace it."""
    if not path:
        raise AdaptiveError("the file to write has no name")
    if os.path.isdir(path):
        raise AdaptiveError(f"{path} is a directory; name a file")
    if os.path.exists(path) and not overwrite:
        raise AdaptiveError(f"{path} exists; name another file, or add --overwrite")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise AdaptiveError(f"{folder} does not exist")
