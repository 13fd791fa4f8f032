"""Teach the tiny model a little by supervised learning, until pass rates spread from 0 to 1.

    python examples/cpu/warm_start.py --model DIR --data DIR --out DIR [--steps 600]

Reports the distribution of the exact pass rate: the probability that a response sampled at temperature 1 is the
canonical answer, which one forward pass gives.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_adaptive.integration.selftest.tiny import encode, teach

if TYPE_CHECKING:
    import torch

Encoded = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


def lessons(file: Path) -> tuple[list[tuple[str, str]], Any]:
    """Questions and canonical answers of a file in verl's format, and their data sources."""
    import pandas as pd

    rows = pd.read_parquet(file)
    pairs = zip(rows["prompt"], rows["reward_model"], strict=True)
    return [(prompt[0]["content"], model["ground_truth"]) for prompt, model in pairs], rows["data_source"]


def pass_rates(model: Any, encoded: Encoded) -> torch.Tensor:
    """The exact pass rate of every prompt at temperature 1, other spellings of the answer aside."""
    import torch

    ids, labels, mask = encoded
    with torch.no_grad():
        log_probs = model(ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    labels = labels[:, 1:]
    picked = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (picked * (labels >= 0)).sum(-1).exp()


def warm_start(model_dir: Path, data: Path, out: Path, steps: int) -> None:
    """Teach the supervised set, save, and report on the training set."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teach(model_dir, out, lessons(data / "warm.parquet")[0], steps=steps)
    asked, sources = lessons(data / "train.parquet")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    report(pass_rates(model, encode(AutoTokenizer.from_pretrained(out), asked)), sources)


def report(rates: torch.Tensor, sources: Any) -> None:
    """Print the distribution of the pass rate, for all prompts and for each task."""
    import torch
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "prompts", "mean", "10%", "50%", "90%", "max", "near 0", "near 1")
    points = torch.tensor([0.1, 0.5, 0.9, 1.0])
    for name in [*dict.fromkeys(sources), "all"]:
        chosen = rates if name == "all" else rates[torch.tensor((sources == name).to_numpy())]
        quantiles = [f"{value:.2f}" for value in torch.quantile(chosen, points).tolist()]
        shares = [f"{share:.0%}" for share in ((chosen < 0.05).float().mean(), (chosen > 0.95).float().mean())]
        table.add_row(name, str(len(chosen)), f"{chosen.mean():.2f}", *quantiles, *shares)
    table.caption = "near 0: below 0.05; near 1: above 0.95"
    table.title = "Exact pass rate of the training prompts at temperature 1"
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model to start from")
    parser.add_argument("--data", type=Path, required=True, help="folder with warm.parquet and train.parquet")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    warm_start(options.model, options.data, options.out, options.steps)


if __name__ == "__main__":
    main()
