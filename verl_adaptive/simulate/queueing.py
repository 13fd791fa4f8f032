"""A generation phase as a queue: replicas with slots, and decode steps that take longer the more sequences share them.

A replica runs up to ``slots`` sequences at a time and gives each of them one token in every decode step; a step of k
sequences takes ``base + each · k`` seconds. So a full replica generates the most tokens, and the last sequence of a batch
runs almost alone on a machine that is almost empty: that is what waiting costs.

Left out: prefill (its tokens are counted by :mod:`verl_adaptive.simulate.clock`), memory that runs out before the slots
do, and speculative decoding. Decode steps are taken as a flow: a sequence of L tokens ends when L tokens' worth of
steps has passed since it began. All replicas share one queue, the best that a load balancer could do.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from math import inf


@dataclass
class Machine:
    """The rollout replicas.

    Attributes:
        replicas: R, inference engines.
        slots: most sequences that one of them runs at a time (vLLM's ``max_num_seqs``).
        base: seconds of a decode step beyond its sequences (the weights are read once).
        each: seconds that each running sequence adds to a decode step.
    """

    replicas: int = 8
    slots: int = 64
    base: float = 0.008
    each: float = 0.00012

    @property
    def fastest(self) -> float:
        """Tokens a second with every slot taken."""
        return self.replicas * self.slots / (self.base + self.each * self.slots)


class ServerQueue:
    """Sequences that wait and are generated; time goes on by :meth:`pop` and :meth:`wait`.

    Args:
        machine: what they run on.

    Attributes:
        now: seconds since the beginning.
        next_end: seconds at which the next sequence ends; inf when none is running.
        tokens, occupied: generated tokens and slot-seconds so far.
    """

    def __init__(self, machine: Machine) -> None:
        self.slots, self.base = machine.slots * machine.replicas, machine.base
        self.each = machine.each / machine.replicas  # k sequences over R replicas: k/R in each
        self.now = self.tokens = self.occupied = 0.0
        self.next_end = inf
        self._running: list[tuple[float, int, int]] = []  # heap: progress at which it ends, number, tag
        self._waiting: deque[tuple[int, int, int]] = deque()  # number, tag, length
        self._progress = 0.0  # tokens that a sequence would have generated since the beginning
        self._number = 0

    @property
    def busy(self) -> int:
        """Sequences that are running or waiting."""
        return len(self._running) + len(self._waiting)

    def add(self, lengths: list[int], tag: int) -> None:
        """Send sequences, in this order; they begin as soon as there are slots.

        Args:
            lengths: tokens of each; 0: a call that fails as soon as it has a slot.
            tag: what :meth:`pop` names them by.
        """
        for length in lengths:
            if len(self._running) < self.slots:
                heapq.heappush(self._running, (self._progress + length, self._number, tag))
            else:
                self._waiting.append((self._number, tag, length))
            self._number += 1
        self._foresee()

    def pop(self) -> int:
        """Go on until the next sequence ends; its tag."""
        if not self._running:
            raise ValueError("nothing is running")
        self.wait(self.next_end)
        end, _, tag = heapq.heappop(self._running)
        self._progress = end  # without the rounding of the way there
        if self._waiting:
            number, other_tag, length = self._waiting.popleft()
            heapq.heappush(self._running, (end + length, number, other_tag))
        self._foresee()
        return tag

    def wait(self, until: float) -> None:
        """Let time pass; no sequence may end before ``until``."""
        k, seconds = len(self._running), until - self.now
        if k:
            steps = seconds / (self.base + self.each * k)
            self._progress += steps
            self.tokens += k * steps
            self.occupied += k * seconds
        self.now = until

    def abort(self) -> int:
        """Stop everything that is running or waiting; how many answers had no slot yet."""
        waiting = sum(length > 0 for _, _, length in self._waiting)
        self._running.clear()
        self._waiting.clear()
        self._foresee()
        return waiting

    def _foresee(self) -> None:
        """Work out when the next sequence ends."""
        self.next_end = inf
        if self._running:
            left = max(0.0, self._running[0][0] - self._progress)
            self.next_end = self.now + left * (self.base + self.each * len(self._running))
