"""What the four papers claim, beside what the same comparison gives here: one table of ``RESULTS.md``.

Each policy at its own best learning rate, paired by seed. A *speed-up* is the rollouts that the rival needs to reach its own final
accuracy, divided by those that the paper's method needs to get there. A method that never gets there counts with the whole budget,
which is kind to it. The verdict follows from the 95 % interval alone.

Seconds are those of the long answers, whose policies took turns on one machine. The training runs shared theirs with other work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cells import Key
from benchmarks.runs import Runs, pm, table
from benchmarks.sections import Row
from benchmarks.standings import POOL_NAMES
from verl_adaptive.significance import LEAST_SEEDS, interval

#: Pools whose presets are as published, the most like a user's first.
POOLS = ("pretrained/128", "real/base", "real/sparse", "tiny/base", "tiny/sparse")


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper.

    Attributes:
        method, rival: presets.
        what: what is measured, in words.
        paper: the paper's figure, in words.
        least: the least of the paper's figures.
        none: the value that stands for no gain.
        value: the figure of one seed, from the two runs; of ``TIMED`` from the seconds of their steps.
        form: how a figure is written.
    """

    method: str
    rival: str
    what: str
    paper: str
    least: float
    none: float
    value: Callable[..., float]
    form: str = "{:.2f}"


def speedup(runs: Runs, mine: Key, theirs: Key) -> float:
    """Rollouts of the rival to its own final accuracy, by those of the method to the same."""
    target = runs.final(theirs) or 0.0
    needed = runs.needed(theirs, target) or 1.0
    return needed / max(runs.needed(mine, target) or 1.0, 1e-9)


def saved(runs: Runs, mine: Key, theirs: Key) -> float:
    """Share of the rival's generated tokens, all of which verl trains, that the method does not train."""
    return 1 - runs.trained(mine, theirs)


def computed(runs: Runs, mine: Key, theirs: Key) -> float:
    """Share of the rival's compute that the method saves; as in the simulator 2 a token generated and 6 a token trained."""
    spent = 2 * runs.spent(mine, "tokens_generated") + 6 * runs.spent(mine, "tokens_trained")
    return 1 - spent / (8 * runs.spent(theirs, "tokens_generated"))


def gained(runs: Runs, mine: Key, theirs: Key) -> float:
    """Difference of final accuracies."""
    return (runs.final(mine) or 0.0) - (runs.final(theirs) or 0.0)


CLAIMS = (
    Claim("greso", "dapo", "speed-up over dynamic sampling", "1.5–3.4 ×", 1.5, 1.0, speedup),
    Claim("pilot_commit", "grpo", "speed-up over GRPO", "1.5–1.9 ×", 1.5, 1.0, speedup),
    Claim("pilot_commit", "dapo", "speed-up over dynamic sampling", "2.3–4.0 ×", 2.3, 1.0, speedup),
    Claim("aero", "grpo", "compute saved", "48 %", 0.48, 0.0, computed),
    Claim("aero", "grpo", "accuracy difference", "none, or a gain", 0.0, 0.0, gained, "{:+.3f}"),
    Claim("cero", "grpo", "accuracy difference", "+0.016 to +0.026", 0.016, 0.0, gained, "{:+.3f}"),
)

#: Arm of the long answers that stands for the rival → a claim in seconds.
TIMED = {
    "`dapo`": Claim(
        "greso",
        "dapo",
        "step faster than dynamic sampling's",
        "1.4–2.0 ×",
        1.4,
        1.0,
        lambda mine, theirs: theirs / mine,
    ),
    "verl": Claim("aero", "grpo", "time of a step saved", "45 %", 0.45, 0.0, lambda mine, theirs: 1 - mine / theirs),
}
#: Load average of a machine of two cores that does nothing beside a run.
ALONE = 3.0


def verdict(claim: Claim, values: Sequence[float]) -> str:
    """*confirmed*, *smaller*, *refuted* or *undecided*.

    >>> verdict(CLAIMS[1], [1.8, 1.9, 1.85]), verdict(CLAIMS[1], [1.2, 1.22, 1.21]), verdict(CLAIMS[1], [0.9, 1.1, 1.0])
    ('confirmed', 'smaller', 'refuted')
    >>> verdict(CLAIMS[1], [0.5, 2.5, 1.5]), verdict(CLAIMS[1], [3.0, 3.0])
    ('undecided', 'undecided')
    """
    if len(values) < LEAST_SEEDS:
        return "undecided"
    mean, half = interval(values)
    if mean - half >= claim.least:
        return "confirmed"
    if mean + half < claim.least:
        return "smaller" if mean - half > claim.none else "refuted"
    return "undecided"


