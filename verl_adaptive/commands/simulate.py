"""What the policies would do with your rollouts: a simulation on a recorded trace or a parametric pool, without a GPU.

Every preset runs through the package's own engine, at the same number of generated rollouts, for several seeds; GRPO and
an oracle that knows the true pass rates run beside them.

examples:
  verl-adaptive simulate
  verl-adaptive simulate --preset greso --preset "greso adaptive.sampler.p_easy=0.3" --pool hard
  verl-adaptive simulate --trace checkpoints/project/experiment --batch 128 --n 16 --json
  verl-adaptive simulate --trace evaluation.parquet --pool mixed:spill=0.1 --budget 200000
  verl-adaptive simulate --preset "grpo adaptive/sampler=custom adaptive.sampler.name=my_parts.py:Mine"
  verl-adaptive simulate --clock --batch 128 --n 16 --steps 50

--trace takes a journal, a snapshot, a directory of checkpoints, the folder of verl's trainer.rollout_data_dir, or an
export or an evaluation, as a warm start does. --pool is one of mixed, static, hard, easy and large, with keys to change
behind a colon; with --trace, the pool's learning starts from the trace's pass rates. Overrides in Hydra's syntax at the
end hold for every preset that is named, and for all if none is. --clock counts seconds of generation, too, in a queueing
model: replicas with slots, a decode step that grows with the sequences in it, and lengths from a distribution, or from
the trace where it knows them.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from verl_adaptive import __version__
from verl_adaptive.commands.arguments import add_json_option, count, finite
from verl_adaptive.commands.output import console, facts, note, print_json, table
from verl_adaptive.config import check
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.simulate import (
    CLOCK_LIMITS,
    LIMITS,
    PEERS,
    REFERENCES,
    ClockConfig,
    LengthConfig,
    Machine,
    Setting,
    Task,
    parse_pool,
    preset_names,
    read_trace,
    run_task,
    summarise,
    tasks,
)
from verl_adaptive.simulate.equal_budget import check_task
from verl_adaptive.simulate.merit import merits
from verl_adaptive.text import clean, counted, number, share

#: Columns of the tables: heading, key of the summary, and what it is where the heading does not say it.
_SPENT = (
    ("policy", "preset", ""),
    ("steps", "steps", ""),
    ("rollouts", "generated", "generated; a run ends with a whole step"),
    ("rollouts per informative group", "rollouts_per_informative", "generated, for each that trains"),
    ("not trained", "wasted", "share of the generated rollouts"),
    ("compute vs GRPO", "compute_ratio", "2 x generated + 6 x trained tokens"),
    ("signal per rollout", "signal", "4cm/(c + m) of the trained groups, c answers right and m wrong"),
    ("oracle's gain: signal", "efficiency_signal", "0: GRPO; 1: oracle_best, which picks the largest true p(1 - p)"),
    ("regret", "regret", "share of 4p(1 - p) missed by not picking the best prompts of the run's own pool"),
)
_POOL = (
    ("policy", "preset", ""),
    ("final pass rate", "pool_end", "mean true pass rate of the pool"),
    ("oracle's gain: pass rate", "efficiency_pool_end", "0 and 1 as for the signal"),
    (
        "estimate RMSE",
        "estimate_error",
        "the sampler's estimated pass rates of the prompts it saw, against the true ones",
    ),
    ("estimate bias", "estimate_bias", "their mean error"),
    ("prompts seen", "coverage", "share of the prompts ever rolled out"),
    ("longest gap", "gap_longest", "between two visits of a prompt, in passes over the pool"),
)
_CLOCK = (
    ("policy", "preset", ""),
    ("seconds per step", "time", "of generation"),
    ("vs GRPO", "time_ratio", ""),
    ("seconds per informative group", "time_per_informative", "of generation, for each that trains"),
    ("vs GRPO", "time_per_informative_ratio", ""),
    ("idle", "idle", "share of the tokens that full slots would have generated in that time and did not"),
    ("waves", "waves", "times in a step that requests met an empty machine"),
    ("last tenth", "last", "share of the time that passes after nine tenths of the groups are back"),
    ("aborted tokens", "aborted_tokens", "share of the generated tokens"),
    ("time to GRPO's pass rate", "to_baseline", "until the pool is where GRPO's run ended, as a share of GRPO's time"),
)
_LEARNED = ("learned", "rise of the pool's mean true pass rate")
_INTERVAL = ("±", "half a 95 % interval over seeds")
_COUNTS = {"steps", "generated"}
_SHARES = {"wasted", "regret", "coverage", "idle", "last", "aborted_tokens"}

#: Options of the clock: name → type, unit, default, the least there can be, and what it is.
_CLOCK_OPTIONS: dict[str, tuple[Callable[[str], float], str, float, float, str]] = {
    "replicas": (int, "N", Machine.replicas, 1, "inference engines"),
    "slots": (int, "N", Machine.slots, 1, "sequences that one of them runs at a time"),
    "decode-ms": (finite, "MS", 1000 * Machine.base, 0, "a decode step without its sequences"),
    "sequence-ms": (finite, "MS", 1000 * Machine.each, 0, "what each running sequence adds to a decode step"),
    "median": (finite, "TOKENS", LengthConfig.median, 1, "the median answer"),
    "sigma": (finite, "X", LengthConfig.sigma, 0, "standard deviation of a length's logarithm"),
    "cap": (int, "TOKENS", LengthConfig.cap, 1, "the longest answer"),
    "harder": (
        finite,
        "X",
        LengthConfig.harder,
        -math.inf,
        "in the logarithm, how much longer answers to a hopeless prompt are than to a solved one",
    ),
    "prompt-tokens": (int, "TOKENS", ClockConfig.prompt_tokens, 0, "a prompt, for the account of prefill"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        metavar="WORDS",
        action="append",
        default=[],
        help="a preset, with overrides of its own in the same quotes; may be repeated (default: all)",
    )
    parser.add_argument("--trace", metavar="SOURCE", help="recorded pass rates; see above")
    parser.add_argument("--pool", metavar="NAME[:KEY=VALUE,...]", help="a parametric pool (default: mixed)")
    parser.add_argument(
        "--batch", metavar="B", type=int, default=64, help="prompts a step, data.train_batch_size (default: 64)"
    )
    parser.add_argument("--n", metavar="N", type=int, default=8, help="rollouts a prompt, rollout.n (default: 8)")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument(
        "--budget", metavar="ROLLOUTS", type=int, help="rollouts of every run (default: 200 steps of GRPO)"
    )
    ends.add_argument(
        "--steps",
        metavar="N",
        type=int,
        help="so many steps, whatever they generate (default: as many as the budget buys)",
    )
    parser.add_argument("--seeds", metavar="S", default="0,1,2", help="seeds, with commas (default: 0,1,2)")
    parser.add_argument(
        "--threshold",
        metavar="X",
        type=finite,
        help="score of a success, in dumps and results of an evaluation (default: 0.5)",
    )
    parser.add_argument(
        "--jobs", metavar="N", type=count, default=1, help="runs at a time, a process each (default: 1)"
    )
    timed = parser.add_argument_group("clock", "seconds of generation in a queueing model")
    timed.add_argument("--clock", action="store_true", help="count seconds; verl's own filter_groups runs beside")
    for name, (kind, unit, default, _, about) in _CLOCK_OPTIONS.items():
        timed.add_argument(f"--{name}", metavar=unit, type=kind, help=f"{about} (default: {default:g})")
    add_json_option(parser)
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", help="adaptive.<key>=<value>, for every --preset")


def run(args: argparse.Namespace) -> int:
    made = _tasks(args)
    rows = list(_rows(made, args.jobs))
    summary = summarise(rows)
    found = merits(rows)
    for entry in summary:
        entry["merit"], entry["merit_half"] = found.mean(entry["preset"])
    said = found.answer()
    about, limits = _about(made[0], args), CLOCK_LIMITS if args.clock else LIMITS
    whole = {**about, "answer": said, "merit": found.name, "limits": limits, "summary": summary, "rows": rows}
    if args.json:
        print_json(whole)
        return 0
    entries = {entry["preset"]: entry for entry in summary}
    _print(about, [entries[preset] for preset in found.ranked(entries)], limits, found.name, said)
    return 0


# -- what is asked for ------------------------------------------------------------------------------------------------


def _tasks(args: argparse.Namespace) -> list[Task]:
    """Everything that is to run, checked before the first of it does."""
    steps, budget = args.steps, args.budget
    if steps is None:
        budget = 200 * args.batch * args.n if budget is None else budget
        steps = max(1, budget // max(1, args.batch * args.n))
    setting = Setting(args.batch, args.n, steps, budget)
    clock = _clock(args)
    pool, trace = _pool(args)
    size = pool.prompts if trace is None else len(trace)
    if setting.batch > size:
        raise ConfigError("--batch", setting.batch, f"is more than the {size} prompts there are")
    named, beside = _presets(args)
    order = [*(p for p in beside if p == "grpo"), *named, *(p for p in beside if p != "grpo")]
    made = tasks(order, _seeds(args.seeds), setting, pool, trace, clock=clock)
    made = [replace(t, overrides=tuple(args.overrides)) if t.preset in named else t for t in made]
    for task in made[: len(order)]:
        try:
            check_task(task, size)
        except AdaptiveError as error:
            if args.preset or args.overrides or task.preset in beside:
                raise
            note(f"left out: {error}")
            made = [t for t in made if t.preset != task.preset]
    return made


def _presets(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What was named, and what runs beside it."""
    if args.preset:
        named = list(dict.fromkeys(args.preset))
    else:
        named = ["grpo", "dapo", *(p for p in preset_names() if p not in ("grpo", "dapo"))]
    beside = ("grpo", *(PEERS if args.clock else ()), *REFERENCES)
    return named, [p for p in beside if p not in named]


