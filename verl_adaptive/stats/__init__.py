"""The memory of every prompt: identity, table, snapshots (numpy and pyarrow only); journal, warm start, readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_adaptive.stats.api import Store, StoreError, open_store
from verl_adaptive.stats.keys import (
    KEY_DTYPE,
    DuplicateReport,
    custom_key,
    dataset_identity,
    dataset_keys,
    duplicates,
    fingerprint,
    first_difference,
    key_hex,
    keys_array,
    keys_bytes,
    parse_hex,
    prompt_key,
)
from verl_adaptive.stats.snapshot import SnapshotError, SnapshotMissing, read_manifest, read_snapshot, write_snapshot
from verl_adaptive.stats.table import SHARED_COLUMNS, Column, StatsTable
from verl_adaptive.stats.warm_start import WarmStartReport, warm_start

if TYPE_CHECKING:
    from verl_adaptive.stats.journal import Journal, JournalBusy, JournalError, JournalHealth

__all__ = [
    "KEY_DTYPE",
    "SHARED_COLUMNS",
    "Column",
    "DuplicateReport",
    "Journal",
    "JournalBusy",
    "JournalError",
    "JournalHealth",
    "SnapshotError",
    "SnapshotMissing",
    "StatsTable",
    "Store",
    "StoreError",
    "WarmStartReport",
    "custom_key",
    "dataset_identity",
    "dataset_keys",
    "duplicates",
    "fingerprint",
    "first_difference",
    "key_hex",
    "keys_array",
    "keys_bytes",
    "open_store",
    "parse_hex",
    "prompt_key",
    "read_manifest",
    "read_snapshot",
    "warm_start",
    "write_snapshot",
]

# These need SQLAlchemy, which the rest does not: imported when first asked for.
_LAZY = {"Journal", "JournalBusy", "JournalError", "JournalHealth"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from verl_adaptive.stats import journal

        return getattr(journal, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
