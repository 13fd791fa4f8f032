"""One simulated run: the package's own engine and policy against a world.

Nothing of a method is written again here: the policy is built from the preset's configuration, and the engine is the
object that verl's trainer drives.

Without a clock there is no moment at which a request could be aborted. Groups then come back in the order of submission, a
sixteenth of a batch at a time, and what is left when the step has its batch counts as not begun: a run costs what its decisions
cost. :mod:`verl_adaptive.simulate.clock` has time, and what is under way when a step ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine import AsyncEngine, AsyncFacts, Engine, Requests, StepResult, make_engine
from verl_adaptive.engine.shape import step_shape
from verl_adaptive.errors import AdaptiveError, Exhausted, UsageError
from verl_adaptive.groups import Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.simulate.clock import Clock
from verl_adaptive.simulate.learning import LearningWorld, advantages
from verl_adaptive.simulate.oracle import OracleBest
from verl_adaptive.simulate.presets import PEERS, REFERENCES, compose_preset, foreign_estimator, split_words
from verl_adaptive.simulate.verl_filter import VerlFilter
from verl_adaptive.simulate.worlds import StaticWorld, WorldPrompts
from verl_adaptive.stats.table import StatsTable

#: Why a run ended (:attr:`Simulation.ended`), unless training would have ended with an error; then it is that.
ENDS = ("steps", "sampler", "budget")

_LOTS = 16  # of a batch: what comes back together where there is no clock


class Simulation:
    """A run; iterate over its steps.

    Args:
        config: the policy; ``total_rollouts`` ends the run after the step in which it is reached, as in training.
        world: the prompts.
        batch, n: B and N.
        steps: the steps that the policy is told to plan for; without a budget it is stopped there, too.
        seed: of the policy's draws and of the stream.
        reference: one of ``REFERENCES``, whose sampler knows the pass rates, or of ``PEERS``, which decides as verl's own filter
            in place of the package's engine; empty: the policy as configured.
        clock: answers in time, group by group; None: answers are back as asked for, one after the other.
        ahead: batches that an asynchronous trainer generates ahead; None: verl's ``sync`` trainer. Needs a clock, for nothing but
            time says what comes back first.
        foreign_estimator: verl's own that the preset trains with, in whose place GRPO's is simulated.

    Attributes:
        engine: the engine.
        step: the latest step.
        requests, truth: of the latest step, by round: what was asked for, and the true pass rates of its prompts.
        error: what training would have ended with, or an empty string.
    """

    def __init__(
        self,
        config: AdaptiveConfig,
        world: StaticWorld,
        *,
        batch: int,
        n: int,
        steps: int,
        seed: int = 0,
        reference: str = "",
        clock: Clock | None = None,
        ahead: float | None = None,
        foreign_estimator: str | None = None,
    ) -> None:
        if ahead is not None and clock is None:
            raise AdaptiveError("an asynchronous trainer is simulated with a clock only")
        self.world, self.steps, self.n, self.fixed = world, steps, n, config.total_rollouts is None
        self.clock: Any = clock
        table = StatsTable()
        row_of = table.rows_for(world.keys, sources=world.sources)
        shape = step_shape(config, batch, n, len(table), ahead or 0)
        config = shape.config
        async_facts = None if ahead is None else AsyncFacts(warmup=shape.ahead)
        policy = build_policy(config)
        if reference in REFERENCES:
            first = np.unique(row_of, return_index=True)[1]  # rows are numbered by first appearance
            policy.sampler = OracleBest(lambda rows: world.rates(first[rows]))
        facts = RunFacts.of(replace(config, seed=seed), batch=shape.groups, n=shape.n, steps=steps, prompts=len(table))
        stream = WorldPrompts(world.size, seed)
        if isinstance(world, LearningWorld):
            world.batch = batch  # the same rollouts in smaller groups move the model no further
        self.engine: Engine
        if reference in PEERS:
            self.engine = VerlFilter(policy, table, config, facts, row_of, stream)
        else:
            skip = config.skip_zero_advantage is not False
            self.engine = make_engine(
                policy, table, config, facts, row_of, stream, skip_zero=skip, async_facts=async_facts
            )
        self.step = 0
        self.requests: list[Requests] = []
        self.truth: list[np.ndarray] = []
        self.error = ""
        self.foreign_estimator = foreign_estimator

    @property
    def finished(self) -> bool:
        """The budget, the steps or the sampler are at their end, or training would have ended with an error."""
        return bool(self.error) or self.engine.finished or (self.fixed and self.step >= self.steps)

    @property
    def ended(self) -> str:
        """Why the run ended, once it has: one of :data:`ENDS`, or the error."""
        if self.error or (self.fixed and self.step >= self.steps):
            return self.error or "steps"
        return "sampler" if self.engine.policy.sampler.finished else "budget"

    def __iter__(self) -> Iterator[StepResult]:
        while not self.finished:
            result = self.try_step()
            if result is not None:
                yield result

    def try_step(self) -> StepResult | None:
        """As :meth:`run_step`. None where training would end with an error; :attr:`error` then has it."""
        try:
            return self.run_step()
        except Exhausted as error:
            self.error = str(error)
            return None

    def run_step(self) -> StepResult:
        """One step: generation until the batch is complete, then training.

        Raises:
            Exhausted: as :meth:`Engine.finish`.
        """
        self.step += 1
        self.requests, self.truth = [], []
        requests = self.engine.begin(self.step)
        if isinstance(self.engine, AsyncEngine):
            self.clock.go_on(self.engine, requests, self._answer)
            self.engine.take()
        elif self.clock is not None:
            self.clock.generate(self.engine, requests, self._answer)
        else:
            while len(self.engine.flight) and not self.engine.decided:
                whole = isinstance(self.engine, VerlFilter)
                lot = len(self.engine.flight) if whole else -(-self.engine.facts.batch // _LOTS)
                self.engine.receive(self._answer(self.engine.flight.select(slice(lot))))
        result = self.engine.finish()
        # computed where nothing is learned, too, as in training: an author's own advantage is tried
        self.world.learn(result, advantages(result, self.engine.policy), self.step)
        if self.clock is not None:
            self.clock.count(result, self.engine.facts.tolerance, float(self.world.rates().mean()))
        return result

    def _answer(self, requests: Requests) -> Groups:
        """What the world makes of requests, which are noted."""
        self.requests.append(requests)
        self.truth.append(self.world.rates(requests.index))
        return self.world.roll(requests)


def make_simulation(
    preset: str,
    world: StaticWorld,
    *,
    batch: int,
    n: int,
    steps: int,
    seed: int = 0,
    budget: int | None = None,
    overrides: tuple[str, ...] = (),
    **more: Any,
) -> Simulation:
    """A run of a preset or a reference.

    Args:
        preset: ``"greso"``, ``"greso adaptive.sampler.p_easy=0.3"``, ``oracle_best``, or ``verl_filter_groups``.
        world: the prompts.
        batch, n, steps, seed: as :class:`Simulation`.
        budget: rollouts to generate; None: exactly ``steps`` steps.
        overrides: Hydra's syntax, after the preset's own words.
        more: further arguments of :class:`Simulation`.

    Raises:
        ConfigError, AdaptiveError: the preset or an override makes no sense.
    """
    words = [*split_words(preset), *overrides]
    beside = words[0] in (*PEERS, *REFERENCES)
    if beside and len(words) > 1:
        raise UsageError(f"{words[0]} takes no overrides: it is plain GRPO with prompts chosen otherwise")
    reference, words = (words[0], ["grpo"]) if beside else ("", words)
    config = replace(compose_preset(words), seed=seed, total_rollouts=budget)
    more |= {"reference": reference, "foreign_estimator": foreign_estimator(words)}
    return Simulation(config, world, batch=batch, n=n, steps=steps, seed=seed, **more)
