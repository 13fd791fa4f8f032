"""Finished groups as a structure of arrays: what every role looks at, and what the store observes.

A *group* is one visit to a prompt: all rollouts generated for it under one decision, top-ups included. Rollouts are
trajectories (one reward a session, however many outputs the session had), kept ragged: group ``g`` owns the rollouts
``offsets[g]:offsets[g + 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

#: Relative rounding of the float32 in which verl has rewards.
_FLOAT32 = 2.0**-23

#: The least signal of a success where ``adaptive.success`` says nothing else, which serves 0/1 and ±1 rewards alike; and the
#: least success of a correct rollout.
SUCCESS = 0.5

#: The arrays with one entry a rollout; all others but ``offsets`` have one a group.
PER_ROLLOUT = frozenset({"reward", "signal", "success", "tokens", "stage", "shorter"})


def at_least(value: Any, bound: float) -> Any:
    """Where a value, a number or an array, reaches the bound, but for rounding: verl's rewards are float32, in which .9 and .7
    are a little less than the .9 and .7 of a command line."""
    return value >= bound - _FLOAT32 * abs(bound)


def success_by_default(signal: np.ndarray) -> np.ndarray:
    """float64: 1 where the signal is at least :data:`SUCCESS`, else 0."""
    return (signal >= SUCCESS).astype(np.float64)


@dataclass
class Groups:
    """``G`` groups with ``R`` rollouts in all.

    Attributes:
        submission: int64 ``(G,)``, order of submission in the run; groups are always sorted by it.
        row: int64 ``(G,)``, the prompt's row in the statistics table.
        index: int64 ``(G,)``, the prompt's position in the data set (``-1``: not known).
        failed: bool ``(G,)``, a session failed or a reward was not finite: says nothing about difficulty.
        lag: int32 ``(G,)``, weight updates between generation and review; 0 is on-policy.
        offsets: int64 ``(G + 1,)``.
        reward: float64 ``(R,)``, the training reward of each rollout.
        signal: float64 ``(R,)``, the difficulty signal (``adaptive.signal``; the reward by default).
        success: float64 ``(R,)``, the signal as evidence of success in [0, 1] (``adaptive.success``).
        tokens: int64 ``(R,)``, response tokens.
        stage: int16 ``(R,)``, 0 for the first rollouts, ``k`` for those of the k-th top-up.
        lost: int32 ``(G,)``, rollouts that were asked for and are not here: their session failed, or what came back has no
            finite reward or signal.
        spoilt: int64 ``(G,)``, of the lost ones, those that came back: generated, and paid for.
        spoilt_tokens: int64 ``(G,)``, their response tokens.
        shorter: int64 ``(R,)``, of a rollout's tokens, those outside its longest output.
    """

    submission: np.ndarray
    row: np.ndarray
    index: np.ndarray
    failed: np.ndarray
    lag: np.ndarray
    offsets: np.ndarray
    reward: np.ndarray
    signal: np.ndarray
    success: np.ndarray
    tokens: np.ndarray
    stage: np.ndarray
    lost: np.ndarray
    spoilt: np.ndarray
    spoilt_tokens: np.ndarray
    shorter: np.ndarray

    # -- making ---------------------------------------------------------------------------------------------

    @classmethod
    def from_lists(
        cls,
        rows: Sequence[int] | np.ndarray,
        rewards: Sequence[Sequence[float] | np.ndarray],
        *,
        signal: Sequence[Sequence[float] | np.ndarray] | None = None,
        success: Sequence[Sequence[float] | np.ndarray] | None = None,
        tokens: Sequence[Sequence[int] | np.ndarray] | None = None,
        stage: Sequence[Sequence[int] | np.ndarray] | None = None,
        submission: Sequence[int] | np.ndarray | None = None,
        index: Sequence[int] | np.ndarray | None = None,
        failed: Sequence[bool] | np.ndarray | None = None,
        lag: Sequence[int] | np.ndarray | None = None,
        lost: Sequence[int] | np.ndarray | None = None,
        spoilt: Sequence[int] | np.ndarray | None = None,
        spoilt_tokens: Sequence[int] | np.ndarray | None = None,
        shorter: Sequence[Sequence[int] | np.ndarray] | None = None,
    ) -> Groups:
        """Build from one list of rewards a group; everything else has an obvious default.

        ``signal`` defaults to the reward, ``success`` to the signal, ``tokens`` to 1, ``submission`` to 0, 1, 2, …
        """
        sizes = np.fromiter((len(r) for r in rewards), dtype=np.int64, count=len(rewards))
        offsets = np.zeros(len(rewards) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        total = int(offsets[-1])

        def ragged(values, dtype, default):
            if values is None:
                return np.array(default, dtype=dtype) if np.ndim(default) else np.full(total, default, dtype=dtype)
            out = np.array([x for group in values for x in group], dtype=dtype)
            if len(out) != total:
                raise ValueError(f"ragged argument holds {len(out)} rollouts, the rewards hold {total}")
            return out

        def flat(values, dtype, default):
            if values is None:
                return np.array(default, dtype=dtype) if np.ndim(default) else np.full(len(rewards), default, dtype)
            return np.asarray(values, dtype=dtype)

        reward = ragged(rewards, np.float64, 0.0)
        sig = ragged(signal, np.float64, reward)
        return cls(
            submission=flat(submission, np.int64, np.arange(len(rewards))),
            row=np.asarray(rows, dtype=np.int64),
            index=flat(index, np.int64, np.asarray(rows)),
            failed=flat(failed, bool, False),
            lag=flat(lag, np.int32, 0),
            offsets=offsets,
            reward=reward,
            signal=sig,
            success=ragged(success, np.float64, sig),
            tokens=ragged(tokens, np.int64, 1),
            stage=ragged(stage, np.int16, 0),
            lost=flat(lost, np.int32, 0),
            spoilt=flat(spoilt, np.int64, 0),
            spoilt_tokens=flat(spoilt_tokens, np.int64, 0),
            shorter=ragged(shorter, np.int64, 0),
        )

    @classmethod
    def empty(cls) -> Groups:
        """No groups at all."""
        global _EMPTY
        if _EMPTY is None:
            _EMPTY = cls.from_lists([], [])
        return cls(**vars(_EMPTY))

    @classmethod
    def concat(cls, parts: Sequence[Groups]) -> Groups:
        """The groups of all parts, in the order given."""
        parts = [p for p in parts if len(p)]
        if not parts:
            return cls.empty()
        if len(parts) == 1:
            return parts[0]
        out = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls) if f.name != "offsets"}
        sizes = np.concatenate([p.n for p in parts])
        out["offsets"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(**out)

    # -- reading --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.row)

    @property
    def n(self) -> np.ndarray:
        """int64 ``(G,)``: rollouts of each group."""
        return self.offsets[1:] - self.offsets[:-1]  # np.diff is four times slower, and this is asked for often

    @property
    def rollouts(self) -> int:
        """``R``, rollouts in all."""
        return int(self.offsets[-1])

    @property
    def longest(self) -> np.ndarray:
        """int64 ``(R,)``: tokens of each rollout's longest output, the one that a limit on an answer's length cuts."""
        return self.tokens - self.shorter

    @property
    def group_of(self) -> np.ndarray:
        """int64 ``(R,)``: the group each rollout belongs to."""
        return np.repeat(np.arange(len(self)), self.n)

    def reduce(self, ufunc: np.ufunc, values: np.ndarray, empty: float = 0.0) -> np.ndarray:
        """``ufunc`` over each group's slice of ``values`` (shape ``(R,)``); ``empty`` for a group of none."""
        out = np.full(len(self), empty, dtype=np.float64)
        some = self.n > 0
        if some.any():
            out[some] = ufunc.reduceat(values.astype(np.float64, copy=False), self.offsets[:-1][some])
        return out

    def sum(self, values: np.ndarray) -> np.ndarray:
        """float64 ``(G,)``: sum of ``values`` over each group."""
        return self.reduce(np.add, values)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """float64 ``(G,)``: mean of ``values`` over each group; 0 for a group of none."""
        return self.sum(values) / np.maximum(self.n, 1)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """float64 ``(G,)``: max − min of ``values`` over each group; 0 for a group of none."""
        return self.reduce(np.maximum, values) - self.reduce(np.minimum, values)

    @property
    def successes(self) -> np.ndarray:
        """float64 ``(G,)``: evidence of success, c."""
        return self.sum(self.success)

    @property
    def correct(self) -> np.ndarray:
        """bool ``(R,)``: rollouts whose success is at least :data:`SUCCESS`; with a binary signal the successes themselves."""
        return self.success >= SUCCESS

    @property
    def pass_rate(self) -> np.ndarray:
        """float64 ``(G,)``: c / n; 0 for a group of none."""
        return self.mean(self.success)

    def degenerate(self, tolerance: float = 0.0, values: np.ndarray | None = None) -> np.ndarray:
        """bool ``(G,)``: max − min of the signal (or of ``values``) is at most ``tolerance`` over the whole group.

        Never ``std == 0``: the float64 standard deviation of a constant group is often not zero.
        """
        return self.spread(self.signal if values is None else values) <= tolerance

    def rollout_mask(self, groups: np.ndarray) -> np.ndarray:
        """bool ``(R,)``: the rollouts of the groups marked in ``groups`` (bool ``(G,)``)."""
        return np.repeat(groups, self.n)

    def rollouts_of(self, positions: np.ndarray) -> np.ndarray:
        """int64: positions of the rollouts of the groups at ``positions``, group after group."""
        sizes = self.n[positions]
        ends = np.cumsum(sizes)
        return np.repeat(self.offsets[:-1][positions] - (ends - sizes), sizes) + np.arange(sizes.sum())

    def select(self, groups: np.ndarray) -> Groups:
        """Those groups only; ``groups`` is bool ``(G,)`` or an int array of positions, in the order wanted."""
        positions = np.flatnonzero(groups) if groups.dtype == bool else np.asarray(groups, dtype=np.int64)
        if not len(positions):
            return Groups.empty()
        if groups.dtype == bool and len(positions) == len(self):
            return Groups(**vars(self))  # the arrays are shared: nobody writes into them
        take = self.rollouts_of(positions)
        offsets = np.concatenate([[0], np.cumsum(self.n[positions])]).astype(np.int64)
        out = {
            f.name: getattr(self, f.name)[take if f.name in PER_ROLLOUT else positions]
            for f in fields(self)
            if f.name != "offsets"
        }
        return Groups(offsets=offsets, **out)

    def sorted(self) -> Groups:
        """In submission order."""
        if (self.submission[1:] >= self.submission[:-1]).all():
            return Groups(**vars(self))
        return self.select(np.argsort(self.submission, kind="stable"))

    def merge(self, more: Groups) -> Groups:
        """Join ``more`` (top-ups) into the groups of the same submission; every submission of ``more`` must be here."""
        both = Groups.concat([self, more])
        if len(both) == len(self):
            return self
        position = {int(t): i for i, t in enumerate(self.submission)}
        home = np.array([position[int(t)] for t in both.submission], dtype=np.int64)
        order = np.argsort(home[both.group_of], kind="stable")
        sizes = np.bincount(home, weights=both.n, minlength=len(self)).astype(np.int64)
        failed = np.zeros(len(self), dtype=bool)
        np.logical_or.at(failed, home, both.failed)
        sums = {}
        for name in ("lost", "spoilt", "spoilt_tokens"):
            values = getattr(both, name)
            sums[name] = np.zeros(len(self), dtype=values.dtype)
            np.add.at(sums[name], home, values)
        lag = np.zeros(len(self), dtype=np.int32)
        np.maximum.at(lag, home, both.lag)
        return Groups(
            submission=self.submission,
            row=self.row,
            index=self.index,
            failed=failed,
            lag=lag,
            offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            reward=both.reward[order],
            signal=both.signal[order],
            success=both.success[order],
            tokens=both.tokens[order],
            stage=both.stage[order],
            shorter=both.shorter[order],
            **sums,
        )


_EMPTY: Groups | None = None
