"""All tables and plots of ``RESULTS.md``, the README and the docs, from the JSON in ``results/``.

    python -m benchmarks.report           # write them
    python -m benchmarks.report --check   # exit with 1 if a page is not what the JSON says; plots are left alone

Each generated part of a page stands between two markers; what stands outside is left as it is. No number is typed by hand.
"""

from __future__ import annotations

import difflib
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from benchmarks import blocks, sections
from benchmarks.cells import Parser, read_rows, run_script, write_whole
from benchmarks.claims import claims
from benchmarks.runs import Runs
from benchmarks.standings import all_standings, grid_runs, pretrained_runs
from examples.cpu.quickstart import by_arm, plot, result_of, verdict
from verl_adaptive.report.arms import Trial, draw
from verl_adaptive.significance import LEAST_SEEDS

ROOT = Path(__file__).resolve().parents[1]
#: Where the cost of a step of `solo` is from, beside the long answers.
STEP = ("clock.json", "quickstart.json", "quickstart_thin.json", "engine_steps.json")
AIMED = ("status_messages.json", "driver.json", "length_cap.json", "roulette.json", "lost_answers.json")
#: Policies that the plots show.
SHOWN = ("grpo", "grpo-4", "reinforce", "solo", "dapo", "greso", "aero", "cero", "pilot_commit", "full")
PANELS = (("pretrained", "128"), ("real", "base"), ("tiny", "base"))


