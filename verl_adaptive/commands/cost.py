"""What a command line will cost, beside plain GRPO with the same settings: rollouts, generation time, and passes over the data.

A step's cost depends on how many of GRPO's groups are informative. That share is read from statistics where there are any,
and assumed, and said to be, where there are none. The rest is a short simulation of the very policy with a clock
(:func:`verl_adaptive.simulate.expected_waiting`).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError, ConfigError, Exhausted
from verl_adaptive.simulate.expected import HOPELESS
from verl_adaptive.text import counted, number

if TYPE_CHECKING:
    from verl_adaptive.integration.run_plan import RunPlan
    from verl_adaptive.simulate.expected import Waiting
    from verl_adaptive.stats import StatsTable

#: Share of GRPO's groups that are informative, where nothing is known.
ASSUMED = 0.5
#: Other shares, whose cost is told beside it.
RANGE = (0.7, 0.3)
#: Rollouts of a simulated step: enough for a cost to one digit, in a second or so.
_SIZE = 512


@dataclass
class Cost:
    """The cost of a run; shares and factors are of plain GRPO's with the same settings.

    Attributes:
        grpo_step, grpo_total: GRPO's rollouts of a step and of the run; None: the number of steps is not known here.
        step, total: about as many rollouts as the preset generates; None: not known, and ``why_not`` says why.
        factor: ``step`` of ``grpo_step``.
        by_pass: ``factor`` in the first pass over the data and in later ones; None: no difference, or not known.
        time_factor: generation time of a step; None: not known.
        share: of GRPO's groups that have variance, as far as it is known.
        known_from: where that share is from.
        time: generation time in words.
        measured: what the preset as shipped cost elsewhere, in words; empty: not measured, or its options are changed.
        range: ``factor`` where 70 % and where 30 % of GRPO's groups are informative (None: the run would end with an error);
            None: their share is known, or plays no part.
        equal: overrides with which the run spends what GRPO would, or all of the user's ``adaptive.total_rollouts``; or empty.
        equal_rollouts: how many that are; None: the number of steps is not known here.
        equal_steps: about as many steps as that buys.
        passes: GRPO's passes over the training set; None: not known here.
        at_most: verl may still leave prompts out, so that totals may be less.
        sense: what speaks against this preset in this run.
        why_not: what keeps the cost from being known.
    """

    grpo_step: int
    grpo_total: int | None
    share: float
    known_from: str
    step: int | None = None
    total: int | None = None
    factor: float | None = None
    by_pass: tuple[float, float] | None = None
    time_factor: float | None = None
    time: str = ""
    measured: str = ""
    range: tuple[float | None, float | None] | None = None
    equal: str = ""
    equal_rollouts: int | None = None
    equal_steps: int | None = None
    passes: float | None = None
    at_most: bool = False
    sense: list[str] = field(default_factory=list)
    why_not: str = ""

    def lines(self) -> list[tuple[str, str]]:
        """Label and text, for people."""
        most = "at most " if self.at_most else ""
        total = f", {most}{number(self.grpo_total)} in all" if self.grpo_total else ""
        out = [("GRPO", f"{number(self.grpo_step)} rollouts a step{total}")]
        if self.step is None or self.factor is None:
            out.append(("cost", f"not known: {self.why_not}"))
        elif self.known_from:
            total = f", {most}{number(self.total)} in all" if self.total else ""
            between = ""
            if self.range is not None:
                between = f", {_times(self.range[0])} if 70% are, {_times(self.range[1])} if 30% are"
            times = "the same" if _two(self.factor) == "1" else f"{_two(self.factor)} x as many"
            out.append(
                (
                    "cost",
                    f"simulated: about {times}{_passes(self.by_pass)}, {number(self.step)} rollouts a step{total}, if {self.share:.0%} of GRPO's "
                    f"groups are informative{between} ({self.known_from})",
                )
            )
        else:
            out.append(("cost", "the same: this is GRPO's cost"))
        if self.time:
            out.append(("time", self.time))
        if self.measured:
            out.append(("measured", f"{self.measured} (verl and vLLM on two CPU cores)"))
        if self.equal:
            steps = f", in about {counted(self.equal_steps, 'step')}" if self.equal_steps else ""
            spent = "what GRPO would" if self.equal_rollouts == self.grpo_total else "all of its rollouts"
            out.append(("equal cost", f"{self.equal} spends {spent}{steps}"))
        passes = "" if self.passes is None else _two(self.passes)
        epochs = passes and f"GRPO's steps are {passes} pass{'es' * (passes != '1')} over the training set"
        remarks = "; ".join(part for part in (epochs, *self.sense) if part)
        return [*out, ("epochs", remarks)] if remarks else out


def cost_of(plan: RunPlan) -> Cost:
    """The cost of a plan, which is sized."""
    batch, n, steps, plain = plan.batch, plan.rollout_n, plan.steps, _plain(plan)
    share, hopeless, known = (ASSUMED, HOPELESS, "") if plain else yield_of(plan)
    cost = Cost(batch * n, None if steps is None else batch * n * steps, share, known)
    visits = None  # of a prompt, which may be in several rows
    if plan.prompts and plan.epoch and steps:
        cost.passes, visits = steps / plan.epoch, steps * batch / plan.prompts
    elif steps is None:  # the data are not here: whatever their size, verl goes through them so often
        cost.passes = visits = float(plan.epochs)
    cost.at_most = bool(plan.uncounted) and steps is not None
    cost.sense = _sense(plan, visits)
    if plain:
        cost.factor, cost.step = 1.0, cost.grpo_step
    else:
        _simulate(cost, plan, hopeless, max(0.5, visits or 2.0))
        cost.measured = _measured(plan)
    if cost.step is None or cost.factor is None:
        return cost
    total = plan.adaptive.total_rollouts
    if steps is not None:
        most = cost.step * steps
        cost.total = most if total is None else min(most, max(total, cost.step))  # its last step is a whole one
    early = total is not None and cost.total is not None and cost.total < 0.98 * total
    if early or (total is None and abs(cost.factor - 1) >= 0.02):
        _equal(cost, plan)
    return cost


def _equal(cost: Cost, plan: RunPlan) -> None:
    """Fill in what to write for the same cost, the user's own or GRPO's, and the steps and epochs that it takes."""
    assert cost.step is not None
    equal = cost.equal_rollouts = plan.adaptive.total_rollouts or cost.grpo_total
    cost.equal = f"adaptive.total_rollouts={equal if equal else f'<steps of GRPO x {cost.grpo_step}>'}"
    cost.equal_steps = None if equal is None else math.ceil(equal / cost.step)
    if cost.equal_steps and plan.steps and cost.equal_steps > plan.steps:
        cost.equal += f" trainer.total_training_steps={cost.equal_steps}"
        # verl ends with the steps or with the epochs, whichever is first
        if plan.epoch and cost.equal_steps > plan.epochs * plan.epoch:
            cost.equal += f" trainer.total_epochs={math.ceil(cost.equal_steps / plan.epoch)}"


def _two(value: float) -> str:
    """Two digits, as people write them: 0.53, 1.6, 420."""
    return f"{value:.2g}" if value < 99.5 else number(int(float(f"{value:.2g}")))


def _times(factor: float | None) -> str:
    return "an error (on_exhausted=raise)" if factor is None else f"{_two(factor)} x"


def _plain(plan: RunPlan) -> bool:
    """The plan is GRPO's as verl has it, so that nothing need be simulated."""
    usual, allocator, cap = AdaptiveConfig(), plan.policy.allocator, plan.adaptive.max_rollouts_per_step
    # Whatever else is chosen is simulated, so that an author's own component is tried before training.
    chosen = any(part.name != getattr(usual, part.role)["name"] for part in plan.policy)
    same = allocator.fixed_size(plan.rollout_n) == plan.n == plan.rollout_n and plan.groups == plan.batch
    return same and not chosen and plan.policy.sampler.whole_batches and (cap is None or cap >= plan.batch * plan.n)


