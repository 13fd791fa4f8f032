"""CERO: where and when to spend rollouts, over the whole pool and the whole run (2610.09679; first form 2606.05606).

Every round scores all M prompts and gives ``N_max`` units of ``g`` rollouts to the prompts of greatest surplus
``ϑ_i − ν``, as far as that is positive, C units at most. ``ϑ_i`` is the normalised dual of prompt i (what its next unit
is worth), ``ν`` that of the budget. With ``q̂ = E[p(1−p)]`` under a Beta posterior (section 3), the utility
``U(z) = 1 − exp(−4λq z/R)`` of cumulative exposure and its supporting exposure ``ẑ*`` (section 4), a round ends with
(section 5, all prompts, steps ``γ = 1/√K``)::

    ϑ_i ← clip(ϑ_i − γ·(Ñ_i − ẑ*_i/K)/N_max, 0, 1)        ẑ* from the value after this round's rewards
    ν   ← clip(ν − γ·(B/K − ΣÑ)/max(B/K, C − B/K), 0, 1)

Ñ is the virtual allocation; what is executed is Ñ cut, in the same order, to the budget that is left. A round may
allocate nothing: it moves the duals only and makes no update, so that a run of K rounds makes fewer than K updates (the
paper: 486 to 488 of 500); :class:`Cero` goes through such rounds as soon as they come. A round that allocates at all
nearly always fills its capacity, so about B/C rounds do: 1.5 times the mean as capacity leaves two thirds of the updates. All of this is stated in
2610.09679. The June paper's own constants were not available; our reading is ``g=1`` with ``n_max=16``: the same
algorithm one rollout a unit, up to 16 a prompt.

Where we decide what the paper leaves open:

* *Ties*: a fixed permutation from ``adaptive.seed`` and the prompts' keys (the paper: "a fixed seeded permutation").
* *Catch-up*: switched on in the paper, not described, never triggered. Ours: when the budget left is at
  least C times the rounds left, a round takes C units whatever the surpluses are; the duals see that allocation.
* *Re-check floor* (``recheck``): a prompt's dual recovers to ``4q̂`` at most, so while ``ν`` is above that a solved
  prompt is not seen. A prompt last seen more than ``recheck`` equal-share passes ago joins the next round that
  allocates anything, oldest first, in at most an eighth of the round. The published run has 3.6 passes in all,
  so the default of 4 cannot act in it; 0 turns the floor off.
* *Forgetting*: ``rho`` decays every prompt's evidence once a round, as written; with a pass of a hundred rounds that
  wipes the memory, so ``forget=visit`` decays it only when the prompt is seen.
* *Odd n, and 2*: a unit is then the whole group of n (``n_max=1``), so that groups are as large as GRPO's; all formulas see
  Ñ/N_max and z/R only, which do not change.
* *Other facts after a resume*: rounds that are left keep the pace that GRPO would have with the new batch, n and steps,
  plus or less what the run was behind or ahead of its pace until then; duals and values stay.
* *Groups of one*: a unit of one rollout (``g=1``) could leave a group of one, whose GRPO advantage is its raw reward;
  fewer than two rollouts are never given.
* *Warm start*: a prompt with rollouts in the shared statistics when CERO first meets it starts with those as evidence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from verl_adaptive.config import PER_RUN, PER_STEP, STEPS, AdaptiveConfig, RunFacts, check
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Count, NonNegative, Positive, PositiveShare, Share
from verl_adaptive.rng import Draw
from verl_adaptive.roles import Pick, PolicyParts, Sampler
from verl_adaptive.samplers.cero_math import best, value
from verl_adaptive.stats.table import Column, StatsTable
from verl_adaptive.stats.visits import waves

logger = logging.getLogger(__name__)

#: Rows updated together: a few arrays of this many float64 stay in a core's cache.
BLOCK = 1 << 15


@dataclass
class _Plan:
    """A round's virtual allocation Ñ, best first; ``executed`` units of it in all."""

    rows: np.ndarray
    units: np.ndarray
    forced: bool = False
    rechecked: int = 0
    executed: int = 0


