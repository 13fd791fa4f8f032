"""Arms of an experiment, a few seeds each: differences paired by seed at the same cost, and the cost of getting as far.

>>> grpo = [Trial(seed, np.array([0, 100, 200]), np.array([0.2, 0.4, end])) for seed, end in ((1, 0.50), (2, 0.52), (3, 0.48))]
>>> solo = [Trial(seed, np.array([0, 100, 200]), np.array([0.2, 0.5, end])) for seed, end in ((1, 0.60), (2, 0.61), (3, 0.59))]
>>> print(sentence(outcomes({"grpo": grpo, "solo": solo})))
solo minus grpo, final value: +0.100 ± 0.025 (3 seeds, significant). solo reaches grpo's final value with 50% of grpo's cost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.report.course import priced, spent
from verl_adaptive.report.learning_curve import Curve, headline
from verl_adaptive.significance import difference
from verl_adaptive.stats import Run
from verl_adaptive.stats.run import VALIDATE
from verl_adaptive.stats.snapshot import FOLDER
from verl_adaptive.text import number, span

#: What a run is paid in: name → the axis of a plot.
COSTS = {"rollouts": "rollouts generated", "tokens": "response tokens generated", "hours": "hours of training"}


@dataclass(frozen=True)
class Trial:
    """One run of an arm.

    Attributes:
        seed: what it is paired by.
        cost: float64 ``(k,)``, rising: rollouts, tokens or hours spent at each measurement.
        value: float64 ``(k,)``, what was measured.
        errors: float64 ``(k,)``, standard error of each value over validation prompts; None: not known.
        spent: what it had spent at each measurement in all, by the names of :data:`COSTS` and ``step``; empty: not known.
    """

    seed: int
    cost: np.ndarray
    value: np.ndarray
    errors: np.ndarray | None = None
    spent: Mapping[str, np.ndarray] = field(default_factory=dict)

    def at(self, cost: float) -> float:
        """The value at a cost, between two measurements on the line from one to the other."""
        return float(np.interp(cost, self.cost, self.value))

    def error_at(self, cost: float) -> float | None:
        """The standard error of a value at a cost; None: not known."""
        return None if self.errors is None else float(np.interp(cost, self.cost, self.errors))

    def needed(self, target: float) -> float | None:
        """The cost at which a value is first reached; None: it never is.

        >>> Trial(1, np.array([0, 100, 200]), np.array([0.2, 0.4, 0.6])).needed(0.5)
        150.0
        """
        above = np.flatnonzero(self.value >= target - 1e-12)
        if not len(above):
            return None
        at = int(above[0])
        if at == 0:
            return float(self.cost[0])
        (x, further), (y, higher) = self.cost[at - 1 : at + 1], self.value[at - 1 : at + 1]
        return float(x + (further - x) * (target - y) / (higher - y))


@dataclass(frozen=True)
class Outcome:
    """What came of an arm.

    Attributes:
        name: the arm's.
        finals: value by seed, at the cost that every arm has spent with that seed.
        ends: that cost by seed; infinite: each run's own end.
        costs: by seed, what its run spent in all.
        gains: by seed, minus the first arm's; none for the first.
        needed: by seed, cost of reaching the target; None: never.
        shares: by seed, the same as a share of what the first arm needs, or spends in all where it never gets there;
            infinite: never.
        compared: seeds that the first arm shares with another one; of an arm that shares none, all.
    """

    name: str
    finals: dict[int, float]
    ends: dict[int, float]
    costs: dict[int, float]
    gains: dict[int, float] = field(default_factory=dict)
    needed: dict[int, float | None] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)
    compared: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean of the final values, of the seeds that are compared."""
        return float(np.mean([self.finals[seed] for seed in self.compared]))


def median(shares: Sequence[float]) -> float | None:
    """The median over seeds, of which one that never gets there is more than any other; None: the median never does."""
    found = float(np.median(shares)) if len(shares) else np.inf
    return found if np.isfinite(found) else None


