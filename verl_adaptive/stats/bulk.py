"""Inserting a thousand rows in a few milliseconds: the driver gets whole columns, each database in its own way.

``connection.execute(insert(table), rows)`` spends several times SQLite's own time on each row's dict, and makes
PostgreSQL run a statement a row; SQLite gets tuples, PostgreSQL one statement whose parameters are whole columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table

from verl_adaptive.stats.backends import Backend

__all__ = ["insert_columns"]


def insert_columns(
    backend: Backend,
    connection: Connection,
    table: Table,
    columns: Mapping[str, list[Any]],
    unless: tuple[str, ...] = (),
) -> None:
    """Insert rows given by column; values are bound, never part of the statement.

    Args:
        backend: that of the connection.
        connection: within a transaction.
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
        backend.insert(connection, table, columns, unless)
