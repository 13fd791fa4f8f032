"""What differs from one database to another, in one class each; everything else about a journal is the same for all.

A backend is a module of this package, named as SQLAlchemy names the database (``sqlite``, ``postgresql``), with one
subclass of :class:`Backend` called ``BACKEND``. Adding one is adding that file; the conformance suite for it is
:class:`verl_adaptive.testing.stores.JournalSuite`.
"""

# ruff: noqa: B027 - hooks that do nothing unless a database needs them

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import URL, Connection, Engine, Table

__all__ = ["Backend", "find_backend", "known_backends"]


class Backend(ABC):
    """One database as one journal uses it, opened by its constructor.

    Args:
        url: as :meth:`normal` returned it.
        read_only: connections that cannot write.
        application: the name of the session, for databases that show one.

    Attributes:
        name: as SQLAlchemy names it, and this module.
        title: as people write it.
        example: a URL, for messages.
        engine: connections that are not pooled: a writer keeps its one, a reader closes each.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    example: ClassVar[str]

    def __init__(self, url: URL, *, read_only: bool, application: str = "verl-adaptive") -> None:
        self.url = url
        self.read_only = read_only
        self.engine = self.connect(application)

    # -- opening --------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def normal(cls, url: URL) -> URL:
        """The URL, checked and completed.

        Raises:
            JournalError: it cannot be meant; the message never holds a password.
        """

    @abstractmethod
    def connect(self, application: str) -> Engine:
        """Make the engine.

        Raises:
            JournalError: a setting in the URL, or a driver that is not installed.
            OSError: a directory cannot be made.
        """

    @classmethod
    def path(cls, url: URL) -> Path | None:
        """The file that the database is, if it is one."""
        return None

    # -- statements -----------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def insert(
        cls, connection: Connection, table: Table, columns: Mapping[str, list[Any]], unless: tuple[str, ...]
    ) -> None:
        """What :meth:`insert_columns` does, for one row or more, in one statement."""

    def insert_columns(
        self, connection: Connection, table: Table, columns: Mapping[str, list[Any]], unless: tuple[str, ...] = ()
    ) -> None:
        """Insert rows given by column; values are bound, never part of the statement.

        A thousand rows take a few milliseconds: the driver gets whole columns, each database in its own way.
        ``connection.execute(insert(table), rows)`` spends several times SQLite's own time on each row's dict, and makes
        PostgreSQL run a statement a row.

        Args:
            connection: of this backend, within a transaction.
            table: the table.
            columns: equally long lists of plain Python values by column name; empty lists insert nothing.
            unless: columns of a unique key; rows whose key is there already are left out.

        Raises:
            ValueError: lists of different lengths.
        """
        sizes = {len(values) for values in columns.values()}
        if len(sizes) != 1:
            raise ValueError(f"columns of {sorted(sizes)} rows")
        if sizes.pop():
            self.insert(connection, table, columns, unless)

    @classmethod
    def check(cls, connection: Connection) -> None:
        """Refuse a database whose tables are not what they seem.

        Raises:
            JournalError: naming the table.
        """

    def page(self, connection: Connection) -> int:
        """Rows that one read transaction may fetch: few where the writer waits for it."""
        return 20_000

    @classmethod
    def begin_upgrade(cls, connection: Connection) -> None:
        """Within a transaction: nobody else creates or changes the tables until it ends."""

    @contextmanager
    def ceiling(self, seconds: float, connection: Connection | None = None) -> Iterator[None]:
        """End what is done inside after ``seconds``, on ``connection`` and on any connection made inside.

        For databases that may stop answering without closing the connection; a local file always answers.

        Raises:
            TimeoutError: time was up.
        """
        yield

    # -- one writer a run -----------------------------------------------------------------------------------------

    def lock(self, run_id: str) -> None:
        """Before a writer's first connection.

        Raises:
            JournalBusy: another process writes this run.
        """

    def connected(self, connection: Connection, run_id: str) -> None:
        """After each new connection of a writer, outside of transactions.

        Raises:
            JournalBusy: another session writes this run.
        """

    def claim(self, connection: Connection, run_id: str) -> None:
        """Within the transaction in which a writer begins.

        Raises:
            JournalBusy: another process writes this run.
        """

    def still_ours(self, connection: Connection, run_id: str) -> None:
        """Within each transaction of a writer, before it writes.

        Raises:
            JournalBusy: another process has taken the run over.
        """

    def intact(self, open_now: bool) -> bool:
        """Whether what a writer's latest connection led to is still what the URL names.

        Args:
            open_now: that connection is still open.

        Raises:
            JournalBusy, OSError: the run cannot be held any longer.
        """
        return True

    def committed(self) -> None:
        """After each commit of a writer."""

    def release(self, connection: Connection | None, run_id: str) -> None:
        """When a writer closes: let other processes write the run. Never raises.

        Args:
            connection: the writer's, if there is a working one.
            run_id: the run.
        """


def find_backend(name: str) -> type[Backend] | None:
    """The backend of a database by SQLAlchemy's name for it; ``None`` if there is none."""
    if name not in known_backends():
        return None
    return importlib.import_module(f"{__name__}.{name}").BACKEND


def known_backends() -> list[str]:
    """Names of all backends."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
