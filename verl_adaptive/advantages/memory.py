"""A prompt's expected reward as the baseline: the store replaces the group (SPO, 2509.13232, and what we measured).

GRPO needs a group only to know what to expect of a prompt. A store that remembers every prompt knows that already, so a
group may be small, down to a single rollout, and every rollout of a prompt between solved and hopeless is informative:

    one rollout      A = r − v
    n rollouts       A_i = r_i − b_i,   b_i = (Σ_{j≠i} r_j + κ' v) / (n − 1 + κ')      (leave one out, shrunk to v)

v is :class:`~verl_adaptive.stats.running_mean.Memory`'s value of the prompt: its own rewards, fading, shrunk to its data source's.

*Before.* v must not know the rewards that it is subtracted from, or the baseline is biased. It is the value **at the
beginning of the step in which the group is reviewed**, in every trainer mode: of a prompt that comes twice in a step
both visits have that value, and the source's mean stands still within the step. In asynchronous trainers that may be
steps after the group was submitted and before it trains; the prompt has no other group in between, so the value has lost
nothing but the source's latest move.

*Scale.* Advantages are divided by the run's :class:`~verl_adaptive.stats.scale.RunningScale`, not by a prompt's own
deviation √(v (1 − v)), and are at most 8 in size. ``scale=whiten`` is SPO's: less the
batch's mean, divided by its deviation. Either is one number for all prompts, so Dr. GRPO's
``algorithm.norm_adv_by_std_in_grpo=false``, which is about a group's own deviation, has nothing to turn off here.

*Equal rewards.* A difference of at most 1e-6 of the reward, or of the scale at the beginning of the step of the review, is 0:
rewards that are equal up to rounding teach nothing. ``adaptive.tolerance`` is of the signal, and does not enter here.

*Rogue rewards.* What a reward adds to memory, scale and the others' baseline is at most 8 scales from the prompt's value, so
one −10,000 costs one rollout and not the next hundred steps; in a run's first step, which makes the scale, it costs more.

*Thinning.* With ``thin`` a row is kept with probability q = min(1, |d| / τ), d = r − b, τ = thin · S, S the scale at the
beginning of the step of the review. A kept row counts as sign(d) · max(|d|, τ), any other as 0, and leaves training where
rows of zero advantage may. The mean over draws is d, so the expected gradient is that of all rows. One uniform is drawn for
each group, of its prompt's key and its place in the order of submission; siblings share it.

*Any reward.* v is in units of the training reward itself, so 0/1, ±1, shaped and continuous rewards are served by one
formula: r → a r + b (a > 0) changes no advantage. Until anything is known, in the first step of a run without warm
start, the mean of the batch's other rollouts stands for v, those of its data source foremost, as in v.
``adaptive.signal`` may be something else than the reward; it is what samplers and filters judge by and does not enter
here. verl's own penalties (KL in the reward) are in r and not in v: the baseline is then a little high, and not biased by
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from verl_adaptive.config import RunFacts, check
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.ranges import NonNegative, Positive, Range, Share
from verl_adaptive.rng import Draw
from verl_adaptive.roles import Advantage
from verl_adaptive.stats.running_mean import Memory
from verl_adaptive.stats.scale import CLIP, RunningScale, beyond_rounding, others_mean, typical_distance, within
from verl_adaptive.stats.table import Column, StatsTable


class MemoryBaseline(Advantage):
    """The reward less what the store expects of the prompt."""

    name: ClassVar[str] = "memory"
    estimator: ClassVar[str | None] = "adaptive_memory"
    needs_groups: bool = False
    # At the beginning of the step in which the last visit was reviewed.
    columns: ClassVar[Mapping[str, Column]] = {"scale": Column("f8", 0.0)}

    @dataclass
    class Config:
        """Options.

        Attributes:
            decay: ρ, what a visit leaves of a prompt's earlier evidence.
            strength: κ, rollouts that the prior counts for before the first visit; it fades with the evidence.
            prior: what an unknown prompt is expected to give: the mean of its data source (``source``) or of ``all``.
            shrink: κ', rollouts that the value counts for beside the other rollouts of a group.
            scale: divide by the running root mean square (``running``), ``whiten`` over the batch (SPO), or ``none``.
            thin: τ in scales: rows are thinned without bias, the smaller |r − b| the likelier (not with ``whiten``); 0: none.
        """

        decay: Share = 0.9
        strength: Positive = 4.0
        prior: Literal["source", "all"] = "source"
        shrink: NonNegative = 4.0
        scale: Literal["running", "whiten", "none"] = "running"
        thin: Annotated[float, Range(f"[0, {CLIP:g}]")] = 0.0

        def validate(self, path: str) -> None:
            hint = f"must be 0 with {path}.scale=whiten, which takes the mean over every row; or write {path}.scale=running"
            check(not (self.thin and self.scale == "whiten"), f"{path}.thin", self.thin, hint)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._scale = RunningScale()
        self._last = {"explained_share": 0.0, "value_mean": 0.0}

    def bind(self, table: StatsTable, facts: RunFacts) -> None:
        super().bind(table, facts)
        c = self.config
        kind = {"decay": c.decay, "strength": c.strength, "by_source": c.prior == "source"}
        self.memory = Memory(table, self.name, **kind, centre=None)
        self.memory.begin_with(table.col("reward_sum"))

    def observe(self, groups: Groups, progress: Progress) -> None:
        groups = groups.select(groups.n > 0)
        if not len(groups):
            return
        rows = groups.row
        self.col("scale")[self.memory.note(rows)] = self._scale.before
        # Asynchronous trainers review a group now, another then: what stands for an unknown value is the step's so far.
        off = self._off(groups.reward, groups.group_of, groups, self._scale.rewards)
        self._scale.observe(self.memory.rewards(rows[groups.group_of], groups.reward), off)
        reward = self._scale.counted(groups.reward, self.memory.col("before")[rows][groups.group_of])
        total, n, weight = groups.sum(reward), groups.n.astype(np.float64), self.evidence_weight(groups)
        self.memory.observe(rows, weight * total, weight * n, total / n)

    def end_step(self, progress: Progress) -> None:
        value = self.col("before")[self.memory.noted]
        self._last["value_mean"] = float(np.nan_to_num(value).mean()) if len(value) else 0.0
        self._last["explained_share"] = self._scale.explained
        self._scale.end_step()
        self.memory.end_step()

    def _off(
        self, reward: np.ndarray, group_of: np.ndarray, groups: Groups, earlier: np.ndarray | None = None
    ) -> np.ndarray:
        """r − b of each rollout; of one without a value the others' mean stands for it, ``earlier`` rewards among them, and
        where there is no other it is nan.

        The others are all of the group, also those that are left out of training: leaving one out changes nobody's baseline.
        """
        value, usual = self._values(reward, group_of, groups, earlier)
        # Of a whole group, the rewards at hand: they may have penalties that the group's own do not.
        counted = self._counted(reward, group_of, groups, *usual)
        total = np.bincount(group_of, counted, minlength=len(groups))
        whole = np.bincount(group_of, minlength=len(groups)) == groups.n
        if not whole.all():
            total = np.where(whole, total, groups.sum(self._counted(groups.reward, groups.group_of, groups, *usual)))
        rest, n, shrink = total[group_of] - counted, groups.n[group_of], self.config.shrink
        with np.errstate(invalid="ignore", divide="ignore"):
            off = reward - np.where(n > 1, (rest + shrink * value) / (n - 1 + shrink), value)
        return beyond_rounding(off, reward, self.col("scale")[groups.row][group_of])

    def _values(
        self, reward: np.ndarray, group_of: np.ndarray, groups: Groups, earlier: np.ndarray | None
    ) -> tuple[np.ndarray, tuple[float, float]]:
        """v of each rollout, or what stands for it; and the median and distance that :meth:`_counted` takes where there is none."""
        value = self.col("before")[groups.row][group_of]
        unknown = np.isnan(value)
        if not unknown.any():
            return value, (np.nan, np.inf)
        mine = every = self.memory.rewards(groups.row[group_of], reward)
        if len(reward) < groups.rollouts:
            every = self.memory.rewards(groups.row[groups.group_of], groups.reward)
        if earlier is not None:
            every = np.concatenate([every, earlier], axis=1)
        value[unknown] = others_mean(mine[:, unknown], every)
        return value, typical_distance(every[1])

    def _counted(
        self, reward: np.ndarray, group_of: np.ndarray, groups: Groups, centre: float, distance: float
    ) -> np.ndarray:
        """Rewards as they count in the baseline of the others in their group: a rogue one moves it as far as scale and memory.

        Where no value is known, the median of the rewards and their distance from it stand for value and scale.
        """
        value, scale = (self.col(name)[groups.row][group_of] for name in ("before", "scale"))
        unknown = np.isnan(value)
        limit = CLIP * np.where(unknown, distance, np.where(scale > 0, scale, np.inf))
        return within(reward, np.where(unknown, centre, value), limit)

    def compute(self, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
        off = np.nan_to_num(self._off(reward, group_of, observed))
        if self.config.scale == "whiten":
            return (off - off.mean()) / (float(off.std()) + 1e-8) if len(off) else off
        off, scale = self._thinned(off, group_of, observed), self._scale.value
        if self.config.scale == "none":
            return off
        return np.clip(off / scale, -CLIP, CLIP) if scale > 0 else np.zeros(len(off))

    def _thinned(self, off: np.ndarray, group_of: np.ndarray, groups: Groups) -> np.ndarray:
        """``off`` with small ones raised to τ or set to 0, right in the mean."""
        if not self.config.thin:
            return off
        least = self.config.thin * self.col("scale")[groups.row][group_of]
        keys = self.table.key_hi[groups.row], self.table.key_lo[groups.row]
        chance = Draw(self.facts.seed, 0).uniform("memory.thin", *keys, groups.submission)[group_of]
        return np.where(np.abs(off) > chance * least, np.sign(off) * np.maximum(np.abs(off), least), 0.0)

    @property
    def zero_rows(self) -> str:
        if self.config.scale == "whiten":
            return (
                "are not known beforehand (adaptive.advantage.scale=whiten takes the mean of every row): all rows train"
            )
        if self.config.thin:
            thin = f"adaptive.advantage.thin={self.config.thin:g}"
            return f"include those that {thin} sets to zero; they are left out of training (same expected gradient)"
        return super().zero_rows

    def zero(self, groups: Groups, trains: np.ndarray) -> np.ndarray:
        zero = np.zeros(groups.rollouts, dtype=bool)
        if self.config.scale != "whiten" and trains.any():  # whose mean and deviation are every row's
            home = groups.group_of[trains]
            off = np.nan_to_num(self._off(groups.reward[trains], home, groups))
            zero[trains] = self._thinned(off, home, groups) == 0
        return zero

    def metrics(self) -> dict[str, float]:
        return {"scale": self._scale.value, "jump": self._scale.jump, **self._last}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory.end_step()
        self._scale.load_state_dict(state["scale"])
