"""All runs of a training benchmark, and what its tables ask of them; the same for the tiny model and the real pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cells import interval

__all__ = ["SHOWN", "Runs", "details", "ends_page", "missing", "pm", "smoothed", "table"]

#: Policies that the plots show.
SHOWN = ("grpo", "dapo", "greso", "aero", "cero", "pilot_commit", "full", "grpo-4", "solo")

GRID = 240
ENOUGH = 5  # seeds that a learning rate must have to be chosen, if any has as many
WINDOW = 0.1  # accuracies are means over this share of the budget, up to the point in question

Key = tuple[str, str, float, int]  # variant, preset, learning rate, seed


def smoothed(x: np.ndarray, y: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """A curve on an even grid, each point a mean over the window before it.

    Args:
        x: where it was measured, from 0.
        y: what.
        unit: the budget in the unit of ``x``; the window is a share of it.

    Returns:
        Points from 0 to the last measured one, as shares of ``unit``, and the values there.
    """
    points = np.arange(int(np.floor(GRID * x[-1] / unit + 1e-9)) + 1) / GRID
    raw = np.interp(points * unit, x, y)
    total = np.concatenate([[0.0], np.cumsum(raw)])
    end = np.arange(1, len(raw) + 1)
    begin = np.maximum(end - round(WINDOW * GRID), 0)
    return points, (total[end] - total[begin]) / (end - begin)


@dataclass
class Runs:
    """Cells of one benchmark.

    Attributes:
        cells: as in the JSON, by key.
        columns: names of the entries of a curve's points.
        budget: rollouts, by variant.
        updates: GRPO's updates, by variant.
        presets: all names, in order.
    """

    cells: dict[Key, dict[str, Any]]
    columns: Sequence[str]
    budget: dict[str, int]
    updates: dict[str, int]
    presets: Sequence[str]

    def __post_init__(self) -> None:
        self._smooth: dict[tuple[Key, str, str], tuple[np.ndarray, np.ndarray]] = {}

    def curve(self, key: Key, column: str) -> np.ndarray:
        """One column of a run's curve."""
        at = list(self.columns).index(column)
        return np.array([point[at] for point in self.cells[key]["curve"]], dtype=float)

    def smooth(self, key: Key, along: str = "rollouts", what: str = "held_out") -> tuple[np.ndarray, np.ndarray]:
        """A run's accuracy along rollouts or updates, as shares of GRPO's."""
        if (key, along, what) not in self._smooth:
            unit = self.budget[key[0]] if along == "rollouts" else self.updates[key[0]]
            self._smooth[key, along, what] = smoothed(self.curve(key, along), self.curve(key, what), unit)
        return self._smooth[key, along, what]

    def final(self, key: Key, what: str = "held_out") -> float | None:
        """Accuracy where the budget is spent; None: the run ended long before.

        A sampler that plans its own budget may end a step or two early: within a twentieth counts as there.
        """
        points, values = self.smooth(key, what=what)
        return float(values[min(GRID, len(values) - 1)]) if points[-1] >= 0.95 else None

    def common_updates(self, key: Key, base: Key) -> float:
        """Updates that both runs have made at the budget, as a share of GRPO's: where they are compared."""
        return min(self.spent(k, "updates") for k in (key, base)) / self.updates[key[0]]

    def at_updates(self, key: Key, share: float) -> float:
        """Accuracy after a share of GRPO's updates."""
        points, values = self.smooth(key, "updates")
        return float(np.interp(share, points, values))

    def spent(self, key: Key, column: str, rollouts: float = 1.0) -> float:
        """A counter's value after a share of the budget's rollouts."""
        return float(np.interp(rollouts * self.budget[key[0]], self.curve(key, "rollouts"), self.curve(key, column)))

    def informative(self, keys: Sequence[Key]) -> float:
        """Share of finished groups with right and wrong answers, up to the budget; mean over runs."""
        return float(np.mean([self.spent(k, "informative") / self.spent(k, "groups") for k in keys]))

    def needed(self, key: Key, target: float) -> float | None:
        """Rollouts, as a share of the budget, at which the target is reached for the first time; None: never."""
        points, values = self.smooth(key)
        hit = np.flatnonzero(values >= target - 1e-12)
        return float(points[hit[0]]) if len(hit) else None

    def seeds(self, variant: str, preset: str, lr: float) -> list[int]:
        """Seeds of a cell that reached the budget."""
        found = sorted(key[3] for key in self.cells if key[:3] == (variant, preset, lr))
        return [s for s in found if self.final((variant, preset, lr, s)) is not None]

    def paired(self, variant: str, preset: str, lr: float, base_lr: float) -> list[int]:
        """Seeds that both this preset and GRPO have."""
        base = self.seeds(variant, "grpo", base_lr)
        return [s for s in self.seeds(variant, preset, lr) if s in base]

    def lrs(self, variant: str) -> list[float]:
        return sorted({key[2] for key in self.cells if key[0] == variant})

    def best_lr(self, variant: str, preset: str) -> float | None:
        """The learning rate of the highest final accuracy over the seeds that all rates have; None: not measured.

        A rate with fewer than ENOUGH seeds is left out if another has more.
        """
        seeds = {lr: self.seeds(variant, preset, lr) for lr in self.lrs(variant)}
        most = max((len(s) for s in seeds.values()), default=0)
        if most == 0:
            return None
        seeds = {lr: s for lr, s in seeds.items() if len(s) >= min(most, ENOUGH)}
        common = sorted(set.intersection(*map(set, seeds.values()))) or None
        return max(
            seeds, key=lambda lr: np.mean([self.final((variant, preset, lr, s)) or 0.0 for s in common or seeds[lr]])
        )

    def gain(self, variant: str, preset: str, lr: float, base_lr: float, along: str = "rollouts") -> list[float]:
        """Accuracy less GRPO's of the same seed, over the seeds that have both.

        Args:
            along: ``rollouts``: at the budget; ``updates``: at the most updates that both have made by then.
        """
        out = []
        for seed in self.paired(variant, preset, lr, base_lr):
            key, base = (variant, preset, lr, seed), (variant, "grpo", base_lr, seed)
            if along == "updates":
                share = self.common_updates(key, base)
                out.append(self.at_updates(key, share) - self.at_updates(base, share))
            else:
                out.append((self.final(key) or 0.0) - (self.final(base) or 0.0))
        return out

    def measured(self, variant: str, lr: float | None = None) -> list[str]:
        """Presets that have runs."""
        has = {key[1] for key in self.cells if key[0] == variant and (lr is None or key[2] == lr)}
        return [preset for preset in self.presets if preset in has]