def _clock(args: argparse.Namespace) -> Any:
    """What generation takes, or None."""
    value = {name: getattr(args, name.replace("-", "_")) for name in _CLOCK_OPTIONS}
    if not args.clock:
        for name in value:
            if value[name] is not None:
                raise ConfigError(f"--{name}", value[name], "is an option of the clock; add --clock")
        return None
    value = {name: _CLOCK_OPTIONS[name][2] if given is None else given for name, given in value.items()}
    for name, (_, _, _, least, _) in _CLOCK_OPTIONS.items():
        check(value[name] >= least, f"--{name}", value[name], f"must be {least} or greater")
    check(value["decode-ms"] + value["sequence-ms"] > 0, "--decode-ms", 0.0, "a decode step must take some time")
    base, each = (round(value[name] / 1000, 12) for name in ("decode-ms", "sequence-ms"))  # 0.12 ms is 0.00012 s
    machine = Machine(value["replicas"], value["slots"], base, each)
    lengths = LengthConfig(value["median"], value["sigma"], value["cap"], value["harder"])
    return ClockConfig(machine, lengths, value["prompt-tokens"])


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError("--seeds", text, "must be whole numbers with commas, as 0,1,2") from None
    if min(seeds) < 0:
        raise ConfigError("--seeds", text, "must not be negative")
    return list(dict.fromkeys(seeds))


