"""The engine of asynchronous trainers: a window of groups that is kept full.

Generation never stops. The engine keeps a *window* of groups in flight or ready: verl's warm-up batches plus the batch of the
step. Whatever has come back is reviewed together, in the order of submission; a dropped group makes room for a new prompt at
once, a kept one is *ready* until a step takes it::

    send(engine.begin(step))
    while not engine.decided:
        send(engine.receive(some_results))               # any part of what is in flight
    result = engine.take()                               # once for each mini-step of the trainer
    done = engine.finish()

Decisions depend on rewards and on what had come back at each look, in other words on the recorded order of arrivals, and
on nothing else; :mod:`verl_adaptive.record` writes that order down and replays it.

What differs from the engine of the ``sync`` trainer:

* groups in flight and ready groups outlive the step, and the checkpoint; a group is observed when it is reviewed, and
  counted as trained or dropped in the step in which it leaves;
* a step takes the oldest ready groups (by submission, as verl does), never the first to finish among those in flight;
* ``max_off_policy_threshold`` is verl's: with the strategy ``drop`` a ready group older than that is dropped as
  ``stale``, and one in flight no longer keeps a place in the window; with ``wait`` a step is not taken while a group in
  flight has reached that age;
* what a step first asks for (``sampler.round``, Pilot-Commit's ``factor``) means nothing here: the window says how many
  prompts to ask for, and ``max_rounds`` bounds the prompts drawn in one step, at ``max_rounds`` windows;
* a pool of top-ups is a running account, shared out in the order of submission among what is back;
* towards the end of the run the window closes: nothing is generated that no step could train on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from verl_adaptive.engine.base import Engine
from verl_adaptive.engine.group_tracker import arrays_of, fit, groups_of
from verl_adaptive.engine.prompt_source import BUSY, CandidateQueue
from verl_adaptive.engine.steps import Closed, Requests, StepResult
from verl_adaptive.errors import AdaptiveError, Exhausted
from verl_adaptive.groups import Groups
from verl_adaptive.ledger import Ledger
from verl_adaptive.roles import CLOSE, HOLD, answers


@dataclass(frozen=True)
class AsyncFacts:
    """How an asynchronous trainer takes its batches.

    Attributes:
        warmup: groups in flight or ready between steps (``num_warmup_batches`` · batch).
        mini_steps: of a step (``parameter_sync_step``), each taking its share of the batch.
        threshold: ``max_off_policy_threshold``: weight versions a group may span, or None.
        strategy: ``max_off_policy_strategy``.
    """

    warmup: int = 0
    mini_steps: int = 1
    threshold: int | None = None
    strategy: Literal["drop", "wait"] = "drop"


class AsyncEngine(Engine):
    """Runs a policy on results that come back one by one.

    Args:
        async_facts: how the trainer takes its batches.
        args, kwargs: as :class:`~verl_adaptive.engine.base.Engine`.

    Attributes:
        ready: reviewed and kept groups that no step has taken yet, in submission order, with the rollouts that train.
    """

    def __init__(self, *args: Any, async_facts: AsyncFacts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.async_facts = async_facts
        self.ready = Closed.of(Groups.empty(), "trained")
        # submission → step of its first rollouts; of every group in flight or ready, and of those that left in the step
        self._born: dict[int, int] = {}
        # submission → what its prompt paid into the pool of top-ups; of the same groups
        self._paid: dict[int, int] = {}
        self._unspent = 0  # what that pool has left
        # Of the step: prompts drawn, batches of the mini-steps taken.
        self._drawn = 0
        self._taken: list[StepResult] = []
        self._taken_kept = 0  # groups that the step's mini-steps have taken and the filter had kept

    # -- a step ---------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Requests | None:
        self._taken = []
        self._open_step(step, window=self._window(step))
        # What waits for a top-up is a weight update older by the time it is reviewed.
        self.tracker.open = replace(self.tracker.open, lag=self.tracker.open.lag + 1)
        self._drawn = self._taken_kept = 0
        self._expire()
        self.listener.begun(step)
        requests = self._fill(Requests.none(), refill=True)
        self.listener.asked(requests)
        return requests

    def receive(self, results: Groups) -> Requests | None:
        groups = self._landed(results)
        self.progress.chunk += 1
        self._measure()
        topups = self._judge(groups)
        self._expire()
        requests = self._fill(topups, refill=self.config.refill)
        self.listener.asked(requests)
        return requests

    def revive(self) -> Requests | None:
        """Draw once more although the step does not refill: verl's mini-step cannot do without a batch.

        Returns:
            Requests if nothing is ready and nothing in flight that could be; None otherwise, or where nothing more can be
            drawn.
        """
        if not self.starved or len(self.ready):
            return None
        self.listener.revived()
        requests = self._fill(Requests.none(), refill=True)
        self.listener.asked(requests)
        return requests

    def reissued(self, submissions: np.ndarray, step: int) -> None:
        """After a resume: the first rollouts of these groups in flight are generated anew, from ``step`` on."""
        self._born.update(dict.fromkeys(np.asarray(submissions).tolist(), step))

    @property
    def count(self) -> int:
        """Groups that the next mini-step takes."""
        share = self.facts.batch // self.async_facts.mini_steps
        even = math.ceil(len(self.ready) / max(1, self.async_facts.mini_steps - len(self._taken)))
        if self.policy.sampler.plans_steps:  # all that was planned for the step
            return even
        return min(share, even) if self.starved else share  # what little there is serves every mini-step

    def can_take(self, count: int) -> bool:
        """Whether ``count`` groups are ready, one at least, and none in flight must be waited for; of a plan: all are back."""
        if self.policy.sampler.plans_steps:
            return len(self.flight) == 0
        return len(self.ready) >= max(1, count) and not self._must_wait()

    @property
    def decided(self) -> bool:
        """The next mini-step's groups are ready, or no more will be."""
        return self.can_take(self.count) or self.starved

    @property
    def starved(self) -> bool:
        """Nothing that could train is in flight: waiting would be for ever, or for groups that are too old."""
        return self._viable() == 0

    def take(self) -> StepResult:
        """The batch of a mini-step: the oldest ready groups, :attr:`count` of them.

        A mini-step after the first may be left with nothing: its batch is empty, and the step has trained on the others.

        Raises:
            Exhausted: the step is short and ``adaptive.on_exhausted=raise``, or there is nothing at all.
            AdaptiveError: called while groups in flight must be waited for.
        """
        count = self.count
        if not self.decided:
            raise AdaptiveError(f"{len(self.ready)} groups are ready, {count} are to be taken: wait for more")
        mini_steps = self.async_facts.mini_steps
        share, left = self.facts.batch // mini_steps, max(1, mini_steps - len(self._taken))
        note, have = "", len(self.ready)
        if self.starved:
            closed = Closed.concat([*self._taken, self.ready, *self.tracker.closed])
            note, falls_back = self.tracker.on_exhausted(closed, self._taken_kept + have)
            if not have:
                note = self.tracker.shortage_note(closed, self._taken_kept)
            if falls_back:  # every mini-step gets its part of what there is
                count = min(share, math.ceil((have + len(self._spare())) / left))
                self._bring_back(count - have)
            if not len(self.ready) and not self._taken:
                raise Exhausted(note)
        first = np.arange(len(self.ready)) < count
        batch = self.ready.select(first)
        self.ready = self.ready.select(~first)
        batch.zero_row = self.tracker.zero_rows(batch.groups, batch.trained, batch.trains)
        batch.trains = batch.trains & ~batch.zero_row
        self._taken_kept += min(have, len(batch))
        result = StepResult(**vars(batch), ledger=Ledger(), note=note, rounds=self.progress.rounds)
        self._taken.append(result)
        self._measure()
        self.listener.took(result)
        return result

    def finish(self) -> StepResult:
        """The account of the step: all groups that left the window in it, trained or dropped."""
        left = Closed.concat([*self._taken, *self.tracker.closed]).sorted()
        self.tracker.count_held(self.ready.groups)
        note = next((r.note for r in self._taken if r.note), "")
        note = self.tracker.fallback_note(note, sum(len(r.groups) for r in self._taken) - self._taken_kept)
        result = StepResult(**vars(left), ledger=self.ledger, note=note, rounds=self.progress.rounds)
        living = self.living
        self._born = {submission: self._born[submission] for submission in living}
        self._paid = {submission: paid for submission, paid in self._paid.items() if submission in living}
        self._unspent = min(self._unspent, sum(self._paid.values()))
        self._close_step(result)
        return result

    @property
    def living(self) -> dict[int, int]:
        """Submission → data-set position of the groups in flight and ready."""
        return {
            submission: index
            for groups in (self.flight, self.ready.groups)
            for submission, index in zip(groups.submission.tolist(), groups.index.tolist(), strict=True)
        }

    # -- the window -----------------------------------------------------------------------------------------

    def _window(self, step: int) -> int:
        batch = self.facts.batch
        share = batch - min(batch, len(self._taken) * (batch // self.async_facts.mini_steps))
        to_the_end = max(0, self.facts.steps - step) * batch
        return share + min(self.async_facts.warmup, to_the_end)

    def _measure(self) -> None:
        """Tell the roles how full the window is."""
        self.progress.window = self._window(self.progress.step)
        self.progress.kept, self.progress.open = len(self.ready), len(self.flight)

    def _fill(self, topups: Requests, *, refill: bool) -> Requests | None:
        self.progress.planned += topups.rollouts
        self.flight = Requests.join([self.flight, topups])
        self._measure()
        parts = [topups]
        wanted = self._wanted() if refill else 0
        if wanted > 0:
            busy = np.concatenate([self.flight.row, self.ready.groups.row])
            # A step with nothing to train on, nor to fall back on, goes ungated rather than end the run.
            idle = self.starved and not (len(self.ready) or self._taken_kept or len(self._spare()))
            fresh = self._new(wanted, busy, ungated=idle and self.config.on_exhausted != "raise")
            self._drawn += len(fresh)
            self.progress.rounds += bool(len(fresh))
            self._born.update(dict.fromkeys(fresh.submission.tolist(), self.progress.step))
            self.flight = Requests.join([self.flight, fresh])
            parts.append(fresh)
        self.flight = self.flight.sorted()
        requests = Requests.join(parts)
        return requests if len(requests) else None

    def _new(self, wanted: int, busy: np.ndarray, *, ungated: bool) -> Requests:
        """First rollouts of up to ``wanted`` prompts drawn as things stand now, as many as the cap has room for."""
        progress, policy, prompt_source = self.progress, self.policy, self.prompt_source
        planned = None
        if prompt_source.picks:
            rows, planned = prompt_source.draw(wanted, progress, busy)
            index = prompt_source.positions(rows)
        else:
            if ungated or prompt_source.ended == BUSY:  # a shut gate, or prompts that are back by now
                prompt_source.ended = ""
            candidates = CandidateQueue(prompt_source, progress, busy, ungated=ungated, first=wanted, again=False)
            candidates.extend(wanted)
            index, rows = candidates.index, candidates.row
        self.tracker.why = prompt_source.ended or self.tracker.why
        n = answers.first(policy.allocator, rows, planned, progress)
        fund = answers.fund(policy.allocator, n, planned)
        fits = int(np.searchsorted(np.cumsum(n), progress.room, side="right"))
        if fits < len(rows):
            self.tracker.why = progress.why_capped
        if prompt_source.picks:
            prompt_source.put_back(rows[fits:])
        else:
            candidates.commit(fits)
        index, rows, n = index[:fits], rows[:fits], n[:fits]
        progress.planned += int(n.sum())
        submission = self._submissions(len(rows))
        if fund is not None:
            self._unspent += int(fund[:fits].sum())
            self._paid.update(zip(submission.tolist(), fund[:fits].tolist(), strict=True))
        return Requests(submission, index, rows, n, np.zeros(len(rows), dtype=np.int64))

    def _wanted(self) -> int:
        """New prompts to ask for: as many as the window lacks and the step may still draw."""
        progress, tracker = self.progress, self.tracker
        if self.policy.sampler.plans_steps:
            return answers.amount(self.policy.sampler, "round_size", progress) if self._drawn == 0 else 0
        missing = self._window(progress.step) - len(self.ready) - self._viable()
        most = self.config.max_rounds * (self.facts.batch + self.async_facts.warmup) - self._drawn
        if missing <= 0:
            return 0
        if most <= 0:
            tracker.why = f"adaptive.max_rounds={self.config.max_rounds} windows of prompts were drawn"
            return 0
        wanted = min(missing, most)
        if self.pooled is not None:
            wanted = answers.amount(self.pooled, "affordable", wanted, progress)
        if wanted < min(missing, most):
            tracker.why = progress.why_capped
        return wanted

    def _viable(self) -> int:
        """Groups in flight that could still train. One that is too old will be dropped when it comes: a reward function
        that hangs, say, must not keep a place for ever."""
        return int((~self._too_old(self.flight.submission)).sum())

    def _too_old(self, submissions: np.ndarray) -> np.ndarray:
        """bool ``(k,)``: groups that span more weight versions than verl's threshold lets train."""
        threshold, step = self.async_facts.threshold, self.progress.step
        if threshold is None or self.async_facts.strategy != "drop":
            return np.zeros(len(submissions), dtype=bool)
        return np.array([step - self._born.get(t, step) + 1 > threshold for t in submissions.tolist()], dtype=bool)

    def _must_wait(self) -> bool:
        threshold = self.async_facts.threshold
        if threshold is None or self.async_facts.strategy != "wait":
            return False
        return any(self.progress.step - self._born[t] + 1 >= threshold for t in self.flight.submission.tolist())

    # -- groups that leave ----------------------------------------------------------------------------------

    def _judge(self, groups: Groups) -> Requests:
        """Close open groups whose rollouts are back, or top them up."""
        self._close(Closed.of(groups.select(groups.failed), "failed"))
        alive = groups.select(~groups.failed)
        old = self._too_old(alive.submission)  # it gets no top-up, nor does it take a place
        more = self.tracker.review(alive, ~old)
        more = fit(more, self.progress.room)
        if self._paid:
            more = fit(more, self._unspent)
            self._unspent -= int(np.maximum(more, 0).sum())
        if (more == HOLD).any():
            raise AdaptiveError(
                f"an asynchronous trainer holds no groups back, yet {int((more == HOLD).sum())} reviews said {HOLD}"
            )
        done = alive.select(more == CLOSE)
        if len(done):
            closed = self.tracker.verdict(done)
            self.progress.kept += int(closed.trained.sum())
            self._close(closed)
            self.policy.observe(done, self.progress)
        again = alive.select(more > 0)
        self.tracker.reopen(again)
        return Requests.topups(again, more[more > 0])

    def _close(self, closed: Closed) -> None:
        """Observe reviewed groups; the kept ones become ready, the others leave."""
        if not len(closed):
            return
        self.tracker.learn(closed.groups)
        self.ready = Closed.concat([self.ready, closed.select(closed.trained)]).sorted()
        self.tracker.closed.append(closed.select(~closed.trained))

    def _expire(self) -> None:
        """Drop ready groups that span more weight versions than verl's threshold allows."""
        old = self._too_old(self.ready.groups.submission)
        if old.any():
            stale = self.ready.select(old)
            stale.outcome[:], stale.trains[:] = "stale", False
            self.ready = self.ready.select(~old)
            self.tracker.closed.append(stale)

    def _spare(self) -> np.ndarray:
        """int64: submissions of groups that this step dropped and could train on after all, in the order of the tracker's
        ``spare``. One that is too old is none, whatever else it was dropped for: the threshold is verl's word."""
        dropped = Closed.concat(self.tracker.closed)
        young = dropped.select(~self._too_old(dropped.groups.submission))
        return young.groups.submission[self.tracker.spare(young)]

    def never_trains(self) -> Groups:
        dropped = Closed.concat(self.tracker.closed)
        old = self._too_old(dropped.groups.submission)
        return Groups.concat([dropped.groups.select(old), self.tracker.never_trains([dropped.select(~old)])])

    def _bring_back(self, count: int) -> None:
        """Train on groups that this step dropped."""
        dropped = Closed.concat(self.tracker.closed)
        chosen = np.isin(dropped.groups.submission, self._spare()[: max(0, count)])
        back = dropped.select(chosen)
        back.outcome[:], back.trains[:] = "trained", True
        self.tracker.closed = [dropped.select(~chosen)] if not chosen.all() else []
        self.ready = Closed.concat([self.ready, back]).sorted()

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State between steps, groups in flight and ready groups included; call it after :meth:`finish`."""
        submissions = np.array(sorted(self._born), dtype=np.int64)
        return {
            **super().state_dict(),
            "asynchronous": {
                "flight": arrays_of(self.flight),
                "open": arrays_of(self.tracker.open),
                "ready": arrays_of(self.ready.groups),
                "ready_trains": self.ready.trains,
                "born_submission": submissions,
                "paid": np.array([self._paid.get(int(t), -1) for t in submissions], dtype=np.int64),
                "unspent": self._unspent,
                "born_step": np.array([self._born[int(t)] for t in submissions], dtype=np.int64),
            },
        }

    @property
    def under_way(self) -> dict[str, int]:
        return {"flight": len(self.flight), "ready": len(self.ready)}

    def _take_up(self, state: Mapping[str, Any]) -> None:
        """Groups in flight and ready, as they were."""
        mine = state.get("asynchronous")
        if mine is None:  # the sync trainer's: nobody recalls here what that held
            self.tracker.gone = Groups.concat([self.tracker.gone, self.held])
            self.tracker.held, self.tracker.held_since = Groups.empty(), np.zeros(0, dtype=np.int64)
            return
        self.flight = Requests(**{name: np.asarray(value) for name, value in mine["flight"].items()})
        waiting, ready = groups_of(mine["open"]), groups_of(mine["ready"])
        self._born = dict(
            zip(np.asarray(mine["born_submission"]).tolist(), np.asarray(mine["born_step"]).tolist(), strict=True)
        )
        paid = zip(self._born, np.asarray(mine["paid"]).tolist(), strict=True)
        # Another allocator may have come, which has no pool: the old one's would cut its top-ups.
        pool = answers.fund(self.policy.allocator, Requests.none().n, None) is not None
        self._paid = {submission: amount for submission, amount in paid if pool and amount >= 0}
        for groups in (self.flight, waiting, ready):
            groups.index = self.prompt_source.found(groups.row, groups.index)
        self.ready = Closed.of(ready, "trained", np.asarray(mine["ready_trains"], dtype=bool))
        # As with held groups: a prompt that has left the data set cannot be topped up or sent again.
        lost = self.flight.submission[self.flight.index < 0]
        self.flight = self.flight.select(self.flight.index >= 0)
        stays = ~np.isin(waiting.submission, lost)
        self.tracker.open = waiting.select(stays)
        self.tracker.gone = Groups.concat([self.tracker.gone, waiting.select(~stays)])
        for submission in lost.tolist():
            self._paid.pop(submission, None)
        self._unspent = min(int(mine["unspent"]), sum(self._paid.values()))
