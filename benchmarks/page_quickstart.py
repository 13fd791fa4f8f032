"""The README's sentence and picture of the quickstart, from the results of one of its runs."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

from examples.cpu.quickstart import by_arm, chance, plot, result_of

__all__ = ["draw", "quickstart"]


def quickstart(found: dict[str, Any]) -> list[str]:
    """The sentence.

    Args:
        found: ``results/quickstart.json``: ``results`` as the quickstart writes them and the ``machine``.
    """
    results = [result_of(stored) for stored in found["results"]]
    arms = by_arm(results)
    first, *_, best = arms.values()
    ends = {name: sum(r.final for r in runs) / len(runs) for name, runs in arms.items()}
    shares = [r.reached(g.final) for r, g in zip(best, first, strict=True)]
    hit = [share / g.generated for share, g in zip(shares, first, strict=True) if share is not None]
    there = "" if len(hit) == len(best) else f" in {len(hit)} of {len(best)} seeds"
    reached = (
        f"; `{best[0].arm}` is at {first[0].arm}'s end after {sum(hit) / len(hit):.0%} of the rollouts{there}"
        if hit
        else ""
    )
    said = ", ".join(
        f"{value:.3f} with {'`' + name + '`' if name == best[0].arm else name}" for name, value in ends.items()
    )
    noise = chance(results)
    seeds = f"{len(best)} seeds" + (
        "" if noise is None else f"; by chance alone arms differ by up to {noise:.3f} at 95 %"
    )
    text = (
        f"From the quickstart: verl and vLLM on two CPU cores, {best[0].generated:,} rollouts and {best[0].updates} updates in "
        f"every run, a tiny model, more prompts than GRPO gets to. Held-out accuracy goes from {best[0].curve[0][1]:.3f} to "
        f"{said} ({seeds}){reached}."
    )
    return wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def draw(found: dict[str, Any], path: Path) -> None:
    """The picture."""
    plot([result_of(stored) for stored in found["results"]], path)
