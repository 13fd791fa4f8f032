"""The tables of ``train_torch.py``, from its JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Runs", "report", "smoothed", "write"]

BEGIN, END = "<!-- train_torch: begin -->", "<!-- train_torch: end -->"
GRID = 240
WINDOW = 0.1  # accuracies are means over this share of the budget, up to the point in question

Cell: TypeAlias = "dict[str, Any]"


def smoothed(cell: Cell, budget: int, column: int = 2) -> np.ndarray:
    """Accuracy at GRID + 1 evenly spread numbers of rollouts from 0 to the budget; a run that ends early stays there."""
    points = np.linspace(0, budget, GRID + 1)
    curve = np.array(cell["curve"], dtype=float)
    raw = np.interp(points, curve[:, 0], curve[:, column])
    back = round(WINDOW * GRID)
    total = np.concatenate([[0.0], np.cumsum(raw)])
    end = np.arange(1, len(raw) + 1)
    begin = np.maximum(end - back, 0)
    return (total[end] - total[begin]) / (end - begin)


class Runs:
    """All cells of a results file."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, settings = data, data["settings"]
        self.budget = settings["steps"] * settings["batch"] * settings["n"]
        self.cells = {(c["preset"], c["lr"], c["seed"]): c for c in data["cells"]}
        self.presets = [p for p in data["presets"] if any(c["preset"] == p for c in data["cells"])]
        self.lrs = sorted({c["lr"] for c in data["cells"]})
        self._curves = {key: smoothed(cell, self.budget) for key, cell in self.cells.items()}

    def seeds(self, preset: str, lr: float) -> list[int]:
        """Seeds that both this preset and GRPO have."""
        return sorted(s for p, r, s in self.cells if (p, r) == (preset, lr) and ("grpo", lr, s) in self.cells)

    def final(self, preset: str, lr: float, seed: int) -> float:
        return float(self._curves[preset, lr, seed][-1])

    def average(self, preset: str, lr: float, seed: int) -> float:
        """Held-out accuracy averaged over the budget."""
        return float(self._curves[preset, lr, seed].mean())

    def needed(self, preset: str, lr: float, seed: int, target: float) -> float | None:
        """Share of the budget at which the curve reaches ``target`` for the first time; None: never."""
        hit = np.flatnonzero(self._curves[preset, lr, seed] >= target - 1e-12)
        return hit[0] / GRID if len(hit) else None

    def best_lr(self, preset: str) -> float:
        rated = [
            (np.mean([self.final(preset, lr, s) for s in self.seeds(preset, lr)]), lr) for lr in self._complete(preset)
        ]
        return max(rated)[1]

    def _complete(self, preset: str) -> list[float]:
        most = max(len(self.seeds(preset, lr)) for lr in self.lrs)
        return [lr for lr in self.lrs if len(self.seeds(preset, lr)) >= max(1, most - 1)]


def spread(values: Sequence[float], form: str = "{:.3f}") -> str:
    """Mean ± standard error; the mean alone for one value."""
    if not len(values):
        return "–"
    mean = form.format(np.mean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(error(values)).lstrip('+')}"


def error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join([":--", *["--:"] * (len(head) - 1)]) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _results(runs: Runs, lr_of: Callable[[str], float], with_lr: bool) -> list[str]:
    target_lr = lr_of("grpo")
    rows = []
    for preset in runs.presets:
        lr = lr_of(preset)
        seeds = [s for s in runs.seeds(preset, lr) if ("grpo", target_lr, s) in runs.cells]
        if not seeds:
            continue
        final = [runs.final(preset, lr, s) for s in seeds]
        gain = [runs.final(preset, lr, s) - runs.final("grpo", target_lr, s) for s in seeds]
        needed = [runs.needed(preset, lr, s, runs.final("grpo", target_lr, s)) for s in seeds]
        reached = [x for x in needed if x is not None]
        share = spread([1.0 if x is None else x for x in needed], "{:.2f}")
        cells = [runs.cells[preset, lr, s] for s in seeds]
        base = [runs.cells["grpo", target_lr, s] for s in seeds]
        rows.append(
            [
                f"{preset}",
                *([f"{lr:g}"] if with_lr else []),
                spread(final),
                "–" if preset == "grpo" else spread(gain, "{:+.3f}"),
                spread([runs.average(preset, lr, s) for s in seeds]),
                share if len(reached) == len(seeds) else f"≥ {share} ({len(reached)} of {len(seeds)})",
                spread([smoothed(c, runs.budget, 3)[-1] for c in cells]),
                f"{np.mean([c['curve'][-1][1] for c in cells]):.0f}",
                f"{np.mean([c['informative'] / c['groups'] for c in cells]):.2f}",
                f"{np.mean([c['tokens']['trained'] / c['tokens']['generated'] for c in cells]):.2f}",
                spread(
                    [c["tokens"]["trained"] / b["tokens"]["trained"] for c, b in zip(cells, base, strict=True)],
                    "{:.2f}",
                ),
            ]
        )
    head = [
        "policy",
        *(["lr"] if with_lr else []),
        "held-out",
        "against GRPO",
        "mean over the run",
        "rollouts to target",
    ]
    head += ["pool", "updates", "informative", "trained/generated", "training against GRPO"]
    return _table(head, rows)


