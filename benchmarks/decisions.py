"""How long decisions take: gates and allocations for 1,024 prompts of a large table, CERO's round over the whole pool.

    python -m benchmarks.decisions                     # a million prompts
    python -m benchmarks.decisions --prompts 10000000 --only cero

One line a benchmark: median and worst milliseconds of processor time over the repeats (decisions are one thread's work,
and the machine may have other), and the target where there is one. Exits with 1 if a median misses its target. Add a benchmark by decorating a function that takes the table and yields one callable per
repeat: setting up is not timed, calling it is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.cells import load_average, machine, to_json, versions, write_whole
from verl_adaptive.config import RunFacts
from verl_adaptive.groups import Groups
from verl_adaptive.policy import find_part
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.roles import Advantage, Allocator, Sampler
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.table import StatsTable

Calls = Iterator[Callable[[], object]]


@dataclass
class Benchmark:
    """A decision to time; ``target(M)`` is the most milliseconds it may take with M prompts, or None."""

    name: str
    calls: Callable[[StatsTable], Calls]
    target: Callable[[int], float | None]


BENCHMARKS: list[Benchmark] = []
ASKED = 1024


def benchmark(name: str, target: Callable[[int], float | None] = lambda m: None):
    """Register a benchmark."""

    def register(calls: Callable[[StatsTable], Calls]) -> Callable[[StatsTable], Calls]:
        BENCHMARKS.append(Benchmark(name, calls, target))
        return calls

    return register


def make_table(prompts: int) -> StatsTable:
    """A table with a past: random keys, streaks, counts."""
    rng = np.random.default_rng(0)
    table = StatsTable()
    keys = np.empty(prompts, dtype=KEY_DTYPE)
    keys["hi"], keys["lo"] = rng.integers(0, 2**63, prompts), np.arange(prompts)
    table.rows_for(keys)
    table.col("streak")[:] = rng.integers(0, 5, prompts)
    table.col("streak_kind")[:] = np.where(table.col("streak") > 0, rng.choice([-1, 1], prompts), 0)
    return table


def make_facts(table: StatsTable, steps: int = 500) -> RunFacts:
    return RunFacts(batch=256, n=8, steps=steps, prompts=len(table))


def make_groups(rows: np.ndarray, rate: np.ndarray, n: np.ndarray, seed: int) -> Groups:
    """Finished groups with binary rewards; arrays of shape ``(k,)``."""
    offsets = np.concatenate([[0], np.cumsum(n)]).astype(np.int64)
    total = int(offsets[-1])
    reward = (np.random.default_rng(seed).random(total) < np.repeat(rate, n)).astype(np.float64)
    none = np.zeros(len(rows), dtype=np.int32)
    return Groups(
        ticket=np.arange(len(rows)),
        row=rows,
        index=rows,
        failed=none.astype(bool),
        lag=none,
        offsets=offsets,
        reward=reward,
        signal=reward,
        success=reward,
        tokens=np.ones(total, dtype=np.int64),
        stage=np.zeros(total, dtype=np.int16),
        lost=none,
    )


def progress(step: int) -> Progress:
    return Progress(step=step, batch=256, draw=Draw(0, step))


def _sampler(name: str, table: StatsTable) -> Sampler:
    part = find_part("sampler", name)({})
    part.bind(table, make_facts(table))
    assert isinstance(part, Sampler)
    return part


@benchmark("greso: gate 1,024 prompts", target=lambda m: 5.0)
def greso_gate(table: StatsTable) -> Calls:
    """The stream's next prompts come in shuffled order, so rows are scattered over the table."""
    part = _sampler("greso", table)
    order = np.random.default_rng(1).permutation(len(table))
    for step in itertools.count(1):
        position = (step - 1) * ASKED + np.arange(ASKED)
        rows = order[position % len(table)]
        yield partial(part.admit, rows, position, progress(step))


@benchmark("greso: observe 1,024 groups, move both p", target=lambda m: 5.0)
def greso_observe(table: StatsTable) -> Calls:
    part = _sampler("greso", table)
    order = np.random.default_rng(1).permutation(len(table))
    for step in itertools.count(1):
        rows = order[((step - 1) * ASKED + np.arange(ASKED)) % len(table)]
        groups = make_groups(rows, np.full(ASKED, 0.5), np.full(ASKED, 8), step)

        def learn(groups=groups, step=step):
            table.observe(groups, step, tolerance=1e-6)
            part.observe(groups, progress(step))
            part.end_step(progress(step))

        yield learn