class Cero(Sampler):
    """CERO's allocation over the pool; one round of generation a step, so it needs ``adaptive.refill=false``."""

    name: ClassVar[str] = "cero"
    unvisited: ClassVar[str] = "rank prompts it has never seen"
    kind: ClassVar[str] = "pool"
    plans_rollouts: ClassVar[bool] = True
    plans_steps: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, Column]] = {
        "wins": Column("f8", 0.0),  # a − a0
        "losses": Column("f8", 0.0),  # b − b0
        "slope": Column("f8", math.nan),  # ϑ; nan until the prompt is first scored
        "seen": Column("u4", 0),  # round of the latest visit, from 1
    }

    @dataclass
    class Config:
        """Options; the defaults are 2610.09679's, scaled to the run.

        Attributes:
            g: rollouts a unit; null: n / n_max, the paper's 4 for n = 8, so that a group is as large as GRPO's.
            n_max: units a prompt gets in a round; null: 2, or 1 if n is odd or 2.
            capacity: C, units a round; null: 132/128 of the mean, as published. Of the rounds about B/C make an update.
            budget: B, units over the run; null: what GRPO would generate, steps · batch · n / g.
            rounds: K; null: the run's steps.
            lam: λ, how fast exposure saturates.
            rho: ρ, evidence kept; 1 forgets nothing.
            forget: apply ``rho`` each ``round`` (paper) or each ``visit``.
            a0: successes that the Beta prior of a prompt counts.
            b0: failures that the Beta prior of a prompt counts.
            nu0: the budget's dual at the start, in [0, 1].
            gamma: step of both duals; null: 1/√K.
            recheck: passes after which a prompt is overdue; 0: never.
        """

        g: Count | None = None
        n_max: Count | None = None
        capacity: Count | None = field(default=None, metadata=PER_STEP)
        budget: Count | None = field(default=None, metadata=PER_RUN)
        rounds: Count | None = field(default=None, metadata=STEPS)
        lam: Positive = 1.0
        rho: PositiveShare = 1.0
        forget: Literal["round", "visit"] = "round"
        a0: Positive = 1.0
        b0: Positive = 1.0
        nu0: Share = 0.5
        gamma: Positive | None = None
        recheck: NonNegative = 4.0

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.nu: float = self.config.nu0
        self.round = 1  # k, the round that is planned next
        self.spent = 0  # units of the budget
        self.zero_rounds = self.caught_up = self.rechecked = 0
        self.peak = 0.0  # most units ahead of the even pace
        self._as_planned = True
        self._pool: np.ndarray | None = None
        self._plan: _Plan | None = None  # of round k
        self._in_hand: _Plan | None = None  # of the step under way
        self._seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, successes, failures

    # -- joining a run --------------------------------------------------------------------------------------

    def check_policy(self, policy: PolicyParts, config: AdaptiveConfig) -> None:
        hint = "adaptive/sampler=cero plans one round a step and paces the budget itself; write adaptive.refill=false"
        check(not config.refill, "adaptive.refill", config.refill, hint)
        allocator, n = policy.allocator, policy.allocator.option("n")
        self._as_planned = allocator.fixed_size(1) is not None
        hint = (
            "adaptive/sampler=cero plans g·n_max rollouts a prompt; leave it null and set adaptive.sampler.g and n_max"
        )
        check(not self._as_planned or n is None, "adaptive.allocator.n", n, hint)
        hint = (
            "it holds groups for the next step, but adaptive/sampler=cero learns from a round before it plans the "
            "next; use its on-policy form, or adaptive/allocator=fixed"
        )
        check(not allocator.can_hold, "adaptive.allocator.name", allocator.name, hint)

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        c, path = self.config, "adaptive.sampler"
        whole = c.g is None and (facts.n % 2 == 1 or facts.n == 2)  # half a group is no unit
        self.n_max: int = c.n_max or (1 if whole else 2)
        divides = facts.n < self.n_max or facts.n % self.n_max == 0
        hint = (
            f"does not divide actor_rollout_ref.rollout.n={facts.n}, so that groups would be smaller than that; write "
            f"null, a divisor of {facts.n}, or {path}.g too"
        )
        check(c.g is not None or divides, f"{path}.n_max", self.n_max, hint)
        self.g: int = c.g or max(1, facts.n // self.n_max)
        self.rounds: int = c.rounds or facts.steps
        self.budget: int = c.budget or max(1, facts.steps * facts.batch * facts.n // self.g)
        self._most: int = facts.prompts * self.n_max
        self.least: int = -(-2 // self.g)  # units that make a group of two rollouts
        check(self.n_max >= self.least, f"{path}.n_max", self.n_max, f"must be at least {self.least}: 2 rollouts")
        self._check_budget(path)
        self.capacity: int = c.capacity or self._published_capacity(self.budget, self.rounds)
        most, needed = self._most, -(-self.budget // self.rounds)
        check(self.capacity <= most, f"{path}.capacity", self.capacity, f"must be at most prompts · n_max = {most}")
        check(self.capacity >= self.least, f"{path}.capacity", self.capacity, f"must be at least {self.least}")
        hint = f"is too little to spend {path}.budget={self.budget} in {self.rounds} rounds; write {needed} or more"
        check(self.capacity >= needed, f"{path}.capacity", self.capacity, hint)
        self._rounds_before = self._spent_before = 0  # when this plan was made
        self.gamma: float = c.gamma or 1.0 / math.sqrt(self.rounds)

    def _check_budget(self, path: str) -> None:
        """Whether the prompts there are can take the budget at all."""
        room, facts = self.rounds * self._most, self.facts
        check(
            self.budget <= room,
            "data.train_batch_size" if self.config.budget is None else f"{path}.budget",
            facts.batch if self.config.budget is None else self.budget,
            f"the {facts.prompts} prompts of the training set take at most {self._most} units of {self.g} rollouts a round, "
            f"{room} in {self.rounds} rounds, and {self.budget} are to be spent; write "
            + (f"data.train_batch_size={facts.prompts} or less, or " if self.config.budget is None else "")
            + f"{path}.budget={room} or less",
        )

    def _published_capacity(self, budget: int, rounds: int) -> int:
        return min(self._most, max(self.least, -(-budget * 132 // (rounds * 128))))

    @property
    def _horizon(self) -> int:
        """K: rounds of this plan, past ones included."""
        return self.rounds - self._rounds_before

    @property
    def pace(self) -> float:
        """B̄: units a round."""
        return (self.budget - self._spent_before) / max(1, self._horizon)

    def _ahead(self, rounds: int) -> float:
        """Units spent beyond the even pace, after so many rounds of the run."""
        return self.spent - self._spent_before - self.pace * (rounds - self._rounds_before)

    def _join(self, pool: np.ndarray) -> None:
        """Meet the pool: first scores, and what only depends on which prompts there are."""
        if pool is self._pool:
            return
        self._pool = pool
        self._rows = np.sort(pool)
        self._share = (self.budget - self._spent_before) / len(pool)  # R
        first, last = int(self._rows[0]), int(self._rows[-1])
        self._span = slice(first, last + 1) if last - first + 1 == len(pool) else None
        hi, lo = self.table.key_hi[self._rows], self.table.key_lo[self._rows]
        self._tie = Draw(self.facts.seed, 0).bits("cero.ties", hi, lo)
        new = self._rows[np.isnan(self.col("slope")[self._rows])]
        if len(new):
            rollouts, successes = self.table.col("rollouts")[new], self.table.col("successes")[new]
            self.col("wins")[new] = successes
            self.col("losses")[new] = np.maximum(rollouts - successes, 0.0)
            a, b = self.config.a0 + self.col("wins")[new], self.config.b0 + self.col("losses")[new]
            self.col("slope")[new] = 4.0 * value(a, b)

    def estimate(self, rows: np.ndarray) -> np.ndarray:
        wins, losses = self.config.a0 + self.col("wins")[rows], self.config.b0 + self.col("losses")[rows]
        return wins / (wins + losses)

    def _of_pool(self, name: str) -> np.ndarray:
        """A column over the pool, in the order of ``_rows``; do not write to it."""
        return self.col(name)[self._rows if self._span is None else self._span]

    def _blocks(self) -> Iterator[slice | np.ndarray]:
        for start in range(0, len(self._rows), BLOCK):
            stop = min(start + BLOCK, len(self._rows))
            if self._span is None:
                yield self._rows[start:stop]
            else:
                yield slice(self._span.start + start, self._span.start + stop)

    # -- planning -------------------------------------------------------------------------------------------

    def round_size(self, progress: Progress) -> int:
        return 0 if self.finished else -(-self.capacity // self.n_max)

    @property
    def left(self) -> int:
        """Units of the budget not spent yet."""
        return self.budget - self.spent

    @property
    def finished(self) -> bool:
        """The budget or the rounds are used up; rounds that allocate nothing are gone through at once."""
        return self.left < self.least or self.round > self.rounds

    def _virtual(self) -> _Plan:
        """Ñ of round k."""
        count = -(-self.capacity // self.n_max)
        forced = self.left >= self.capacity * (self.rounds - self.round + 1)
        chosen = best(self._of_pool("slope"), self._tie, count, -math.inf if forced else self.nu)
        rechecked = 0
        if len(chosen):
            overdue = self._overdue(max(1, count // 8))
            rechecked = int((~np.isin(overdue, chosen)).sum())
            chosen = np.concatenate([overdue, chosen[~np.isin(chosen, overdue)]])[:count]
        units = np.full(len(chosen), self.n_max, dtype=np.int64)
        if len(chosen) == count:
            units[-1] = self.capacity - self.n_max * (count - 1)
        return _Plan(self._rows[chosen], units, forced, rechecked)

    def _overdue(self, count: int) -> np.ndarray:
        """Positions in the pool of the prompts seen longest ago, if that is too long."""
        if self.config.recheck == 0:
            return np.zeros(0, dtype=np.int64)
        limit = math.ceil(self.config.recheck * len(self._rows) * self.n_max / self.pace)
        if self.round <= limit:
            return np.zeros(0, dtype=np.int64)
        seen = self._of_pool("seen")
        late = np.flatnonzero(seen < self.round - limit)
        return late[best(-seen[late].astype(np.float64), self._tie[late], count, -math.inf)]

    def _look_ahead(self) -> None:
        """Go through rounds that allocate nothing, up to one that does or to the end."""
        while not self.finished:
            plan = self._virtual()
            if len(plan.rows):
                self._plan = plan
                return
            self.zero_rounds += 1
            self._close_round(plan)

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        """Ñ cut to what is left of the budget, in the order of surplus; ``count`` is not used, the plan decides."""
        self._join(pool)
        if self._plan is None:
            self._look_ahead()
        plan, self._plan = self._plan, None
        if plan is None:
            return Pick(pool[:0], np.zeros(0, dtype=np.int64))
        room = min(self.left, progress.room // self.g)
        units = np.clip(room - (np.cumsum(plan.units) - plan.units), 0, plan.units)
        units[units < self.least] = 0
        rows, units = plan.rows[units > 0], units[units > 0]
        plan.executed = int(units.sum())
        self._in_hand = plan
        self.caught_up += plan.forced
        self.rechecked += plan.rechecked
        self.col("seen")[rows] = self.round
        if not self._as_planned:
            # The allocator tops up as it likes: the run's budget is then the step's ceiling.
            ceiling = progress.planned + self.left * self.g
            progress.cap = ceiling if progress.cap is None else min(progress.cap, ceiling)
        return Pick(rows, units * self.g)

    # -- learning -------------------------------------------------------------------------------------------

    def observe(self, groups: Groups, progress: Progress) -> None:
        some, (won, lost) = groups.n > 0, self.evidence(groups)
        self._seen.append((groups.row[some], won[some], lost[some]))

    def end_step(self, progress: Progress) -> None:
        plan, self._in_hand = self._in_hand, None
        if plan is None:
            return
        if not self._as_planned:
            plan.executed = -(-progress.planned // self.g)
        self._close_round(plan)
        self._look_ahead()

    def _close_round(self, plan: _Plan) -> None:
        """Posterior, both duals, budget; then it is the next round."""
        self._learn()
        rows = plan.rows
        slope, wins, losses = self.col("slope"), self.col("wins"), self.col("losses")
        chosen = self._moved(slope[rows], wins[rows], losses[rows], plan.units)
        for block in self._blocks():
            slope[block] = self._moved(slope[block], wins[block], losses[block], 0)
        slope[rows] = chosen
        widest = max(self.pace, self.capacity - self.pace)  # G_B
        self.nu = min(1.0, max(0.0, self.nu - self.gamma * (self.pace - int(plan.units.sum())) / widest))
        self.spent += plan.executed
        self.peak = max(self.peak, self._ahead(self.round))
        self.round += 1

    def _learn(self) -> None:
        """``a ← a0 + ρ(a − a0) + S`` and the same for b, all prompts."""
        rho, each_visit = self.config.rho, self.config.forget == "visit"
        wins, losses = self.col("wins"), self.col("losses")
        if rho < 1.0 and not each_visit:
            for block in self._blocks():
                wins[block] *= rho
                losses[block] *= rho
        if not self._seen:
            return
        rows, won, lost = (np.concatenate(parts) for parts in zip(*self._seen, strict=True))
        self._seen.clear()
        kept = rho if each_visit else 1.0
        for wave in waves(rows):
            wins[rows[wave]] = kept * wins[rows[wave]] + won[wave]
            losses[rows[wave]] = kept * losses[rows[wave]] + lost[wave]

    def _moved(self, slope: np.ndarray, wins: np.ndarray, losses: np.ndarray, units: np.ndarray | int) -> np.ndarray:
        """ϑ after a round that gave each prompt ``units``; ``ẑ* = clip(R/(4λq̂)·ln(4q̂/ϑ), 0, Z)`` covers all cases."""
        worth = 4.0 * value(self.config.a0 + wins, self.config.b0 + losses)
        with np.errstate(divide="ignore", over="ignore"):  # ϑ = 0: as much as there is
            exposure = np.log(worth / slope)
        exposure *= self._share / self.config.lam
        exposure /= worth
        np.clip(exposure, 0.0, float(self._horizon * self.n_max), out=exposure)
        exposure /= self._horizon
        exposure -= units
        exposure *= self.gamma / self.n_max
        exposure += slope
        return np.clip(exposure, 0.0, 1.0, out=exposure)

    # -- reporting and state --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Duals and budget, in rollouts.

        The last three count since the run began. They are no ``_total``, which is a count of one step.
        """
        return {
            "nu": self.nu,
            "round": float(self.round),
            "budget_left": float(self.left * self.g),
            "ahead_of_pace": self._ahead(self.round - 1) * self.g,
            "ahead_of_pace_max": self.peak * self.g,
            "zero_rounds": float(self.zero_rounds),
            "catch_up_rounds": float(self.caught_up),
            "rechecks": float(self.rechecked),
        }

    def state_dict(self) -> dict[str, Any]:
        """The scalars; the next plan follows from them and the columns, so it is not kept."""
        names = ("nu", "round", "spent", "zero_rounds", "caught_up", "rechecked", "peak")
        plan = {"budget": self.budget, "begun": [self._rounds_before, self._spent_before]}
        scalars = {name: getattr(self, name) for name in names}
        return {**scalars, "asked": self._asked(), "plan": plan}

    def _asked(self) -> dict[str, int | None]:
        """What the plan follows from."""
        c, facts = self.config, self.facts
        return {
            "g": self.g,
            "n_max": self.n_max,
            "rounds": self.rounds,
            "rollouts": facts.steps * facts.batch * facts.n,
            "budget": c.budget,
            "capacity": c.capacity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.nu, self.peak = float(state["nu"]), float(state["peak"])
        for name in ("round", "spent", "zero_rounds", "caught_up", "rechecked"):
            setattr(self, name, int(state[name]))
        self._plan = self._in_hand = self._pool = None
        self._seen.clear()
        if state["asked"] == self._asked():
            self.budget = int(state["plan"]["budget"])
            self._rounds_before, self._spent_before = map(int, state["plan"]["begun"])
        else:
            self._replan(state["asked"], state["plan"])
        # Not kept: the data set may have fewer prompts now, and a round that cannot be filled never counts as behind.
        planned = self.budget - self._spent_before
        self.capacity = self.config.capacity or self._published_capacity(planned, max(1, self._horizon))

    def _replan(self, asked: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        """Go on from another batch, n, number of steps or options: the rounds that are left, at the new pace.

        ``asked`` and ``plan`` are the old ones, in the units of then, as are ``spent`` and ``peak`` until they are scaled.
        """
        played = self.round - 1
        rounds_before, spent_before = plan["begun"]
        old_pace = (plan["budget"] - spent_before) / max(1, asked["rounds"] - rounds_before)
        old_ahead = self.spent - spent_before - old_pace * (played - rounds_before)

        scale = asked["g"] / self.g  # a unit of then, in units of now
        self.spent, self.peak = round(self.spent * scale), self.peak * scale
        rounds_left = max(0, self.rounds - played)
        if self.config.budget is None:
            left = max(0, math.floor(self.budget / self.rounds * rounds_left - old_ahead * scale + 1e-9))
        else:
            left = max(0, self.config.budget - self.spent)
        self.budget = self.spent + left
        self._rounds_before, self._spent_before = min(played, self.rounds), self.spent
        logger.warning(
            "cero: the run goes on with another batch, n, number of steps or budget; %d rollouts are planned for the %d "
            "rounds that are left",
            left * self.g,
            rounds_left,
        )
