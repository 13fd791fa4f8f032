"""How many prompts a generation round takes: as many as are missing, a fixed number, or GRESO's adaptive size.

The adaptive size is GRESO's (2506.02177; official code ``ray_trainer.py:1154-1162``): with Δ groups missing and ζ the
zero-variance share of the latest round, ``min(⌊β·Δ / (1 − ζ)⌋, D)``, never below a least size. Where we differ: the
official code divides by zero at ζ = 1 (we take D), and trains an under-filled batch after a round that it declared the
last (we go on until the batch is full or the step's ceilings are reached). With allocators that top up, groups that
wait for a top-up count as coming: what is missing, and what the latest round yielded, is reckoned with them, so that a
commit round does not ask for prompts the batch has no room for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl_adaptive.config import PER_STEP, check
from verl_adaptive.progress import OVER_ASK, Progress

__all__ = ["RoundConfig", "round_size"]

PUBLISHED = 1.25  # GRESO's β


@dataclass
class RoundConfig:
    """Size of a generation round.

    Attributes:
        prompts: D, prompts in a full round; null: as many as are missing (with ``adaptive``: 1.5 B, the paper's 384
            for B = 256).
        adaptive: shrink later rounds to what the latest round's yield calls for.
        safety: β, the over-ask that makes a second refill unlikely; null: 1.1, or with ``adaptive.rounds`` the paper's 1.25.
        least: prompts in the smallest adaptive round; null: B / 4, the official code's 64 for B = 256.
    """

    prompts: int | None = field(default=None, metadata=PER_STEP)
    adaptive: bool = False
    safety: float | None = field(default=None, metadata={"was": 1.25})
    least: int | None = field(default=None, metadata=PER_STEP)

    def validate(self, path: str) -> None:
        check(self.prompts is None or self.prompts >= 1, f"{path}.prompts", self.prompts, "must be 1 or greater")
        safety = self.safety
        check(safety is None or 1 <= safety < math.inf, f"{path}.safety", safety, "must be 1 or greater, or null")
        check(self.least is None or self.least >= 1, f"{path}.least", self.least, "must be 1 or greater")


def round_size(config: RoundConfig, progress: Progress) -> int:
    """Prompts for the next round; 0 when the batch is full or will be once the open groups are back."""
    missing = progress.need - progress.open
    if missing <= 0:
        return 0
    if progress.ordered:  # there are no rounds: the yield of the steps before says how much to ask for
        return config.prompts or progress.wanted(config.safety or OVER_ASK)
    if not config.adaptive:
        return missing if config.prompts is None else config.prompts
    full = config.prompts or -(-3 * progress.batch // 2)
    back = progress.last_finished + progress.open
    if back == 0:
        return full
    fertile = 1.0 - progress.last_degenerate / back
    if fertile <= 0.0:
        return full
    wanted = int((config.safety or PUBLISHED) * missing / fertile)
    least = max(1, progress.batch // 4) if config.least is None else config.least
    return max(min(wanted, full), min(least, full), 1)