@benchmark("retire: gate 1,024 prompts", target=lambda m: 5.0)
def retire_gate(table: StatsTable) -> Calls:
    part = _sampler("retire", table)
    order = np.random.default_rng(1).permutation(len(table))
    for step in itertools.count(1):
        position = (step - 1) * ASKED + np.arange(ASKED)
        rows = order[position % len(table)]
        yield partial(part.admit, rows, position, progress(step))


@benchmark("pilot_commit: review 1,024 pilots", target=lambda m: 5.0)
def pilot_commit_review(table: StatsTable) -> Calls:
    part = find_part("allocator", "pilot_commit")({"form": "on_policy"})
    part.bind(table, make_facts(table))
    assert isinstance(part, Allocator)
    rng = np.random.default_rng(2)
    for step in itertools.count(1):
        rows = rng.permutation(len(table))[:ASKED]
        n = np.asarray(part.first(rows, None, progress(step)))
        groups = make_groups(rows, rng.random(ASKED), n, step)
        yield partial(part.review, groups, progress(step))


@benchmark("cero: a round over the whole pool", target=lambda m: 100.0 * max(1.0, m / 1e6))
def cero_round(table: StatsTable) -> Calls:
    """Pick, learn from the rewards, move every dual, plan the next round; the first call also scores the pool."""
    part = _sampler("cero", table)
    pool = np.arange(len(table))
    rate = np.random.default_rng(3).beta(0.4, 0.6, len(table))
    part.pick(pool, 1, progress(1))
    part.end_step(progress(1))

    for step in itertools.count(2):

        def one_round(step=step):
            pick = part.pick(pool, 1, progress(step))
            assert pick.n is not None
            groups = make_groups(pick.rows, rate[pick.rows], pick.n, step)
            part.observe(groups, progress(step))
            part.end_step(progress(step))

        yield one_round


@benchmark("mopps: pick 1,024 from the pool")
def mopps_pick(table: StatsTable) -> Calls:
    part = _sampler("mopps", table)
    pool = np.arange(len(table))
    for step in itertools.count(1):
        yield partial(part.pick, pool, ASKED, progress(step))


@benchmark("spread and memory: a step of 1,024 prompts", target=lambda m: 20.0 * max(1.0, m / 1e6))
def spread_step(table: StatsTable) -> Calls:
    """Draw from the pool, learn from the rewards in both parts, and say the advantages."""
    part = _sampler("spread", table)
    baseline = find_part("advantage", "memory")({})
    baseline.bind(table, make_facts(table))
    assert isinstance(baseline, Advantage)
    pool = np.arange(len(table))
    rate = np.random.default_rng(3).beta(0.4, 0.6, len(table))
    for step in itertools.count(1):

        def one_step(step=step):
            rows = part.pick(pool, ASKED, progress(step)).rows
            groups = make_groups(rows, rate[rows], np.ones(len(rows), dtype=np.int64), step)
            for role in (part, baseline):
                role.observe(groups, progress(step))
                role.end_step(progress(step))
            baseline.compute(groups.reward, groups.group_of, groups)

        yield one_step


def main() -> int:
    """Run the benchmarks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=float, default=1e6, help="rows of the table")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    prompts = int(arguments.prompts)
    table = make_table(prompts)
    missed, measured, load = False, [], load_average()
    for bench in BENCHMARKS:
        if arguments.only not in bench.name:
            continue
        calls = bench.calls(table)
        times = []
        next(calls)()  # warm up
        for call in itertools.islice(calls, arguments.repeats):
            begin = time.thread_time()
            call()
            times.append(1e3 * (time.thread_time() - begin))
        median, worst, target = float(np.median(times)), max(times), bench.target(prompts)
        missed |= target is not None and median > target
        measured.append({"name": bench.name, "prompts": prompts, "ms": median, "worst": worst, "target": target})
        goal = "" if target is None else f"   target {target:g} ms: {'ok' if median <= target else 'MISSED'}"
        print(f"{bench.name:44} {prompts:>10,} prompts {median:9.2f} ms, worst {worst:9.2f} ms{goal}")
    if arguments.json:
        command = " ".join(["python -m benchmarks.decisions", *sys.argv[1:]])
        head = {"command": command, "machine": machine(), "versions": versions("verl-adaptive", "numpy"), "load": load}
        write_whole(arguments.json, to_json({**head, "benchmarks": measured}, "benchmarks"))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