def pm(values: Iterable[float | None], form: str = "{:.3f}") -> str:
    """Mean ± half width of the 95 % interval; the mean alone for one value, a dash for none."""
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    mean, half = interval(known)
    return form.format(mean) if len(known) == 1 else f"{form.format(mean)} ± {form.format(half).lstrip('+')}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table: the first column to the left, the others to the right."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join([":--", *["--:"] * (len(head) - 1)]) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def results(runs: Runs, variant: str, lr_of: Callable[[str], float | None]) -> tuple[list[str], list[str]]:
    """Two tables: what was reached, and what it cost; a sentence where there is no GRPO to set beside.

    Args:
        lr_of: the learning rate to show a preset at.
    """
    base_lr = lr_of("grpo")
    reached, cost = [], []
    for preset in runs.measured(variant):
        lr = lr_of(preset)
        if lr is None or base_lr is None or not (seeds := runs.paired(variant, preset, lr, base_lr)):
            continue
        keys = [(variant, preset, lr, s) for s in seeds]
        base = [(variant, "grpo", base_lr, s) for s in seeds]
        targets = [runs.final(b) for b in base]
        needed = [runs.needed(k, t) for k, t in zip(keys, targets, strict=True)]
        hit = [(k, b, x) for k, b, x in zip(keys, base, needed, strict=True) if x is not None]
        count = "" if len(hit) == len(seeds) else f" ({len(hit)} of {len(seeds)})"
        is_base = preset == "grpo"
        reached.append(
            [
                f"`{preset}`",
                f"{lr:g}",
                str(len(seeds)),
                pm([runs.final(k) for k in keys]),
                "" if is_base else pm(runs.gain(variant, preset, lr, base_lr), "{:+.3f}"),
                f"{np.mean([runs.common_updates(k, b) for k, b in zip(keys, base, strict=True)]):.2f}",
                "" if is_base else pm(runs.gain(variant, preset, lr, base_lr, "updates"), "{:+.3f}"),
                pm([runs.final(k, what="pool") for k in keys]),
                pm([x for _, _, x in hit], "{:.2f}") + count,
            ]
        )
        trained = [runs.spent(k, "tokens_trained") for k in keys]
        whole = [runs.spent(b, "tokens_trained") + runs.spent(b, "tokens_zero_advantage") for b in base]
        cost.append(
            [
                f"`{preset}`",
                f"{lr:g}",
                f"{np.mean([runs.spent(k, 'updates') for k in keys]):.0f}",
                f"{runs.informative(keys):.2f}",
                f"{np.mean([t / runs.spent(k, 'tokens_generated') for k, t in zip(keys, trained, strict=True)]):.2f}",
                pm([t / w for t, w in zip(trained, whole, strict=True)], "{:.2f}"),
                pm([t / runs.spent(b, "tokens_trained") for t, b in zip(trained, base, strict=True)], "{:.2f}"),
                pm([runs.spent(k, "tokens_trained", x) / runs.spent(b, "tokens_trained") for k, b, x in hit], "{:.2f}")
                + count,
            ]
        )
    if not reached:
        names = ", ".join(f"`{preset}`" for preset in runs.measured(variant))
        return [f"GRPO was not run here; {names} beside GRPO's usual setting: [above](#all-at-a-glance).", ""], []
    first = table(
        [
            *("policy", "lr", "seeds", "held-out, equal rollouts", "against GRPO"),
            *("updates of both", "against GRPO, equal updates", "pool", "rollouts to target"),
        ],
        reached,
    )
    second = table(
        [
            *("policy", "lr", "updates", "informative", "trained / generated tokens"),
            *("training against verl's GRPO", "against GRPO less zero rows", "the same, to target"),
        ],
        cost,
    )
    return first, second


