"""Alarms while a run goes on: what a person would want to be told before the next morning. Pure counting; decides nothing.

Everything is judged by data source, in blocks of at least ``adaptive.alarms.rollouts`` rollouts of it, so that a source of
two prompts a step is judged as carefully as one of two hundred, only later:

* *never solved*: not one success since the run began, in a block's rollouts or more;
* *cut*: of the latest block, more than ``cut`` of the answers are as long as ``data.max_response_length``;
* *jumped*: from one block to the next the pass rate moved by more than ``jump``, and by more than four standard errors;
* *starved*: of the latest rollouts of all sources, it got less than ``starved`` of its share of the prompts, although it is
  neither solved nor hopeless;
* *all succeed*: every answer of the latest block counts as a success (``adaptive.signal=reward``), though rewards vary.

Of the whole run:

* *rogue reward*: the rewards of a step are ``ROGUE`` times as far from what was expected as usual (advantages that keep a
  running scale say how far).

docs/alarms.md says what each may mean.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_adaptive.config import AlarmConfig
from verl_adaptive.text import clean

__all__ = ["KINDS", "Alarms", "source_label", "source_labels"]

#: Kinds that are judged by source.
KINDS = ("never_solved", "cut", "jumped", "starved", "all_succeed")
#: Pass rate from which a source is solved and needs no rollouts.
_SOLVED = 0.9
#: Rollouts that a data source's share must come to before it can be called starved.
_EXPECTED = 64
#: Standard errors that chance does not explain.
_CHANCE = 4.0
#: Root mean square of a step's differences, in scales, from which a reward is rogue.
ROGUE = 3.0
#: Standard deviation of a source's rewards, in sizes of their mean, from which they vary.
_VARIES = 0.05
#: Share of rows that repeat an earlier prompt from which it is said.
DUPLICATES = 0.05


def source_label(name: str) -> str:
    """A data source's name as part of a metric's."""
    return clean(name.strip().strip("/"), 80) or "unknown"


def source_labels(names: Sequence[str]) -> list[str]:
    """The names of data sources as parts of metrics' names; those that would be alike end in a hash of the whole name."""
    labels = [source_label(name) for name in names]
    alike = Counter(labels)
    return [
        f"{label[:71]}~{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"
        if alike[label] > 1
        else label
        for name, label in zip(names, labels, strict=True)
    ]


