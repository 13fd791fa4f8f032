"""The engine of the ``sync`` trainer: no unnecessary wait for the slowest rollout, and no dependence on who finished first.

The candidates of a step are an ordered list, fixed by the state at the step's start (:class:`~verl_adaptive.engine.prompt_source.CandidateQueue`);
each has a *submission*. The first request is sized from the yield of recent steps; more are sent once these can no longer fill the
batch. A group is reviewed when it is back. **A submission commits when all lower ones have**: the batch is the first B kept groups
in submission order, and the step ends when they have committed. Groups still in flight are aborted and counted as such; the next
step sends their prompts first, as if they had never been sent.

So the batch, the statistics and every later decision are functions of submission order and rewards, in any order of arrival and
for any moment of the abort:

* the gate and the pool's picks see the statistics of the step's start: statistics are updated when the step ends;
* a group's top-ups depend on its own rollouts (:meth:`~verl_adaptive.roles.Allocator.review`) and are sent at once;
* what groups share (a pool of rollouts, a step's cap, the places of the batch) is given out in submission order. A group need not
  wait until all lower ones are back: it continues as soon as enough is left even if each lower one takes the most it may, and
  gives up as soon as too little is left even if none takes any more;
* only committed groups enter the statistics, never an aborted one.

How many prompts are sent does depend on arrivals, and so do the cost (``adaptive/rollouts/generated_total``) and the step at
which ``adaptive.total_rollouts`` is spent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_adaptive.engine.base import Engine
from verl_adaptive.engine.prompt_source import CandidateQueue
from verl_adaptive.engine.steps import Closed, Requests, StepResult
from verl_adaptive.groups import Groups
from verl_adaptive.progress import LEAST_YIELD, OVER_ASK
from verl_adaptive.roles import HOLD, answers

_FLIGHT, _ASKING, _KEPT, _OUT, _HELD = range(5)  # up to _KEPT it is still viable, from _KEPT on final
_FRESH = 0.3  # weight of the latest step in the recent yield
_GUESS = 0.5  # yield that is assumed before any group came back


class _Submissions:
    """The submissions of one step, in order; arrays of shape ``(m,)``.

    Attributes:
        submission: the group.
        status: in flight, asking for a top-up, or final: kept, out, held.
        count: rollouts asked for so far.
        spent: of these, in this step.
        extra: of these, top-ups.
        stage: top-ups so far.
        further: most further rollouts it may ask for; 0 once its fate is known.
        topup: the top-up it asks for.
        fund: what it pays into the pool of top-ups.
    """

    submission: np.ndarray
    status: np.ndarray
    count: np.ndarray
    spent: np.ndarray
    extra: np.ndarray
    stage: np.ndarray
    further: np.ndarray
    topup: np.ndarray
    fund: np.ndarray

    def __init__(self) -> None:
        self.__dict__.update(dict.fromkeys(self.__annotations__, np.zeros(0, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.submission)

    def add(self, **arrays: np.ndarray) -> None:
        """Further submissions; what is not given is 0."""
        size = len(arrays["submission"])
        for name in vars(self):
            new = np.asarray(arrays.get(name, np.zeros(size)), dtype=np.int64)
            setattr(self, name, np.concatenate([getattr(self, name), new]))

    def at(self, submission: np.ndarray) -> np.ndarray:
        """Places of these submissions."""
        return np.searchsorted(self.submission, submission)

    def amount(self, *status: int) -> int:
        """How many have one of these statuses."""
        return sum(int(np.count_nonzero(self.status == one)) for one in status)


@dataclass
class _Step:
    """The step in hand.

    Attributes:
        candidates: the prompts that it may send.
        recalled: held groups that go on: its first submissions.
        reserve: groups that should be held when it ends.
        first_end: submissions of its first request.
        submissions: all that were sent.
        closed, holding: groups that are closed or held, once their submissions commit.
        sent: candidates that were sent.
        unsent: candidates that were to be sent last, and for which the cap had no room.
        candidates_over: the cap has no room for another one, whatever comes back.
        first_fund: what the prompts of the first request pay into the pool; None: there is no pool.
        head: submissions that can commit.
        done: they are the batch.
    """

    candidates: CandidateQueue
    recalled: int
    reserve: int
    first_end: int
    submissions: _Submissions = field(default_factory=_Submissions)
    closed: list[Closed] = field(default_factory=list)
    holding: list[Groups] = field(default_factory=list)
    sent: int = 0
    unsent: int = 0
    candidates_over: bool = False
    first_fund: np.ndarray | None = None
    head: int = 0
    done: bool = False


class OrderedEngine(Engine):
    """Runs a policy in submission order; arguments as :class:`~verl_adaptive.engine.base.Engine`.

    Attributes:
        keep_rate: share of the groups that were kept, of late; None before the first step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keep_rate: float | None = None
        self._step: _Step

    # -- a step ---------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Requests | None:
        self._open_step(step, keep_rate=self.keep_rate if self.config.refill else None)
        self.listener.begun(step)
        recalled, reserve = self._recall(), 0
        plans = self.policy.sampler.plans_steps  # a plan of a step is one request, whatever its size
        wanted = answers.amount(self.policy.sampler, "round_size", self.progress)
        if self.pooled is not None:
            reserve = answers.amount(self.pooled, "reserve", self.progress)
            if not plans:
                wanted = answers.amount(self.pooled, "prompts", wanted, self.progress)
            asked, wanted = wanted, answers.amount(self.pooled, "affordable", wanted, self.progress)
            if wanted < asked and not self.config.refill:  # else more follow, as far as there is room
                self.tracker.why = self.progress.why_capped
        if not plans:
            wanted = min(wanted, self._most_drawn)
        busy, ungated = np.concatenate([self.held.row, recalled.row]), self.config.on_exhausted != "raise"
        candidates = CandidateQueue(self.prompt_source, self.progress, busy, ungated=ungated, first=wanted)
        self._step = _Step(
            candidates,
            recalled=len(recalled),
            reserve=reserve,
            first_end=len(recalled) + wanted,
        )
        self._count_recalled(recalled)
        first = self._fill(Requests.join([recalled, self._send(wanted)]))
        self.listener.asked(first)
        return first

    def receive(self, results: Groups) -> Requests | None:
        self._review(self._landed(results))
        topups = self._decide()
        self._advance()
        requests = self._fill(topups)
        self.listener.asked(requests)
        return requests

    @property
    def decided(self) -> bool:
        return self._step.done or not len(self.flight)

    def never_trains(self) -> Groups:
        return self.tracker.never_trains([*self.tracker.closed, *self._step.closed])

    def finish(self) -> StepResult:
        step = self._step
        tracker, t, progress = self.tracker, step.submissions, self.progress
        committed = t.submission[: step.head]
        everything = Closed.concat(step.closed).sorted()
        mine = np.isin(everything.groups.submission, committed)
        held = Groups.concat(step.holding)
        held = held.select(np.isin(held.submission, committed)).sorted()
        self._drop_the_rest(everything, mine, held)
        closed = everything.select(mine)

        used = max(0, step.head - step.recalled)
        step.candidates.commit(used)
        self._submission -= step.sent - used  # the next step's are numbered from there on
        failed = everything.groups.submission[everything.groups.failed]
        new = slice(step.recalled, step.head)
        status = t.status[new][~np.isin(t.submission[new], failed)]  # a fault tells nothing about the prompt
        if len(status):
            share = float(np.isin(status, (_KEPT, _HELD)).mean())
            self.keep_rate = share if self.keep_rate is None else (1 - _FRESH) * self.keep_rate + _FRESH * share

        tracker.closed.append(closed)
        tracker.learn(closed.groups)
        alive = closed.groups.select(~closed.groups.failed)
        progress.kept, progress.open = int(closed.trained.sum()), 0
        progress.planned = int(t.spent[: step.head].sum())
        if len(alive):
            self.policy.observe(alive, progress)
        tracker.hold(held)
        tracker.count_held()
        self._explain()
        result = tracker.batch(Closed.concat(tracker.closed).sorted())
        self._close_step(result)
        return result

    # -- candidates -----------------------------------------------------------------------------------------

    @property
    def _target(self) -> float:
        """Kept groups that end the step; infinite where the sampler has planned the step and nothing is added: all of it trains."""
        return math.inf if self.policy.sampler.plans_steps and not self.config.refill else self.facts.batch

    @property
    def _needs_place(self) -> bool:
        return self.pooled is not None and self.pooled.needs_place

    @property
    def _most_drawn(self) -> int:
        """Prompts that a step may draw."""
        return self.config.max_rounds * self.facts.batch

    @property
    def _most(self) -> int:
        """Prompts that may still be drawn in this step."""
        return max(0, self._most_drawn - self._step.sent)

    def _recall(self) -> Requests:
        """Held groups that go on; they are older than every new one, so they come first."""
        if not len(self.held):
            return Requests.none()
        requests = self.tracker.recall()
        self.progress.planned += requests.rollouts
        self.flight = requests.sorted()
        return requests

    def _count_recalled(self, requests: Requests) -> None:
        """Enter these as the step's first submissions."""
        if len(requests):
            count, stage = self.tracker.open.n + requests.n, requests.stage
            self._step.submissions.add(
                submission=requests.submission,
                count=count,
                spent=requests.n,
                extra=requests.n,
                stage=stage,
                further=answers.most(self.policy.allocator, count, stage),
            )

    def _send(self, amount: int) -> Requests:
        """First rollouts of the next ``amount`` candidates, or as many as there are and the cap surely has room for."""
        step = self._step
        candidates, t, allocator = step.candidates, step.submissions, self.policy.allocator
        if amount <= 0:
            return Requests.none()
        candidates.extend(step.sent + amount)
        part = slice(step.sent, min(step.sent + amount, len(candidates)))
        rows, planned = candidates.row[part], candidates.planned[part]
        if not len(rows):
            return Requests.none()
        plan = None if (planned < 0).all() else planned
        n = answers.first(allocator, rows, plan, self.progress)
        further = answers.most(allocator, n, np.zeros(len(n), dtype=np.int64))
        fund = answers.fund(allocator, n, plan)
        if step.first_fund is None:
            step.first_fund = fund
        cap = self.progress.cap
        if cap is not None:
            # each before may have taken the most
            worst = (t.spent + t.further).sum() + np.cumsum(n + further) - further
            least = t.spent.sum() + np.cumsum(n)
            fits = int(np.argmax(worst > cap)) if (worst > cap).any() else len(n)
            if fits < len(n) and least[fits] > cap:
                self.tracker.why = self.progress.why_capped
                step.candidates_over = True
            step.unsent = len(n) - fits
            rows, n, further = rows[:fits], n[:fits], further[:fits]
            part = slice(part.start, part.start + fits)
        if not len(rows):
            return Requests.none()
        submission = self._submissions(len(rows))
        t.add(
            submission=submission,
            count=n,
            spent=n,
            further=further,
            fund=np.zeros(len(n)) if fund is None else fund[: len(n)],
        )
        requests = Requests(submission, candidates.index[part], rows, n, np.zeros(len(rows), dtype=np.int64))
        step.sent += len(rows)
        self.progress.rounds += 1
        self.flight = Requests.join([self.flight, requests]).sorted()
        return self._longest_first(requests)

    def _longest_first(self, requests: Requests) -> Requests:
        """The order in which requests are sent: prompts with long answers first, so that none is left for the end.

        The expected length is the mean of the prompt's earlier answers. Requests beyond the batch come last. Submissions do not
        change, so no decision does.
        """
        # Commits that wait for places of the batch want the short pilots back early.
        if not self.config.longest_first or self._needs_place:
            return requests
        tokens = self.table.col("tokens")[requests.row].astype(np.float64)
        rollouts = self.table.col("rollouts")[requests.row].astype(np.float64)
        known = tokens > 0  # a warm start may bring rollouts without their tokens
        if not known.any():
            return requests
        expected = np.full(len(requests), (tokens[known] / rollouts[known]).mean())
        expected[known] = tokens[known] / rollouts[known]
        keep_rate = 1.0 if self.keep_rate is None else max(self.keep_rate, LEAST_YIELD)
        needed = round(self.facts.batch / keep_rate)
        excess = np.arange(len(requests)) >= max(1, needed - (self._step.sent - len(requests)))
        return requests.select(np.lexsort((-expected, excess)))

    def _fill(self, requests: Requests) -> Requests | None:
        """Send more where what is under way can no longer fill the batch."""
        step = self._step
        while not step.done:
            more = self._send(self._missing())
            if len(more):
                requests = Requests.join([requests, more])
                break
            # Nothing is in flight and all candidates are used up: prompts may come a second time, if nothing else is missing.
            idle = not len(self.flight) and self._missing() > 0
            if not (idle and self.tracker.wants(step.submissions.amount(_KEPT))):
                break
            if not step.candidates.new_lap(Groups.concat(step.holding).row):
                break
        return requests if len(requests) else None

    def _missing(self) -> int:
        """Candidates to send now: none while those in flight may be enough."""
        step = self._step
        t = step.submissions
        if step.candidates_over:
            return 0
        if not self.config.refill:
            return step.unsent  # what the step's request still lacks, for want of room under the cap
        if self.tracker.lenient:
            return max(0, min(self._most, self._end() - len(t)))
        kept, unresolved = t.amount(_KEPT), t.amount(_FLIGHT, _ASKING)
        deficit = self.facts.batch - kept - unresolved
        if deficit <= 0:
            return max(0, step.first_end - len(t)) if step.reserve else 0  # a cap kept some back
        # Groups that ask for a top-up are likely to be kept. Not counting them would bias the yield: the others have left.
        likely = 0
        if self._needs_place:
            likely = int(((t.status == _ASKING) | ((t.status == _FLIGHT) & (t.stage > 0))).sum())
        weight = self.facts.batch / 4
        resolved = t.amount(_OUT, _HELD) + kept + likely
        prior = _GUESS if self.keep_rate is None else self.keep_rate
        share = max((kept + likely + prior * weight) / (resolved + weight), LEAST_YIELD)
        expected = OVER_ASK * (self.facts.batch - kept - likely - share * (unresolved - likely)) / share
        return min(self._most, max(deficit, math.ceil(expected)))

    def _end(self) -> int:
        """Number of submissions that end a step in which a few groups may fail, if all that are in flight are kept.

        It is a function of rewards and submissions, too: once the first request is back, its failed groups are either few enough to
        be ignored or replaced by the same number, and so on for the replacements. Until all are back this is an estimate from
        below.
        """
        viable = np.cumsum(self._step.submissions.status <= _KEPT)
        end = self._step.first_end
        while end <= len(viable):
            kept = int(viable[end - 1]) if end else 0
            if not self.tracker.wants(kept):
                break
            end += self.facts.batch - kept
        return end

    # -- groups that are back -------------------------------------------------------------------------------

    def _review(self, groups: Groups) -> None:
        """Close groups that are done; the others ask for more."""
        t, allocator = self._step.submissions, self.policy.allocator
        failed = groups.select(groups.failed)
        if len(failed):
            self._close(Closed.of(failed, "failed"))
        alive = groups.select(~groups.failed)
        if not len(alive):
            return
        # Other groups were sent assuming that a group asks for `further` at most; one that lost rollouts may want more.
        bounded = self.progress.cap is not None or self._step.first_fund is not None
        answer = self.tracker.review(alive)
        if bounded:
            answer = np.minimum(answer, t.further[t.at(alive.submission)])
        self._close(self.tracker.verdict(alive.select(answer == 0)))
        hold = alive.select(answer == HOLD)
        if len(hold):
            self._hold(hold)
        asking, topup = alive.select(answer > 0), answer[answer > 0]
        if len(asking):
            at = t.at(asking.submission)
            t.status[at], t.topup[at] = _ASKING, topup
            further = np.maximum(answers.most(allocator, asking.n, t.stage[at]), topup)
            t.further[at] = np.minimum(further, t.further[at]) if bounded else further
            self.tracker.reopen(asking)

    def _close(self, closed: Closed) -> None:
        step = self._step
        if len(closed):
            at = step.submissions.at(closed.groups.submission)
            step.submissions.status[at] = np.where(closed.trained, _KEPT, _OUT)
            step.submissions.further[at] = 0
            step.closed.append(closed)

    def _hold(self, groups: Groups) -> None:
        step = self._step
        at = step.submissions.at(groups.submission)
        step.submissions.status[at], step.submissions.further[at] = _HELD, 0
        step.holding.append(groups)

    def _decide(self) -> Requests:
        """Grant or refuse top-ups, as far as the answer no longer depends on groups in flight."""
        t, allocator = self._step.submissions, self.policy.allocator
        parts = []
        while len(asking := np.flatnonzero(t.status == _ASKING)):
            yes, no = self._certain(asking)
            if not (yes.any() or no.any()):
                break
            open_ = self.tracker.open
            granted, refused = asking[yes], asking[no]
            groups = open_.select(np.isin(open_.submission, t.submission[granted]))
            parts.append(Requests.topups(groups, t.topup[granted]))
            t.status[granted] = _FLIGHT
            for name in ("count", "spent", "extra"):
                getattr(t, name)[granted] += t.topup[granted]
            t.stage[granted] += 1
            most = answers.most(allocator, t.count[granted], t.stage[granted])
            # never more than others counted on
            t.further[granted] = np.minimum(t.further[granted] - t.topup[granted], most)
            if len(refused):
                leave = np.isin(open_.submission, t.submission[refused])
                self.tracker.open = open_.select(~leave)
                if allocator.can_hold:  # whatever it lacks: what is known to be missing first depends on who is back
                    self._hold(open_.select(leave))
                else:
                    self._close(self.tracker.verdict(open_.select(leave)))
        if not parts:
            return Requests.none()
        topups = Requests.join(parts)
        self.flight = Requests.join([self.flight, topups]).sorted()
        return topups

    def _certain(self, asking: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the submissions at these places: which surely get their top-up, and which surely do not."""
        step = self._step
        t = step.submissions
        topup = t.topup[asking]
        pending = np.cumsum(t.further)[asking] - t.further[asking]  # the most that lower ones still take
        yes, no = np.ones(len(asking), dtype=bool), np.zeros(len(asking), dtype=bool)
        if self._needs_place:
            kept = np.cumsum(t.status == _KEPT)[asking]
            # but for the submission itself
            viable = np.cumsum(t.status <= _KEPT)[asking] - 1
            yes &= viable < self._target
            no |= kept >= self._target
        if step.first_fund is not None:
            # Each prompt pays in when it is explored. A batch of them pays from the start, sent or held back by a cap.
            paid = np.maximum(np.cumsum(t.fund)[asking], step.first_fund[: self.facts.batch].sum())
            taken = np.cumsum(t.extra)[asking]
            yes &= paid - taken - pending >= topup
            no |= paid - taken < topup
        if self.progress.cap is not None:
            spent = np.cumsum(t.spent)[asking]
            yes &= spent + pending + topup <= self.progress.cap
            no |= spent + topup > self.progress.cap
        return yes & ~no, no

    # -- the order of submissions -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Commit what can be committed; the step is done when the batch is."""
        step = self._step
        t = step.submissions
        final = t.status >= _KEPT
        head = int(np.argmin(final)) if not final.all() else len(t)
        kept = np.cumsum(t.status[:head] == _KEPT)
        held = np.cumsum(t.status[:head] == _HELD)
        enough = kept >= self._target
        if self.tracker.lenient and self.config.refill:
            enough |= np.arange(1, head + 1) >= self._end()
        # Groups held for the next step come from the first request alone: its size is a function of the state. It ends
        # before a group that the batch has no place for.
        surplus = np.append(t.status[1:head] == _KEPT, False)
        enough &= (held >= step.reserve) | (np.arange(1, head + 1) >= step.first_end) | surplus
        step.done = bool(enough.any())
        step.head = int(np.argmax(enough)) + 1 if step.done else head

    def _drop_the_rest(self, everything: Closed, mine: np.ndarray, held: Groups) -> None:
        """Account what did not commit as aborted."""
        uncommitted = [everything.groups.select(~mine), self.tracker.open]
        uncommitted += [g.select(~np.isin(g.submission, held.submission)) for g in self._step.holding]
        for groups in uncommitted:
            self.ledger.drop("aborted", groups.tokens)
        self.tracker.open = Groups.empty()
        self.flight = Requests.none()

    def _explain(self) -> None:
        """Say why the step's sampling ended, in case the batch is short."""
        step, tracker = self._step, self.tracker
        tracker.why = tracker.why or self.prompt_source.ended
        if tracker.why or self.policy.sampler.plans_steps:
            return
        if not self.config.refill and step.recalled + step.sent < step.first_end:
            tracker.why = "the sampler gave no further prompt"
        elif self.config.refill and self._most == 0:
            tracker.why = f"adaptive.max_rounds={self.config.max_rounds} batches of prompts were drawn"

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "keep_rate": self.keep_rate}

    def _take_up(self, state: Mapping[str, Any]) -> None:
        super()._take_up(state)
        self.keep_rate = state.get("keep_rate")
