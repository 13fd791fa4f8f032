"""verl's replay buffer, with the review in it: training batches come from the rollout client, validation stays verl's."""

from __future__ import annotations

from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_adaptive.errors import ConfigError
from verl_adaptive.integration.async_client import AsyncRolloutClient
from verl_adaptive.integration.polling import PARTITION
from verl_adaptive.integration.sync_client import SyncRolloutClient


class AdaptiveReplayBuffer(ReplayBufferAsync):
    """Of all trainer modes, named by every preset in ``trainer.v1.sampler.custom_sampler``.

    So a trainer of verl's own that makes it was chosen although the command line asks for a preset: training would go
    on without the policy, and it refuses.

    Attributes:
        rollout_client: from the trainer, when it has its data set.
        groups_per_prompt: ``adaptive.batch_unit=rollouts`` makes several groups of a prompt of ``data.train_batch_size``.
    """

    rollout_client: SyncRolloutClient | AsyncRolloutClient
    groups_per_prompt: int = 1

    def __init__(self, **kwargs: Any) -> None:
        owner = getattr(kwargs.get("refill_fn"), "__self__", None)
        if not getattr(owner, "is_adaptive", False):
            raise ConfigError(
                "trainer.v1.trainer_mode",
                kwargs.get("trainer_mode"),
                f"the command line asks for an adaptive preset, but verl chose {type(owner).__name__}. Take sync, "
                "colocate_async or separate_async; if it is one of them, this process did not load the plugin: see "
                "`verl-adaptive doctor` (VERL_USE_EXTERNAL_PLUGINS must not leave it out)",
            )
        super().__init__(**kwargs)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """The batch of the step, or of the mini-step; for validation, verl's own sampling."""
        if partition_id != PARTITION:
            self.rollout_client.wait_for_partition(partition_id, batch_size)
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if isinstance(self.rollout_client, SyncRolloutClient) and self.rollout_client.handles.late:
            keys, tags = self.rollout_client.wait_for_all()
            return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), {}
        return self._batch(self.rollout_client), {}

    def judged(self, batch: KVBatchMeta) -> KVBatchMeta:
        """What trains of a step whose rollouts have their rewards by now; other batches stay as they are."""
        if batch.partition_id != PARTITION:
            return batch
        made = self._batch(self.rollout_client)
        made.extra_info = batch.extra_info
        return made

    def _batch(self, client: SyncRolloutClient | AsyncRolloutClient) -> KVBatchMeta:
        batch = client.complete()
        return KVBatchMeta(partition_id=PARTITION, keys=batch.keys, tags=batch.tags)

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """Groups that are ready, or back and not reviewed, in prompts of a batch: ``separate_async`` asks for its idle GPUs."""
        assert isinstance(self.rollout_client, AsyncRolloutClient)
        return self.rollout_client.sampleable() // self.groups_per_prompt

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> tuple[set[str], dict]:
        """Review what comes back until ``target_count`` prompts' groups are ready; of a validation, verl's own."""
        if partition_id != PARTITION:
            return super().wait_for_sampleable(global_steps, partition_id, target_count)
        assert isinstance(self.rollout_client, AsyncRolloutClient)
        self.rollout_client.wait_for(target_count * self.groups_per_prompt)
        return set(), {}
