"""verl's filter in the simulator against verl's own loop."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.simulate.verl_filter import POLL, VerlFilter
from verl_adaptive.simulate.worlds import WorldPrompts, number_keys
from verl_adaptive.stats.table import StatsTable

BATCH, N = 6, 4


def seconds_of(submission: int, seed: int) -> float:
    """When a group comes back after it was sent; never exactly at a look."""
    return float(np.random.default_rng([seed, submission]).exponential(7.0)) + 0.013


def flat(submission: int, seed: int, share: float) -> bool:
    return bool(np.random.default_rng([seed, submission, 1]).random() < share)


def verls(seed: int, share: float) -> tuple[list[tuple[float, int]], float]:
    """Prompts sent by time, and the end: verl's ``ReplayBuffer.sample`` itself, in time that only its poll lets pass.

    What stands in for TransferQueue and the agent loops is the list of groups in flight; every decision is verl's.
    """
    pytest.importorskip("verl")
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    class Timed(ReplayBuffer):
        now, sent, ready = 0.0, 0, ()

        def submit(self, count: int) -> None:
            log.append((self.now, count))
            for submission in range(self.sent, self.sent + count):
                flight[f"p{submission}"] = self.now + seconds_of(submission, seed)
            self.sent += count

        def _sync_metadata_from_transfer_queue(self) -> None:
            for uid in [u for u, end in flight.items() if end <= self.now]:
                del flight[uid]
                finished.add(uid)
            self.pending_keys["train"], self.running_keys["train"] = set(), set(flight)
            self.finished_keys["train"], self.failure_keys["train"] = set(finished), set()

        def _dapo_filtered_keys(self, partition_id):
            found = {u for u in self.finished_keys[partition_id] if flat(int(u[1:]), seed, share)}
            return found, Counter()

        def _clear_groups(self, partition_id, uids) -> None:
            finished.difference_update(uids)
            self.finished_keys[partition_id] -= uids

        def _wait_for_next_poll(self, partition_id, last):
            self.now += self.poll_interval
            return last

        def _materialize_batch(self, partition_id, selected, snapshot):
            return selected

    log: list[tuple[float, int]] = []
    flight: dict[str, float] = {}
    finished: set[str] = set()
    buffer = Timed(
        "sync",
        {},
        None,
        "drop",
        {},
        refill_fn=lambda count: Timed.submit(buffer, count),
        filter_groups_metric="reward",
        train_batch_size=BATCH,
        gen_batch_size=1,
        max_inflight_gen_batches=1,
    )
    assert buffer.poll_interval == POLL
    buffer.submit(BATCH)
    # verl looks for a trajectory of what it selected; any key will do
    buffer.partitions["train"] = {f"p{t}_0_0": {} for t in range(10_000)}
    selected, _ = buffer.sample(1, "train", BATCH)
    assert len(selected) == BATCH and not any(flat(int(u[1:]), seed, share) for u in selected)
    return log, buffer.now


def results(submissions: list[int], seed: int, share: float) -> Groups:
    rewards = [np.zeros(N) if flat(t, seed, share) else np.array([1.0] + [0.0] * (N - 1)) for t in submissions]
    return Groups.from_lists(submissions, rewards, submission=submissions, index=submissions)


def peer_of(size: int, batch: int, n: int) -> VerlFilter:
    table, config = StatsTable(), AdaptiveConfig()
    table.rows_for(number_keys(size))
    facts = RunFacts(batch, n, 1, size, 0)
    return VerlFilter(build_policy(config), table, config, facts, np.arange(size), WorldPrompts(size))


@given(seed=st.integers(0, 10**6), share=st.floats(0.0, 0.9))
@settings(max_examples=20)
def test_prompts_are_sent_as_verls_own_loop_sends_them(seed, share) -> None:
    """Any times of return, any share of flat groups: the same numbers at the same looks, the same end."""
    expected, end = verls(seed, share)
    peer = peer_of(5_000, BATCH, N)
    log: list[tuple[float, int]] = []
    flight: dict[int, float] = {}
    now, requests = 0.0, peer.begin(1)
    while True:
        if requests is not None:
            log.append((now, len(requests)))
            flight |= {int(t): now + seconds_of(int(t), seed) for t in requests.submission}
        if not flight:
            break
        now = max(now, math.ceil(min(flight.values()) / POLL) * POLL)
        back = sorted(t for t, when in flight.items() if when <= now)
        flight = {t: when for t, when in flight.items() if t not in back}
        requests = peer.receive(results(back, seed, share))
    assert (log, now) == (expected, end)
    result = peer.finish()
    assert result.trained.sum() == BATCH and result.ledger.rollouts.balanced()


def test_it_refuses_to_be_cut_short() -> None:
    peer = peer_of(9, 2, 2)
    peer.begin(1)
    with pytest.raises(AdaptiveError, match="2 prompts are in flight"):
        peer.finish()
    with pytest.raises(AdaptiveError, match="do not match"):
        peer.receive(results([7], 0, 0.0))
