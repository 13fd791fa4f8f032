"""What passes between an engine and whoever drives it: requests out, groups in, a step's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.ledger import Ledger


class PromptStream(Protocol):
    """verl's prompt stream, or a stand-in of the simulator's."""

    size: int

    def take(self, count: int) -> np.ndarray:
        """The next data-set positions in stream order, at least one; may be more than ``count`` (whole batches)."""
        ...


@dataclass
class Requests:
    """Rollouts to generate; arrays of shape ``(k,)``.

    Attributes:
        submission: the group; a submission seen before is a top-up of that group.
        index: the prompt's position in the data set.
        row: the prompt's row in the table.
        n: rollouts.
        stage: 0 for first rollouts, j for the j-th top-up.
    """

    submission: np.ndarray
    index: np.ndarray
    row: np.ndarray
    n: np.ndarray
    stage: np.ndarray

    def __len__(self) -> int:
        return len(self.submission)

    @property
    def rollouts(self) -> int:
        """Rollouts in all."""
        return int(self.n.sum())

    @classmethod
    def none(cls) -> Requests:
        """No requests at all."""
        empty = np.zeros(0, dtype=np.int64)
        return cls(empty, empty, empty, empty, empty)

    @classmethod
    def topups(cls, groups: Groups, n: np.ndarray) -> Requests:
        """``n`` more rollouts for each of these groups."""
        stage = groups.reduce(np.maximum, groups.stage).astype(np.int64) + 1
        return cls(groups.submission, groups.index, groups.row, n, stage)

    @classmethod
    def join(cls, parts: Sequence[Requests]) -> Requests:
        """The requests of all parts, in the order given."""
        return cls(*(np.concatenate([getattr(r, f.name) for r in parts]) for f in fields(cls)))

    def select(self, which: np.ndarray | slice) -> Requests:
        """Those requests only; ``which`` is bool ``(k,)``, positions or a slice."""
        return Requests(*(getattr(self, f.name)[which] for f in fields(self)))

    def sorted(self) -> Requests:
        """In submission order."""
        return self.select(np.argsort(self.submission, kind="stable"))


@dataclass
class Closed:
    """Groups whose fate is known; groups and masks are selected, sorted and joined together.

    Attributes:
        groups: ``G`` groups with ``R`` rollouts.
        outcome: object ``(G,)``: ``trained``, ``failed``, the filter's reason, or another of the engine's.
        trains: bool ``(R,)``: rollouts whose rows go to the optimizer.
        zero_row: bool ``(R,)``: rollouts of trained groups left out because their advantage is exactly zero; they stay in
            every loss denominator.
    """

    groups: Groups
    outcome: np.ndarray
    trains: np.ndarray
    zero_row: np.ndarray

    def __len__(self) -> int:
        return len(self.groups)

    @classmethod
    def of(cls, groups: Groups, outcome: str | np.ndarray, trains: np.ndarray | None = None) -> Closed:
        """Groups with one outcome for all, or an array ``(G,)``; ``trains`` is bool ``(R,)``, None: no rollout trains."""
        nothing = np.zeros(groups.rollouts, dtype=bool)
        outcome = np.full(len(groups), outcome, dtype=object) if isinstance(outcome, str) else outcome.astype(object)
        return Closed(groups, outcome, nothing if trains is None else trains, nothing.copy())

    @classmethod
    def concat(cls, parts: Sequence[Closed]) -> Closed:
        """The groups of all parts, in the order given."""
        parts = [Closed.of(Groups.empty(), ""), *parts]
        joined = (np.concatenate([getattr(p, name) for p in parts]) for name in ("outcome", "trains", "zero_row"))
        return Closed(Groups.concat([p.groups for p in parts]), *joined)

    def select(self, which: np.ndarray) -> Closed:
        """Those groups only; ``which`` is bool ``(G,)`` or positions, in the order wanted."""
        which = np.flatnonzero(which) if which.dtype == bool else which
        inside = self.groups.rollouts_of(which)
        return Closed(self.groups.select(which), self.outcome[which], self.trains[inside], self.zero_row[inside])

    def sorted(self) -> Closed:
        """In submission order."""
        return self.select(np.argsort(self.groups.submission, kind="stable"))

    @property
    def trained(self) -> np.ndarray:
        """bool ``(G,)``: groups that train, or may."""
        return self.outcome == "trained"

    @property
    def usable(self) -> np.ndarray:
        """bool ``(G,)``: groups that were dropped and could be trained on after all."""
        return ~np.isin(self.outcome.astype(str), ("trained", "failed", "gone", "expired"))


@dataclass
class StepResult(Closed):
    """What became of a step's groups: every group closed in it, in submission order.

    Attributes:
        ledger: the step's account.
        note: a warning for the log, or an empty string.
        rounds: times prompts were sent.
    """

    ledger: Ledger
    note: str
    rounds: int


class Listener:
    """Is told everything that decisions depend on, in order; :class:`verl_adaptive.record.Recorder` writes it down.

    This one does nothing with it.
    """

    def begun(self, step: int) -> None:
        """A step begins."""

    def asked(self, requests: Requests | None) -> None:
        """These requests followed."""

    def received(self, results: Groups) -> None:
        """These results came back, together."""

    def abandoned(self, rollouts: int, tokens: int) -> None:
        """Requests were given up that had generated this much."""

    def revived(self) -> None:
        """An asynchronous step drew once more."""

    def took(self, result: StepResult) -> None:
        """An asynchronous trainer took a batch."""

    def finished(self, result: StepResult) -> None:
        """The step is over."""