def outcomes(arms: Mapping[str, Sequence[Trial]], *, target: float | None = None, whole: bool = False) -> list[Outcome]:
    """Every arm beside the first.

    Args:
        arms: name → its runs.
        target: the value whose cost is asked for; None: where the first arm ends with the same seed.
        whole: each run's own end, whatever it has spent.

    Raises:
        ConfigError: the first arm reaches the target before its first step, so that nothing is a share of that.
    """
    first = {trial.seed: trial for trial in next(iter(arms.values()))}
    for trial in first.values():
        if target is not None and trial.needed(target) == 0:
            hint = f"{next(iter(arms))} has {trial.value[0]:g} before its first step; name a target above {trial.value[0]:g}"
            raise ConfigError("--target", target, hint)
    ends: dict[int, float] = {}
    for trial in (trial for trials in arms.values() for trial in trials):
        ends[trial.seed] = np.inf if whole else min(ends.get(trial.seed, np.inf), float(trial.cost[-1]))
    out: list[Outcome] = []
    for name, trials in arms.items():
        finals = {t.seed: t.at(ends[t.seed]) for t in trials}
        made = Outcome(
            name, finals, {t.seed: ends[t.seed] for t in trials}, {t.seed: float(t.cost[-1]) for t in trials}
        )
        base = out[0].finals if out else finals
        for trial in trials:
            if trial.seed not in base:
                continue
            other = first[trial.seed]
            aim = base[trial.seed] if target is None else target
            whole_cost = float(other.cost[-1])
            whole_cost = min(whole_cost, ends[trial.seed]) if target is None else other.needed(target) or whole_cost
            needed = made.needed[trial.seed] = trial.needed(aim)
            made.shares[trial.seed] = needed / whole_cost if needed is not None and whole_cost else np.inf
            if out:
                made.gains[trial.seed] = finals[trial.seed] - base[trial.seed]
        out.append(made)
    for one in out:
        gains = one.gains if one is not out[0] else {seed for other in out for seed in other.gains}
        one.compared.extend(sorted(gains or one.finals))
    return out


def sentence(found: Sequence[Outcome], cost: str = "cost", target: float | None = None) -> str:
    """Each arm beside the first, in words; ``cost`` is what is paid in, ``target`` as :func:`outcomes` got it."""
    first, *others = found
    aim = f"{first.name}'s final value" if target is None else f"{target:g}"
    said = []
    for one in others:
        if not one.gains:
            said.append(f"{one.name} and {first.name} have no seed in common.")
            continue
        share, itself = (median(list(arm.shares.values())) for arm in (one, first))
        of = f"{first.name}'s {cost}" if target is None else f"the {cost} that {first.name} spends on it"
        if itself is None:
            of = f"all {cost} of {first.name}, which does not reach it"
        reached = f"does not reach {aim}" if share is None else f"reaches {aim} with {share:.0%} of {of}"
        # a curve that falls in the end was there before
        if share is not None and target is None and itself is not None and itself < 0.995:
            reached += f" ({first.name} itself: {itself:.0%})"
        said.append(f"{one.name} minus {first.name}, final value: {difference(list(one.gains.values()))}.")
        said.append(f"{one.name} {reached}.")
        if left := sorted(set(one.finals) ^ set(first.finals)):
            said.append(
                f"Only one of the two has seed{'s' * (len(left) > 1)} {', '.join(map(str, left))}: not compared."
            )
    return " ".join([*said, *early(found, cost)])


def early(found: Sequence[Outcome], cost: str) -> list[str]:
    """Where runs went on after the common cost that their values are compared at, in words."""
    first = found[0]
    whole = max(one.costs[seed] for one in found for seed in one.compared)
    ends = {seed: end for seed in first.compared if (end := first.ends[seed]) < 0.9 * whole}
    if not ends:
        return []
    seeds = [f"{f'seed {seed} ' if len(first.finals) > 1 else ''}at {_paid(end, cost)}" for seed, end in ends.items()]
    unit = "" if cost == "hours" else f" {cost}"
    return [f"Compared early, since a run is shorter: {', '.join(seeds)} of {_paid(whole, cost)}{unit}."]


