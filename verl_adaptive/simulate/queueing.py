"""A generation phase as a queue: replicas with slots, and decode steps that take longer the more sequences share them.

A replica runs up to ``slots`` sequences at a time and gives each of them one token in every decode step; a step of k
sequences takes ``base + each · k`` seconds. So a full replica generates the most tokens, and the last sequence of a batch
runs almost alone on a machine that is almost empty: that is what waiting costs.

Left out: prefill (its tokens are counted by :mod:`verl_adaptive.simulate.clock`), memory that runs out before the slots
do, and speculative decoding. Decode steps are taken as a flow: a sequence of L tokens ends when L tokens' worth of
steps has passed since it began.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

from verl_adaptive.config import check


@dataclass
class Machine:
    """The rollout replicas.

    Attributes:
        replicas: R, inference engines.
        slots: most sequences that one of them runs at a time (vLLM's ``max_num_seqs``).
        base: seconds of a decode step beyond its sequences (the weights are read once).
        each: seconds that each running sequence adds to a decode step.
        bound: a request waits at the replica with the fewest requests when it is sent, as verl's load balancer places
            it; False: all replicas share one queue, which is the best that a balancer could do.
        known: a free slot takes the longest sequence that waits. Nobody knows lengths beforehand: this is
            to see how much a better order could gain.
    """

    replicas: int = 8
    slots: int = 64
    base: float = 0.008
    each: float = 0.00012
    bound: bool = False
    known: bool = False

    def validate(self, path: str) -> None:
        for key in ("replicas", "slots"):
            check(getattr(self, key) >= 1, f"{path}{key}", getattr(self, key), "must be 1 or greater")
        for key in ("base", "each"):
            check(getattr(self, key) >= 0, f"{path}{key}", getattr(self, key), "must be 0 or greater")
        check(self.base + self.each > 0, f"{path}base", self.base, "a decode step must take some time")

    @property
    def fastest(self) -> float:
        """Tokens a second with every slot taken."""
        return self.replicas * self.slots / (self.base + self.each * self.slots)


@dataclass(frozen=True)
class AbortedAtServers:
    """Sequences that were stopped before their end.

    Attributes:
        begun: how many had generated anything.
        tokens: what they had generated.
        waiting: how many had no slot yet.
    """

    begun: int = 0
    tokens: int = 0
    waiting: int = 0


class _Replica:
    """One decode loop; with a shared queue it stands for all of them.

    Attributes:
        waiting: heap of (place in the line, number, tag, length).
        running: heap of (progress at which it ends, number, tag, length).
        progress: tokens that a sequence would have generated since the beginning.
        time: seconds at which ``progress`` was taken.
        end: seconds at which the next sequence ends; inf when none is running.
        tokens, occupied: generated tokens and slot-seconds so far.
    """

    __slots__ = (
        "base",
        "each",
        "end",
        "known",
        "occupied",
        "progress",
        "running",
        "slots",
        "time",
        "tokens",
        "waiting",
    )

    def __init__(self, machine: Machine, slots: int, each: float) -> None:
        self.slots, self.base, self.each, self.known = slots, machine.base, each, machine.known
        self.running: list[tuple[float, int, int, int]] = []
        self.waiting: list[tuple[int, int, int, int]] = []
        self.progress = self.time = self.tokens = self.occupied = 0.0
        self.end = inf

    def advance(self, now: float) -> None:
        """Decode until ``now``, before which no sequence ends."""
        k = len(self.running)
        if k:
            steps = (now - self.time) / (self.base + self.each * k)
            self.progress += steps
            self.tokens += k * steps
            self.occupied += k * (now - self.time)
        self.time = now

    def foresee(self) -> None:
        """Work out when the next sequence ends."""
        running = self.running
        if running:
            left = max(0.0, running[0][0] - self.progress)
            self.end = self.time + left * (self.base + self.each * len(running))
        else:
            self.end = inf


class ServerQueue:
    """Sequences that wait and are generated; time goes on by :meth:`pop` and :meth:`wait`.

    Args:
        machine: what they run on.

    Attributes:
        now: seconds since the beginning.
        busy: sequences that are running or waiting.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        if machine.bound:
            self._replicas = [_Replica(machine, machine.slots, machine.each) for _ in range(machine.replicas)]
        else:
            # k sequences over R replicas: k/R in each, so that a step takes base + each · k/R.
            self._replicas = [_Replica(machine, machine.slots * machine.replicas, machine.each / machine.replicas)]
        self.now = 0.0
        self.busy = 0
        self._number = 0

    @property
    def tokens(self) -> float:
        """Tokens generated so far."""
        return sum(r.tokens for r in self._replicas)

    @property
    def occupied(self) -> float:
        """Slot-seconds taken so far."""
        return sum(r.occupied for r in self._replicas)

    @property
    def next_end(self) -> float:
        """Seconds at which the next sequence ends; inf when none is running."""
        return min(r.end for r in self._replicas)

    def add(self, lengths: list[int], tag: int) -> None:
        """Send sequences, in this order; they begin as soon as there are slots.

        Args:
            lengths: tokens of each, at least 1.
            tag: what :meth:`pop` names them by.
        """
        replicas = self._replicas
        touched = set()
        for length in lengths:
            at = 0
            if len(replicas) > 1:
                at = min(range(len(replicas)), key=lambda i: len(replicas[i].running) + len(replicas[i].waiting))
            replica = replicas[at]
            if at not in touched:
                replica.advance(self.now)
                touched.add(at)
            if len(replica.running) < replica.slots:
                heapq.heappush(replica.running, (replica.progress + length, self._number, tag, length))
            else:
                heapq.heappush(replica.waiting, (-length if replica.known else 0, self._number, tag, length))
            self._number += 1
        for at in touched:
            replicas[at].foresee()
        self.busy += len(lengths)

    def pop(self) -> int:
        """Go on until the next sequence ends; its tag."""
        replica = self._replicas[0]
        for other in self._replicas[1:]:
            if other.end < replica.end:
                replica = other
        if replica.end == inf:
            raise ValueError("nothing is running")
        self.now = max(self.now, replica.end)
        replica.advance(self.now)
        end, _, tag, _ = heapq.heappop(replica.running)
        replica.progress = end  # without the rounding of the way there
        if replica.waiting:
            _, number, other_tag, length = heapq.heappop(replica.waiting)
            heapq.heappush(replica.running, (end + length, number, other_tag, length))
        replica.foresee()
        self.busy -= 1
        return tag

    def wait(self, until: float) -> None:
        """Let time pass; no sequence may end before ``until``."""
        for replica in self._replicas:
            replica.advance(until)
        self.now = max(self.now, until)

    def abort(self) -> AbortedAtServers:
        """Stop everything that is running or waiting."""
        begun = waiting = 0
        tokens = 0.0
        for replica in self._replicas:
            replica.advance(self.now)
            for end, _, _, length in replica.running:
                made = length - max(0.0, end - replica.progress)
                begun += made > 0
                tokens += made
            waiting += len(replica.waiting)
            replica.running.clear()
            replica.waiting.clear()
            replica.foresee()
        self.busy = 0
        return AbortedAtServers(begun, round(tokens), waiting)
