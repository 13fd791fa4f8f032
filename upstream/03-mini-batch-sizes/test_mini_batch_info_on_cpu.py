# Copyright 2026 Bytedance Ltd. and/or its affiliates
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

import pytest
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.v1.trainer_base import PPOTrainer


class _WorkerGroup:
    """Records what the workers would read from ``extra_info``."""

    def update_actor(self, batch):
        self.extra_info = dict(batch.extra_info)
        return {"metrics": {"mfu": [0.5]}}

    def train_mini_batch(self, batch):
        output = self.update_actor(batch)
        return type("Future", (), {"get": lambda self: output})()


class _Trainer(PPOTrainer):
    def __init__(self):
        common = {
            "ppo_epochs": 1,
            "data_loader_seed": 1,
            "shuffle": False,
            "calculate_entropy": False,
            "entropy_coeff": 0.0,
        }
        self.config = OmegaConf.create(
            {
                "actor_rollout_ref": {
                    "actor": {"ppo_mini_batch_size": 4, **common},
                    "rollout": {"n": 8, "temperature": 1.0},
                },
                "critic": {"ppo_mini_batch_size": 6, **common},
                "trainer": {"critic_warmup": 0},
            }
        )
        self.global_steps, self.use_critic = 1, True
        self.distillation_config = None
        self.actor_rollout_wg, self.critic_wg = _WorkerGroup(), _WorkerGroup()

    def on_step_end(self):
        pass

    def on_sample_end(self):
        pass


class _UnevenGroups(_Trainer):
    """A batch of two mini-batches, whatever the size of its groups."""

    def _get_mini_batch_info(self, role):
        return {**super()._get_mini_batch_info(role), "mini_batch_size": 10, "micro_batch_size_per_gpu": 5}


def _sizes(trainer: PPOTrainer, role: str) -> dict:
    batch = KVBatchMeta(partition_id="train", keys=["u_0_0"], tags=[{}])
    update, group = (
        (trainer._update_actor, trainer.actor_rollout_wg)
        if role == "actor"
        else (trainer._update_critic, trainer.critic_wg)
    )
    update(batch, {})
    return {key: value for key, value in group.extra_info.items() if "batch_size" in key}


@pytest.mark.parametrize("role, rows", [("actor", 32), ("critic", 48)])
def test_default_is_mini_batch_size_times_n(role, rows):
    assert _sizes(_Trainer(), role) == {"mini_batch_size": rows, "global_batch_size": rows}


@pytest.mark.parametrize("role, rows", [("actor", 32), ("critic", 48)])
def test_an_override_reaches_the_workers(role, rows):
    assert _sizes(_UnevenGroups(), role) == {
        "mini_batch_size": 10,
        "global_batch_size": rows,
        "micro_batch_size_per_gpu": 5,
    }


def test_the_batch_is_padded_to_the_same_sizes():
    assert _Trainer()._get_required_batch_multiple(dp_size=2) == 96
    assert _UnevenGroups()._get_required_batch_multiple(dp_size=2) == 10