def _paid(amount: float, cost: str) -> str:
    """A cost in words: thousands of tokens are not said as a power of ten."""
    return span(amount) if cost == "hours" else number(round(amount))


# -- journals -----------------------------------------------------------------------------------------------------------


@dataclass
class Trials:
    """Runs of several arms, by a metric that all of them were validated with.

    Attributes:
        metric: verl's, and of which data sources.
        arms: name → its runs.
        missing: steps that journals lack, and runs that are left out, in words.
    """

    metric: str
    arms: dict[str, list[Trial]]
    missing: list[str]


def read(arms: Mapping[str, Sequence[Run]], cost: str = "rollouts") -> Trials:
    """The validations of every run, as verl measured them, by what they had cost.

    AdaptiveError: there is nothing that every validation of every run has measured, or the runs of an arm cannot be told by
    their seeds.
    """
    runs = [run for found in arms.values() for run in found]
    validations = _comparable(runs)
    out = Trials("", {}, [text for run in runs for text in run.missing()])
    for name, members in arms.items():
        out.arms[name] = []
        seeds = _different_seeds(name, members) if len(runs) > len(arms) else [0]
        for seed, run in zip(seeds, members, strict=True):
            curve, points = _measured(run, validations[run.id], cost)
            if not points[cost][-1]:  # it would count as a whole run in which nothing differs
                out.missing.append(f"{run.where} has no validation after its first step: left out")
                continue
            out.metric = f"{curve.metric}, {curve.name}"
            errors = [curve.error(i) for i in range(len(curve.values))]
            known = None if None in errors else np.array(errors)
            out.arms[name].append(Trial(seed, points[cost], curve.values, known, points))
        if not out.arms[name]:
            raise AdaptiveError(f"no run of {name} has a validation after its first step: {members[0].where}")
    return out


