"""What a journal's steps say in JSON: their accounts of rollouts, and the policy's scalars. The text may be anybody's."""

from __future__ import annotations

import json

from verl_adaptive.ledger import Ledger
from verl_adaptive.stats import StoreError


def ledgers_of(text: str) -> tuple[Ledger | None, Ledger | None]:
    """A step's account and the run's up to it, as the journal has them; None where it does not say, StoreError if these are none."""
    try:
        data = json.loads(text)
        step, run = (Ledger.from_dict(data[scope]) if data.get(scope) else None for scope in ("step", "run"))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"the journal is damaged: a step's ledger is {text[:60]!r}: {error}") from error
    return step, run


def plan_of(text: str) -> dict[str, float]:
    """``steps`` and ``rollouts`` that the run plans, as far as a step's scalars say."""
    scalars = scalars_of(text)
    found = {name: scalars.get(f"adaptive/plan/{name}", 0.0) for name in ("steps", "rollouts")}
    return {name: value for name, value in found.items() if 0 < value < 1e15}


def scalars_of(text: str) -> dict[str, float]:
    """The numbers among a step's scalars as the journal has them; StoreError if it is no table of scalars."""
    try:
        data = json.loads(text)
        return {name: float(v) for name, v in data.items() if isinstance(v, int | float) and abs(v) < 1e300}
    except (ValueError, AttributeError, RecursionError) as error:
        raise StoreError(f"the journal is damaged: a step's scalars are {text[:60]!r}: {error}") from error
