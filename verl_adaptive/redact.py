"""Passwords out of text: database URLs end up in errors, logs and banners, and people paste those."""

from __future__ import annotations

import re

__all__ = ["redact"]

# `user:password@` in front of a host. Greedy: a password may itself hold `@`, `/` and `:`, and hiding too much is fine.
_AUTHORITY = re.compile(r"([A-Za-z0-9+.\-]*://[^\s/:@]*:)\S*@")
# libpq takes a password among a URL's parameters too.
_PARAMETER = re.compile(r"([?&](?:password|passwd|pwd|sslpassword|token|secret)=)[^&#\s'\"]*", re.IGNORECASE)


def redact(text: object) -> str:
    """``text`` with the passwords of the URLs in it replaced by ``***``.

    Example:
        >>> redact("cannot reach postgresql://me:hunter2@host/db?sslmode=require")
        'cannot reach postgresql://me:***@host/db?sslmode=require'
    """
    return _PARAMETER.sub(r"\1***", _AUTHORITY.sub(r"\1***@", str(text)))
