"""Arms of an experiment side by side, a few seeds each; or two runs, prompt by prompt.

examples:
  verl-adaptive compare 'grpo=runs/grpo-s*' 'solo=runs/solo-s*'
  verl-adaptive compare 'grpo=runs/grpo-s*' 'solo=runs/solo-s*' --by hours --plot arms.svg --csv curves.csv
  verl-adaptive compare runs/grpo-s1 runs/solo-s1 --limit 20

An arm is NAME=RUNS: runs of one method with different seeds; the first arm is what the others are compared with. Runs of
one seed are paired, and compared by verl's validation where all arms had spent the same (--whole: at their ends). ± is half of
a 95 % confidence interval (Student's t, paired by seed). Of two single runs there is also the latest pass rate of the prompts
that both visited at least --visits times.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.commands.arguments import (
    add_json_option,
    add_store_options,
    count,
    finite,
    identity_from,
    refuse_overwrite,
)
from verl_adaptive.commands.export import write_pages
from verl_adaptive.commands.output import console, key_digits, note, print_json, table
from verl_adaptive.errors import AdaptiveError, UsageError, lacks_extra
from verl_adaptive.ledger import Ledger
from verl_adaptive.report.arms import (
    COSTS,
    Outcome,
    Trials,
    early,
    mean_curve,
    median,
    names_of,
    outcomes,
    plot,
    read,
    seed_in,
    seeds_of,
    sentence,
)
from verl_adaptive.significance import interval, sampling, significant
from verl_adaptive.stats import Run, open_runs
from verl_adaptive.stats.atomic import write_file
from verl_adaptive.text import clean, counted, number, share, span

_PLOTS = (".png", ".svg", ".pdf", ".html")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arms",
        metavar="[NAME=]RUNS",
        nargs="+",
        help="the runs of an arm: a run, a folder or a pattern, as for `stats`; one word alone that leads to two runs compares "
        "these, the older one first; of more runs without a name, those whose names differ in the seed only are an arm",
    )
    parser.add_argument(
        "--by", choices=tuple(COSTS), default="rollouts", help="the cost that is equal (default rollouts)"
    )
    parser.add_argument(
        "--target",
        metavar="X",
        type=finite,
        help="the value whose cost is asked for: --target 0.6 (default: the first arm's final value)",
    )
    parser.add_argument(
        "--whole", action="store_true", help="whole runs, whatever they cost (default: cut at the common cost)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the validation curves: .png, .svg, .pdf, or .html with the table"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the validation curves, a row for each validation")
    parser.add_argument("--overwrite", action="store_true", help="replace the files if they exist")
    parser.add_argument(
        "--limit", metavar="N", type=count, default=5, help="two runs: prompts in each list: --limit 20 (default 5)"
    )
    parser.add_argument(
        "--visits",
        metavar="N",
        type=count,
        default=2,
        help="two runs: visits that a prompt needs in both: --visits 3 (default 2)",
    )
    add_json_option(parser)
    add_store_options(parser)


def run(args: argparse.Namespace) -> int:
    for path in filter(None, (args.plot, args.csv)):
        refuse_overwrite(path, args.overwrite)
    if args.plot is not None and os.path.splitext(args.plot)[1].lower() not in _PLOTS:
        raise UsageError(f"--plot {args.plot}: the file's ending must be one of {', '.join(_PLOTS)}")
    if args.plot is not None and args.csv is not None and os.path.realpath(args.plot) == os.path.realpath(args.csv):
        raise UsageError(f"--csv {args.csv} is the file of --plot; name another one")
    arms = _arms(args)
    pair = [runs[0] for runs in arms.values()] if len(arms) == 2 == sum(map(len, arms.values())) else []
    try:
        trials = read(arms, args.by)
    except AdaptiveError as error:
        if not pair or args.plot or args.csv:
            raise
        note(f"not compared by validation: {error}")
        trials = None  # their prompts are compared
    found: dict[str, Any] = {}
    unpaired = all(len(runs) == 1 for runs in arms.values())
    if trials is not None:
        results = outcomes(trials.arms, target=args.target, whole=args.whole)
        said = f"{trials.metric}: {_over_prompts(trials, results, args.by) or sentence(results, args.by, args.target)}"
        found = {
            "metric": trials.metric,
            "by": args.by,
            "arms": [_record(one, arms[one.name], unpaired) for one in results],
        }
    prompts = _prompts(pair, args) if pair else {}
    if trials is None:
        said = prompts["said"]
    for text in trials.missing if trials is not None else [text for run in pair for text in run.missing()]:
        note(text)
    # the files first: a pipe that reads the table may close early, as that of `head` does
    if trials is not None and args.csv:
        _write_curves(trials, args.csv, unpaired)
        note(f"{args.csv} written")
    if trials is not None and args.plot:
        try:
            if args.plot.lower().endswith(".html"):
                page = _page(trials, results, said, args.by).encode("utf-8", "backslashreplace")
                write_file(Path(args.plot), lambda file: file.write(page))
            else:
                plot(trials.arms, (COSTS[args.by], trials.metric), Path(args.plot))
        except ModuleNotFoundError as error:
            raise lacks_extra("a plot", error, "plot") from None
        note(f"{args.plot} written")
    if args.json:
        print_json({"verdict": said, **found, **{name: prompts[name] for name in ("a", "b", "matched") if prompts}})
    else:
        console().print(clean(said))
        if trials is not None:
            _print(results, trials, args)
        if pair:
            _print_prompts(prompts, said)
    return 0


def _arms(args: argparse.Namespace) -> dict[str, list[Run]]:
    """Name → runs of each arm."""
    # by a word and its place; by a name, which several words may have, with place 0
    found: dict[tuple[str, int], list[Run]] = {}
    for place, word in enumerate(args.arms, 1):
        match = None if os.path.exists(word) else re.fullmatch(r"([^=/]+)=(.+)", word)
        runs = open_runs(match[2] if match else word, identity=identity_from(args))
        found.setdefault((match[1], 0) if match else (word, place), []).extend(runs)
    if all(place for _, place in found):
        if len(found) == 1 and len(runs) == 2:
            return {f"{letter} ({run.name or run.source})": [run] for letter, run in zip("AB", runs, strict=True)}
        # a pattern says the same in quotes and replaced by the shell
        every = [run for runs in found.values() for run in runs]
        if len(every) > 2 and len(found) in (1, len(every)):
            return _by_method(every)
    names = [str(runs[0].about.get("preset", word)) if place else word for (word, place), runs in found.items()]
    if len(set(names)) < len(names):
        names = [word for word, _ in found]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    arms = dict(zip(names, found.values(), strict=True))
    if len(arms) < 2:
        ((name, runs),) = arms.items()
        there = ", ".join(run.source for run in runs[:6])
        raise AdaptiveError(
            f"two arms or more are compared: 'grpo=runs/grpo-s*' 'solo=runs/solo-s*'; the only arm is {name}, with "
            f"{counted(len(runs), 'run')}: {there}"
        )
    return arms


def _over_prompts(trials: Trials, results: Sequence[Outcome], by: str) -> str:
    """The difference of two single runs, and its sampling error over validation prompts; empty where seeds are compared."""
    if [len(found) for found in trials.arms.values()] != [1, 1] or not results[1].gains:
        return ""
    first, other = results
    ends = {one.name: trials.arms[one.name][0] for one in results}
    errors = [ends[one.name].error_at(one.ends[ends[one.name].seed]) for one in results]
    known = [error for error in errors if error is not None]
    if len(known) < 2:
        return ""
    half, gap = sampling(float(np.linalg.norm(known))), other.mean - first.mean
    told = "beyond" if abs(gap) > half else "within"
    said = (
        f"{other.name} minus {first.name}, final value: {gap:+.3f} ± {half:.3f} ({told} the sampling error of the validation "
        "prompts). One seed says nothing about other seeds."
    )
    return " ".join([said, *early(results, by)])


def _record(one: Outcome, runs: Sequence[Run], unpaired: bool = False) -> dict[str, Any]:
    """An arm for scripts; single runs are compared whatever their seeds: "null"."""

    def by_seed(found: dict[int, Any]) -> dict[int | str, Any]:
        return {"null" if unpaired else seed: value for seed, value in found.items()}

    gains = list(one.gains.values())
    mean, half = interval(gains) if gains else (None, None)
    return {
        "name": one.name,
        "runs": [run.where for run in runs],
        "final": by_seed(one.finals),
        "gain": by_seed(one.gains),
        "mean_gain": mean,
        "half_width": half,
        "significant": significant(gains) if gains else None,
        "needed": by_seed(one.needed),
        "share": median(list(one.shares.values())),
    }


def _rows(results: Sequence[Outcome], trials: Trials, by: str) -> tuple[list[str], list[tuple[str, ...]]]:
    """The table of arms: headings and rows."""
    rows = []
    for one in results:
        told = _record(one, ())
        half = f" ± {told['half_width']:.3f}" if len(one.gains) > 1 else ""
        gap = f"{told['mean_gain']:+.3f}{half}{' *' if told['significant'] else ''}" if one.gains else "-"
        needed = "-" if not one.shares else "never" if told["share"] is None else f"{told['share']:.0%}"
        runs, costs = [t for t in trials.arms[one.name] if t.seed in one.compared], []
        for name in COSTS:  # up to where the arms are compared
            paid = [float(np.interp(one.ends[t.seed], t.cost, t.spent[name])) for t in runs]
            mean = float(np.mean(paid))
            costs.append(span(mean) if name == "hours" else number(np.round(mean)))
        rows.append((one.name, str(len(one.compared)), f"{one.mean:.3f}", gap, needed, *costs))
    costs = ["training time" if name == "hours" else name for name in COSTS]
    return ["arm", "seeds", "final", "difference", f"{by} needed", *costs], rows


def _print(results: Sequence[Outcome], trials: Trials, args: argparse.Namespace) -> None:
    heads, rows = _rows(results, trials, args.by)
    out = console()
    out.print()
    out.print(table([(head, "left" if head == "arm" else "right") for head in heads], rows, cut="arm", width=out.width))
    if any("*" in row[3] for row in rows):
        out.print("* significant: three seeds or more, and the 95 % interval excludes zero")


def _write_curves(trials: Trials, path: str, unpaired: bool) -> None:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [] for name in ("arm", "seed", "step", *COSTS, "value")}
    for name, found in trials.arms.items():
        for trial in found:
            size = len(trial.value)
            values: dict[str, Any] = {
                "arm": [name] * size,
                "seed": [None if unpaired else trial.seed] * size,
                **trial.spent,
                "value": trial.value,
            }
            for column, value in values.items():
                columns[column] += list(value)
    known = {name: pa.array(values, from_pandas=True) for name, values in columns.items()}
    write_pages(path, ".csv", iter([pa.table(known)]))


def page_of_runs(runs: Sequence[Run]) -> str:
    """Runs side by side, at equal rollouts, as a page: seeds of one method are an arm."""
    arms = _by_method(runs)
    trials = read(arms)
    results = outcomes(trials.arms)
    said = f"{trials.metric}: {_over_prompts(trials, results, 'rollouts') or sentence(results, 'rollouts')}"
    return _page(trials, results, said, "rollouts")


def _by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Arms of runs: those whose presets, group sizes and names, the seed aside, are alike are seeds of one.

    Where that leaves one arm, or seeds that are alike, each run is an arm.
    """
    alike: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.about.get("preset"), run.about.get("n"), seed_in(run.name or "")[1]), []).append(run)
    names = [preset for preset, _, _ in alike]
    if len(alike) > 1 and len(set(names)) < len(names):
        names = [name for _, _, name in alike]
    apart = all(seeds_of(found) is not None for found in alike.values())
    if 1 < len(alike) < len(runs) and apart and len(set(names)) == len(names):
        return {str(name): found for name, found in zip(names, alike.values(), strict=True)}
    return {name: [run] for name, run in zip(names_of(runs), runs, strict=True)}


