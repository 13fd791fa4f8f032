"""Naming the journal's database: by URL, or by the path of a SQLite file; and showing it without its secrets."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from sqlalchemy import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError

from verl_adaptive.redact import has_secret, keep_secret, redact
from verl_adaptive.stats.backends import Backend, find_backend, known_backends
from verl_adaptive.stats.schema import JournalError

__all__ = ["local_file", "make_engine", "open_backend", "parse_url", "shown"]


def parse_url(url: str | os.PathLike[str] | URL) -> URL:
    """A database URL from a URL or the path of a SQLite file.

    ``?journal_mode=wal`` or ``delete`` on a SQLite URL overrides what the file system suggests.

    Raises:
        JournalError: not a URL, not one of the databases there are, or SQLite in memory (which nobody else could read).
    """
    if isinstance(url, str) and "://" not in url and has_secret(url) and not _is_path(url):
        raise JournalError(
            f"adaptive.store.url={shown(url)!r} looks like a database with a password, but a database is named by a URL: "
            "postgresql+psycopg://user@host/database. For a SQLite file of that name write its absolute path: /path/file.sqlite"
        )
    if isinstance(url, os.PathLike) or (isinstance(url, str) and "://" not in url):
        url = URL.create("sqlite", database=os.fspath(url))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # `from None`: what SQLAlchemy says may hold the URL, and the URL a password.
        raise JournalError(f"adaptive.store.url={shown(url)!r} is not a database URL") from None
    _remember(parsed)
    if "@" in unquote(parsed.host or ""):  # a piece of the password, which the server's name would be shown with
        raise JournalError(
            f"adaptive.store.url={shown(url)!r}: write an @ in the password as %40, and the one before the server as it is"
        )
    return _backend(parsed).normal(parsed)


def _is_path(text: str) -> bool:
    """Whether text that could hold a password is a path: an absolute one, or one that leads into a folder that is there.

    Names of experiments look like parameters: ``exp?n=8``, ``kl=0.1&lr=2``.
    """
    absolute = text.startswith("/") and not text.startswith("//")  # as in //user:password@host
    folder = os.path.dirname(text)
    return absolute or os.path.exists(text) or (bool(folder) and os.path.isdir(folder))


def _backend(url: URL) -> type[Backend]:
    found = find_backend(url.get_backend_name())
    if found is None:
        kinds = [kind for kind in map(find_backend, known_backends()) if kind is not None]
        known = " and ".join(f"{kind.title} ({kind.example})" for kind in kinds)
        raise JournalError(f"adaptive.store.url={shown(url)!r}: only {known} are supported")
    return found


def open_backend(url: str | os.PathLike[str] | URL, *, read_only: bool, application: str = "verl-adaptive") -> Backend:
    """The database behind a URL.

    Args:
        url: see :func:`parse_url`.
        read_only: connections that cannot write, and on SQLite never block the writer under WAL.
        application: what PostgreSQL shows as the session's name.

    Raises:
        JournalError: the URL cannot be used.
        OSError: a SQLite file's directory cannot be made.
    """
    parsed = parse_url(url)
    return _backend(parsed)(parsed, read_only=read_only, application=application)


def make_engine(url: str | os.PathLike[str] | URL, *, read_only: bool) -> Engine:
    """The engine of :func:`open_backend`, for a question or two."""
    return open_backend(url, read_only=read_only).engine


def local_file(url: str | os.PathLike[str] | URL) -> Path | None:
    """The absolute path of the file that a URL names; ``None`` for a server's database.

    Raises:
        JournalError: as :func:`parse_url`.
    """
    parsed = parse_url(url)
    return _backend(parsed).path(parsed)


def shown(url: str | os.PathLike[str] | URL) -> str:
    """A database URL for people: without a password, wherever in the URL it stands."""
    if not isinstance(url, URL):
        if "://" not in str(url):
            return redact(url)
        try:
            url = make_url(str(url))
        except (ArgumentError, ValueError):
            return str(url).split("://", 1)[0] + "://…"  # which part is the password cannot be told
        _remember(url)
        if "@" in unquote(url.host or ""):
            url = url.set(host="…")
        kind = find_backend(url.get_backend_name())
        if "@" in (url.database or "") and (kind is None or kind.path(url) is None):
            url = url.set(host="…", database="…")
    return redact(url.render_as_string())


def _remember(url: URL) -> None:
    """What is secret in the URL is hidden from now on wherever it turns up, the database's own errors included."""
    if url.password:
        keep_secret(str(url.password))
    if ":" in (url.username or ""):  # as in user%3Apassword
        keep_secret(str(url.username).partition(":")[2])
    for name, values in url.normalized_query.items():
        if has_secret(f"?{name}=x"):
            for value in values:
                keep_secret(value)
