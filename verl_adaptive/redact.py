"""Passwords out of text: database URLs end up in errors, logs, banners and records, and people paste those."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, quote_plus, unquote_plus

__all__ = ["has_secret", "keep_secret", "redact", "redact_all"]

_HIDDEN = "***"

# `user:password@` in front of a host. Greedy: a password may itself hold `@`, `/`, `:` and, if nobody encoded it, blanks;
# hiding too much is fine.
_BLANKS = re.compile(r"(://[^\s/:@]*:)(?:(?!://)[^\n])*@(?=[\w\[])")
_AUTHORITY = re.compile(r"(://[^\s/:@]*:)\S*@")
# The same with its signs encoded, where a part of the URL was quoted that should not have been.
_ENCODED = re.compile(r"(://[^\s/:@]*?%3A)(?:\S*@|[^\s/?@]*%40)", re.IGNORECASE)
# The same without a scheme, or with one that lost its slashes.
_BARE = re.compile(r"((?<![\w/])/{0,2}[\w.%+\-]*:)(?!//)[^\s@]\S*@")
# Drivers take settings among a URL's parameters. Known harmless ones are shown; a misspelt `password` is not.
_PARAMETER = re.compile(r"([?&;])([^?&;=\s'\"]+)=('[^'&]*'|\"[^\"&]*\"|[^&;\s]*)")
_HARMLESS = frozenset(
    {"application_name", "connect_timeout", "host", "hostaddr", "journal_mode", "port", "sslmode", "user"}
    | {
        "sslcert",
        "sslkey",
        "sslrootcert",
        "target_session_attrs",
        "keepalives",
        "keepalives_idle",
        "keepalives_interval",
        "keepalives_count",
    }
)
# libpq's `host=h password=p`, environment variables, JSON.
_NAMES = r"[\w%\-]*(?:password|passwd|passphrase|pgpass|secret|api_?key|access_token)|pwd"
_SETTING = re.compile(rf"(?<!\w)({_NAMES})(\s*=\s*)('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S*)", re.IGNORECASE)
_JSON = re.compile(rf"([\"'](?:{_NAMES})[\"']\s*:\s*)(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')", re.IGNORECASE)

#: Passwords that this process has met in URLs, as patterns.
_KNOWN: dict[str, re.Pattern[str]] = {}
_SHORTEST = 4  # of those that are looked for everywhere; a shorter one would hide parts of every sentence


def keep_secret(word: str) -> None:
    """Hide a word from now on wherever it turns up, as in what a database driver says of a connection."""
    for spelling in {word, quote(word, safe=""), quote_plus(word)}:
        if len(spelling) >= _SHORTEST and spelling not in _KNOWN:
            # What stands before may be an encoded sign, as in `%3Aword`, of which the last letter is no part of a word.
            _KNOWN[spelling] = re.compile(rf"(?:(?<!\w)|(?<=%[0-9A-Fa-f]{{2}})){re.escape(spelling)}(?!\w)")


def _hide_parameter(match: re.Match[str]) -> str:
    sign, name, _ = match.groups()
    return match[0] if unquote_plus(name).lower() in _HARMLESS else f"{sign}{name}={_HIDDEN}"


def redact(text: object) -> str:
    """``text`` with the passwords in it replaced by ``***``: those of URLs in any spelling, and of settings by name.

    Example:
        >>> redact("cannot reach postgresql://me:hunter2@host/db?sslmode=require")
        'cannot reach postgresql://me:***@host/db?sslmode=require'
    """
    out = str(text)
    for pattern in _KNOWN.values():
        out = pattern.sub(_HIDDEN, out)
    for pattern in (_BLANKS, _AUTHORITY, _ENCODED, _BARE):
        out = pattern.sub(rf"\1{_HIDDEN}@", out)
    out = _SETTING.sub(rf"\1\2{_HIDDEN}", out)
    out = _JSON.sub(rf'\1"{_HIDDEN}"', out)
    return _PARAMETER.sub(_hide_parameter, out)


def has_secret(text: str) -> bool:
    """Whether :func:`redact` would hide a part of ``text``."""
    return redact(text) != text


def redact_all(value: Any) -> Any:
    """:func:`redact` for every text in nested dicts, lists and tuples."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_all(item) for key, item in value.items()}
    return [redact_all(item) for item in value] if isinstance(value, list | tuple) else value
