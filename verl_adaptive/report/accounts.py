"""What a journal's steps say in JSON: their accounts of rollouts, and the policy's scalars. The text may be anybody's."""

from __future__ import annotations

import json
from typing import Any

from verl_adaptive.stats import StoreError


def ledger_of(text: str) -> dict[str, dict[str, Any]]:
    """A step's accounts as the journal has them, ``step`` and ``run``.

    Raises:
        StoreError: not such accounts.
    """

    def account(value: Any) -> dict[str, Any]:
        numbers = {name: value.get(name, 0) for name in ("generated", "trained", "held")}
        dropped = {str(reason): amount for reason, amount in value.get("dropped", {}).items()}
        for amount in (*numbers.values(), *dropped.values()):
            if not isinstance(amount, int) or not 0 <= amount < 2**63:
                raise ValueError(f"{str(amount)[:40]!r} is not a count")
        return {**numbers, "dropped": dropped}

    try:
        data = json.loads(text)
        return {
            scope: {unit: account(data[scope].get(unit, {})) for unit in ("rollouts", "tokens")}
            for scope in ("step", "run")
            if data.get(scope)
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"the journal is damaged: a step's ledger is {text[:60]!r}: {error}") from error


def scalars_of(text: str) -> dict[str, float]:
    """The numbers among a step's scalars as the journal has them.

    Raises:
        StoreError: no table of scalars.
    """
    try:
        data = json.loads(text)
        return {name: float(v) for name, v in data.items() if isinstance(v, int | float) and abs(v) < 1e300}
    except (ValueError, AttributeError, RecursionError) as error:
        raise StoreError(f"the journal is damaged: a step's scalars are {text[:60]!r}: {error}") from error
