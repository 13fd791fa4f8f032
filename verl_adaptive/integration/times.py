"""Where the seconds of a ``sync`` step's generation went. Nothing is decided by them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["Times"]

#: Share of the groups after whose return the wait for the rest begins to count.
_MOST = 0.9


class Times:
    """Seconds from a step's first request to its batch, and of these, with only a tenth of its groups to come.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """The first request of a step goes out."""
        self._start = self._end = self._clock()
        self._looks: list[tuple[float, int]] = []

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
        return {"adaptive/time/generation": self._end - self._start, "adaptive/time/last_tenth": self._end - since}
