"""How long verl's partition of a batch takes on the items of a tensor, of an array and of a list.

python upstream/01-balance-on-lists/measure.py     (any verl, patched or not: it calls the loop below the patch)

CPU time of the process, the best of several rounds, the three in turn: other work on the machine hardly shows.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from verl.utils.seqlen_balancing import calculate_workload, karmarkar_karp


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    print(f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    print("| rows | ranks | tensor, ms | array, ms | list with its tolist(), ms | tensor / list |")
    print("|---|---|---|---|---|---|")
    for rows, ranks in ((512, 8), (1024, 8), (4096, 8), (4096, 64), (16384, 64)):
        work = calculate_workload(torch.randint(64, 8192, (rows,), generator=torch.Generator().manual_seed(0)))
        kinds: dict[str, Callable[[], object]] = {"tensor": lambda w=work: w, "array": lambda w=work: w.numpy()}
        kinds["list"] = lambda w=work: w.tolist()
        best = dict.fromkeys(kinds, float("inf"))
        for _ in range(3 if rows > 4096 else 5):
            for kind, give in kinds.items():
                best[kind] = min(best[kind], seconds(lambda give=give: karmarkar_karp(give(), ranks, True)))  # noqa: B023
        ms = {kind: f"{1e3 * s:.1f}" for kind, s in best.items()}
        print(
            f"| {rows} | {ranks} | {ms['tensor']} | {ms['array']} | {ms['list']} | {best['tensor'] / best['list']:.1f} × |"
        )


if __name__ == "__main__":
    main()
