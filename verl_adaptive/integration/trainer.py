"""Our trainers: verl's own, with the engine deciding what is rolled out and what trains.

:class:`AdaptiveMixin` overrides the few methods through which prompts, batches, minibatches and checkpoints pass; the
loop, the workers, the losses and the logging are verl's.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pprint import pprint
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.rollout.llm_server import LLMServerClient

from verl_adaptive.advantages.verl import CENTRING, COMPARING, GROUP_RELATIVE
from verl_adaptive.config import RunFacts, check
from verl_adaptive.engine import AsyncEngine, make_engine
from verl_adaptive.engine.shape import step_shape
from verl_adaptive.integration.abort import Abort, CancellingClient
from verl_adaptive.integration.advantage import Loan, lend, register_estimator
from verl_adaptive.integration.checks import async_facts, check_manager, check_run, why_not_skip_zero, zero_rows
from verl_adaptive.integration.courier import Road
from verl_adaptive.integration.curves import Rows, curves
from verl_adaptive.integration.facts import adaptive_of, late_rewards, single_turn, slots_of
from verl_adaptive.integration.layout import PAD, Layout, Pass, micro_size, plan
from verl_adaptive.integration.prompts import Stream, identity_columns
from verl_adaptive.integration.report import banner, step_metrics
from verl_adaptive.integration.rows import alone, padding_row
from verl_adaptive.integration.run_store import RunStore
from verl_adaptive.integration.session import Batch, Session
from verl_adaptive.integration.stream_session import NothingLeft, StreamSession
from verl_adaptive.integration.waiting import PARTITION, Liveness, check_installed, open_requests, stall_seconds
from verl_adaptive.integration.watch import Watch
from verl_adaptive.policy import build_policy
from verl_adaptive.record import Tape

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer

    from verl_adaptive.integration.replay_buffer import AdaptiveReplayBuffer
else:
    _Trainer = object

__all__ = ["AdaptiveMixin", "AdaptiveSync"]

logger = logging.getLogger(__name__)


class AdaptiveMixin(_Trainer):
    """The policy, put into one of verl's trainers.

    Attributes:
        base_mode: verl's name of the mode; options are read from ``trainer.v1.<base_mode>``.
        is_adaptive: how the replay buffer knows that it is in good hands.
    """

    base_mode: str
    is_adaptive = True
    total_training_steps: int
    steps_per_epoch: int

    def __init__(self, config: Any) -> None:
        _show_our_log()
        self.adaptive = adaptive_of(config)
        policy = build_policy(self.adaptive)
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode  # verl compares it with its own names in six places
            config.adaptive.allocator = self.adaptive.allocator  # for loggers, as it is in this run
        check_run(config, self.adaptive, policy)
        with open_dict(config):
            if policy.advantage.estimator is not None:
                register_estimator(type(policy.advantage))
                config.algorithm.adv_estimator = policy.advantage.estimator
        self._abort = Abort(
            lambda: getattr(self.agent_loop_manager, "agent_loop_workers", ()),
            self._servers,
            lambda: self.checkpoint_manager,
            stall_seconds(self.adaptive, config.data.max_response_length),
            slots_of(config),
            gated=config.actor_rollout_ref.rollout.name != "sglang",
        )
        super().__init__(config)
        self._layout: Layout  # of the mini-step in hand
        self._layouts: list[Layout] = []  # of the step
        self._updates = 0  # of the step, by the actor's optimizer
        self._rows: list[Rows] = []  # of the step
        self._ended_early = False
        self._warming_up = False
        self._tape: Tape | None = None
        self._liveness: Liveness | None = None
        self._watch: Watch  # from the loading of the checkpoint on
        self._validation_prompts: dict[str, int] | None = None  # data source → prompts

    def _build_replay_buffer(self) -> AdaptiveReplayBuffer:
        # Not at the top: whoever imports the buffer's module first imports this one on the way.
        from verl_adaptive.integration.replay_buffer import AdaptiveReplayBuffer, AdaptiveReplayBufferAsync

        sampler = self.config.trainer.v1.sampler
        kind = AdaptiveReplayBuffer if self.base_mode == "sync" else AdaptiveReplayBufferAsync
        return kind(
            trainer_mode=self.base_mode,
            trainer_config=self.config.trainer.v1.get(self.base_mode, {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
        )

    # -- prompts --------------------------------------------------------------------------------------------

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        data, batch = self.config.data, self.config.data.train_batch_size
        policy = build_policy(self.adaptive)
        fetch = data.get("gen_batch_size", None) or batch
        whole = policy.sampler.kind == "stream" and policy.sampler.whole_batches
        check(
            len(self.train_dataset) >= (max(fetch, batch) if whole else batch),
            "data.train_batch_size",
            batch,
            f"the training set has only {len(self.train_dataset)} prompts; use at most that",
        )
        self.stream = Stream(
            self.train_dataset,
            create_rl_sampler(data, self.train_dataset),
            chunk=fetch if whole else 1,
            workers=data["dataloader_num_workers"],
        )
        self.train_dataloader = self.stream.loader  # verl checkpoints it
        self.run_store = RunStore(self.config, self.adaptive, self.train_dataset)
        prompts, ahead = len(np.unique(self.run_store.row_of)), self._ahead()
        self.shape = step_shape(self.adaptive, batch, self.config.actor_rollout_ref.rollout.n, prompts, ahead)
        self.adaptive = self.shape.config
        if self.base_mode != "sync":
            window = self.shape.groups + int(ahead * self.shape.groups)
            check(
                prompts >= window,
                f"trainer.v1.{self.base_mode}.num_warmup_batches",
                self.config.trainer.v1[self.base_mode].get("num_warmup_batches", 0),
                f"{window} prompts would be in flight at once, the training set has {prompts} different ones, and none is "
                "rolled out twice at a time; lower it, or data.train_batch_size",
            )
        self._start_engine()

    def _ahead(self) -> float:
        """Batches in flight beyond the step's own."""
        return 0.0 if self.base_mode == "sync" else self.config.trainer.v1[self.base_mode].get("num_warmup_batches", 0)

    def _start_engine(self) -> None:
        """Bind the policy to the table; again after a resume, which brings a table of its own."""
        policy = build_policy(self.adaptive)
        if policy.advantage.estimator is None:
            estimator = str(self.config.algorithm.adv_estimator)
            policy.advantage.group_relative = estimator in GROUP_RELATIVE
            policy.advantage.needs_groups = estimator in COMPARING
            policy.advantage.centres = estimator in CENTRING
        skip, self.zero_rows = zero_rows(self.config, self.adaptive.skip_zero_advantage)
        self._forgo_terms = skip and bool(why_not_skip_zero(self.config))  # other losses' terms of the rows left out
        facts = RunFacts.of(
            self.adaptive,
            batch=self.shape.groups,
            n=self.shape.n,
            # verl ends at whichever comes first
            steps=min(self.total_training_steps, self.config.trainer.total_epochs * self.steps_per_epoch),
            prompts=len(np.unique(self.run_store.row_of)),
        )
        parts = (policy, self.run_store.table, self.adaptive, facts, self.run_store.row_of, self.stream)
        mode = None if self.base_mode == "sync" else async_facts(self.config, self.shape.groups)
        self.engine = make_engine(*parts, skip_zero=skip, mode=mode)
        storage = self.config.transfer_queue.backend
        sorted_out = self.base_mode == "sync" and self.adaptive.longest_first
        road = Road(
            self._submit_batch_to_rollout,
            lambda: self.global_steps,
            self._dead,
            lambda: open_requests(self._named_servers()),
            stall=stall_seconds(self.adaptive, self.config.data.max_response_length),
            row_limit=storage.SimpleStorage.total_storage_size if storage.storage_backend == "SimpleStorage" else None,
            hands=lambda: len(getattr(self.agent_loop_manager, "agent_loop_workers", " ")) if sorted_out else 1,
            single_turn=single_turn(self.config),
            late=late_rewards(self.config),
        )
        self.session: Session | StreamSession
        if isinstance(self.engine, AsyncEngine):
            self.session = StreamSession(self.engine, self.stream, self.adaptive, road)
            self.replay_buffer.groups_per_prompt = self.shape.groups // self.config.data.train_batch_size
        else:
            self.session = Session(self.engine, self.stream, self.adaptive, road, self._abort, slots_of(self.config))
        self.replay_buffer.session = self.session
        # Validation goes through verl's own sampling; its 2 s poll would be most of a small model's step.
        self.replay_buffer.poll_interval = self.adaptive.poll_interval

    # -- a step ---------------------------------------------------------------------------------------------

    def _add_batch_to_generate(self) -> None:
        """What verl does first in a step: send its prompts. Ours: the first round, or what the window has room for."""
        if not self._warming_up:
            self.session.start()

    def _add_async_warmup_batches(self, num_warmup_batches: int | float) -> None:
        """verl's warm-up; the engine's window is that much wider and is filled when the first step begins.

        verl 0.9.0 has no such method: it calls ``_add_batch_to_generate`` from ``on_train_begin``.
        """

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self._layouts, self._rows, self._updates = [], [], 0
        batch = super().step(metrics, timing_raw)
        result = self.session.finish()
        with marked_timer("adaptive_commit", timing_raw):
            self.run_store.commit(self.global_steps, result, self.engine)
        longest = self.config.data.max_response_length
        times = self.session.times.metrics() if isinstance(self.session, Session) else None
        metrics.update(
            step_metrics(
                self.engine, result, self._layouts, updates=self._updates, max_response_length=longest, times=times
            )
        )
        metrics.update(self._watch.step(self.global_steps, result, batch))
        if result.note:
            logger.warning("%s", result.note)
        if self.engine.finished and self.global_steps < self.total_training_steps:
            reason = "adaptive.total_rollouts is spent" if self.adaptive.total_rollouts else "the sampler has finished"
            logger.warning("training ends after step %d: %s", self.global_steps, reason)
            self._ended_early = True
            self.total_training_steps = self.global_steps
        return batch

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        """A mini-step; one that has nothing to train on makes no update (why is in the step's note)."""
        try:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        except NothingLeft:
            return KVBatchMeta(partition_id=PARTITION, keys=[], tags=[])

    def on_train_begin(self) -> None:
        self._warming_up = True
        super().on_train_begin()
        self._warming_up = False
        if isinstance(self.session, StreamSession):
            lost = self.session.resend()
            if lost:
                logger.warning("%d prompts in flight were not in the checkpoint's queue and are rolled out anew", lost)
        if self.adaptive.record:
            root = self.adaptive.record
            if root is True:
                root = os.path.join(self.config.trainer.default_local_dir, "record")
            self._tape = Tape(root, self.engine)
        print("\n".join(banner(self)), flush=True)

    def _dead(self) -> list[str]:
        """Workers whose death would leave us waiting for rollouts that never come."""
        if self._liveness is None:
            actors = _named_workers(self.agent_loop_manager) | self._named_servers()
            actors |= {f"reward worker {i}": w for i, w in enumerate(self.get_reward_handles() or [])}
            self._liveness = Liveness(actors)
        return self._liveness.dead()

    def _validate(self) -> dict[str, float]:
        """verl's validation; what it measures goes to the journal, too."""
        metrics = super()._validate()
        if self._validation_prompts is None:
            try:
                _, column = identity_columns(self.val_dataset, self.config.data.get("prompt_key", "prompt"))
                self._validation_prompts = dict(Counter(column("data_source")))
            except Exception as error:  # somebody's own dataset class: readers do without, training goes on
                logger.warning("validation prompts cannot be counted by data source: %s", error)
                self._validation_prompts = {}
        self.run_store.validated(self.global_steps, metrics, self._validation_prompts, self.engine)
        self._watch.validated(self.global_steps, metrics, self._validation_prompts)
        return metrics

    def _servers(self) -> list[Any]:
        """Rollout servers, those of a pool of their own included."""
        if hasattr(super(), "_rollout_server_managers"):
            managers = self._rollout_server_managers()
        else:  # verl 0.9.0
            named = (getattr(self, f"{name}_server_manager", None) for name in ("llm", "standalone"))
            managers = [manager for manager in named if manager is not None]
        return [handle for manager in managers for handle in manager.server_handles]

    def _named_servers(self) -> dict[str, Any]:
        """Rollout servers, and those of a reward model: whatever a rollout may wait for."""
        model = getattr(self.reward_loop_manager, "reward_model_manager", None)
        named = {f"rollout server {i}": server for i, server in enumerate(self._servers())}
        return named | {f"reward model {i}": server for i, server in enumerate(getattr(model, "server_handles", ()))}

    def on_step_end(self) -> None:
        """verl skips the last checkpoint of a run that ends before its planned last step: saved where verl saves, while
        the rollout servers sleep. Afterwards they are awake, with the memory that gathering a model may need."""
        save_freq = self.config.trainer.save_freq
        if self._ended_early and save_freq > 0 and self.global_steps % save_freq:
            with marked_timer("save_checkpoint", self.timing_raw, color="green"):
                self._save_checkpoint()
        super().on_step_end()

    def on_train_end(self) -> None:
        """verl skips the last validation, too."""
        super().on_train_end()
        if self._ended_early:
            self.global_steps -= 1  # the loop has counted on
            trainer = self.config.trainer
            if trainer.test_freq > 0 and self.global_steps % trainer.test_freq:
                self.on_validate_begin()
                final = self._validate()
                self.on_validate_end()
                self.logger.log(data=final, step=self.global_steps)
                pprint(f"Final validation metrics: {final}")

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop; after it the journal and the record are closed (verl 0.9.1 returns from its last step at once)."""
        if self.base_mode == "sync":
            check_manager(self.config, agent_loop_manager, self.engine.policy)
        servers = {f"rollout server {i}": server for i, server in enumerate(self._servers())}
        stall = stall_seconds(self.adaptive, self.config.data.max_response_length)
        check_installed(_named_workers(agent_loop_manager) | servers, stall)
        try:
            super().fit(agent_loop_manager)
        finally:
            self.run_store.close()
            if self._tape is not None:
                self._tape.close()

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict | None = None) -> KVBatchMeta:
        """verl's, over all rows of the step; what trains of them is decided when they have their rewards."""
        return self.replay_buffer.judged(super()._compute_reward_colocate(batch, metrics=metrics))

    # -- minibatches ----------------------------------------------------------------------------------------

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> KVBatchMeta:
        """Lay the step's rows out in minibatches of groups; see :mod:`verl_adaptive.integration.layout`."""
        done: Batch = self.replay_buffer.last
        ranks = self._ranks()
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        size = (
            self.config.data.train_batch_size // self.parameter_sync_step
        )  # of a mini-step; verl checks that it divides
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        lengths = [tags[key]["seq_len"] if trains else 0 for key, trains in done.sequences]
        row_of = {key: i for i, key in enumerate(batch.keys)}
        sequence_row = np.array([row_of.get(key, PAD) for key, _ in done.sequences], dtype=np.int64)
        layout = plan(
            done.group,
            np.array(lengths, dtype=np.int64),
            done.ghost_tokens,
            np.array([trains for _, trains in done.sequences], dtype=bool),
            ranks=ranks,
            updates=max(1, size // actor.ppo_mini_batch_size),
            critic_updates=max(1, size // critic.ppo_mini_batch_size) if self.use_critic else 0,
            partition=_even,
            workload=lambda x: calculate_workload(torch.as_tensor(x, dtype=torch.int64)),
            passes=self._passes(),
        )
        self._layout = layout
        self._layouts.append(layout)
        self._rows.append(done.rows)
        real = layout.order != PAD
        layout.order[real] = sequence_row[layout.order[real]]
        pad_keys, pad_tags = self._padding(batch, layout.padding)
        pads = iter(range(len(pad_keys)))
        keys, new_tags = [], []
        for row in layout.order.tolist():
            at = next(pads) if row == PAD else row
            keys.append((pad_keys if row == PAD else batch.keys)[at])
            new_tags.append((pad_tags if row == PAD else batch.tags)[at])
        self._carry_ghosts(layout, keys, new_tags, batch.partition_id)
        costs = torch.tensor([tag["seq_len"] for tag in new_tags], dtype=torch.int64).tolist()
        share = len(keys) // ranks
        metrics.update(
            log_seqlen_unbalance(
                seqlen_list=costs,
                partitions=[list(range(r * share, (r + 1) * share)) for r in range(ranks)],
                prefix=logging_prefix,
            )
        )
        return KVBatchMeta(
            keys=keys, tags=new_tags, partition_id=batch.partition_id, fields=batch.fields, extra_info=batch.extra_info
        )

    def _ranks(self, role: str = "actor") -> int:
        """Data-parallel ranks of a role, which may differ: sequence, tensor and pipeline parallelism are each one's own."""
        if role == "ref":
            group, mesh = self.ref_policy_wg, "ref"
        else:
            group, mesh = (self.critic_wg, "train") if role == "critic" else (self.actor_rollout_wg, "actor")
        if mesh not in group._dispatch_info:
            group._dispatch_info[mesh] = group._query_dispatch_info(mesh)
        return max(group._dispatch_info[mesh]) + 1

    def _passes(self) -> list[Pass]:
        """What goes over the rows of a step."""
        every, critic = self.config.actor_rollout_ref, self.config.critic
        actor, rollout, ref, ranks = every.actor, every.rollout, every.ref, self._ranks()
        stages = _stages(actor)
        log_probs = None if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu
        passes = [
            Pass(ranks, "actor", None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu, stages),
            Pass(ranks, "none", log_probs, stages),
        ]
        # In the actor it is the actor without its adapter: another pass of the second kind.
        if self.use_reference_policy and not self.ref_in_actor:
            limit = None if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu
            passes.append(Pass(self._ranks("ref"), "none", limit, _stages(ref)))
        if self.use_critic:
            ranks, stages = self._ranks("critic"), _stages(critic)
            limits = [critic.get(f"{name}_micro_batch_size_per_gpu") for name in ("ppo", "forward")]
            train, infer = [None, None] if critic.use_dynamic_bsz else limits
            passes += [Pass(ranks, "critic", train, stages), Pass(ranks, "none", infer, stages)]
        return passes

    def _padding(self, batch: KVBatchMeta, count: int) -> tuple[list[str], list[dict]]:
        """Rows that weigh nothing; two tokens long where nothing but text trains, under FSDP.

        Where prompts have pictures, such a row may be the source itself: then the shortest of the batch.
        """
        if not count:
            return [], []
        every = self.config.actor_rollout_ref
        strategies = {every.actor.strategy, *([every.ref.strategy] if self.use_reference_policy else [])}
        if self.use_critic:
            strategies.add(self.config.critic.strategy)
        short = strategies <= {"fsdp", "fsdp2"} and self.processor is None
        lengths = [0 if self.processor is None else tag["seq_len"] for tag in batch.tags]
        at = int(np.argmin(lengths))
        source = tq.kv_batch_get(keys=[batch.keys[at]], partition_id=batch.partition_id)[0]
        row, tag = padding_row(source, batch.tags[at], self.tokenizer.eos_token_id, short=short)
        uid = f"pad{self.global_steps}x{self.local_trigger_step}"
        keys = [f"{uid}_{i}_0" for i in range(count)]
        rows = [{**row, "uid": uid, **({"session_id": i} if "session_id" in row else {})} for i in range(count)]
        tags = [dict(tag) for _ in range(count)]
        tq.kv_batch_put(
            keys=keys, partition_id=batch.partition_id, fields=tu.list_of_dict_to_tensordict(rows), tags=tags
        )
        return keys, tags

    def _carry_ghosts(self, layout: Layout, keys: list[str], tags: list[dict], partition_id: str) -> None:
        """Count the tokens of left-out rows in verl's loss denominator.

        verl divides by the sum of the minibatch's ``loss_mask``; the field serves nothing else in the actor's update
        (which masks by ``response_mask``), so one row per chunk carries the missing tokens in its first entry.
        """
        carriers = []
        for chunk, tokens in enumerate(layout.ghost_tokens.tolist()):
            at = layout.carrier(chunk)
            if tokens and not tags[at]["response_len"]:  # an aborted answer has no first entry
                at = max(layout.positions(chunk).tolist(), key=lambda i: tags[i]["response_len"])
            if tokens:
                carriers.append((keys[at], tokens))
        if not carriers:
            return
        names = [key for key, _ in carriers]
        data = tq.kv_batch_get(keys=names, partition_id=partition_id, select_fields=["loss_mask"])
        masks = [mask.clone() for mask in data["loss_mask"]]
        for mask, (_, tokens) in zip(masks, carriers, strict=True):
            mask[0] += tokens
        tq.kv_batch_put(
            keys=names,
            partition_id=partition_id,
            fields=tu.list_of_dict_to_tensordict([{"loss_mask": m} for m in masks]),
        )

    def _infer_rows(self, batch: KVBatchMeta, role: str, limit: int | None) -> KVBatchMeta:
        """The rows as a role's ranks take them, and a micro batch that verl's even split can make of them."""
        ranks = self._ranks(role)
        batch.extra_info.pop("micro_batch_size_per_gpu", None)  # of the pass before
        if limit is not None:
            settings = {"actor": self.config.actor_rollout_ref.actor, "critic": self.config.critic}
            stages = _stages(settings.get(role, self.config.actor_rollout_ref.ref))
            batch.extra_info["micro_batch_size_per_gpu"] = micro_size(len(batch) // ranks, limit, stages)
        return self._cut_for(batch, ranks)

    def _cut_for(self, batch: KVBatchMeta, ranks: int) -> KVBatchMeta:
        """The same rows in the order that a worker group of so many data-parallel ranks needs; shares ``extra_info``."""
        if ranks == self._layout.ranks:
            return batch
        lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
        order = self._layout.order_for(ranks, calculate_workload(lengths).numpy(), _even).tolist()
        return KVBatchMeta(
            keys=[batch.keys[i] for i in order],
            tags=[batch.tags[i] for i in order],
            partition_id=batch.partition_id,
            fields=batch.fields,
            extra_info=batch.extra_info,
        )

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = self._infer_rows(
            batch, "actor", self.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        )
        return super()._compute_old_log_prob(batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        every = self.config.actor_rollout_ref
        # With LoRA verl's reference is the actor without its adapter, in the actor's own micro batches.
        role, settings = ("actor", every.rollout) if self.ref_in_actor else ("ref", every.ref)
        super()._compute_ref_log_prob(
            self._infer_rows(batch, role, settings.log_prob_micro_batch_size_per_gpu), metrics
        )
        return batch

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        limit = self.config.critic.get("forward_micro_batch_size_per_gpu")
        super()._compute_values(self._infer_rows(batch, "critic", limit), metrics)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        done: Batch = self.replay_buffer.last
        # To a row without loss tokens opo gives NaN; gpg, the mean KL of a penalty and rollout_corr's means count it.
        seen = _without_padding(batch)
        loan = Loan(self.engine.policy.advantage, done.trained, done.position, list(seen.keys))
        with lend(loan):
            found = super()._compute_advantage(seen, metrics)
        if len(seen) < len(batch):
            self._fill_padding(batch, seen)
            found = KVBatchMeta(
                keys=batch.keys,
                tags=batch.tags,
                partition_id=batch.partition_id,
                fields=found.fields,
                extra_info=found.extra_info,
            )
        self._mend_alone(batch.partition_id, done)
        return found

    def _fill_padding(self, batch: KVBatchMeta, seen: KVBatchMeta) -> None:
        """Zeros in padding rows that the estimator has not seen, for what it and verl wrote into the others."""
        keys = sorted(set(batch.keys) - set(seen.keys))
        there = tq.kv_batch_get(keys=seen.keys[:1], partition_id=batch.partition_id).keys()
        names = [n for n in ("advantages", "returns", "token_level_rewards", "rollout_is_weights") if n in there]
        masks = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        rows = [{name: torch.zeros(len(mask)) for name in names} for mask in masks["response_mask"]]
        tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=tu.list_of_dict_to_tensordict(rows))

    def _mend_alone(self, partition_id: str, done: Batch) -> None:
        """Write the advantages that verl could not see; see :func:`~verl_adaptive.integration.rows.alone`."""
        algorithm = self.config.algorithm
        places, advantages = alone(
            done.result,
            self.engine.policy.advantage,
            estimator=str(algorithm.adv_estimator),
            # verl tells it to grpo alone: grpo_vectorized divides whatever it says
            by_std=algorithm.get("norm_adv_by_std_in_grpo", True) or algorithm.adv_estimator != "grpo",
        )
        if not len(places):
            return
        value = dict(zip(places.tolist(), advantages.tolist(), strict=True))
        rows = [
            (key, value[place])
            for (key, trains), place in zip(done.sequences, done.group.tolist(), strict=True)
            if trains and place in value
        ]
        keys = [key for key, _ in rows]
        masks = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["response_mask"])["response_mask"]
        fields = []
        for mask, (_, own) in zip(masks, rows, strict=True):
            mask = torch.zeros_like(mask) if self._forgo_terms and not own else mask
            fields.append({"advantages": own * mask.float(), "returns": own * mask.float(), "response_mask": mask})
        tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=tu.list_of_dict_to_tensordict(fields))

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        layout, limit = self._layout, self.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        sizes = {
            "mini_batch_size": layout.minibatch_rows,
            # sequence means are over real sequences, each of the step's with the same weight
            "global_batch_size": layout.sequences / layout.updates,
        }
        rows, stages = layout.minibatch_rows // layout.ranks, _stages(self.config.actor_rollout_ref.actor)
        with _edit(self, "actor_rollout_wg", "update_actor", sizes, rows, limit, stages):
            done = super()._update_actor(batch, metrics)
        self._updates += layout.updates * int(self.config.actor_rollout_ref.actor.ppo_epochs)
        return done

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        """verl's metrics, those of rewards and lengths over every row of the batch's groups."""
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        rows = Rows.join(self._rows)
        if rows.left_out:
            metrics.update(curves(rows, rewards=not self.config.algorithm.use_kl_in_reward))

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict, rollout_data_dir: str) -> None:
        """verl's dump of a step, of rollouts alone: padding would be failures that nobody generated."""
        super()._log_rollout_data(_without_padding(batch), timing_raw, rollout_data_dir)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        layout, limit = self._layout, self.config.critic.get("ppo_micro_batch_size_per_gpu")
        sizes = {
            "mini_batch_size": layout.critic_minibatch_rows,
            "global_batch_size": layout.sequences / layout.critic_updates,
        }
        ranks = self._ranks("critic")
        rows, stages = layout.critic_minibatch_rows // ranks, _stages(self.config.critic)
        with _edit(self, "critic_wg", "train_mini_batch", sizes, rows, limit, stages):
            super()._update_critic(self._cut_for(batch, ranks), metrics)
        return batch

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        # Before verl's own files: its "latest" marker must never name a step without a snapshot.
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        self.run_store.save(folder, self.global_steps, self.engine, self.session, self._watch)
        super()._save_checkpoint()
        self.run_store.saved(folder, self.global_steps)
        self.run_store.prune(self.config.trainer.default_local_dir)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        watched: Mapping[str, Any] | None = None
        if self.global_steps > 0:
            trainer = self.config.trainer
            folder = (
                trainer.resume_from_path
                if trainer.resume_mode == "resume_path"
                else os.path.join(trainer.default_local_dir, f"global_step_{self.global_steps}")
            )
            state = self.run_store.load(folder, self.global_steps, self.engine.policy)
            self._start_engine()
            if state is not None:
                self.engine.load_state_dict(state["engine"])
                self.session.load_state_dict(state["session"])
                watched = state["watch"]
                if self.engine.finished:
                    self.total_training_steps = self.global_steps
            else:
                self.session.load_state_dict(
                    {}
                )  # a plain run's prompts in flight are not ours: verl would send them again
        self._watch = Watch(
            self.adaptive,
            self.engine,
            repeated=self.run_store.repeated_share,
            longest=self.config.data.max_response_length,
            tracking=lambda: self.logger,
        )
        if watched is not None:
            self._watch.load_state_dict(watched)
        self.run_store.begin(self.global_steps, self.engine)