def _free(runs: Mapping[str, Runs]) -> str:
    """What leaving zero-advantage rows out saves, without any method."""
    real = runs["real"]
    policy = ("base", "grpo", real.best_lr("base", "grpo"))
    shares = [saved(real, (*policy, seed), (*policy, seed)) for seed in real.seeds(*policy)]
    return f"`+adaptive=grpo` trains {pm(shares, '{:.0%}')} fewer tokens than verl's GRPO ({POOL_NAMES['real/base']}), without any method."


def _pairs(runs: Mapping[str, Runs], pool: str, claim: Claim) -> list[tuple[Key, Key]]:
    """A claim's runs in a pool, each policy at its best learning rate."""
    name, _, variant = pool.partition("/")
    one, other = ((variant, preset, runs[name].best_lr(variant, preset)) for preset in (claim.method, claim.rival))
    return [((*one, seed), (*other, seed)) for seed in runs[name].pairs(one, other)]


def _shared(runs: Mapping[str, Runs]) -> str:
    """Why the seconds of whole runs are left out."""
    pairs = [
        [runs[name].cells[key]["load"] for key in pair]
        for claim in TIMED.values()
        for pool in POOLS
        if (name := pool.partition("/")[0]) != "tiny"
        for pair in _pairs(runs, pool, claim)
    ]
    alone = sum(float(np.max(loads)) <= ALONE for loads in pairs)
    return (
        f"Seconds of whole runs are not told, since the runs shared their machine: of {len(pairs)} pairs of the two claims in time, "
        f"{alone or 'none'} had load averages of at most {ALONE:g} before and after, as a run alone has on two cores. Runs in turns "
        "on an idle machine would tell."
    )


def claims(runs: Mapping[str, Runs], long: Row) -> list[str]:
    """The section.

    Args:
        runs: by the first half of a pool's name.
        long: the long answers.
    """
    rows = []

    def add(claim: Claim, pool: str, values: Sequence[float]) -> None:
        told = f"{pm(values, claim.form)} ({len(values)})"
        rows.append([f"`{claim.method}`", claim.what, claim.paper, pool, told, verdict(claim, values)])

    for claim in CLAIMS:
        for pool in POOLS:
            found = runs[pool.partition("/")[0]]
            if values := [claim.value(found, *pair) for pair in _pairs(runs, pool, claim)]:
                add(claim, POOL_NAMES[pool], values)
    steps = {row["arm"]: [run["step"] for run in row["runs"]] for row in long["rows"]}
    for arm, claim in TIMED.items():
        add(claim, "long answers", list(map(claim.value, steps[f"`{claim.method}`"], steps[arm])))
    return [
        "## The papers' claims",
        "",
        "Each method at its best learning rate, paired by seed; ± half a 95 % interval (seeds). *Speed-up*: rollouts that the rival "
        "needs to its own final accuracy, by those of the method; a method that never gets there counts with the whole budget. "
        "*Compute*: 2 a token generated and 6 a token trained, beside verl's GRPO, which trains all that it generates. "
        "*Confirmed*: the interval lies above the least of the paper's figures. *Smaller*: above no gain and below the paper's. "
        "*Refuted*: below the paper's, and no gain within it. *Undecided*: the interval is too wide, or there are "
        "fewer than three seeds. Our `dapo` asks for "
        "what it expects to need, not for the fixed requests of GRESO's dynamic sampling. The "
        f"papers' models of 1.5–14 billion parameters and groups of up to 128 are out of reach here. {_free(runs)}",
        "",
        "*Step*: seconds of a step with [long answers](#long-answers-on-the-real-pipeline), where the policies took turns on one "
        f"machine (load averages of {min(long['load']):g} to {max(long['load']):g}; repeats in place of seeds), early in the second "
        "pass over the data. The rivals are our `dapo` and verl's own GRPO. "
        f"{_shared(runs)}",
        "",
        *table(["method", "claim", "paper", "pool", "here", "verdict"], rows),
    ]
