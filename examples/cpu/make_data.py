"""Write train.parquet, val.parquet and warm.parquet: small reasoning-gym tasks in verl's format.

    python examples/cpu/make_data.py --out DIR [--seed 1]

The tasks are chosen so that a byte-level model of two layers finds some hopeless, some mastered and many in between,
which is what adaptive sampling is about. Questions are written tersely (bytes are tokens here); the generator, the
canonical answer and the verifier are reasoning-gym's own. No question occurs in two sets, and the same seed gives the
same rows.

The third set is for the supervised warm start, and its teacher is careless: in a share of the answers that depends on
the task, a number is off by one, or a word's last letter is doubled. A model that learned from it has skills that it
uses unreliably, as a language model has before reinforcement learning. After a faultless teacher, so small a model
would have little to gain from forty steps on questions that it has not seen.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

#: Limits in bytes. The chat template adds 4 tokens to a question, the end of a response is one more.
MAX_QUESTION_BYTES = 40
MAX_ANSWER_BYTES = 10

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One reasoning-gym data set at one level of difficulty.

    Attributes:
        name: Our name for the task; verl's ``data_source``, so validation reports each on its own.
        dataset: Name of the reasoning-gym data set.
        question: Writes an entry's question in few bytes.
        options: Options of the data set.
        train: Number of questions for reinforcement learning.
        val: Number of questions for validation.
        warm: Number of questions for the supervised warm start.
        slips: Share of the warm start's answers that are wrong.
    """

    name: str
    dataset: str
    question: Callable[[Row], str]
    options: dict[str, Any]
    train: int = 70
    val: int = 40
    warm: int = 1000
    slips: float = 0.0


def _expression(entry: Row) -> str:
    return entry["metadata"]["expression"].replace(" ", "") + "="


def _digits(fewest: int, most: int) -> dict[str, Any]:
    return {"min_terms": 2, "max_terms": 2, "min_digits": fewest, "max_digits": most}


def _gcd(entry: Row) -> str:
    return "gcd " + " ".join(str(number) for number in entry["metadata"]["numbers"])


def _backward(entry: Row) -> str:
    return "rev " + entry["metadata"]["word"]


def _letters_in_word(fewest: int, most: int) -> dict[str, Any]:
    return {"min_word_len": fewest, "max_word_len": most}


def _letters(entry: Row) -> str:
    return f"{entry['metadata']['target_letter']} in {' '.join(entry['metadata']['span'])}"


def _bits(entry: Row) -> str:
    return "bits " + entry["metadata"]["binary"]


TASKS: tuple[Task, ...] = (
    Task("sum_1digit", "chain_sum", _expression, _digits(1, 1), train=30, warm=90),
    Task("sum_2digits", "chain_sum", _expression, _digits(2, 2), train=80),
    Task("product", "products", _expression, _digits(1, 2), train=50, warm=300, slips=0.3),
    Task("gcd", "gcd", _gcd, {"min_value": 1, "max_value": 60}, slips=0.4),
    Task("backward_3", "spell_backward", _backward, _letters_in_word(3, 4), train=80, warm=400),
    Task("backward_5", "spell_backward", _backward, _letters_in_word(5, 6), train=80, slips=0.6),
    Task("backward_7", "spell_backward", _backward, _letters_in_word(7, 8), train=80, slips=0.9),
    Task("letters", "letter_counting", _letters, {"min_words": 1, "max_words": 2}, slips=0.5),
    Task("bits", "count_bits", _bits, {"min_n": 1, "max_n": 4095}, slips=0.8),
)


def _entries(task: Task, seed: int) -> Iterator[tuple[str, Row]]:
    """Yields distinct questions that fit, with their entries, in the generator's order."""
    from reasoning_gym.factory import create_dataset

    draws = 30 * (task.train + task.val + task.warm)
    seen: set[str] = set()
    for entry in create_dataset(task.dataset, seed=seed, size=draws, **task.options):
        question = task.question(entry)
        fits = len(question.encode()) <= MAX_QUESTION_BYTES and len(entry["answer"].encode()) <= MAX_ANSWER_BYTES
        # Capitals would be a second alphabet to learn; some verifiers ignore case anyway.
        if fits and question == question.lower() and question not in seen:
            seen.add(question)
            yield question, entry


def build(seed: int = 1) -> dict[str, list[Row]]:
    """Make the rows of the three sets.

    Args:
        seed: Seed of every generator.

    Returns:
        Rows in verl's format, under "train", "val" and "warm".

    Raises:
        ValueError: If a task has fewer distinct questions than are wanted.
    """
    sets: dict[str, list[Row]] = {"train": [], "val": [], "warm": []}
    for task in TASKS:
        wanted = {"val": task.val, "train": task.train, "warm": task.warm}
        drawn = list(islice(_entries(task, seed), sum(wanted.values())))
        if len(drawn) < sum(wanted.values()):
            raise ValueError(f"{task.name}: only {len(drawn)} distinct questions, {sum(wanted.values())} wanted")
        stream = iter(drawn)
        teacher = random.Random(f"{seed} {task.name}")
        for name, count in wanted.items():
            for question, entry in islice(stream, count):
                row = _row(task, question, entry, name, len(sets[name]))
                if name == "warm" and teacher.random() < task.slips:
                    row["reward_model"]["ground_truth"] = _slip(entry["answer"])
                sets[name].append(row)
    return sets


def _slip(answer: str) -> str:
    return str(int(answer) + 1) if answer.lstrip("-").isdigit() else answer + answer[-1]


def _row(task: Task, question: str, entry: Row, split: str, index: int) -> Row:
    # As JSON text, because the tasks' metadata have different fields and a parquet column has one type.
    verifiable = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return {
        "data_source": task.name,
        "prompt": [{"role": "user", "content": question}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {
            "split": split,
            "index": index,
            "dataset": task.dataset,
            "entry": json.dumps(verifiable, default=str),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.parquet, val.parquet and warm.parquet.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    import pandas as pd

    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in build(options.seed).items():
        pd.DataFrame(rows).to_parquet(options.out / f"{name}.parquet")
        print(f"{name}: {len(rows)} prompts -> {options.out / f'{name}.parquet'}")


if __name__ == "__main__":
    main()
