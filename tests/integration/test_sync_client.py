"""The sync trainer's rollout client on a real TransferQueue: several outputs a session, failed ones, top-ups, any order.

Only the rollout workers are a stand-in: it writes what verl's ``AgentLoopWorkerTQ`` writes, in a shuffled order.
"""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transfer_queue as tq
from torch.utils.data import Dataset, SequentialSampler
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.utils import tensordict_utils as tu

from tests.integration.common import composed, left, listed
from tests.integration.test_rows import result
from tests.world import World, config_of, engine_of
from verl_adaptive.advantages.beta import BetaPosterior
from verl_adaptive.advantages.verl import Verl
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine import AsyncFacts, Requests
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration import monitor, rewards
from verl_adaptive.integration.abort import Aborted
from verl_adaptive.integration.advantage import register_estimator, trajectory_rows
from verl_adaptive.integration.async_client import AsyncRolloutClient
from verl_adaptive.integration.dataloader import DataloaderPrompts
from verl_adaptive.integration.layout import Layout
from verl_adaptive.integration.minibatches import StepState
from verl_adaptive.integration.polling import stall_seconds
from verl_adaptive.integration.queue import Queue
from verl_adaptive.integration.rewards import read_rewards
from verl_adaptive.integration.rollout_client import RolloutHandles, deal
from verl_adaptive.integration.sync_client import SyncRolloutClient
from verl_adaptive.integration.timings import Timings

BATCH, N, PROMPTS = 4, 8, 40


class Rows(Dataset):
    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, i: int) -> dict:
        return {
            "raw_prompt": [{"role": "user", "content": f"question {i}"}],
            "data_source": "toy",
            "index": 0,
            "number": i,
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }


class Workers:
    """Writes rollouts: prompt ``i`` is solved with chance ``i / PROMPTS``, by a hash of prompt, visit and session.

    Args:
        order: seeds the order in which they come back.
        fail: chance that a prompt loses sessions ...
        lost: ... and the share of them that it loses.
        signal: name of a further field of the reward.
        tool: whether an answer begins with a token that is not the model's.
        most: outputs of a session at most.
    """

    def __init__(
        self,
        order: int = 0,
        fail: float = 0.0,
        signal: str | None = None,
        lost: float = 0.6,
        tool: bool = True,
        most: int = 3,
    ) -> None:
        self.shuffle, self.fail, self.signal, self.lost = random.Random(order), fail, signal, lost
        self.tool, self.most = tool, most
        self.calls = 0
        self.written: dict[str, dict] = {}

    def __call__(self, uids) -> Aborted:
        """As :class:`Abort`: these uids' rows go, and what they held is counted; nothing is generated here."""
        mine = {k: t for k, t in listed().items() if k.split("_")[0] in set(uids)}
        tq.kv_clear(keys=list(mine), partition_id="train")
        tokens = [t["response_len"] for t in mine.values() if "response_len" in t]
        return Aborted(len(tokens), sum(tokens))

    def submit(self, batch) -> int:
        self.calls += 1
        jobs = []
        for i in range(len(batch)):
            uid, n, number = batch["uid"][i], int(batch["__rollout_n__"][i]), int(batch["number"][i])
            tq.kv_batch_put(
                keys=[uid], partition_id="train", tags=[{"is_prompt": True, "status": "pending", "global_steps": 1}]
            )
            jobs.append((uid, n, number, i))
        self.shuffle.shuffle(jobs)
        for uid, n, number, place in jobs:
            self._prompt(uid, n, number, place)
        return len(batch)

    def _prompt(self, uid: str, n: int, number: int, place: int) -> None:
        chance = random.Random(f"{self.calls}/{place}/{number}")
        sessions = list(range(n))
        failed = chance.random() < self.fail
        draws = [chance.random() < number / PROMPTS for _ in sessions]
        outputs = [chance.randint(1, self.most) for _ in sessions]
        self.shuffle.shuffle(sessions)
        for s in sessions[: n - math.ceil(self.lost * n)] if failed else sessions:
            self._write(uid, number, {s: (float(draws[s]), [2 + o for o in range(outputs[s])])})
        self._end(uid, failed)

    def _write(self, uid: str, number: int, sessions: dict[int, tuple[float, list[int]]]) -> None:
        """Rows of some sessions: each one's reward, and the lengths of its outputs."""
        keys, rows, tags = [], [], []
        for s, (reward, lengths) in sessions.items():
            for o, length in enumerate(lengths):
                mask = torch.ones(length, dtype=torch.int64)
                mask[0] = 0 if self.tool else 1
                score = torch.zeros(length)
                score[-1] = reward
                info = {"reward_extra_info": {} if self.signal is None else {self.signal: reward}}
                keys.append(f"{uid}_{s}_{o}")
                rows.append(
                    {"uid": uid, "rm_scores": score, "response_mask": mask, "loss_mask": mask, "extra_fields": info}
                )
                tags.append({"response_len": length, "seq_len": length + 3, "min_global_steps": 0})
                self.written[keys[-1]] = {"reward": reward, "mask": int(mask.sum()), "number": number}
        if keys:
            tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.list_of_dict_to_tensordict(rows), tags=tags)

    @staticmethod
    def _end(uid: str, failed: bool) -> None:
        tq.kv_batch_put(keys=[uid], partition_id="train", tags=[{"status": "failure" if failed else "finished"}])


def engine_on_rows(config: AdaptiveConfig, *, batch: int = BATCH, n: int = N, **more) -> tuple:
    """An engine on :class:`Rows` in their order, and what reads them."""
    stream = DataloaderPrompts(Rows(), SequentialSampler(Rows()), chunk=1, workers=0)
    return engine_of(config, SimpleNamespace(p=np.zeros(PROMPTS), source=stream), batch=batch, n=n, **more), stream


