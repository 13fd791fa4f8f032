"""CERO: every decision against a slow reference, budget, floor, refusals."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest

from tests.samplers.bound import bound, groups_of, progress_at
from tests.samplers.cero_reference import SlowCero
from tests.world import keys_of, make_engine, run
from verl_adaptive.engine import Engine
from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.rng import Draw
from verl_adaptive.roles import CLOSE, Allocator
from verl_adaptive.samplers import cero_math as cm
from verl_adaptive.samplers.cero import Cero
from verl_adaptive.stats.table import StatsTable


def make_cero(M: int, batch: int = 8, n: int = 8, steps: int = 100, table=None, seed: int = 0, **options) -> Cero:
    return bound(Cero(options), M, batch=batch, n=n, steps=steps, table=table, seed=seed)


# -- golden trace -------------------------------------------------------------------------------------------

CASES = {
    "paper": dict(M=60, batch=8, n=8, steps=120, recheck=0.0),
    "many passes": dict(M=30, batch=8, n=8, steps=400, recheck=0.0),
    "room to pace": dict(M=60, batch=8, n=8, steps=200, capacity=40, recheck=0.0),
    "residual unit": dict(M=50, batch=8, n=8, steps=150, capacity=19, recheck=0.0),
    "forgetting a round": dict(M=40, batch=6, n=8, steps=150, rho=0.9, recheck=0.0),
    "forgetting a visit": dict(M=40, batch=6, n=8, steps=150, rho=0.7, forget="visit", recheck=0.0),
    "june": dict(M=40, batch=6, n=8, steps=100, g=1, n_max=16, recheck=0.0),
    "prior and saturation": dict(M=40, batch=6, n=8, steps=150, a0=2.0, b0=0.5, lam=3.0, recheck=0.0),
    "long steps": dict(M=40, batch=6, n=8, steps=150, gamma=0.3, nu0=0.9, recheck=0.0),
    "catch-up": dict(M=40, batch=6, n=8, steps=100, capacity=12, budget=1150, nu0=1.0, recheck=0.0),
    "re-check floor": dict(M=120, batch=16, n=8, steps=150, recheck=1.2),
    "small budget": dict(M=40, batch=6, n=8, steps=100, budget=33, capacity=12, recheck=0.0),
    "fewer rounds": dict(M=40, batch=6, n=8, steps=100, rounds=50, recheck=0.0),
}


@pytest.mark.parametrize("case", list(CASES))
def test_every_dual_and_every_allocation_equals_the_slow_reference(case):
    """Of ten groups one fails; in most rounds all come back."""
    options = dict(CASES[case])
    M, batch, n, steps = (options.pop(k) for k in ("M", "batch", "n", "steps"))
    fast = make_cero(M, batch, n, steps, seed=7, **options)
    keys = fast.table.keys
    tie = [int(t) for t in Draw(7, 0).bits("cero.ties", keys["hi"], keys["lo"])]
    same = {k: getattr(fast.config, k) for k in ("lam", "rho", "forget", "a0", "b0", "gamma", "recheck")}
    slow = SlowCero(tie, fast.budget, fast.rounds, fast.capacity, fast.n_max, fast.g, nu=fast.config.nu0, **same)
    rng = np.random.default_rng(3)
    p = rng.beta(0.4, 0.6, M)
    p[: M // 4] = [1.0, 0.0] * (M // 8) + [1.0] * (M // 4 % 2)  # certain prompts, the ones a floor is for
    pool = np.arange(M)
    for step in range(1, steps + 1):
        wanted = slow.next_pick()
        if wanted is None:
            break
        assert not fast.finished
        pick = fast.pick(pool, fast.round_size(progress_at(step)), progress_at(step))
        assert pick.rows.tolist() == [i for i, _ in wanted]
        assert pick.n.tolist() == [units * fast.g for _, units in wanted]
        correct = rng.binomial(pick.n, p[pick.rows])
        came = rng.random(len(pick.rows)) >= 0.1
        back = groups_of(pick.rows[came], correct[came], pick.n[came])
        fast.observe(back, progress_at(step))
        slow.finish(wanted, {int(r): (c, m - c) for r, c, m in zip(back.row, correct[came], back.n, strict=True)})
        fast.end_step(progress_at(step))
        if fast.round > slow.k:  # already through the next rounds that allocate nothing
            continue
        assert fast.nu == pytest.approx(slow.nu, rel=0, abs=1e-12)
        assert fast.col("slope") == pytest.approx(slow.theta, rel=0, abs=1e-12)
        assert fast.config.a0 + fast.col("wins") == pytest.approx(slow.a, rel=0, abs=1e-9)
        assert fast.config.b0 + fast.col("losses") == pytest.approx(slow.b, rel=0, abs=1e-9)
    while slow.next_pick() is not None:
        slow.finish([], {})
        pytest.fail("the reference goes on after the last step")
    assert fast.finished and fast.zero_rounds == slow.zero_rounds and fast.spent == slow.spent
    assert fast.nu == pytest.approx(slow.nu, abs=1e-12)
    assert fast.col("slope") == pytest.approx(slow.theta, rel=0, abs=1e-12)
    assert fast.caught_up == slow.forced_rounds
    reached = {
        "catch-up": fast.caught_up,
        "re-check floor": fast.rechecked,
        "room to pace": fast.zero_rounds,
    }
    assert reached.get(case, 1) > 0


# -- flow ---------------------------------------------------------------------------------------------------


def test_ends_by_itself_and_looks_ahead_over_rounds_without_allocation():
    """With a dual that starts out of reach and no rollouts to change that, there is nothing to do at all."""
    cero = make_cero(20, 4, 8, 6, nu0=1.0, gamma=1e-6, budget=7, capacity=8)
    pick = cero.pick(np.arange(20), 4, progress_at(1))
    assert len(pick.rows) == 0 and cero.finished and cero.zero_rounds == 6 and cero.round_size(progress_at(1)) == 0


@pytest.mark.parametrize("n", [2, 3])
def test_a_group_without_halves_is_one_unit(n):
    """Of n = 2 a unit was one rollout, which rounds planned and could not give: 106 of 2,000 were never spent."""
    engine, world = make_engine("cero", refill=False, batch=5, n=n, M=60, steps=200)
    assert {int(size) for result in run(engine, world, 200) for size in result.groups.n} == {n}
    assert 200 * 5 * n - engine.total.rollouts.generated < engine.policy.sampler.capacity * n  # less than a round


def test_fractional_success_counts_as_expected_successes():
    cero = make_cero(10, 4, 8, 50)
    pick = cero.pick(np.arange(10), 1, progress_at(1))
    group = Groups.from_lists(pick.rows[:1], [[0.25] * 8], success=[[0.25] * 8])
    cero.observe(group, progress_at(1))
    cero.end_step(progress_at(1))
    row = pick.rows[0]
    assert cero.col("wins")[row] == 2.0 and cero.col("losses")[row] == 6.0


def test_starts_with_what_a_warm_start_knows():
    table = StatsTable()
    table.rows_for(keys_of(20))
    table.col("rollouts")[3], table.col("successes")[3] = 100, 100.0
    table.col("rollouts")[4], table.col("successes")[4] = 100, 50.0
    cero = make_cero(20, 4, 8, 50, table=table)
    pick = cero.pick(np.arange(20), 1, progress_at(1))
    assert pick.rows[0] == 4 and 3 not in pick.rows
    assert cero.col("slope")[4] == pytest.approx(4 * cm.value(np.array(51.0), np.array(51.0)))


def test_a_group_is_as_large_as_grpos_whatever_n_is():
    for n in (2, 3, 4, 5, 7, 8, 16):
        cero = make_cero(100, 8, n, 50)
        assert cero.g * cero.n_max == n
        assert cero.budget * cero.g == 50 * 8 * n
        assert (cero.pick(np.arange(100), 1, progress_at(1)).n[:-1] == n).all()  # the last one takes the residual
    june = make_cero(200, 8, 8, 50, g=1, n_max=16)
    assert (june.g, june.n_max, june.budget) == (1, 16, 3_200)


# -- refusals -----------------------------------------------------------------------------------------------


def test_a_pool_below_the_batch_is_refused_with_advice_that_helps():
    with pytest.raises(ConfigError) as refused:
        make_cero(6, 8, 8, 50)
    text = str(refused.value)
    assert text.startswith("data.train_batch_size=8") and "capacity" not in text
    assert "data.train_batch_size=6 or less" in text and "adaptive.sampler.budget=600 or less" in text
    make_cero(6, 6, 8, 50)
    make_cero(6, 8, 8, 50, budget=600)
    with pytest.raises(ConfigError, match=r"adaptive\.sampler\.capacity=10: .* write 16 or more"):
        make_cero(40, 8, 8, 50, capacity=10)
    make_cero(40, 8, 8, 50, capacity=16)


# -- other facts after a resume -----------------------------------------------------------------------------


@functools.cache
def stopped(stop: int, p: tuple[float, ...], **facts: int) -> Engine:
    """A run of ``stop`` steps."""
    engine, world = make_engine("cero", p=np.array(p), refill=False, **facts)
    run(engine, world, stop)
    return engine


def resumed(
    stop: int, first: dict, then: dict, p: np.ndarray, *, budget: int | None = None, prompts: int | None = None
):
    """A run of ``stop`` steps as ``first`` says, gone on with as ``then`` says, of another budget or on the first prompts alone;
    the later steps' rollouts, the sampler."""
    engine = stopped(stop, tuple(p), **first)
    spent = engine.total.rollouts.generated
    table = StatsTable.from_arrow(engine.table.to_arrow())
    sampler = {"name": "cero", "budget": budget}
    again, world = make_engine(sampler, p=p[:prompts], refill=False, table=table, **then)
    again.load_state_dict(copy.deepcopy(engine.state_dict()))
    results = run(again, world, then["steps"] - stop, start=stop + 1)
    return spent, np.array([r.ledger.rollouts.generated for r in results]), again.policy.sampler


