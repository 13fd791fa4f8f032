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
import torch

from verl.utils import seqlen_balancing
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions


def _workload(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return calculate_workload(torch.randint(1, 8192, (count,), generator=generator))


@pytest.mark.parametrize("equal_size", [True, False])
def test_tensors_and_arrays_give_the_partitions_of_the_list(equal_size):
    workload = _workload(64)
    expected = get_seqlen_balanced_partitions(workload.tolist(), k_partitions=4, equal_size=equal_size)

    assert get_seqlen_balanced_partitions(workload, k_partitions=4, equal_size=equal_size) == expected
    assert get_seqlen_balanced_partitions(workload.numpy(), k_partitions=4, equal_size=equal_size) == expected


def test_no_tensor_reaches_the_heap(monkeypatch):
    seen = []

    def karmarkar_karp(seqlen_list, **kwargs):
        seen.extend(type(value) for value in seqlen_list)
        return _karmarkar_karp(seqlen_list=seqlen_list, **kwargs)

    _karmarkar_karp = seqlen_balancing.karmarkar_karp
    monkeypatch.setattr(seqlen_balancing, "karmarkar_karp", karmarkar_karp)
    get_seqlen_balanced_partitions(_workload(16), k_partitions=4, equal_size=True)

    assert seen == [int] * 16