def client_of(
    workers: Workers, n: int = N, batch: int = BATCH, *, single_turn: bool = False, late: bool = False, **adaptive
) -> SyncRolloutClient:
    config = config_of(**{"poll_interval": 0.01, "stall_timeout": 3.0, **adaptive})
    engine, stream = engine_on_rows(config, batch=batch, n=n, steps=10)
    handles = RolloutHandles(
        workers.submit, lambda: 1, stall=stall_seconds(config, 64), single_turn=single_turn, late=late
    )
    return SyncRolloutClient(engine, stream, handles, workers)  # type: ignore[arg-type]


def batch_of(client: SyncRolloutClient):
    """The batch of a step."""
    client.start()
    return client.complete()


def clear(batch) -> None:
    tq.kv_clear(keys=batch.keys, partition_id="train")
    assert left() == set()


PILOTS = {"allocator": {"name": "pilot_commit", "n_pilot": 4, "form": "on_policy"}, "filter": "band"}


@pytest.mark.parametrize("order", [0, 1, 2])
def test_topups_join_their_group_whatever_the_order(queue, order):
    workers = Workers(order)
    client = client_of(workers, **PILOTS)
    client.start()
    assert client.queue.under_way == 12 * 4
    batch = client.complete()
    assert client.queue.under_way == 0
    result = batch.result
    assert result.trained.sum() == BATCH and set(batch.trained.n) == {N}
    # every output of every session of the trained groups, nothing else is left in the queue
    assert left() == set(batch.keys)
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["uid"])
    field = [getattr(u, "data", u) for u in data["uid"]]
    first = {key.split("_")[0].split(".")[0] for key in batch.keys}
    assert set(field) == first == set(batch.position)  # top-up rows carry the group's uid
    tags = listed()
    assert [tags[key] for key in batch.keys] == batch.tags  # ... and the tags that they had
    assert all(tag["response_len"] for tag in batch.tags)
    for uid, place in batch.position.items():
        mine = [k for k, u in zip(batch.keys, field, strict=True) if u == uid]
        rows, _ = trajectory_rows(mine)
        assert len(rows) == N
        rewards = sorted(workers.written[mine[r]]["reward"] for r in rows)
        group = batch.trained.select(np.array([place]))
        assert rewards == sorted(group.reward.tolist())
    assert [workers.written[k]["number"] for k in batch.keys] == sorted(
        workers.written[k]["number"] for k in batch.keys
    )
    clear(batch)


def zero_rows_of(batch) -> list[tuple[str, int]]:
    """Rows left out of training, and their loss tokens."""
    rows = zip(batch.sequences, batch.zero_row_tokens, strict=True)
    return [(key, tokens) for (key, trains), tokens in rows if not trains]


def test_rows_left_out_count_in_denominators_and_curves(queue, caplog):
    workers = Workers()
    client = client_of(workers)  # epoch, keep_all: everything is in the batch, zero advantage rows are left out
    batch = batch_of(client)
    zero_rows = zero_rows_of(batch)
    assert zero_rows and all(tokens == workers.written[key]["mask"] for key, tokens in zero_rows)
    assert "loss masks" not in caplog.text  # nobody took them for those of verl's loop of one turn
    assert len(batch.sequences) == len(workers.written)
    assert batch.zero_row_tokens[[trains for _, trains in batch.sequences]].sum() == 0
    # for verl's curves: every row of the groups, whether it trains or not
    rows, groups = batch.rows, batch.result.groups
    assert len(rows.score) == len(workers.written) and rows.left_out == len(workers.written) - len(batch.keys) > 0
    assert rows.score.sum() == sum(row["reward"] for row in workers.written.values())
    assert set(rows.prompt) == {3} and rows.response.sum() == groups.tokens.sum()
    # a session of several outputs is as long as all of them, and cut by the longest
    outputs = groups.tokens - groups.shorter - 1  # the o-th has 2 + o tokens
    assert set(outputs) == {1, 2, 3} and (groups.tokens == outputs * (outputs + 3) // 2).all()
    clear(batch)


def masks_read(monkeypatch) -> list[str]:
    """Rows whose loss mask is read from now on."""
    seen: list[str] = []

    def counted(keys, fields, meta=None):
        if "response_mask" in fields:
            seen.extend(keys)
        return rewards.read(keys, fields, meta)

    monkeypatch.setattr("verl_adaptive.integration.queue.read", counted)
    return seen


@pytest.mark.parametrize("tool", [False, True])
def test_masks_of_one_turn_are_as_long_as_the_answers_or_all_are_read(queue, monkeypatch, caplog, tool):
    monkeypatch.setattr("verl_adaptive.integration.queue._PROBES", 4)
    workers = Workers(tool=tool, most=1)
    client, read = client_of(workers, single_turn=True), masks_read(monkeypatch)
    batch = batch_of(client)
    zero_rows = zero_rows_of(batch)
    assert len(zero_rows) > 8 and all(tokens == workers.written[key]["mask"] for key, tokens in zero_rows)
    absent = {key for key, _ in zero_rows}
    assert absent <= set(read) if tool else 0 < len(read) <= 4 and set(read) < absent
    assert ("every mask is read" in caplog.text) == tool
    clear(batch)


def test_masks_of_prompts_with_an_agent_loop_of_their_own_are_read(queue, monkeypatch):
    real = Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda self, i: {**real(self, i), "agent_name": "tools"})
    workers = Workers(tool=False)
    client, read = client_of(workers, single_turn=True), masks_read(monkeypatch)
    batch = batch_of(client)
    assert {key for key, trains in batch.sequences if not trains} == set(read)
    clear(batch)