LEGEND = [
    "* *held-out*: accuracy (mean exact pass rate at temperature 1) of prompts that were never trained on, mean over the "
    "last tenth, ± half of the 95 % interval over seeds, at *equal rollouts*: where the budget is spent. *against GRPO*: "
    "the difference within the seed.",
    "* *equal updates*: the same difference where both have made the same number of optimizer updates: as many as the one "
    "with fewer has made at the budget (*updates of both*, as a share of GRPO's). It credits a policy that spends more "
    "rollouts on a step with nothing for them.",
    "* *rollouts to target*: rollouts, as a share of GRPO's, at which GRPO's final held-out accuracy of the same seed is "
    "first reached, among the seeds that reach it. GRPO itself may be there before its end, for curves go up and down.",
    "* *informative*: share of finished groups with right and wrong answers (a group of pilots is smaller, so fewer "
    "are). *training*: trained tokens, against GRPO as verl trains it (every row) and against GRPO with rows of zero "
    "advantage left out, which changes no gradient and is done in every preset: what lies below 1 there is the method's.",
]


def by_start(runs: Runs, variant: str, lr: float, bins: Sequence[Sequence[float]]) -> list[str]:
    """Held-out accuracy at the end, by the pass rate at the start."""
    names = [f"{low:g} to {min(high, 1.0):g}" for low, high in bins]
    rows = []
    for preset in runs.measured(variant, lr):
        cells = [runs.cells[variant, preset, lr, s] for s in runs.seeds(variant, preset, lr)]
        if cells:
            rows.append(
                [f"`{preset}`", *(pm([c["by_start"][b][2] for c in cells], "{:.2f}") for b in range(len(bins)))]
            )
    cells = [runs.cells[variant, "grpo", lr, s] for s in runs.seeds(variant, "grpo", lr)]
    if not cells:
        return []
    start = ["*start*", *(f"{np.mean([c['by_start'][b][1] for c in cells]):.2f}" for b in range(len(bins)))]
    count = ["*prompts*", *(f"{np.mean([c['by_start'][b][0] for c in cells]):.0f}" for b in range(len(bins)))]
    return table(["pass rate at the start", *names], [start, count, *rows])


