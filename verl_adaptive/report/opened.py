"""A store that is open, the errors of reading one, and the runs in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.report.prompts import Prompts
from verl_adaptive.stats import StoreError, open_store
from verl_adaptive.stats.locate import locate

__all__ = ["TOLERANCE", "Opened", "reading", "runs_of"]

#: adaptive.tolerance's default, for stores that do not say what their run used.
TOLERANCE = 1e-6


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
        tolerance: a group has zero variance if max − min of its signal is at most this.
    """

    source: str
    where: str
    kind: str
    run: str | None
    store: Any
    prompts: Prompts
    about: dict[str, Any]
    retired: tuple[int, int | None] | None = None
    tolerance: float = TOLERANCE


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
    except (SQLAlchemyError, pa.ArrowException) as error:
        cause = getattr(error, "orig", None) or error
        raise StoreError(f"{source} cannot be read: {cause}") from error
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
            'pip install "psycopg[binary]"'
        ) from error


def runs_of(source: str) -> list[dict[str, Any]]:
    """The runs of a journal, oldest first: ``run``, ``preset``, ``began`` (UTC), ``attempts``, ``steps``, ``last_step``.

    Raises:
        StoreError, JournalError: not there, not readable, or not a journal.
    """
    with reading(source):
        store = open_store(locate(source).where)  # all runs, whichever one a # names
        out = []
        for run in store.run_list():
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
