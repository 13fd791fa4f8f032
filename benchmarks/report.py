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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

HERE = Path(__file__).resolve().parent
#: Where the cost of a step of `solo` is from, beside the long answers.
STEP = ("clock.json", "quickstart.json", "quickstart_thin.json", "engine_steps.json")
AIMED = ("status_messages.json", "driver.json", "length_cap.json", "roulette.json", "lost_answers.json")
#: Policies that the plots show.
SHOWN = ("grpo", "grpo-4", "reinforce", "solo", "dapo", "greso", "aero", "cero", "pilot_commit", "full")


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """A page with one generated part replaced, or appended if it has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    if not found:
        head = head.rstrip("\n") + "\n\n"
    body = "\n".join(lines).strip("\n")
    return f"{head}{begin}\n{body}\n{end}{tail or chr(10)}"


def read(results: Path, name: str) -> Any:
    """A results file, or None."""
    path = results / name
    if not path.exists():
        return None
    return read_rows(path) if name.endswith("l") else json.loads(path.read_text())


def training_runs(results: Path) -> dict[str, Runs]:
    """The training benchmarks that have results; of the pretrained one, whose runs come in as they end, policies that ran often
    enough to be compared."""
    files = {"pretrained": ("pretrained.jsonl", pretrained_runs), "real": ("train_cpu.json", grid_runs)}
    files["tiny"] = ("train_torch.json", grid_runs)
    runs = {name: made(data) for name, (file, made) in files.items() if (data := read(results, file))}
    if found := runs.get("pretrained"):
        whole = {pair for pair in {key[:2] for key in found.cells} if enough_runs(found, *pair)}
        found.cells = {key: cell for key, cell in found.cells.items() if key[:2] in whole}
        if len({key[1] for key in found.cells}) < 2:
            del runs["pretrained"]
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
    runs = training_runs(results)
    found = all_standings(runs)
    lines = [*sections.JUDGED, *sections.accuracy(found)]
    lines += claims(runs)
    if "tiny" in runs:
        lines += sections.ablations(runs["tiny"])
        lines += sections.told(runs["tiny"])
        lines += sections.two_epochs(runs["tiny"])
    if data := read(results, "thin.json"):
        lines += sections.thinned(grid_runs(data))
    if "pretrained" in runs:
        lines += sections.ends(runs["pretrained"])
        every = pretrained_runs(read(results, "pretrained.jsonl"))
        lines += sections.plain(every)
        lines += sections.gemma(every)
    for records in sections.RECORDS:
        if data := read(results, records.file):
            lines += records.lines(data)
            if records.file == "long_answers.json" and all(behind := [read(results, name) for name in STEP]):
                lines += [blocks.step_note(*behind, data), ""]
                thin, more = read(results, "thin.json"), [read(results, name) for name in AIMED]
                if thin and all(more):
                    lines += [blocks.aims_note(behind[1], grid_runs(thin), *more, data), ""]
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


def pages(results: Path, results_page: Path, readme_page: Path) -> dict[Path, str]:
    """What the pages should say.

    Raises:
        SystemExit: a marker is missing in the README.
    """
    text = results_page.read_text() if results_page.exists() else "# Results\n"
    out = {results_page: put(text, "results", results_lines(results))}
    runs, clock = training_runs(results), read(results, "clock.json")
    found = all_standings(runs)
    made: list[tuple[Path, str, list[str]]] = []
    docs = results_page.parent.parent / "docs"
    if found:
        second = sections.gemma(pretrained_runs(read(results, "pretrained.jsonl") or []))
        made += [(docs / "solo.md", "measured", blocks.solo_block(found, runs, second))]
        made += [(docs / "solo.md", "gain", blocks.gain_note(found))]
        made += [(docs / "choosing.md", "measured", blocks.choosing(found))]
        made += [(readme_page, "benchmark", blocks.evidence(found, runs))]
        made += [(readme_page, "situations", blocks.situations(found))]
    if "sao" in found.get("tiny/base", {}):
        made.append((docs / "solo.md", "critic", blocks.critic_note(found)))
    if found and (noise := read(results, "gradient_noise.json")):
        made.append((docs / "solo.md", "noise", blocks.noise_note(noise, found)))
    if pilots := read(results, "pilots.json"):
        made.append((docs / "papers.md", "measured", blocks.forms_block(grid_runs(pilots))))
    long = read(results, "long_answers.json")
    if clock:
        made.append((docs / "order.md", "clock", blocks.async_table(clock)))
        made.append((readme_page, "cost", blocks.cost(clock, long, found)))
    quickstart, messages = read(results, "quickstart.json"), read(results, "status_messages.json")
    if clock and quickstart and messages:
        lines = blocks.step_cost(clock, quickstart, messages, runs)
        made.append((docs / "solo.md", "step", lines))
    if (data := read(results, "driver.json")) and (queue := read(results, "prompt_cost.json")):
        made.append((docs / "solo.md", "driver", blocks.driver_note(data, queue)))
    if quickstart:
        made.append((readme_page, "quickstart", quickstart_lines(quickstart)))
    for page, name, lines in made:
        if not page.exists():
            continue
        text = out.get(page) or page.read_text()
        if f"<!-- {name}: begin -->" not in text:
            raise SystemExit(f"{page} has no <!-- {name}: begin --> marker to put its table at")
        out[page] = put(text, name, lines)
    costs = results_page.parent.parent / "verl_adaptive" / "commands" / "measured.json"  # of `doctor`
    if long and costs.exists():
        out[costs] = json.dumps(blocks.measured_costs(long, found), indent=2, ensure_ascii=False) + "\n"
    return out


# -- plots ------------------------------------------------------------------------------------------------------------


def light(svg: str) -> str:
    """A drawing with one line for each artist, its paths in tenths of a point."""

    def thinned(path: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", " ".join(path[0].split()))

    return re.sub(r">\n {4,}<", "><", re.sub(r'\bd="[^"]*"', thinned, svg))


@contextmanager
def drawn(path: Path, count: int) -> Iterator[Any]:
    """Axes beside one another, written when all is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "verl-adaptive", "svg.fonttype": "none", "font.size": 9})
    drawing, axes = plt.subplots(1, count, figsize=(3.4 * count, 3.4), layout="constrained", sharey=False)
    yield np.atleast_1d(axes)
    np.atleast_1d(axes)[0].set_ylabel("held-out accuracy")
    np.atleast_1d(axes)[-1].legend(fontsize=7)
    text = io.StringIO()
    drawing.savefig(text, format="svg", metadata={"Date": None})
    plt.close(drawing)
    write_whole(path, light(text.getvalue()))


