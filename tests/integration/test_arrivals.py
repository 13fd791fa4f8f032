"""A sync step whose results trickle in: same batch whatever the order, the rest aborted.

The rollout workers are a stand-in: a thread that answers a few prompts at a time, in an order of its own; an answer is
decided by the prompt, the step and whether it is a top-up, as a model's would be by its seed.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import transfer_queue as tq

from tests.integration.common import empty, left
from tests.integration.test_async_client import SlowWorkers, clean  # noqa: F401
from tests.integration.test_sync_client import PROMPTS, client_of
from tests.world import POLICIES
from verl_adaptive.integration.abort import Aborted

SYNC = {
    **{preset: POLICIES[preset] for preset in POLICIES if preset != "cero"},
    "dapo-relax": {"filter": "informative", "on_exhausted": "relax"},
    "pipelined": {"allocator": {"name": "pilot_commit", "n_pilot": 4, "form": "pipelined"}, "filter": "band"},
}


class Model(SlowWorkers):
    """Prompt ``i`` is solved with chance ``i / PROMPTS``; ``lose`` is the chance that a top-up loses a session."""

    def __init__(self, order: int, lose: float = 0.0) -> None:
        self.lose, self.step = lose, 1
        self.latest: dict[str, int] = {}  # uid → its latest top-up ...
        self.short: dict[str, int] = {}  # ... and the one that lost a session
        super().__init__(order)

    def _prompt(self, uid: str, n: int, number: int, place: int) -> None:
        first, _, stage = uid.partition(".t")
        self.latest[first] = int(stage or 0)
        dice = random.Random(f"{self.step}/{number}/{stage}")
        draws = [(dice.random() < number / PROMPTS, dice.randint(1, 5), dice.random() < self.lose) for _ in range(n)]
        if stage and any(lost for *_, lost in draws):
            self.short[first] = int(stage)
        kept = {s: (float(solved), [length]) for s, (solved, length, lost) in enumerate(draws) if not (lost and stage)}
        self._write(uid, number, kept)
        self._end(uid, failed=False)

    def __call__(self, uids) -> Aborted:
        with self.lock:
            self.jobs = [job for job in self.jobs if job[0] not in set(uids)]
            return super().__call__(uids)


def steps(policy: dict, order: int, count: int = 3, lose: float = 0.0):
    """Results of some steps and their rows' names, and who answered."""
    workers = Model(order, lose)
    client = client_of(workers, poll_interval=0.001, **policy)
    out = []
    for step in range(1, count + 1):
        workers.step = step
        client.start()
        batch = client.complete()
        result = client.finish()
        assert result.ledger.rollouts.balanced(out[-1][0].ledger.rollouts.held if out else 0)
        held = {key for parts in client.queue.state_dict().values() for part in parts for s in part[3] for key in s}
        uids = {part[0] for parts in client.queue.state_dict().values() for part in parts}
        assert left() == set(batch.keys) | held | uids  # nothing of what was dropped or aborted
        names = [(k.partition(".")[2] or "." + k.split("_", 1)[1]) for k in batch.keys]
        out.append((result, names))
        tq.kv_clear(keys=batch.keys, partition_id="train")
    workers.stop()
    return out, workers


@pytest.mark.parametrize("preset", SYNC)
def test_the_batch_is_the_same_whatever_the_order_of_arrival(clean, preset):  # noqa: F811
    first, _ = steps(SYNC[preset], order=1)
    empty()
    second, _ = steps(SYNC[preset], order=2)
    for (one, names), (other, names_too) in zip(first, second, strict=True):
        kept, kept_too = one.groups.select(one.trained), other.groups.select(other.trained)
        for name in ("row", "reward", "stage", "tokens", "offsets"):
            assert np.array_equal(getattr(kept, name), getattr(kept_too, name)), name
        assert names == names_too and np.array_equal(one.trains, other.trains)


@pytest.mark.parametrize("preset", ["pilot_commit", "aero"])
def test_a_topup_that_loses_rollouts_closes_its_group_with_what_it_has(clean, preset):  # noqa: F811
    out, workers = steps(SYNC[preset], order=1, lose=0.3)
    assert not any(result.groups.failed.any() for result, _ in out)
    assert sum(int(result.groups.lost.sum()) for result, _ in out) > 0
    assert workers.short
    for uid, stage in workers.short.items():
        assert workers.latest[uid] == stage  # none was asked for after one that came back short