#: What a run's end looks like, and how the tables call it.
ENDS = {"pass@8": "pass@8", "entropy": "entropy of a token, nats", "length": "tokens of a response"}


def ends(runs: Runs, variant: str, lr_of: Callable[[str], float | None]) -> list[str]:
    """pass@8, entropy and length of held-out responses at the end; empty if no run has kept them.

    Args:
        lr_of: the learning rate to show a preset at.
    """
    rows, start = [], dict[str, list[float]]()
    for preset in runs.measured(variant):
        lr = lr_of(preset)
        cells = [runs.cells[variant, preset, lr, s] for s in runs.seeds(variant, preset, lr)] if lr is not None else []
        if cells := [cell for cell in cells if cell.get("ends")]:
            rows.append(
                [
                    f"`{preset}`",
                    f"{lr:g}",
                    str(len(cells)),
                    pm([c["curve"][-1][2] for c in cells]),
                    *(pm([c["ends"][name][1] for c in cells], "{:.2f}") for name in ENDS),
                ]
            )
            for name in ENDS:
                start.setdefault(name, []).extend(c["ends"][name][0] for c in cells)
    if not rows:
        return []
    first = ["*start*", "", "", "", *(f"{np.mean(start[name]):.2f}" for name in ENDS)]
    return table(["policy", "lr", "seeds", "accuracy", *ENDS.values()], [first, *rows])


def where(runs: Runs, variant: str, lr: float) -> list[str]:
    """Shares of the generated rollouts, by what became of them, over the whole run."""
    chosen = {p: [runs.cells[variant, p, lr, s]["rollouts"] for s in runs.seeds(variant, p, lr)] for p in runs.presets}
    chosen = {p: cells for p, cells in chosen.items() if cells}
    reasons = sorted({r for cells in chosen.values() for c in cells for r, n in c["dropped"].items() if n})
    rows = []
    for preset, cells in chosen.items():
        whole = sum(c["generated"] for c in cells)
        parts = [sum(c["trained"] for c in cells), sum(c["surplus"] + c["held"] for c in cells)]
        parts += [sum(c["dropped"].get(r, 0) for c in cells) for r in reasons]
        rows.append([f"`{preset}`", *(f"{p / whole:.0%}" if p else "" for p in parts)])
    return table(["policy", "trained", "surplus", *(r.replace("_", " ") for r in reasons)], rows)


def calibration(runs: Runs, variant: str, lr: float) -> list[str]:
    """How far the table's estimates are from the exact pass rates at the end of a run."""
    rows = []
    names = ("history_bias", "history_error", "last_visit_bias", "last_visit_error")
    for preset in runs.measured(variant, lr):
        cells = [runs.cells[variant, preset, lr, s]["calibration"] for s in runs.seeds(variant, preset, lr)]
        if cells:
            visited = f"{np.mean([c['visited'] for c in cells]):.0%}"
            rows.append(
                [
                    f"`{preset}`",
                    visited,
                    *(pm([c[n] for c in cells], "{:+.3f}" if "bias" in n else "{:.3f}") for n in names),
                ]
            )
    head = ["policy", "visited", "all visits: bias", "error", "latest visit: bias", "error"]
    return table(head, rows)


