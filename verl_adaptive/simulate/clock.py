"""A clock for the simulator: seconds of generation, by driving the package's own engine through a queueing model.

The clock stands where verl's agent loops and inference engines stand. It sends the engine's requests to a
:class:`~verl_adaptive.simulate.queueing.ServerQueue`, hands groups back when their last rollout ends, and stops what is in
flight once the engine has what it wants. Nothing of a method is written again here, and nothing that the clock says
reaches a decision: only the order in which groups come back does, where a driver lets it.

An engine is handed each group as it returns, until it says that it is ``decided``. As in training, results are looked for
every ``adaptive.poll_interval`` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.simulate.lengths import LengthConfig
from verl_adaptive.simulate.queueing import Machine, ServerQueue

if TYPE_CHECKING:
    from verl_adaptive.engine import AsyncEngine, Engine, Requests, StepResult

#: A group counts as one of the last if nine tenths of the step's groups were back before it.
LAST = 0.9


@dataclass
class ClockConfig:
    """What generation takes.

    Attributes:
        machine: the replicas.
        lengths: how long answers are.
        prompt_tokens: tokens of a prompt, for the account of prefill.
    """

    machine: Machine = field(default_factory=Machine)
    lengths: LengthConfig = field(default_factory=LengthConfig)
    prompt_tokens: int = 512

    @classmethod
    def guess(cls, *, replicas: int, slots: int, cap: int) -> ClockConfig:
        """What a run's own settings say; the median is taken to be an eighth of the cap, decode steps are the default's.

        Args:
            replicas: inference engines, those of one ``data_parallel_size`` counted one by one: each has slots of its own
                (:func:`verl_adaptive.integration.facts.engines_of`).
            slots: ``actor_rollout_ref.rollout.max_num_seqs``, or what the memory for keys and values holds if that is less.
            cap: ``data.max_response_length``.
        """
        lengths = LengthConfig(median=max(1.0, cap / 8), cap=cap)
        return cls(Machine(replicas, slots), lengths)


@dataclass(frozen=True)
class Phase:
    """One step's generation.

    Attributes:
        seconds: from the first request until nothing more need be waited for.
        tokens: generated in it, the aborted ones included.
        occupied: slot-seconds taken.
        waves: times that requests met an empty machine: rounds, in other words.
        rollouts: rollouts that began.
        last: seconds from the return of nine tenths of the groups to the end.
    """

    seconds: float
    tokens: float
    occupied: float
    waves: int
    rollouts: int
    last: float


class Clock:
    """Simulates generation: returns the rollouts of an engine's requests at their simulated time, and adds up the steps.

    Args:
        config: the machine; lengths are the world's (:class:`~verl_adaptive.simulate.lengths.Lengths`).

    Attributes:
        phases: generation of the counted steps, in order.
        informative: trained groups that are informative, by step.
        in_vain: aborted rollouts and tokens, by step.
        course: seconds since the beginning, and the pool's mean pass rate, after each step.
    """

    def __init__(self, config: ClockConfig) -> None:
        self.config = config
        self.queue = ServerQueue(config.machine)
        self.phases: list[Phase] = []
        self.informative: list[int] = []
        self.in_vain: list[tuple[int, int]] = []
        self.course: list[tuple[float, float]] = []
        self._results: dict[int, tuple[Groups, int]] = {}  # submission → what it will have come to, and its place there
        self._asked_in: dict[int, int] = {}  # submission → steps before the one in which its latest request was sent
        self._left: dict[int, int] = {}  # submission → rollouts that are not back

    def generate(self, engine: Engine, requests: Requests | None, answer: Callable[[Requests], Groups]) -> None:
        """Run one step's generation to its end.

        Args:
            engine: after ``begin``, before ``finish``.
            requests: what ``begin`` asked for.
            answer: the world: a group a request, with the length of each rollout as its tokens.
        """
        self._start(engine)
        self._send(requests, answer)
        while self.queue.busy and not engine.decided:
            if done := self._look():
                self._send(engine.receive(self._take(done)), answer)
        self._sent -= self.queue.abort()  # what had no slot yet never began
        self._results.clear()
        self._left.clear()
        self._asked_in.clear()
        if aborted := self._sent - self._back:
            tokens = self.queue.tokens - self._before[1]
            engine.abandon(aborted, max(0, round(tokens - self._back_tokens)))

    def go_on(self, engine: AsyncEngine, requests: Requests | None, answer: Callable[[Requests], Groups]) -> None:
        """Go on generating until an asynchronous step has its groups; what is in flight stays there.

        Args:
            engine: after ``begin``, before ``take``.
            requests, answer: as :meth:`generate`.
        """
        self._start(engine)
        self._send(requests, answer)
        while not engine.can_take(engine.count):
            self._send(engine.revive(), answer)
            if engine.starved:
                break
            if done := self._look():
                self._send(engine.receive(self._take(done)), answer)

    def _start(self, engine: Engine) -> None:
        self._poll = engine.config.poll_interval
        self._before = self.queue.now, self.queue.tokens, self.queue.occupied
        self._waves = self._sent = self._back = self._back_tokens = 0
        self._returned: list[float] = []

    def _look(self) -> list[int]:
        """Let time pass until a look finds sequences that ended; the submissions of which nothing is missing any more."""
        queue, begun = self.queue, self._before[0]
        look, done = queue.next_end, []
        if self._poll > 0:  # the first look after it
            look = max(look, begun + math.ceil((look - begun) / self._poll - 1e-9) * self._poll)
        while queue.next_end <= look:
            submission = queue.pop()
            self._left[submission] -= 1
            if not self._left[submission]:
                done.append(submission)
        queue.wait(look)
        self._returned += [look] * len(done)
        return done

    def _send(self, requests: Requests | None, answer: Callable[[Requests], Groups]) -> None:
        if requests is None or not len(requests):
            return
        self._waves += not self.queue.busy
        groups = answer(requests)
        lengths, offsets = groups.tokens.tolist(), groups.offsets.tolist()
        for place, submission in enumerate(groups.submission.tolist()):
            self._asked_in[submission] = len(self.phases)
            mine = lengths[offsets[place] : offsets[place + 1]]
            # Lost rollouts take no time in the model, nor do they count. Where none survived, one of no length brings the group
            # back: a slot is all that it waits for.
            self._results[submission], self._left[submission] = (groups, place), len(mine) or 1
            self.queue.add(mine or [0], submission)
            self._sent += len(mine)

    def _take(self, submissions: list[int]) -> Groups:
        """The results of these submissions, in submission order."""
        parts: dict[int, tuple[Groups, list[int]]] = {}
        for submission in submissions:
            groups, place = self._results.pop(submission)
            del self._left[submission]
            parts.setdefault(id(groups), (groups, []))[1].append(place)
        groups = Groups.concat([g.select(np.array(places)) for g, places in parts.values()])
        self._back += groups.rollouts
        self._back_tokens += int(groups.tokens.sum())
        groups = groups.sorted()
        asked = np.array([self._asked_in.pop(t) for t in groups.submission.tolist()], dtype=np.int32)
        groups.lag = (len(self.phases) - asked).astype(np.int32)
        return groups

    def count(self, result: StepResult, tolerance: float, pool: float) -> None:
        """Add a finished step to the figures; a step that ends with an error is not counted.

        Args:
            result: what became of its groups.
            tolerance: of the engine, for what counts as variance.
            pool: mean true pass rate of the pool after the step's training.
        """
        queue, returned, groups = self.queue, self._returned, result.groups
        begun, tokens, occupied = self._before
        late = sorted(returned)[math.ceil(LAST * len(returned)) - 1] if returned else queue.now
        phase = Phase(
            seconds=queue.now - begun,
            tokens=queue.tokens - tokens,
            occupied=queue.occupied - occupied,
            waves=self._waves,
            rollouts=self._sent,
            last=queue.now - late,
        )
        self.phases.append(phase)
        mixed = ~groups.degenerate(tolerance) & ~groups.failed
        self.informative.append(int((mixed & result.trained).sum()))
        ledger = result.ledger
        self.in_vain.append((ledger.rollouts.dropped.get("aborted", 0), ledger.tokens.dropped.get("aborted", 0)))
        self.course.append((queue.now, pool))

    def row(self, part: slice = slice(None)) -> dict[str, Any]:
        """The run in numbers, or some of its steps; nan where there is none.

        ``time``: seconds of a step. ``time_per_informative``: seconds for each trained group that has variance.
        ``idle``: share of the tokens that full slots would have generated in that time and did not. ``empty``: share of
        the slots without a sequence. ``waves``: of a step. ``last``: share of the time that passes after nine tenths of
        the groups are back. ``decoded``: tokens of a step. ``begun``: rollouts of a step; ``aborted``: of them, those
        whose group did not commit, back or in flight; ``aborted_tokens``: their share of ``decoded``. ``prefill``: prompt
        tokens of a step, without the help of a prefix cache. ``informative``: trained groups with variance of a step.
        """
        phases, machine = self.phases[part], self.config.machine
        sums = {f.name: float(np.sum([getattr(p, f.name) for p in phases])) for f in fields(Phase)}
        count, seconds = len(phases) or math.nan, sums["seconds"] or math.nan
        informative = sum(self.informative[part])
        aborted, aborted_tokens = np.sum([(0, 0), *self.in_vain[part]], axis=0)
        room = machine.replicas * machine.slots * seconds
        return {
            "time": seconds / count,
            "time_per_informative": seconds / (informative or math.nan),
            "idle": 1.0 - sums["tokens"] / (machine.fastest * seconds),
            "empty": 1.0 - sums["occupied"] / room,
            "waves": sums["waves"] / count,
            "last": sums["last"] / seconds,
            "decoded": sums["tokens"] / count,
            "begun": sums["rollouts"] / count,
            "aborted": float(aborted) / count,
            "aborted_tokens": float(aborted_tokens) / max(sums["tokens"], 1.0),
            "prefill": sums["rollouts"] * self.config.prompt_tokens / count,
            "informative": informative / count,
        }
