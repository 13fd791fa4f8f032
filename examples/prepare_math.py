"""Write verl-format Parquet files of the math sets that the GPU recipes train on.

    python examples/prepare_math.py --set dapo+math --out data/math            (GRESO, AERO: 17 k + 7.5 k prompts)
    python examples/prepare_math.py --set dapo --half --out data/dapo_half     (CERO: half of DAPO-Math-17K)
    python examples/prepare_math.py --set polaris --out data/polaris           (Pilot-Commit, 4B)
    python examples/prepare_math.py --set deepmath --out data/deepmath         (Pilot-Commit, 1.5B)

``train.parquet`` and ``val.parquet`` (AIME 2024 and MATH-500) are written. Needs the package ``datasets``, which verl
brings, and access to the Hugging Face hub. This script was never run against the hub here: column names are those of
the sets' cards, and a set that has changed fails with the columns it has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


@dataclass(frozen=True)
class Source:
    """A data set on the hub.

    Attributes:
        path, config, split: as ``datasets.load_dataset`` takes them.
        question, answer: columns; a dot goes into a struct.
        read: makes the ground truth of the answer column's value.
    """

    path: str
    question: str
    answer: str
    config: str | None = None
    split: str = "train"
    read: Callable[[Any], str] = str


def last_boxed(text: str) -> str:
    """What stands in the last ``\\boxed{}`` of a solution.

    Raises:
        ValueError: there is none, or it is not closed.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        raise ValueError("the solution has no \\boxed{}")
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at]
    raise ValueError("the last \\boxed{} of the solution is not closed")


SOURCES: dict[str, Source] = {
    "dapo": Source("open-r1/DAPO-Math-17k-Processed", "prompt", "solution", config="all"),
    "math": Source("DigitalLearningGmbH/MATH-lighteval", "problem", "solution", read=last_boxed),
    "openr1": Source("open-r1/OpenR1-Math-220k", "problem", "answer", config="default"),
    "polaris": Source("POLARIS-Project/Polaris-Dataset-53K", "problem", "answer"),
    "deepmath": Source("zwhe99/DeepMath-103K", "question", "final_answer"),
    "aime24": Source("HuggingFaceH4/aime_2024", "problem", "answer"),
    "math500": Source("HuggingFaceH4/MATH-500", "problem", "answer", split="test"),
}


def convert(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Rows in verl's format; a question that came before, with the same answer, is left out.

    Args:
        name: one of :data:`SOURCES`.
        rows: the set's own rows.

    Raises:
        KeyError: a column is missing.
    """
    source = SOURCES[name]
    seen: set[tuple[str, str]] = set()
    for number, row in enumerate(rows):
        missing = [c for c in (source.question, source.answer) if c not in row]
        if missing:
            raise KeyError(f"{source.path} has no column {missing[0]!r}; it has {', '.join(row)}")
        question = str(row[source.question]).strip()
        try:
            answer = source.read(row[source.answer]).strip()
        except ValueError:
            continue
        if not question or not answer or (question, answer) in seen:
            continue
        seen.add((question, answer))
        yield {
            "data_source": name,
            "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            # A number of its own for every row: verl takes 0 where there is none.
            "extra_info": {"index": number, "split": source.split},
        }


def load(name: str) -> Iterable[Mapping[str, Any]]:
    """The set's rows, from the hub."""
    from datasets import load_dataset

    source = SOURCES[name]
    return load_dataset(source.path, source.config, split=source.split)


def write(rows: list[Row], path: Path) -> None:
    """Write rows as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"{len(rows):,} prompts in {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", required=True, help=f"one of {', '.join(SOURCES)}, or several joined by +")
    parser.add_argument("--out", required=True, type=Path, help="folder for train.parquet and val.parquet")
    parser.add_argument("--first", type=int, help="so many rows of each set only (GRESO: 30000 of openr1)")
    parser.add_argument("--half", action="store_true", help="a random half, the same one each time")
    args = parser.parse_args()
    names = args.set.split("+")
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        print(f"prepare_math.py: no set {unknown[0]!r}; there are {', '.join(SOURCES)}", file=sys.stderr)
        return 2
    train: list[Row] = []
    for name in names:
        rows = load(name)
        rows = (row for number, row in enumerate(rows) if args.first is None or number < args.first)
        train += convert(name, rows)
    if args.half:
        import random

        keep = set(random.Random(0).sample(range(len(train)), len(train) // 2))
        train = [row for number, row in enumerate(train) if number in keep]
    write(train, args.out / "train.parquet")
    write([row for name in ("aime24", "math500") for row in convert(name, load(name))], args.out / "val.parquet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