def verdicts(runs: Runs, variant: str) -> list[str]:
    """What the numbers say, as sentences: a difference is significant when its 95 % interval excludes zero."""
    base_lr = runs.best_lr(variant, "grpo")
    if base_lr is None:
        return []
    rated, alone = [], []
    for preset in runs.measured(variant):
        lr = runs.best_lr(variant, preset)
        gain = runs.gain(variant, preset, lr, base_lr) if lr is not None and preset != "grpo" else []
        if len(gain) > 1:
            rated.append((*interval(gain), preset))
        elif gain:
            alone.append(preset)
    rated.sort(reverse=True)
    out = []
    groups = (
        ("significantly better than GRPO", [r for r in rated if r[0] > r[1]]),
        ("significantly worse than GRPO", [r for r in rated if r[0] < -r[1]]),
        ("no significant difference from GRPO", [r for r in rated if abs(r[0]) <= r[1]]),
    )
    for title, chosen in groups if rated else ():
        listed = "; ".join(f"`{name}` ({mean:+.3f} ± {half:.3f})" for mean, half, name in chosen) or "none"
        out.append(f"* At equal rollouts, each at its best learning rate, {title}: {listed}.")
    if alone:
        out.append(f"* One seed only, so nothing can be said: {', '.join(f'`{p}`' for p in alone)}.")
    return out


def aim(runs: Runs, variant: str, preset: str = "full") -> list[str]:
    """How near a preset comes to what the project aims at, each at its own best learning rate."""
    lr, base_lr = runs.best_lr(variant, preset), runs.best_lr(variant, "grpo")
    if lr is None or base_lr is None:
        return []
    seeds = runs.paired(variant, preset, lr, base_lr)
    out = [
        f"The aim for `{preset}`: GRPO's final accuracy with at most half of GRPO's rollouts and a quarter of DAPO's, half "
        f"of the training, and 0.9 of what the oracle gains. Measured, each at its best learning rate, {len(seeds)} seeds:",
        "",
    ]
    rows = []
    targets = {s: runs.final((variant, "grpo", base_lr, s)) for s in seeds}
    needed = {s: runs.needed((variant, preset, lr, s), t) for s, t in targets.items() if t is not None}
    hit = [s for s, x in needed.items() if x is not None]
    if hit:
        share = [needed[s] for s in hit]
        rows.append(
            [
                "rollouts to GRPO's final accuracy, of GRPO's",
                "0.50",
                f"{pm(share, '{:.2f}')} ({len(hit)} of {len(seeds)} seeds)",
            ]
        )
        grpo = [runs.needed((variant, "grpo", base_lr, s), targets[s]) or 1.0 for s in hit]
        rows.append(
            [
                "the same, of the rollouts at which GRPO first got there",
                "0.50",
                pm([a / b for a, b in zip(share, grpo, strict=True)], "{:.2f}"),
            ]
        )
    dapo_lr = runs.best_lr(variant, "dapo")
    if dapo_lr is not None:
        dapo = {
            s: runs.needed((variant, "dapo", dapo_lr, s), targets[s])
            for s in hit
            if (variant, "dapo", dapo_lr, s) in runs.cells
        }
        ratio = [needed[s] / x for s, x in dapo.items() if x]
        text = f"{pm(ratio, '{:.2f}')} ({len(ratio)} of {len(seeds)} seeds)"
        # DAPO ends at the budget: where it has not got there, it needs more than that
        bound = [needed[s] for s, x in dapo.items() if not x]
        if bound:
            text += f"; below {pm(bound, '{:.2f}')} in the {len(bound)} where DAPO never got there"
        rows.append(["rollouts to it, of DAPO's", "0.25", text])
    for label, columns in (
        ("training to it, of verl's GRPO (all rows)", ("tokens_trained", "tokens_zero_advantage")),
        ("training to it, of GRPO with zero rows left out", ("tokens_trained",)),
    ):
        ratio = [
            runs.spent((variant, preset, lr, s), "tokens_trained", needed[s])
            / sum(runs.spent((variant, "grpo", base_lr, s), c) for c in columns)
            for s in hit
        ]
        rows.append([label, "0.50", pm(ratio, "{:.2f}")])
    oracles = [p for p in runs.measured(variant) if p.startswith("oracle")]
    best: tuple[float, str, float] | None = None
    for oracle in oracles:
        o_lr = runs.best_lr(variant, oracle)
        gain = runs.gain(variant, oracle, o_lr, base_lr) if o_lr is not None else []
        if gain and (best is None or np.mean(gain) > best[0]):
            best = float(np.mean(gain)), oracle, float(o_lr or 0)
    if best is not None and best[0] > 0:
        mine = dict(zip(seeds, runs.gain(variant, preset, lr, base_lr), strict=True))
        both = [s for s in runs.paired(variant, best[1], best[2], base_lr) if s in mine]
        share = float(np.mean([mine[s] for s in both])) / best[0]
        half = interval(runs.gain(variant, best[1], best[2], base_lr))[1]
        unclear = ", itself not significant" if half >= best[0] else ""
        rows.append(
            [
                f"gain over GRPO, of `{best[1]}`'s {best[0]:+.3f} ± {half:.3f} ({len(both)} seeds{unclear})",
                "0.90",
                f"{share:.2f}",
            ]
        )
    return [*out, *table(["", "aim", "measured"], rows)]


