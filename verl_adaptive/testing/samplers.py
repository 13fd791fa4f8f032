"""Conformance suite for samplers: subclass, say how to make yours, let pytest collect it.

::

    class TestMine(SamplerConformance):
        def make(self) -> Sampler:
            return Mine({"option": 3})

The sampler is driven by the engine, with the ``fixed`` allocator, over a pool of which half is solved for good: what
the contract of :class:`~verl_adaptive.roles.Sampler` promises must hold there. Needs pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine import Engine, Requests, StepResult, make_engine
from verl_adaptive.groups import Groups
from verl_adaptive.policy import Policy, find_part
from verl_adaptive.roles import Sampler, answers
from verl_adaptive.simulate.worlds import StaticWorld, WorldPrompts
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.testing.components import LOST, SOURCES, PartConformance, as_text, pure, sources_of, through_files


@dataclass
class _Run:
    """An engine in a world of known success rates."""

    engine: Engine
    stream: WorldPrompts
    world: StaticWorld
    reverse: bool = False  # results come back one by one, the latest first
    trace: list[list[tuple[int, int]]] = field(default_factory=list)  # per round: (data-set position, rollouts)
    trained: list[list[int]] = field(default_factory=list)  # per step: data-set positions

    def step(self, step: int) -> StepResult:
        waiting: list[Groups] = []
        requests: Requests | None = self.engine.begin(step)
        while True:
            if requests is not None:
                self.trace.append(list(zip(requests.index.tolist(), requests.n.tolist(), strict=True)))
                back = self.world.roll(requests)
                waiting += [back.select(np.array([i])) for i in range(len(back))]
            if self.engine.decided:
                break
            arrived, waiting = (waiting[-1:], waiting[:-1]) if self.reverse else (waiting, [])
            requests = self.engine.receive(Groups.concat(arrived))
        self.engine.abandon(sum(groups.rollouts for groups in waiting), 0)
        result = self.engine.finish()
        self.trained.append(result.groups.index[result.trained].tolist())
        return result

    def go(self, first: int, last: int) -> list[StepResult]:
        return [self.step(k) for k in range(first, last + 1) if not self.engine.finished]


def _same(one: list[Any], two: list[Any], of: str = "round") -> None:
    """Two runs did the same, one by one; of whole runs pytest would look for the difference for minutes."""
    assert len(one) == len(two)
    for number, (a, b) in enumerate(zip(one, two, strict=True)):
        assert a == b, f"{of} {number}"


@pure
class SamplerConformance(PartConformance):
    """Base class of a sampler's conformance tests.

    Attributes:
        prompts, batch, n, steps: the run the tests make.
        patience: steps within which each prompt must be seen again once it has been seen, solved or not; None for a
            sampler that is permanent on purpose.
        refill: drop groups of zero variance and give the sampler further turns; False for samplers that pace a budget.
    """

    prompts: int = 40
    batch: int = 6
    n: int = 4
    steps: int = 60
    patience: int | None = 400
    refill: bool = True
    _made: _Run

    # -- the run --------------------------------------------------------------------------------------------

    @property
    def facts(self) -> RunFacts:  # type: ignore[override]
        """The run that the sampler is told of."""
        return RunFacts(batch=self.batch, n=self.n, steps=self.steps, prompts=self.prompts)

    def _world(self) -> StaticWorld:
        rates = np.where(np.arange(self.prompts) % 2 == 0, 1.0, 0.5)
        return StaticWorld(rates, seed=1, sources=sources_of(self.prompts))

    def _run(self, table: StatsTable | None = None, steps: int | None = None, reverse: bool = False) -> _Run:
        sampler, world, stream = self.make(), self._world(), WorldPrompts(self.prompts, seed=7)
        judge = "informative" if self.refill else "keep_all"
        others = {"allocator": "fixed", "filter": judge, "advantage": "verl"}
        made: dict[str, Any] = {role: find_part(role, name)({}) for role, name in others.items()}
        policy = Policy(sampler, **made)
        config = AdaptiveConfig(refill=self.refill)
        for part in policy:
            part.check_policy(policy, config)
        table = StatsTable() if table is None else table
        row_of = table.rows_for(world.keys, sources=world.sources)
        facts = replace(self.facts, steps=steps or self.steps)
        engine = make_engine(policy, table, config, facts, row_of, stream)
        return _Run(engine, stream, world, reverse)

    def _whole(self) -> _Run:
        """A run of all steps; one for all tests that compare with it."""
        cls = type(self)
        if "_made" not in vars(cls):
            cls._made = self._run()
            cls._made.go(1, self.steps)
        return cls._made

    # -- the promises ---------------------------------------------------------------------------------------

    def test_same_state_same_decisions(self) -> None:
        one, two = self._whole(), self._run()
        two.go(1, self.steps)
        assert one.trace
        _same(one.trace, two.trace)

    def test_arrival_order_does_not_matter(self) -> None:
        one, two = self._whole(), self._run(reverse=True)
        two.go(1, self.steps)
        _same(one.trained, two.trained, "step")

    def test_row_numbers_do_not_matter(self) -> None:
        """Decisions depend on keys and on the names of data sources: the same data set in a table that met its prompts in another
        order, among others."""
        table, half = StatsTable(), self.prompts // 2
        keys, others = self._world().keys[::-1], self._world().keys
        others["hi"] ^= np.uint64(1)
        mixed = np.concatenate([others[:9], keys[:half], others[9:12], keys[half:], others[12:]])
        table.rows_for(others[:9], sources=[SOURCES[-1]] * 9)  # data sources have other numbers there, too
        table.rows_for(mixed)
        one, two = self._whole(), self._run(table)
        two.go(1, self.steps)
        _same(one.trace, two.trace)

    def test_state_round_trip(self) -> None:
        """Saved between steps and loaded into a new object, with the table, every later decision is the same."""
        whole = self._whole()
        for stop in (1, self.steps // 3, self.steps // 2):
            first = self._run()
            first.go(1, stop)
            state = first.engine.state_dict()
            second = self._run(StatsTable.from_arrow(first.engine.table.to_arrow()))
            second.engine.load_state_dict(through_files(state))
            second.stream.position = first.stream.position
            assert second.engine.finished == first.engine.finished
            second.go(stop + 1, self.steps)
            _same(first.trace + second.trace, whole.trace)
            assert as_text(second.engine.policy.sampler.state_dict()) == as_text(
                whole.engine.policy.sampler.state_dict()
            )

    def played(self) -> Iterator[Sampler]:
        run = self._run()
        run.go(1, 5)
        yield run.engine.policy.sampler

    def test_shapes(self) -> None:
        run = self._run()
        sampler, table, rows = run.engine.policy.sampler, run.engine.table, run.engine.pool
        progress = self.progress(1)
        wanted = answers.amount(sampler, "round_size", progress)
        assert wanted > 0
        if sampler.kind == "stream":
            answers.admit(sampler, rows, np.arange(len(rows)), progress)
            answers.admit(sampler, rows[:0], np.arange(0), progress)
        else:
            picked, _ = answers.pick(sampler, rows, wanted, progress)
            assert len(picked) and np.isin(picked, rows).all()
        sampler.observe(Groups.empty(), progress)
        sampler.end_step(progress)
        assert len(table) == self.prompts

    def test_how_the_stream_is_cut_makes_no_difference(self) -> None:
        """Gating in pieces, and in another order, decides what gating at once does: nobody looks at who else is asked about."""
        runs = [self._run() for _ in range(3)]
        for run in runs:
            run.go(1, 10)
        if runs[0].engine.policy.sampler.kind != "stream":
            pytest.skip("a pool sampler has no gate")
        rows, position = np.tile(runs[0].engine.pool, 2), 1000 + np.arange(2 * self.prompts)

        def gate(run: _Run, order: np.ndarray, cuts: list[int]) -> list[bool]:
            passed, progress = np.zeros(len(rows), dtype=bool), self.progress(11)
            for piece in np.split(order, cuts):
                passed[piece] = run.engine.policy.sampler.admit(rows[piece], position[piece], progress)
            return passed.tolist()

        straight = np.arange(len(rows))
        whole = gate(runs[0], straight, [])
        assert gate(runs[1], straight, [1, 2, self.prompts, self.prompts + 5]) == whole
        assert gate(runs[2], straight[::-1], [7, self.prompts]) == whole

    def test_how_visits_are_shown_makes_no_difference(self) -> None:
        """A step's groups at once or in pieces, a prompt's second visit among them: its visits count one by one."""
        runs = [self._run() for _ in range(3)]
        for number, run in enumerate(runs):
            run.go(1, 5)
            engine, progress = run.engine, self.progress(6)
            if engine.finished:
                pytest.skip("the run is over before it could be shown anything")
            if engine.policy.sampler.kind == "pool":
                engine.policy.sampler.pick(engine.pool, engine.policy.sampler.round_size(progress), progress)
            rows = np.concatenate([engine.pool[:9], engine.pool[3:6], engine.pool[4:5]])
            visits = Groups.from_lists(rows, [[1.0] * (i % 5) + [0.0] * (4 - i % 5) for i in range(len(rows))])
            straight, by_prompt = np.arange(len(rows)), np.argsort(rows, kind="stable")
            pieces = ([straight], np.split(straight, [4, 11]), np.split(by_prompt, straight[1:]))[number]
            for piece in pieces:
                engine.table.observe(visits.select(piece), 6, tolerance=0.0)
                engine.policy.sampler.observe(visits.select(piece), progress)
            engine.policy.sampler.end_step(progress)
        for run in runs[1:]:
            assert as_text(run.engine.policy.sampler.state_dict()) == as_text(
                runs[0].engine.policy.sampler.state_dict()
            )
            for name in run.engine.table.columns:
                assert np.array_equal(run.engine.table.col(name), runs[0].engine.table.col(name), equal_nan=True), (
                    LOST.format(name)
                )

    def test_no_prompt_is_starved(self) -> None:
        """Half the pool is solved for good; each prompt must still be seen again and again."""
        if self.patience is None:
            pytest.skip("permanent on purpose")
        run = self._run(steps=3 * self.patience)
        seen = np.zeros((3, self.prompts), dtype=bool)
        for step in range(1, 3 * self.patience + 1):
            if run.engine.finished:
                break
            result = run.step(step)
            seen[(step - 1) // self.patience, np.unique(result.groups.index)] = True
        missing = [np.flatnonzero(~third).tolist() for third in seen]
        assert missing == [[], [], []], f"never seen in {self.patience} steps: {missing}"
