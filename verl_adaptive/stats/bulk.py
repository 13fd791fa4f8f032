"""Inserting a thousand rows in a few milliseconds: SQLAlchemy makes the statement, the driver gets whole columns.

``connection.execute(insert(table), rows)`` spends several times the database's own time on each row's dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite

__all__ = ["insert_columns"]


@lru_cache(maxsize=64)
def _statement(dialect: Dialect, table: Table, names: tuple[str, ...], unless: tuple[str, ...]) -> tuple[str, Any]:
    insert = (postgresql if dialect.name == "postgresql" else sqlite).insert(table)
    if unless:
        insert = insert.on_conflict_do_nothing(index_elements=unless)
    compiled = insert.compile(dialect=dialect, column_keys=names)
    return str(compiled), compiled.positiontup if compiled.positional else None


def insert_columns(
    connection: Connection, table: Table, columns: Mapping[str, list[Any]], unless: tuple[str, ...] = ()
) -> None:
    """Insert rows given by column; values are bound, never part of the statement.

    Args:
        connection: within a transaction.
        table: the table.
        columns: equally long lists of plain Python values by column name; empty lists insert nothing.
        unless: columns of a unique key; rows whose key is there already are left out.
    """
    if not next(iter(columns.values())):
        return
    names = tuple(columns)
    statement, order = _statement(connection.dialect, table, names, unless)
    if order is not None:
        rows: list[Any] = list(zip(*(columns[name] for name in order), strict=True))
    else:
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    connection.exec_driver_sql(statement, rows)