def _by_start(runs: Runs, lr: float) -> list[str]:
    bins = ("below 0.02", "0.02 to 0.2", "0.2 to 0.8", "0.8 and more")
    rows = []
    for preset in runs.presets:
        cells = [runs.cells[preset, lr, s] for s in runs.seeds(preset, lr)]
        if cells:
            rows.append([preset, *(spread([c["by_start"][b][2] for c in cells], "{:.2f}") for b in range(len(bins)))])
    cells = [runs.cells["grpo", lr, s] for s in runs.seeds("grpo", lr)]
    rows.insert(0, ["*start*", *(spread([c["by_start"][b][1] for c in cells], "{:.2f}") for b in range(len(bins)))])
    rows.insert(1, ["*questions*", *(f"{np.mean([c['by_start'][b][0] for c in cells]):.0f}" for b in range(len(bins)))])
    return _table(["policy", *bins], rows)


def _where(runs: Runs, lr: float) -> list[str]:
    reasons = sorted({r for key, c in runs.cells.items() if key[1] == lr for r in c["rollouts"]["dropped"]})
    rows = []
    for preset in runs.presets:
        cells = [runs.cells[preset, lr, s]["rollouts"] for s in runs.seeds(preset, lr)]
        if cells:
            whole = sum(c["generated"] for c in cells)
            parts = [[c["trained"] for c in cells], [c["surplus"] + c["held"] for c in cells]]
            parts += [[c["dropped"].get(r, 0) for c in cells] for r in reasons]
            rows.append([preset, *(f"{sum(p) / whole:.0%}" if sum(p) else "" for p in parts)])
    return _table(["policy", "trained", "surplus", *(r.replace("_", " ") for r in reasons)], rows)


def _words(runs: Runs, full: Sequence[str]) -> list[str]:
    """What the numbers say, as sentences; a difference counts from two standard errors on."""
    out = _ranking(runs, full)
    rated: list[tuple[float, float, str]] = []
    for preset in runs.presets:
        lr, base = runs.best_lr(preset), runs.best_lr("grpo")
        seeds = [s for s in runs.seeds(preset, lr) if ("grpo", base, s) in runs.cells]
        gain = [runs.final(preset, lr, s) - runs.final("grpo", base, s) for s in seeds]
        if preset != "grpo" and gain:
            rated.append((float(np.mean(gain)), error(gain), preset))
    rated.sort(reverse=True)
    for title, chosen in (
        ("better than GRPO", [r for r in rated if r[0] > 2 * r[1]]),
        ("worse than GRPO", [r for r in rated if r[0] < -2 * r[1]]),
        ("not told apart from GRPO", [r for r in rated if abs(r[0]) <= 2 * r[1]]),
    ):
        listed = "; ".join(f"{name} ({gain:+.3f} ± {se:.3f})" for gain, se, name in chosen) or "none"
        out.append(f"* At each policy's best learning rate, {title} by two standard errors or more: {listed}.")
    out[-1] = out[-1].replace(" by two standard errors or more", "")
    for lr in runs.lrs:
        worse = []
        for preset in runs.presets:
            gain = [runs.final(preset, lr, s) - runs.final("grpo", lr, s) for s in runs.seeds(preset, lr)]
            if len(gain) > 1 and np.mean(gain) < -2 * error(gain):
                worse.append(f"{preset} ({np.mean(gain):+.3f})")
        out.append(
            f"* At learning rate {lr:g}, worse than GRPO by two standard errors or more: {'; '.join(worse) or 'none'}."
        )
    return [*out, ""]


def _ranking(runs: Runs, full: Sequence[str]) -> list[str]:
    """The policies in order, oracles apart, at each one's best learning rate and over all of them."""
    real = [p for p in runs.presets if not p.startswith("oracle") and runs.seeds(p, runs.best_lr(p))]
    at_best = {p: [runs.final(p, runs.best_lr(p), s) for s in runs.seeds(p, runs.best_lr(p))] for p in real}
    order = sorted(real, key=lambda p: -np.mean(at_best[p]))
    level = []
    for p in order[1:]:
        both = min(len(at_best[p]), len(at_best[order[0]]))
        behind = np.subtract(at_best[order[0]][:both], at_best[p][:both])
        if both > 1 and behind.mean() <= 2 * error(behind):
            level.append(p)
    everywhere = [p for p in real if all(runs.seeds(p, lr) for lr in runs.lrs)]
    mean = {p: np.mean([runs.average(p, lr, s) for lr in runs.lrs for s in runs.seeds(p, lr)]) for p in everywhere}
    steady = sorted(everywhere, key=lambda p: -mean[p])[:5]
    out = [
        f"* Highest final accuracy, each policy at its best learning rate: {order[0]} ({np.mean(at_best[order[0]]):.3f}); "
        f"not told apart from it (two standard errors of the difference within seeds): {', '.join(level) or 'none'}.",
        "* Highest accuracy averaged over the run and over all learning rates: "
        + ", ".join(f"{p} ({mean[p]:.3f})" for p in steady)
        + (f"; grpo {mean['grpo']:.3f}." if "grpo" in mean and "grpo" not in steady else "."),
    ]
    now = ", ".join(f"`{p}` (place {order.index(p) + 1} of {len(order)} by the first)" for p in full if p in order)
    out.append(f"* The shipped preset `full` is {now or 'none of these'}.")
    return out