def test_a_number_of_rollouts_that_items_bring_is_refused(queue, monkeypatch):
    """No column of the data set: a class of one's own adds it, and it would be overwritten."""
    real = Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda self, i: {**real(self, i), "__rollout_n__": 4})
    workers = Workers()
    with pytest.raises(AdaptiveError, match=r"column __rollout_n__.*leave \+adaptive out"):
        client_of(workers).start()
    assert workers.calls == 0 and left() == set()


class Slowly(Workers):
    """Prompts come back one at a time, one before every look."""

    def __init__(self, **how) -> None:
        super().__init__(**how)
        self.ahead: list[tuple] = []

    def _prompt(self, *job) -> None:
        self.ahead.append(job)

    def one(self) -> None:
        if self.ahead:
            super()._prompt(*self.ahead.pop(0))


def trained_by(workers: Slowly, monkeypatch, *, single_turn: bool) -> tuple[object, int]:
    """A step's batch, and how often the queue was listed for it while prompts came back one at a time."""
    client, lists = client_of(workers, single_turn=single_turn, min_sessions=0.25), []
    monkeypatch.setattr("verl_adaptive.integration.queue._LIST_SHARE", 1e-9)  # no listing but for rows
    real, look = client.queue._list, client.queue.look
    monkeypatch.setattr(client.queue, "_list", lambda: lists.append(1) or real())
    monkeypatch.setattr(client.queue, "look", lambda uids: workers.one() or look(uids))
    batch = batch_of(client)
    assert client.queue.under_way == 0
    return batch, len(lists)


@pytest.mark.parametrize(
    ("how", "few"),
    [({"most": 1}, True), ({"most": 1, "fail": 0.5}, False), ({"most": 3}, False)],
    ids=["one row a session", "some fail", "more rows than one turn has"],
)
def test_rows_of_one_turn_are_known_without_listing_the_queue(queue, monkeypatch, how, few):
    twin, often = trained_by(Slowly(tool=False, **how), monkeypatch, single_turn=False)
    clear(twin)
    batch, lists = trained_by(Slowly(tool=False, **how), monkeypatch, single_turn=True)
    assert [k.split("_", 1)[1] for k in batch.keys] == [k.split("_", 1)[1] for k in twin.keys]
    assert np.array_equal(batch.result.groups.reward, twin.result.groups.reward)
    assert np.array_equal(batch.result.groups.lost, twin.result.groups.lost)
    assert np.array_equal(batch.zero_row_tokens, twin.zero_row_tokens)
    assert batch.tags == twin.tags
    assert lists <= 2 if few else lists <= often
    clear(batch)


class Solved(Workers):
    """Every prompt is solved in every session."""

    def _prompt(self, uid: str, n: int, number: int, place: int) -> None:
        super()._prompt(uid, n, PROMPTS, place)


def trainer_of(client: SyncRolloutClient, *words: str, forgo: bool = False):
    """verl's trainer and ours, for its step alone: without workers."""
    made = object.__new__(get_trainer_cls("sync").adaptive())
    made.config = composed(*words)
    made.engine, made.rollout_client, made.plan = client.engine, client, SimpleNamespace(forgo=forgo)
    made.processor, made.use_critic, made.use_reference_policy = None, False, False
    made.tokenizer = SimpleNamespace(eos_token_id=7, pad_token_id=0, decode=lambda ids, **_: str(ids.tolist()))
    made.global_steps, made.local_trigger_step = 1, 0
    return made


@pytest.mark.parametrize("forgo", [False, True], ids=["a pure policy gradient", "with a KL loss given up for them"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "adaptive_beta"])
def test_a_step_of_equal_rewards_trains_on_nothing(queue, estimator, forgo):
    """verl needs a row to have a step; its own estimators would take that row's reward for its advantage."""
    register_estimator(BetaPosterior)
    off = {"advantage": {"name": "beta", "variant": "off"}} if estimator == "adaptive_beta" else {}
    client = client_of(Solved(), **off)
    batch = batch_of(client)
    assert batch.result.trains.sum() == 1 and batch.result.zero_row.sum() == BATCH * N - 1
    trainer = trainer_of(client, f"algorithm.adv_estimator={estimator}", forgo=forgo)
    trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=batch.keys, tags=batch.tags), {})
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id="train", select_fields=["advantages", "returns", "response_mask"]
    )
    for row in data:
        assert not row["advantages"].any() and not row["returns"].any()
        assert bool(row["response_mask"].any()) is not forgo  # no other loss acts on it either
    clear(batch)


