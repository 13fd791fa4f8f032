"""What a run will do, worked out once: the trainer, the banner, ``doctor``, the cost, resume and the store read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl_adaptive.advantages.verl import CENTRING, COMPARING, GROUP_RELATIVE
from verl_adaptive.config import AdaptiveConfig, RunFacts, check, flat
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.engine.shape import step_shape
from verl_adaptive.integration import facts
from verl_adaptive.integration.advantage import register_estimator
from verl_adaptive.integration.checks import check_run, why_not_skip_zero, zero_rows
from verl_adaptive.integration.compared_settings import settings_of
from verl_adaptive.integration.facts import JournalPlace
from verl_adaptive.integration.notes import notes_of
from verl_adaptive.integration.polling import stall_seconds
from verl_adaptive.policy import Policy, build_policy
from verl_adaptive.text import counted

#: Prompts of a data set that is not known.
STAND_IN = 20_000


@dataclass(frozen=True)
class RunPlan:
    """A run: :meth:`of` what its command line says, then :meth:`sized` by its training set.

    Attributes:
        adaptive: the ``adaptive`` group, with the seed and the group size of this run.
        policy: built from it once, and told what verl's estimator does; not bound.
        estimator: who computes the advantages, of the policy's or of verl's.
        mode: verl's trainer mode, whatever our names for it: ``sync``, ``colocate_async`` or ``separate_async``.
        schedule: what the mode means for this run.
        ahead: batches generated ahead.
        async_facts: how an asynchronous trainer takes its batches; what it generates ahead is there once sized; None: ``sync``.
        batch, rollout_n: prompts and rollouts a prompt of plain GRPO's step with the same settings.
        epochs, asked_steps: what verl ends by; ``asked_steps`` is None where nobody asked for a number of steps.
        updates: the actor's optimizer updates a step, epochs of PPO included.
        skip_zero: rows of zero advantage are left out of training.
        forgo: terms of other losses of these rows go, too.
        zero_rows: what becomes of rows of zero advantage, in words.
        late: rewards come when all rollouts of a step are there.
        single_turn: prompts go to verl's agent loop of one turn.
        engines, slots: inference engines, counted by sets of slots (0: not known), and sequences that each runs at a time.
        longest: tokens of an answer at most.
        stall: seconds without a rollout that are too long.
        row_limit: rows that TransferQueue can hold; None: no limit.
        place: where the journal is.
        settings: what a resume compares.
        results: how this run reads a file of results: arguments of :func:`verl_adaptive.stats.results.read_results`.
        notes: what a user should know.
        groups, n: groups that a step trains, and rollouts of each.
        steps: planned steps; None: not known.
        prompts: different prompts of the training set; None: not known.
        epoch: steps of one of verl's epochs, which go through all rows; None: not known.
        uncounted: what verl will still do to them, so that prompts and steps may be fewer.
        first_round, resume: rollouts that the policy asks for first, and what the run starts from, where ``doctor`` looked.
    """

    adaptive: AdaptiveConfig
    policy: Policy
    estimator: str
    mode: str
    schedule: str
    ahead: float
    async_facts: AsyncFacts | None
    batch: int
    rollout_n: int
    only_validates: bool
    epochs: int
    asked_steps: int | None
    updates: int
    skip_zero: bool
    forgo: bool
    zero_rows: str
    late: bool
    single_turn: bool
    engines: int
    slots: int
    longest: int
    stall: float
    row_limit: int | None
    place: JournalPlace
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    groups: int = 0
    n: int = 0
    steps: int | None = None
    prompts: int | None = None
    epoch: int | None = None
    uncounted: str = ""
    first_round: int | None = None
    resume: str = ""

    @classmethod
    def of(cls, config: Any) -> RunPlan:
        """What verl's configuration, composed and valid, says; ConfigError for settings that cannot work together."""
        adaptive = facts.adaptive_of(config)
        policy = _told(build_policy(adaptive), str(config.algorithm.adv_estimator))
        advantage, mode, late = policy.advantage, facts.mode_of(config), facts.late_rewards(config)
        if late and policy.filter.keeps_all:  # no time to refill, and nothing is lost by not doing so
            adaptive = replace(adaptive, refill=False)
        check_run(config, adaptive, policy)
        if advantage.estimator is not None:  # here, so that `doctor` refuses a name that verl has, too
            register_estimator(type(advantage))
        skip, said = zero_rows(config, adaptive.skip_zero_advantage)
        forgo = skip and bool(why_not_skip_zero(config))
        if skip and not forgo:
            said = advantage.zero_rows or said
        rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
        batch, n, longest = int(config.data.train_batch_size), int(rollout.n), int(rollout.response_length)
        steps = trainer.get("total_training_steps")
        return cls(
            adaptive=adaptive,
            policy=policy,
            estimator=advantage.estimator or str(config.algorithm.adv_estimator),
            mode=mode,
            schedule=facts.schedule_of(config),
            ahead=facts.ahead_of(config),
            async_facts=None if mode == "sync" else facts.async_of(config),
            batch=batch,
            rollout_n=n,
            only_validates=facts.only_validates(config),
            epochs=int(trainer.total_epochs),
            asked_steps=None if steps is None else int(steps),
            updates=facts.updates_of(config),
            skip_zero=skip,
            forgo=forgo,
            zero_rows=said,
            late=late,
            single_turn=facts.single_turn(config),
            engines=facts.engines_of(config),
            slots=int(rollout.max_num_seqs),
            longest=longest,
            stall=stall_seconds(adaptive, longest),
            row_limit=facts.row_limit(config),
            place=facts.journal_place(config, adaptive),
            settings=settings_of(config, adaptive, policy),
            results={
                "identity": facts.identity_of(config, adaptive.id_key),
                "success": adaptive.success.of,
                "tolerance": adaptive.tolerance,
            },
            notes=tuple(filter(None, notes_of(config, adaptive, policy))),
        )

    def sized(self, rows: int | None, prompts: int | None = None, uncounted: str = "") -> RunPlan:
        """The plan for a training set.

        Args:
            rows: of it, as verl reads it; None: not known.
            prompts: different ones among them; None: all.
            uncounted: as the attribute.

        Raises:
            ConfigError: it is too small.
        """
        batch, steps, notes = self.batch, self.asked_steps, list(self.notes)
        prompts = rows if prompts is None else prompts
        epoch = None
        if rows is not None:
            epoch = rows // batch
            check(
                rows >= batch or self.only_validates,
                "data.train_batch_size",
                batch,
                f"the training set has only {counted(rows, 'prompt')}; use at most that",
            )
            by_epochs = self.epochs * epoch
            if steps is not None and by_epochs < steps:
                notes.append(
                    f"trainer.total_epochs={self.epochs}: verl stops after {counted(by_epochs, 'step')}, before "
                    f"trainer.total_training_steps={steps:,}, and saves and validates no last step"
                )
            steps = by_epochs if steps is None else min(steps, by_epochs)
        shape = step_shape(self.adaptive, batch, self.rollout_n, prompts or STAND_IN, self.ahead)
        notes += [shape.note] if shape.note else []
        window = shape.groups + shape.ahead
        check(
            self.async_facts is None or prompts is None or prompts >= window or self.only_validates,
            f"trainer.v1.{self.mode}.num_warmup_batches",
            self.ahead,
            f"{window} prompts would be in flight at once, the training set has {prompts} different ones, and none is "
            "rolled out twice at a time; lower it, or data.train_batch_size",
        )
        policy = self.policy
        if shape.config != self.adaptive:  # groups of another size than asked for
            policy = _told(build_policy(shape.config), self.estimator)
        if not policy.sampler.plans_rollouts:  # what a step asks for at least
            least, cap = policy.allocator.least(self.rollout_n), shape.config.max_rollouts_per_step
            # of the dropped it keeps as many as it trains, should nothing better come (GroupTracker.never_trains)
            at_once = window + shape.groups * (shape.config.refill and not policy.filter.keeps_all)
            at_once = at_once if cap is None else min(at_once, cap // least)
            facts.check_room(self.row_limit, at_once * (1 + least), "a step")
        return replace(
            self,
            adaptive=shape.config,
            policy=policy,
            async_facts=None if self.async_facts is None else replace(self.async_facts, warmup=shape.ahead),
            notes=tuple(notes),
            groups=shape.groups,
            n=shape.n,
            steps=steps,
            prompts=prompts,
            epoch=epoch,
            uncounted=uncounted if rows is not None else "",
        )

    @property
    def facts(self) -> RunFacts:
        """What the policy is told."""
        prompts, steps = self.prompts or STAND_IN, self.steps or 1000
        return RunFacts.of(self.adaptive, batch=self.groups, n=self.n, steps=steps, prompts=prompts)

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """role → part → options that differ from the part's defaults."""
        return {part.role: {part.name: _changed(part)} for part in self.policy}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = [
            "mode",
            "schedule",
            "parts",
            "groups",
            "n",
            "updates",
            "steps",
            "prompts",
            "uncounted",
            "zero_rows",
            "first_round",
            "resume",
        ]
        return {
            "preset": self.adaptive.name,
            **{name: getattr(self, name) for name in names},
            "cap": self.adaptive.max_rollouts_per_step,
            "refill": self.adaptive.refill,
            "keeps_all": self.policy.filter.keeps_all,
            "total_rollouts": self.adaptive.total_rollouts,
            "store": self.store,
            "store_path": self.place.folder,
            "notes": list(self.notes),
        }

    @property
    def begins(self) -> str:
        """What statistics begin with where no checkpoint has any, for people."""
        start = self.adaptive.warm_start
        return "empty" if start is None else f"with the warm start {start}"

    @property
    def store(self) -> str:
        """Where the journal is, for people."""
        return self.place.folder or f"no journal ({self.place.why_none}); statistics live in the checkpoints"

    def lines(self) -> list[tuple[str, str]]:
        """Label and text, for people: of the banner and of ``doctor``."""
        adaptive, steps, total = self.adaptive, self.steps, self.adaptive.total_rollouts
        parts = []
        for role, part in self.parts.items():
            for name, options in part.items():
                changed = ", ".join(f"{key}={value}" for key, value in options.items())
                parts.append(f"{role}={name}{f' ({changed})' if changed else ''}")
        fill = "prompts are drawn until the batch is full" if adaptive.refill else "nothing is refilled"
        if self.policy.filter.keeps_all:
            fill = "nothing is dropped"
        most = adaptive.max_rollouts_per_step
        run = "as many steps as the data give" if steps is None else counted(steps, "step")
        if self.uncounted and steps is not None:
            run = f"{counted(steps, 'step')} at most ({self.prompts:,} prompts, {self.uncounted})"
        out = f"; if prompts run out: {adaptive.on_exhausted} (adaptive.on_exhausted)"
        seen = (
            [] if self.first_round is None else [("first", f"{self.first_round:,} rollouts"), ("resume", self.resume)]
        )
        return [
            ("policy", f"{adaptive.name}: {', '.join(parts)} ({self.estimator})"),
            ("trainer", f"{self.mode}: {self.schedule}"),
            (
                "step",
                f"trains {counted(self.groups, 'group')} of {self.n}; {counted(self.updates, 'optimizer update')}; {fill}"
                + (f", at most {most:,} rollouts" if most else ""),
            ),
            ("run", run + (f", or {total:,} rollouts if those come first" if total else "") + out),
            (
                "signal",
                f"{adaptive.signal} ({adaptive.success.mode}), zero-variance when max - min <= {adaptive.tolerance:g}",
            ),
            ("losses", f"rows of zero advantage {self.zero_rows}"),
            ("store", self.store),
            *seen,
        ]


def _told(policy: Policy, estimator: str) -> Policy:
    """The policy, an advantage that leaves the computing to verl told what verl's estimator does."""
    advantage = policy.advantage
    if advantage.estimator is None:
        advantage.group_relative = estimator in GROUP_RELATIVE
        advantage.needs_groups = estimator in COMPARING
        advantage.centres = estimator in CENTRING
    return policy


def _changed(part: Any) -> dict[str, Any]:
    """Options that are not the part's defaults, by their dotted names."""
    default, given = flat(asdict(type(part)().config)), flat(asdict(part.config))
    return {key: given[key] for key in given if given[key] != default.get(key)}
