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
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.rows: list[pd.DataFrame] = [pd.read_parquet(file) for file in files]
        self._encoded: list[Encoded] = [encode(self._tokenizer, rows) for rows in self.rows]

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

    def sampled(self, weights: Path, count: int = 4, longest: int = 12) -> dict[str, float]:
        """What responses at temperature 1 to the first file's prompts look like.

        Args:
            weights: folder of a Hugging Face model.
            count: responses to each prompt; always the same random numbers.
            longest: tokens of a response at most.

        Returns:
            ``entropy``: minus the mean log-probability of a token, in nats; ``length``: mean tokens, the end included.
        """
        tokenizer = self._tokenizer
        prompts = [
            tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)["input_ids"]
            for prompt in self.rows[0]["prompt"]
        ]
        width = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            made = model.generate(
                ids.repeat(count, 1),
                attention_mask=mask.repeat(count, 1),
                **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": longest},
                **{"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
                **{"output_logits": True, "return_dict_in_generate": True},
            )
        response = made.sequences[:, width:]
        log_probs = torch.stack(made.logits, 1).log_softmax(-1).gather(-1, response[..., None])[..., 0]
        ended = (response == tokenizer.eos_token_id).cumsum(1)
        own = ended - (response == tokenizer.eos_token_id).long() == 0  # up to the first end, and the end itself
        return {
            "entropy": float(-(log_probs * own).sum() / own.sum()),
            "length": float(own.sum(1).double().mean()),
        }