def put(page: Path, text: str, name: str, lines: Sequence[str]) -> str:
    """A page's text with one generated part replaced.

    Raises:
        SystemExit: its markers are missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in text:
        raise SystemExit(f"{page} has no {begin} marker to put its table at")
    head, _, rest = text.partition(begin)
    body = "\n".join(lines).strip("\n")
    return f"{head}{begin}\n{body}\n{end}{rest.partition(end)[2]}"


def read(results: Path, name: str) -> Any:
    """A results file."""
    return read_rows(results / name) if name.endswith("l") else json.loads((results / name).read_text())


def training_runs(results: Path) -> dict[str, Runs]:
    """The training benchmarks."""
    runs = {"pretrained": compared(read(results, "pretrained.jsonl"))}
    return runs | {
        name: grid_runs(read(results, f"train_{of}.json")) for name, of in (("real", "cpu"), ("tiny", "torch"))
    }


def compared(cells: Sequence[dict[str, Any]]) -> Runs:
    """Those on the pretrained models, which come in as they end, of the policies that ran often enough."""
    runs = pretrained_runs(cells)
    whole = {pair for pair in {key[:2] for key in runs.cells} if enough_runs(runs, *pair)}
    runs.cells = {key: cell for key, cell in runs.cells.items() if key[:2] in whole}
    return runs


def enough_runs(runs: Runs, variant: str, preset: str) -> bool:
    """Whether a policy ran three times at its best learning rate; in steps of 128, where rates are chosen, of at least two.

    Fewer runs compare nothing: a lead at one rate may be the rate's.
    """
    rates = runs.rates(variant, preset)
    if not rates or (variant == "128" and len(rates) == 1):
        return False
    return len(runs.seeds(variant, preset, runs.best_lr(variant, preset))) >= LEAST_SEEDS


def results_lines(results: Path) -> list[str]:
    """All of RESULTS.md below its title."""
    runs, thin = training_runs(results), grid_runs(read(results, "thin.json"))
    every = pretrained_runs(read(results, "pretrained.jsonl"))
    lines = [
        *sections.JUDGED,
        *sections.accuracy(all_standings(runs)),
        *claims(runs, read(results, "long_answers.json")),
    ]
    for section in (sections.ablations, sections.told, sections.two_epochs):
        lines += section(runs["tiny"])
    lines += [
        *sections.thinned(thin),
        *sections.ends(runs["pretrained"]),
        *sections.by_source(runs["pretrained"]),
        *sections.plain(every),
        *sections.gemma(every),
    ]
    for records in sections.RECORDS:
        data = read(results, records.file)
        lines += records.lines(data)
        if records.file == "long_answers.json":
            clock, quickstart, thinned, engine = (read(results, name) for name in STEP)
            lines += [blocks.step_note(clock, quickstart, thinned, engine, data), ""]
            lines += [blocks.aims_note(quickstart, thin, *(read(results, name) for name in AIMED), data), ""]
    return lines


def quickstart_lines(found: dict[str, Any]) -> list[str]:
    """The README's sentence about the quickstart, by the quickstart's own verdict."""
    runs = [result_of(stored) for stored in found["results"]]
    arms = by_arm(runs)
    (first, base), *_, (last, best) = arms.items()
    slower = float(np.mean([mine.seconds / theirs.seconds for mine, theirs in zip(best, base, strict=True)]))
    text = (
        f"From the quickstart: verl and vLLM on two CPU cores, a tiny model, {len(runs)} runs of {runs[0].generated:,} rollouts, "
        f"{sum(run.seconds for run in runs) / 60:.0f} minutes of training steps. {verdict(runs)} {last}'s steps take "
        f"{slower:.2f} × those of {first}."
    )
    return wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def pages(root: Path) -> dict[Path, str]:
    """What the pages of a checkout should say."""
    results = root / "benchmarks" / "results"
    runs = training_runs(results)
    found = all_standings(runs)
    second = sections.gemma(pretrained_runs(read(results, "pretrained.jsonl")))
    clock, long, quickstart, messages, driver, queue, noise, pilots = (
        read(results, f"{name}.json")
        for name in (
            "clock",
            "long_answers",
            "quickstart",
            "status_messages",
            "driver",
            "prompt_cost",
            "gradient_noise",
            "pilots",
        )
    )
    made = {
        "benchmarks/RESULTS.md": {"results": results_lines(results)},
        "README.md": {
            "quickstart": quickstart_lines(quickstart),
            "situations": blocks.situations(found),
            "benchmark": blocks.evidence(found, runs),
            "cost": blocks.cost(clock, long, found),
        },
        "docs/solo.md": {
            "measured": blocks.solo_block(found, runs, second),
            "gain": blocks.gain_note(found),
            "noise": blocks.noise_note(noise, found),
            "step": blocks.step_cost(clock, quickstart, messages, runs),
            "driver": blocks.driver_note(driver, queue),
            "critic": blocks.critic_note(found),
        },
        "docs/choosing.md": {"measured": blocks.choosing(found)},
        "docs/papers.md": {"measured": blocks.forms_block(grid_runs(pilots))},
        "docs/order.md": {"clock": blocks.async_table(clock)},
    }
    out = {}
    for name, parts in made.items():
        page = root / name
        out[page] = page.read_text()
        for part, lines in parts.items():
            out[page] = put(page, out[page], part, lines)
    costs = json.dumps(blocks.measured_costs(long, found), indent=2, ensure_ascii=False) + "\n"
    return {**out, root / "verl_adaptive" / "commands" / "measured.json": costs}  # of `doctor`


# -- plots ------------------------------------------------------------------------------------------------------------


def light(svg: str) -> str:
    """A drawing with one line for each artist, its paths in tenths of a point."""

    def thinned(path: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", " ".join(path[0].split()))

    return re.sub(r">\n {4,}<", "><", re.sub(r'\bd="[^"]*"', thinned, svg))


def curves(axis: Any, runs: Runs, variant: str) -> None:
    """Held-out accuracy by rollouts, up to the budget: each seed that compares with GRPO's, and each policy's mean."""
    arms, grpo = {}, (variant, "grpo", runs.best_lr(variant, "grpo"))
    for preset in SHOWN:
        policy = (variant, preset, runs.best_lr(variant, preset))
        for seed in runs.pairs(policy, grpo):
            x, y = (runs.curve((*policy, seed), column) for column in ("rollouts", "held_out"))
            inside = x <= runs.budget[variant]
            arms.setdefault(preset, []).append(Trial(seed, x[inside], y[inside]))
    draw(axis, arms)
    axis.set_xlabel("generated rollouts")


def figures(root: Path) -> None:
    """Draw the plots again: ``accuracy.svg``, and the quickstart's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = root / "benchmarks" / "results"
    stored = read(results, "quickstart.json")["results"]
    plot([result_of(run) for run in stored], root / "docs" / "quickstart.svg")
    runs = training_runs(results)
    plt.rcParams.update({"svg.hashsalt": "verl-adaptive", "svg.fonttype": "none", "font.size": 9})
    count = len(PANELS)
    drawing, axes = plt.subplots(1, count, figsize=(3.4 * count, 3.4), layout="constrained", sharey=False)
    for axis, (name, variant) in zip(axes, PANELS, strict=True):
        curves(axis, runs[name], variant)
        axis.set_title(name, fontsize=9)
    axes[0].set_ylabel("held-out accuracy")
    axes[-1].legend(fontsize=7)
    text = io.StringIO()
    drawing.savefig(text, format="svg", metadata={"Date": None})
    plt.close(drawing)
    write_whole(root / "benchmarks" / "figures" / "accuracy.svg", light(text.getvalue()))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> None:
    """The command line."""
    parser = Parser(prog="report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    options = parser.parse_args(arguments)
    stale = False
    for page, text in pages(root).items():
        old = page.read_text()
        if options.check and text != old:
            stale = True
            diff = difflib.unified_diff(old.splitlines(True), text.splitlines(True), str(page), "from the JSON", n=0)
            sys.stdout.writelines(diff)
        elif not options.check:
            page.write_text(text)
    if options.check:
        sys.exit(int(stale))
    figures(root)


if __name__ == "__main__":
    run_script(main)
