"""Make a tiny Qwen2 model with a byte-level tokenizer, from nothing.

    python examples/cpu/make_model.py --out DIR

No download: the vocabulary is the 256 bytes and three special tokens, the weights are random. About 0.12 million
parameters; ``warm_start.py`` teaches it the tasks' format and some of the answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_adaptive.integration.selftest.tiny import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parameters = make_model(options.out, options.layers, options.hidden, options.seed)
    print(f"{parameters:,} parameters -> {options.out}")


if __name__ == "__main__":
    main()
