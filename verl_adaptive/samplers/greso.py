"""GRESO: skip a prompt before generation when its own history says it is uninformative (2506.02177).

A prompt whose last z visits were all of zero variance is kept with probability ``max(p^z, floor)``, where p is
``p_easy`` if those visits were all-correct and ``p_hard`` if all-wrong (paper: filter with probability
``1 − p_e^{z_i}``; the two p's and the floor are the official code's, ``presampling_selector.py:117,142``). After each
step both p's move by ``delta`` towards the target share of zero-variance groups: down when the step's share of easy
(hard) groups reached ``target/3`` (``2·target/3``), up otherwise, within [p_min, p_max]; they stay put during the first
pass over the data (``ray_trainer.py:1187-1219``). Refill and round size: :mod:`verl_adaptive.samplers.rounds`.

Where paper and official code differ, the paper leads, as the default:

* a visit is zero-variance when all its signals are equal (paper); the code instead tests the group's mean against
  bands that fit rewards {1, 0.1, 0} at n = 8 only (there, take ``adaptive.signal=acc``);
* "easy" and "hard" mean the same for the streak and for the controller; in the code they do not, so p_hard drifts to
  its rail;
* a visit of the other kind begins a new streak, as in the code; what the paper counts there could not be read;
* draws are seeded and keyed by prompt and position; the code uses the unseeded global generator.

AstraFlow, the same lab's later system, keeps more: ``floor_easy=0.1 floor_hard=0.4 p_min=0.01 p_max=0.99``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from verl_adaptive.config import check
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import Floor, NonNegative, Share
from verl_adaptive.samplers.rounds import RoundConfig, SizedSampler
from verl_adaptive.stats.visits import kind_of


class Greso(SizedSampler):
    """GRESO's gate: skips a prompt when its own history says that it is uninformative (2506.02177)."""

    name: ClassVar[str] = "greso"
    unvisited: ClassVar[str] = "skip nothing"

    @dataclass
    class Config:
        """Options; the defaults are the paper's, but for ``round`` (:mod:`verl_adaptive.samplers.rounds`).

        Attributes:
            p_easy: p at the start; after z visits in a row that were all right a prompt is rolled out with probability p^z.
            p_hard: p at the start; after z visits in a row that were all wrong a prompt is rolled out with probability p^z.
            target: share of zero-variance groups aimed at (τ), split 1:2 between easy and hard.
            delta: step of the controller, Δp.
            p_min: the controller moves neither probability below this.
            p_max: the controller moves neither probability above this.
            floor_easy: least probability of rolling out a prompt with a streak of all right; above 0, so that none is lost.
            floor_hard: least probability of rolling out a prompt with a streak of all wrong; above 0, so that none is lost.
            warmup_epochs: passes over the data before the controller moves the probabilities.
            round: how much a step first asks for.
        """

        p_easy: Share = 0.5
        p_hard: Share = 0.5
        target: Share = 0.25
        delta: Share = 0.01
        p_min: Share = 0.05
        p_max: Share = 0.95
        floor_easy: Floor = 0.01
        floor_hard: Floor = 0.01
        warmup_epochs: NonNegative = 1.0
        round: RoundConfig = field(default_factory=RoundConfig)

        def validate(self, path: str) -> None:
            check(self.p_min <= self.p_max, f"{path}.p_min", self.p_min, f"must be at most {path}.p_max={self.p_max}")
            for name in ("p_easy", "p_hard"):
                hint = f"must be from {path}.p_min={self.p_min} to {path}.p_max={self.p_max}; change it, or these"
                check(self.p_min <= getattr(self, name) <= self.p_max, f"{path}.{name}", getattr(self, name), hint)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.p_easy: float = self.config.p_easy
        self.p_hard: float = self.config.p_hard
        self._counts = np.zeros(3, dtype=np.int64)  # groups closed this step: easy, hard, all
        self._gate = np.zeros(4, dtype=np.int64)  # this step: easy seen, easy skipped, hard seen, hard skipped
        self._last_gate = [0, 0, 0, 0]
        self._share = (0.0, 0.0)  # of the last step's closed groups: easy, hard

    # -- decision -------------------------------------------------------------------------------------------

    def keep_probability(self, rows: np.ndarray) -> np.ndarray:
        """float64 ``(k,)``: probability that each prompt passes the gate now."""
        streak, easy = self.table.col("streak")[rows], self.table.col("streak_kind")[rows] > 0
        p = np.where(easy, self.p_easy, self.p_hard)
        floor = np.where(easy, self.config.floor_easy, self.config.floor_hard)
        return np.where(streak > 0, np.maximum(p ** streak.astype(np.float64), floor), 1.0)

    def admit(self, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
        chance = self.keep_probability(rows)
        u = progress.draw.uniform("greso.gate", self.table.key_hi[rows], self.table.key_lo[rows], position)
        return u < chance

    def decided(self, rows: np.ndarray, passed: np.ndarray) -> None:
        streak, kind = self.table.col("streak")[rows], self.table.col("streak_kind")[rows]
        easy, hard = (streak > 0) & (kind > 0), (streak > 0) & (kind < 0)
        self._gate += [easy.sum(), (easy & ~passed).sum(), hard.sum(), (hard & ~passed).sum()]

    # -- learning -------------------------------------------------------------------------------------------

    def observe(self, groups: Groups, progress: Progress) -> None:
        seen = groups.n > 0
        kind = kind_of(groups.degenerate(self.facts.tolerance), groups.pass_rate)  # as the table counts its streaks
        self._counts += [(seen & (kind > 0)).sum(), (seen & (kind < 0)).sum(), seen.sum()]

    def end_step(self, progress: Progress) -> None:
        easy, hard, total = (int(c) for c in self._counts)
        self._share = (easy / total, hard / total) if total else (0.0, 0.0)
        # A step that ends on the last prompt of a pass still belongs to that pass.
        if total and progress.epoch > self.config.warmup_epochs:
            self.p_easy = self._moved(self.p_easy, self._share[0] >= self.config.target / 3)
            self.p_hard = self._moved(self.p_hard, self._share[1] >= 2 * self.config.target / 3)
        self._last_gate = self._gate.tolist()
        self._counts[:] = 0
        self._gate[:] = 0

    def _moved(self, p: float, too_many: bool) -> float:
        c = self.config
        return min(max(p - c.delta if too_many else p + c.delta, c.p_min), c.p_max)

    # -- state ----------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        seen_easy, cut_easy, seen_hard, cut_hard = self._last_gate
        return {
            "p_easy": self.p_easy,
            "p_hard": self.p_hard,
            "easy_share": self._share[0],
            "hard_share": self._share[1],
            "easy_skipped_total": float(cut_easy),
            "hard_skipped_total": float(cut_hard),
            "easy_seen_total": float(seen_easy),
            "hard_seen_total": float(seen_hard),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"p_easy": self.p_easy, "p_hard": self.p_hard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.p_easy, self.p_hard = float(state["p_easy"]), float(state["p_hard"])
