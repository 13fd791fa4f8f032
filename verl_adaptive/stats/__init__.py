"""The memory of every prompt: identity, table, snapshots (numpy and pyarrow only); journal, warm start, readers."""

from __future__ import annotations

from verl_adaptive.stats.journal import Journal, JournalBusy, JournalError
from verl_adaptive.stats.keys import (
    KEY_DTYPE,
    custom_key,
    dataset_identity,
    dataset_keys,
    fingerprint,
    first_difference,
    key_hex,
    keys_array,
    keys_bytes,
    parse_hex,
    prompt_key,
    repeated_rows,
)
from verl_adaptive.stats.rows import StoreError
from verl_adaptive.stats.run import Run, find_runs, open_run, open_runs
from verl_adaptive.stats.snapshot import SnapshotError, SnapshotMissing, read_manifest, read_snapshot, write_snapshot
from verl_adaptive.stats.table import SHARED_COLUMNS, Column, StatsTable
from verl_adaptive.stats.warm_start import WarmStartReport, warm_start

__all__ = [
    "KEY_DTYPE",
    "SHARED_COLUMNS",
    "Column",
    "Journal",
    "JournalBusy",
    "JournalError",
    "Run",
    "SnapshotError",
    "SnapshotMissing",
    "StatsTable",
    "StoreError",
    "WarmStartReport",
    "custom_key",
    "dataset_identity",
    "dataset_keys",
    "find_runs",
    "fingerprint",
    "first_difference",
    "key_hex",
    "keys_array",
    "keys_bytes",
    "open_run",
    "open_runs",
    "parse_hex",
    "prompt_key",
    "read_manifest",
    "read_snapshot",
    "repeated_rows",
    "warm_start",
    "write_snapshot",
]
