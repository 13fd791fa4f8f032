"""Where the seconds of a ``sync`` step's generation went. Nothing is decided by them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

#: Share of the groups after whose return the wait for the rest begins to count.
_MOST = 0.9


class Timings:
    """Seconds from a step's first request to its batch, of these with only a tenth of its groups to come; idle slots.

    ``slots`` are the sequences that all inference engines run at a time; 0: not known.
    """

    def __init__(self, slots: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots, self._clock = slots, clock
        self.begin()

    def begin(self) -> None:
        """The first request of a step goes out."""
        self._start = self._end = self._clock()
        self._looks: list[tuple[float, int]] = []
        self._loads: list[tuple[float, int]] = []

    def load(self, rollouts: int, when: float = math.inf) -> None:
        """So many rollouts are under way, those that wait for a slot included: now, or as seen at an earlier second."""
        latest = self._loads[-1][0] if self._loads else self._start
        self._loads.append((max(latest, min(when, self._clock())), rollouts))

    def back(self, groups: int) -> None:
        """A look found this many groups."""
        self._looks.append((self._clock(), groups))

    def end(self) -> None:
        """The batch is decided, and what was left is aborted."""
        self._end = self._clock()

    def metrics(self) -> dict[str, float]:
        """Seconds, by the names of docs/metrics.md."""
        most = math.ceil(_MOST * sum(groups for _, groups in self._looks))
        seen, since = 0, self._end
        for when, groups in self._looks:
            seen += groups
            if seen >= most:
                since = when
                break
        found = {"adaptive/time/generation": self._end - self._start, "adaptive/time/last_tenth": self._end - since}
        if self._slots:
            found["adaptive/time/idle_share"] = self._idle()
        return found

    def _idle(self) -> float:
        """Share of the slots that were empty, on average over the time; between two looks rollouts end evenly."""
        loads = [(when, min(rollouts, self._slots)) for when, rollouts in self._loads] or [(self._start, 0)]
        taken, (then, before) = 0.0, (self._start, loads[0][1])
        for when, now in [*loads, (self._end, loads[-1][1])]:
            taken += (when - then) * (before + now) / 2
            before, then = now, when
        seconds = self._end - self._start
        return 1.0 - taken / (self._slots * seconds) if seconds > 0 else 0.0