def _simulate(cost: Cost, plan: RunPlan, hopeless: float, passes: float) -> None:
    """Fill in rollouts and waiting, or why they cannot be known."""
    from verl_adaptive.simulate import ClockConfig, expected_waiting

    engines, slots, longest = plan.engines, plan.slots, plan.longest
    clock = ClockConfig.guess(replicas=max(1, engines), slots=slots, cap=longest)
    setting: dict[str, Any] = {
        "batch": plan.batch,
        "n": plan.rollout_n,
        "share": cost.share,
        "hopeless": hopeless,
        "passes": passes,
        "run": plan.steps,
    }
    try:
        found = expected_waiting(plan.adaptive, clock=clock, most=_SIZE, **setting)
    except (ConfigError, Exhausted) as error:  # of the simulation's own sizes: the plan stands without a cost
        cost.why_not = f"the policy cannot be simulated ({type(error).__name__}: {error})"
        return
    cost.factor = found.rollouts
    if abs(found.share - cost.share) > 0.05:  # groups of two, say, cannot have as much
        cost.share = found.share
    if cost.known_from.startswith("assumed") and plan.adaptive.refill and not plan.policy.filter.keeps_all:
        bounds: list[float | None] = []
        for share in RANGE:
            try:
                bound = expected_waiting(plan.adaptive, clock=clock, most=_SIZE, **setting | {"share": share}).rollouts
            except Exhausted:  # at a share that nobody has measured: the plan and its cost stand
                bound = None
            bounds.append(bound)
        cost.range = (bounds[0], bounds[1]) if _times(bounds[0]) != _times(bounds[1]) else None
    cost.by_pass = _by_pass(found, 0)
    cost.step, cap = round(found.rollouts * cost.grpo_step), plan.adaptive.max_rollouts_per_step
    if cap is not None and cost.step > cap:
        cost.step, cost.factor, cost.by_pass = cap, cap / cost.grpo_step, None
    if not engines:
        cost.time = "not known: rollout.disaggregation, or too few GPUs for one engine; only whole engines are modelled"
        return
    cost.time_factor = found.seconds
    waves = "" if found.waves < 1.05 else f" in {found.waves:.1f} waves"
    apiece = found.seconds_per_informative
    each = "" if apiece is None else f", {_two(apiece)} x for each informative group"
    each = _passes(_by_pass(found, 1)) + each
    ahead = "" if plan.async_facts is None else "; counted as in the sync trainer"
    cost.time = (
        f"simulated: about {_two(found.seconds)} x GRPO's generation time{waves}{each} (a model of {engines} engine"
        f"{'' if engines == 1 else 's'} with {number(slots)} slots, answers of up to {number(longest)} tokens{ahead})"
    )


