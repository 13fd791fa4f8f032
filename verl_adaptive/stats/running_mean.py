"""What a run remembers of every prompt, and what it therefore expects of it: the value that replaces a group's mean.

A prompt's evidence fades with its visits. One visit with n observations x (weights of the policy, asynchronous trainers:
``stale_discount`` to the power of the lag):

    w ← ρ w + Σ x,   m ← ρ m + n,   κ ← ρ κ

and what it gives next time is shrunk to what its data source gave last time, with the strength κ of so many rollouts, which
fades with the prompt's visits as in SPO (2509.13232):

    v = (w + κ s) / (m + κ),   s = (2 a + Σ latest) / (2 + visited)   over the visited prompts of the source,

``latest`` being the mean of a prompt's latest visit and ``a`` the same mean over all sources, which in turn starts from
``centre`` with the weight of two prompts, or without a centre from nothing: then v is nan until something was observed.
So a prompt that is always solved beside hopeless ones of its source comes to a value of 1, and is let go.

*Before.* ``s`` stands still within a step (:meth:`Memory.end_step` moves it), so that the value of a prompt that has not
been visited in the step depends on nothing that the step has shown. :meth:`Memory.note` keeps it in the column ``before``.
"""

from __future__ import annotations

import numpy as np

from verl_adaptive.stats.table import Column, StatsTable
from verl_adaptive.stats.visits import waves

#: Prompts that the mean over all sources counts for in the mean of one.
PSEUDO = 2.0


def left_of(rollouts: np.ndarray, per_visit: int, kept: float) -> np.ndarray:
    """What fading leaves of evidence that was gathered elsewhere, as if by visits of this run, one after the other.

    Args:
        rollouts: float64 ``(k,)``, in all.
        per_visit: rollouts of a visit.
        kept: what a visit leaves of the evidence before it.

    Returns:
        float64 ``(k,)``: rollouts that the evidence still counts for, never more than there were.
    """
    if kept == 1:
        return rollouts
    visits = np.maximum(rollouts / per_visit, 1.0)
    return np.minimum(rollouts, per_visit * (1.0 - kept**visits) / (1.0 - kept))


class Memory:
    """Evidence of every prompt, in columns of the table, and the value it amounts to.

    Args:
        table: the run's statistics.
        namespace: of the columns.
        decay: ρ, what a visit leaves of the evidence before it.
        strength: κ before the first visit, rollouts that the prior counts for.
        by_source: the prior is the data source's; False: that of all prompts.
        centre: what nothing at all is taken for; None: not known.

    Attributes:
        noted: int64 ``(k,)``, rows visited in the step under way.
    """

    def __init__(
        self,
        table: StatsTable,
        namespace: str,
        *,
        decay: float,
        strength: float,
        by_source: bool = True,
        centre: float | None = 0.5,
    ) -> None:
        self.table, self.namespace = table, namespace
        self.decay, self.strength, self.by_source, self.centre = decay, strength, by_source, centre
        # No default is an option: a run may go on with another one. `left` of the prior's strength, a share.
        columns = {"sum": Column("f8", 0.0), "count": Column("f8", 0.0), "left": Column("f8", 1.0)}
        columns |= {name: Column("f8", float("nan")) for name in ("latest", "before")}
        self.noted = np.zeros(0, dtype=np.int64)
        table.declare(namespace, columns)
        self.end_step()

    def col(self, name: str) -> np.ndarray:
        """A column: a writable view, valid until the table grows."""
        return self.table.col(f"{self.namespace}.{name}")

    def end_step(self) -> None:
        """The step is over: what the sources show now is what the next step's values rest on."""
        latest, size = self.col("latest"), len(self.table.sources)
        rows = np.flatnonzero(~np.isnan(latest))
        source = self.table.col("source")[rows]
        visited = np.bincount(source, minlength=size).astype(np.float64)
        latest_sum = np.bincount(source, latest[rows], minlength=size)
        prompts, total = visited.sum(), latest_sum.sum()
        if self.centre is not None:
            prompts, total = prompts + PSEUDO, total + PSEUDO * self.centre
        everyone = total / prompts if prompts else np.nan
        prior = (PSEUDO * everyone + latest_sum) / (PSEUDO + visited)
        self._prior = prior if self.by_source else np.full(len(prior), everyone)
        self.noted = self.noted[:0]

    def note(self, rows: np.ndarray) -> np.ndarray:
        """Keep the values of prompts that are visited now, as they stood when the step began; see :attr:`noted`.

        Returns:
            int64 ``(k,)``: of these rows, those that the step had not visited before.
        """
        new = rows[~np.isin(rows, self.noted)]
        self.col("before")[new] = self.value(new)
        self.noted = np.concatenate([self.noted, new])
        return new

    def rewards(self, rows: np.ndarray, reward: np.ndarray) -> np.ndarray:
        """float64 ``(2, k)``: the data source of each row, as far as the prior tells them apart, and its reward."""
        return np.stack([self.table.col("source")[rows] * float(self.by_source), reward])

    def value(self, rows: np.ndarray) -> np.ndarray:
        """float64 ``(k,)``: v of each row; nan while nothing was observed and there is no centre."""
        prior = self._prior[self.table.col("source")[rows]]
        return (self.col("sum")[rows] + self._faded(rows) * prior) / self.mass(rows)

    def mass(self, rows: np.ndarray) -> np.ndarray:
        """float64 ``(k,)``: rollouts that the value of each row rests on, the prior's among them."""
        return self.col("count")[rows] + self._faded(rows)

    def _faded(self, rows: np.ndarray) -> np.ndarray:
        """float64 ``(k,)``: κ of each row."""
        return self.strength * self.col("left")[rows]

    def observe(self, rows: np.ndarray, total: np.ndarray, n: np.ndarray, mean: np.ndarray) -> None:
        """Learn from visits, in their order.

        Args:
            rows: int64 ``(G,)``; a prompt may come several times.
            total, n: float64 ``(G,)``, sum and number of what was observed, weighed by age.
            mean: float64 ``(G,)``, of what was observed.
        """
        for now in waves(rows, n > 0):
            row = rows[now]
            self.col("latest")[row] = mean[now]
            for name, more in (("sum", total[now]), ("count", n[now]), ("left", 0.0)):
                column = self.col(name)
                column[row] = self.decay * column[row] + more

    def begin_with(self, sums: np.ndarray) -> None:
        """Start from the table's evidence on prompts that this memory has not met (a warm start).

        Args:
            sums: float64, one a row: the sum over all rollouts, of successes or rewards. What is remembered counts for as
                many rollouts, at most for 1 / (1 − ρ), and fades the prior as a visit for each of them would. Where it is
                not a number, nothing is known.
        """
        n = self.table.col("rollouts").astype(np.float64)
        rows = np.flatnonzero((n > 0) & (self.col("count") == 0) & np.isfinite(sums))
        mean = sums[rows] / n[rows]
        most = 1.0 / (1.0 - self.decay) if self.decay < 1 else np.inf
        weight = np.minimum(n[rows], most)
        left = self.col("left")[rows] * self.decay ** n[rows]
        self.observe(rows, weight * mean, weight, mean)
        self.col("left")[rows] = left
        self.end_step()
