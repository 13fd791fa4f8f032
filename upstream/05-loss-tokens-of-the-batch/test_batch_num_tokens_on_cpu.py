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
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

import verl
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import get_batch_num_tokens

ENGINES = ["fsdp", "megatron", "veomni", "torchtitan", "automodel"]


def _mask(nested: bool) -> torch.Tensor:
    rows = [torch.tensor([1, 1, 0, 1]), torch.tensor([1, 0]), torch.tensor([1])]
    if nested:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("nested", [True, False])
def test_default_is_the_sum_of_the_mask(nested):
    data = TensorDict({"loss_mask": _mask(nested)}, batch_size=3)
    assert get_batch_num_tokens(data).item() == 5


def test_samples_left_out_count_where_the_batch_says_so():
    data = TensorDict({"loss_mask": _mask(True), "loss_tokens": torch.tensor([3, 1, 1 + 40])}, batch_size=3)
    assert get_batch_num_tokens(data).item() == 45


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("loss_tokens, expected", [(None, 5), ([3, 1, 41], 45)])
def test_every_micro_batch_gets_the_number_of_the_mini_batch(process_group, monkeypatch, loss_tokens, expected):
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    data = TensorDict({"loss_mask": _mask(True), "input_ids": _mask(True)}, batch_size=3)
    if loss_tokens is not None:
        data["loss_tokens"] = torch.tensor(loss_tokens)
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    seen = []

    def forward_step(micro_batch, loss_function, forward_only):
        seen.append(micro_batch["batch_num_tokens"])
        return torch.zeros(()), {"loss": 0.0, "metrics": {}, "model_output": {}}

    engine = SimpleNamespace(
        ulysses_sequence_parallel_size=1,
        get_data_parallel_group=lambda: process_group,
        get_data_parallel_size=lambda: 1,
        forward_step=forward_step,
    )
    FSDPEngine.forward_backward_batch(engine, data, loss_function=None, forward_only=True)

    assert seen == [expected] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_counts_for_itself(engine):
    # Most of these engines cannot be imported on CPU.
    source = (Path(verl.__file__).parent / "workers/engine" / engine / "transformer_impl.py").read_text()
    assert "batch_num_tokens = get_batch_num_tokens(data)" in source
    assert 'batch_num_tokens = data["loss_mask"]' not in source
