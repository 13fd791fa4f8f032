"""Our trainers: verl's own, with the engine deciding what is rolled out and what trains.

:class:`AdaptiveMixin` overrides the few methods through which prompts, batches and checkpoints pass, and
:class:`~verl_adaptive.integration.minibatches.MinibatchMixin` those that hand rows to the workers; the loop, the workers, the
losses and the logging are verl's.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pprint import pprint
from typing import Any

import ray
from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.workers.rollout.llm_server import LLMServerClient

from verl_adaptive.engine import AsyncEngine, Engine, make_engine
from verl_adaptive.integration.abort import Abort, CancellingClient
from verl_adaptive.integration.async_client import AsyncRolloutClient, NothingLeft
from verl_adaptive.integration.checks import OUR_BUFFER, check_manager
from verl_adaptive.integration.dataloader import DataloaderPrompts, identity_columns
from verl_adaptive.integration.facts import identity_of
from verl_adaptive.integration.minibatches import MinibatchMixin, StepState
from verl_adaptive.integration.monitor import Monitor
from verl_adaptive.integration.polling import PARTITION, Liveness, bounded, check_installed, open_requests
from verl_adaptive.integration.queue import bound_queue
from verl_adaptive.integration.replay_buffer import AdaptiveReplayBuffer
from verl_adaptive.integration.rollout_client import RolloutHandles
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.integration.run_store import RunStore
from verl_adaptive.integration.status_messages import gather
from verl_adaptive.integration.step_metrics import banner, step_metrics
from verl_adaptive.integration.sync_client import SyncRolloutClient
from verl_adaptive.record import Recorder

logger = logging.getLogger(__name__)


class AdaptiveMixin(MinibatchMixin):
    """The policy, put into one of verl's trainers.

    Attributes:
        is_adaptive: what the replay buffer asks for: under a preset it refuses a trainer of verl's own.
        plan: what the run will do.
    """

    is_adaptive = True
    replay_buffer: AdaptiveReplayBuffer
    total_training_steps: int

    def __init__(self, config: Any) -> None:
        _show_our_log()
        self.plan = plan = RunPlan.of(config)
        with open_dict(config):
            config.trainer.v1.sampler.custom_sampler = OUR_BUFFER  # options of a group without a preset do not name it
            if plan.policy.advantage.estimator is not None:
                config.algorithm.adv_estimator = plan.estimator
        self.stream: DataloaderPrompts  # with the data set: these four
        self.run_store: RunStore
        self.engine: Engine
        self.rollout_client: SyncRolloutClient | AsyncRolloutClient
        self._monitor: Monitor  # from the loading of the checkpoint on
        self._abort = Abort(
            lambda: list(self._loop_workers.values()),
            self._servers,
            lambda: self.checkpoint_manager,
            plan.stall,
            plan.engines * plan.slots,
            gated=config.actor_rollout_ref.rollout.name != "sglang",
        )
        self._now = StepState()
        self._ended_early = False
        self._warming_up = False
        self._recorder: Recorder | None = None
        self._liveness: Liveness | None = None
        self._loop_workers: dict[str, Any] = {}  # of the agent loop, by name; a manager of one's own may have none
        self._validation_prompts: dict[str, int] | None = None  # data source → prompts
        super().__init__(config)

    # -- prompts --------------------------------------------------------------------------------------------

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        data, sampler = self.config.data, self.plan.policy.sampler
        self.run_store = RunStore(self.config, self.plan, self.train_dataset)
        self.plan = self.run_store.plan
        self.run_store.check_start()
        self.stream = DataloaderPrompts(
            self.train_dataset,
            create_rl_sampler(data, self.train_dataset),
            chunk=(data.get("gen_batch_size", None) or self.plan.batch) if sampler.whole_batches else 1,
            workers=data["dataloader_num_workers"],
        )
        self.train_dataloader = self.stream.loader  # verl checkpoints it
        self._start_engine()

    def _start_engine(self) -> None:
        """Bind the policy to the table; again after a resume, which brings a table of its own."""
        plan = self.plan
        self.engine = make_engine(
            *(plan.policy, self.run_store.table, plan.adaptive, plan.facts, self.run_store.row_of, self.stream),
            skip_zero=plan.skip_zero,
            async_facts=plan.async_facts,
        )
        sorted_by_length = plan.async_facts is None and plan.adaptive.longest_first
        handles = RolloutHandles(
            self._submit_batch_to_rollout,
            lambda: self.global_steps,
            self._dead,
            lambda: open_requests(self._named_servers()),
            stall=plan.stall,
            row_limit=plan.row_limit,
            workers=lambda: len(self._loop_workers) if sorted_by_length else 1,
            single_turn=plan.single_turn,
            late=plan.late,
        )
        if isinstance(self.engine, AsyncEngine):
            self.rollout_client = AsyncRolloutClient(self.engine, self.stream, handles)
            self.replay_buffer.groups_per_prompt = plan.groups // plan.batch
        else:
            self.rollout_client = SyncRolloutClient(
                self.engine, self.stream, handles, self._abort, plan.engines * plan.slots
            )
        self.replay_buffer.rollout_client = self.rollout_client

    # -- a step ---------------------------------------------------------------------------------------------

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        """verl's; the next prompts go to the next workers.

        verl deals from the first worker on, which would get every top-up that is sent by itself: of eight workers, a third of all
        that AERO and Pilot-Commit generate.
        """
        sent = super()._submit_batch_to_rollout(batch)
        if workers := getattr(self.agent_loop_manager, "agent_loop_workers", []):
            turn = sent % len(workers)
            workers[:] = workers[turn:] + workers[:turn]
        return sent

    def _add_batch_to_generate(self) -> None:
        """What verl does first in a step: send its prompts. Ours: the first round, or what the window has room for."""
        if not self._warming_up:
            self.rollout_client.start()

    def _add_async_warmup_batches(self, num_warmup_batches: int | float) -> None:
        """verl's warm-up; the engine's window is that much wider and is filled when the first step begins.

        verl 0.9.0 has no such method: it calls ``_add_batch_to_generate`` from ``on_train_begin``.
        """

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self._now = now = StepState()
        batch = super().step(metrics, timing_raw)
        result = self.rollout_client.finish()
        with marked_timer("adaptive_commit", timing_raw):
            self.run_store.commit(self.global_steps, result, self.engine)
        more = {"updates": now.updates, "max_response_length": self.plan.longest}
        times = self.rollout_client.timings.metrics() if isinstance(self.rollout_client, SyncRolloutClient) else None
        metrics.update(step_metrics(self.engine, result, now.layouts, times=times, **more))
        metrics.update(self._monitor.step(self.global_steps, result, self.rollout_client.batch.keys))
        if result.note:
            logger.warning("%s", result.note)
        if self.engine.finished and self.global_steps < self.total_training_steps:
            finished = self.engine.policy.sampler.finished
            reason = "the sampler has finished" if finished else "adaptive.total_rollouts is spent"
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
        if isinstance(self.rollout_client, AsyncRolloutClient):
            lost = self.rollout_client.resend()
            if lost:
                logger.warning("%d prompts in flight were not in the checkpoint's queue and are rolled out anew", lost)
        root = self.plan.adaptive.record
        if root:
            if root is True:
                root = os.path.join(self.config.trainer.default_local_dir, "record")
            self._recorder = Recorder(root, self.engine)
        print("\n".join(banner(self)), flush=True)

    def _dead(self) -> list[str]:
        """Workers whose death would leave us waiting for rollouts that never come."""
        if self._liveness is None:
            actors = self._loop_workers | self._named_servers()
            actors |= {f"reward worker {i}": w for i, w in enumerate(self.get_reward_handles() or [])}
            self._liveness = Liveness(actors)
        return self._liveness.dead()

    def _validate(self) -> dict[str, float]:
        """Run verl's validation, and record its metrics in the journal."""
        metrics = super()._validate()
        if self._validation_prompts is None:
            try:
                _, column = identity_columns(self.val_dataset, identity_of(self.config))
                self._validation_prompts = dict(Counter(column("data_source")))
            except Exception as error:  # somebody's own dataset class: readers do without, training goes on
                logger.warning("validation prompts cannot be counted by data source: %s", error)
                self._validation_prompts = {}
        self.run_store.validated(self.global_steps, metrics, self._validation_prompts, self.engine)
        self._monitor.validated(self.global_steps, metrics, self._validation_prompts)
        return metrics

    def _servers(self) -> list[Any]:
        """Rollout servers, those of a pool of their own included."""
        managers = (getattr(self, f"{name}_server_manager", None) for name in ("llm", "standalone"))
        return [handle for manager in managers if manager is not None for handle in manager.server_handles]

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
        if self.plan.async_facts is None:
            check_manager(self.config, agent_loop_manager, self.plan.policy)
        servers = {f"rollout server {i}": server for i, server in enumerate(self._servers())}
        workers = getattr(agent_loop_manager, "agent_loop_workers", ())
        self._loop_workers = {f"agent-loop worker {i}": worker for i, worker in enumerate(workers)}
        check_installed(self._loop_workers | servers, self.plan.stall)
        ray.get([worker.__ray_call__.remote(gather) for worker in workers])
        bound_queue(self.plan.stall)
        blocked = "an agent loop, a tool or a reward function blocks its worker, which has not taken further prompts"
        agent_loop_manager.generate_sequences = bounded(agent_loop_manager.generate_sequences, self.plan.stall, blocked)
        try:
            super().fit(agent_loop_manager)
        finally:
            self.run_store.close()
            if self._recorder is not None:
                self._recorder.close()

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict | None = None) -> KVBatchMeta:
        """verl's, over all rows of the step; what trains of them is decided when they have their rewards."""
        return self.replay_buffer.judged(super()._compute_reward_colocate(batch, metrics=metrics))

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        # Before verl's own files: its "latest" marker must never name a step without a snapshot.
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        self.run_store.save(folder, self.global_steps, self.engine, self.rollout_client, self._monitor)
        self.stream.loader.weights_saved = partial(self.run_store.saved, folder, self.global_steps)
        super()._save_checkpoint()
        self.run_store.prune(self.config.trainer.default_local_dir)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        watched: Mapping[str, Any] | None = None
        if self.global_steps > 0 and not self.plan.only_validates:
            trainer = self.config.trainer
            folder = (
                trainer.resume_from_path
                if trainer.resume_mode == "resume_path"
                else os.path.join(trainer.default_local_dir, f"global_step_{self.global_steps}")
            )
            state = self.run_store.load(folder, self.global_steps)
            self._start_engine()
            if state is not None:
                self.engine.load_state_dict(state["engine"])
                self.rollout_client.load_state_dict(state["rows"])
                watched = state["monitor"]
                if self.engine.finished:
                    self.total_training_steps = self.global_steps
            else:  # a plain run's prompts in flight are not ours: verl would send them again
                self.rollout_client.load_state_dict({})
        self._monitor = Monitor(
            self.plan.adaptive,
            self.engine,
            longest=self.plan.longest,
            tracking=lambda: self.logger,
        )
        if watched is not None:
            self._monitor.load_state_dict(watched)
        self.run_store.begin(self.global_steps)


def _show_our_log() -> None:
    """verl shows its own logger alone; ours goes the same way, at the same level."""
    ours = logging.getLogger("verl_adaptive")
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
        ours.propagate = False


class AdaptiveSync(AdaptiveMixin, PPOTrainerSync):
    """verl's ``sync`` trainer, adaptive: what a step no longer needs is aborted before the weights are updated."""

    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=CancellingClient)

    def on_step_end(self) -> None:
        super().on_step_end()
        self._abort.reopen()
