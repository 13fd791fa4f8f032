"""Every part of the package through its role's conformance suite; a sampler that breaks each promise is caught."""

from __future__ import annotations

import time
from datetime import datetime
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest

from verl_adaptive import Column
from verl_adaptive.advantages.beta import BetaPosterior
from verl_adaptive.advantages.memory import MemoryBaseline
from verl_adaptive.allocators.aero_rescue import AeroRescue
from verl_adaptive.allocators.fixed import Fixed
from verl_adaptive.allocators.pilot_commit import PilotCommit
from verl_adaptive.allocators.reinforce_ada import ReinforceAda
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.filters.aero_rejection import AeroRejection
from verl_adaptive.filters.band import Band
from verl_adaptive.filters.informative import Informative
from verl_adaptive.filters.keep_all import KeepAll
from verl_adaptive.roles import Advantage, Allocator, Filter, Pick, Role, Sampler, Verdict
from verl_adaptive.samplers.cero import Cero
from verl_adaptive.samplers.epoch import Epoch
from verl_adaptive.samplers.greso import Greso
from verl_adaptive.samplers.mopps import Mopps
from verl_adaptive.samplers.retire import Retire
from verl_adaptive.samplers.spread import Spread
from verl_adaptive.testing.advantages import AdvantageConformance
from verl_adaptive.testing.allocators import AllocatorConformance
from verl_adaptive.testing.filters import FilterConformance
from verl_adaptive.testing.samplers import SamplerConformance

SUITES: dict[str, type] = {
    "sampler": SamplerConformance,
    "allocator": AllocatorConformance,
    "filter": FilterConformance,
    "advantage": AdvantageConformance,
}


def suite(part: type[Role], settings: dict[str, Any] | None = None, /, **options: Any) -> type:
    """The suite of a part with these options; ``settings``: what the suite should know of it."""
    return type(part.__name__, (SUITES[part.role],), {"make": lambda self: part(options), **(settings or {})})


TestEpoch = suite(Epoch, {"patience": 20})
# a floor of 5 % a pass, about a pass a step; the default of 1 % only takes five times as long
TestGreso = suite(Greso, {"prompts": 16, "batch": 8, "patience": 100}, floor_easy=0.05, floor_hard=0.05)
TestGresoAstraFlow = suite(Greso, {"patience": 100}, floor_easy=0.1, floor_hard=0.4, p_min=0.01, p_max=0.99)
TestSpread = suite(Spread, {"patience": 100})
TestSpreadOfGroups = suite(Spread, {"patience": 100}, weight="mixed", prior="all", floor=0.05)
TestCero = suite(Cero, {"refill": False, "patience": 80})
TestCeroJune = suite(Cero, {"refill": False, "patience": 100}, g=1, n_max=16, rho=0.9, forget="visit")
TestMopps = suite(Mopps, {"patience": 60})
# four times the chance of a re-check; the default of 5 % only takes four times as long
TestRetire = suite(Retire, {"patience": 50}, recheck=0.2)
TestRetireAsPublished = suite(Retire, {"patience": None}, recheck=0.0)

TestFixed = suite(Fixed)
TestAero = suite(AeroRescue)
TestAeroPerPrompt = suite(AeroRescue, budget="per_prompt", n_extra=3, u_res=0.3)
TestReinforceAda = suite(ReinforceAda)
TestReinforceAdaPos = suite(ReinforceAda, variant="pos", k_pos=3)
TestOnPolicy = suite(PilotCommit, form="on_policy")
TestPipelined = suite(PilotCommit, form="pipelined", choose="max_variance")

TestKeepAll = suite(KeepAll)
TestInformative = suite(Informative, low=0.1, high=0.9)
TestAeroRejection = suite(AeroRejection)
TestAeroRejectionThin = suite(AeroRejection, thin_correct=True, keep_degenerate=0, k=2.0)


class TestBand(FilterConformance):
    def make(self) -> Band:
        band = Band()
        band.judge = PilotCommit({"n_pilot": 2}).side
        return band


TestBetaPredictive = suite(BetaPosterior)
TestBetaUnnormalised = suite(BetaPosterior, variant="unnormalised")
TestBetaOff = suite(BetaPosterior, variant="off")
TestBetaFull = suite(BetaPosterior, baseline="full")
TestBetaPositive = suite(BetaPosterior, w_neg=0.0)
TestBetaGroupMean = suite(BetaPosterior, {"per_group": False}, group_mean=True)
TestBetaGroupMeanOff = suite(BetaPosterior, {"per_group": False}, group_mean=True, variant="off")
TestBetaGroupMeanPositive = suite(BetaPosterior, {"per_group": False}, group_mean=True, w_neg=0.0)
_ONE_SCALE = {"per_group": False}  # for all groups
_SPO = {"decay": 0.875, "strength": 8.0, "prior": "all", "shrink": 0.0, "scale": "whiten"}
TestMemory = suite(MemoryBaseline, _ONE_SCALE)
TestMemoryOfSpo = suite(MemoryBaseline, _ONE_SCALE, **_SPO)
TestMemoryThinned = suite(MemoryBaseline, _ONE_SCALE, thin=0.5)