def _measured(plan: RunPlan) -> str:
    """What the preset cost in the benchmarks, in words; empty: no run, or another policy than the one shipped."""
    from verl_adaptive.policy import KINDS
    from verl_adaptive.simulate.presets import compose_preset

    name = plan.adaptive.name
    said = json.loads(files("verl_adaptive.commands").joinpath("measured.json").read_text(encoding="utf-8")).get(name)
    if said is None:
        return ""
    shipped = compose_preset([name])
    same = (
        getattr(plan.adaptive, key) == getattr(shipped, key)
        for key in ("refill", "batch_unit", "max_rounds", "max_rollouts_per_step", *KINDS)
    )
    return said if all(same) else ""


def _by_pass(found: Waiting, of: int) -> tuple[float, float] | None:
    """Rollouts (0) or seconds (1) in the first pass and in later ones, if these differ."""
    if found.later is None or abs(found.first[of] - found.later[of]) < 0.1:
        return None
    return found.first[of], found.later[of]


def _passes(factors: tuple[float, float] | None) -> str:
    return "" if factors is None else f" (first pass {_two(factors[0])} x, later {_two(factors[1])} x)"


def _sense(plan: RunPlan, passes: float | None) -> list[str]:
    """Whether the preset's parts have what they decide by in a run of so many passes over its different prompts."""
    will = plan.policy.sampler.unvisited
    if passes is None or plan.adaptive.warm_start is not None or not will:
        return []
    visits = passes * plan.groups / plan.batch  # smaller groups are more prompts a step
    if visits > 1.0:
        return []
    often = "one epoch" if visits == 1.0 else f"{_two(visits)} epochs"
    # solo's gain does not rest on earlier visits alone (docs/choosing.md: none met twice); what it knows then are the sources
    other = "take +adaptive=aero, which needs none"
    if not plan.policy.advantage.needs_groups:
        other = "name data sources as finely as you know them"
    past = "give it a past with adaptive.warm_start=<earlier run>"
    return [f"{often}: {plan.adaptive.name} will {will}; {past}, or {other}"]


