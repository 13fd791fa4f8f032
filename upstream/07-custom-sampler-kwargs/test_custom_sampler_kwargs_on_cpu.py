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

from pathlib import Path
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import verl
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

CONFIG_DIR = Path(verl.__file__).parent / "trainer/config"
KWARGS = "trainer.v1.sampler.custom_sampler.kwargs"


class _Sampler(ReplayBuffer):
    def __init__(self, *, target: float = 0.5, **kwargs):
        super().__init__(**kwargs)
        self.target = target


@pytest.fixture(scope="module")
def config():
    overrides = [
        "trainer.v1.sampler.custom_sampler.path=custom.py",
        "trainer.v1.sampler.custom_sampler.name=Sampler",
        f"+{KWARGS}.target=0.7",
        f"+{KWARGS}.poll_interval=0.1",
    ]
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def _build(config, **changes):
    """The replay buffer of a trainer with this configuration; changes are written below ``trainer.v1``."""
    config = config.copy()
    for key, value in changes.items():
        OmegaConf.update(config, f"trainer.v1.{key.replace('__', '.')}", value, merge=False)
    trainer = PPOTrainer.__new__(type("Trainer", (PPOTrainer,), {"on_step_end": None, "on_sample_end": None}))
    trainer.config, trainer.trainer_mode = config, config.trainer.v1.trainer_mode
    with patch("verl.trainer.ppo.v1.trainer_base.load_extern_type", return_value=_Sampler):
        return trainer._build_replay_buffer()


def test_kwargs_of_the_config_reach_the_constructor(config):
    sampler = _build(config)

    assert (sampler.target, sampler.poll_interval) == (0.7, 0.1)
    assert sampler.refill_fn is not None  # the trainer's own are there all the same


def test_without_kwargs_nothing_changes(config):
    sampler = _build(config, sampler__custom_sampler__kwargs={})
    assert (sampler.target, sampler.poll_interval) == (0.5, 2.0)


def test_an_unknown_keyword_is_an_error(config):
    with pytest.raises(TypeError, match="tragte"):
        _build(config, sampler__custom_sampler__kwargs={"tragte": 0.7})


@pytest.mark.parametrize("mode, kind", [("sync", ReplayBuffer), ("colocate_async", ReplayBufferAsync)])
def test_built_in_samplers_do_not_take_them(config, mode, kind):
    sampler = _build(config, trainer_mode=mode, sampler__custom_sampler__path=None)
    assert type(sampler) is kind and sampler.poll_interval == 2.0


def test_generated_configs_have_the_key():
    for path in CONFIG_DIR.glob("_generated_ppo_*.yaml"):
        assert "        name: null\n        kwargs: {}\n      sampler_kwargs: {}\n" in path.read_text(), path.name
