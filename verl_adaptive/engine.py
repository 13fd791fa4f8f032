"""The engine: runs the four roles through a step, one generation round after another.

It knows neither verl nor a clock. The trainer and the simulator drive the same object::

    requests = engine.begin(step)
    while requests is not None:
        requests = engine.receive(roll_out(requests))     # all of them, in any order of completion
    result = engine.finish()

A round is a set of requests generated together under one set of weights: first rollouts of new prompts and top-ups of
open groups. Reviews happen when the whole round is back and run in submission order (by ticket), so what trains never
depends on who finished first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.errors import AdaptiveError, Exhausted
from verl_adaptive.groups import Groups
from verl_adaptive.ledger import Ledger
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.roles import CLOSE, HOLD, Policy
from verl_adaptive.stats.table import StatsTable

__all__ = ["Engine", "Listener", "PromptSource", "Requests", "StepResult"]

#: Passes over the data within one round after which a gate is taken to let nothing more through.
MAX_PASSES = 4


class PromptSource(Protocol):
    """verl's prompt stream, or a stand-in of the simulator's."""

    size: int

    def take(self, count: int) -> np.ndarray:
        """The next data-set positions in stream order, at least one; may be more than ``count`` (whole batches)."""
        ...


@dataclass
class Requests:
    """Rollouts to generate together; arrays of shape ``(k,)``.

    Attributes:
        ticket: the group; a ticket seen before is a top-up of that group.
        index: the prompt's position in the data set.
        row: the prompt's row in the table.
        n: rollouts.
        stage: 0 for first rollouts, j for the j-th top-up.
    """

    ticket: np.ndarray
    index: np.ndarray
    row: np.ndarray
    n: np.ndarray
    stage: np.ndarray

    def __len__(self) -> int:
        return len(self.ticket)

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
    def join(cls, parts: Sequence[Requests]) -> Requests:
        """The requests of all parts, in the order given."""
        return cls(*(np.concatenate([getattr(r, f.name) for r in parts]) for f in fields(cls)))

    def select(self, which: np.ndarray) -> Requests:
        """Those requests only; ``which`` is bool ``(k,)`` or positions."""
        return Requests(*(getattr(self, f.name)[which] for f in fields(self)))


@dataclass
class StepResult:
    """What became of a step's groups.

    Attributes:
        groups: every group closed in the step, in ticket order.
        outcome: per group, ``trained``, ``surplus``, ``failed`` or the filter's reason.
        trains: bool ``(R,)``: rollouts whose rows go to the optimizer.
        ghost: bool ``(R,)``: rollouts of trained groups left out because their advantage is exactly zero; they stay in
            every loss denominator.
        ledger: the step's account.
        partial: the batch is short of ``adaptive``'s B groups.
        note: a warning for the log, or an empty string.
    """

    groups: Groups
    outcome: np.ndarray
    trains: np.ndarray
    ghost: np.ndarray
    ledger: Ledger
    partial: bool
    note: str
    rounds: int

    @property
    def trained(self) -> np.ndarray:
        """bool ``(G,)``: groups in the training batch."""
        return self.outcome == "trained"


class Listener(Protocol):
    """Is told everything that decisions depend on, in order; :class:`verl_adaptive.record.Tape` writes it down."""

    def begun(self, step: int) -> None:
        """A step begins."""

    def asked(self, requests: Requests | None) -> None:
        """These requests followed."""

    def received(self, results: Groups) -> None:
        """These results came back, together."""

    def revived(self) -> None:
        """An asynchronous step drew once more."""

    def took(self, count: int, result: StepResult) -> None:
        """An asynchronous trainer took a batch."""

    def finished(self, result: StepResult) -> None:
        """The step is over."""


class Engine:
    """Runs a policy.

    Args:
        policy: the four roles, not bound yet.
        table: the statistics; already filled when the run is warm-started.
        config: the ``adaptive`` group.
        facts: what the run is.
        row_of: int64 ``(D,)``, the table row of every data-set position.
        source: the prompt stream (unused by pool samplers).
        skip_zero: leave rollouts of exactly zero advantage out of training.

    Attributes:
        asynchronous: whether results may come back one by one (:mod:`verl_adaptive.streaming`).
        tape: is told what happens, or None.
    """

    asynchronous = False

    def __init__(
        self,
        policy: Policy,
        table: StatsTable,
        config: AdaptiveConfig,
        facts: RunFacts,
        row_of: np.ndarray,
        source: PromptSource,
        *,
        skip_zero: bool = True,
    ) -> None:
        self.policy, self.table, self.config, self.facts = policy, table, config, facts
        self.row_of, self.source, self.skip_zero = np.asarray(row_of, dtype=np.int64), source, skip_zero
        self.pool, first = np.unique(self.row_of, return_index=True)
        order = np.argsort(first)  # the pool in data-set order, so that ties break the same way everywhere
        self.pool, self._pool_index = self.pool[order], first[order]
        self._by_row = np.argsort(self.pool)
        self.total = Ledger()
        self.held = Groups.empty()
        self.held_since = np.zeros(0, dtype=np.int64)
        self._gone = Groups.empty()  # open when the run was interrupted, of prompts that have left the data set since
        self._ticket = 0
        self._position = 0
        self._queue = np.zeros(0, dtype=np.int64)  # admitted, not rolled out yet: data-set positions
        self.skipped = 0  # prompts the gate turned away, this step
        self.tape: Listener | None = None
        policy.bind(table, facts)

    # -- a step ---------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Requests | None:
        """Start a step; the first round's requests."""
        self._open_step(step)
        self._open = Groups.empty()
        self._outstanding: Requests | None = None
        if self.tape is not None:
            self.tape.begun(step)
        requests = self._next(Requests.none())
        if self.tape is not None:
            self.tape.asked(requests)
        return requests

    def _open_step(self, step: int) -> None:
        """A fresh account and a fresh ceiling."""
        self.progress = Progress(
            step=step,
            batch=self.facts.batch,
            draw=Draw(self.facts.seed, step),
            epoch=self._epoch(),
            window=self._window(step),
        )
        caps = [
            c for c in (self.policy.allocator.cap(self.progress), self.config.max_rollouts_per_step) if c is not None
        ]
        self.progress.cap = min(caps) if caps else None
        self.ledger = Ledger()
        self._level_held()
        self._closed: list[tuple[Groups, np.ndarray, np.ndarray]] = []  # groups, outcome, rollouts that train
        self._why_ended = ""
        self.skipped = 0
        gone, self._gone = self._gone, Groups.empty()
        if len(gone):
            self._close(gone, "gone")
            self.policy.observe(gone, self.progress)
            self._level_held()

    def receive(self, results: Groups) -> Requests | None:
        """Take a round's results; the next round's requests, or None when the step's sampling is over.

        Args:
            results: one group per request, same tickets; a group with no rollouts and ``failed`` set is one that
                never came back.

        Raises:
            AdaptiveError: the results are not those of the requests.
        """
        asked = self._outstanding
        if asked is None or not np.array_equal(np.sort(results.ticket), np.sort(asked.ticket)):
            raise AdaptiveError("results do not match the requests of this round")
        if self.tape is not None:
            self.tape.received(results)
        groups = self._join_open(results)
        progress = self.progress
        progress.round += 1
        last = progress.round >= self.config.max_rounds
        if last:
            self._why_ended = f"adaptive.max_rounds={self.config.max_rounds} was reached"
        topups = self._judge(groups, allocate=not last)
        progress.open = len(topups)
        requests = self._next(topups)
        if self.tape is not None:
            self.tape.asked(requests)
        return requests

    def _join_open(self, results: Groups) -> Groups:
        """Count what came back and join it with the open groups it belongs to; in ticket order."""
        results = results.select(np.argsort(results.ticket, kind="stable"))
        self.ledger.rollouts.generated += results.rollouts
        self.ledger.tokens.generated += int(results.tokens.sum())
        waiting = np.isin(self._open.ticket, results.ticket)
        known = np.isin(results.ticket, self._open.ticket)
        joined = self._open.select(waiting).merge(results.select(known))
        self._open = self._open.select(~waiting)
        groups = Groups.concat([joined, results.select(~known)])
        return groups.select(np.argsort(groups.ticket, kind="stable"))

    def _judge(self, groups: Groups, *, allocate: bool) -> Requests:
        """Close, hold or leave open groups whose rollouts are back; the top-ups of the open ones."""
        progress = self.progress
        self._close(groups.select(groups.failed), "failed")
        alive = groups.select(~groups.failed)
        more = np.zeros(len(alive), dtype=np.int64)
        if allocate:
            more = np.asarray(self.policy.allocator.review(alive, progress), dtype=np.int64)
        more = _fit(more, progress.room)
        if (more == HOLD).any():
            self._hold(alive.select(more == HOLD))
        self._review(alive.select(more == CLOSE))
        again = alive.select(more > 0)
        self._open = Groups.concat([self._open, again])
        self._open = self._open.select(np.argsort(self._open.ticket, kind="stable"))
        stage = again.reduce(np.maximum, again.stage).astype(np.int64) + 1
        return Requests(again.ticket, again.index, again.row, more[more > 0], stage)

    def finish(self) -> StepResult:
        """Settle the batch once :meth:`begin` or :meth:`receive` returned None.

        Raises:
            Exhausted: the batch is short and ``adaptive.on_exhausted=raise``, or nothing at all came back.
        """
        progress, config = self.progress, self.config
        groups = Groups.concat([g for g, _, _ in self._closed])
        outcome = np.concatenate([o for _, o, _ in self._closed] or [np.zeros(0, dtype=object)])
        trains = np.concatenate([t for _, _, t in self._closed] or [np.zeros(0, dtype=bool)])
        order = np.argsort(groups.ticket, kind="stable")
        take = _rollout_order(groups, order)
        groups, outcome, trains = groups.select(order), outcome[order], trains[take]

        kept = np.flatnonzero(outcome == "trained")
        short = config.refill and len(kept) < progress.batch
        note = self._shortage(len(kept), groups) if short else ""
        if short and config.on_exhausted == "raise":
            raise Exhausted(note)
        if (short and config.on_exhausted == "relax") or len(kept) == 0:
            spare = np.flatnonzero(~np.isin(outcome.astype(str), ["trained", "failed", "gone"]))
            if len(kept) == 0 and len(spare) == 0:
                raise Exhausted(note or self._shortage(0, groups))
            flat = groups.degenerate(self.facts.tolerance)[spare]
            fill = spare[np.argsort(flat, kind="stable")][: progress.batch - len(kept)]
            outcome[fill] = "trained"
            trains |= groups.rollout_mask(np.isin(np.arange(len(groups)), fill))
            kept = np.flatnonzero(outcome == "trained")
            note = note or "no group passed the filter: the step trains on groups it dropped"
        # A pool sampler without refill means all that it picked; a stream sampler may have over-asked.
        whole = config.refill or self.policy.sampler.kind == "stream"
        if len(kept) > progress.batch and whole and config.surplus == "discard":
            outcome[kept[progress.batch :]] = "surplus"
        member = groups.rollout_mask(outcome == "trained")
        trains &= member
        ghost = np.zeros_like(trains)
        if self.skip_zero:
            ghost = self._ghosts(groups, outcome == "trained", trains)
        result = StepResult(
            groups, outcome, trains & ~ghost, ghost, self.ledger, len(kept) < progress.batch, note, progress.round
        )
        self._end_step(result)
        return result

    def _end_step(self, result: StepResult) -> None:
        self._account(result)
        self.policy.end_step(self.progress)
        if self.tape is not None:
            self.tape.finished(result)

    @property
    def finished(self) -> bool:
        """No further step is wanted: the sampler is done, or ``adaptive.total_rollouts`` is spent."""
        spent = self.config.total_rollouts is not None and self.total.rollouts.generated >= self.config.total_rollouts
        return spent or self.policy.sampler.finished

    # -- rounds ---------------------------------------------------------------------------------------------

    def _next(self, topups: Requests) -> Requests | None:
        progress, p = self.progress, self.policy
        progress.planned += topups.rollouts
        parts = [topups]
        may_sample = progress.round < self.config.max_rounds and (progress.round == 0 or self.config.refill)
        if may_sample and len(self.held):
            parts.append(self._recall())
        if may_sample and progress.need > progress.open:
            wanted = p.allocator.prompts(p.sampler.round_size(progress), progress)
            if wanted > 0:
                parts.append(self._new(wanted))
        requests = Requests.join(parts)
        if len(requests) == 0:
            self._outstanding = None
            return None
        self.ledger.rollouts.planned += requests.rollouts
        self._outstanding = requests
        return requests

    def _new(self, wanted: int) -> Requests:
        """First rollouts of up to ``wanted`` prompts, as many as the cap has room for."""
        progress, p = self.progress, self.policy
        planned = None
        if p.sampler.kind == "pool":
            pick = p.sampler.pick(self._pickable(), wanted, progress)
            rows, planned = pick.rows, pick.n
            index = self._positions(rows)
        else:
            self._admit(wanted)
            index = self._queue[:wanted]
            rows = self.row_of[index]
        n = np.asarray(p.allocator.first(rows, planned, progress), dtype=np.int64)
        fits = int(np.searchsorted(np.cumsum(n), progress.room, side="right"))
        if fits < len(rows):
            self._why_ended = f"the step's cap of {progress.cap} rollouts was reached"
        index, rows, n = index[:fits], rows[:fits], n[:fits]
        if p.sampler.kind == "stream":
            self._queue = self._queue[fits:]
        ticket = self._ticket + np.arange(len(rows), dtype=np.int64)
        self._ticket += len(rows)
        progress.planned += int(n.sum())
        return Requests(ticket, index, rows, n, np.zeros(len(rows), dtype=np.int64))

    def _window(self, step: int) -> int | None:
        """Groups wanted in flight or ready; None: the engine works in rounds."""
        return None

    def _pickable(self) -> np.ndarray:
        """The table rows a pool sampler may choose from."""
        return self.pool

    def _free(self, index: np.ndarray) -> np.ndarray:
        """bool: no open or held group of that prompt; one group of a prompt at a time."""
        if not (len(self.held) or len(self._open)):
            return np.ones(len(index), dtype=bool)
        return ~np.isin(self.row_of[index], np.concatenate([self.held.row, self._open.row]))

    def _idle(self) -> bool:
        """Nothing has come back in this step and nothing will: without a further prompt it would train on nothing."""
        return not self._closed

    def _positions(self, rows: np.ndarray) -> np.ndarray:
        """First data-set position of each row; -1 for a row that is not in the data set."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(self.pool):
            return np.full(len(rows), -1, dtype=np.int64)
        at = self._by_row[np.minimum(np.searchsorted(self.pool, rows, sorter=self._by_row), len(self.pool) - 1)]
        return np.where(self.pool[at] == rows, self._pool_index[at], -1)

    def _found(self, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Where saved prompts are now: where they were, or in a data set reordered since, where their row is first."""
        rows, index = np.asarray(rows, dtype=np.int64), np.asarray(index, dtype=np.int64)
        inside = (index >= 0) & (index < len(self.row_of))
        there = inside & (self.row_of[np.where(inside, index, 0)] == rows)
        return np.where(there, index, self._positions(rows))

    def _admit(self, wanted: int) -> None:
        """Pull the stream through the gate until ``wanted`` prompts wait in the queue."""
        pulled = 0
        while len(self._queue) < wanted:
            if pulled >= MAX_PASSES * self.source.size:
                self._why_ended = f"the sampler let nothing more through in {MAX_PASSES} passes over the data"
                if self.config.on_exhausted == "raise" or len(self._queue) or not self._idle():
                    return
                # Nothing at all to train on: rather than end the run by surprise, one round goes ungated.
                self._queue = np.asarray(self.source.take(wanted), dtype=np.int64)
                self._position += len(self._queue)
                return
            index = np.asarray(self.source.take(wanted - len(self._queue)), dtype=np.int64)
            position = self._position + np.arange(len(index), dtype=np.int64)
            self._position += len(index)
            pulled += len(index)
            self.progress.epoch = self._epoch()
            passed = self.policy.sampler.admit(self.row_of[index], position, self.progress)
            passed = passed & self._free(index)
            self.skipped += int((~passed).sum())
            self._queue = np.concatenate([self._queue, index[passed]])

    def _epoch(self) -> float:
        if self.policy.sampler.kind == "pool":
            return self.total.rollouts.generated / max(1, self.facts.n * len(self.pool))
        return self._position / self.source.size

    # -- held groups (pipelined allocators) ------------------------------------------------------------------

    def _hold(self, groups: Groups) -> None:
        self.held = Groups.concat([self.held, groups])
        self.held_since = np.concatenate([self.held_since, np.full(len(groups), self.progress.step, dtype=np.int64)])
        self._level_held()

    def _recall(self) -> Requests:
        """Ask the allocator about held groups: top up now, give up, or keep."""
        more = np.asarray(self.policy.allocator.recall(self.held, self.held_since, self.progress), dtype=np.int64)
        more = _fit(more, self.progress.room, otherwise=HOLD)
        back, drop = self.held.select(more > 0), self.held.select(more == CLOSE)
        back.lag = np.maximum(back.lag, self.progress.step - self.held_since[more > 0]).astype(np.int32)
        n = more[more > 0]
        self.held, self.held_since = self.held.select(more == HOLD), self.held_since[more == HOLD]
        self._level_held()
        self._close(drop, "expired")
        if len(drop):
            self.policy.observe(drop, self.progress)
        self._open = Groups.concat([self._open, back])
        self._open = self._open.select(np.argsort(self._open.ticket, kind="stable"))
        self.progress.planned += int(n.sum())
        stage = back.reduce(np.maximum, back.stage).astype(np.int64) + 1
        return Requests(back.ticket, back.index, back.row, n, stage)

    def _level_held(self) -> None:
        here = Groups.concat([self.held, self._gone])
        self.ledger.rollouts.held, self.ledger.tokens.held = here.rollouts, int(here.tokens.sum())

    # -- closing --------------------------------------------------------------------------------------------

    def _review(self, groups: Groups) -> None:
        """Close groups whose rollouts are complete: observe them, then keep or drop."""
        progress = self.progress
        progress.last_finished = len(groups)
        progress.last_degenerate = int(groups.degenerate(self.facts.tolerance).sum())
        if not len(groups):
            return
        verdict = self.policy.filter.decide(groups, progress)
        reasons = np.array([*self.policy.filter.reasons, "dropped"], dtype=object)
        outcome = np.where(verdict.keep, "trained", reasons[np.clip(verdict.reason, 0, len(reasons) - 1)])
        keep = verdict.keep & self.policy.allocator.complete(groups)
        outcome[verdict.keep & ~keep] = "incomplete"
        trains = groups.rollout_mask(keep)
        if verdict.rollouts is not None:
            trains &= verdict.rollouts
        progress.kept += int(keep.sum())
        self._close(groups, outcome.astype(object), trains)
        self.policy.observe(groups, progress)

    def _close(self, groups: Groups, outcome: str | np.ndarray, trains: np.ndarray | None = None) -> None:
        if not len(groups):
            return
        if isinstance(outcome, str):
            outcome = np.full(len(groups), outcome, dtype=object)
        trains = np.zeros(groups.rollouts, dtype=bool) if trains is None else trains
        self._closed.append((groups, outcome, trains))
        self.table.observe(groups, self.progress.step, tolerance=self.facts.tolerance)

    def _ghosts(self, groups: Groups, trained: np.ndarray, trains: np.ndarray) -> np.ndarray:
        ghost = self.policy.advantage.zero(groups, trains) & trains & groups.rollout_mask(trained)
        if trains.any() and not (trains & ~ghost).any():
            # Every row is a ghost: verl still needs one row to carry the (zero) gradient of the step.
            ghost[np.flatnonzero(trains)[np.argmin(groups.tokens[trains])]] = False
        return ghost

    def _account(self, result: StepResult) -> None:
        groups, ledger, tokens = result.groups, self.ledger, result.groups.tokens
        ledger.rollouts.trained, ledger.tokens.trained = int(result.trains.sum()), int(tokens[result.trains].sum())
        ledger.drop("zero_advantage", tokens[result.ghost])
        in_batch = groups.rollout_mask(result.trained)
        ledger.drop(self.policy.filter.rollout_reason, tokens[in_batch & ~result.trains & ~result.ghost])
        for reason in sorted(set(result.outcome.tolist()) - {"trained"}):
            lost = tokens[groups.rollout_mask(result.outcome == reason)]
            if reason == "surplus":
                ledger.rollouts.surplus, ledger.tokens.surplus = len(lost), int(lost.sum())
            else:
                ledger.drop(reason, lost)
        self.total.add(ledger)

    def _shortage(self, kept: int, groups: Groups) -> str:
        counts: dict[str, int] = {}
        for _, outcome, _ in self._closed:
            for name in outcome:
                counts[name] = counts.get(name, 0) + 1
        why = self._why_ended or "the sampler gave no further prompt"
        listed = ", ".join(f"{v} {k}" for k, v in sorted(counts.items())) or "none finished"
        return (
            f"step {self.progress.step}: {kept} of {self.progress.batch} groups after {self.progress.round} rounds and "
            f"{self.ledger.rollouts.generated} rollouts ({listed}): {why}. adaptive.on_exhausted="
            f"{self.config.on_exhausted}; adaptive.max_rounds, adaptive.max_rollouts_per_step and the filter set the limits"
        )

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State between steps; call it after :meth:`finish`."""
        return {
            "ticket": self._ticket,
            "position": self._position,
            "queue": self.row_of[self._queue],
            "queue_index": self._queue,
            "held": {name: np.asarray(value) for name, value in vars(self.held).items()},
            "held_since": self.held_since,
            "total": self.total.as_dict(),
            "policy": self.policy.state_dict(),
        }

    def _leave_behind(self, stream: Mapping[str, Any] | None) -> None:
        """What an asynchronous engine had in flight: not ours to go on with."""
        if stream is None:
            return
        flight = len(stream["flight"]["ticket"])
        unfinished = Groups.concat(
            [Groups(**{k: np.asarray(v) for k, v in stream[name].items()}) for name in ("open", "ready")]
        )
        if not flight and not len(unfinished):
            return
        if "mode" not in self.config.resume.allow:
            raise AdaptiveError(
                f"the checkpoint is an asynchronous trainer's, with {flight} prompts in flight and "
                f"{len(stream['ready']['row'])} groups ready to train. Go on with the same trainer.v1.trainer_mode, or "
                "leave them behind: adaptive.resume.allow=[mode]"
            )
        self._gone = Groups.concat([self._gone, unfinished.select(np.argsort(unfinished.ticket, kind="stable"))])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of :meth:`state_dict`; the table is restored separately.

        Raises:
            AdaptiveError: an asynchronous run's state, with groups that this engine could not go on with.
        """
        self._ticket, self._position = int(state["ticket"]), int(state["position"])
        queue = self._found(state["queue"], state["queue_index"])
        self._queue = queue[queue >= 0]
        self.held = Groups(**{name: np.asarray(value) for name, value in state["held"].items()})
        self.held_since = np.asarray(state["held_since"], dtype=np.int64)
        self.held.index = self._found(self.held.row, self.held.index)
        self._gone = self.held.select(self.held.index < 0)  # a prompt that has left the data set cannot be topped up
        self.held_since = self.held_since[self.held.index >= 0]
        self.held = self.held.select(self.held.index >= 0)
        self._leave_behind(state.get("stream"))
        self.total = Ledger.from_dict(state["total"])
        self.policy.load_state_dict(state["policy"])


def _fit(more: np.ndarray, room: int, otherwise: int = CLOSE) -> np.ndarray:
    """Cut top-ups that the step's cap has no room for, last ones first."""
    positive = np.maximum(more, 0)
    over = (np.cumsum(positive) > room) & (positive > 0)
    return np.where(over, otherwise, more) if over.any() else more


def _rollout_order(groups: Groups, order: np.ndarray) -> np.ndarray:
    sizes = groups.n[order]
    start = np.repeat(groups.offsets[:-1][order], sizes)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return start + within
