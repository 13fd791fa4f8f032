"""A step's rows on their way through verl's passes: minibatches of groups, padding, rows left out, advantages.

:class:`MinibatchMixin` overrides the methods of verl's trainers that hand rows to the workers; which rows there are is
:mod:`~verl_adaptive.integration.trainer`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance

from verl_adaptive.advantages.verl import unseen_advantages
from verl_adaptive.engine import Engine
from verl_adaptive.integration.advantage import EstimatorContext, provide
from verl_adaptive.integration.async_client import AsyncRolloutClient
from verl_adaptive.integration.curves import RowFigures, curves
from verl_adaptive.integration.layout import PAD, Layout, Pass, micro_size, plan
from verl_adaptive.integration.queue import Batch
from verl_adaptive.integration.rows import longer, padding_row
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.integration.sync_client import SyncRolloutClient

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer
else:
    _Trainer = object


@dataclass
class StepState:
    """What a step has done so far; born when it begins.

    Attributes:
        layouts: of its mini-steps, the one in hand last.
        rows: of their groups, for verl's curves.
        updates: of the actor's optimizer.
    """

    layouts: list[Layout] = field(default_factory=list)
    rows: list[RowFigures] = field(default_factory=list)
    updates: int = 0

    @property
    def layout(self) -> Layout:
        """The layout of the current mini-step."""
        return self.layouts[-1]


class MinibatchMixin(_Trainer):
    """Minibatches of groups, with as many updates as plain GRPO has; see :mod:`verl_adaptive.integration.layout`."""

    plan: RunPlan
    engine: Engine
    rollout_client: SyncRolloutClient | AsyncRolloutClient
    _now: StepState

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> KVBatchMeta:
        """Lay the step's rows out in minibatches of groups; see :mod:`verl_adaptive.integration.layout`.

        A *sequence* is numbered as in ``done.sequences``, those left out included; a *row* is one of the batch that is returned:
        a sequence that trains, or padding.
        """
        done = self.rollout_client.batch
        ranks = self._ranks()
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        # of a mini-step; verl checks that it divides
        size = self.config.data.train_batch_size // self.parameter_sync_step
        tag_of = dict(zip(batch.keys, batch.tags, strict=True))
        length = np.array([tag_of[key]["seq_len"] if trains else 0 for key, trains in done.sequences], dtype=np.int64)
        passes = list(self._passes().values())
        lay_out = partial(
            plan,
            done.group,
            length,
            done.zero_row_tokens,
            np.array([trains for _, trains in done.sequences], dtype=bool),
            ranks=ranks,
            updates=max(1, size // actor.ppo_mini_batch_size),
            critic_updates=max(1, size // critic.ppo_mini_batch_size) if self.use_critic else 0,
            partition=_even,
            workload=_workload,
            passes=passes,
        )
        layout = lay_out()
        pad, pad_tag = self._padding_row(batch) if layout.padding or self.processor is not None else ({}, {})
        if self.processor is not None and pad["position_ids"].dim() > 1:
            layout = _uneven(layout, lay_out, length, pad_tag["seq_len"], {one.ranks for one in passes})
        self._now.layouts.append(layout)
        self._now.rows.append(done.rows)
        pads = zip(*self._padding(batch, layout.longer, pad, pad_tag), strict=True)
        keys, tags = [], []
        for sequence in layout.order.tolist():
            if sequence == PAD:
                key, tag = next(pads)
            else:
                key, _ = done.sequences[sequence]
                tag = tag_of[key]
            keys.append(key)
            tags.append(tag)
        self._carry_zero_rows(layout, keys, tags, batch.partition_id)
        # verl compares the ranks' shares with those of the order before, which ends in padding
        before = np.argsort(np.where(layout.order == PAD, len(length), layout.order), kind="stable")
        metrics.update(
            log_seqlen_unbalance(
                seqlen_list=[int(tags[i]["seq_len"]) for i in before],
                partitions=np.argsort(before).reshape(ranks, -1).tolist(),
                prefix=logging_prefix,
            )
        )
        return replace(batch, keys=keys, tags=tags)

    def _ranks(self, role: str = "actor") -> int:
        """Data-parallel ranks of a role, which may differ: sequence, tensor and pipeline parallelism are each one's own."""
        if role == "ref":
            group, mesh = self.ref_policy_wg, "ref"
        else:
            group, mesh = (self.critic_wg, "train") if role == "critic" else (self.actor_rollout_wg, "actor")
        if mesh not in group._dispatch_info:
            group._dispatch_info[mesh] = group._query_dispatch_info(mesh)
        return max(group._dispatch_info[mesh]) + 1

    def _passes(self) -> dict[str, Pass]:
        """What goes over the rows of a step."""
        every, critic = self.config.actor_rollout_ref, self.config.critic
        actor, rollout, ref, ranks = every.actor, every.rollout, every.ref, self._ranks()
        stages = _stages(actor)
        limit = None if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu
        passes = {
            "actor": Pass(
                ranks, "actor", None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu, stages
            ),
            "log_probs": Pass(ranks, "none", limit, stages),
        }
        # With LoRA verl's reference is the actor without its adapter, in the actor's own micro batches.
        if self.use_reference_policy and not self.ref_in_actor:
            limit = None if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu
            passes["reference"] = Pass(self._ranks("ref"), "none", limit, _stages(ref))
        if self.use_critic:
            ranks, stages = self._ranks("critic"), _stages(critic)
            limits = [critic.get(f"{name}_micro_batch_size_per_gpu") for name in ("ppo", "forward")]
            train, infer = [None, None] if critic.use_dynamic_bsz else limits
            passes |= {"critic": Pass(ranks, "critic", train, stages), "values": Pass(ranks, "none", infer, stages)}
        return passes

    @property
    def _padding_has_token(self) -> bool:
        """Whether padding rows get a loss token, of advantage 0, for the actor's update.

        The loss of ``bypass_mode`` fails on a micro batch without one, which dynamic micro batches make of padding where most rows
        are longer than half a micro batch. It multiplies each token's term by its advantage; other losses do not.
        """
        actor = self.config.actor_rollout_ref.actor
        correction = actor.policy_loss.get("rollout_correction") or {}
        distilled = (self.config.get("distillation") or {}).get("enabled", False)
        others = (
            actor.use_kl_loss or actor.entropy_coeff or distilled or correction.get("rollout_is_batch_normalize", False)
        )
        return actor.policy_loss.get("loss_mode") == "bypass_mode" and not others

    def _padding_row(self, batch: KVBatchMeta) -> tuple[dict, dict]:
        """A row that weighs nothing, and its tag; two tokens long where nothing but text trains, under FSDP.

        Where prompts have pictures, or a token of it is looked at, such a row may be the source itself: then the shortest of the
        batch.
        """
        every = self.config.actor_rollout_ref
        strategies = {every.actor.strategy, *([every.ref.strategy] if self.use_reference_policy else [])}
        if self.use_critic:
            strategies.add(self.config.critic.strategy)
        short = strategies <= {"fsdp", "fsdp2"} and self.processor is None
        copied = self._padding_has_token  # whose log-probs are those of an answer, for the loss's metrics
        lengths = [tag["seq_len"] if copied or self.processor is not None else 0 for tag in batch.tags]
        at = int(np.argmin(lengths))
        source = tq.kv_batch_get(keys=[batch.keys[at]], partition_id=batch.partition_id)[0]
        return padding_row(source, batch.tags[at], self.tokenizer.eos_token_id, short=short, copied=copied)

    def _padding(self, batch: KVBatchMeta, more: np.ndarray, row: dict, tag: dict) -> tuple[list[str], list[dict]]:
        """Keys and tags of padding rows, which are written; ``more``: which of them are longer (:attr:`Layout.longer`)."""
        if not len(more):
            return [], []
        uid = f"pad{self.global_steps}x{self.local_trigger_step}"
        axes, eos = row["position_ids"].dim() > 1, self.tokenizer.eos_token_id
        made = [longer(row, tag, eos) if axes and one else (row, tag) for one in more]
        keys = [f"{uid}_{i}_0" for i in range(len(made))]
        own = [{"uid": uid, **({"session_id": i} if "session_id" in row else {})} for i in range(len(made))]
        rows = [{**one, **names} for (one, _), names in zip(made, own, strict=True)]
        tags = [dict(one) for _, one in made]
        tq.kv_batch_put(
            keys=keys, partition_id=batch.partition_id, fields=tu.list_of_dict_to_tensordict(rows), tags=tags
        )
        return keys, tags

    def _carry_zero_rows(self, layout: Layout, keys: list[str], tags: list[dict], partition_id: str) -> None:
        """Count the tokens of left-out rows in verl's loss denominator.

        verl divides by the sum of the minibatch's ``loss_mask``; the field serves nothing else in the actor's update
        (which masks by ``response_mask``), so one row per chunk carries the missing tokens in its first entry.
        """
        denominator_rows = []
        for chunk, tokens in enumerate(layout.zero_row_tokens.tolist()):
            at = layout.denominator_row(chunk)
            if tokens and not tags[at]["response_len"]:  # an aborted answer has no first entry
                at = max(layout.positions(chunk).tolist(), key=lambda i: tags[i]["response_len"])
            if tokens:
                denominator_rows.append((keys[at], tokens))
        if not denominator_rows:
            return
        names = [key for key, _ in denominator_rows]
        data = tq.kv_batch_get(keys=names, partition_id=partition_id, select_fields=["loss_mask"])
        masks = [mask.clone() for mask in data["loss_mask"]]
        for mask, (_, tokens) in zip(masks, denominator_rows, strict=True):
            mask[0] += tokens
        tq.kv_batch_put(
            keys=names,
            partition_id=partition_id,
            fields=tu.list_of_dict_to_tensordict([{"loss_mask": m} for m in masks]),
        )

    def _infer_rows(self, batch: KVBatchMeta, name: str) -> KVBatchMeta:
        """The rows as a pass's ranks take them, and a micro batch that verl's even split can make of them."""
        one = self._passes()[name]
        if one.micro is not None:
            batch.extra_info["micro_batch_size_per_gpu"] = micro_size(len(batch) // one.ranks, one.micro, one.multiple)
        return self._cut_for(batch, one.ranks)

    def _cut_for(self, batch: KVBatchMeta, ranks: int) -> KVBatchMeta:
        """The same rows in the order that a worker group of so many data-parallel ranks needs."""
        if ranks == self._now.layout.ranks:
            return batch
        cost = _workload(np.array([tag["seq_len"] for tag in batch.tags]))
        return _rows_at(batch, self._now.layout.order_for(ranks, cost, _even).tolist())

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return super()._compute_old_log_prob(self._infer_rows(batch, "log_probs"), metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        rows = self._infer_rows(batch, "log_probs" if self.ref_in_actor else "reference")
        super()._compute_ref_log_prob(rows, metrics)
        return batch

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        super()._compute_values(self._infer_rows(batch, "values"), metrics)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        done = self.rollout_client.batch
        # To a row without loss tokens opo gives NaN; gpg, the mean KL of a penalty and rollout_corr's means count it.
        seen = _without_padding(batch)
        context = EstimatorContext(self.engine.policy.advantage, done.trained, done.position, list(seen.keys))
        with provide(context):
            found = super()._compute_advantage(seen, metrics)
        if len(seen) < len(batch):
            self._fill_padding(batch, seen)
            found = replace(found, keys=batch.keys, tags=batch.tags)
        self._write_unseen_advantages(batch.partition_id, done)
        return found

    def _fill_padding(self, batch: KVBatchMeta, seen: KVBatchMeta) -> None:
        """Zeros in padding rows that the estimator has not seen, for what it and verl wrote into the others."""
        keys = sorted(set(batch.keys) - set(seen.keys))
        there = tq.kv_batch_get(keys=seen.keys[:1], partition_id=batch.partition_id).keys()
        names = [n for n in ("advantages", "returns", "token_level_rewards", "rollout_is_weights") if n in there]
        masks = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        rows = [{name: torch.zeros(len(mask)) for name in names} for mask in masks["response_mask"]]
        tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=tu.list_of_dict_to_tensordict(rows))

    def _write_unseen_advantages(self, partition_id: str, done: Batch) -> None:
        """Write the advantages that verl could not see; see :func:`~verl_adaptive.advantages.verl.unseen_advantages`."""
        algorithm, result = self.config.algorithm, done.result
        inside = result.groups.rollout_mask(result.trained)
        groups, advantages = unseen_advantages(
            *(result.groups.select(result.trained), result.trains[inside], result.zero_row[inside]),
            self.engine.policy.advantage,
            estimator=str(algorithm.adv_estimator),
            # verl tells it to grpo alone: grpo_vectorized divides whatever it says
            by_std=algorithm.get("norm_adv_by_std_in_grpo", True) or algorithm.adv_estimator != "grpo",
        )
        if not len(groups):
            return
        advantage_of = dict(zip(groups.tolist(), advantages.tolist(), strict=True))
        rows = {
            key: advantage_of[group]
            for (key, trains), group in zip(done.sequences, done.group.tolist(), strict=True)
            if trains and group in advantage_of
        }
        keys = list(rows)
        masks = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["response_mask"])["response_mask"]
        fields = []
        for mask, own in zip(masks, rows.values(), strict=True):
            mask = torch.zeros_like(mask) if self.plan.forgo and not own else mask
            fields.append({"advantages": own * mask.float(), "returns": own * mask.float(), "response_mask": mask})
        tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=tu.list_of_dict_to_tensordict(fields))

    def _give_padding_a_token(self, batch: KVBatchMeta) -> None:
        """Let the loss look at the first token of padding rows, after the critic has been updated."""
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)]
        if not keys:
            return
        masks = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        rows = [{"response_mask": mask.clone()} for mask in masks["response_mask"]]
        for row in rows:
            row["response_mask"][:1] = 1
        tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=tu.list_of_dict_to_tensordict(rows))

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        layout = self._now.layout
        if self._padding_has_token:
            self._give_padding_a_token(batch)
        sizes = {
            "mini_batch_size": layout.minibatch_rows,
            # sequence means are over real sequences, each of the step's with the same weight
            "global_batch_size": layout.sequences / layout.updates,
        }
        with _edit(self.actor_rollout_wg, "update_actor", sizes, self._passes()["actor"]):
            done = super()._update_actor(batch, metrics)
        self._now.updates += layout.updates * int(self.config.actor_rollout_ref.actor.ppo_epochs)
        return done

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        """verl's metrics, those of rewards and lengths over every row of the batch's groups."""
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        rows = RowFigures.join(self._now.rows)
        if rows.left_out:
            metrics.update(curves(rows, rewards=not self.config.algorithm.use_kl_in_reward))

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict, rollout_data_dir: str) -> None:
        """verl's dump of a step, of rollouts alone: padding would be failures that nobody generated."""
        super()._log_rollout_data(_without_padding(batch), timing_raw, rollout_data_dir)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        layout, one = self._now.layout, self._passes()["critic"]
        sizes = {
            "mini_batch_size": layout.critic_minibatch_rows,
            "global_batch_size": layout.sequences / layout.critic_updates,
        }
        with _edit(self.critic_wg, "train_mini_batch", sizes, one):
            super()._update_critic(self._cut_for(batch, one.ranks), metrics)
        return batch


