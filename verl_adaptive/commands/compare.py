"""Two runs side by side: their budgets, and how the prompts that both visited came out.

examples:
  verl-adaptive compare checkpoints/project/grpo checkpoints/project/greso
  verl-adaptive compare runs.sqlite#project/grpo runs.sqlite#project/greso --limit 20
  verl-adaptive compare checkpoints/project/grpo checkpoints/project/greso --json
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from verl_adaptive.commands.arguments import add_json_option, add_store_options, count

__all__ = ["compare", "configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "one", metavar="A", help="a store, as for `stats`: a folder of checkpoints, a journal, a snapshot"
    )
    parser.add_argument("other", metavar="B", help="another; #RUN at the end names a run of its own")
    parser.add_argument(
        "--limit", metavar="N", type=count, default=5, help="prompts in each list: --limit 20 (default 5)"
    )
    add_json_option(parser)
    add_store_options(parser)


def run(args: argparse.Namespace) -> int:
    from verl_adaptive.commands.output import print_json
    from verl_adaptive.report.opening import open_prompts
    from verl_adaptive.report.overview import overview

    # --run names a run of both; different ones are named with #RUN
    opened = [
        open_prompts(s, run=args.run, tolerance=args.tolerance, id_key=args.id_key) for s in (args.one, args.other)
    ]
    facts = [overview(o) for o in opened]
    matched = compare(opened[0].prompts, opened[1].prompts, args.limit)
    if args.json:
        print_json({"a": facts[0], "b": facts[1], "matched": matched})
    else:
        _print(facts, matched)
    return 0


def compare(one: Any, other: Any, limit: int) -> dict[str, Any]:
    """Prompts that both visited.

    Returns:
        Counts, mean latest pass rates, and the prompts that differ most, in both directions.
    """
    rows = other.table.rows_for(one.table.keys, create=False)
    with np.errstate(invalid="ignore"):
        both = (rows >= 0) & (one.table.col("visits") > 0)
        both[both] = other.table.col("visits")[rows[both]] > 0
    mine = np.flatnonzero(both)
    theirs = rows[mine]
    a = one.number("last_rate")[mine]
    b = other.number("last_rate")[theirs]
    difference = b - a
    order = np.lexsort((one.table.key_lo[mine], one.table.key_hi[mine], difference))

    def listed(chosen: np.ndarray) -> list[dict[str, Any]]:
        keys = one.values("key", mine[chosen])
        sources = one.values("source", mine[chosen])
        return [
            {"key": k, "source": s, "a": float(a[i]), "b": float(b[i])}
            for k, s, i in zip(keys, sources, chosen.tolist(), strict=True)
        ]

    return {
        "prompts": len(mine),
        "only_a": int((one.table.col("visits") > 0).sum()) - len(mine),
        "only_b": int((other.table.col("visits") > 0).sum()) - len(mine),
        "mean_rate_a": float(a.mean()) if len(mine) else None,
        "mean_rate_b": float(b.mean()) if len(mine) else None,
        "better_in_b": int((difference > 0).sum()),
        "worse_in_b": int((difference < 0).sum()),
        "largest_gains_in_b": listed(np.array([i for i in order[::-1][:limit] if difference[i] > 0], dtype=np.int64)),
        "largest_losses_in_b": listed(np.array([i for i in order[:limit] if difference[i] < 0], dtype=np.int64)),
    }


def _print(facts: list[dict[str, Any]], matched: dict[str, Any]) -> None:
    from verl_adaptive.commands.output import console, key_digits, number, share, table

    out = console()

    def ledger(f: dict[str, Any], *path: str) -> float | None:
        value: Any = f.get("ledger") or {}
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def trained_share(f: dict[str, Any]) -> str:
        return share(ledger(f, "rollouts", "trained"), ledger(f, "rollouts", "generated"))

    rows: list[tuple[str, ...]] = [
        ("store", facts[0]["store"], facts[1]["store"]),
        *((label, *(str(f.get(key) or "-") for f in facts)) for label, key in (("run", "run"), ("preset", "preset"))),
        *(
            (label, *(number(f.get(key)) for f in facts))
            for label, key in (("steps", "steps"), ("prompts", "prompts"), ("visited", "visited"), ("visits", "visits"))
        ),
        ("rollouts generated", *(number(ledger(f, "rollouts", "generated")) for f in facts)),
        ("rollouts trained", *(number(ledger(f, "rollouts", "trained")) for f in facts)),
        ("share trained", *(trained_share(f) for f in facts)),
        ("tokens generated", *(number(ledger(f, "tokens", "generated")) for f in facts)),
        ("tokens trained", *(number(ledger(f, "tokens", "trained")) for f in facts)),
        ("pass rate, all visits", *(share(f["pass_rate"]) for f in facts)),
        *(
            (label, *(number(f.get(key)) for f in facts))
            for label, key in (
                ("never solved", "never_solved"),
                ("always solved", "always_solved"),
                ("regressed", "regressed"),
                ("flip-flopping", "flip_flopping"),
                ("retired", "retired"),
            )
        ),
    ]
    out.print(table([("", "left"), ("A", "left"), ("B", "left")], rows))
    out.print(
        f"{number(matched['prompts'])} prompts visited by both ({number(matched['only_a'])} by A only, "
        f"{number(matched['only_b'])} by B only)"
    )
    if matched["prompts"]:
        out.print(
            f"latest pass rate of those: A {matched['mean_rate_a']:.3f}, B {matched['mean_rate_b']:.3f}; "
            f"better in B {number(matched['better_in_b'])}, worse in B {number(matched['worse_in_b'])}"
        )
    for title, key in (("largest gains in B", "largest_gains_in_b"), ("largest losses in B", "largest_losses_in_b")):
        if matched[key]:
            digits = key_digits(out)
            lines = [(r["key"][:digits], r["source"], f"{r['a']:.3f}", f"{r['b']:.3f}") for r in matched[key]]
            columns = [("key", "left"), ("source", "left"), ("A", "right"), ("B", "right")]
            out.print()
            out.print(table(columns, lines, title, cut="source", width=out.width))