# -- yield ------------------------------------------------------------------------------------------------------------


def yield_of(plan: RunPlan) -> tuple[float, float, str]:
    """Share of GRPO's groups that have variance, share of the others that is all wrong, and where they are known from."""
    from verl_adaptive.stats import open_runs

    adaptive, places = plan.adaptive, []
    if adaptive.warm_start is not None:
        places.append((adaptive.warm_start, f"of the warm start {adaptive.warm_start}"))
    if plan.place.folder is not None and os.path.exists(plan.place.folder):
        places.append((plan.place.folder, f"of this run's earlier steps in {plan.place.folder}"))
    for source, words in places:
        try:
            tables = [run.table for run in open_runs(source, **plan.results)]
        except AdaptiveError:
            continue  # a run that is not in the journal yet; what cannot be read is a finding of its own
        rollouts, successes = (np.concatenate([t.col(name) for t in tables]) for name in ("rollouts", "successes"))
        varied = np.concatenate([_varied(table, adaptive.tolerance) for table in tables])
        found = group_shares(rollouts, successes, plan.rollout_n, varied)
        if found is not None:
            return *found, words
    return (
        ASSUMED,
        HOPELESS,
        "assumed: there are no statistics yet; adaptive.warm_start=<earlier run or evaluation> would tell",
    )


def _varied(table: StatsTable, tolerance: float) -> np.ndarray:
    """bool, one a prompt: its signal took values that lie further apart than the tolerance, whatever counts as success."""
    with np.errstate(all="ignore"):
        mean, square = (table.col(name) / table.col("rollouts") for name in ("signal_sum", "signal_sqsum"))
        # a range is two deviations at least; what is that small beside the square is what rounding left
        return square - mean * mean > np.maximum((tolerance / 2) ** 2, 1e-12 * square)


def group_shares(
    rollouts: np.ndarray, successes: np.ndarray, n: int, varied: np.ndarray | None = None
) -> tuple[float, float] | None:
    """Share of groups of ``n`` rollouts with both right and wrong answers, over prompts that were rolled out; and of the
    other groups, the share with wrong answers only.

    A prompt with at least ``n`` rollouts counts the chance that ``n`` of them, drawn without replacement, are mixed: this has
    no bias. A prompt with fewer counts the expectation under a Beta(½, ½) prior.

    Args:
        rollouts, successes: of each prompt, ``(M,)``.
        n: rollouts of a group.
        varied: bool ``(M,)``: the prompt's signal varied. A graded reward may where successes do not: such a prompt's groups
            are taken to have variance.

    Returns:
        The first in (0, 1]; at least one group in a thousand. None: nothing was rolled out.

    Example:
        >>> mixed, wrong = group_shares(np.array([4, 4]), np.array([2, 4]), 2)
        >>> round(mixed, 3), round(wrong, 3)  # 4 of 6 pairs, and none; 1 pair of 6, of 8
        (0.333, 0.125)
    """
    m = np.asarray(rollouts, dtype=np.float64)
    seen = m > 0
    if not seen.any():
        return None
    m = m[seen]
    right = np.clip(np.asarray(successes, dtype=np.float64)[seen], 0.0, m)
    many, i = m >= n, np.arange(n, dtype=np.float64)[:, None]

    def all_of(count: np.ndarray) -> np.ndarray:
        drawn = np.prod(np.maximum(count - i, 0.0) / np.maximum(m - i, 1.0), axis=0)
        expected = np.prod((count + 0.5 + i) / (m + 1.0 + i), axis=0)
        return np.where(many, drawn, expected)

    solved, wrong = all_of(right), all_of(m - right)
    mixed = 1.0 - solved - wrong
    if varied is not None:
        alike = (right <= 0) | (right >= m)
        # several rollouts tell; where success comes in parts (adaptive.success.mode=value), equal ones may be half right
        mixed = np.where(m > 1, np.where(varied[seen], np.where(alike, 1.0, mixed), 0.0), mixed)
    flat, known = np.maximum(1.0 - mixed, 0.0), solved + wrong > 0  # success in parts has groups that are neither
    hopeless = (
        np.average(wrong[known] / (solved + wrong)[known], weights=flat[known]) if flat[known].any() else HOPELESS
    )
    return float(min(1.0, max(1e-3, np.mean(mixed)))), float(hopeless)
