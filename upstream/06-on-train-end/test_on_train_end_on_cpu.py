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

from unittest.mock import MagicMock, patch

import pytest
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.v1.trainer_base import PPOTrainer

MODULE = "verl.trainer.ppo.v1.trainer_base"


class _Trainer(PPOTrainer):
    """The loop of ``fit``, with steps that do nothing."""

    def __init__(self, total_training_steps: int, total_epochs: int):
        self.config = OmegaConf.create(
            {
                "trainer": {
                    "project_name": "p",
                    "experiment_name": "e",
                    "logger": [],
                    "val_before_train": False,
                    "total_epochs": total_epochs,
                    "save_freq": -1,
                    "test_freq": -1,
                },
                "global_profiler": {"steps": None, "profile_continuous_steps": False},
            }
        )
        self.global_steps, self.steps_per_epoch, self.total_training_steps = 0, 2, total_training_steps
        self.trainer_mode = "sync"
        self.events = []
        self._init_dump_executor()

    def step(self, metrics, timing_raw):
        self.events.append(f"step {self.global_steps}")
        if self.stop_after == self.global_steps:
            self.total_training_steps = self.global_steps
        return KVBatchMeta(partition_id="train", keys=[], tags=[])

    stop_after = None

    def _compute_metrics(self, *args, **kwargs):
        pass

    def on_step_end(self):
        pass

    def on_sample_end(self):
        pass

    def on_train_end(self):
        assert not self._dump_executor._shutdown, "callbacks may still dump"
        self.events.append("end")

    def run(self):
        names = ("Tracking", "ValidationGenerationsLogger", "DapoFilteredRewardTableLogger", "SkipManager", "tq")
        patches = [patch(f"{MODULE}.{name}", MagicMock()) for name in names]
        for p in patches:
            p.start()
        try:
            self.fit(agent_loop_manager=None)
        finally:
            for p in patches:
                p.stop()
        return self.events


def test_called_when_the_planned_steps_are_done():
    assert _Trainer(total_training_steps=3, total_epochs=9).run() == ["step 1", "step 2", "step 3", "end"]


def test_called_when_the_epochs_are_over():
    assert _Trainer(total_training_steps=9, total_epochs=1).run() == ["step 1", "step 2", "end"]


def test_called_when_a_step_ends_the_run_early():
    trainer = _Trainer(total_training_steps=9, total_epochs=9)
    trainer.stop_after = 2
    assert trainer.run() == ["step 1", "step 2", "end"]


@pytest.mark.parametrize("total_training_steps, total_epochs", [(3, 9), (9, 1)])
def test_the_dump_executor_is_shut_down(total_training_steps, total_epochs):
    trainer = _Trainer(total_training_steps, total_epochs)
    trainer.run()
    assert trainer._dump_executor._shutdown