# -- the suite catches what it is for -----------------------------------------------------------------------


def but(base: type[Role], **body: Any) -> type[Role]:
    """This class, but for a few of its methods."""
    return type(f"But{base.__name__}", (base,), body)


class _Pool(Sampler):
    name = "bad"
    kind = "pool"

    def order(self, pool, progress):
        return np.argsort(progress.draw.bits("bad", self.table.key_hi[pool], self.table.key_lo[pool]))

    def pick(self, pool, count, progress):
        return Pick(pool[self.order(pool, progress)][:count])


class _Forgetful(_Pool):
    calls = 0

    def order(self, pool, progress):
        self.calls += 1
        return np.roll(super().order(pool, progress), self.calls)


class _Clears(_Pool):
    seen = 0

    def observe(self, groups, progress):
        self.seen += len(groups)

    def metrics(self):
        seen, self.seen = self.seen, 0
        return {"seen_total": float(seen)}


_Global = but(_Pool, order=lambda self, pool, _: np.random.permutation(len(pool)))
_Clock = but(_Pool, order=lambda self, pool, progress: (time.perf_counter(), _Pool.order(self, pool, progress))[1])
_Rows = but(_Pool, order=lambda self, pool, _: np.argsort(pool))
_Sources = but(_Pool, order=lambda self, pool, _: np.lexsort((self.table.key_lo[pool], self.table.col("source")[pool])))
_Nan = but(_Pool, metrics=lambda self: {"nothing": float("nan")})


@pytest.mark.parametrize(
    ("sampler", "test"),
    [
        (_Global, "test_arrival_order_does_not_matter"),
        (_Clock, "test_arrival_order_does_not_matter"),
        (_Rows, "test_row_numbers_do_not_matter"),
        (_Forgetful, "test_state_round_trip"),
        (_Sources, "test_row_numbers_do_not_matter"),
        (_Rows, "test_no_prompt_is_starved"),
        (_Nan, "test_metrics_are_finite_numbers"),
        (_Clears, "test_metrics_are_finite_numbers"),
    ],
)
def test_a_sampler_that_breaks_a_promise_fails(sampler, test):
    made = type("Suite", (SamplerConformance,), {"refill": False, "patience": 50, "make": lambda self: sampler({})})()
    SamplerConformance.test_shapes.__wrapped__(made)  # nothing wrong there
    with pytest.raises(AssertionError):
        getattr(made, test)()


class _Learning:
    """Decides by what it has seen, and saves none of it."""

    seen = ended = 0

    def observe(self, groups, progress):
        self.seen += groups.rollouts

    def end_step(self, progress):
        self.ended += 1


class _Halves(Allocator):
    name = "bad"

    def first(self, rows, planned, progress):
        return [4] * len(rows)  # training takes it, too

    def review(self, groups, progress):
        return np.where(groups.n < 8, 4, 0)

    def most(self, n, stage):
        return np.maximum(16 - n, 0)


class _All(Filter):
    name = "bad"
    reasons = ("odd",)

    def _keep(self, groups, progress):
        return np.ones(len(groups), dtype=bool)

    def decide(self, groups, progress):
        return Verdict(self._keep(groups, progress), np.zeros(len(groups), dtype=np.int64))


class _Plain(Advantage):
    name = estimator = "bad"

    def compute(self, reward, group_of, observed):
        return reward - 0.5


#: A part without faults → a method that learns, and one that looks at a clock or at chance.
ANNOUNCED = {
    _Halves: (
        {"review": lambda self, groups, _: np.where(groups.n < 5 + self.seen % 7, 4, 0)},
        {"review": lambda self, groups, progress: (monotonic_ns(), _Halves.review(self, groups, progress))[1]},
    ),
    _All: (
        {"_keep": lambda self, groups, _: groups.n % 3 != self.seen % 3},
        {"_keep": lambda self, groups, progress: (datetime.now(), _All._keep(self, groups, progress))[1]},
    ),
    _Plain: (
        {"compute": lambda self, reward, *_: reward - 0.5 - self.ended},
        {"compute": lambda self, reward, *_: reward - 0.5 + 0 * np.random.random()},
    ),
}


