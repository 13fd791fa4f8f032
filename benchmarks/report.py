"""All tables and plots of ``RESULTS.md`` and the README's evidence, from the JSON in ``results/``.

    python -m benchmarks.report           # write them
    python -m benchmarks.report --check   # exit with 1 if a page is not what the JSON says; plots are left alone

Each benchmark owns the part of a page between its two markers; what stands outside is left as it is. No number is typed
by hand.
"""

from __future__ import annotations

import difflib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import train_cpu
from benchmarks.cells import Parser, interval, read_rows, run_script, write_whole
from benchmarks.page_bill import bill
from benchmarks.page_clock import async_table, clock_page
from benchmarks.page_cpu import cpu_page, cpu_runs
from benchmarks.page_docs import choosing_block, forms_block, solo_block
from benchmarks.page_front import readme
from benchmarks.page_lines import lines_page
from benchmarks.page_quickstart import draw, quickstart
from benchmarks.page_speed import decisions_page, step_time_page, store_page
from benchmarks.page_summary import all_standings, summary_page
from benchmarks.page_time import beside_page, driver_note, driver_page, long_page, prompt_page
from benchmarks.page_torch import chosen_page, torch_page, torch_runs
from benchmarks.runs import SHOWN, Runs

HERE = Path(__file__).resolve().parent
POINTS = 30  # of a curve in a figure


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """A page with one benchmark's part replaced, or appended if it has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    if not found:
        head = head.rstrip("\n") + "\n\n"
    body = "\n".join(lines).strip("\n")
    return f"{head}{begin}\n{body}\n{end}{tail or chr(10)}"


def light(svg: str) -> str:
    """A drawing with one line for each artist, its paths in tenths of a point."""

    def thinned(path: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", " ".join(path[0].split()))

    return re.sub(r">\n {4,}<", "><", re.sub(r'\bd="[^"]*"', thinned, svg))


def figure(
    path: Path,
    runs: Runs,
    lr_of: Callable[[str], float | None],
    along: Sequence[tuple[str, str]],
    variant: str = "base",
) -> None:
    """Held-out accuracy, means and 95 % bands over seeds, against each of some counters.

    Args:
        along: columns of the curves, and the labels of their axes.
    """
    shown = [p for p in (*SHOWN, "oracle", "oracle+keep_all") if p in runs.measured(variant)]
    with drawn(path, len(along)) as axes:
        for axis, (column, label) in zip(axes, along, strict=True):
            curves(axis, runs, lr_of, column, label, shown, variant)


def front_figure(path: Path, tiny: Runs | None, real: Runs | None) -> None:
    """The README's chart: held-out accuracy by rollouts, in both benchmarks, each policy at its best learning rate."""
    both = [
        (runs, title) for runs, title in ((real, "verl and vLLM on CPU"), (tiny, "one process")) if runs is not None
    ]
    with drawn(path, len(both), sharey=False) as axes:
        for axis, (runs, title) in zip(axes, both, strict=True):
            shown = [
                p for p in ("grpo", "grpo-4", "full", "solo", "oracle", "oracle+keep_all") if p in runs.measured("base")
            ]
            curves(axis, runs, lambda p, of=runs: of.best_lr("base", p), "rollouts", "rollouts", shown, "base")
            axis.set_title(title, fontsize=9)


@contextmanager
def drawn(path: Path, count: int, sharey: bool = True) -> Iterator[Any]:
    """Axes beside one another, written when all is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "verl-adaptive", "svg.fonttype": "none", "font.size": 9})
    drawing, axes = plt.subplots(1, count, figsize=(3.4 * count, 3.4), layout="constrained", sharey=sharey)
    yield np.atleast_1d(axes)
    np.atleast_1d(axes)[0].set_ylabel("held-out accuracy")
    np.atleast_1d(axes)[-1].legend(fontsize=7)
    text = io.StringIO()
    drawing.savefig(text, format="svg", metadata={"Date": None})
    plt.close(drawing)
    write_whole(path, light(text.getvalue()))


def curves(
    axis: Any,
    runs: Runs,
    lr_of: Callable[[str], float | None],
    column: str,
    label: str,
    shown: Sequence[str],
    variant: str,
) -> None:
    """One panel: each policy's mean, and its 95 % band."""
    for number, preset in enumerate(shown):
        lr = lr_of(preset)
        keys = [(variant, preset, lr, s) for s in runs.seeds(variant, preset, lr)] if lr is not None else []
        if not keys:
            continue
        end = min(runs.curve(k, column)[-1] for k in keys)
        if column == "rollouts":
            end = min(end, runs.budget[variant])
        x = np.linspace(0, end, POINTS)
        y = np.array([np.interp(x, runs.curve(k, column), runs.curve(k, "held_out")) for k in keys])
        colour = "black" if preset.startswith("oracle") else f"C{number}"
        name = "oracle" if preset.startswith("oracle") else preset
        axis.plot(x, y.mean(0), label=name, color=colour, lw=1.3, ls=":" if preset.startswith("oracle") else "-")
        if len(keys) > 1:
            half = np.array([interval(column_)[1] for column_ in y.T.tolist()])
            axis.fill_between(x, y.mean(0) - half, y.mean(0) + half, color=colour, alpha=0.1, lw=0)
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)