def _pool(args: argparse.Namespace) -> tuple[Any, Any]:
    """The pool, or None where a trace takes its own course; and the trace, or None."""
    if args.trace is None:
        check(args.threshold is None, "--threshold", args.threshold, "is about the scores of a trace; add --trace")
        return parse_pool("mixed" if args.pool is None else args.pool), None
    trace = read_trace(args.trace, threshold=0.5 if args.threshold is None else args.threshold)
    judged = trace.kind in ("journal", "snapshot")
    check(
        not judged or args.threshold is None,
        "--threshold",
        args.threshold,
        f"a {trace.kind} knows which rollouts succeeded; leave it out",
    )
    return None if args.pool is None else parse_pool(args.pool), trace


# -- running ----------------------------------------------------------------------------------------------------------


def _rows(made: list[Task], jobs: int) -> Iterator[dict[str, Any]]:
    """The runs' rows, in the order of the tasks."""
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    with bar:
        watched = bar.add_task("simulating", total=len(made))
        if jobs == 1:
            for done, task in enumerate(made):
                bar.update(watched, description=clean(f"{task.preset}, seed {task.seed}", 60))

                def tick(share: float, done: int = done) -> None:
                    bar.update(watched, completed=done + share)

                yield run_task(task, tick)
            return
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            for row in pool.map(run_task, made):
                bar.advance(watched)
                yield row


# -- the answer -------------------------------------------------------------------------------------------------------


