"""Inserting a thousand rows in a few milliseconds: SQLAlchemy makes the statement, the driver gets whole columns.

``connection.execute(insert(table), rows)`` spends several times SQLite's own time on each row's dict, and makes
PostgreSQL run a statement a row; SQLite gets tuples, PostgreSQL one statement whose parameters are whole columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.dialects import sqlite

__all__ = ["insert_columns"]


@lru_cache(maxsize=64)
def _sqlite_statement(dialect: Dialect, table: Table, names: tuple[str, ...], unless: tuple[str, ...]) -> Any:
    insert = sqlite.insert(table)
    if unless:
        insert = insert.on_conflict_do_nothing(index_elements=unless)
    return insert.compile(dialect=dialect, column_keys=names)


@lru_cache(maxsize=64)
def _postgres_statement(dialect: Dialect, table: Table, names: tuple[str, ...], unless: tuple[str, ...]) -> str:
    quote = dialect.identifier_preparer.quote
    columns = ", ".join(quote(name) for name in names)
    # `b` sends binary arrays, which cost the driver and the server half of what text does.
    arrays = ", ".join(f"%({name})b::{table.c[name].type.compile(dialect=dialect)}[]" for name in names)
    tail = f" ON CONFLICT ({', '.join(quote(name) for name in unless)}) DO NOTHING" if unless else ""
    return f"INSERT INTO {quote(table.name)} ({columns}) SELECT {columns} FROM unnest({arrays}) AS v ({columns}){tail}"


def insert_columns(
    connection: Connection, table: Table, columns: Mapping[str, list[Any]], unless: tuple[str, ...] = ()
) -> None:
    """Insert rows given by column; values are bound, never part of the statement.

    Args:
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
    if not sizes.pop():
        return
    dialect = connection.dialect
    if dialect.name == "postgresql":
        connection.exec_driver_sql(_postgres_statement(dialect, table, tuple(columns), unless), dict(columns))
    else:
        compiled = _sqlite_statement(dialect, table, tuple(columns), unless)
        rows = list(zip(*(columns[name] for name in compiled.positiontup), strict=True))
        connection.exec_driver_sql(str(compiled), rows)
