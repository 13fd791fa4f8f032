"""Finished groups as a structure of arrays: what every role looks at, and what the store observes.

A *group* is one visit to a prompt: all rollouts generated for it under one decision, top-ups included. Rollouts are
trajectories (one reward a session, however many outputs the session had), kept ragged: group ``g`` owns the rollouts
``offsets[g]:offsets[g + 1]``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Relative rounding of the float32 in which verl has rewards.
_FLOAT32 = 2.0**-23
#: What differs by less than this share of its size is equal: eight roundings.
ROUNDING = 1e-6

#: The least signal of a success where ``adaptive.success`` says nothing else, which serves 0/1 and ±1 rewards alike; and the
#: least success of a correct rollout.
SUCCESS = 0.5

#: The arrays with one entry a group, and those with one a rollout: name → type.
PER_GROUP: dict[str, Any] = {
    **{"submission": np.int64, "row": np.int64, "index": np.int64, "failed": bool, "lag": np.int32},
    **{"lost": np.int32, "spoilt": np.int64, "spoilt_tokens": np.int64},
}
PER_ROLLOUT: dict[str, Any] = {
    **{"reward": np.float64, "signal": np.float64, "success": np.float64},
    **{"tokens": np.int64, "stage": np.int16, "shorter": np.int64},
}


def at_least(value: Any, bound: Any) -> Any:
    """Where a value reaches the bound, each a number or an array, but for rounding: verl's rewards are float32, in which .9 and .7
    are a little less than the .9 and .7 of a command line."""
    return value >= bound - _FLOAT32 * abs(bound)


def at_most(value: Any, bound: Any) -> Any:
    """Where a value is no more than the bound, but for rounding, as :func:`at_least`."""
    return at_least(-value, -bound)


def success_by_default(signal: np.ndarray) -> np.ndarray:
    """float64: 1 where the signal is at least :data:`SUCCESS`, else 0."""
    return at_least(signal, SUCCESS).astype(np.float64)


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
    def from_lists(cls, rows: Sequence[int] | np.ndarray, rewards: Sequence[Any], **others: Any) -> Groups:
        """Build from one list of rewards a group; everything else has an obvious default.

        Args:
            rows: one a group.
            rewards: a list for each group.
            others: any of the other attributes: a value for each group, or a list for each group of those of its rollouts.
                ``signal`` defaults to the reward, ``success`` to the signal, ``tokens`` to 1, ``index`` to the row, ``submission``
                to 0, 1, 2, …; what is left to 0.
        """
        offsets = _offsets(np.array([len(group) for group in rewards], dtype=np.int64))
        made: dict[str, Any] = {"row": rows, "index": rows, "submission": np.arange(len(rewards))}
        made |= {name: np.zeros(len(rewards)) for name in PER_GROUP if name not in made}
        made |= {"tokens": np.ones(offsets[-1]), "stage": np.zeros(offsets[-1]), "shorter": np.zeros(offsets[-1])}
        for name, values in {"reward": rewards, **others}.items():
            made[name] = [x for group in values for x in group] if name in PER_ROLLOUT else values
            if name in PER_ROLLOUT and len(made[name]) != offsets[-1]:
                raise ValueError(f"{name} holds {len(made[name])} rollouts, the rewards hold {offsets[-1]}")
        made.setdefault("signal", made["reward"])
        made.setdefault("success", made["signal"])
        types = PER_GROUP | PER_ROLLOUT
        return cls(offsets=offsets, **{name: np.array(values, dtype=types.get(name)) for name, values in made.items()})

    @classmethod
    def empty(cls) -> Groups:
        """No groups at all."""
        return cls(**vars(_empty()))

    @classmethod
    def concat(cls, parts: Sequence[Groups]) -> Groups:
        """The groups of all parts, in the order given."""
        parts = [p for p in parts if len(p)]
        if not parts:
            return cls.empty()
        if len(parts) == 1:
            return parts[0]
        out = {name: np.concatenate([getattr(p, name) for p in parts]) for name in (*PER_GROUP, *PER_ROLLOUT)}
        return cls(**out, offsets=_offsets(np.concatenate([p.n for p in parts])))

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

    def cut(self, limit: int | None) -> np.ndarray:
        """bool ``(R,)``: rollouts whose longest output is as long as ``limit`` (``data.max_response_length``); None: no limit."""
        return self.tokens - self.shorter >= (np.inf if limit is None else limit)

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
        return at_least(self.success, SUCCESS)

    @property
    def pass_rate(self) -> np.ndarray:
        """float64 ``(G,)``: c / n; 0 for a group of none."""
        return self.mean(self.success)

    def degenerate(self, tolerance: float = 0.0) -> np.ndarray:
        """bool ``(G,)``: max − min of the signal is at most ``tolerance`` over the whole group.

        Never ``std == 0``: the float64 standard deviation of a constant group is often not zero.
        """
        return self.spread(self.signal) <= tolerance

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
        out = {name: getattr(self, name)[positions] for name in PER_GROUP}
        out |= {name: getattr(self, name)[take] for name in PER_ROLLOUT}
        return Groups(offsets=_offsets(self.n[positions]), **out)

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
        out = {name: getattr(both, name)[order] for name in PER_ROLLOUT}
        out |= {name: getattr(self, name) for name in ("submission", "row", "index")}
        joins = {"failed": np.logical_or, "lag": np.maximum, "lost": np.add, "spoilt": np.add, "spoilt_tokens": np.add}
        for name, join in joins.items():
            values = getattr(both, name)
            out[name] = np.zeros(len(self), dtype=values.dtype)
            join.at(out[name], home, values)
        return Groups(offsets=_offsets(sizes), **out)


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """int64 ``(G + 1,)``: where each group's rollouts begin, and where the last one's end."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@functools.cache
def _empty() -> Groups:
    return Groups.from_lists([], [])
