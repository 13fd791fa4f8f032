"""A sampler for the real pipeline that sees the exact pass rates: the bound that methods are held against, no method.

Before each step it reads the weights that the step will generate with, from the checkpoint of the step before
(``trainer.save_freq=1`` and ``hf_model`` among the contents of a checkpoint), makes one forward pass over the pool, and
draws prompts in proportion to p (1 - p). It reaches the trainer as any third party's part does, through the entry point
``sampler.oracle``; :func:`install` writes that entry point into a folder for ``PYTHONPATH``. Being an oracle it reads
files and weights, which decision code must not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from verl_adaptive.config import RunFacts
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.progress import Progress
from verl_adaptive.roles import Pick, Sampler
from verl_adaptive.stats.keys import dataset_keys
from verl_adaptive.stats.table import StatsTable

__all__ = ["Oracle", "draw_by_variance", "install"]


def draw_by_variance(rate: np.ndarray, uniform: np.ndarray, count: int) -> np.ndarray:
    """``count`` positions drawn without replacement in proportion to p (1 - p) (Efraimidis and Spirakis 2006).

    Args:
        rate: p, float64 ``(M,)``.
        uniform: random numbers in [0, 1), ``(M,)``.
    """
    score = np.log(np.maximum(uniform, 1e-300)) / np.maximum(rate * (1 - rate), 1e-9)
    return np.argsort(-score, kind="stable")[:count]


class Oracle(Sampler):
    """Draws prompts in proportion to p (1 - p), p exact."""

    name: ClassVar[str] = "oracle"
    kind: ClassVar[str] = "pool"

    @dataclass
    class Config:
        """``model``: folder of the starting weights; ``checkpoints``: verl's; ``data``: the training Parquet file."""

        model: str
        checkpoints: str
        data: str

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        from benchmarks.exact import Exact  # torch and transformers, only where the oracle runs

        super().bind(table, facts)
        self._exact = Exact(Path(self.config.model), Path(self.config.data))
        self._keys = dataset_keys(self._exact.rows[0].to_dict("records"))
        self._step, self._rate = -1, np.zeros(0)

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        if progress.step != self._step:
            self._step, self._rate = progress.step, self._rates(pool, progress.step)
        table = self.table
        u = progress.draw.uniform(f"oracle.{progress.round}", table.key_hi[pool], table.key_lo[pool])
        return Pick(pool[draw_by_variance(self._rate, u, count)])

    def _rates(self, pool: np.ndarray, step: int) -> np.ndarray:
        from benchmarks.exact import weights_of

        weights = weights_of(Path(self.config.checkpoints), step - 1) if step > 1 else Path(self.config.model)
        if not (weights / "config.json").exists():
            raise AdaptiveError(f"the oracle finds no weights in {weights}; it needs trainer.save_freq=1 and hf_model")
        row_of = self.table.rows_for(self._keys, create=False)
        by_row = np.zeros(len(self.table))
        by_row[row_of] = self._exact.rates(weights)[0]
        return by_row[pool]


def install(folder: Path) -> str:
    """Make the oracle a part that can be named, in processes that have the answer on their path.

    Args:
        folder: where the entry point goes.

    Returns:
        What to put on ``PYTHONPATH``.
    """
    info = folder / "verl_adaptive_oracle-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl-adaptive-oracle\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[verl_adaptive.policies]\nsampler.oracle = benchmarks.oracle_sampler:Oracle\n"
    )
    return f"{folder}:{Path(__file__).resolve().parents[1]}"
