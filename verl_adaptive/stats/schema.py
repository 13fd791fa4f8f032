"""The journal's tables, their version, and the way from each released version to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    inspect,
    select,
    text,
    update,
)

from verl_adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from verl_adaptive.stats.backends import Backend

__all__ = [
    "SCHEMA_VERSION",
    "JournalBusy",
    "JournalError",
    "branches",
    "gaps",
    "metadata",
    "migrate",
    "observations",
    "prompts",
    "read_version",
    "runs",
    "steps",
    "validations",
]

SCHEMA_VERSION = 3


class JournalError(AdaptiveError):
    """The journal cannot be used: unreachable, damaged, or of a version this package does not know."""


class JournalBusy(JournalError):
    """Another process is writing this run's journal."""


metadata = MetaData()

_version = Table(
    "verl_adaptive_schema",
    metadata,
    Column("version", Integer, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", String(255), primary_key=True),
    Column("created_at", Double, nullable=False),  # seconds since 1970, for people
    Column("package", Text, nullable=False),
    Column("meta", Text, nullable=False),  # JSON
)

# A run is a tree of branches. Resuming an older checkpoint starts a branch whose parent is (old branch, step); the live
# line of a run is its newest branch, then its parent up to `parent_step`, and so on.
branches = Table(
    "branches",
    metadata,
    Column("branch_id", Integer, primary_key=True, autoincrement=True),
    Column("run_id", String(255), ForeignKey("runs.run_id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("parent_id", Integer, ForeignKey("branches.branch_id")),
    Column("parent_step", Integer),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("run_id", "attempt"),
)

steps = Table(
    "steps",
    metadata,
    Column("branch_id", Integer, ForeignKey("branches.branch_id"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("wall_time", Double, nullable=False),
    Column("commit_id", String(32), nullable=False),  # tells a commit that is tried again from another one
    Column("groups", Integer, nullable=False),
    Column("ledger", Text, nullable=False),  # JSON
    Column("scalars", Text, nullable=False),  # JSON
)

# One row a group, clustered by (branch, step, seq): appending touches the last pages only, however long the journal is.
# No index on the key for the same reason; readers that want one prompt scan. A sum that is not a number (a failed
# group's) is null: SQLite has no nan.
observations = Table(
    "observations",
    metadata,
    Column("branch_id", Integer, primary_key=True),  # no foreign key: checking it a row costs as much as the row
    Column("step", Integer, primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("ticket", BigInteger, nullable=False),
    Column("key", LargeBinary(16), nullable=False),
    Column("n", Integer, nullable=False),
    Column("successes", Double),
    Column("signal_sum", Double),
    Column("signal_sqsum", Double),
    Column("signal_min", Double),
    Column("signal_max", Double),
    Column("reward_sum", Double),
    Column("outcome", Text, nullable=False),
    Column("failed", SmallInteger, nullable=False),
    # since version 2; null in rows written before
    Column("tokens", BigInteger),
    Column("lag", Integer),
    Column("lost", Integer),
    # since version 3; null before, and where the limit is not known
    Column("clipped", Integer),
    sqlite_with_rowid=False,
)

prompts = Table(
    "prompts",
    metadata,
    Column("key", LargeBinary(16), primary_key=True),
    Column("source", Text, nullable=False),
    Column("text", Text),  # null: nothing writes it any more
    sqlite_with_rowid=False,
)

# Since version 2: steps that training took and the journal never got.
gaps = Table(
    "gaps",
    metadata,
    Column("branch_id", Integer, ForeignKey("branches.branch_id"), primary_key=True),
    Column("first_step", Integer, primary_key=True),
    Column("last_step", Integer, nullable=False),
    Column("reason", Text, nullable=False),
)

# Since version 3: what verl's validation measured.
validations = Table(
    "validations",
    metadata,
    Column("branch_id", Integer, ForeignKey("branches.branch_id"), primary_key=True),
    Column("step", Integer, primary_key=True),  # 0 before training
    Column("wall_time", Double, nullable=False),
    Column("generated", BigInteger),  # training rollouts of the run up to here
    Column("metrics", Text, nullable=False),  # JSON, by verl's names
    Column("prompts", Text, nullable=False),  # JSON, validation prompts by data source
)

#: Columns of observations that came later, with their version.
SINCE = {"tokens": 2, "lag": 2, "lost": 2, "clipped": 3}


def _to_2(connection: Connection) -> None:
    for name, kind in (("tokens", "BIGINT"), ("lag", "INTEGER"), ("lost", "INTEGER")):
        connection.execute(text(f"ALTER TABLE observations ADD COLUMN {name} {kind}"))
    gaps.create(connection)


def _to_3(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE observations ADD COLUMN clipped INTEGER"))
    validations.create(connection)


_UPGRADES: dict[int, Callable[[Connection], None]] = {1: _to_2, 2: _to_3}


def read_version(connection: Connection, backend: Backend) -> int | None:
    """The schema version in a database; ``None`` if it holds no journal.

    Raises:
        JournalError: newer than this package knows, or not what it seems.
    """
    backend.check(connection)
    if not inspect(connection).has_table(_version.name):
        return None
    version = connection.execute(select(_version.c.version)).scalar()
    if version is None:
        return None
    if not isinstance(version, int) or version < 1:
        raise JournalError(f"{connection.engine.url.render_as_string()}: {version!r} is no schema version")
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"{connection.engine.url.render_as_string()}: the journal has schema version {version}, this verl-adaptive "
            f"knows up to {SCHEMA_VERSION}; upgrade verl-adaptive, or name another database with adaptive.store.url"
        )
    return version


def migrate(connection: Connection, backend: Backend) -> int | None:
    """Bring a database to the current version, inside the caller's transaction.

    Returns:
        The version found, ``None`` for a new database.

    Raises:
        JournalError: the database's version is newer.
    """
    backend.begin_upgrade(connection)
    found = read_version(connection, backend)
    if found is None:
        metadata.create_all(connection)
        connection.execute(_version.insert().values(version=SCHEMA_VERSION))
        return None
    for version in range(found, SCHEMA_VERSION):
        _UPGRADES[version](connection)
    if found != SCHEMA_VERSION:
        connection.execute(update(_version).values(version=SCHEMA_VERSION))
    return found