def details(runs: Runs, lr: float, bins: Sequence[Sequence[float]]) -> list[str]:
    """Accuracy by starting difficulty, where rollouts went, and calibration, at one learning rate; empty without runs."""
    if not runs.measured("base", lr):
        return []
    return [
        f"### Held-out accuracy by pass rate at the start (learning rate {lr:g})",
        "",
        *by_start(runs, "base", lr, bins),
        f"### Where the rollouts went (learning rate {lr:g})",
        "",
        *where(runs, "base", lr),
        f"### How good the statistics are (learning rate {lr:g})",
        "",
        "At the end of a run: estimate less exact pass rate, mean (*bias*) and mean absolute (*error*), over the visited "
        "prompts of the pool. Estimates lag behind a model that learns.",
        "",
        *calibration(runs, "base", lr),
    ]


def ends_page(runs: Runs, variants: Sequence[str], place: str) -> list[str]:
    """What the ends of the runs look like, each policy at its best learning rate; empty if none has kept it."""
    lines = []
    for variant in variants:
        if part := ends(runs, variant, lambda p, v=variant: runs.best_lr(v, p)):
            lines += [f"Pool: {variant}.", "", *part]
    if not lines:
        return []
    return [
        f"### Is anything lost at the end, {place}?",
        "",
        "Held-out, four responses sampled to each prompt at the end of a run; accuracy and pass@8 from exact pass rates. "
        "Runs of before this was kept are not among them. A policy that collapses has little entropy and a pass@8 near its "
        "accuracy.",
        "",
        *lines,
    ]


def missing(runs: Runs, wanted: Sequence[tuple[str, str, float]], seeds: int) -> list[str]:
    """Cells with fewer seeds than wanted."""
    short: dict[tuple[str, float], list[str]] = {}
    lost = 0
    for variant, preset, lr in wanted:
        have = len([key for key in runs.cells if key[:3] == (variant, preset, lr)])
        if have < seeds:
            lost += seeds - have
            short.setdefault((variant, lr), []).append(f"`{preset}` {have}")
    if not short:
        return []
    listed = "; ".join(f"{variant} at {lr:g}: {', '.join(names)}" for (variant, lr), names in short.items())
    return [
        f"Not run yet, for lack of time: {lost} runs. The same command runs them and leaves the others alone. Cells with "
        f"fewer than {seeds} seeds, and how many they have: {listed}.",
        "",
    ]