def _without_padding(batch: KVBatchMeta) -> KVBatchMeta:
    """The rows that are not padding; the batch itself if none is, or all are."""
    real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    return batch if len(real) in (0, len(batch)) else _rows_at(batch, real)


def _rows_at(batch: KVBatchMeta, places: list[int]) -> KVBatchMeta:
    """The rows at these places, in this order."""
    return replace(batch, keys=[batch.keys[i] for i in places], tags=[batch.tags[i] for i in places])


def _workload(length: np.ndarray) -> np.ndarray:
    """verl's, of rows of these lengths."""
    return calculate_workload(torch.as_tensor(length, dtype=torch.int64)).numpy()


def _uneven(
    layout: Layout, lay_out: Callable[..., Layout], length: np.ndarray, padding: int, ranks: set[int]
) -> Layout:
    """The first layout of which no rank's rows are all of one length; see :meth:`Layout.uneven`.

    Mostly ``layout``, which has no spare rows. ``length`` is of each sequence, ``padding`` of a padding row; some have one more.
    """
    for spare in range(1, 4 * max(ranks)):  # one or two do, but for a pass of more ranks than the actor has
        row_length = np.where(layout.order == PAD, padding, length[layout.order])
        row_length[layout.order == PAD] += layout.longer
        if layout.uneven(row_length, ranks, _workload, _even):
            break
        layout = lay_out(spare=spare)
    return layout


