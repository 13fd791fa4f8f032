"""The prompts of a store as columns: those of the statistics table, and a few that follow from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.report.expressions import Words
from verl_adaptive.stats import StatsTable, StoreError, open_store, read_manifest, read_snapshot
from verl_adaptive.stats.locate import locate

__all__ = ["DERIVED", "TOLERANCE", "Opened", "Prompts", "about_column", "open_prompts", "reading", "runs_of"]

#: adaptive.tolerance's default; a store does not say what its run used.
TOLERANCE = 1e-6


def _ratio(top: str, bottom: str) -> Callable[[Prompts], np.ndarray]:
    def divide(prompts: Prompts) -> np.ndarray:
        with np.errstate(all="ignore"):
            return prompts.number(top) / prompts.number(bottom)

    return divide


#: Columns that follow from the table's: name → (what it is, how it is computed).
DERIVED: dict[str, tuple[str, Callable[[Prompts], np.ndarray]]] = {
    "pass_rate": ("successes / rollouts over all visits", _ratio("successes", "rollouts")),
    "mean_reward": ("mean training reward of a rollout", _ratio("reward_sum", "rollouts")),
    "mean_signal": ("mean difficulty signal of a rollout", _ratio("signal_sum", "rollouts")),
    "tokens_per_rollout": ("mean response tokens", _ratio("tokens", "rollouts")),
    "change": (
        "pass rate of the latest visit minus that of the first",
        lambda p: p.number("last_rate") - p.number("first_rate"),
    ),
}


_ABOUT = {
    "key": "the prompt's identity, 32 hex digits; 8 or more of its first ones find it too",
    "source": "data source",
    "visits": "groups that said something",
    "rollouts": "rollouts in them",
    "successes": "evidence of success in them",
    "signal_sum": "sum of the difficulty signal",
    "signal_sqsum": "sum of its squares",
    "reward_sum": "sum of the training reward",
    "tokens": "response tokens",
    "streak": "visits in a row without variance",
    "streak_kind": "of that streak: 1 all right, -1 all wrong, 0 none",
    "retired": "1: at rest (from the newest snapshot)",
    "first_step": "step of the first visit, -1 if there was none",
    "last_step": "step of the latest visit, -1 if there was none",
    "last_try": "as last_step, groups that failed included",
    "first_rate": "pass rate of the first visit",
    "last_rate": "pass rate of the latest visit",
    "failures": "groups that failed and say nothing",
    "flips": "crossings of one half from visit to visit (journals only)",
}


def about_column(name: str) -> str:
    """What a column is, in a few words."""
    if name in DERIVED:
        return DERIVED[name][0]
    return _ABOUT.get(name) or f"a column of {name.split('.')[0]}'s own"


@dataclass
class Prompts:
    """Columns over the prompts of a table; what conditions and lists look at.

    Attributes:
        table: the statistics.
        further: columns that take their time, by name: functions that give float64, worked out when first asked for.
    """

    table: StatsTable
    further: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    _found: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def names(self) -> list[str]:
        """Every column a condition may name."""
        return ["key", "source", *(c for c in self.table.columns if c != "source"), *DERIVED, *self.further]

    def fill(self, name: str, values: np.ndarray) -> None:
        """Give a further column that was worked out on the way to something else; float64, a value a row so far."""
        self._found[name] = values.astype(np.float64)

    @property
    def flips(self) -> np.ndarray:
        """The column ``flips``, which journals have."""
        return self._further("flips")

    def _further(self, name: str) -> np.ndarray:
        if name not in self._found:
            self.fill(name, self.further[name]())
        known = self._found[name]  # prompts that the table got since have no value
        return np.append(known, np.full(len(self) - len(known), np.nan))

    def number(self, name: str) -> np.ndarray:
        """A column of the table as float64, so that differences of unsigned columns do not wrap."""
        return self.table.col(name).astype(np.float64)

    def get(self, name: str) -> np.ndarray | Words:
        """A column by any of :meth:`names`."""
        if name == "key":
            return self.table.keys
        if name == "source":
            return Words(self.table.col("source"), self.table.sources)
        if name in self.further:
            return self._further(name)
        return DERIVED[name][1](self) if name in DERIVED else self.number(name)

    def values(self, name: str, rows: np.ndarray) -> list[Any]:
        """Some rows of a column as Python values, for printing."""
        if name == "key":
            from verl_adaptive.stats import key_hex

            return key_hex(self.table.keys[rows])
        if name == "source":
            return [self.table.sources[i] for i in self.table.col("source")[rows].tolist()]
        if name in self.further or name in DERIVED:
            return self.get(name)[rows].tolist()  # type: ignore[index]
        return self.table.col(name)[rows].tolist()

    def order(self, name: str, rows: np.ndarray, descending: bool = False) -> np.ndarray:
        """``rows`` sorted by a column; what has no value comes last, ties in the order of the keys."""
        column = self.get(name)
        if isinstance(column, Words):
            rank = np.argsort(np.argsort(np.array(column.words, dtype=object)))
            value = rank[column.code[rows]].astype(np.float64)
        elif column.dtype.names is not None:
            value = np.zeros(len(rows))
        else:
            value = column[rows]
        value = np.where(np.isnan(value), np.inf, -value if descending else value)
        return rows[np.lexsort((self.table.key_lo[rows], self.table.key_hi[rows], value))]


@dataclass
class Opened:
    """A store that was found, with what can be said of it as a whole.

    Attributes:
        source: as the user wrote it.
        where: URL or path, without a password.
        kind: ``journal``, ``snapshot`` or ``results``.
        run: the run's name, of a journal.
        store: the open store; None for a file of results.
        prompts: the prompts.
        about: what the run said of itself: preset, package, step …
        retired: ``(prompts, step)`` known to be retired, from the snapshot beside a journal; None if not known.
    """

    source: str
    where: str
    kind: str
    run: str | None
    store: Any
    prompts: Prompts
    about: dict[str, Any]
    retired: tuple[int, int | None] | None = None


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn what databases and files throw into one error that names ``source``.

    Raises:
        StoreError: instead of SQLAlchemy's, Arrow's and zip files' errors.
    """
    import pyarrow as pa
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        raise StoreError(f"{source} cannot be read: {cause}") from error
    except pa.ArrowException as error:
        raise StoreError(f"{source} cannot be read: {error}") from error
    except OSError as error:
        if error.filename is not None:
            raise
        raise StoreError(f"{source} cannot be read: {error.strerror or error}") from error
    except AdaptiveError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError, RecursionError) as error:
        # what is in a store need not be what a run wrote there
        raise StoreError(f"{source} cannot be read, it is damaged: {type(error).__name__}: {error}") from error
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{source}: the database driver {error.name} is not installed; for PostgreSQL: "
            'pip install "verl-adaptive[postgres]"'
        ) from error


