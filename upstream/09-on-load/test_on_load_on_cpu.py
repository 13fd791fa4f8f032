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

from unittest.mock import MagicMock

import pytest
import torch
from omegaconf import OmegaConf

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.trainer_base import PPOTrainer


class _Recorder(CheckpointCallback):
    def __init__(self, config=None):
        super().__init__(config)
        self.loads = []

    def on_load(self, trainer, global_step, checkpoint_dir, **kwargs):
        # Everything else is restored by now.
        trainer.actor_rollout_wg.load_checkpoint.assert_called_once()
        trainer.train_dataloader.load_state_dict.assert_called_once_with({"position": 7})
        self.loads.append((global_step, checkpoint_dir))


def _trainer(root, **settings) -> PPOTrainer:
    trainer = PPOTrainer.__new__(type("Trainer", (PPOTrainer,), {"on_step_end": None, "on_sample_end": None}))
    trainer.config = OmegaConf.create(
        {
            "trainer": {
                "resume_mode": "auto",
                "default_local_dir": str(root),
                "del_local_ckpt_after_load": False,
                "default_hdfs_dir": None,
                **settings,
            }
        }
    )
    trainer.use_critic, trainer.trainer_mode = False, "sync"
    trainer.actor_rollout_wg, trainer.train_dataloader = MagicMock(), MagicMock()
    trainer.checkpoint_callback = _Recorder()
    return trainer


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    torch.save({"position": 7}, folder / "data.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def test_called_once_with_the_step_and_its_folder(checkpoint):
    trainer = _trainer(checkpoint.parent)
    trainer._load_checkpoint()
    assert trainer.checkpoint_callback.loads == [(3, str(checkpoint))]


def test_called_for_the_folder_that_the_user_names(checkpoint):
    trainer = _trainer("elsewhere", resume_mode="resume_path", resume_from_path=str(checkpoint))
    trainer._load_checkpoint()
    assert trainer.checkpoint_callback.loads == [(3, str(checkpoint))]


@pytest.mark.parametrize("settings", [{"resume_mode": "disable"}, {}])
def test_not_called_when_training_starts_from_scratch(tmp_path, settings):
    trainer = _trainer(tmp_path, **settings)
    trainer._load_checkpoint()
    assert trainer.global_steps == 0 and trainer.checkpoint_callback.loads == []


def test_the_base_class_does_nothing():
    CheckpointCallback().on_load(trainer=None, global_step=1, checkpoint_dir="x", later="context")


def test_a_callback_that_raises_stops_the_run(checkpoint):
    trainer = _trainer(checkpoint.parent)
    trainer.checkpoint_callback.on_load = MagicMock(side_effect=RuntimeError("torn"))
    with pytest.raises(RuntimeError, match="torn"):
        trainer._load_checkpoint()