@pytest.mark.parametrize(
    "change", [dict(batch=16), dict(batch=4), dict(n=4), dict(n=16), dict(n=5), dict(batch=4, n=16), dict(steps=500)]
)
def test_a_resume_with_other_facts_plans_from_what_is_left(change):
    """Neither the end at once nor every round forced: the rounds that are left run at the new facts' own pace."""
    M, stop = 80, 150
    p = np.random.default_rng(2).beta(0.4, 0.6, M)
    first = dict(batch=8, n=8, steps=300)
    then = {**first, **change}
    spent, later, cero = resumed(stop, first, then, p)
    pace = then["batch"] * then["n"]
    wanted = pace * (then["steps"] - cero._rounds_before)
    assert abs(later.sum() - wanted) < 0.05 * wanted + 64
    assert (later <= cero.capacity * cero.g).all() and cero.capacity <= 1.04 * cero.pace + 1
    assert cero.pace * cero.g == pytest.approx(pace, rel=0.1)  # what was left of the pace so far comes on top
    assert cero.caught_up <= 0.1 * len(later)
    assert len(later) > 0.9 * (then["steps"] - stop)
    whole = abs(cero.metrics()["ahead_of_pace"])
    assert whole <= 3 * pace
    # and it goes on from its own state as it would have without an interruption
    engine, _ = make_engine("cero", p=p, refill=False, **then)
    engine.policy.sampler.load_state_dict(cero.state_dict())
    assert engine.policy.sampler.state_dict() == cero.state_dict()
    assert spent > 0


