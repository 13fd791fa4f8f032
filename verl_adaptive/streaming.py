"""The engine of asynchronous trainers: no rounds, a window of groups that is kept full.

Generation never stops, so nothing may wait for a round to be whole. The engine keeps a *window* of groups in flight or
ready: verl's warm-up batches plus the batch of the step. Whatever has come back is reviewed together, in the order of
submission; a dropped group makes room for a new prompt at once, a kept one is *ready* until a step takes it::

    requests = engine.begin(step)
    while not engine.can_take(engine.count) and not engine.starved:
        requests = engine.receive(some_results)          # any part of what is in flight
    result = engine.take(engine.count)                   # once for each mini-step of the trainer
    done = engine.finish()

Decisions depend on rewards and on what had come back at each look, in other words on the recorded order of arrivals, and
on nothing else; :mod:`verl_adaptive.record` writes that order down and replays it.

What differs from :class:`~verl_adaptive.engine.Engine`:

* groups in flight and ready groups outlive the step, and the checkpoint; a group is observed when it is reviewed, and
  counted as trained or dropped in the step in which it leaves;
* a step takes the oldest ready groups (by submission, as verl does), never the first to finish among those in flight;
* ``max_off_policy_threshold`` is verl's: with the strategy ``drop`` a ready group older than that is dropped as
  ``stale``, and one in flight no longer keeps a place in the window; with ``wait`` a step is not taken while a group in
  flight has reached that age;
* round sizes (``sampler.round``, Pilot-Commit's ``factor``) mean nothing here: the window says how many prompts to ask
  for. ``max_rounds`` bounds the prompts drawn in one step, at ``max_rounds`` batches;
* towards the end of the run the window closes: nothing is generated that no step could train on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.errors import AdaptiveError, Exhausted
from verl_adaptive.groups import Groups
from verl_adaptive.ledger import Ledger
from verl_adaptive.roles import HOLD

__all__ = ["StreamEngine", "StreamFacts"]


@dataclass(frozen=True)
class StreamFacts:
    """How an asynchronous trainer takes its batches.

    Attributes:
        warmup: groups in flight or ready between steps (``num_warmup_batches`` · batch).
        parts: mini-steps of a step (``parameter_sync_step``), each taking its share of the batch.
        threshold: ``max_off_policy_threshold``: weight versions a group may span, or None.
        strategy: ``max_off_policy_strategy``.
    """

    warmup: int = 0
    parts: int = 1
    threshold: int | None = None
    strategy: Literal["drop", "wait"] = "drop"


class StreamEngine(Engine):
    """Runs a policy on results that come back one by one.

    Args:
        stream: how the trainer takes its batches.
        args, kwargs: as :class:`~verl_adaptive.engine.Engine`.
    """

    asynchronous = True

    def __init__(self, *args: Any, stream: StreamFacts | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stream = stream or StreamFacts()
        self.flight = Requests.none()  # asked for and not back, in ticket order
        self.ready = Groups.empty()  # reviewed and kept, in ticket order
        self._ready_trains = np.zeros(0, dtype=bool)
        self._born: dict[int, int] = {}  # ticket → step of its first rollouts; of every group in flight or ready
        self._open = Groups.empty()  # waiting for a top-up's result
        self._parts_taken = 0

    # -- a step ---------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Requests | None:
        """Start a step: open the window and fill it.

        Returns:
            New prompts to roll out, or None.
        """
        self._parts_taken = 0
        self._open_step(step)
        self._drawn = 0
        self._taken: list[StepResult] = []
        self._expire()
        if self.tape is not None:
            self.tape.begun(step)
        requests = self._fill(Requests.none(), refill=True)
        if self.tape is not None:
            self.tape.asked(requests)
        return requests

    def receive(self, results: Groups) -> Requests | None:
        """Take what has come back; top-ups and new prompts to roll out, or None.

        Args:
            results: one group per request that is back, any part of those in flight.

        Raises:
            AdaptiveError: a result was not asked for.
        """
        back = np.isin(self.flight.ticket, results.ticket)
        if len(np.unique(results.ticket)) != len(results) or back.sum() != len(results):
            raise AdaptiveError("results do not match the requests in flight")
        if self.tape is not None:
            self.tape.received(results)
        self.flight = self.flight.select(~back)
        self.progress.round += 1
        groups = self._join_open(results)
        self._measure()
        topups = self._judge(groups, allocate=True)
        self._expire()
        requests = self._fill(topups, refill=self.config.refill)
        if self.tape is not None:
            self.tape.asked(requests)
        return requests

    def revive(self) -> Requests | None:
        """Draw once more although the step does not refill: verl's mini-step cannot do without a batch.

        Returns:
            Requests if nothing is in flight and nothing ready; None otherwise, or where nothing more can be drawn.
        """
        if len(self.flight) or len(self.ready):
            return None
        if self.tape is not None:
            self.tape.revived()
        requests = self._fill(Requests.none(), refill=True)
        if self.tape is not None:
            self.tape.asked(requests)
        return requests

    def reissued(self, tickets: np.ndarray, step: int) -> None:
        """After a resume: the first rollouts of these groups in flight are generated anew, from ``step`` on."""
        self._born.update(dict.fromkeys(np.asarray(tickets).tolist(), step))

    @property
    def count(self) -> int:
        """Groups that the next mini-step takes."""
        share = self.facts.batch // self.stream.parts
        even = math.ceil(len(self.ready) / max(1, self.stream.parts - self._parts_taken))
        if self.policy.sampler.plans_steps:  # all that was planned for the step
            return even
        return min(share, even) if self.starved else share  # what little there is serves every mini-step

    def can_take(self, count: int) -> bool:
        """Whether ``count`` groups are ready and none in flight must be waited for."""
        if self.policy.sampler.plans_steps:
            return len(self.flight) == 0
        return len(self.ready) >= count and not self._must_wait()

    @property
    def starved(self) -> bool:
        """Nothing is in flight: waiting would be for ever."""
        return len(self.flight) == 0

    def take(self, count: int) -> StepResult:
        """The batch of a mini-step: the oldest ready groups; fewer than ``count`` if the engine is starved.

        Raises:
            Exhausted: the batch is short and ``adaptive.on_exhausted=raise``, or there is nothing at all.
            AdaptiveError: called while groups in flight must be waited for.
        """
        if not (self.can_take(count) or self.starved):
            raise AdaptiveError(f"{len(self.ready)} groups are ready, {count} are to be taken: wait for more")
        note = ""
        short = len(self.ready) < max(count, self.facts.batch // self.stream.parts)
        short = (short and not self.policy.sampler.plans_steps) or len(self.ready) == 0
        if short:
            note = self._shortage(len(self.ready), self.ready) if self.config.refill or not len(self.ready) else ""
            if self.config.on_exhausted == "raise" and self.config.refill:
                raise Exhausted(note)
            if self.config.on_exhausted == "relax" or not len(self.ready):
                count = max(count, self.facts.batch // self.stream.parts)
                self._bring_back(count - len(self.ready))
            if not len(self.ready):
                raise Exhausted(note)
        first = np.arange(len(self.ready)) < count
        groups, trains = self.ready.select(first), self._ready_trains[self.ready.rollout_mask(first)]
        self._keep_ready(~first)
        for ticket in groups.ticket.tolist():
            self._born.pop(ticket, None)
        ghost = np.zeros_like(trains)
        if self.skip_zero:
            ghost = self._ghosts(groups, np.ones(len(groups), dtype=bool), trains)
        outcome = np.full(len(groups), "trained", dtype=object)
        result = StepResult(groups, outcome, trains & ~ghost, ghost, Ledger(), short, note, self.progress.round)
        self._taken.append(result)
        self._parts_taken += 1
        self._measure()
        if self.tape is not None:
            self.tape.took(count, result)
        return result

    def finish(self) -> StepResult:
        """The account of the step: all groups that left the window in it, trained or dropped."""
        parts = [(r.groups, r.outcome, r.trains, r.ghost) for r in self._taken]
        parts += [(g, o, np.zeros_like(t), np.zeros_like(t)) for g, o, t in self._closed]
        groups = Groups.concat([g for g, *_ in parts])
        sized = [p for p in parts if len(p[0])]
        outcome, trains, ghost = (
            np.concatenate([p[i] for p in sized] or [np.zeros(0, dtype=kind)])
            for i, kind in ((1, object), (2, bool), (3, bool))
        )
        order = np.argsort(groups.ticket, kind="stable")
        position = np.empty(len(groups), dtype=np.int64)
        position[order] = np.arange(len(groups))
        rollouts = np.argsort(position[groups.group_of], kind="stable")
        groups = groups.select(order)
        self._level_held()
        notes = [r.note for r in self._taken if r.note]
        result = StepResult(
            groups,
            outcome[order],
            trains[rollouts],
            ghost[rollouts],
            self.ledger,
            any(r.partial for r in self._taken),
            notes[0] if notes else "",
            self.progress.round,
        )
        self._end_step(result)
        return result

    # -- the window -----------------------------------------------------------------------------------------

    def _window(self, step: int) -> int:
        batch = self.facts.batch
        share = batch - min(batch, self._parts_taken * (batch // self.stream.parts))
        to_the_end = max(0, self.facts.steps - step) * batch
        return share + min(self.stream.warmup, to_the_end)

    def _measure(self) -> None:
        """Tell the roles how full the window is."""
        self.progress.window = self._window(self.progress.step)
        self.progress.kept, self.progress.open = len(self.ready), len(self.flight)

    def _fill(self, topups: Requests, *, refill: bool) -> Requests | None:
        self.progress.planned += topups.rollouts
        self.flight = Requests.join([self.flight, topups])
        self._measure()
        parts = [topups]
        if self.policy.sampler.plans_steps:
            wanted = self.policy.sampler.round_size(self.progress) if refill and self._drawn == 0 else 0
        else:
            wanted = self._window(self.progress.step) - len(self.ready) - self._hopeful() if refill else 0
        most = self.config.max_rounds * (self.facts.batch + self.stream.warmup)
        if wanted > 0 and self._drawn >= most:
            self._why_ended = f"adaptive.max_rounds={self.config.max_rounds} batches of prompts were drawn"
        elif wanted > 0:
            fresh = self._new(wanted)
            self._drawn += len(fresh)
            self._born.update(dict.fromkeys(fresh.ticket.tolist(), self.progress.step))
            self.flight = Requests.join([self.flight, fresh])
            parts.append(fresh)
        self.flight = self.flight.select(np.argsort(self.flight.ticket, kind="stable"))
        self._measure()
        requests = Requests.join(parts)
        self.ledger.rollouts.planned += requests.rollouts
        return requests if len(requests) else None

    def _hopeful(self) -> int:
        """Groups in flight that could still train. One that is too old will be dropped when it comes: a reward function
        that hangs, say, must not keep a place for ever."""
        threshold = self.stream.threshold
        if threshold is None or self.stream.strategy != "drop":
            return len(self.flight)
        return sum(self.progress.step - self._born[t] + 1 <= threshold for t in self.flight.ticket.tolist())

    def _busy(self) -> np.ndarray:
        """Table rows of prompts in flight, ready, or admitted and not sent yet."""
        return np.concatenate([self.flight.row, self.ready.row, self.row_of[self._queue]])

    def _pickable(self) -> np.ndarray:
        busy = self._busy()
        # A sampler may tell pools apart by identity: the same object where nothing is left out.
        return self.pool[~np.isin(self.pool, busy)] if len(busy) else self.pool

    def _free(self, index: np.ndarray) -> np.ndarray:
        """bool: prompts that are not in flight, ready or waiting, each once."""
        rows = self.row_of[index]
        _, first = np.unique(rows, return_index=True)
        return np.isin(np.arange(len(rows)), first) & ~np.isin(rows, self._busy())

    def _idle(self) -> bool:
        return not (len(self.flight) or len(self.ready) or self._closed or self._taken)

    def _must_wait(self) -> bool:
        threshold = self.stream.threshold
        if threshold is None or self.stream.strategy != "wait":
            return False
        return any(self.progress.step - self._born[t] + 1 >= threshold for t in self.flight.ticket.tolist())

    # -- groups that leave ----------------------------------------------------------------------------------

    def _hold(self, groups: Groups) -> None:
        raise AdaptiveError(f"an asynchronous trainer holds no groups back, yet {len(groups)} reviews said {HOLD}")

    def _level_held(self) -> None:
        """What was generated and has not left: rollouts of open and of ready groups."""
        here = Groups.concat([self._open, self.ready, self._gone])
        self.ledger.rollouts.held, self.ledger.tokens.held = here.rollouts, int(here.tokens.sum())

    def _close(self, groups: Groups, outcome: str | np.ndarray, trains: np.ndarray | None = None) -> None:
        """Observe reviewed groups; the kept ones become ready, the others leave."""
        if not len(groups):
            return
        if isinstance(outcome, str):
            outcome = np.full(len(groups), outcome, dtype=object)
        trains = np.zeros(groups.rollouts, dtype=bool) if trains is None else trains
        self.table.observe(groups, self.progress.step, tolerance=self.facts.tolerance)
        keep = outcome == "trained"
        if keep.any():
            both = Groups.concat([self.ready, groups.select(keep)])
            mask = np.concatenate([self._ready_trains, trains[groups.rollout_mask(keep)]])
            self.ready, self._ready_trains = _sorted(both, mask)
        if (~keep).any():
            self._leave(groups.select(~keep), trains[groups.rollout_mask(~keep)], outcome[~keep])

    def _leave(self, groups: Groups, trains: np.ndarray, outcome: str | np.ndarray) -> None:
        if isinstance(outcome, str):
            outcome = np.full(len(groups), outcome, dtype=object)
        self._closed.append((groups, outcome, trains))
        for ticket in groups.ticket.tolist():
            self._born.pop(ticket, None)

    def _keep_ready(self, keep: np.ndarray) -> None:
        mask = self.ready.rollout_mask(keep)
        self.ready, self._ready_trains = self.ready.select(keep), self._ready_trains[mask]

    def _expire(self) -> None:
        """Drop ready groups that span more weight versions than verl's threshold allows."""
        threshold = self.stream.threshold
        if threshold is None or self.stream.strategy != "drop" or not len(self.ready):
            return
        born = np.array([self._born[t] for t in self.ready.ticket.tolist()], dtype=np.int64)
        old = self.progress.step - born + 1 > threshold
        if old.any():
            stale, mask = self.ready.select(old), self._ready_trains[self.ready.rollout_mask(old)]
            self._keep_ready(~old)
            self._leave(stale, mask, "stale")

    def _bring_back(self, count: int) -> None:
        """Train on groups that this step dropped, those with variance first, oldest first."""
        spare = Groups.concat([g.select(_usable(o)) for g, o, _ in self._closed])
        if not len(spare):
            return
        flat = spare.degenerate(self.facts.tolerance)
        chosen = spare.ticket[np.lexsort((spare.ticket, flat))[:count]]
        back: list[Groups] = []
        left = []
        for groups, outcome, trains in self._closed:
            mine = np.isin(groups.ticket, chosen) & _usable(outcome)
            back.append(groups.select(mine))
            stay = ~mine
            left.append((groups.select(stay), outcome[stay], trains[groups.rollout_mask(stay)]))
        self._closed = [entry for entry in left if len(entry[0])]
        returned = Groups.concat(back)
        self._born.update(dict.fromkeys(returned.ticket.tolist(), self.progress.step))
        mask = np.concatenate([self._ready_trains, np.ones(returned.rollouts, dtype=bool)])
        self.ready, self._ready_trains = _sorted(Groups.concat([self.ready, returned]), mask)

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State between steps, groups in flight and ready groups included; call it after :meth:`finish`."""

        def plain(data: Any) -> dict[str, np.ndarray]:
            return {name: np.asarray(value) for name, value in vars(data).items()}

        tickets = np.array(sorted(self._born), dtype=np.int64)
        return {
            **super().state_dict(),
            "stream": {
                "flight": plain(self.flight),
                "open": plain(self._open),
                "ready": plain(self.ready),
                "ready_trains": self._ready_trains,
                "born_ticket": tickets,
                "born_step": np.array([self._born[int(t)] for t in tickets], dtype=np.int64),
            },
        }

    def _leave_behind(self, stream: Mapping[str, Any] | None) -> None:
        if stream is not None:
            self._take_up(stream)
        elif len(self.held):
            raise AdaptiveError(
                f"the checkpoint holds {len(self.held)} groups back for the next step, which an asynchronous trainer "
                "cannot do; go on with trainer.v1.trainer_mode=sync, as the run was started"
            )

    def _take_up(self, stream: Mapping[str, Any]) -> None:
        """Groups in flight and ready, as they were."""

        def arrays(data: Mapping[str, Any]) -> dict[str, np.ndarray]:
            return {name: np.asarray(value) for name, value in data.items()}

        self.flight = Requests(**arrays(stream["flight"]))
        self._open, self.ready = Groups(**arrays(stream["open"])), Groups(**arrays(stream["ready"]))
        self._ready_trains = np.asarray(stream["ready_trains"], dtype=bool)
        self._born = dict(
            zip(np.asarray(stream["born_ticket"]).tolist(), np.asarray(stream["born_step"]).tolist(), strict=True)
        )
        for groups in (self.flight, self._open, self.ready):
            groups.index = self._found(groups.row, groups.index)
        # As with held groups: a prompt that has left the data set cannot be topped up or sent again.
        lost = self.flight.index < 0
        if lost.any():
            tickets = self.flight.ticket[lost]
            self.flight = self.flight.select(~lost)
            self._gone = self._open.select(np.isin(self._open.ticket, tickets))
            self._open = self._open.select(~np.isin(self._open.ticket, tickets))
            for ticket in tickets.tolist():
                self._born.pop(ticket, None)


def _usable(outcome: np.ndarray) -> np.ndarray:
    """bool: dropped groups that could be trained on after all."""
    return ~np.isin(outcome.astype(str), ["failed", "gone"])


def _sorted(groups: Groups, mask: np.ndarray) -> tuple[Groups, np.ndarray]:
    """Groups in ticket order, with a mask over their rollouts."""
    order = np.argsort(groups.ticket, kind="stable")
    position = np.empty(len(groups), dtype=np.int64)
    position[order] = np.arange(len(groups))
    return groups.select(order), mask[np.argsort(position[groups.group_of], kind="stable")]
