"""Pilot-Commit written out slowly, a prompt at a time, from the method's description: what the allocator must equal."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from verl_adaptive.rng import Draw


@dataclass
class Pilot:
    """One prompt's pilots, waiting or decided."""

    submission: int
    key: tuple[int, int]
    results: list[int]
    step: int

    def in_band(self, lower: Fraction, upper: Fraction) -> bool:
        n = len(self.results)
        return ceil(lower * n) <= sum(self.results) <= floor((1 - upper) * n)


def recall(buffer: list[Pilot], step: int, places: int, choose: str, max_age: int, seed: int = 0) -> tuple[list, list]:
    """Of the pilots that wait: submissions that commit now, and submissions given up as too old."""
    draw = Draw(seed, step)

    def number(p: Pilot) -> int:
        return int(draw.bits("pilot_commit.choose.0", *p.key, p.submission))

    def spread(p: Pilot) -> Fraction:
        mean = Fraction(sum(p.results), len(p.results))
        return mean * (1 - mean)

    order = {
        "random": lambda p: (number(p), p.submission),
        "max_variance": lambda p: (-spread(p), -p.step, p.submission),
    }[choose]
    old = [p for p in buffer if step - p.step > max_age]
    chosen = sorted((p for p in buffer if p not in old), key=order)[:places]
    return sorted(p.submission for p in chosen), sorted(p.submission for p in old)
