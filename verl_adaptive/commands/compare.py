"""Two runs side by side at the same bill: cut where both had generated the same number of rollouts.

examples:
  verl-adaptive compare checkpoints/project/grpo checkpoints/project/greso
  verl-adaptive compare "checkpoints/project/seed1_*" --limit 20 --visits 3
  verl-adaptive compare checkpoints/project/grpo checkpoints/project/greso --whole --json

A, B, B - A, and what chance explains of it (two standard errors over prompts): validation as verl measured it, and the
latest pass rate of the prompts that both runs visited at least --visits times. A snapshot cannot be cut.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from verl_adaptive.commands.arguments import add_json_option, add_store_options, count, how_read
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.text import clean

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "stores",
        metavar="RUN",
        nargs="+",
        help="A and B, each a store as for `stats`; or one folder or pattern that leads to two runs, the older one is A",
    )
    parser.add_argument(
        "--limit", metavar="N", type=count, default=5, help="prompts in each list: --limit 20 (default 5)"
    )
    parser.add_argument(
        "--visits",
        metavar="N",
        type=count,
        default=2,
        help="visits that a prompt needs in both: --visits 3 (default 2)",
    )
    parser.add_argument(
        "--whole", action="store_true", help="whole runs, whatever they generated (default: cut at common rollouts)"
    )
    add_json_option(parser)
    add_store_options(parser)


def run(args: argparse.Namespace) -> int:
    from verl_adaptive.commands.output import print_json
    from verl_adaptive.report.common import Measured, cut_at_common, matched, not_alike, validated, verdict
    from verl_adaptive.report.overview import overview
    from verl_adaptive.stats import open_runs

    opened = [run for store in args.stores for run in open_runs(store, **how_read(args))]
    if len(opened) != 2:
        names = ", ".join(run.source for run in opened[:6])
        raise AdaptiveError(f"two runs are compared, and {' '.join(args.stores)} leads to {len(opened)}: {names}")
    opened, cuts = cut_at_common(opened, whole=args.whole)
    facts = []
    for one, cut in zip(opened, cuts, strict=True):
        about = overview(one, history=cut.whole)
        if not cut.whole:
            about |= {"last_step": cut.step, "steps": cut.steps}
            about["flip_flopping"] = None
            about["ledger"] = {"rollouts": cut.rollouts, "tokens": cut.tokens}
        facts.append({**about, "hours": cut.hours, "cut": not cut.whole})
    prompts = matched(opened[0].prompts, opened[1].prompts, args.limit, args.visits)
    measures = validated(opened, cuts, whole=args.whole)
    rates, apart = None, not_alike(cuts)
    if prompts["prompts"]:
        values = prompts["mean_rate_a"], prompts["mean_rate_b"]
        rates = Measured("latest pass rate", *values, None if apart else prompts["standard_error"], prompts["prompts"])
    said = " ".join([apart, verdict(measures, None)] if measures else [apart]) if apart else verdict(measures, rates)
    if args.json:
        shown = [{**asdict(m), "beyond_chance": m.beyond, "apart": m.apart} for m in measures]
        print_json({"a": facts[0], "b": facts[1], "validation": shown, "matched": prompts, "verdict": said})
    else:
        _print(facts, measures, rates, prompts, said, alike=not apart)
    return 0


def _print(
    facts: list[dict[str, Any]], measures: list[Any], rates: Any, matched: dict[str, Any], said: str, *, alike: bool
) -> None:
    from verl_adaptive.commands.output import console, key_digits, number, share, table

    out = console()
    out.print(clean(said))
    if alike and any(f["cut"] for f in facts):
        out.print(
            "Both runs up to the rollouts that both have generated; --whole takes them as they are.", soft_wrap=True
        )
    out.print()

    def ledger(f: dict[str, Any], *path: str) -> Any:
        value: Any = f.get("ledger") or {}
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def row(label: str, values: list[Any]) -> tuple[str, ...]:
        known = all(isinstance(v, int | float) for v in values)
        return label, *map(number, values), _signed(values[1] - values[0]) if known else "", ""

    def measure(m: Any) -> tuple[str, ...]:
        chance = "-" if m.error is None else f"±{2 * m.error:.3f}{' *' if m.beyond else ''}"
        return m.name, f"{m.a:.3f}", f"{m.b:.3f}", f"{m.b - m.a:+.3f}", chance

    def validation_of(m: Any) -> tuple[str, ...]:
        known = all(r is not None for r in m.rollouts)
        return row("rollouts by then" if known else "step of it", list(m.rollouts if known else m.steps))

    def percent(label: str, values: list[Any]) -> tuple[str, ...]:
        known = all(isinstance(v, int | float) and v == v for v in values)
        return label, *map(share, values), f"{100 * (values[1] - values[0]):+.1f} points" if known else "", ""

    def trained(f: dict[str, Any]) -> float | None:
        whole = ledger(f, "rollouts", "generated")
        return ledger(f, "rollouts", "trained") / whole if whole else None

    rows: list[tuple[str, ...]] = [
        *((f"validation {m[0]}", *m[1:]) for m in map(measure, measures)),
        *([validation_of(measures[0])] if measures else []),
        *([measure(rates)] if rates is not None else []),
        row("rollouts generated", [ledger(f, "rollouts", "generated") for f in facts]),
        row("rollouts trained", [ledger(f, "rollouts", "trained") for f in facts]),
        percent("share trained", [trained(f) for f in facts]),
        row("tokens generated", [ledger(f, "tokens", "generated") for f in facts]),
        row("tokens trained", [ledger(f, "tokens", "trained") for f in facts]),
        row("hours", [f["hours"] for f in facts]),
        *(
            row(label, [f.get(key) for f in facts])
            for label, key in (("steps", "steps"), ("prompts visited", "visited"), ("visits", "visits"))
        ),
        percent("pass rate, all visits", [f["pass_rate"] for f in facts]),
        *(
            row(label, [f.get(key) for f in facts])
            for label, key in (
                ("never solved", "never_solved"),
                ("always solved", "always_solved"),
                ("regressed", "regressed"),
                ("flip-flopping", "flip_flopping"),
                ("retired", "retired"),
            )
            if (all if key == "flip_flopping" else any)(f.get(key) is not None for f in facts)
        ),
    ]
    for letter, f in zip("AB", facts, strict=True):
        named = ", ".join(str(f[key]) for key in ("preset", "run") if f.get(key))
        out.print(clean(f"{letter}: {named or f['kind']} ({f['store']})"))
    heads = [("", "left"), ("A", "right"), ("B", "right"), ("B-A", "right"), ("chance", "right")]
    out.print(table(heads, rows))
    if any(m.beyond for m in [*measures, *([rates] if rates else [])]):
        out.print("* more than chance explains (two standard errors over prompts)")
    out.print(
        f"{number(matched['prompts'])} prompts visited by both at least {matched['least_visits']} times "
        f"({number(matched['only_a'])} by A only, {number(matched['only_b'])} by B only)",
        soft_wrap=True,
    )
    if matched["prompts"]:
        out.print(
            f"clearly better in B {number(matched['clearly_better_in_b'])}, clearly worse "
            f"{number(matched['clearly_worse_in_b'])}; of these at most about {matched['clearly_by_chance']:g} by chance",
            soft_wrap=True,
        )
    for title, key in (("clearest gains in B", "largest_gains_in_b"), ("clearest losses in B", "largest_losses_in_b")):
        if matched[key]:
            digits = key_digits(out)
            lines = [(r["key"][:digits], r["source"], f"{r['a']:.3f}", f"{r['b']:.3f}") for r in matched[key]]
            columns = [("key", "left"), ("source", "left"), ("A", "right"), ("B", "right")]
            out.print()
            out.print(table(columns, lines, title, cut="source", width=out.width))


def _signed(value: float) -> str:
    from verl_adaptive.commands.output import number

    return f"{'+' if value >= 0 else '-'}{number(abs(value))}"
