"""Pilot-Commit written out slowly, a prompt at a time, from the method's description: what the allocator must equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor

from verl_adaptive.rng import Draw


@dataclass
class Pilot:
    """One prompt's pilots, waiting or decided."""

    ticket: int
    key: tuple[int, int]
    results: list[int]
    step: int

    def in_band(self, lower: Fraction, upper: Fraction) -> bool:
        n = len(self.results)
        return ceil(lower * n) <= sum(self.results) <= floor((1 - upper) * n)


@dataclass
class Reference:
    """The buffer and the two rules.

    ``lower`` and ``upper`` are exact fractions, so that the band's whole-number bounds are exact here.
    """

    batch: int
    n: int
    n_pilot: int
    factor: int = 3
    lower: Fraction = Fraction(1, 8)
    upper: Fraction = Fraction(1, 4)
    choose: str = "random"
    form: str = "on_policy"
    max_age: int = 4
    hold_surplus: bool = False
    seed: int = 0
    buffer: list[Pilot] = field(default_factory=list)

    def take(self, waiting: list[Pilot], count: int, step: int, round_: int) -> list[Pilot]:
        """``count`` of the waiting, chosen by the rule."""
        draw = Draw(self.seed, step)

        def number(p: Pilot) -> int:
            return int(draw.bits(f"pilot_commit.choose.{round_}", *p.key, p.ticket))

        def spread(p: Pilot) -> Fraction:
            mean = Fraction(sum(p.results), len(p.results))
            return mean * (1 - mean)

        order = {
            "first": lambda p: p.ticket,
            "random": lambda p: (number(p), p.ticket),
            "max_variance": lambda p: (-spread(p), -p.step, p.ticket),
        }[self.choose]
        return sorted(waiting, key=order)[: max(0, count)]

    def start_round(self, step: int, round_: int, filled: int, committing: int) -> tuple[list[int], list[int], int]:
        """Before a generation: buffered tickets to commit, tickets given up as too old, and how many prompts to pilot.

        ``committing``: groups whose commit goes out in this generation already (on-policy form).
        """
        old = [p for p in self.buffer if step - p.step > self.max_age]
        fresh = [p for p in self.buffer if step - p.step <= self.max_age]
        chosen = self.take(fresh, self.batch - filled - committing, step, round_)
        self.buffer = [p for p in fresh if p not in chosen]
        if self.form == "on_policy" and filled + committing + len(chosen) >= self.batch:
            pilots = 0
        else:
            pilots = self.factor * self.batch
        return sorted(p.ticket for p in chosen), sorted(p.ticket for p in old), pilots

    def end_round(self, step: int, round_: int, pilots: list[Pilot], filled: int) -> list[int]:
        """After a generation: tickets that commit in the same step; the buffer takes what it is due."""
        passed = [p for p in pilots if p.in_band(self.lower, self.upper)]
        if self.form == "pipelined":
            self.buffer += passed
            return []
        chosen = self.take(passed, self.batch - filled, step, round_)
        if self.hold_surplus:
            self.buffer += [p for p in passed if p not in chosen]
        return sorted(p.ticket for p in chosen)