def _named_workers(manager: Any) -> dict[str, Any]:
    """A manager's agent-loop workers; one of somebody's own may have none."""
    return {f"agent-loop worker {i}": worker for i, worker in enumerate(getattr(manager, "agent_loop_workers", ()))}


def _show_our_log() -> None:
    """verl shows its own logger alone; ours goes the same way, at the same level."""
    ours = logging.getLogger("verl_adaptive")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
        ours.propagate = False


def _without_padding(batch: KVBatchMeta) -> KVBatchMeta:
    """The rows that are not padding; the batch itself if none is, or all are."""
    real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    if len(real) in (0, len(batch)):
        return batch
    return KVBatchMeta(
        keys=[batch.keys[i] for i in real],
        tags=[batch.tags[i] for i in real],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


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
def _edit(
    trainer: Any, group: str, method: str, sizes: dict[str, Any], rows: int, limit: int | None, multiple: int
) -> Iterator[None]:
    """Correct the sizes that verl writes into the batch, between its writing and its sending."""
    real = getattr(trainer, group)

    class Edited:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    def call(batch: KVBatchMeta) -> Any:
        batch.extra_info.update(sizes)
        batch.extra_info.pop("micro_batch_size_per_gpu", None)
        if limit is not None:
            batch.extra_info["micro_batch_size_per_gpu"] = micro_size(rows, limit, multiple)
        return getattr(real, method)(batch)

    edited = Edited()
    setattr(edited, method, call)
    setattr(trainer, group, edited)
    try:
        yield
    finally:
        setattr(trainer, group, real)


class AdaptiveSync(AdaptiveMixin, PPOTrainerSync):
    """verl's ``sync`` trainer, adaptive: what a step no longer needs is aborted before the weights are updated."""

    base_mode = "sync"

    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=CancellingClient)

    def on_step_end(self) -> None:
        super().on_step_end()
        self._abort.reopen()