def curves(axis: Any, runs: Runs, variant: str) -> None:
    """Held-out accuracy by rollouts, up to the budget: each seed that compares with GRPO's, and each policy's mean."""
    arms, grpo = {}, runs.best_lr(variant, "grpo")
    for preset in SHOWN:
        lr = runs.best_lr(variant, preset)
        seeds = (
            runs.pairs((variant, preset, lr), (variant, "grpo", grpo)) if lr is not None and grpo is not None else []
        )
        keys = [(variant, preset, lr, s) for s in seeds]
        measured = {key: (runs.curve(key, "rollouts"), runs.curve(key, "held_out")) for key in keys}
        inside = {key: x <= runs.budget[variant] for key, (x, _) in measured.items()}
        if keys:
            arms[preset] = [Trial(key[3], x[inside[key]], y[inside[key]]) for key, (x, y) in measured.items()]
    draw(axis, arms)
    axis.set_xlabel("generated rollouts")


def figures(results: Path, folder: Path) -> None:
    """Draw the plots again: ``accuracy.svg``, and the quickstart's."""
    if (found := results / "quickstart.json").exists():
        plot(
            [result_of(stored) for stored in json.loads(found.read_text())["results"]],
            results.parents[1] / "docs" / "quickstart.svg",
        )
    runs = training_runs(results)
    panels = [(name, v) for name, v in (("pretrained", "128"), ("real", "base"), ("tiny", "base")) if name in runs]
    if panels:
        with drawn(folder / "accuracy.svg", len(panels)) as axes:
            for axis, (name, variant) in zip(axes, panels, strict=True):
                curves(axis, runs[name], variant)
                axis.set_title(name, fontsize=9)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(prog="report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    options = parser.parse_args(arguments)
    stale = False
    for page, text in pages(options.results, options.page, options.readme).items():
        old = page.read_text() if page.exists() else ""
        if options.check and text != old:
            stale = True
            diff = difflib.unified_diff(old.splitlines(True), text.splitlines(True), str(page), "from the JSON", n=0)
            sys.stdout.writelines(diff)
        elif not options.check:
            page.write_text(text)
    if options.check:
        sys.exit(int(stale))
    figures(options.results, options.page.parent / "figures")


if __name__ == "__main__":
    run_script(main)
