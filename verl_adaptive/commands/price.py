"""What a command line will cost, beside plain GRPO with the same settings: rollouts, waiting, and passes over the data.

A step's price depends on how many of GRPO's groups have variance. That share is read from statistics where there are any,
and assumed, and said to be, where there are none. The rest is a short simulation of the very policy with a clock
(:func:`verl_adaptive.simulate.expected_waiting`).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_adaptive.text import number

if TYPE_CHECKING:
    from verl_adaptive.integration.run_plan import RunPlan
    from verl_adaptive.stats import StatsTable

__all__ = ["ASSUMED", "Price", "informative_share", "price_of", "yield_of"]

#: Share of GRPO's groups with variance, where nothing is known.
ASSUMED = 0.5
#: Rollouts of a simulated step: enough for a price to one digit, in a second or so.
_SIZE = 512


@dataclass
class Price:
    """The bill of a run; shares and factors are of plain GRPO's with the same settings.

    Attributes:
        grpo_step, grpo_total: GRPO's rollouts of a step and of the run; None: the number of steps is not known here.
        step, total: about as many rollouts as the preset generates; None: not known, and ``why_not`` says why.
        factor: ``step`` of ``grpo_step``.
        seconds: generation time of a step; None: not known.
        share: of GRPO's groups that have variance, as far as it is known.
        known_from: where that share is from.
        waiting: generation time in words.
        equal: override with which the run spends what GRPO would, or an empty string.
        equal_steps: about as many steps as that buys.
        passes: GRPO's passes over the training set; None: not known here.
        at_most: verl may still leave prompts out, so that totals may be less.
        sense: what speaks against this preset in this run.
        why_not: what keeps the price from being known.
    """

    grpo_step: int
    grpo_total: int | None
    share: float
    known_from: str
    step: int | None = None
    total: int | None = None
    factor: float | None = None
    seconds: float | None = None
    waiting: str = ""
    equal: str = ""
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
            out.append(("price", f"not known: {self.why_not}"))
        elif self.known_from:
            total = f", {most}{number(self.total)} in all" if self.total else ""
            times = "the same" if abs(self.factor - 1) < 0.02 else f"{_two(self.factor)} x as many"
            out.append(
                (
                    "price",
                    f"about {times}: {number(self.step)} rollouts a step{total}, if {self.share:.0%} of GRPO's groups have "
                    f"variance ({self.known_from})",
                )
            )
        else:
            out.append(("price", "the same: this is GRPO's bill"))
        if self.waiting:
            out.append(("waiting", self.waiting))
        if self.equal:
            steps = f", in about {number(self.equal_steps)} steps" if self.equal_steps else ""
            out.append(("equal bill", f"{self.equal} spends what GRPO would{steps}"))
        epochs = "" if self.passes is None else f"GRPO's steps are {_two(self.passes)} passes over the training set"
        remarks = "; ".join(part for part in (epochs, *self.sense) if part)
        return [*out, ("epochs", remarks)] if remarks else out


def price_of(plan: RunPlan) -> Price:
    """The price of a plan, which is sized."""
    batch, n, steps, plain = plan.batch, plan.rollout_n, plan.steps, _plain(plan)
    share, known = (ASSUMED, "") if plain else yield_of(plan)
    price = Price(batch * n, None if steps is None else batch * n * steps, share, known)
    if plan.prompts and steps:
        price.passes = steps * batch / plan.prompts
    elif steps is None:  # the data are not here: whatever their size, verl goes through them so often
        price.passes = float(plan.epochs)
    price.at_most = bool(plan.uncounted) and steps is not None
    price.sense = _sense(plan, price.passes)
    if plain:
        price.factor, price.step = 1.0, price.grpo_step
    else:
        _simulate(price, plan)
    if price.step is None or price.factor is None:
        return price
    total = plan.adaptive.total_rollouts
    if steps is not None:
        price.total = price.step * steps if total is None else min(price.step * steps, total)
    if total is None and abs(price.factor - 1) >= 0.02:
        equal = price.grpo_total
        price.equal = f"adaptive.total_rollouts={equal if equal else f'<steps of GRPO x {price.grpo_step}>'}"
        price.equal_steps = None if equal is None else math.ceil(equal / price.step)
        if price.equal_steps and steps and price.equal_steps > steps:
            price.equal += f" trainer.total_training_steps={price.equal_steps}"
            # verl ends with the steps or with the epochs, whichever is first
            per_epoch = plan.prompts // batch if plan.prompts else 0
            if per_epoch and price.equal_steps > plan.epochs * per_epoch:
                price.equal += f" trainer.total_epochs={math.ceil(price.equal_steps / per_epoch)}"
    return price


def _two(value: float) -> str:
    """Two digits, as people write them: 0.53, 1.6, 420."""
    return f"{value:.2g}" if value < 99.5 else number(int(float(f"{value:.2g}")))


def _plain(plan: RunPlan) -> bool:
    """The plan is GRPO's as verl has it, so that nothing need be simulated."""
    parts, same = plan.policy, plan.policy.allocator.fixed_size(plan.rollout_n) == plan.n == plan.rollout_n
    return parts.sampler.whole_batches and parts.filter.keeps_all and same and plan.groups == plan.batch