def _page(trials: Trials, results: Sequence[Outcome], said: str, by: str) -> str:
    """One page that needs no network: what is said, the table, the curves."""
    from verl_adaptive.report.figures import PALETTE, Series, lines
    from verl_adaptive.report.templates import fill

    series = []
    for place, (name, found) in enumerate(trials.arms.items()):
        color = PALETTE[place % len(PALETTE)]
        if len(found) > 1:
            series += [Series(f"{name}, seed {t.seed}", t.value, color, t.cost, faint=True, key="") for t in found]
        cost, value = mean_curve(found) if len(found) > 1 else (found[0].cost, found[0].value)
        series.append(Series(f"{name}, mean" if len(found) > 1 else name, value, color, cost, key=name))
    heads, rows = _rows(results, trials, by)
    chart = lines(trials.metric, np.zeros(0), series, (COSTS[by], trials.metric), from_zero=False)
    title = clean(" · ".join(trials.arms))
    return fill("arms.html.j2", title=title, said=said, missing=trials.missing, heads=heads, rows=rows, chart=chart)


# -- two runs, prompt by prompt -----------------------------------------------------------------------------------------


def _prompts(pair: Sequence[Run], args: argparse.Namespace) -> dict[str, Any]:
    """The overviews of both, the prompts that both visited, and what they say of the runs."""
    from verl_adaptive.report.common import cut_at_common, matched

    runs, facts = cut_at_common(pair, whole=args.whole)
    found = matched(runs[0].prompts, runs[1].prompts, args.limit, args.visits)
    said = f"No prompt was visited by both at least {args.visits} times."
    if found["prompts"]:
        gap, error = found["mean_rate_b"] - found["mean_rate_a"], found["standard_error"]
        half = told = ""
        if error is not None:
            half = f" ± {sampling(error):.3f} over prompts"
            told = f", {'beyond' if abs(gap) > sampling(error) else 'within'} the sampling error of the prompts"
        said = (
            f"Latest pass rate of the prompts that both visited: A {found['mean_rate_a']:.3f}, B {found['mean_rate_b']:.3f}, B minus "
            f"A {gap:+.3f}{half}{told}."
        )
    return {"a": facts[0], "b": facts[1], "matched": found, "said": said}