def pages(results: Path, results_page: Path, readme_page: Path) -> dict[Path, str]:
    """What the pages should say.

    Raises:
        SystemExit: a marker is missing in the README.
    """

    def read(name: str) -> Any:
        path = results / name
        return json.loads(path.read_text()) if path.exists() else None

    cells = read_rows(results / "train_cpu.jsonl")
    text = results_page.read_text() if results_page.exists() else "# Results\n"
    tiny = read("train_torch.json")
    if part := summary_page(tiny, cells):
        text = put(text, "summary", part)
    if cells:
        part = cpu_page(cells, torch_runs(tiny) if tiny else None)
        drawn = ["![accuracy](figures/train_cpu.svg)"]
        drawn = drawn if cpu_runs(cells).measured("base", train_cpu.COMMON_LR) else []
        text = put(text, "train_cpu", [part[0], "", *drawn, *part[1:]])
    if tiny:
        part = torch_page(tiny)
        text = put(text, "train_torch", [part[0], "", "![accuracy](figures/train_torch.svg)", *part[1:]])
    if chosen := read("choose_torch.json"):
        text = put(text, "choose_torch", chosen_page(chosen))
    parts = {
        "clock": clock_page,
        "store": store_page,
        "decisions": decisions_page,
        "beside": beside_page,
        "driver": driver_page,
        "prompt_cost": prompt_page,
        "step_time": step_time_page,
        "example_lines": lines_page,
    }
    for name, page in parts.items():
        if data := read(f"{name}.json"):
            text = put(text, name, page(data))
    if long := (read("step_time.json") or {}).get("long"):
        text = put(text, "long_answers", long_page(long))
    out = {results_page: text}
    asynchronous = results_page.parent.parent / "docs" / "async.md"
    if (data := read("clock.json")) and asynchronous.exists():
        out[asynchronous] = put(asynchronous.read_text(), "clock", async_table(data))
    found, docs = all_standings(tiny, cells), results_page.parent.parent / "docs"
    for name, part in (
        ("solo", solo_block(found, torch_runs(tiny) if tiny else None)),
        ("choosing", choosing_block(found)),
        ("pilot_commit", forms_block(torch_runs(tiny)) if tiny else []),
    ):
        if found and (docs / f"{name}.md").exists():
            out[docs / f"{name}.md"] = put((docs / f"{name}.md").read_text(), "measured", part)
    if (data := read("driver.json")) and (page := docs / "solo.md").exists():
        out[page] = put(out.get(page) or page.read_text(), "driver", driver_note(data))
    if tiny and readme_page.exists():
        front = readme_page.read_text()
        if "<!-- benchmark: begin -->" not in front:
            raise SystemExit(f"{readme_page} has no <!-- benchmark: begin --> marker to put the table at")
        front = put(front, "benchmark", readme(tiny, cells))
        if found := read("quickstart.json"):
            front = put(front, "quickstart", quickstart(found))
        out[readme_page] = put(front, "bill", bill(read("clock.json"), cells)) if read("clock.json") else front
    return out


def figures(results: Path, folder: Path) -> None:
    """Draw the plots again."""
    if (found := results / "quickstart.json").exists():
        draw(json.loads(found.read_text()), results.parents[1] / "docs" / "quickstart.svg")
    path = results / "train_torch.json"
    runs = real = None
    if path.exists():
        runs = torch_runs(json.loads(path.read_text()))
        along = [("rollouts", "rollouts"), ("updates", "updates"), ("tokens_trained", "trained tokens")]
        figure(folder / "train_torch.svg", runs, lambda p: runs.best_lr("base", p), along)
    cells = read_rows(results / "train_cpu.jsonl")
    if cells:
        real = cpu_runs(cells)
        along = [
            ("rollouts", "rollouts"),
            ("tokens_generated", "generated tokens"),
            ("tokens_trained", "trained tokens"),
        ]
        along.append(("seconds", "seconds of steps (machine shared)"))
        for variant, name in (("base", "train_cpu"), ("sparse", "train_cpu_sparse")):
            if real.measured(variant, train_cpu.COMMON_LR):
                figure(folder / f"{name}.svg", real, lambda _: train_cpu.COMMON_LR, along, variant)
    front_figure(folder / "front.svg", runs, real)


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
            sys.stdout.writelines(
                difflib.unified_diff(old.splitlines(True), text.splitlines(True), str(page), "from the JSON", n=0)
            )
        elif not options.check:
            page.write_text(text)
    if options.check:
        sys.exit(int(stale))
    figures(options.results, options.page.parent / "figures")


if __name__ == "__main__":
    run_script(main)