def _comparable(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """The validations of each run, by its id, with the metrics alone that every validation of every run has."""
    validations = {run.id: run.validations() if run.has_course else [] for run in runs}
    for run in runs:
        if not validations[run.id]:
            hint = VALIDATE.get(run.kind, "name the run's journal")
            raise AdaptiveError(f"{run.where} ({run.kind}) has no validation: {hint}")
    own = {run.id: set.intersection(*(set(one["metrics"]) for one in validations[run.id])) for run in runs}
    common = set.intersection(*own.values())
    shared = {
        run: [{**one, "metrics": {n: v for n, v in one["metrics"].items() if n in common}} for one in found]
        for run, found in validations.items()
    }
    if not headline(shared[runs[0].id]):
        raise AdaptiveError(_nothing_common(runs, own))
    return shared


def _different_seeds(name: str, members: Sequence[Run]) -> list[int]:
    """The seed of each run of an arm."""
    seeds = seeds_of(members)
    if seeds is None:
        names = ", ".join(str(run.name) for run in members)
        raise AdaptiveError(
            f"the runs of {name} have no different seeds, in their settings or in their names (s1, seed1, or the last "
            f"number): {names}"
        )
    return seeds


def _nothing_common(runs: Sequence[Run], own: Mapping[str, set[str]]) -> str:
    """Which runs were measured otherwise; ``own``: the metrics that each of a run's validations has."""
    for run in runs:
        if not own[run.id]:
            return f"{run.where} has no metric that each of its validations has: one of them gave no finite number"

    def said(run: Run) -> str:
        return f"{run.where} has {', '.join(sorted(own[run.id])[:2])}"

    other = next((run for run in runs if not own[run.id] & own[runs[0].id]), runs[-1])
    return (
        f"the runs were validated on nothing that all have: {said(runs[0])}; {said(other)}. Give all the same data.val_files and "
        "actor_rollout_ref.rollout.val_kwargs.n"
    )


def _measured(run: Run, validations: Sequence[dict[str, Any]], cost: str) -> tuple[Curve, dict[str, np.ndarray]]:
    """A run's curve of the headline metric, and what the run had spent at each of its points."""
    paid, found = spent(run), headline(validations)
    if cost not in paid or not (paid[cost] > 0).any():
        raise AdaptiveError(f"{run.where} has no finished step, or not all its steps say what they cost in {cost}")
    measured = priced([validations[i] for i in found[-1].at.tolist()], paid)
    return found[-1], {name: np.array([one[name] for one in measured], float) for name in ("step", *COSTS)}


def seeds_of(runs: Sequence[Run]) -> list[int] | None:
    """The seed of each run: as recorded, or of its name where the recorded ones are alike; None: all are."""
    named: list[Any] = [seed_in(str(run.about.get("run") or ""))[0] for run in runs]
    for seeds in ([run.about.get("seed") for run in runs], named):
        found = [int(seed) for seed in seeds if seed is not None]
        if len(set(found)) == len(runs):
            return found
    return None


def names_of(runs: Sequence[Run]) -> list[str]:
    """Names that tell runs apart: their own or, of seeds of one experiment, those of their folders."""
    names = [run.name or run.where for run in runs]
    if len(set(names)) == len(names):
        return names
    folders = [os.path.abspath(run.where) for run in runs]  # one may be named from here, another from the root
    common = os.path.commonpath(folders)
    return [os.path.relpath(folder, common).removesuffix(f"/checkpoints/{FOLDER}") for folder in folders]


def seed_in(name: str) -> tuple[str | None, str]:
    """The seed that a name says, and the name without it: the number after ``s`` or ``seed``, or else the last one.

    >>> seed_in("grpo-s1-lr1e-6"), seed_in("run 12"), seed_in("plain")
    (('1', 'grpo-s#-lr1e-6'), ('12', 'run #'), (None, 'plain'))
    """
    found = [
        *re.finditer(r"(?<![a-z])s(?:eed)?[-_=]?(\d+)(?!\d)", name, re.IGNORECASE),
        *re.finditer(r"(\d+)(?=\D*$)", name),
    ]
    if not found:
        return None, name
    start, end = found[0].span(1)
    return name[start:end], f"{name[:start]}#{name[end:]}"


# -- pictures -----------------------------------------------------------------------------------------------------------


def mean_curve(trials: Sequence[Trial]) -> tuple[np.ndarray, np.ndarray]:
    """Costs that all of these had spent, and the mean of their values there."""
    grid = np.linspace(max(t.cost[0] for t in trials), min(t.cost[-1] for t in trials), 100)
    return grid, np.mean([np.interp(grid, t.cost, t.value) for t in trials], axis=0)


def draw(axes: Any, arms: Mapping[str, Sequence[Trial]], colors: Sequence[str] = ()) -> None:
    """Values by cost on axes of matplotlib: each seed thin, their mean bold."""
    faint = 0.4 if len(arms) <= 4 else 0.12
    for place, (name, trials) in enumerate(arms.items()):
        color = colors[place] if place < len(colors) else f"C{place}"
        for trial in trials:
            axes.plot(trial.cost, trial.value, color=color, linewidth=0.8, alpha=faint)
        axes.plot(*mean_curve(trials), color=color, lw=2.2, label=name)
    axes.grid(alpha=0.3)


def plot(
    arms: Mapping[str, Sequence[Trial]],
    labels: tuple[str, str],
    *paths: Path,
    title: str = "",
) -> None:
    """Draw values by cost; the ending of each path says the kind of file (PNG, SVG, PDF)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "verl-adaptive"
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    draw(axes, arms, ("#777777", "#1f77b4", "#d62728", "#2ca02c"))
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
