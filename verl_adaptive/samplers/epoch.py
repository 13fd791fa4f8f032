"""Epoch order: every prompt of verl's stream is rolled out. The sampler of plain GRPO and of dynamic sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from verl_adaptive.progress import Progress
from verl_adaptive.samplers.rounds import RoundConfig, SizedSampler


class Epoch(SizedSampler):
    """Epoch order: verl's stream as it comes.

    With ``round.prompts`` (DAPO's ``gen_batch_size``, 2503.14476) a step's first request is larger than the batch.
    """

    name: ClassVar[str] = "epoch"
    whole_batches: ClassVar[bool] = True

    @dataclass
    class Config:
        """``round``: how much a step first asks for."""

        round: RoundConfig = field(default_factory=RoundConfig)

    def admit(self, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
        return np.ones(len(rows), dtype=bool)
