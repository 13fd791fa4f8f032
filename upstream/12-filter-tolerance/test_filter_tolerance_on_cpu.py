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
"""Groups of equal rewards are found whatever the reward is; ``np.std`` is positive for many of them."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_dir

import verl
from verl.trainer.config import FilterGroupsConfig
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

CONFIG_DIR = Path(verl.__file__).parent / "trainer/config"


def _filtered(monkeypatch, groups: dict[str, list[float]], metric: str = "acc", **kwargs) -> set[str]:
    buffer = ReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=1,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        refill_fn=lambda count: None,
        filter_groups_metric=metric,
        **kwargs,
    )
    values = {f"{uid}_{i}_0": value for uid, group in groups.items() for i, value in enumerate(group)}
    buffer.partitions = defaultdict(dict, {"train": {key: {} for key in values}})
    buffer.finished_keys = defaultdict(set, {"train": set(groups)})

    def kv_batch_get(keys, partition_id, select_fields):
        if select_fields == ["rm_scores"]:
            return {"rm_scores": [torch.tensor([0.0, values[key]]) for key in keys]}
        return {"extra_fields": [{"reward_extra_info": {"acc": values[key]}} for key in keys]}

    monkeypatch.setattr(tq, "kv_batch_get", kv_batch_get)
    return buffer._dapo_filtered_keys("train")[0]


@pytest.mark.parametrize("n", [5, 10, 64])
def test_every_constant_group_is_filtered(monkeypatch, n):
    groups = {f"u{i}": [i / 100] * n for i in range(101)}
    missed = {uid for uid, group in groups.items() if np.std(group) != 0.0}
    assert missed, "numpy has learnt to take the standard deviation of equal numbers: this test shows nothing any more"

    assert _filtered(monkeypatch, groups) == set(groups)


def test_a_difference_is_kept(monkeypatch):
    groups = {"equal": [1.0, 1.0], "noise": [1.0, 1.0 + 1e-9], "mixed": [0.0, 1.0], "single": [1.0]}
    assert _filtered(monkeypatch, groups) == {"equal"}


def test_tolerance_takes_noise_for_equal(monkeypatch):
    groups = {"equal": [1.0, 1.0], "noise": [1.0, 1.0 + 1e-9], "mixed": [0.0, 1.0], "single": [1.0]}
    assert _filtered(monkeypatch, groups, filter_groups_tolerance=1e-6) == {"equal", "noise"}
    assert _filtered(monkeypatch, groups, metric="reward", filter_groups_tolerance=1e-6) == {"equal", "noise"}


def test_the_config_reaches_the_buffer():
    overrides = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.tolerance=0.01"]
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    trainer = PPOTrainer.__new__(type("Trainer", (PPOTrainer,), {"on_step_end": None, "on_sample_end": None}))
    trainer.config, trainer.trainer_mode = config, "sync"

    assert trainer._build_replay_buffer().filter_groups_tolerance == 0.01


def test_the_dataclass_and_the_generated_configs_have_the_key():
    assert FilterGroupsConfig().tolerance == 0.0
    for path in CONFIG_DIR.glob("_generated_ppo_*.yaml"):
        assert "    metric: reward\n    tolerance: 0.0\n" in path.read_text(), path.name
