"""Configuration: plain dataclasses, strict about names and values.

Unknown keys are errors with the nearest known name; values are checked when the object is built, before any GPU time
is spent. Nothing here knows verl or Hydra: the integration hands over a plain mapping (``config.adaptive``).
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar

import numpy as np

from verl_adaptive.errors import ConfigError
from verl_adaptive.groups import SUCCESS, at_least
from verl_adaptive.ranges import Count, Finite, PositiveShare, Range, Share, Whole

T = TypeVar("T")

#: Metadata of options that count prompts or rollouts of a step, of the whole run, or steps of the run: a simulation of a
#: smaller batch or a shorter run makes them smaller, too. An option of a third party's part says the same of itself.
PER_STEP = {"counts": "step"}
PER_RUN = {"counts": "run"}
STEPS = {"counts": "steps"}

_INT64 = 2**63


def check(ok: bool, key: str, value: object, hint: str) -> None:
    """Raise :class:`ConfigError` unless ``ok``."""
    if not ok:
        raise ConfigError(key, value, hint)


def _check_written(group: Any, path: str, *names: str) -> None:
    """Refuse text that is empty, as that of an unset shell variable is: it would mean the default, which nobody asked for."""
    for name in names:
        value = getattr(group, name)
        hint = "is empty, as an unset shell variable leaves it; leave the key out for its default"
        check(not isinstance(value, str) or bool(value.strip()), f"{path}.{name}", value, hint)


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    out: dict[str, Any] = {}
    for key, value in options.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def build(cls: type[T], data: Mapping[str, Any] | None, path: str) -> T:
    """Make a config dataclass from a mapping.

    Args:
        cls: dataclass to build; nested dataclass fields take nested mappings.
        data: the values; missing ones take the dataclass defaults.
        path: the prefix of the keys as the user writes them, for messages.

    Raises:
        ConfigError: unknown key, missing key or value of the wrong type.
    """
    data = dict(data or {})
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {path}.{near[0]}?" if near else f"known keys: {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(f"{path}.{name}", value, f"no such key; {hint}")
    values = {}
    for name, f in known.items():
        key = f"{path}.{name}"
        if name in data:
            values[name] = _coerce(hints[name], data[name], key)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(key, None, "is required")
    made = cls(**values)
    validate = getattr(made, "validate", None)
    if validate is not None:
        validate(path)
    return made


def alternatives_of(hint: Any) -> tuple[tuple[Any, ...], bool]:
    """The types that a hint allows, and whether null is allowed, too."""
    if not isinstance(hint, types.UnionType) and typing.get_origin(hint) is not typing.Union:
        return (hint,), False
    every = typing.get_args(hint)
    return tuple(option for option in every if option is not type(None)), type(None) in every


def ranged(hint: Any) -> tuple[Any, Range | None]:
    """A type without its range, and its range (:mod:`verl_adaptive.ranges`)."""
    if typing.get_origin(hint) is not Annotated:
        return hint, None
    base, *more = typing.get_args(hint)
    return base, next((found for found in more if isinstance(found, Range)), None)


def _coerce(hint: Any, value: Any, key: str) -> Any:
    alternatives, null = alternatives_of(hint)
    if value is None and null:
        return None
    for base, within in map(ranged, alternatives):
        try:
            made = _coerce_one(base, value, key)
        except ConfigError as error:
            if len(alternatives) == 1 and not (null and error.hint.startswith("must be ")):
                raise
            continue
        if within is not None and made not in within:
            raise ConfigError(key, value, within.hint(made, null))
        return made
    names = [getattr(base, "__name__", str(base)) for base, _ in map(ranged, alternatives)]
    raise ConfigError(key, value, f"must be {' or '.join([*names, 'null'] if null else names)}")


def _coerce_one(hint: Any, value: Any, key: str) -> Any:
    if is_dataclass(hint):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(key, value, "must be a group of keys")
        return build(hint, value, key)  # type: ignore[arg-type]
    if typing.get_origin(hint) is typing.Literal:
        options = typing.get_args(hint)
        if value not in options:
            raise ConfigError(key, value, f"must be one of {', '.join(map(str, options))}")
        return value
    if typing.get_origin(hint) in (list, tuple):
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise ConfigError(key, value, f"must be a list; write {key}=[{value}]")
        inner = typing.get_args(hint)[0]
        return type(hint())(_coerce(inner, v, f"{key}[{i}]") for i, v in enumerate(value))
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(key, value, f"must be a group of keys; choose one by {key.replace('.', '/')}={value}")
        return dict(value)
    if hint is Any:
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            raise ConfigError(key, f"{str(value)[:20]}…", "is too large") from None
        if math.isnan(number):
            raise ConfigError(key, value, "must be a number")
        return number
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        if not -_INT64 <= value < _INT64:
            raise ConfigError(key, f"{value:g}" if abs(value) < 1e300 else f"{str(value)[:20]}…", "is too large")
        return value
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise ConfigError(key, value, f"must be {getattr(hint, '__name__', hint)}")


@dataclass(frozen=True)
class RunFacts:
    """What the policy is told about the run it serves.

    Attributes:
        batch: groups per training step, B (``data.train_batch_size``, or as ``adaptive.batch_unit`` says).
        n: rollouts per group, N (``actor_rollout_ref.rollout.n``, or as ``adaptive.allocator.n`` and
            ``adaptive.batch_unit`` say).
        steps: training steps planned.
        prompts: distinct prompts in the training set, M.
        seed: ``adaptive.seed``.
        tolerance: ``adaptive.tolerance``.
        stale_discount: ``adaptive.stale_discount``.
    """

    batch: int
    n: int
    steps: int
    prompts: int
    seed: int = 0
    tolerance: float = 1e-6
    stale_discount: float = 1.0

    @classmethod
    def of(cls, config: AdaptiveConfig, *, batch: int, n: int, steps: int, prompts: int) -> RunFacts:
        """The facts of a run under ``config``; trainer, simulator, doctor and benchmarks all come through here.

        Args:
            config: the ``adaptive`` group; every fact that has a key there comes from it.
            batch, n, steps, prompts: as the attributes.
        """
        told = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)}
        told["seed"] = config.seed or 0
        return cls(batch=batch, n=n, steps=steps, prompts=prompts, **told)


@dataclass
class SuccessConfig:
    """How the difficulty signal becomes evidence of success in [0, 1].

    Attributes:
        mode: ``threshold``: 1 where the signal is at least ``threshold``, else 0. ``value``: the signal scaled from [``low``,
            ``high``] to [0, 1] and clipped, for continuous rewards; the Beta methods then count expected successes.
        threshold: with ``mode=threshold``, the least signal of a success; 0.5 serves 0/1 and ±1 rewards alike.
        low: with ``mode=value``, the signal that counts as 0.
        high: with ``mode=value``, the signal that counts as 1.
    """

    mode: typing.Literal["threshold", "value"] = "threshold"
    threshold: Finite = SUCCESS
    low: Finite = 0.0
    high: Finite = 1.0

    def validate(self, path: str) -> None:
        check(self.high > self.low, f"{path}.high", self.high, f"must be greater than {path}.low={self.low}")

    @property
    def least(self) -> float:
        """The least signal of a correct rollout."""
        return self.threshold if self.mode == "threshold" else self.low + SUCCESS * (self.high - self.low)

    def of(self, signal: np.ndarray) -> np.ndarray:
        """float64, as many: each signal as evidence of success in [0, 1]."""
        if self.mode == "threshold":
            return at_least(signal, self.threshold).astype(np.float64)
        return np.clip((signal - self.low) / (self.high - self.low), 0.0, 1.0)


@dataclass
class StoreConfig:
    """Where the statistics' journal goes; see :mod:`verl_adaptive.stats.journal`.

    Attributes:
        enabled: false: no journal is written; ``stats``, ``report`` and later warm starts then have checkpoints only.
        dir: a folder of several runs: the journal goes to ``<dir>/<trainer.project_name>/<trainer.experiment_name>``. null: to
            ``adaptive`` beside the checkpoints.
    """

    enabled: bool = True
    dir: str | None = None

    def validate(self, path: str) -> None:
        _check_written(self, path, "dir")
        check(self.dir is None or "://" not in self.dir, f"{path}.dir", self.dir, "is no folder; write the path of one")


@dataclass
class ResumeConfig:
    """What a resume may overlook.

    Attributes:
        allow: differences that a resume may ignore: ``dataset``, ``policy``, ``settings``, ``mode``, ``interrupted``.
    """

    allow: list[typing.Literal["dataset", "policy", "settings", "mode", "interrupted"]] = field(default_factory=list)


@dataclass
class AlarmConfig:
    """When a run says that something looks wrong; see docs/metrics.md#alarms. Alarms decide nothing.

    Attributes:
        enabled: false: no alarms, and no metrics by data source.
        rollouts: rollouts of a data source, in 32 groups or more, before it is judged, and from one judgement to the next.
        cut: share of a source's answers cut at data.max_response_length from which an alarm is raised.
        starved: an alarm is raised for a source that gets less than this share of the rollouts that its prompts would get in
            epoch order.
        jump: change of a source's pass rate from one judgement to the next from which an alarm is raised.
        sources: how many data sources have metrics of their own, the largest.
    """

    enabled: bool = True
    rollouts: Annotated[int, Range("[16, inf)")] = 256
    cut: Share = 0.25
    starved: Share = 0.1
    jump: Share = 0.25
    sources: Whole = 20


@dataclass
class AdaptiveConfig:
    """The ``adaptive`` group of the command line.

    Attributes:
        name: the preset's name, for people.
        sampler, allocator, filter, advantage: the four roles; each holds ``name`` and that role's own keys.
        seed: seeds every draw; null: ``data.seed`` where that is set, else 0.
        signal: what decides difficulty: ``reward`` or a field of the reward function's extra output, as ``acc``.
        success: how the signal counts as success.
        tolerance: a group has zero variance when max − min of its signal is at most this.
        id_key: dotted path of the user's own prompt id in a data row; null: hash of the content.
        batch_unit: what fixes a step's size. ``groups``: it trains data.train_batch_size groups, whatever their size.
            ``rollouts``: it trains data.train_batch_size × rollout.n rollouts, in groups of adaptive.allocator.n. Smaller
            groups are then more groups, of more prompts; the number of updates stays.
        refill: draw further prompts within a step until the batch is full.
        longest_first: send a step's prompts with long expected answers first, so that none of these is begun last (not with
            Pilot-Commit, whose commits want the short pilots first); changes no decision. ``sync`` trainer only.
        max_rounds: most batches of prompts drawn in one step; in asynchronous trainers, windows of prompts.
        max_rollouts_per_step: hard cap on rollouts generated in one step; null: none.
        total_rollouts: training ends after the step in which this many were generated; null: verl's own end.
        on_exhausted: what happens when data or budget end before the batch is full; with ``refill=false``, before all its
            prompts are sent.
        skip_zero_advantage: leave rows whose advantage is exactly zero out of training (same gradient, fewer tokens);
            null: wherever the losses allow it; true: beside a KL or entropy loss too, whose terms these rows then lose.
        stale_discount: weight of a group's evidence for each weight update between its generation and its review, in
            (0, 1]; asynchronous trainers and held groups only. Counts and streaks are facts and stay whole; what the
            Beta posteriors (MoPPS, CERO) and the memory (``solo``, ``spo``) learn is weighed.
        record: write every decision's inputs down for `verl-adaptive replay`; true: beside the checkpoints, or a folder. It
            is written as training goes on, each step whole: a disk that does not answer holds training up.
        poll_interval: seconds between polls of the rollout queue.
        stall_timeout: seconds without any rollout finishing before the run stops with an error; null: 1800, or 0.1 for each
            token of data.max_response_length if that is more.
        min_sessions: share of a group's rollouts that must come back with a finite reward; the survivors are the group.
            Below it the group counts as failed. At a half, the standard error of its mean is at most √2 times a whole
            group's; a prompt that loses more says more about the tool than about itself. Where the advantage compares a
            prompt's rollouts, a single survivor is no group: verl's GRPO would train on its bare reward.
        alarms: when the run says that something looks wrong.
        log_lists: log the lists of prompts to look at every so many steps, as wandb.Table or TensorBoard text, where
            verl's logger has one of these; 0: never.
        warm_start: a run, Parquet or JSONL file to learn from before the first step.
        warm_start_discount: weight of that evidence in (0, 1].
    """

    name: str = "custom"
    sampler: dict[str, Any] = field(default_factory=lambda: {"name": "epoch"})
    allocator: dict[str, Any] = field(default_factory=lambda: {"name": "fixed"})
    filter: dict[str, Any] = field(default_factory=lambda: {"name": "keep_all"})
    advantage: dict[str, Any] = field(default_factory=lambda: {"name": "verl"})
    seed: int | None = None
    signal: str = "reward"
    success: SuccessConfig = field(default_factory=SuccessConfig)
    tolerance: Annotated[float, Range("[0, 1000]", "in units of the signal")] = 1e-6
    id_key: str | None = None
    batch_unit: typing.Literal["groups", "rollouts"] = "groups"
    refill: bool = True
    longest_first: bool = True
    max_rounds: Annotated[int, Range("[1, 10000]")] = 32
    max_rollouts_per_step: Count | None = field(default=None, metadata=PER_STEP)
    total_rollouts: Count | None = None
    on_exhausted: typing.Literal["train_partial", "relax", "raise"] = "train_partial"
    skip_zero_advantage: bool | None = None
    stale_discount: PositiveShare = 0.9
    record: bool | str = False
    poll_interval: Annotated[float, Range("(0, 60]", "seconds that a step waits for what is back")] = 0.1
    stall_timeout: Annotated[float, Range("(0, 2592000]", "seconds, 30 days at most")] | None = None
    min_sessions: PositiveShare = 0.5
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    log_lists: Whole = 50
    warm_start: str | None = None
    warm_start_discount: PositiveShare = 0.5
    store: StoreConfig = field(default_factory=StoreConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)

    @classmethod
    def from_mapping(cls, data: Any) -> AdaptiveConfig:
        """Build and check.

        Raises:
            ConfigError: with the key, the value and what to write instead.
        """
        if not isinstance(data, Mapping):
            hint = (
                "must be a preset: write +adaptive=solo or another on the command line, or `- adaptive: solo` in the defaults "
                "list of your YAML; if you did, Hydra did not find it: reinstall verl-adaptive in this environment"
            )
            raise ConfigError("adaptive", data, hint)
        return build(cls, data, "adaptive")

    def validate(self, path: str) -> None:
        for role in ("sampler", "allocator", "filter", "advantage"):
            name = getattr(self, role).get("name")
            check(isinstance(name, str), f"{path}.{role}.name", name, "must name a part; see `verl-adaptive parts`")
        _check_written(self, path, "signal", "id_key", "record", "warm_start")
