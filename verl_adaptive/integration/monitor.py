"""The alarms and, if asked for, the lists of prompts, beside a run: what goes wrong here is said once and never stops training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import transfer_queue as tq

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine import Engine, StepResult
from verl_adaptive.integration.polling import PARTITION
from verl_adaptive.integration.rewards import info_of, sums
from verl_adaptive.integration.tables import WANDB, log_lists
from verl_adaptive.report.judge import Finding, Judge

logger = logging.getLogger(__name__)

#: Rows that are asked what the reward function gives beside the reward.
_LOOKED_AT = 64


class Monitor:
    """Looks on after each step.

    Args:
        config: the ``adaptive`` group.
        engine: of the run, as it begins (after a resume).
        longest: ``data.max_response_length``.
        tracking: gives verl's logger, for the lists.
    """

    def __init__(
        self,
        config: AdaptiveConfig,
        engine: Engine,
        *,
        longest: int,
        tracking: Callable[[], Any],
    ) -> None:
        self.config, self.engine, self.longest, self.tracking = config, engine, longest, tracking
        table = engine.table
        names = table.sources
        prompts = np.bincount(table.col("source")[engine.pool], minlength=len(names))
        repeated = 1 - len(engine.pool) / max(1, len(engine.row_of))
        self._judge = Judge(config.alarms, names, prompts, repeated=repeated, signal=config.signal)
        self._asked = 0
        self._broken: set[str] = set()

    def step(self, step: int, result: StepResult, keys: Sequence[str]) -> dict[str, float]:
        """The alarms' metrics of a step; their lines go to our log. ``keys`` are of rollouts in TransferQueue, without padding."""
        out: dict[str, float] = {}
        if self.config.alarms.enabled:
            self._guarded("alarms", lambda: out.update(self._alarm(step, result, keys)))
        every = self.config.log_lists
        if every and step % every == 0:
            self._guarded("lists", lambda: log_lists(self.tracking(), self.engine.table, step))
        return out

    def validated(self, step: int, metrics: Mapping[str, Any], prompts: Mapping[str, int]) -> None:
        """Take what verl's validation measured after a step."""
        if self.config.alarms.enabled:
            self._guarded("alarms", lambda: self._say(self._judge.validated(step, metrics, prompts)))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {"alarms": self._judge.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of :meth:`state_dict`."""
        self._guarded("alarms", lambda: self._judge.load_state_dict(state["alarms"]))

    def _guarded(self, what: str, act: Callable[[], Any]) -> None:
        """Act, unless it failed before: a broken lamp must not stop the engine."""
        if what in self._broken:
            return
        try:
            act()
        except Exception as error:
            self._broken.add(what)
            logger.warning("%s are off from now on, training goes on: %s: %s", what, type(error).__name__, error)

    def _alarm(self, step: int, result: StepResult, keys: Sequence[str]) -> dict[str, float]:
        if self._asked < 3 and not self._judge.fields and self.config.signal == "reward" and self._judge.graded:
            self._asked += 1
            self._judge.fields = _fields(keys[:_LOOKED_AT])
        groups = result.groups
        groups = groups.select(~groups.failed & (groups.n > 0))
        cut = groups.sum(groups.cut(self.longest))
        source = self.engine.table.col("source")[groups.row]
        jump = self.engine.policy.advantage.metrics().get("jump", 0.0)
        counts = groups.n, groups.successes, cut, groups.sum(groups.reward), groups.sum(groups.reward**2)
        self._say(self._judge.step(step, source, *counts, jump=jump, rewards=groups.reward))
        return self._judge.metrics()

    def _say(self, found: Iterable[Finding]) -> None:
        for alarm in found:
            logger.warning("alarm: %s (docs/metrics.md#alarms)", alarm)
            self._guarded("wandb's alerts", partial(self._alert, str(alarm)))

    def _alert(self, text: str) -> None:
        for name, backend in getattr(self.tracking(), "logger", {}).items():
            if name in WANDB:
                backend.alert(title="verl-adaptive", text=text, level="WARN")


def _fields(keys: Sequence[str]) -> frozenset[str]:
    """``acc``, where the reward function gives one that is another number than the reward, by these rows.

    verl's reward managers call a bare number ``acc``, which is the reward itself, and no other field.
    """
    fields = ["extra_fields", "rm_scores"]
    data = tq.kv_batch_get(keys=list(keys), partition_id=PARTITION, select_fields=fields) if keys else {}
    if not set(data.keys()).issuperset(fields):
        return frozenset()
    given = (info_of(extra).get("acc") for extra in data["extra_fields"])
    differ = any(_differs(acc, reward) for acc, reward in zip(given, sums(data["rm_scores"]), strict=True))
    return frozenset({"acc"} if differ else ())


def _differs(value: Any, reward: float) -> bool:
    """A number that is not the reward, to the precision in which TransferQueue has that."""
    number = isinstance(value, float | int | np.number | np.bool_)
    return number and not np.isclose(float(value), reward, rtol=1e-5, equal_nan=True)
