"""Exact pass rates on the real pipeline: one forward pass, because every task has one canonical answer.

Other spellings that a verifier also accepts are not counted, so a rate is a lower bound; it is off by little where the
answer is a number or a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.cpu.warm_start import Encoded, encode, pass_rates

__all__ = ["Exact", "weights_of"]


def weights_of(checkpoints: Path, step: int) -> Path:
    """Where verl writes the Hugging Face model of a step (``save_contents`` with ``hf_model``)."""
    return checkpoints / f"global_step_{step}" / "actor" / "huggingface"


class Exact:
    """Exact pass rates of the prompts of some Parquet files, under any checkpoint of one model.

    Args:
        model: folder of the starting model, for its tokenizer.
        files: verl data files.
    """

    def __init__(self, model: Path, *files: Path) -> None:
        disable_progress_bar()  # one for each step's weights would hide what else is said
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.rows: list[pd.DataFrame] = [pd.read_parquet(file) for file in files]
        self._encoded: list[Encoded] = [encode(tokenizer, rows) for rows in self.rows]

    def rates(self, weights: Path) -> list[np.ndarray]:
        """Pass rates at temperature 1, float64, one array a file.

        Args:
            weights: folder of a Hugging Face model.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
            return [pass_rates(model, encoded).double().numpy() for encoded in self._encoded]
        finally:
            torch.set_num_threads(threads)