def _about(task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    out: dict[str, Any] = {
        "command": "verl-adaptive simulate " + shlex.join(sys.argv[2:]),
        "version": __version__,
        "setting": asdict(task.setting),
        "pool_name": args.pool or ("replayed" if task.trace is not None else "mixed"),
        "pool": task.pool and asdict(task.pool),
        "overrides": list(args.overrides),
    }
    if task.clock is not None:
        out["clock"] = asdict(task.clock)
    if task.trace is not None:
        trace = task.trace
        out["trace"] = {
            "kind": trace.kind,
            "where": trace.where,
            "prompts": len(trace),
            "observations": len(trace.prompt),
            "steps": trace.steps,
            "note": trace.note,
        }
    return out


def _print(about: dict[str, Any], summary: list[dict[str, Any]], limits: str, merit: str, said: str) -> None:
    out, setting = console(), about["setting"]
    what = counted(*((setting["budget"], "rollout") if setting["budget"] else (setting["steps"], "step")))
    where = f"pool {about['pool_name']}"
    if "trace" in about:
        trace = about["trace"]
        over = f", {trace['steps']:,} steps" * (trace["steps"] > 1)  # totals have none
        where = f"{trace['kind']} of {trace['prompts']:,} prompts{over}"
        where += f", whose rates move as in pool {about['pool_name']}" * (about["pool"] is not None)
    seeds = summary[0]["seeds"]
    out.print(
        f"{where}; {setting['batch']} prompts x {setting['n']} rollouts a step, {what} a run, {counted(seeds, 'seed')}\n",
        soft_wrap=True,
    )
    if said:
        out.print(f"{clean(said)}\n", soft_wrap=True)
    reasons = sorted({k for e in summary for k in e if k.startswith("dropped_") and e[k] > 0})
    lost = [{k: number(round(e.get(k, 0.0))) for k in reasons} for e in summary]
    if any(entry["merit"] is not None for entry in summary):
        heads = [("policy", "left"), (f"{merit} vs GRPO", "right")]
        merits = [[entry["preset"], _cell(entry, "merit", 2)] for entry in summary]
        out.print(table(heads, merits))
    described = [*([_CLOCK] if "clock" in about else []), _SPENT, _POOL]
    dropped = [("rollouts not trained", "preset", ""), *((k[8:].replace("_", " "), k, "") for k in reasons)]
    for first, *rest in (*described, dropped):
        digits = {key: _decimals(e[key] for e in summary) for _, key, _ in rest if key not in reasons}
        made = [
            [entry["preset"], *(drops[key] if key in drops else _cell(entry, key, digits[key]) for _, key, _ in rest)]
            for entry, drops in zip(summary, lost, strict=True)
        ]
        for at, end in _side_by_side([head for head, _, _ in rest], made, out.width):
            heads = [(first[0], "left"), *((head, "right") for head, _, _ in rest[at:end])]
            out.print(table(heads, [[row[0], *row[1 + at : 1 + end]] for row in made]))
    for entry in summary:
        for why in entry["ended"]:
            if why not in ("budget", "steps"):
                text = "its sampler had no further prompt" if why == "sampler" else why
                out.print(f"{entry['preset']}: ended early, {text}")
    if about.get("trace", {}).get("note"):
        out.print(f"Note: {about['trace']['note']}.")
    told = [(head, text) for columns in described for head, _, text in columns if text]
    out.print(facts([*([_LEARNED] if merit.startswith(_LEARNED[0]) else []), *told, _INTERVAL]))
    out.print(f"\n{limits}")


def _side_by_side(heads: list[str], rows: list[list[str]], width: int) -> Iterator[tuple[int, int]]:
    """Where to cut a table that is too wide into several, so that no name of a preset is broken within a word."""
    wide = [max(*map(len, head.split()), *(len(row[at + 1]) for row in rows)) + 3 for at, head in enumerate(heads)]
    longest = max(len(word) for row in rows for word in row[0].split())
    first = max(longest, min(width // 3, max(len(row[0]) for row in rows))) + 3
    begin, taken = 0, first
    for at, each in enumerate(wide):
        if taken + each > width and at > begin:
            yield begin, at
            begin, taken = at, first
        taken += each
    if begin < len(heads):
        yield begin, len(heads)


def _decimals(values: Iterable[float | None]) -> int:
    """Of a column: three digits of its largest number, and at most three decimals."""
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
    return min(3, max(0, 2 - math.floor(math.log10(largest)))) if largest else 0


def _cell(entry: dict[str, Any], key: str, decimals: int) -> str:
    value, error = entry[key], entry.get(f"{key}_half")
    # Where no trained group has variance, as with one rollout a prompt, there is no signal to speak of, nor the lack of it.
    if value is None or value != value or (key in ("signal", "efficiency_signal") and entry["signal"] == 0):
        return "-"
    if key in _COUNTS:
        return number(round(value))
    if key in _SHARES:
        return share(value)
    text = f"{round(value, decimals) + 0.0:,.{decimals}f}"  # never -0.00
    if key == "to_baseline" and entry["to_baseline_seeds"] < entry["seeds"]:
        return f"{text} ({entry['to_baseline_seeds']} of {entry['seeds']} seeds)"
    return text if error is None else f"{text} ± {error:,.{decimals}f}"