def _print_prompts(found: dict[str, Any], above: str) -> None:
    out, facts, matched = console(), [found["a"], found["b"]], found["matched"]
    out.print()
    for letter, f in zip("AB", facts, strict=True):
        named = ", ".join(str(f[key]) for key in ("preset", "run") if f.get(key))
        out.print(clean(f"{letter}: {named or f['kind']} ({f['store']})"), soft_wrap=True)
    ledgers: list[Ledger | None] = [f.get("ledger") for f in facts]
    if any(f["cut"] for f in facts):
        known = [float(one.rollouts.generated) for one in ledgers if one is not None]
        apart = len(known) == 2 and abs(known[0] - known[1]) > 0.1 * max(known)
        out.print(
            f"{'Not at equal rollouts' if apart else 'Both at equal rollouts, to a whole step'}; --whole takes the runs as they are."
        )

    def row(label: str, values: Sequence[Any], form: Any = number) -> list[tuple[str, ...]]:
        a, b = values
        if a is None and b is None:
            return []
        gap = "" if a is None or b is None else f"{'-' if b < a else '+'}{form(abs(b - a))}"
        return [(label, form(a), form(b), gap)]

    rows = []
    for unit in ("rollouts", "tokens"):
        for word in ("generated", "trained"):
            rows += row(f"{unit} {word}", [one and getattr(getattr(one, unit), word) for one in ledgers])
    names = (
        "steps",
        "visited",
        "visits",
        "pass_rate",
        "never_solved",
        "always_solved",
        "regressed",
        "flip_flopping",
        "retired",
    )
    forms = {"hours": span, "pass_rate": share}
    labels = {"hours": "training time", "pass_rate": "pass rate, all visits"}
    for name in ("hours", *names):
        label = labels.get(name, name.replace("_", " "))
        rows += row(label, [f.get(name) for f in facts], forms.get(name, number))
    heads = [("", "left"), ("A", "right"), ("B", "right"), ("B-A", "right")]
    out.print(table(heads, rows))
    if found["said"] != above:
        out.print(found["said"])
    out.print(
        f"{counted(matched['prompts'], 'prompt')} visited by both at least {matched['least_visits']} times "
        f"({number(matched['only_a'])} by A only, {number(matched['only_b'])} by B only)"
    )
    if matched["prompts"]:
        out.print(
            f"significantly better in B: {number(matched['clearly_better_in_b'])}, significantly worse: "
            f"{number(matched['clearly_worse_in_b'])} (false discovery rate 5 %)"
        )
    for title, key in (
        ("gains in B, most significant first", "largest_gains_in_b"),
        ("losses in B, most significant first", "largest_losses_in_b"),
    ):
        if matched[key]:
            digits = key_digits(out)
            lines = [(r["key"][:digits], r["source"], f"{r['a']:.3f}", f"{r['b']:.3f}") for r in matched[key]]
            columns = [("key", "left"), ("source", "left"), ("A", "right"), ("B", "right")]
            out.print()
            out.print(table(columns, lines, title, cut="source", width=out.width))
