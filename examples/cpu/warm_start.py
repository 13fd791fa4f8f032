"""Teach the tiny model a little by supervised learning, until pass rates spread from 0 to 1.

    python examples/cpu/warm_start.py --model DIR --data DIR --out DIR [--steps 600]

Reports the distribution of the exact pass rate: the probability that a response sampled at temperature 1 is the
canonical answer, which one forward pass gives.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IGNORED = -100


@dataclass
class Encoded:
    """Prompts with their answers, padded on the right."""

    ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


def encode(tokenizer: Any, rows: Any) -> Encoded:
    """Tokenize prompts and canonical answers.

    Args:
        tokenizer: The model's tokenizer.
        rows: A data frame in verl's format.

    Returns:
        The tokens; only those of the answer, its end included, have labels.
    """
    import torch

    pairs = []
    for prompt, reward_model in zip(rows["prompt"], rows["reward_model"], strict=True):
        question = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        answer = [*tokenizer.encode(reward_model["ground_truth"]), tokenizer.eos_token_id]
        pairs.append((question, answer))
    shape = (len(pairs), max(len(question) + len(answer) for question, answer in pairs))
    encoded = Encoded(
        ids=torch.full(shape, tokenizer.pad_token_id),
        labels=torch.full(shape, IGNORED),
        mask=torch.zeros(shape, dtype=torch.long),
    )
    for row, (question, answer) in enumerate(pairs):
        start, end = len(question), len(question) + len(answer)
        encoded.ids[row, :end] = torch.tensor(question + answer)
        encoded.labels[row, start:end] = torch.tensor(answer)
        encoded.mask[row, :end] = 1
    return encoded


def pass_rates(model: Any, encoded: Encoded) -> torch.Tensor:
    """The exact pass rate of every prompt at temperature 1, other spellings of the answer aside."""
    import torch

    with torch.no_grad():
        log_probs = model(encoded.ids, attention_mask=encoded.mask).logits[:, :-1].log_softmax(-1)
    labels = encoded.labels[:, 1:]
    picked = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (picked * (labels != IGNORED)).sum(-1).exp()


def warm_start(model_dir: Path, data: Path, out: Path, steps: int, batch: int, lr: float, seed: int) -> None:
    """Train and save.

    Args:
        model_dir: The model to start from.
        data: Folder with the supervised set, and the training set to report on.
        out: Folder to write to.
        steps: Number of updates.
        batch: Prompts per update.
        lr: Peak learning rate; 30 steps up, then linearly down to a tenth.
        seed: Seed of the batches.
    """
    import pandas as pd
    import torch
    from rich.progress import Progress
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # One thread: matrices this small gain little from a second one, and lose a factor of ten on a machine that is busy.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = pd.read_parquet(data / "warm.parquet")
    encoded = encode(tokenizer, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 30, 1 - 0.9 * step / steps))
    with Progress() as progress:
        bar = progress.add_task("warm start", total=steps)
        for _ in range(steps):
            pick = torch.randint(len(rows), (batch,))
            width = int(encoded.mask[pick].sum(-1).max())
            loss = model(
                encoded.ids[pick, :width],
                attention_mask=encoded.mask[pick, :width],
                labels=encoded.labels[pick, :width],
            ).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.update(bar, advance=1, description=f"warm start, loss {loss.item():.2f}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    train = pd.read_parquet(data / "train.parquet")
    report(pass_rates(model, encode(tokenizer, train)), train["data_source"])


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
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warm_start(options.model, options.data, options.out, options.steps, options.batch, options.lr, options.seed)


if __name__ == "__main__":
    main()
