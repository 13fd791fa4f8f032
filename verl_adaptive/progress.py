"""What the engine tells the roles about the step in hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_adaptive.rng import Draw

#: Prompts asked for beyond what the recent yield calls for, so that a second helping is rarely needed.
OVER_ASK = 1.1
#: Least yield that is reckoned with; a lower estimate would request far too much.
LEAST_YIELD = 1 / 64


@dataclass
class Progress:
    """State of one step; every count is of this step unless it says otherwise.

    Attributes:
        step: training step, from 1.
        batch: groups wanted, B.
        draw: random numbers of this step.
        kept: groups that may train so far.
        open: groups under way.
        rounds: times prompts were sent.
        chunk: prompts are picked in chunks, and this many came before; tells the random numbers of a step apart.
        epoch: full passes of the prompt stream over the data set, as a float (0.5: half of the first pass).
        planned: rollouts asked for so far.
        cap: hard cap on rollouts this step, or None.
        window: groups to be kept under way or ready now, where that is another number than ``batch``.
        keep_rate: of a batch that is refilled, the share of the groups that were kept in the last steps, failed ones left out;
            None where it is not known.
    """

    step: int
    batch: int
    draw: Draw
    kept: int = 0
    open: int = 0
    rounds: int = 0
    chunk: int = 0
    epoch: float = 0.0
    planned: int = 0
    cap: int | None = None
    window: int | None = None
    keep_rate: float | None = None

    @property
    def need(self) -> int:
        """Groups still missing."""
        return max(0, (self.batch if self.window is None else self.window) - self.kept)

    def wanted(self, over_ask: float = OVER_ASK) -> int:
        """Prompts to ask for, so that the batch gets the groups that are missing.

        As many as the recent yield calls for, and of those that may be lost a few beyond: a yield of nearly 1 asks for nearly
        as many as are missing.
        """
        missing = max(0, self.need - self.open)
        if self.keep_rate is None:
            return missing
        keep_rate = min(1.0, max(self.keep_rate, LEAST_YIELD))
        beyond = 1.0 + min(over_ask - 1.0, 1.0 - keep_rate)
        return math.ceil(beyond * missing / keep_rate - 1e-6)  # not one more for a rounding error

    @property
    def room(self) -> int:
        """Rollouts that may still be asked for this step."""
        return 2**62 if self.cap is None else max(0, self.cap - self.planned)

    @property
    def why_capped(self) -> str:
        """Why a step gets no further rollouts, where it has no room."""
        return f"the step's cap of {self.cap} rollouts was reached"