def _simulate(price: Price, plan: RunPlan) -> None:
    """Fill in rollouts and waiting, or why they cannot be known."""
    from verl_adaptive.simulate import ClockConfig, expected_waiting

    engines, slots, longest = plan.engines, plan.slots, plan.longest
    clock = ClockConfig.guess(replicas=max(1, engines), slots=slots, cap=longest)
    passes = min(4.0, max(0.5, price.passes or 2.0))
    setting: dict[str, Any] = {
        "batch": plan.batch,
        "n": plan.rollout_n,
        "share": price.share,
        "passes": passes,
        "run": plan.steps,
    }
    try:
        found = expected_waiting(plan.adaptive, clock=clock, most=_SIZE, **setting)
    except (
        Exception
    ) as error:  # a part of the user's own may need what no simulation has: the plan stands without a price
        price.why_not = f"the policy cannot be simulated ({type(error).__name__}: {error})"
        return
    price.factor, price.share = found.rollouts, found.share
    price.step, cap = round(found.rollouts * price.grpo_step), plan.adaptive.max_rollouts_per_step
    if cap is not None and price.step > cap:
        price.step, price.factor = cap, cap / price.grpo_step
    if not engines:
        price.waiting = (
            "not known: rollout.disaggregation, or too few GPUs for one engine; only whole engines are modelled"
        )
        return
    price.seconds = found.seconds
    waves = "" if found.waves < 1.05 else f" in {found.waves:.1f} waves"
    apiece = found.seconds_per_informative
    each = "" if apiece is None else f", {_two(apiece)} x for each group with variance"
    ahead = "" if plan.stream is None else "; counted as in the sync trainer"
    price.waiting = (
        f"about {_two(found.seconds)} x GRPO's generation time{waves}{each} (a model of {engines} engine"
        f"{'' if engines == 1 else 's'} with {number(slots)} slots, answers of up to {number(longest)} tokens{ahead})"
    )


def _sense(plan: RunPlan, passes: float | None) -> list[str]:
    """Whether the preset's parts have what they decide by in a run of so many passes."""
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


def yield_of(plan: RunPlan) -> tuple[float, str]:
    """Share of GRPO's groups that have variance, and where that is known from."""
    from verl_adaptive.errors import AdaptiveError
    from verl_adaptive.stats import open_run

    adaptive, places = plan.adaptive, []
    if adaptive.warm_start is not None:
        places.append((adaptive.warm_start, f"of the warm start {adaptive.warm_start}"))
    if plan.place.folder is not None and os.path.exists(plan.place.folder):
        places.append((plan.place.folder, f"of this run's earlier steps in {plan.place.folder}"))
    for source, words in places:
        try:
            table = open_run(source, **plan.results).table
        except AdaptiveError:
            continue  # a run that is not in the journal yet; what cannot be read is a finding of its own
        varied = _varied(table, adaptive.tolerance)
        share = informative_share(table.col("rollouts"), table.col("successes"), plan.rollout_n, varied)
        if share is not None:
            return share, words
    return ASSUMED, "assumed: there are no statistics yet; adaptive.warm_start=<earlier run or evaluation> would tell"


def _varied(table: StatsTable, tolerance: float) -> np.ndarray:
    """bool, one a prompt: its signal took values that lie further apart than the tolerance, whatever counts as success."""
    with np.errstate(all="ignore"):
        mean, square = (table.col(name) / table.col("rollouts") for name in ("signal_sum", "signal_sqsum"))
        # a range is two deviations at least; what is that small beside the square is what rounding left
        return square - mean * mean > np.maximum((tolerance / 2) ** 2, 1e-12 * square)


def informative_share(
    rollouts: np.ndarray, successes: np.ndarray, n: int, varied: np.ndarray | None = None
) -> float | None:
    """Share of groups of ``n`` rollouts with both right and wrong answers, over prompts that were rolled out.

    Of a prompt with at least ``n`` rollouts, the chance that ``n`` of them drawn without replacement are mixed, which has no
    bias; of one with fewer, the expectation under a Beta(½, ½) prior.

    Args:
        rollouts, successes: of each prompt, ``(M,)``.
        n: rollouts of a group.
        varied: bool ``(M,)``: the prompt's signal varied. A graded reward may where successes do not: such a prompt's groups
            are taken to have variance.

    Returns:
        In (0, 1]; at least one group in a thousand. None: nothing was rolled out.

    Example:
        >>> round(informative_share(np.array([4, 4]), np.array([2, 4]), 2), 3)  # 4 of 6 pairs, and none
        0.333
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

    mixed = 1.0 - all_of(right) - all_of(m - right)
    if varied is not None:
        alike = (right <= 0) | (right >= m)
        # several rollouts tell; where success comes in parts (adaptive.success.mode=value), equal ones may be half right
        mixed = np.where(m > 1, np.where(varied[seen], np.where(alike, 1.0, mixed), 0.0), mixed)
    return float(min(1.0, max(1e-3, np.mean(mixed))))
