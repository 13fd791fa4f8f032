"""Moves SQLite's write-ahead log into the database file in a thread, so that no commit waits for the disk's fsync."""

from __future__ import annotations

import logging
import sqlite3
import threading

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

__all__ = ["Checkpointer"]

_LOG = logging.getLogger(__name__)

_EVERY = 16  # commits; about 3 MB of log at 1,024 groups a commit


class Checkpointer:
    """Runs a passive checkpoint, which waits for nobody and stops nobody, after every few commits.

    Without the write-ahead log (rollback journal) it has nothing to do, and SQLite says so at once.

    Args:
        engine: the writer's; the thread has a connection of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commits = 0
        self._thread: threading.Thread | None = None

    def committed(self) -> None:
        """Count a commit."""
        self._commits += 1
        if self._commits >= _EVERY and (self._thread is None or not self._thread.is_alive()):
            self._commits = 0
            self._thread = threading.Thread(target=self._run, name="verl-adaptive-checkpoint", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            # The driver's own connection: the engine would begin a transaction, within which there is no checkpoint.
            connection = self._engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                connection.close()
        except (SQLAlchemyError, sqlite3.Error) as error:
            # The log only grows until the next try; a disk that is full will say so at a commit.
            _LOG.info("SQLite checkpoint put off: %s", error)

    def join(self) -> None:
        """Wait for a checkpoint that is running."""
        if self._thread is not None:
            self._thread.join()
