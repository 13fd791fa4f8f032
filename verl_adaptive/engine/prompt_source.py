"""Which prompts come next: verl's stream through the gate, or picks from the pool.

A prompt that has a group under way is *busy* and gets no second one: a gate turns it away at that place of the stream, a
pool sampler is not shown it within a step, and across steps (asynchronous trainers) a busy prompt that is drawn is *due*: it
is sent as soon as it is free. Were it left out of the draw instead, prompts with long answers would train less often than
their weights say. Only in the ``sync`` trainer's plain epoch order (``whole_batches``), which is verl's own, may
a batch hold a prompt twice where the data set does.

Candidates are drawn as a list (:class:`CandidateQueue`): of a step, a function of the state at its start alone, or of the moment,
as the statistics stand. Asked for more, the list goes on where it was; what was not used is given back to the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_adaptive.config import RunFacts
from verl_adaptive.engine.steps import PromptStream
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.progress import Progress
from verl_adaptive.roles import Sampler, answers
from verl_adaptive.roles.answers import ask, who

#: Passes over the data within one step after which a gate is taken to let nothing more through.
MAX_PASSES = 4
#: Draws that a busy prompt may wait for; beyond that, the pool is too small for the weights to be kept.
MOST_DUE = 4

_NONE = np.zeros(0, dtype=np.int64)
#: Why a draw of a stream ended, though not the step: prompts are free again when they are back.
BUSY = "all prompts that the sampler let through were under way"
_SHUT = f"the sampler let nothing more through in {MAX_PASSES} passes over the data"


class PromptSource:
    """The data as a run's engine sees it; arguments as of :class:`verl_adaptive.engine.Engine`, with its policy's sampler.

    Attributes:
        pool: int64 ``(M,)``, table rows of the distinct prompts, in data-set order, so that ties break alike everywhere.
        due: int64, table rows drawn from the pool while they were busy or the step's cap was reached, in the order of the
            draws; a row at most :data:`MOST_DUE` times.
        ahead: int64, read from the stream and not decided about: data-set positions, in stream order.
        position: stream positions that are decided about, since the run began.
        skipped: prompts that the gate turned away in this step.
        pulled: stream positions that were decided about in this step.
        ended: why this step gets no further prompts, or an empty string; :data:`BUSY`: none at the moment.
    """

    def __init__(self, sampler: Sampler, facts: RunFacts, row_of: np.ndarray, stream: PromptStream) -> None:
        self.sampler, self.facts, self.stream = sampler, facts, stream
        self.row_of = np.asarray(row_of, dtype=np.int64)
        pool, first = np.unique(self.row_of, return_index=True)
        order = np.argsort(first)
        self.pool, self._pool_index = pool[order], first[order]
        self.pool.setflags(write=False)  # samplers are shown it
        self._by_row = np.argsort(self.pool)
        self.ahead, self.due = _NONE, _NONE
        self.position = 0
        self.skipped, self.pulled, self.ended = 0, 0, ""
        self._since = (0, 0.0)  # position and passes since when the data set has its size: a resume may change it

    @property
    def picks(self) -> bool:
        """Whether prompts are picked from the pool instead of taken from the stream."""
        return self.sampler.kind == "pool"

    def epoch(self, generated: int) -> float:
        """Passes over the data so far; of a pool, reckoned by the rollouts ``generated`` in the run."""
        if self.picks:
            return generated / max(1, self.facts.n * len(self.pool))
        position, passes = self._since
        return passes + (self.position - position) / self.stream.size

    # -- where prompts are ----------------------------------------------------------------------------------

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """First data-set position of each row; -1 for a row that is not in the data set."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(self.pool):
            return np.full(len(rows), -1, dtype=np.int64)
        at = self._by_row[np.minimum(np.searchsorted(self.pool, rows, sorter=self._by_row), len(self.pool) - 1)]
        return np.where(self.pool[at] == rows, self._pool_index[at], -1)

    def found(self, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Current positions of saved prompts. In a data set that was reordered since, a prompt's first row."""
        rows, index = np.asarray(rows, dtype=np.int64), np.asarray(index, dtype=np.int64)
        inside = (index >= 0) & (index < len(self.row_of))
        there = inside & (self.row_of[np.where(inside, index, 0)] == rows)
        return np.where(there, index, self.positions(rows))

    # -- drawing as things stand now ------------------------------------------------------------------------

    def pickable(self, busy: np.ndarray) -> np.ndarray:
        """The table rows a pool sampler may choose from; :attr:`pool` itself where none is busy."""
        # A sampler may tell pools apart by identity: the same object where nothing is left out.
        return self.pool[~np.isin(self.pool, busy)] if len(busy) else self.pool

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> tuple[np.ndarray, np.ndarray | None]:
        """A pool sampler's choice: rows of ``pool``, and what it planned for each, or None.

        Raises:
            AdaptiveError: it chose what it was not shown.
        """
        # Before the sampler bounds the step by what is left of a budget of its own, which cuts no plan.
        room = progress.room
        rows, planned = answers.pick(self.sampler, pool, count, progress)
        strange = self.positions(rows) < 0
        if pool is not self.pool:
            strange |= ~np.isin(rows, pool)
        if strange.any():
            raise AdaptiveError(
                f"{who(self.sampler)}.pick chose row {rows[strange][0]}, which is not in the pool that it was given: a Pick "
                "has values of pool, not positions in it"
            )
        plan = planned if self.sampler.plans_steps and planned is not None else _NONE
        if len(plan) and 0 <= room - plan.sum() < plan.min():  # no room for another of the smallest
            self.ended = progress.why_capped
        return rows, planned

    def draw(self, count: int, progress: Progress, busy: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """As :meth:`pick`, of an engine that draws while groups are under way: up to ``count`` rows that are free.

        A sampler that plans rollouts or steps plans for the prompts at hand, and is not shown the busy ones.
        """
        if self.sampler.plans_rollouts or self.sampler.plans_steps:
            return self.pick(self.pickable(busy), count, progress)
        now = np.flatnonzero(fresh(self.due, busy))[:count]
        rows, self.due = self.due[now], np.delete(self.due, now)
        seen = rows
        while len(rows) < count:
            waiting, times = np.unique(self.due, return_counts=True)
            left = self.pickable(np.concatenate([seen, waiting[times >= MOST_DUE]]))
            drawn = self.pick(left, count - len(rows), progress)[0][: count - len(rows)]
            if not len(drawn):
                break
            later = np.isin(drawn, busy) | np.isin(drawn, self.due)
            self.due = np.concatenate([self.due, drawn[later]])
            rows, seen = np.concatenate([rows, drawn[~later]]), np.concatenate([seen, drawn])
        return rows, None

    def put_back(self, rows: np.ndarray) -> None:
        """Rows of :meth:`draw` that a cap has no room for: they are due, before what was due."""
        if not (self.sampler.plans_rollouts or self.sampler.plans_steps):
            self.due = np.concatenate([rows, self.due])

    def pull(self, count: int) -> np.ndarray:
        """Next positions of the stream: what was read ahead, then the rest from the stream itself."""
        if len(self.ahead):
            index, self.ahead = self.ahead[:count], self.ahead[count:]
            return index
        return np.asarray(self.stream.take(count), dtype=np.int64)

    def used(self, candidates: int, read: np.ndarray, decided: int, passed: np.ndarray) -> None:
        """The first candidates of a list are used; what was read for the others goes back to the stream.

        Args:
            candidates: how many.
            read: int64, what was read from the stream for the list.
            decided: how many of these lie before or at the last one used; about the others is asked again.
            passed: bool, what the gate said of the first of them; the others it was not asked about.
        """
        self.ahead = np.concatenate([read[decided:], self.ahead])
        self.position += decided
        self.pulled += decided
        self.skipped += decided - candidates
        passed = passed[:decided]
        ask(self.sampler, "decided", self.row_of[read[: len(passed)]], passed)

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Positions and rows, both: the data set may be another order of the same prompts when a run resumes."""
        return {
            "position": self.position,
            "size": self.stream.size,
            "since": list(self._since),
            "ahead": self.row_of[self.ahead],
            "ahead_index": self.ahead,
            "due": self.due,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; prompts that have left the data set are left out."""
        self.position = int(state["position"])
        (position, passes), size = state["since"], state["size"]
        if size != self.stream.size:  # passes stay passes: of a larger data set as many positions would be fewer
            position, passes = self.position, passes + (self.position - position) / size
        self._since = (int(position), float(passes))
        ahead = self.found(state["ahead"], state["ahead_index"])
        self.ahead = ahead[ahead >= 0]
        due = np.asarray(state["due"], dtype=np.int64)
        self.due = due[self.positions(due) >= 0]


class CandidateQueue:
    """Candidates, in the order in which they count.

    A step's list does not depend on how it is asked for: the gate decides about a prompt by its place in the stream and by
    the statistics at the step's start, and picks from the pool come in chunks of fixed sizes.

    Args:
        prompts: the data.
        progress: the step; its ``chunk`` numbers the chunks of a pool sampler.
        busy: int64, table rows that have a group under way.
        ungated: let the stream through unseen, rather than end the run, if the gate lets nothing at all through.
        first: candidates of the first request, the first chunk of a pool sampler.
        again: a prompt may come twice: in verl's own order where the data set has it twice, else in a new lap.

    Attributes:
        index, row: int64 ``(k,)``, the candidates so far: position in the data set and table row.
        planned: int64 ``(k,)``, a pool sampler's own plan, -1 for none.
    """

    def __init__(
        self,
        prompts: PromptSource,
        progress: Progress,
        busy: np.ndarray,
        *,
        ungated: bool,
        first: int = 0,
        again: bool = True,
    ) -> None:
        self._prompts, self._progress, self._busy = prompts, progress, busy
        self._ungated, self._first, self._again = ungated, first, again
        self.index, self.row, self.planned = _NONE, _NONE, _NONE
        self._end = _NONE  # per candidate: stream positions decided about once it is
        self._raw = _NONE  # read from the stream in this step, in order
        self._passed = np.zeros(0, dtype=bool)  # of these, what the gate said about those that it was asked about
        self._lap = 0  # first candidate of the lap: within one, no prompt comes twice
        self._dry = 0  # positions since the last candidate
        self._repeats = False  # among these, prompts that the gate let through and that had come before
        self._chunk = 0

    def __len__(self) -> int:
        return len(self.index)

    def extend(self, count: int) -> None:
        """Go on until there are ``count`` candidates in all, or no more."""
        while len(self) < count and not self._prompts.ended:
            before = len(self)
            if self._prompts.picks:
                self._pick()
                if len(self) == before:
                    return
            elif self._again and self._repeats and self._dry and self._dry % self._prompts.stream.size == 0:
                return  # a whole pass of prompts that are candidates already: only a new lap helps
            else:
                self._gate(count)

    def new_lap(self, held: np.ndarray) -> bool:
        """Let prompts come again, as nothing of this step is under way any more but the rows ``held``. False where that changes
        nothing."""
        if self._lap == len(self):
            return False
        self._busy = np.concatenate([self._busy, held])
        self._lap, self._dry, self._repeats = len(self), 0, False
        return True

    def commit(self, committed: int) -> None:
        """The first ``committed`` candidates are used, the rest goes back to the stream."""
        if not self._prompts.picks:
            decided = int(self._end[committed - 1]) if committed else 0
            self._prompts.used(committed, self._raw, decided, self._passed)

    # -- growing --------------------------------------------------------------------------------------------

    def _add(self, index: np.ndarray, end: np.ndarray, planned: np.ndarray | None = None) -> None:
        self.index = np.concatenate([self.index, index])
        self.row = np.concatenate([self.row, self._prompts.row_of[index]])
        self.planned = np.concatenate([self.planned, np.full(len(index), -1) if planned is None else planned])
        self._end = np.concatenate([self._end, end])

    def _taken(self) -> np.ndarray:
        return np.concatenate([self._busy, self.row[self._lap :]])

    def _pick(self) -> None:
        """A chunk of the pool: as many as the step asks for at first, then a quarter of a batch at a time."""
        if self._chunk and self._prompts.sampler.plans_steps:
            return  # it plans a step at once
        size = (self._first if self._chunk == 0 else 0) or -(-self._prompts.facts.batch // 4)
        self._progress.chunk = self._chunk
        pool = self._prompts.pickable(self._taken())
        rows, planned = self._prompts.pick(pool, size, self._progress)
        # How often it is asked in vain depends on who is back: that must not number the chunks.
        self._chunk += bool(len(rows) or not self._chunk)
        if not len(rows):
            if len(pool) == len(self._prompts.pool):  # nothing was left out: it has no more to give
                self._prompts.ended = "the sampler gave no further prompt"
            return
        self._add(self._prompts.positions(rows), np.zeros(len(rows), dtype=np.int64), planned)

    def _gate(self, count: int) -> None:
        """Read on in the stream; the gate says which prompts become candidates."""
        prompts = self._prompts
        size = prompts.stream.size
        read, gated_reads = len(self._raw), max(0, MAX_PASSES * size - prompts.pulled)
        gated = read < gated_reads
        if gated:
            most = min(count - len(self), gated_reads - read)
        else:
            let_through = read - gated_reads
            if not let_through:
                # Nothing at all to train on: rather than end the run by surprise, the step goes ungated.
                self._ungated &= not len(self)
            # As many as the first request asks for. It may ask for none, where held groups are to fill the batch: then a
            # batch of them, and not as many as happen to be missing when somebody looks.
            lot = min(self._first or prompts.facts.batch, size)
            seen = let_through >= size and not self._again
            if not self._ungated or seen or (len(self) and let_through and let_through % lot == 0):
                prompts.ended = BUSY if self._repeats and not self._again and not self._ungated else _SHUT
                return
            most = lot - let_through % lot
        # Up to where a pass without a candidate ends, so that the list ends where it ends however it is asked for.
        most = min(most, size - self._dry % size)
        index = prompts.pull(most)
        if len(index) > most:  # the stream gives whole batches
            prompts.ahead = np.concatenate([index[most:], prompts.ahead])
            index = index[:most]
        place = read + np.arange(len(index), dtype=np.int64)
        self._raw = np.concatenate([self._raw, index])
        rows = prompts.row_of[index]
        passed = np.ones(len(index), dtype=bool)
        if gated:
            passed = answers.admit(prompts.sampler, rows, prompts.position + place, self._progress)
            self._passed = np.concatenate([self._passed, passed])
        if self._again and prompts.sampler.whole_batches:
            new = passed & ~np.isin(rows, self._busy)
        else:
            new = fresh(rows, self._taken(), passed)
        self._repeats |= bool((passed & ~new).any())
        self._dry = int(np.argmax(new[::-1])) if new.any() else self._dry + len(index)
        self._add(index[new], place[new] + 1)


def fresh(rows: np.ndarray, busy: np.ndarray, passed: np.ndarray | bool = True) -> np.ndarray:
    """bool ``(k,)``: prompts that passed and have no group under way, each where it comes first."""
    free = np.flatnonzero(passed & ~np.isin(rows, busy))
    out = np.zeros(len(rows), dtype=bool)
    out[free[np.unique(rows[free], return_index=True)[1]]] = True
    return out
