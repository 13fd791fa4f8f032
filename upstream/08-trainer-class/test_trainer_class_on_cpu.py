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

import verl
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls

CONFIG_DIR = Path(verl.__file__).parent / "trainer/config"


class Made(Exception):
    pass


class CustomTrainer(PPOTrainerSync):
    def __init__(self, config):
        raise Made(config.trainer.v1.trainer_mode)


NotATrainer = dict
FQN = f"{__name__}.CustomTrainer"


def test_the_mode_names_the_trainer_by_default():
    assert get_trainer_cls("sync") is PPOTrainerSync
    assert get_trainer_cls("sync", None) is PPOTrainerSync
    with pytest.raises(ValueError, match="Unknown trainer 'custom'"):
        get_trainer_cls("custom")


def test_a_class_name_wins():
    assert get_trainer_cls("sync", FQN) is CustomTrainer


@pytest.mark.parametrize(
    "name, error",
    [(f"{__name__}.NotATrainer", TypeError), (f"{__name__}.Missing", AttributeError), ("no.such.module", ImportError)],
)
def test_what_is_not_a_trainer_is_refused(name, error):
    with pytest.raises(error):
        get_trainer_cls("sync", name)


def test_the_task_runner_makes_it_and_the_mode_stays():
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base=None):
        config = compose("ppo_trainer", overrides=[f"trainer.v1.trainer_class={FQN}"])
    runner = TaskRunnerV1.__ray_metadata__.modified_class()

    with patch("transfer_queue.init"), patch("transfer_queue.close"), pytest.raises(Made, match="^sync$"):
        runner.run(config)


def test_generated_configs_have_the_key():
    for path in CONFIG_DIR.glob("_generated_ppo_*.yaml"):
        assert "    trainer_mode: sync\n    trainer_class: null\n" in path.read_text(), path.name
