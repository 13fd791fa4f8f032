"""The store for people: tables as pandas and Arrow, read-only, while training runs, without torch or verl."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats.keys import key_hex
from verl_adaptive.stats.locate import Found, StoreError, locate
from verl_adaptive.stats.snapshot import read_snapshot
from verl_adaptive.stats.table import StatsTable, key_words

if TYPE_CHECKING:
    import pandas as pd

    from verl_adaptive.stats.reader import JournalReader

__all__ = ["Store", "StoreError", "open_store"]


def open_store(source: str | os.PathLike[str], *, prefer: Literal["journal", "snapshot"] = "journal") -> Store:
    """Open a run's statistics for reading.

    Args:
        source: a journal (``sqlite:////path/file.sqlite``, the file's path, ``postgresql+psycopg://…``), a snapshot
            directory, a checkpoint ``global_step_N``, or a directory of checkpoints. ``#run`` at the end names one of a
            journal's runs.
        prefer: what to open in a directory of checkpoints that has both.

    Raises:
        StoreError: nothing there.
        JournalError: the database cannot be read, or is newer than this package.

    Example:
        >>> store = open_store("checkpoints/project/experiment")  # doctest: +SKIP
        >>> store.prompts().sort_values("pass_rate").head()  # doctest: +SKIP
    """
    found = locate(source, prefer=prefer)
    if found.kind == "results":
        raise StoreError(f"{found.where} is a file of results, not a store; read it with pandas")
    return Store(found)


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turn what a damaged or vanished database causes into one kind of error."""
    from sqlalchemy.exc import SQLAlchemyError

    from verl_adaptive.stats.schema import JournalError

    try:
        yield
    except AdaptiveError:
        raise
    except (
        *(SQLAlchemyError, pa.ArrowException, ValueError, TypeError, OverflowError, LookupError),
        *(AttributeError, RecursionError, TimeoutError),
    ) as error:
        cause = getattr(error, "orig", None) or error
        raise JournalError(f"{where} cannot be read: {type(cause).__name__}: {cause}") from error


class Store:
    """A journal or a snapshot, read-only; made by :func:`open_store`.

    Nothing is kept open between calls: each call reads what is there now.

    Attributes:
        kind: ``journal`` or ``snapshot``. A snapshot has prompts (with the policies' own columns); a journal has runs,
            steps and observations, and computes the prompts from them.
        where: URL or path, without a password.
    """

    def __init__(self, found: Found) -> None:
        self.kind = found.kind
        self.where = found.where
        self._run = found.run
        self._reader: JournalReader | None = None
        if found.kind == "journal":
            from verl_adaptive.stats.database import open_backend, shown
            from verl_adaptive.stats.reader import JournalReader

            backend = open_backend(found.where, read_only=True)
            self.where = shown(backend.engine.url)
            with _reading(self.where):
                self._reader = JournalReader(backend)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to do: no call leaves anything open."""

    @property
    def _journal(self) -> JournalReader:
        if self._reader is None:
            raise StoreError(f"{self.where} is a snapshot: it has prompts, but no runs, steps or observations")
        return self._reader

    def run_name(self, run: str | None = None) -> str:
        """The name of a journal's run: ``run``, the one after ``#`` in the source, or the only one there is.

        Raises:
            JournalError: no such run, or several to choose from; the message lists them.
            StoreError: ``run`` and the one after ``#`` differ.
        """
        if run and self._run and run != self._run:
            # Taking either would compare a run with itself, or show another than the line says.
            raise StoreError(
                f"run={run!r} (--run), but {self.where}#{self._run} names the run {self._run!r}: leave one of the two out"
            )
        with _reading(self.where):
            return self._journal.only_run(run or self._run)

    # -- runs and steps -------------------------------------------------------------------------------------------

    def runs(self) -> pd.DataFrame:
        """``run_id``, ``created_at`` (UTC), ``package``, ``meta`` (dict) and ``attempts`` of every run in a journal."""
        import pandas as pd

        frame = pd.DataFrame(self.run_list(), columns=["run_id", "created_at", "package", "meta", "attempts"])
        frame["created_at"] = pd.to_datetime(frame["created_at"], unit="s", utc=True)
        return frame

    def run_list(self) -> list[dict[str, Any]]:
        """:meth:`runs` as plain dicts, oldest first; ``created_at`` in seconds since 1970."""
        with _reading(self.where):
            return self._journal.runs()

    def gaps(self, run: str | None = None) -> list[tuple[int, int, str]]:
        """``(first step, last step, reason)`` of steps that the journal never got."""
        name = self.run_name(run)
        with _reading(self.where):
            return self._journal.gaps(name)

    def validations(self, run: str | None = None) -> list[dict[str, Any]]:
        """verl's validation metrics, see :meth:`verl_adaptive.stats.reader.JournalReader.validations`."""
        name = self.run_name(run)
        with _reading(self.where):
            return self._journal.validations(name)

    def newest_arrow(self, run: str | None = None, count: int = 2) -> pa.Table:
        """The last ``count`` steps of a run, as :meth:`steps_arrow` has them; quick however long the run is."""
        name = self.run_name(run)
        with _reading(self.where):
            return self._journal.newest(name, count)

    def steps_arrow(self, run: str | None = None, *, abandoned: bool = False) -> pa.Table:
        """:meth:`steps` as Arrow, ``ledger`` and ``scalars`` as JSON text."""
        name = self.run_name(run)
        with _reading(self.where):
            return self._journal.steps(name, abandoned=abandoned)

    def steps(self, run: str | None = None, *, abandoned: bool = False) -> pd.DataFrame:
        """One row a step: ``attempt``, ``step``, ``wall_time`` (UTC), ``groups``, ``ledger`` and ``scalars`` (dicts).

        Args:
            run: needed if the journal has several.
            abandoned: with the steps that a resume of an older checkpoint left behind.
        """
        import pandas as pd

        frame = self.steps_arrow(run, abandoned=abandoned).to_pandas()
        frame["wall_time"] = pd.to_datetime(frame["wall_time"], unit="s", utc=True)
        for name in ("ledger", "scalars"):
            frame[name] = frame[name].map(json.loads)
        return frame

    def observations_arrow(
        self,
        run: str | None = None,
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        abandoned: bool = False,
    ) -> pa.Table:
        """:meth:`observations` as Arrow, ``key`` as 16 bytes."""
        bounds = {"first_step": first_step, "last_step": last_step}
        return pa.concat_tables(self.observation_pages(run, **bounds, abandoned=abandoned))

    def observation_pages(
        self,
        run: str | None = None,
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        abandoned: bool = False,
    ) -> Iterator[pa.Table]:
        """:meth:`observations_arrow` a page at a time, an empty one first: a long run's need not fit in memory."""
        from verl_adaptive.stats.reader import OBSERVATIONS

        name = self.run_name(run)
        yield OBSERVATIONS.empty_table()
        with _reading(self.where):
            yield from self._journal.observations(name, first_step=first_step, last_step=last_step, abandoned=abandoned)

    def observations(
        self,
        run: str | None = None,
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        abandoned: bool = False,
    ) -> pd.DataFrame:
        """One row a finished group, in order of review; columns of :data:`verl_adaptive.stats.reader.OBSERVATIONS`.

        Args:
            run: needed if the journal has several.
            first_step, last_step: both included.
            abandoned: with what a resume of an older checkpoint left behind.
        """
        table = self.observations_arrow(run, first_step=first_step, last_step=last_step, abandoned=abandoned)
        frame = table.to_pandas()
        frame["key"] = [key.hex() for key in frame["key"]]
        return frame

    # -- prompts --------------------------------------------------------------------------------------------------

    def table(self, run: str | None = None, *, tolerance: float = 0.0, last_step: int | None = None) -> StatsTable:
        """The statistics table: a snapshot's, or the one that a journal's live line adds up to.

        Args:
            run: needed if a journal has several.
            tolerance: as in :meth:`StatsTable.observe`; a journal keeps each group's lowest and highest signal and
                decides with these what had zero variance.
            last_step: of a journal, stop after this step.
        """
        if self._reader is None:
            return read_snapshot(self.where)[0]
        name = self.run_name(run)
        with _reading(self.where):
            return self._reader.replay(name, tolerance=tolerance, last_step=last_step)

    def prompts_arrow(self, run: str | None = None, *, tolerance: float = 0.0) -> pa.Table:
        """One row a prompt: ``key`` (16 bytes), ``source`` (its name), every column of the table, ``pass_rate``."""
        table = self.table(run, tolerance=tolerance)
        data = table.to_arrow()
        names = pa.DictionaryArray.from_arrays(pa.array(table.col("source").astype(np.int32)), pa.array(table.sources))
        with np.errstate(invalid="ignore"):
            rate = table.col("successes") / table.col("rollouts")
        position = data.schema.get_field_index("source")
        data = data.set_column(position, "source", names).append_column("pass_rate", pa.array(rate, from_pandas=False))
        return data.replace_schema_metadata(None)

    def prompts(self, run: str | None = None, *, tolerance: float = 0.0) -> pd.DataFrame:
        """One row a prompt, indexed by the key's 32 hex digits; columns as in :meth:`prompts_arrow`.

        Args:
            run: needed if a journal has several.
            tolerance: as in :meth:`table`.
        """
        import pandas as pd

        data = self.prompts_arrow(run, tolerance=tolerance)
        frame = data.drop_columns(["key"]).to_pandas()
        frame.index = pd.Index(key_hex(key_words(data.column("key"))), name="key")
        return frame

    def name_sources(self, table: StatsTable) -> None:
        """Give the prompts of a table of the caller's own the data sources that a journal knows; nothing for a snapshot."""
        if self.kind == "journal":
            with _reading(self.where):
                self._journal.name_sources(table)
