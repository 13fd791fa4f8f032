"""The public conformance suites, on this method's parts."""

from __future__ import annotations

from verl_adaptive.allocators.pilot_commit import PilotCommit
from verl_adaptive.filters.band import Band
from verl_adaptive.testing.allocators import AllocatorConformance
from verl_adaptive.testing.filters import FilterConformance


class TestOnPolicy(AllocatorConformance):
    def make(self) -> PilotCommit:
        return PilotCommit({"form": "on_policy"})


class TestPipelined(AllocatorConformance):
    def make(self) -> PilotCommit:
        return PilotCommit({"form": "pipelined", "choose": "max_variance"})


class TestBand(FilterConformance):
    def make(self) -> Band:
        band = Band({"variance": True})
        band.judge = PilotCommit({"n_pilot": 2}).side
        return band
