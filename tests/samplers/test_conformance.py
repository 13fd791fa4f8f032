"""Every sampler of the package through the conformance suite; a sampler that breaks each promise is caught."""

from __future__ import annotations

import time

import numpy as np
import pytest

from verl_adaptive.roles import Pick, Sampler
from verl_adaptive.samplers.cero import Cero
from verl_adaptive.samplers.epoch import Epoch
from verl_adaptive.samplers.greso import Greso
from verl_adaptive.samplers.mopps import Mopps
from verl_adaptive.samplers.retire import Retire
from verl_adaptive.samplers.spread import Spread
from verl_adaptive.testing.samplers import SamplerConformance


class TestEpoch(SamplerConformance):
    patience = 20

    def make(self) -> Sampler:
        return Epoch({})


class TestGreso(SamplerConformance):
    prompts, batch = 16, 8
    patience = 100  # a floor of 5 % a pass, about a pass a step; the default of 1 % only takes five times as long

    def make(self) -> Sampler:
        return Greso({"floor_easy": 0.05, "floor_hard": 0.05})


class TestGresoAstraFlow(SamplerConformance):
    patience = 100

    def make(self) -> Sampler:
        return Greso({"floor_easy": 0.1, "floor_hard": 0.4, "p_min": 0.01, "p_max": 0.99})


class TestGresoMeanBands(SamplerConformance):
    patience = 150

    def make(self) -> Sampler:
        return Greso({"classify": "mean", "floor_easy": 0.1})


class TestSpread(SamplerConformance):
    patience = 100

    def make(self) -> Sampler:
        return Spread({})


class TestSpreadOfGroups(SamplerConformance):
    patience = 200

    def make(self) -> Sampler:
        return Spread({"weight": "mixed", "prior": "all", "floor": 0.05})


class TestCero(SamplerConformance):
    refill = False
    patience = 80

    def make(self) -> Sampler:
        return Cero({})


class TestCeroJune(SamplerConformance):
    refill = False
    patience = 150

    def make(self) -> Sampler:
        return Cero({"variant": "june", "rho": 0.9, "forget": "visit"})


class TestMopps(SamplerConformance):
    patience = 100

    def make(self) -> Sampler:
        return Mopps({})


class TestRetire(SamplerConformance):
    patience = 200

    def make(self) -> Sampler:
        return Retire({})


class TestRetireAsPublished(SamplerConformance):
    patience = None

    def make(self) -> Sampler:
        return Retire({"recheck": 0.0})


# -- the suite catches what it is for -----------------------------------------------------------------------


class _Pool(Sampler):
    name = "bad"
    kind = "pool"

    def order(self, pool, progress):
        return np.argsort(progress.draw.bits("bad", self.table.key_hi[pool], self.table.key_lo[pool]))

    def pick(self, pool, count, progress):
        return Pick(pool[self.order(pool, progress)][:count])


class _Global(_Pool):
    def order(self, pool, progress):
        return np.random.permutation(len(pool))


class _Clock(_Pool):
    def order(self, pool, progress):
        time.perf_counter()
        return super().order(pool, progress)


class _Rows(_Pool):
    def order(self, pool, progress):
        return np.argsort(pool)


class _Forgetful(_Pool):
    calls = 0

    def order(self, pool, progress):
        self.calls += 1
        return np.roll(super().order(pool, progress), self.calls)


class _Greedy(_Pool):
    def order(self, pool, progress):
        return np.argsort(np.arange(len(pool)))


class _Nan(_Pool):
    def metrics(self):
        return {"nothing": float("nan")}


@pytest.mark.parametrize(
    ("sampler", "test"),
    [
        (_Global, "test_no_global_randomness_and_no_clock"),
        (_Clock, "test_no_global_randomness_and_no_clock"),
        (_Rows, "test_row_numbers_do_not_matter"),
        (_Forgetful, "test_state_round_trip"),
        (_Greedy, "test_no_prompt_is_starved"),
        (_Nan, "test_metrics_are_finite_numbers"),
    ],
)
def test_a_sampler_that_breaks_a_promise_fails(sampler, test):
    class Suite(SamplerConformance):
        refill = False
        patience = 50

        def make(self) -> Sampler:
            return sampler({})

    Suite().test_shapes()  # nothing wrong there
    with pytest.raises(AssertionError):
        getattr(Suite(), test)()