@pytest.mark.parametrize("part", ANNOUNCED, ids=["allocator", "filter", "advantage"])
def test_a_suite_looks_at_what_it_announces(part) -> None:
    """Exact resume, no clock, no global randomness: in every role, a part that breaks one fails, and one without faults passes."""
    base = SUITES[part.role]
    tests = [name for name in dir(base) if name.startswith("test_")]

    def failures(kind: type[Role]) -> list[str]:
        made = type("Suite", (base,), {"make": lambda self: kind()})()
        out = []
        for name in tests:
            try:
                getattr(made, name)()
            except AssertionError:
                out.append(name)
        return out

    learns, hastens = ANNOUNCED[part]
    assert failures(part) == []
    assert failures(type("Learning", (_Learning, part), learns)) == ["test_state_is_complete"]
    assert len(failures(but(part, **hastens))) >= 3


class _Cursor(Sampler):
    """Goes round by a cursor that each call moves: how often it is asked depends on who is back."""

    name, kind = "bad", "pool"
    at = 0

    def pick(self, pool, count, progress):
        self.at += count
        return Pick(np.sort(pool)[(self.at + np.arange(min(count, len(pool)))) % len(pool)])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class _MovingAll(_All):
    """Moves its threshold with every answer, and saves it."""

    level = 0.5

    def _keep(self, groups, progress):
        keep = groups.pass_rate <= self.level
        self.level = 0.9 * self.level + 0.1 * (groups.pass_rate.mean() if len(groups) else 0.0)
        return keep

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


class _CarelessPlain(_Plain):
    """Loses a prompt's second visit of a step."""

    columns = {"total": Column("f8", 0.0)}

    def observe(self, groups, progress):
        self.col("total")[groups.row] += groups.sum(groups.reward)


_LateAll = but(_All, _keep=lambda self, groups, progress: groups.n < 8 + progress.kept)
#: Asks for more than it says.
_PromisingHalves = but(_Halves, most=lambda self, n, _: np.zeros(len(n), dtype=np.int64))
_LyingHalves = but(_Halves, fixed_size=lambda self, n: n)
#: Looks at the step, which stands still in ``sync`` and not in the asynchronous modes.
_BusyHalves = but(_Halves, review=lambda self, g, progress: np.where((g.n < 8) & (progress.planned < 64), 4, 0))
#: Leaves out ``most``.
_SpeltHalves = but(_Halves, at_most=lambda self, n, _: np.full(len(n), 4))
#: Changes what the parts after it are shown.
_CentringHalves = but(_Halves, observe=lambda self, groups, _: groups.reward.__isub__(0.5))


@pytest.mark.parametrize(
    ("part", "test"),
    [
        (_Cursor, "test_arrival_order_does_not_matter"),
        (_MovingAll, "test_a_verdict_does_not_depend_on_company"),
        (_LateAll, "test_a_verdict_does_not_depend_on_company"),
        (_PromisingHalves, "test_every_group_comes_to_an_end"),
        (_LyingHalves, "test_first_gives_every_prompt_rollouts"),
        (_BusyHalves, "test_every_group_comes_to_an_end"),
        (_CarelessPlain, "test_how_visits_are_shown_makes_no_difference"),
        (_CentringHalves, "test_state_is_complete"),
        (_SpeltHalves, "test_a_run_accepts_the_class"),
    ],
)
def test_a_fault_that_one_call_does_not_show_is_caught(part, test):
    """These passed every suite, and trained other prompts when results came back in another order."""
    base = SUITES[part.role]
    with pytest.raises((AssertionError, AdaptiveError, ValueError)):
        getattr(type("Suite", (base,), {"make": lambda self: part({})})(), test)()


def test_a_suite_says_what_it_compared():
    suite_of_a_cursor = type("Suite", (SamplerConformance,), {"make": lambda self: _Cursor({})})()
    with pytest.raises(AssertionError, match=r"(?s)^step \d+\nassert \[\d"):
        suite_of_a_cursor.test_arrival_order_does_not_matter()


class _LeaveOneOut(Advantage):
    """Gives equal rewards a zero but for rounding, and calls it exact."""

    name = estimator = "leave_one_out"

    def compute(self, reward, group_of, observed):
        n, total = (np.bincount(group_of, weights=w)[group_of] for w in (None, reward))
        return reward - (total - reward) / np.maximum(n - 1, 1)

    def zero(self, groups, trains):
        return trains & (groups.n > 1)[groups.group_of] & groups.rollout_mask(groups.spread(groups.reward) == 0)


def test_a_suite_says_which_zero_is_none():
    suite = type("Suite", (AdvantageConformance,), {"make": lambda self: _LeaveOneOut({})})()
    with pytest.raises(AssertionError, match=r"zero names a rollout to which compute gives .*: not exactly zero"):
        suite.test_zero_means_zero()