def runs_of(source: str) -> list[dict[str, Any]]:
    """The runs of a journal, oldest first: ``run``, ``preset``, ``began`` (UTC), ``attempts``, ``steps``, ``last_step``.

    Raises:
        StoreError, JournalError: not there, not readable, or not a journal.
    """
    with reading(source):
        store = open_store(source)
        out = []
        for run in store._journal.runs():
            steps = store.steps_arrow(run["run_id"]).column("step").to_numpy()
            out.append(
                {
                    "run": run["run_id"],
                    "preset": run["meta"].get("preset"),
                    "began": datetime.fromtimestamp(run["created_at"], timezone.utc).strftime("%Y-%m-%d %H:%M"),
                    "attempts": run["attempts"],
                    "steps": len(steps),
                    "last_step": int(steps[-1]) if len(steps) else None,
                }
            )
    return out


def open_prompts(
    source: str,
    *,
    run: str | None = None,
    tolerance: float = TOLERANCE,
    prefer: str = "journal",
    id_key: str | None = None,
) -> Opened:
    """Open whatever ``source`` is and read its prompts.

    Args:
        source: a journal, a snapshot, a directory of checkpoints, or a file of results.
        run: one of a journal's runs.
        tolerance: a group has zero variance if max − min of its signal is at most this (journals and results).
        prefer: ``journal`` or ``snapshot``, for a directory of checkpoints that has both.
        id_key: the user's own identifier, for files of results.

    Raises:
        StoreError, JournalError, SnapshotError: not there, or not readable.
    """
    with reading(source):
        found = locate(source, prefer=prefer)  # type: ignore[arg-type]
        if found.kind == "results":
            from verl_adaptive.stats.results import read_results

            table = read_results(Path(found.where), tolerance=tolerance, id_key=id_key)
            return Opened(source, found.where, "results", None, None, Prompts(table), {})
        store = open_store(source, prefer=prefer)  # type: ignore[arg-type]
        if found.kind == "snapshot":
            about = _plain(read_manifest(found.where).get("meta", {}))
            table = store.table()
            resting = (int((table.col("retired") > 0).sum()), about.get("step"))
            return Opened(source, store.where, "snapshot", None, store, Prompts(table), about, resting)
        runs = store._journal.runs()
        if not runs:
            raise StoreError(f"{store.where} holds no run yet; a run appears with its first step")
        name = store._named(run)
        row = next(r for r in runs if r["run_id"] == name)
        about = {**_plain(row["meta"]), "attempts": row["attempts"], "package": row["package"]}
        table = store.table(name, tolerance=tolerance)
        retired = _retired(about, found.where, table)
        opened = Opened(source, store.where, "journal", name, store, Prompts(table), about, retired)
        opened.prompts.further["flips"] = partial(_flips, opened, len(table))
        return opened


def _flips(opened: Opened, prompts: int) -> np.ndarray:
    from verl_adaptive.report.history import flips_of

    return flips_of(opened, prompts)


def _plain(meta: dict[str, Any]) -> dict[str, Any]:
    """What a run says of itself, as far as it is text or a number: the store may be anybody's."""
    known = ("preset", "policy", "package", "step", "checkpoints")
    return {name: meta[name] for name in known if isinstance(meta.get(name), str | int | float)}


def _retired(about: dict[str, Any], where: str, table: StatsTable) -> tuple[int, int | None] | None:
    """A journal does not record what is retired; the newest snapshot beside it does."""
    from verl_adaptive.stats.database import local_file

    path = local_file(where)
    folders = [about.get("checkpoints"), path and str(path.parent)]
    for folder in folders:
        if not isinstance(folder, str) or not os.path.isdir(folder):
            continue
        try:
            beside = locate(folder, prefer="snapshot")
            if beside.kind != "snapshot":
                continue
            theirs, _, manifest = read_snapshot(beside.where)
        except (AdaptiveError, OSError, ValueError):
            continue  # being written or damaged: that is for `stats` on the snapshot itself to say
        rows = table.rows_for(theirs.keys, create=False)
        marked = (rows >= 0) & (theirs.col("retired") > 0)
        table.col("retired")[rows[marked]] = 1
        return int(marked.sum()), manifest.get("meta", {}).get("step")
    return None
