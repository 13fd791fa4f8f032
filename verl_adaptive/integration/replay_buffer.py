"""verl's replay buffer, with the review in it: training batches come from the session, validation stays verl's."""

from __future__ import annotations

from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_adaptive.errors import ConfigError
from verl_adaptive.integration.session import PARTITION, Batch, Session

__all__ = ["AdaptiveReplayBuffer"]


class AdaptiveReplayBuffer(ReplayBuffer):
    """Chosen by every preset through ``trainer.v1.sampler.custom_sampler``.

    Under a trainer of verl's own it refuses to work: training would go on without the policy.
    """

    def __init__(self, **kwargs: Any) -> None:
        owner = getattr(kwargs.get("refill_fn"), "__self__", None)
        if not getattr(owner, "is_adaptive", False):
            mode = kwargs.get("trainer_mode")
            raise ConfigError(
                "trainer.v1.trainer_mode",
                mode,
                f"an adaptive preset needs our trainer of that mode: trainer.v1.trainer_mode=adaptive_{mode} "
                "(leave the key out for adaptive_sync)",
            )
        super().__init__(**kwargs)
        self.session: Session | None = None
        self.last: Batch | None = None

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """The step's batch; for validation, verl's own sampling."""
        if partition_id != PARTITION or self.session is None:
            return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        self.last = self.session.complete()
        return KVBatchMeta(partition_id=partition_id, keys=self.last.keys, tags=self.last.tags), {}