@pytest.mark.parametrize(
    ("estimator", "by_std", "own"), [("grpo", True, 1.5), ("grpo", False, 0.75), ("grpo_vectorized", False, 1.5)]
)
def test_the_one_row_of_a_group_has_the_advantage_that_the_whole_group_implies(queue, estimator, by_std, own):
    """Of [1, 0, 0, 0]; verl takes its reward itself. Nobody else's advantage is written, and none where a row does not train.

    It trains also where other losses are given up for rows of zero advantage.
    """
    trainer = trainer_of(client_of(Workers()), f"algorithm.adv_estimator={estimator}", forgo=True)
    trainer.config.algorithm.norm_adv_by_std_in_grpo = by_std
    done = SimpleNamespace(
        result=result([[1, 0], [1, 0, 0, 0]], [[1, 1], [1, 0, 0, 0]], [[0, 0], [0, 0, 1, 1]]),
        sequences=[("a_0_0", True), ("a_1_0", True), ("b_0_0", True), ("b_2_0", False), ("b_3_0", False)],
        group=np.array([0, 0, 1, 1, 1]),
    )
    rows = [{"advantages": torch.zeros(2), "response_mask": torch.ones(2, dtype=torch.int64)} for _ in done.sequences]
    keys = [key for key, _ in done.sequences]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.list_of_dict_to_tensordict(rows), tags=[{}] * len(keys))
    trainer._write_unseen_advantages("train", done)
    found = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])["advantages"]
    assert [row[0].item() for row in found] == pytest.approx([0.0, 0.0, own, 0.0, 0.0], rel=1e-5)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("estimator", "penalty"),
    [("grpo", False), ("grpo", True), *((e, False) for e in ("opo", "gpg", "grpo_passk", "rloo_vectorized"))],
)
def test_padding_changes_nobodys_advantage(queue, estimator, penalty, count):
    """opo had NaN in padding rows; gpg counted them, and so did the mean KL of a penalty; grpo_passk failed on a single one.

    Nor any metric of the rollout correction: they were sequences of perplexity 1 and weight 0 there.
    """
    client = client_of(Workers())
    batch = batch_of(client)
    words = [f"algorithm.adv_estimator={estimator}", f"algorithm.use_kl_in_reward={str(penalty).lower()}"]
    words += [f"algorithm.rollout_correction.{word}" for word in ("rollout_is=token", "rollout_rs=seq_mean_k1")]
    words += ["algorithm.rollout_correction.rollout_rs_threshold=0.5_1.5"]
    trainer = trainer_of(client, *words)
    trainer.kl_ctrl_in_reward = FixedKLController(0.1)

    def advantages(rows: KVBatchMeta) -> tuple[list[torch.Tensor], dict]:
        masks = tq.kv_batch_get(keys=rows.keys, partition_id="train", select_fields=["response_mask"])["response_mask"]
        probs = [{"old_log_probs": -0.5 * mask.float(), "ref_log_prob": -1.5 * mask.float()} for mask in masks]
        probs = [{**row, "rollout_log_probs": row["old_log_probs"] - 0.1} for row in probs]
        tq.kv_batch_put(keys=rows.keys, partition_id="train", fields=tu.list_of_dict_to_tensordict(probs))
        metrics: dict = {}
        found = trainer._compute_advantage(rows, metrics)
        assert metrics.get("actor/reward_kl_penalty", 1.0) == pytest.approx(1.0, abs=1e-4)
        assert list(found.keys) == list(rows.keys) and {"advantages", "returns"} <= set(found.fields)
        got = tq.kv_batch_get(keys=rows.keys, partition_id="train", select_fields=["advantages", "rollout_is_weights"])
        assert len(got["rollout_is_weights"]) == len(rows.keys)
        return list(got["advantages"]), metrics

    real = KVBatchMeta(partition_id="train", keys=batch.keys, tags=batch.tags)
    alone, metrics = advantages(real)
    keys, tags = trainer._padding(real, np.zeros(count, bool), *trainer._padding_row(real))
    mixed, same = advantages(KVBatchMeta(partition_id="train", keys=keys + batch.keys, tags=tags + batch.tags))
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed[count:], strict=True)) and any(a.any() for a in alone)
    assert all(torch.equal(row, torch.zeros(1)) for row in mixed[:count])
    assert same == pytest.approx(metrics) and metrics["rollout_corr/training_ppl"] > 1.6
    tq.kv_clear(keys=keys, partition_id="train")
    clear(batch)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ([], 1),
        (["actor_rollout_ref.actor.entropy_coeff=0.1"], 0),
        (["actor_rollout_ref.actor.use_kl_loss=true"], 0),
        (["+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is_batch_normalize=true"], 0),
        (["distillation.enabled=true"], 0),
        (None, 0),
    ],
    ids=str,
)
def test_padding_has_a_token_where_the_loss_would_fail_without_one(queue, words, tokens):
    """``sao``'s loss ends the run at a micro batch of padding alone; a penalty, a mean or a teacher would take the token in."""
    client = client_of(Workers(tool=False))
    batch = batch_of(client)
    bypass = "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode"
    trainer = trainer_of(client, *([] if words is None else [bypass, *words]))
    real = KVBatchMeta(partition_id="train", keys=batch.keys, tags=batch.tags)
    row, tag = trainer._padding_row(real)
    row.setdefault("position_ids", torch.arange(tag["seq_len"]))  # as every row of verl's has
    assert (tag["seq_len"] == min(t["seq_len"] for t in batch.tags)) == bool(tokens) and tag["is_padding"]
    keys, tags = trainer._padding(real, np.zeros(2, bool), row, tag)
    sent = {}

    def update_actor(rows: KVBatchMeta):
        names = ["response_mask", "loss_mask"]
        data = tq.kv_batch_get(keys=rows.keys, partition_id="train", select_fields=names)
        sent.update({name: [int(mask.sum()) for mask in data[name]] for name in names})
        return {"metrics": {"mfu": [0.0]}}

    trainer.actor_rollout_wg = SimpleNamespace(update_actor=update_actor, _dispatch_info={"actor": [0]})
    settings = SimpleNamespace(loss_settings=SimpleNamespace(use_topk=False))
    trainer.distillation_config = SimpleNamespace(distillation_loss=settings)
    layout = Layout(np.arange(len(batch.keys)), 1, len(batch.keys), 1, 0, len(batch.keys), np.zeros(1, int), 1)
    trainer._now = StepState([layout])
    trainer._update_actor(KVBatchMeta(partition_id="train", keys=keys + batch.keys, tags=tags + batch.tags), {})
    assert sent["response_mask"][:2] == [tokens] * 2 and sent["loss_mask"][:2] == [0, 0]
    assert sent["response_mask"][2:] == sent["loss_mask"][2:] and min(sent["loss_mask"][2:]) > 0
    tq.kv_clear(keys=keys, partition_id="train")
    clear(batch)