def test_a_resume_with_as_many_prompts_as_a_batch_has_spends_the_budget():
    """Rounds of the old capacity could not be filled any more: no round was forced, and a tenth of the budget was left."""
    p, facts = np.linspace(0.005, 0.995, 100), dict(batch=4, n=8, steps=40)
    *_, cero = resumed(5, facts, facts, p, prompts=4)
    assert cero.capacity == 8 and cero.left < 2 * cero.capacity


def test_a_larger_budget_is_spent_in_the_rounds_that_are_left():
    p, facts = np.linspace(0.005, 0.995, 100), dict(batch=4, n=8, steps=40)
    planned = stopped(20, tuple(p), **facts).policy.sampler.budget
    *_, cero = resumed(20, facts, facts, p, budget=2 * planned)
    assert cero.budget == 2 * planned and cero.left < cero.capacity


def test_what_is_spent_is_counted_in_the_units_of_the_day():
    M = 40
    p = np.full(M, 0.5)
    _, _, cero = resumed(20, dict(batch=4, n=8, steps=40), dict(batch=4, n=16, steps=40), p)
    total = float(cero.table.col("rollouts").sum())
    assert cero.spent * cero.g == pytest.approx(total, abs=16)


@pytest.mark.parametrize("factor", [132 / 128, 1.5])
def test_rounds_that_update_are_budget_over_capacity(factor):
    """What docs/papers.md#cero says of a larger capacity: a round fills it or allocates nothing."""
    M, steps = 400, 300
    p = np.random.default_rng(0).beta(0.5, 0.5, M)
    capacity = round(32 * factor)
    engine, world = make_engine({"name": "cero", "capacity": capacity}, p=p, batch=16, n=8, steps=steps, refill=False)
    results = run(engine, world, steps)
    assert len(results) == pytest.approx(steps / factor, rel=0.04)


class Doubling(Allocator):
    """Twice the planned group, in two halves."""

    name = "doubling"

    def first(self, rows, planned, progress):
        return planned

    def review(self, groups, progress):
        return np.where(groups.reduce(np.maximum, groups.stage) == 0, groups.n, CLOSE)

    def most(self, n, stage):
        return np.where(stage == 0, n, 0)


def test_an_allocator_that_tops_up_as_it_likes_spends_the_budget_and_no_more():
    engine, world = make_engine(
        "cero", f"{__name__}:Doubling", p=np.full(60, 0.3), batch=8, n=8, steps=20, refill=False
    )
    run(engine, world, 20)
    assert 0 <= 20 * 8 * 8 - engine.total.rollouts.generated < 16


def test_needs_no_refill_and_the_plan_decides_n():
    with pytest.raises(ConfigError, match=r"adaptive\.refill=false"):
        make_engine("cero")
    with pytest.raises(ConfigError, match=r"adaptive\.allocator\.name"):
        make_engine("cero", {"name": "pilot_commit", "form": "pipelined"}, refill=False)
    with pytest.raises(ConfigError, match="CERO plans"):
        make_engine("cero", "reinforce_ada", refill=False)
