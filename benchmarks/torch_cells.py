"""What the tiny benchmark compares, and what it keeps of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.cells import Key
from benchmarks.presets import FULL, INGREDIENTS, SHIPPED, SOLO, SOLO_PARTS

ORACLE = "oracle"
#: Presets whose name begins so have the batch's mean as baseline: REINFORCE, no memory and no group.
REINFORCE = "reinforce"
#: Presets whose name begins so have a critic: a second network, as PPO's.
CRITIC = "sao"

#: What is compared: name → words after ``+adaptive=``. In those whose name begins with "oracle", the sampler is replaced
#: by one that sees the exact pass rates.
PRESETS: dict[str, list[str]] = {
    **SHIPPED,
    **FULL,
    "oracle+keep_all": ["grpo"],
    "oracle+informative": ["dapo"],
    "oracle+aero": ["aero"],
    "oracle+full": FULL["full"],
    **INGREDIENTS,
    **SOLO,
    **SOLO_PARTS,
}
#: Settings other than the usual ones; name → settings that differ.
VARIANTS: dict[str, dict[str, float]] = {
    "base": {},
    "sparse": {"flat": 0.8},
    # the same rollouts a step in half as many groups of 16
    "halved16": {"batch": 8, "n": 16},
    "halved16-sparse": {"batch": 8, "n": 16, "flat": 0.8},
    # learning rate decayed to nothing; two epochs over each batch
    "decay": {"decay": 1},
    "decay-sparse": {"decay": 1, "flat": 0.8},
    "epochs2": {"epochs": 2},
    "epochs2-sparse": {"epochs": 2, "flat": 0.8},
    # more prompts than rollouts, so that nobody is met twice; one answer of ten judged wrongly
    "onepass": {"pool": 8192},
    "visible-onepass": {"pool": 8192, "prior": 1},
    "exact-onepass": {"pool": 8192, "prior": 2},
    "noise": {"noise": 0.1},
    # the same, and each data source's rewards half a point above the one's before
    "offsets": {"noise": 0.1, "offset": 0.5},
    # no more prompts than rollouts of a step; steps of 512 prompts
    "pool128": {"pool": 128},
    "batch512": {"batch": 512, "pool": 8192, "steps": 15},
    # two epochs over each batch
    "epochs2-onepass": {"epochs": 2, "pool": 8192},
    "epochs2-noise": {"epochs": 2, "noise": 0.1},
    "epochs2-offsets": {"epochs": 2, "noise": 0.1, "offset": 0.5},
    # nothing is right at first: a success in three steps of 128 rollouts
    "zero": {"warm_steps": 300, "rare": 0.004},
}
#: What a point of a curve holds.
COLUMNS = (
    *("rollouts", "updates", "held_out", "pool", "tokens_generated", "tokens_trained", "tokens_zero_advantage"),
    *("groups", "informative"),
)


@dataclass(frozen=True)
class Settings:
    """What is equal for all runs.

    Attributes:
        batch, n, updates: prompts a step, rollouts a prompt, optimizer updates a step.
        steps: GRPO's steps; the budget is as many rollouts as they generate.
        pool, held_out: questions to train on, and to judge by.
        flat: share of the pool that are those, of twice as many questions, that the starting model answers most surely,
            right or wrong; 0: questions as they come.
        rare: questions, held-out ones too, that the starting model answers less often than this, and no products, which
            nobody learns here; 0: questions as they come.
        judged: questions of the pool that are judged, too.
        warm_steps: supervised updates before.
        layers, hidden, heads: the model's size.
        clip, weight_decay, max_norm: of the update.
        prior: what is expected of each prompt before anything is rolled out (a warm start with a column ``prior``): its exact
            pass rate at the start (2), what the question shows of it (1; :meth:`Questions.seen`), or nothing (0).
        epochs: over each batch (``ppo_epochs``).
        decay: whether the learning rate falls to 0 over the budget, evenly.
        noise: share of the rollouts whose reward is turned round.
        offset: added to the rewards of the second data source, twice to the third's.
        critic_lr, critic_epochs, critic_warmup: the critic's learning rate, its epochs over each batch, and the step at
            which the actor begins to train.
        evaluate_every: rollouts between two evaluations, at least.
    """

    batch: int = 16
    n: int = 8
    updates: int = 2
    steps: int = 60
    pool: int = 512
    held_out: int = 256
    flat: float = 0.0
    rare: float = 0.0
    judged: int = 128
    warm_steps: int = 1000
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    clip: float = 0.2
    weight_decay: float = 0.01
    max_norm: float = 1.0
    epochs: int = 1
    decay: int = 0
    noise: float = 0.0
    offset: float = 0.0
    prior: int = 0
    critic_lr: float = 1e-3
    critic_epochs: int = 2
    critic_warmup: int = 10
    evaluate_every: int = 512

    @property
    def budget(self) -> int:
        """Rollouts that every run generates."""
        return self.steps * self.batch * self.n


@dataclass
class Cell:
    """One run.

    Attributes:
        variant, preset, lr, seed: who it is.
        curve: one point an evaluation, of ``COLUMNS``.
        ends: pass@8, entropy and length of responses, held-out, before and after.
        steps: made in all.
        seconds: of CPU time, by part, and of wall clock.
        load: of the machine when the run began.
        greatest: |advantage| of the run; 0 in cells that were run before it was kept.
        machine: which of the file's ``machines`` it ran on.
    """

    variant: str
    preset: str
    lr: float
    seed: int
    command: str = ""
    curve: list[list[float]] = field(default_factory=list)
    ends: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    rollouts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    load: float = 0.0
    greatest: float = 0.0
    machine: int = 0

    @property
    def key(self) -> Key:
        return self.variant, self.preset, self.lr, self.seed