def test_an_empty_answer_carries_no_tokens_of_others(queue):
    """An agent loop that was cut off may leave one, and where no row is padding it may be the first of its minibatch."""
    trainer = object.__new__(get_trainer_cls("sync").adaptive())
    keys, lengths = ["x_0_0", "x_1_0", "x_2_0"], [0, 2, 3]
    rows = [{"uid": "x", "loss_mask": torch.ones(n, dtype=torch.int64)} for n in lengths]
    tags = [{"response_len": n, "seq_len": n + 3} for n in lengths]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.list_of_dict_to_tensordict(rows), tags=tags)
    layout = Layout(
        *(np.arange(3), 1, 3),
        **{"updates": 1, "critic_updates": 0, "sequences": 4, "zero_row_tokens": np.array([5]), "ranks": 1},
    )
    trainer._carry_zero_rows(layout, keys, tags, "train")
    found = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["loss_mask"])["loss_mask"]
    assert [mask.tolist() for mask in found] == [[], [1, 1], [6, 1, 1]]


def test_verl_writes_rollouts_down_and_no_padding(queue, tmp_path):
    """``trainer.rollout_data_dir``: a padding row would be a failure, of the prompt that it is a copy of if it has pictures."""
    client = client_of(Workers())
    batch = batch_of(client)
    texts = [{"prompts": torch.tensor([1, 2]), "responses": torch.tensor([3]), "reward_model": {"ground_truth": "4"}}]
    fields = tu.list_of_dict_to_tensordict(texts * len(batch.keys))
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)
    trainer = trainer_of(client)
    trainer.global_steps = 5
    real = KVBatchMeta(partition_id="train", keys=batch.keys, tags=batch.tags)
    keys, tags = trainer._padding(real, np.zeros(2, bool), *trainer._padding_row(real))
    trainer._init_dump_executor()
    whole = KVBatchMeta(partition_id="train", keys=keys + batch.keys, tags=tags + batch.tags)
    trainer._log_rollout_data(whole, {}, str(tmp_path))
    trainer._shutdown_dump_executor()
    rows = [json.loads(line) for line in (tmp_path / "5.jsonl").read_text().splitlines()]
    assert sorted(row["uid"] for row in rows) == sorted(batch.keys) and {row["gts"] for row in rows} == {"4"}
    tq.kv_clear(keys=keys, partition_id="train")
    clear(batch)


def test_what_a_reward_function_gives_is_read_off_rollouts_and_not_off_padding(queue, monkeypatch):
    """A padding row has the ``acc`` of its source and a reward of 0: a bare number was taken for another field."""
    client = client_of(Workers(signal="acc"))
    batch = batch_of(client)
    trainer, asked = trainer_of(client), []
    rows = KVBatchMeta(partition_id="train", keys=batch.keys, tags=batch.tags)
    keys, tags = trainer._padding(rows, np.zeros(1, bool), *trainer._padding_row(rows))
    padded = KVBatchMeta(partition_id="train", keys=keys + batch.keys, tags=tags + batch.tags)
    monkeypatch.setattr(PPOTrainerSync, "step", lambda self, metrics, timing_raw: padded)
    monkeypatch.setattr(monitor, "_fields", lambda *rows, real=monitor._fields: asked.append(real(*rows)) or asked[-1])
    trainer.plan, trainer.run_store = SimpleNamespace(longest=64), SimpleNamespace(commit=lambda *_: None)
    trainer._monitor = monitor.Monitor(client.config, client.engine, longest=64, tracking=lambda: None)
    trainer._monitor._judge._rewards = {0.0, 0.5, 1.0}  # graded
    trainer.total_training_steps = 9
    trainer.step({}, {})
    assert asked == [frozenset()]
    tq.kv_clear(keys=keys, partition_id="train")
    clear(batch)


class Flaky(Workers):
    """Every rollout is lost with a chance of its own: its session raises, or its reward is NaN."""

    def __init__(self, chance: float, order: int = 0) -> None:
        super().__init__(order)
        self.chance, self.dice = chance, random.Random(order)
        self.raised = self.nan = 0

    def _prompt(self, uid: str, n: int, number: int, place: int) -> None:
        sessions: dict[int, tuple[float, list[int]]] = {}
        for s in range(n):
            broken = self.dice.random() < self.chance
            if broken and self.dice.random() < 0.5:
                continue
            self.nan += broken
            sessions[s] = (math.nan if broken else float(self.dice.random() < 0.5), [3])
        self.raised += n - len(sessions)
        self._write(uid, number, sessions)
        self._end(uid, len(sessions) < n)