def _even(cost: np.ndarray, parts: int) -> list[list[int]]:
    """verl's partition of workloads into parts of equal size; of a list: of a tensor it takes twenty times as long."""
    return get_seqlen_balanced_partitions(cost.tolist(), k_partitions=parts, equal_size=True)


def _stages(settings: Any) -> int:
    """What the number of micro batches must be a multiple of: Megatron's virtual pipeline takes so many at a time."""
    megatron = settings.get("megatron") if settings.get("strategy") == "megatron" else None
    if megatron is None or (megatron.get("virtual_pipeline_model_parallel_size") or 1) <= 1:
        return 1
    own = (megatron.get("override_transformer_config") or {}).get("microbatch_group_size_per_vp_stage")
    return int(own or megatron.get("pipeline_model_parallel_size") or 1)


@contextmanager
def _edit(workers: Any, method: str, sizes: dict[str, Any], one: Pass) -> Iterator[None]:
    """Correct the sizes that verl writes into the batch, between its writing and its sending."""
    real = getattr(workers, method)

    def call(batch: KVBatchMeta) -> Any:
        batch.extra_info.update(sizes)
        if one.micro is not None:
            rows = sizes["mini_batch_size"] // one.ranks
            batch.extra_info["micro_batch_size_per_gpu"] = micro_size(rows, one.micro, one.multiple)
        return real(batch)

    setattr(workers, method, call)
    try:
        yield
    finally:
        setattr(workers, method, real)
