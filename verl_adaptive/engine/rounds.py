"""One generation round after another (``adaptive.rounds=true``): reviews wait for the whole round.

A round is a set of requests generated together under one set of weights: first rollouts of new prompts and top-ups of
open groups. Reviews happen when the round is back and run in submission order, and a refill is drawn from what the
rounds before it have shown, as the papers' own loops do. Each round waits for its slowest rollout;
:mod:`verl_adaptive.engine.ordered` does not.
"""

from __future__ import annotations

import numpy as np

from verl_adaptive.engine import answers
from verl_adaptive.engine.base import Engine
from verl_adaptive.engine.desk import fit
from verl_adaptive.engine.steps import Closed, Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.roles import CLOSE, HOLD

__all__ = ["RoundEngine"]


class RoundEngine(Engine):
    """Runs a policy in rounds; arguments as :class:`~verl_adaptive.engine.base.Engine`."""

    kind = "rounds"

    def begin(self, step: int) -> Requests | None:
        self._open_step(step)
        self._back: list[Groups] = []  # results of the round, which is not whole yet
        self._tell("begun", step)
        requests = self._next(Requests.none())
        self._tell("asked", requests)
        return requests

    def receive(self, results: Groups) -> Requests | None:
        """Take results; the next round's requests once this one is whole, or None."""
        back = np.isin(self.flight.ticket, results.ticket)
        if not len(results) or len(np.unique(results.ticket)) != len(results) or back.sum() != len(results):
            raise AdaptiveError("results do not match the requests of this round")
        self._tell("received", results)
        self._back.append(results)
        self.flight = self.flight.select(~back)
        requests = None
        if not len(self.flight):
            groups = self.desk.join(Groups.concat(self._back))
            self._back = []
            requests = self._review_round(groups)
        self._tell("asked", requests)
        return requests

    @property
    def settled(self) -> bool:
        return not len(self.flight)

    def finish(self) -> StepResult:
        result = self.desk.batch(Closed.concat(self.desk.closed).sorted(), self.progress.round)
        self.desk.account(result)
        self.policy.end_step(self.progress)
        self._tell("finished", result)
        return result

    # -- rounds ---------------------------------------------------------------------------------------------

    def _review_round(self, groups: Groups) -> Requests | None:
        progress, desk = self.progress, self.desk
        progress.round += 1
        last = progress.round >= self.config.max_rounds
        if last:
            desk.why = f"adaptive.max_rounds={self.config.max_rounds} was reached"
        self._close(Closed.of(groups.select(groups.failed), "failed"))
        alive = groups.select(~groups.failed)
        more = np.zeros(len(alive), dtype=np.int64)
        if not last:
            more = answers.more(self.policy.allocator, "review", alive, progress)
        more = fit(np.where(np.isin(alive.ticket, desk.cut), CLOSE, more), progress.room)
        desk.hold(alive.select(more == HOLD))
        self._review(alive.select(more == CLOSE))
        again = alive.select(more > 0)
        desk.put(again)
        progress.open = len(again)
        return self._next(Requests.topups(again, more[more > 0]))

    def _next(self, topups: Requests) -> Requests | None:
        progress, policy = self.progress, self.policy
        progress.planned += topups.rollouts
        parts = [topups]
        refill = self.config.refill and (progress.round == 0 or self.desk.wants(progress.kept))
        may_sample = progress.round < self.config.max_rounds and (progress.round == 0 or refill)
        if may_sample and len(self.held):
            recalled, _ = self.desk.recall()
            progress.planned += recalled.rollouts
            parts.append(recalled)
        if may_sample and progress.need > progress.open:
            wanted = answers.amount(policy.sampler, "round_size", progress)
            wanted = answers.amount(policy.allocator, "prompts", wanted, progress)
            if wanted > 0:
                busy = np.concatenate([self.held.row, self.desk.open.row])
                ungated = self.config.on_exhausted != "raise" and not self.desk.closed
                once = not policy.sampler.whole_batches
                parts.append(self._new(wanted, busy, ungated=ungated, once=once))
        requests = Requests.join(parts)
        self.desk.ledger.rollouts.planned += requests.rollouts
        self.flight = requests.sorted()
        return requests if len(requests) else None

    def _review(self, groups: Groups) -> None:
        """Close groups whose rollouts are complete: keep or drop, then observe them."""
        progress = self.progress
        progress.last_finished = len(groups)
        progress.last_degenerate = int(groups.degenerate(self.facts.tolerance).sum())
        if not len(groups):
            return
        closed = self.desk.verdict(groups)
        progress.kept += int(closed.kept.sum())
        self._close(closed)
        self.policy.observe(groups, progress)

    def _close(self, closed: Closed) -> None:
        if len(closed):
            self.desk.closed.append(closed)
            self.desk.learn(closed.groups)
