"""The page on top of ``RESULTS.md``: every policy in every pool, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cells import interval
from benchmarks.headline import GRPO, POOLS, Standing, standings
from benchmarks.page_cpu import cpu_runs
from benchmarks.page_torch import torch_runs
from benchmarks.presets import FULL, SHIPPED
from benchmarks.runs import table

__all__ = ["JUDGED", "POOL_NAMES", "all_standings", "best_solo", "entry", "summary_page", "told_apart"]

#: Pool → how the tables call it.
POOL_NAMES = {
    "real/base": "real, as they come",
    "real/sparse": "real, sparse",
    "real/large": "real, large",
    "tiny/base": "tiny, as they come",
    "tiny/sparse": "tiny, sparse",
    "tiny/onepass": "tiny, one pass",
    "tiny/noise": "tiny, noisy",
}

#: How it is judged, below the table.
JUDGED = [
    "### How it is judged",
    "",
    "* **Equal generated rollouts.** Every run of a pool generates as many as GRPO (*real*: verl and vLLM on CPU, 3,840; "
    "*tiny*: one process, 7,680), dropped and surplus ones included, in as many a step unless the method decides otherwise, "
    "and makes as many optimizer updates a step.",
    "* **Each at its best learning rate** of those that its seeds ran at, the same for every policy where it could be "
    "afforded; which, every table says.",
    "* **Fair baselines.** GRPO with groups of 2 and 4 and the same rollouts a step (`grpo-2`, `grpo-4`) and of 16 "
    "(*halved16*), with a learning rate that falls to nothing (*decay*), with two epochs over each batch (*epochs2*), and "
    "REINFORCE: one rollout a prompt, less the batch's mean (`reinforce`). *Best GRPO* is the best of the group sizes and "
    "of the decayed ones.",
    "* **Held-out accuracy**, exact pass rates of prompts that were never trained on, mean over the last tenth of a run. "
    "Differences are within a seed; ± is half of the 95 % interval over seeds (Student's t). *Told apart*: that interval "
    "excludes zero, of three seeds or more; nothing is claimed of what is not.",
    "* **Which engine.** Most rows of the papers' presets in the real pools, and those of `full`, are of 0.1.0, in rounds; each "
    "cell says its version. In one process `aero` and `pilot_commit` were run anew with 0.2.0, in the usual and the sparse pool, "
    "`pilot_commit-pipelined` in the usual one; "
    "`full` and what else has parts of AERO or Pilot-Commit was not.",
    "* **Which form.** Rows `pilot_commit` are of `adaptive.allocator.form=on_policy`, the default when they were run, here and "
    "on every page. In the `sync` trainer the preset has the published form now: `pilot_commit-pipelined`, run in one process "
    "only, in the usual pool.",
    "* **Seeds for choosing are not seeds for showing.** Tables show seeds from 0; options of `solo` were chosen by seeds "
    "from 20, in one process only. `full` was chosen by seeds 0 to 4 of the tiny pool, which flatters it there.",
    f"* **`full`** was a preset of 0.1.0, until `solo` ([one less the other, pool by pool](../docs/solo.md#what-was-measured)). "
    f"It is a name for its parts now: `+adaptive={' '.join(FULL['full'])}`.",
    "* *As they come*: all difficulties. *Sparse*: most prompts hopeless or solved. *Large*: 610 prompts instead of 305. "
    "*One pass*: more prompts than a run has rollouts, so none is met twice. *Noisy*: one reward of ten is turned round.",
    "* `oracle` sees the exact pass rates and keeps groups: a bound for choosing prompts, and none for spending rollouts "
    "otherwise.",
    "",
]


def all_standings(tiny: dict[str, Any] | None, cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, Standing]]:
    """Of every pool that has runs: policies' standings by name; the oracle's under ``oracle`` in both benchmarks."""
    out = {}
    runs = {"real": cpu_runs(cells) if cells else None, "tiny": torch_runs(tiny) if tiny else None}
    for pool, variants in POOLS.items():
        if (made := runs[pool.partition("/")[0]]) is not None and (found := standings(made, variants)):
            if "oracle+keep_all" in found:
                found["oracle"] = replace(found.pop("oracle+keep_all"), name="oracle")
            out[pool] = found
    return out


def entry(standing: Standing | None) -> str:
    """The share and the gain, as "0.45, +0.012 ± 0.010"; "not run"."""
    if standing is None:
        return "not run"
    mean, half = interval(list(standing.gains.values()))
    share = "never" if standing.of_grpo is None else f"{standing.of_grpo:.2f}"
    if standing.name == "grpo":
        return share
    count = len(standing.gains)
    few = "" if count > 2 else f" ({count} seed{'s' * (count > 1)})"
    return f"{share}, {mean:+.3f}" + (f" ± {half:.3f}" if count > 1 else "") + few


def told_apart(of: Iterable[Standing]) -> tuple[list[str], list[str]]:
    """Names of those above GRPO and of those below it, at 95 % and by three seeds or more."""
    above, below = [], []
    for standing in of:
        mean, half = interval(list(standing.gains.values()))
        if standing.name != "grpo" and len(standing.gains) > 2 and abs(mean) > half:
            (above if mean > 0 else below).append(f"`{standing.name}`")
    return above, below


def summary_page(tiny: dict[str, Any] | None, cells: Sequence[dict[str, Any]]) -> list[str]:
    """The table of all policies in all pools, what is told apart, and how it is judged."""
    found = all_standings(tiny, cells)
    if not found:
        return []
    known = list(dict.fromkeys(name for made in found.values() for name in made))
    first = ["solo", "solo-1", "solo-2", "spo", "grpo", *(n for n in known if n.split()[0] in GRPO), "reinforce"]
    first += ["reinforce-spread", "solo decay", "solo epochs2", *SHIPPED, *FULL, "dapo-mixed", "oracle"]
    names = [name for name in dict.fromkeys(first) if name in known]
    rows = [
        [f"`{name}`", *(entry(made.get(name)) if name in made else "" for made in found.values())] for name in names
    ]
    counts = [f"{len(made['grpo'].gains)}" for made in found.values()]
    lines = [
        "## All at a glance",
        "",
        "Each entry: rollouts until GRPO's final held-out accuracy (groups of 8) as a share of GRPO's, median over seeds "
        "(*never*: not in the median seed), and accuracy at the end less GRPO's. Empty: not run.",
        "",
        *table(["policy", *(POOL_NAMES[pool] for pool in found)], [["*seeds of GRPO*", *counts], *rows]),
    ]
    for pool, made in found.items():
        above, below = told_apart(s for name, s in made.items() if name in names)
        lines.append(
            f"* {POOL_NAMES[pool][0].upper()}{POOL_NAMES[pool][1:]}: told apart above GRPO: {', '.join(above) or 'none'}; below: "
            f"{', '.join(below) or 'none'}. Best GRPO: `{made['grpo'].best_grpo}`."
        )
    return [*lines, "", *best_of(found), *goals(found), *JUDGED]


def best_solo(made: Mapping[str, Standing]) -> Standing | None:
    """The better of `solo` and of it with a decayed learning rate, as the best GRPO is found; None: not run."""
    plain, decayed = made.get("solo"), made.get("solo decay")
    if plain is None or decayed is None:
        return plain
    common = set(plain.gains) & set(decayed.gains)
    better = sum(decayed.gains[seed] - plain.gains[seed] for seed in common) > 0
    return decayed if better else plain


#: What `solo` was built for: a title, whose share, which, at most.
GOALS: tuple[tuple[str, Callable[[Mapping[str, Standing]], Standing | None], str, float], ...] = (
    ("`solo`: rollouts to GRPO's final accuracy", best_solo, "of_grpo", 0.45),
    ("`solo`: rollouts to the best GRPO's final accuracy", best_solo, "of_best_grpo", 0.60),
    ("`solo` with two epochs a batch: to GRPO's", lambda made: made.get("solo epochs2"), "of_grpo", 0.35),
)


def goals(found: dict[str, dict[str, Standing]]) -> list[str]:
    """What `solo` aims at, and how near it is: medians over seeds."""
    rows = []
    for title, whose, what, most in GOALS:
        row = []
        for made in found.values():
            standing = whose(made)
            share = getattr(standing, what) if standing else None
            seeds = len(standing.gains) if standing else 0
            said = "never: missed" if share is None else f"{share:.2f}: {'met' if share <= most else 'missed'}"
            said += ", decayed" if standing and standing.name == "solo decay" else ""
            row.append(f"{said} ({seeds})" if standing else "not run")
        rows.append([title, f"{most:.2f}", *row])
    below = [POOL_NAMES[pool] for pool, made in found.items() if "solo" in made and told_apart([made["solo"]])[1]]
    return [
        "What `solo` aims at, as shares of the budget (seeds in brackets); *decayed*: with a decayed learning rate, where that is "
        "better, as the best GRPO may have one:",
        "",
        *table(["", "at most", *(POOL_NAMES[pool] for pool in found)], rows),
        f"Pools where `solo` is told apart below GRPO (aim: none): {', '.join(below) or 'none of those that were run'}.",
        "",
    ]


def best_of(found: dict[str, dict[str, Standing]]) -> list[str]:
    """Rollouts until the best GRPO's final accuracy."""
    rows = []
    for pool, made in found.items():
        best = made["grpo"].best_grpo
        shown = [made.get(name) for name in ("solo", "solo decay", best, "full", "oracle")]
        rows.append(
            [
                POOL_NAMES[pool],
                f"`{best}`",
                *("" if s is None else "never" if s.of_best_grpo is None else f"{s.of_best_grpo:.2f}" for s in shown),
            ]
        )
    return [
        "Rollouts until the final accuracy of the best GRPO:",
        "",
        *table(["pool", "best GRPO", "`solo`", "`solo`, decayed", "itself", "`full`", "`oracle`"], rows),
    ]
