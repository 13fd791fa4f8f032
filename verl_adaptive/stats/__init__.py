"""The memory of every prompt: identity, table, snapshots (numpy and pyarrow only); journal, warm start, readers."""

from __future__ import annotations

from verl_adaptive.stats.files import StoreError
from verl_adaptive.stats.journal import Journal
from verl_adaptive.stats.keys import (
    dataset_identity,
    dataset_keys,
    fingerprint,
    first_difference,
    repeated_rows,
)
from verl_adaptive.stats.run import Run, find_runs, open_run, open_runs
from verl_adaptive.stats.snapshot import SnapshotMissing, read_snapshot, write_snapshot
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.stats.warm_start import warm_start

__all__ = [
    "Journal",
    "Run",
    "SnapshotMissing",
    "StatsTable",
    "StoreError",
    "dataset_identity",
    "dataset_keys",
    "find_runs",
    "fingerprint",
    "first_difference",
    "open_run",
    "open_runs",
    "read_snapshot",
    "repeated_rows",
    "warm_start",
    "write_snapshot",
]