def test_survivors_are_the_group(queue):
    """One flaky rollout in a hundred, groups of 64: about half of them lose one, and none is thrown away or refilled."""
    workers = Flaky(chance=0.01, order=3)
    client = client_of(workers, n=64, batch=16)
    batch = batch_of(client)
    groups, result = batch.result.groups, batch.result
    lost = workers.raised + workers.nan
    assert workers.raised and workers.nan and (groups.lost > 0).sum() >= 4
    assert workers.calls == 1 and len(groups) == 16 and result.trained.all() and not groups.failed.any()
    assert groups.lost.sum() == lost and groups.rollouts == 16 * 64 - lost
    assert np.isfinite(groups.reward).all() and set(np.unique(groups.reward)) == {0.0, 1.0}
    assert result.ledger.rollouts.balanced()
    # a reward that is NaN was generated and paid for; a session that raised left nothing to count
    account, tokens = result.ledger.rollouts, result.ledger.tokens
    assert account.generated == groups.rollouts + workers.nan and account.dropped["lost"] == workers.nan
    assert tokens.generated == groups.tokens.sum() + 3 * workers.nan and tokens.dropped["lost"] == 3 * workers.nan
    assert tokens.balanced()
    # every row that trains has a finite reward, the others have left the queue
    assert left() == set(batch.keys) and len(batch.sequences) == groups.rollouts
    scores = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rm_scores"])["rm_scores"]
    assert all(torch.isfinite(row).all() for row in scores)
    # a group's rollouts and its rows are the same ones, in the same order
    rows, _ = trajectory_rows(batch.keys)
    trained = [float(scores[int(r)].sum()) for r in rows]
    assert trained == result.groups.reward[result.trains].tolist()
    clear(batch)


@pytest.mark.parametrize(("workers", "order"), [(0, [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4, 1, 3])])
def test_each_workers_share_begins_with_what_was_to_come_first(workers, order):
    """A manager whose list of workers is empty ended in a ValueError."""
    assert deal(5, workers).tolist() == order


