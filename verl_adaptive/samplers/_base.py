"""The sampler role: which prompts are rolled out next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_adaptive._role import Role
from verl_adaptive.progress import Progress

__all__ = ["Pick", "Sampler"]


@dataclass
class Pick:
    """What a pool sampler chose.

    Attributes:
        rows: int64 ``(k,)``, table rows, in the order to submit.
        n: int64 ``(k,)``, rollouts planned for each, or None to leave that to the allocator.
    """

    rows: np.ndarray
    n: np.ndarray | None = None


class Sampler(Role):
    """Gates verl's prompt stream (``kind = "stream"``) or picks from the whole pool (``kind = "pool"``).

    Attributes:
        kind: which of :meth:`admit` and :meth:`pick` the engine calls.
        whole_batches: keep verl's own batching of the stream (drop_last included); plain epoch order does.
        plans_steps: plans a step's prompts at once, from the results of all steps before it; an asynchronous trainer
            must then not run ahead (``num_warmup_batches=0``).
    """

    role: ClassVar[str] = "sampler"
    kind: ClassVar[str] = "stream"
    whole_batches: ClassVar[bool] = False
    plans_steps: ClassVar[bool] = False

    def round_size(self, progress: Progress) -> int:
        """Prompts wanted in the next round; groups waiting for a top-up may yet fill the batch, so they count."""
        return max(0, progress.need - progress.open)

    def admit(self, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
        """Decide on prompts of the stream, in its order.

        Args:
            rows: int64 ``(k,)``, table rows.
            position: int64 ``(k,)``, their positions in the stream since the run began (the draw's salt).
            progress: the step.

        Returns:
            bool ``(k,)``: True to roll the prompt out.
        """
        return np.ones(len(rows), dtype=bool)

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        """Choose from the pool.

        Args:
            pool: int64 ``(M,)``, table rows of the data set's distinct prompts.
            count: prompts wanted (``round_size``'s answer).
            progress: the step.
        """
        raise TypeError(f"{type(self).__name__} is a stream sampler")

    @property
    def finished(self) -> bool:
        """True when the sampler will never give another prompt: training ends after the current step."""
        return False