class Alarms:
    """Watches a run, step by step.

    Args:
        config: ``adaptive.alarms``.
        names: the data sources.
        prompts: int ``(S,)``, prompts of each in the training set.
        repeated: share of the data set's rows that repeat an earlier prompt.
        signal: ``adaptive.signal``.
    """

    def __init__(
        self,
        config: AlarmConfig,
        names: Sequence[str],
        prompts: np.ndarray,
        *,
        repeated: float = 0.0,
        signal: str = "reward",
    ) -> None:
        self.config, self.names, self.prompts = config, list(names), np.asarray(prompts, dtype=np.float64)
        self.repeated, self.signal = repeated, signal
        self.fields: frozenset[str] = frozenset()  # what the reward function gives beside the reward, once known
        size = len(self.names)
        order = np.argsort(-self.prompts, kind="stable")
        self._shown = [i for i in order.tolist() if self.prompts[i] > 0][: config.sources]
        # Of all sources that have prompts, so that a name does not depend on how many are shown.
        here = np.flatnonzero(self.prompts > 0).tolist()
        self._labels = dict(zip(here, source_labels([self.names[i] for i in here]), strict=True))
        self._all = np.zeros((2, size))  # rollouts, successes
        # Rollouts, successes, rollouts of known length, cut ones; sum and sum of squares of the rewards.
        self._block = np.zeros((6, size))
        self._last = np.full((6, size), np.nan)
        # Since a source was last looked at for being starved: its rollouts, what its share of the prompts comes to, and
        # everybody's.
        self._wait = np.zeros((3, size))
        self._judged = np.zeros((3, size))  # the same, as it was then
        self._on = {kind: np.zeros(size, dtype=bool) for kind in KINDS}
        self._rewards: set[float] = set()
        self._said: set[str] = set()
        self._rogue = False

    def step(
        self,
        source: np.ndarray,
        n: np.ndarray,
        successes: np.ndarray,
        cut: np.ndarray | None,
        rewards: np.ndarray,
        jump: float = 0.0,
    ) -> tuple[dict[str, float], list[str]]:
        """Take a step's groups, failed ones left out.

        Args:
            source: int ``(G,)``, positions in ``names``.
            n, successes: ``(G,)``, rollouts and evidence of success.
            cut: ``(G,)``, rollouts as long as the limit; None: the limit is not known.
            rewards: ``(R,)``, their training rewards, group after group.
            jump: how far they are from what was expected, in scales; 0: not known.

        Returns:
            Metrics, and a line for each alarm that was raised now.
        """
        size = len(self.names)
        long = np.zeros(len(n)) if cut is None else cut
        home = np.repeat(source, n)
        now = np.stack(
            [np.bincount(source, value, minlength=size) for value in (n, successes, n, long)]
            + [np.bincount(home, value, minlength=size) for value in (rewards, rewards * rewards)]
        )
        if cut is None:
            now[2] = 0.0
        self._all += now[:2]
        self._block += now
        pool = self.prompts.sum()
        self._wait += np.stack([now[0], now[0].sum() * self.prompts / max(pool, 1.0), np.full(size, now[0].sum())])
        lines = self._judge()
        if len(self._rewards) <= 2:
            self._rewards.update(np.unique(np.round(rewards[np.isfinite(rewards)], 9))[:3].tolist())
        lines += self._once() + self._far(home, rewards, jump)
        return self._metrics(now), lines

    # -- by source ------------------------------------------------------------------------------------------

    def _judge(self) -> list[str]:
        before = {kind: on.copy() for kind, on in self._on.items()}
        whole, won = self._all
        self._on["never_solved"] = (whole >= self.config.rollouts) & (won <= 0)
        full = self._block[0] >= self.config.rollouts
        if full.any():
            self._judge_blocks(full)
        self._judge_shares()
        return [self._line(kind, i) for kind in KINDS for i in np.flatnonzero(self._on[kind] & ~before[kind]).tolist()]

    def _judge_blocks(self, full: np.ndarray) -> None:
        n, won, known, cut, total, square = self._block
        n0, won0 = self._last[:2]
        with np.errstate(all="ignore"):
            varies = square / n - (total / n) ** 2 > (_VARIES * total / n) ** 2
            succeed = (won >= n) & varies & (self.signal == "reward")
            self._on["all_succeed"] = np.where(full, succeed, self._on["all_succeed"])
            self._on["cut"] = np.where(full, (known > 0) & (cut > self.config.cut * known), self._on["cut"])
            move = won / n - won0 / n0
            pooled = (won + won0) / (n + n0)
            error = np.sqrt(np.maximum(pooled * (1 - pooled), 1e-4) * (1 / n + 1 / n0))
            jumped = (np.abs(move) > self.config.jump) & (np.abs(move) > _CHANCE * error)
        self._on["jumped"] = np.where(full, jumped, self._on["jumped"])
        self._move = np.where(full, move, getattr(self, "_move", np.zeros(len(n))))
        self._last[:, full] = self._block[:, full]
        self._block[:, full] = 0.0

    def _judge_shares(self) -> None:
        if len(self.names) < 2:
            return
        got, expected, everybody = self._wait
        whole = self.config.rollouts * max(8, int((self.prompts > 0).sum()))
        due = (everybody >= whole) & (expected >= _EXPECTED)  # a small source waits longer for its turn
        if not due.any():
            return
        with np.errstate(all="ignore"):
            rate = self._all[1] / self._all[0]
        needless = ((rate >= _SOLVED) & ~self._on["all_succeed"]) | self._on["never_solved"]
        starved = (got < self.config.starved * expected) & ~needless
        self._on["starved"] = np.where(due, starved, self._on["starved"])
        self._judged = np.where(due, self._wait, self._judged)
        self._wait[:, due] = 0.0

    def _line(self, kind: str, i: int) -> str:
        name = f"data source {clean(self.names[i], 80)!r}"
        if kind == "never_solved":
            return (
                f"alarm: {name}: not one success in {self._all[0, i]:,.0f} rollouts. Does its reward function parse the "
                "answer's format?"
            )
        if kind == "cut":
            share = self._last[3, i] / self._last[2, i]
            return f"alarm: {name}: {share:.0%} of the answers are cut at data.max_response_length"
        if kind == "jumped":
            rate = self._last[1, i] / self._last[0, i]
            return (
                f"alarm: {name}: the pass rate moved by {self._move[i]:+.2f} to {rate:.2f} within "
                f"{self._last[0, i]:,.0f} rollouts. Read some: reward hacking, or a verifier that fails?"
            )
        if kind == "all_succeed":
            count, mean = self._last[0, i], self._last[4, i] / self._last[0, i]
            deviation = np.sqrt(self._last[5, i] / count - mean * mean)
            return (
                f"alarm: {name}: every one of {count:,.0f} answers counts as a success, though their rewards vary "
                f"({mean:.3g} ± {deviation:.2g}): set adaptive.success.threshold, or adaptive.signal"
            )
        return (
            f"alarm: {name}: got {self._judged[0, i]:,.0f} of the latest {self._judged[2, i]:,.0f} rollouts, by its share "
            f"of the prompts it would be {self._judged[1, i]:,.0f}"
        )

    # -- across a restart -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts by source, alarms that are on, and what has been said, for :func:`.stats.state.split_state`."""
        return {
            "names": self.names,
            "all": self._all.copy(),
            "block": self._block.copy(),
            "last": self._last.copy(),
            "wait": self._wait.copy(),
            "on": {kind: on.copy() for kind, on in self._on.items()},
            "rewards": sorted(self._rewards),
            "said": sorted(self._said),
            "rogue": self._rogue,
            "fields": sorted(self.fields),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the run that saved the state; of a data source that it did not know, begin to count."""
        place = {name: i for i, name in enumerate(state["names"])}
        mine = np.array([i for i, name in enumerate(self.names) if name in place], dtype=np.int64)
        theirs = np.array([place[self.names[i]] for i in mine], dtype=np.int64)
        for own, name in ((self._all, "all"), (self._block, "block"), (self._last, "last"), (self._wait, "wait")):
            own[..., mine] = np.asarray(state[name])[..., theirs]
        for kind, on in self._on.items():
            on[mine] = np.asarray(state["on"][kind])[theirs]
        self._rogue = bool(state["rogue"])
        self._rewards, self._said, self.fields = set(state["rewards"]), set(state["said"]), frozenset(state["fields"])

    # -- of the whole run -----------------------------------------------------------------------------------

    @property
    def unused_acc(self) -> bool:
        """``acc`` is there, and the shaped reward is what decides difficulty."""
        return self.signal == "reward" and "acc" in self.fields and len(self._rewards) > 2

    def _once(self) -> list[str]:
        lines = []
        if self.repeated > DUPLICATES and "duplicates" not in self._said:
            self._said.add("duplicates")
            lines.append(f"alarm: {self.repeated:.0%} of the data set's rows repeat an earlier prompt")
        if self.unused_acc and "acc" not in self._said:
            self._said.add("acc")
            lines.append(
                "alarm: the reward takes more than two values and the reward function gives acc, too: "
                "adaptive.signal=acc would tell solved from failed, adaptive.signal=reward cannot"
            )
        return lines

    def _far(self, home: np.ndarray, rewards: np.ndarray, jump: float) -> list[str]:
        before, self._rogue = self._rogue, jump >= ROGUE
        if before or not self._rogue or not len(rewards):
            return []
        at = int(np.argmax(np.abs(rewards - np.median(rewards))))
        return [
            f"alarm: a step's rewards are {jump:.1f} times as far from what was expected as usual; the farthest is "
            f"{rewards[at]:g} (data source {clean(self.names[home[at]], 80)!r})"
        ]

    def _metrics(self, now: np.ndarray) -> dict[str, float]:
        out = {f"adaptive/alarm/{kind}": float(on.sum()) for kind, on in self._on.items()}
        out["adaptive/alarm/duplicate_share"] = self.repeated
        out["adaptive/alarm/unused_acc"] = float(self.unused_acc)
        out["adaptive/alarm/rogue_reward"] = float(self._rogue)
        whole = float(now[0].sum())
        for i in self._shown:
            name = self._labels[i]
            n, won, known, cut = now[:4, i].tolist()
            if whole:
                out[f"adaptive/source/rollout_share/{name}"] = n / whole
            if n:
                out[f"adaptive/source/pass_rate/{name}"] = won / n
            if known:
                out[f"adaptive/source/cut_share/{name}"] = cut / known
        return out
