"""The budget ledger: where every rollout and every response token went.

Per step and in total, in rollouts and in tokens:

    generated + held before = trained + dropped (by reason) + held after
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Account:
    """Counts in one unit (rollouts or tokens).

    Attributes:
        generated: came back, with a reward that can be used or without.
        trained: rows given to the optimizer.
        held: waiting for a later step.
        dropped: left out, by reason.
    """

    generated: int = 0
    trained: int = 0
    held: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, amount: int) -> None:
        """Count ``amount`` as dropped for ``reason``."""
        if amount:
            self.dropped[reason] = self.dropped.get(reason, 0) + int(amount)

    def add(self, other: Account) -> None:
        """Add a step's account to the run's; ``held`` is a level, not a flow."""
        self.generated += other.generated
        self.trained += other.trained
        self.held = other.held
        for reason, amount in other.dropped.items():
            self.drop(reason, amount)

    @property
    def dropped_in_all(self) -> int:
        """Dropped for whatever reason."""
        return sum(self.dropped.values())

    def balanced(self, held_before: int = 0) -> bool:
        """Whether the account adds up."""
        out = self.trained + self.dropped_in_all + self.held
        return self.generated + held_before == out

    def as_dict(self) -> dict[str, Any]:
        dropped = dict(sorted(self.dropped.items()))
        return {"generated": self.generated, "trained": self.trained, "dropped": dropped, "held": self.held}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Account:
        numbers = {name: data.get(name, 0) for name in ("generated", "trained", "held")}
        dropped = {str(reason): amount for reason, amount in data.get("dropped", {}).items()}
        for amount in (*numbers.values(), *dropped.values()):
            if not isinstance(amount, int) or not 0 <= amount < 2**63:
                raise ValueError(f"{str(amount)[:40]!r} is not a count")
        return cls(**numbers, dropped=dropped)


@dataclass
class Ledger:
    """Rollouts and tokens side by side."""

    rollouts: Account = field(default_factory=Account)
    tokens: Account = field(default_factory=Account)

    def drop(self, reason: str, tokens: np.ndarray) -> None:
        """Drop the rollouts whose token counts these are."""
        self.rollouts.drop(reason, len(tokens))
        self.tokens.drop(reason, int(tokens.sum()))

    def add(self, other: Ledger) -> None:
        self.rollouts.add(other.rollouts)
        self.tokens.add(other.tokens)

    def as_dict(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts.as_dict(), "tokens": self.tokens.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """The inverse of :meth:`as_dict`, of anybody's data: ValueError, TypeError or AttributeError if it is no ledger."""
        return cls(*(Account.from_dict(data.get(unit, {})) for unit in ("rollouts", "tokens")))
