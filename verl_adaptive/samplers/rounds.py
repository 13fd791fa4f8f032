"""How many prompts a step first asks for: as many as the recent yield calls for, or a fixed number.

What DAPO's and GRESO's codes call a round, a rollout batch of its own size, is here how much is asked for at once; what is
missing after it is asked for as soon as that is sure. GRESO's adaptive size (2506.02177; official code
``ray_trainer.py:1154-1162``), ``β·Δ / (1 − ζ)`` with Δ groups missing and ζ the zero-variance share, is
:meth:`~verl_adaptive.progress.Progress.wanted`, with the yield of the last steps in place of the last round's, and with β at
most 1 + ζ: where hardly a group is lost, hardly a prompt more is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from verl_adaptive.config import PER_STEP, RunFacts, check
from verl_adaptive.progress import OVER_ASK, Progress
from verl_adaptive.ranges import Count, Range
from verl_adaptive.roles import Sampler
from verl_adaptive.stats.table import StatsTable


@dataclass
class RoundConfig:
    """How much a step first asks for.

    Attributes:
        prompts: D, prompts of a step's first request (DAPO's ``gen_batch_size``); null: what the recent yield calls for.
        safety: β, the over-ask that makes a second request unlikely, where ``prompts`` is null (GRESO: 1.25).
    """

    prompts: Count | None = field(default=None, metadata=PER_STEP)
    safety: Annotated[float, Range("[1, inf)")] = OVER_ASK


class SizedSampler(Sampler):
    """A sampler with the option ``round``."""

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        prompts = self.config.round.prompts
        hint = f"must be at least the {facts.batch} prompts of a step's batch"
        check(prompts is None or prompts >= facts.batch, "adaptive.sampler.round.prompts", prompts, hint)

    def round_size(self, progress: Progress) -> int:
        """Prompts to ask for now; 0 when the batch is full or will be once the open groups are back."""
        if progress.need <= progress.open:
            return 0
        return self.config.round.prompts or progress.wanted(self.config.round.safety)