def report(data: dict[str, Any], full: Sequence[str] = ()) -> str:
    """The page, in Markdown; ``full``: names that mean the shipped preset ``full``."""
    runs, s = Runs(data), data["settings"]
    seeds = sorted({c["seed"] for c in data["cells"]})
    counts = {(p, lr): len(runs.seeds(p, lr)) for p in data["presets"] for lr in runs.lrs}
    missing = [f"{p} at {lr:g}: {n} of {len(seeds)}" for (p, lr), n in counts.items() if n < len(seeds)]
    versions = ", ".join(f"{k} {v}" for k, v in data["machine"]["versions"].items())
    lines = [
        "## A tiny model in one process",
        "",
        f"`benchmarks/train_torch.py`: {runs.budget:,} generated rollouts in every run (what GRPO generates in "
        f"{s['steps']} steps of {s['batch']} prompts × {s['n']} rollouts), {s['updates']} optimizer updates a step, "
        f"{s['pool']} training prompts, {s['held_out']} held-out ones, seeds {', '.join(map(str, seeds))}. The model has "
        f"{s['layers']} layers of width {s['hidden']} and does sums, differences and products; the pass rate of a prompt "
        "is exact, from one forward pass, so evaluation has no sampling noise. Within a seed all policies start from the "
        "same weights. The policies, the engine and the cut into minibatches are the package's own.",
        "",
        "This is a tiny model, without verl, vLLM or asynchrony. It can rank policies by what they do with rollouts; it "
        "says nothing about wall clock, and effects of size are not those of a language model. A policy that spends more "
        "rollouts on a step makes fewer updates of the same budget, one that spends less makes more; see the column "
        "*updates* before crediting a policy with a gain.",
        "",
        "* *held-out*: accuracy (mean exact pass rate) at the budget's end, mean over its last tenth, ± standard error "
        "over seeds; *against GRPO*: the difference within the seed.",
        "* *rollouts to target*: share of the budget until GRPO's final held-out accuracy of the same seed is reached; "
        "runs that never reach it count as 1, and the number that does is given. GRPO itself may be there before its end, "
        "for curves go up and down.",
        "* *informative*: share of finished groups with right and wrong answers (a group of pilots is smaller, so fewer "
        "are); *trained/generated*: tokens, rows of zero advantage being left out everywhere, in GRPO too; *training "
        "against GRPO*: trained tokens over GRPO's.",
        "* *oracle*: sees the exact pass rates and draws prompts in proportion to p (1 − p); not a method.",
        "",
    ]
    for lr in runs.lrs:
        lines += [f"### Learning rate {lr:g}, the same for all", "", *_results(runs, lambda _, lr=lr: lr, False)]
    if len(runs.lrs) > 1:
        lines += ["### Each policy at its best learning rate", ""]
        lines += [
            f"Of {', '.join(f'{lr:g}' for lr in runs.lrs)}, chosen by the same numbers, which flatters all a little.",
            "",
        ]
        lines += _results(runs, runs.best_lr, True)
    lines += ["### What it says", "", *_words(runs, full)]
    for lr in runs.lrs:
        lines += [f"### Held-out accuracy at the end, by pass rate at the start (learning rate {lr:g})", ""]
        lines += _by_start(runs, lr)
    lines += [f"### Where the rollouts went (learning rate {runs.lrs[-1]:g})", "", *_where(runs, runs.lrs[-1])]
    cpu = [c["seconds"]["all"] for c in data["cells"]]
    lines += [
        "### How it was made",
        "",
        f"`{data['command']}`, on {data['machine']['cpu']} ({data['machine']['cores']} cores, one a run), Python "
        f"{data['machine']['python']}, {versions}. A run took {np.mean(cpu):.1f} s of CPU time ({min(cpu):.1f} to "
        f'{max(cpu):.1f}), warm start apart. One cell again: `python benchmarks/train_torch.py --presets "greso" --lrs '
        f"{runs.lrs[-1]:g} --seeds 1 --fresh`. These tables again: `python benchmarks/train_torch.py --report`.",
        "",
        "The words behind each name:",
        "",
        *(
            f"* {name}: `+adaptive={' '.join(data['presets'][name])}`"
            for name in runs.presets
            if not name.startswith("oracle")
        ),
        "",
    ]
    if missing:
        lines += [f"Not measured, for lack of time: {'; '.join(missing)}.", ""]
    return "\n".join(lines)


def write(data: dict[str, Any], page: Path, full: Sequence[str] = ()) -> None:
    """Put the report into its part of the page; other parts stay."""
    old = page.read_text() if page.exists() else "# Results\n\n"
    head, _, rest = old.partition(BEGIN)
    tail = rest.partition(END)[2]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{head}{BEGIN}\n{report(data, full)}\n{END}{tail or chr(10)}")
