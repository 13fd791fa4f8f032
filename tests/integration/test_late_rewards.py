"""A colocated reward model judges when all rollouts of a step are there: the step waits for all, and then decides as ever."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transfer_queue as tq
from verl.utils import tensordict_utils as tu

from tests.integration.test_sync_client import Workers, batch_of, clear, client_of
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration.sync_client import SyncRolloutClient


class Unjudged(Workers):
    """Rollouts without rewards; :meth:`judge` writes them as verl's ``_compute_reward_colocate`` does."""

    def _prompt(self, uid: str, n: int, number: int, place: int) -> None:
        put = tq.kv_batch_put

        def bare(*, fields=None, **what):
            if fields is not None:
                fields = fields.exclude("rm_scores", "extra_fields")
            put(fields=fields, **what)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tq, "kv_batch_put", bare)
            super()._prompt(uid, n, number, place)

    def judge(self, keys: list[str], tags: list[dict], reward: float | None = None) -> None:
        scores = []
        for key, tag in zip(keys, tags, strict=True):
            scores.append(torch.zeros(tag["response_len"]))
            scores[-1][-1] = self.written[key]["reward"] if reward is None else reward
        fields = {"rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged)}
        if self.signal is not None:
            fields[self.signal] = np.array([self.written[key]["reward"] for key in keys])
        tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.get_tensordict(fields))


def waited(workers: Unjudged, **options) -> tuple[SyncRolloutClient, list[str], list[dict]]:
    """A client of these workers, and the rows of its first step, of which none is judged yet."""
    client = client_of(workers, late=True, refill=False, **options)
    client.start()
    return client, *client.wait_for_all()


@pytest.mark.parametrize("signal", [None, "acc"])
@pytest.mark.parametrize("filter", ["keep_all", "informative"])
def test_decides_as_if_rewards_had_come_with_the_rollouts(queue, filter, signal):
    chosen = {"filter": {"name": filter}, **({"signal": signal} if signal else {})}
    workers = Unjudged(order=1, fail=0.3, lost=0.3, signal=signal)
    client, keys, tags = waited(workers, **chosen)
    assert sorted(keys) == sorted(workers.written)
    workers.judge(keys, tags)
    batch = client.complete()
    clear(batch)
    other = Workers(order=2, fail=0.3, lost=0.3, signal=signal)
    twin = batch_of(client_of(other, refill=False, **chosen))
    clear(twin)
    assert [k.split("_", 1)[1] for k in batch.keys] == [k.split("_", 1)[1] for k in twin.keys]
    assert batch.zero_row_tokens.tolist() == twin.zero_row_tokens.tolist()
    for name in ("submission", "reward", "signal", "tokens", "failed"):
        assert np.array_equal(getattr(batch.result.groups, name), getattr(twin.result.groups, name))


def test_curves_have_the_score_of_each_output(queue):
    """The last one's is the reward; verl's ``critic/score`` is of all rows."""
    workers = Unjudged()
    client, keys, tags = waited(workers)
    for key in keys:
        if int(key.rsplit("_", 1)[1]):
            workers.written[key]["reward"] += 10.0  # another than the first output's
    workers.judge(keys, tags)
    batch = client.complete()
    expected = sorted(row["reward"] for row in workers.written.values())
    assert sorted(batch.rows.score.tolist()) == expected and 0 < sum(score > 5 for score in expected) < len(expected)
    clear(batch)


def test_two_steps_and_nothing_is_left_over(queue):
    workers = Unjudged()
    client, *rows = waited(workers)
    workers.judge(*rows)
    clear(client.complete())
    client.start()
    workers.judge(*client.wait_for_all())
    clear(client.complete())
    assert client.queue.under_way == 0 and not client.queue.submissions


def test_no_rollout_at_all_is_an_error(queue):
    with pytest.raises(AdaptiveError, match="none of 4 prompts left a rollout"):
        waited(Unjudged(fail=1.0, lost=1.0))


def test_rewards_that_are_not_finite_end_the_run(queue):
    workers = Unjudged()
    client, keys, tags = waited(workers)
    workers.judge(keys, tags, math.nan)
    with pytest.raises(AdaptiveError, match=r"0 of 4 groups .*\(4 failed\): adaptive\.refill=false asks for no others"):
        client.complete()


def test_a_signal_that_the_model_does_not_give(queue):
    workers = Unjudged()
    client, *rows = waited(workers, signal="acc")
    workers.judge(*rows)
    with pytest.raises(ConfigError, match=r"adaptive\.signal='acc': the reward function gives no such field"):
        client.complete()
