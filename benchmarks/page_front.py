"""The README's evidence: a line a pool, and what of the papers' presets is told apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from textwrap import wrap
from typing import Any

from benchmarks.headline import Standing
from benchmarks.page_summary import POOL_NAMES, all_standings, best_solo, entry, told_apart
from benchmarks.presets import SHIPPED
from benchmarks.runs import table

__all__ = ["PAPERS", "SHOWN", "readme"]

WIDTH = 120
WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
#: The pools that the README has lines of.
SHOWN = ("real/base", "real/sparse", "real/large", "tiny/base", "tiny/sparse", "tiny/onepass")
PAPERS = [name for name in SHIPPED if name not in ("grpo", "dapo-sized")]  # the words that one can write


def readme(tiny: dict[str, Any] | None, cells: Sequence[dict[str, Any]]) -> list[str]:
    """The README's part, its sentences wrapped."""
    lines = front(all_standings(tiny, cells))
    return [part for line in lines for part in (wrap(line, WIDTH, **WHOLE) if line[:1].isalpha() else [line])]


def front(found: dict[str, dict[str, Standing]]) -> list[str]:
    """Six lines of evidence, one sentence and a chart."""
    pools = [pool for pool in SHOWN if pool in found]
    if not pools:
        return []
    rows = []
    for pool in pools:
        made = found[pool]
        best = made["grpo"].best_grpo
        solo = best_solo(made)
        seeds = len((solo or made["grpo"]).gains)
        rows.append(
            [
                POOL_NAMES[pool],
                str(seeds),
                entry(solo) + (" (decayed)" if solo is not None and solo.name == "solo decay" else ""),
                f"{entry(made[best])} (`{best}`)",
                entry(made.get("solo epochs2")),
                entry(made.get("grpo epochs2")),
            ]
        )
    tellings = [(pool, *told_apart(found[pool][name] for name in PAPERS if name in found[pool])) for pool in pools]
    sides = [[f"{', '.join(t[side])} ({POOL_NAMES[t[0]]})" for t in tellings if t[side]] for side in (1, 2)]
    told = "; ".join(
        f"{word} it {', '.join(side) or 'none'}" for word, side in zip(("above", "below"), sides, strict=True)
    )
    how = (
        "An entry: the share of GRPO's rollouts (groups of 8) until GRPO's final held-out accuracy, and accuracy at the end "
        "less GRPO's"
    )
    if (shown := found[pools[0]].get("solo")) and shown.of_grpo:
        gain = mean(shown.gains.values())
        how = (
            f'"{entry(shown)}" says: where GRPO (groups of 8) ends after {shown.of_grpo:.0%} of its '
            f"rollouts, {abs(gain):.3f} {'above' if gain > 0 else 'below'} it at the end"
        )
    return [
        "Tiny models, no GPU: *real* is verl and vLLM on CPU, *tiny* one process; *sparse*: most prompts solved or hopeless, "
        "*large*: twice the prompts. Held-out accuracy at the same rollouts, each at its "
        f"best learning rate. {how}, ± half a 95 % interval.",
        "",
        *table(
            [
                "pool",
                "seeds",
                "`solo`, best decay",
                "GRPO, best n and decay",
                "`solo`, two epochs",
                "GRPO, two epochs",
            ],
            rows,
        ),
        "Two epochs (`actor_rollout_ref.actor.ppo_epochs=2`) train twice. "
        f"Papers' presets (Pilot-Commit on-policy) beyond chance: {told}. [Results](benchmarks/RESULTS.md).",
        "",
        "![held-out accuracy by rollouts](benchmarks/figures/front.svg)",
    ]