@pytest.mark.parametrize(("share", "failed"), [(0.5, 0), (0.6, 16)])
def test_min_sessions_says_how_many_survivors_make_a_group(queue, share, failed):
    class Half(Flaky):
        def _prompt(self, uid, n, number, place):
            self.dice.random = iter([0.0, 0.9, 1.0, 0.5] * n).__next__  # every second reward is NaN
            super()._prompt(uid, n, number, place)

    client = client_of(Half(chance=0.5), min_sessions=share)
    client.start()
    if failed:
        with pytest.raises(AdaptiveError, match="groups all failed"):
            client.complete()
    else:
        batch = client.complete()
        assert (batch.result.groups.n == N // 2).all() and not batch.result.groups.failed.any()
        clear(batch)


@pytest.mark.parametrize("estimator", ["verl", "centring", "memory"])
def test_one_rollout_that_is_left_of_two_trains_only_where_it_needs_no_other(queue, monkeypatch, estimator):
    """verl's GRPO takes mean 0 and std 1 of a group of one: its bare reward would be its advantage.

    So would it be with ``reinforce_plus_plus_baseline``, which subtracts the mean of the others.
    """
    if estimator == "centring":
        monkeypatch.setattr(Verl, "needs_groups", False)
        monkeypatch.setattr(Verl, "centres", True)
    workers = Flaky(chance=0.2, order=3)
    client = client_of(workers, n=2, batch=16, advantage="memory" if estimator == "memory" else "verl")
    batch = batch_of(client)
    groups, result = batch.result.groups, batch.result
    single = groups.n == 1
    assert (groups.lost > 0).any() and len(groups) >= 16
    if estimator == "memory":
        assert (single & result.trained).any()
    else:
        assert not (single & result.trained).any() and groups.failed[groups.lost > 0].all()
    assert result.ledger.rollouts.balanced()
    clear(batch)


def test_rewards_are_found_by_halves_when_some_rows_have_none(queue, monkeypatch):
    keys = [f"half_{i}_0" for i in range(256)]
    bad = {17, 18, 200}
    for i, key in enumerate(keys):
        row = {"uid": "half", **({} if i in bad else {"rm_scores": torch.full((1 + i % 3,), 1.0)})}
        tq.kv_batch_put(keys=[key], partition_id="train", fields=tu.list_of_dict_to_tensordict([row]), tags=[{}])
    calls = []
    read = rewards.read
    monkeypatch.setattr(rewards, "read", lambda keys, *more: calls.append(len(keys)) or read(keys, *more))
    reward, signal, _ = read_rewards(keys, "reward")
    assert set(np.flatnonzero(np.isnan(reward))) == bad
    assert all(reward[i] == 1 + i % 3 for i in range(256) if i not in bad) and np.array_equal(reward, signal, True)
    assert len(calls) < 2 * len(bad) * 9  # not one by one


def test_a_queue_too_small_for_the_step_is_refused_before_anything_is_sent(queue):
    workers = Workers()
    client = client_of(workers)
    client.handles = replace(client.handles, row_limit=N)
    with pytest.raises(ConfigError, match=r"total_storage_size=8: step 1 needs 36 rows.*set it to 72 or more"):
        client.start()
    assert workers.calls == 0 and left() == set()


@pytest.mark.parametrize("limit", [27, 45, 10_000])  # twice the batch stays: what trains, and what it may fall back on
def test_what_the_queue_has_no_room_for_waits_for_groups_that_are_dropped(queue, limit):
    """A refill that the plugin itself had made too large for verl's default queue ended the run."""
    workers, most = Workers(most=1), []
    client = client_of(workers, n=2, filter="informative", max_rounds=PROMPTS // BATCH)
    submit = workers.submit
    client.handles = replace(
        client.handles, row_limit=limit, submit=lambda batch: most.append(client.queue.expected()) or submit(batch)
    )
    for _ in range(3):
        batch = batch_of(client)
        assert batch.result.trained.sum() == BATCH and left() == set(batch.keys)
        clear(batch)
    assert max(most) <= limit and client.queue.under_way == 0


def test_prompts_of_dropped_groups_are_let_go_within_the_step(queue, monkeypatch):
    """A prompt may have images of megabytes, and a step of which most is dropped draws many batches of prompts."""
    workers, held = Workers(most=1), []
    client = client_of(workers, n=2, batch=2, filter="informative", max_rounds=PROMPTS // 2)
    finish, prompt = client.engine.finish, workers._prompt
    monkeypatch.setattr(workers, "_prompt", lambda uid, n, number, place: prompt(uid, n, number * (number > 20), place))
    monkeypatch.setattr(client.engine, "finish", lambda: held.append(len(client.stream.held)) or finish())
    batch = batch_of(client)
    assert len(batch.result.groups) > 20 and held[0] < 10  # what may train, and what the batch could fall back on
    assert not client.stream.held
    clear(batch)


@pytest.mark.parametrize("ahead", [None, 2], ids=["sync", "async"])
def test_what_a_step_gives_back_to_the_stream_is_not_read_again(ahead, monkeypatch):
    """verl's loader had read it ahead; the driver read it once more while every server waited."""
    reads, item = [], Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda self, i: reads.append(i) or item(self, i))
    stream = DataloaderPrompts(Rows(), SequentialSampler(Rows()), chunk=BATCH, workers=0)
    sampler = {"name": "epoch"} if ahead else {"name": "epoch", "round": {"prompts": 2 * BATCH}}
    config = config_of(sampler=sampler, filter="informative")
    world = World(np.full(PROMPTS, 0.5))
    # its window ends in the middle of a batch that verl's loader reads
    facts = AsyncFacts(warmup=ahead) if ahead else None
    there = SimpleNamespace(p=world.p, source=stream)
    engine, handles = engine_of(config, there, batch=BATCH, n=N, async_facts=facts), RolloutHandles(len, lambda: 1)
    client = (
        AsyncRolloutClient(engine, stream, handles) if ahead else SyncRolloutClient(engine, stream, handles, Workers())
    )
    # what is read is between stream and engine: no queue, and nobody generates
    client.queue, client.fetch = MagicMock(submissions=[]), lambda timeout: world.roll(client.engine.flight)
    for _ in range(3):
        batch_of(client)
        client.finish()
    assert reads == list(range(4 * BATCH))
    assert set(stream.held) == {*engine.living.values(), *engine.prompt_source.ahead.tolist()}


@pytest.mark.parametrize("planned", [9, 1], ids=["before its last step", "at it"])
def test_a_step_is_committed_watched_and_its_seconds_logged(queue, monkeypatch, caplog, planned):
    timings = Timings(20)  # what happens until the step begins is none of its seconds
    client = client_of(Workers(), filter="keep_all", total_rollouts=BATCH * N)
    client.timings, began = timings, time.monotonic()
    result = batch_of(client).result
    most = time.monotonic() - began
    trainer, metrics = trainer_of(client), {}
    monkeypatch.setattr(PPOTrainerSync, "step", lambda self, metrics, timing_raw: "verl's batch")
    trainer.run_store, trainer._monitor = MagicMock(), MagicMock(step=lambda *about: {"adaptive/alarm/cut": 0.0})
    trainer.plan, trainer.total_training_steps = SimpleNamespace(longest=64), planned
    trainer._ended_early = False
    assert trainer.step(metrics, {}) == "verl's batch"
    trainer.run_store.commit.assert_called_once_with(1, result, client.engine)
    times = [metrics[f"adaptive/time/{name}"] for name in ("last_tenth", "generation")]
    assert 0 < times[0] < times[1] < most and 0 < metrics["adaptive/time/idle_share"] < 1
    assert metrics["adaptive/alarm/cut"] == 0.0
    assert trainer.total_training_steps == 1 and trainer._ended_early == (planned > 1)  # the budget is spent
    # at its last step verl saves and validates by itself
    assert ("training ends after step 1: adaptive.total_rollouts is spent" in caplog.text) == (planned > 1)


def test_a_wait_for_rollouts_that_get_their_rewards_later_has_a_ceiling(queue):
    workers = Workers()
    workers._prompt = lambda *job: None  # it hangs
    client = client_of(workers, late=True, refill=False, stall_timeout=0.05)
    client.start()
    with pytest.raises(AdaptiveError, match=r"stall_timeout=0\.05 s; still waiting for 4 of 4 prompts"):
        client.wait_for_all()


def test_a_queue_full_of_groups_that_train_is_refused(queue):
    client = client_of(Workers(most=1))
    client.handles = replace(client.handles, row_limit=BATCH * (N + 1) - 1)
    client.start()
    with pytest.raises(ConfigError, match=r"total_storage_size=35: step 1 needs 36 rows.*set it to 72 or more"):
        client.complete()


def test_long_responses_do_not_trip_the_stall_timeout():
    config = AdaptiveConfig()
    assert stall_seconds(config, 8192) == 1800.0  # as ever
    assert stall_seconds(config, 65_536) == pytest.approx(6553.6)
    assert stall_seconds(AdaptiveConfig.from_mapping({"stall_timeout": 60.0}), 65_536) == 60.0


def test_a_rollout_whose_judge_timed_out_is_lost_and_not_the_run(queue):
    """verl's rate-limited reward manager answers for such a call with other fields, another with none where it cannot parse."""
    workers = Workers(signal="accuracy")
    client = client_of(workers, signal="accuracy", refill=False)
    client.start()
    clear(client.complete())
    keys = ["judged_0_0", "judged_1_0", "judged_2_0"]
    for key, info in zip(keys, ({"accuracy": 1.0}, {"timeout": True}, None), strict=True):
        row = {"uid": "judged", "rm_scores": torch.ones(1), "extra_fields": {"reward_extra_info": info}}
        tq.kv_batch_put(keys=[key], partition_id="train", fields=tu.list_of_dict_to_tensordict([row]), tags=[{}])
    reward, signal, given = read_rewards(keys, "accuracy")
    assert reward.tolist() == [1.0] * 3 and given == {"accuracy", "timeout"}
    np.testing.assert_equal(signal, [1.0, math.nan, math.nan])


def rollouts_of(uid: str, sessions: list[int], info: dict, reward: float = 1.0) -> None:
    """A request that came back with these numbers of outputs, whose rewards have these fields beside them."""
    row = {"uid": uid, "rm_scores": torch.tensor([reward]), "extra_fields": {"reward_extra_info": info}}
    for s, outputs in enumerate(sessions):
        keys = [f"{uid}_{s}_{o}" for o in range(outputs)]
        rows = tu.list_of_dict_to_tensordict([row] * outputs)
        tq.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=[{"response_len": 1}] * outputs)
    tq.kv_batch_put(keys=[uid], partition_id="train", tags=[{"status": "finished"}])


def asked_for(groups: int, n: int, **config) -> Queue:
    """A queue that waits for so many groups, ``g0`` to ..."""
    made = Queue(AdaptiveConfig.from_mapping(config))
    for i in range(groups):
        made.ask(i, f"g{i}", n, 0)
    return made


def requests_of(*submissions: int, n: int) -> Requests:
    at, zeros = np.array(submissions), np.zeros(len(submissions), dtype=np.int64)
    return Requests(at, zeros, zeros, zeros + n, zeros)


def test_the_group_that_comes_back_first_may_lack_the_signal(queue):
    """A reward function that cannot parse an answer gives less; such a group ended the run if it was the first, also resumed."""
    made = asked_for(3, 2, signal="acc")
    for i, info in enumerate(({"parsed": 0.0}, {"parsed": 1.0, "acc": 1.0}, {"parsed": 0.0})):
        rollouts_of(f"g{i}", [1, 1], info)
        made.look([f"g{i}"])
        made._list()
        assert made.collect(requests_of(i, n=2), 1).failed.tolist() == ["acc" not in info]
    made.close(range(3))
    made = asked_for(2, 2, signal="acc")
    rollouts_of("g0", [1, 1], {"parsed": 0.0})
    made._list()
    made.collect(requests_of(0, n=2), 1)
    rollouts_of("g1", [1, 1], {"format": 0.0})
    made._list()
    with pytest.raises(ConfigError, match="it gives: format, parsed"):
        made.collect(requests_of(1, n=2), 1)
    made.close(range(2))


def test_a_rollout_lost_for_want_of_the_signal_is_not_put_down_to_its_reward_alone(queue, caplog):
    """The log named a session that raised and a reward that is not finite, and every reward was there."""
    client = client_of(Workers(), signal="acc")
    client.engine.flight = requests_of(0, n=3)
    client.queue.ask(0, "g0", 3, 0)
    rollouts_of("g0", [1, 1], {"acc": 1.0})
    tq.kv_batch_put(
        keys=["g0_2_0"],
        partition_id="train",
        fields=tu.list_of_dict_to_tensordict([{"rm_scores": torch.ones(1), "extra_fields": {"reward_extra_info": {}}}]),
        tags=[{"response_len": 1}],
    )
    client.fetch(client.timeout())
    assert "1 of 3 rollouts" in caplog.text and "or its reward or adaptive.signal is missing" in caplog.text
    client.queue.close([0])


def test_where_no_rollout_has_a_reward_the_signal_is_not_what_is_missed(queue):
    """The reward function is broken: the error about the option would lead astray."""
    made = asked_for(1, 2, signal="acc")
    rollouts_of("g0", [1, 1], {}, reward=math.nan)
    made._list()
    assert made.collect(requests_of(0, n=2), 1).failed.all()
    made.close(range(1))
    assert left() == set()


def test_one_group_of_long_sessions_does_not_foretell_the_queue(queue):
    """What is expected follows all sessions so far; it followed the latest look, which may have seen one group."""
    made = asked_for(100, 2)
    for i in range(10):
        rollouts_of(f"g{i}", [3, 3] if i else [15, 15], {})
    made._list()
    made.collect(requests_of(*range(1, 10), n=2), 1)
    before = made.expected()
    made.collect(requests_of(0, n=2), 1)
    assert before == 100 + 9 * 6 + 91 * 2 * 3 and made.expected() < 1.5 * before
    made.close(range(100))


def test_what_a_session_writes_after_it_was_given_up_is_cleared_before_a_later_step(queue):
    """However late: it was looked for before the next step only, and stayed for the rest of the run."""
    client = client_of(Workers())
    for _ in range(3):
        client.start()
        clear(client.complete())
        client.finish()
        rollouts_of("stubborn", [2], {})
    client.start()
    assert not any(key.startswith("stubborn") for key in left())
    clear(client.complete())


def test_when_everything_fails_the_run_ends_with_the_reason(queue):
    client = client_of(Workers(fail=1.0))
    client.handles = replace(client.handles, busy=lambda: "reward model 0: dead (ActorDiedError)")
    client.start()
    said = r"the last \d+ groups all failed.* \(open requests: reward model 0: dead \(ActorDiedError\)\)"
    with pytest.raises(AdaptiveError, match=said):
        client.complete()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_are_summed_in_their_own_precision(dtype):
    rows = [torch.tensor([0.0, 0.1], dtype=dtype), torch.tensor([0.7], dtype=dtype)]
    found = rewards.sums(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    assert found.tolist() == [float(row.double().sum()) for row in rows]


def test_the_drivers_benchmark_finds_every_part_that_it_times(queue):
    from benchmarks import driver

    row = driver.run("solo", 64)
    names = {"commit", "decide", "look", "read", "send", "settle"}
    assert row["generated"] == row["rows"] == 64 and names <= row["parts"].keys() and left() == set()
    assert driver.tq.kv_list is driver.RAW.list
