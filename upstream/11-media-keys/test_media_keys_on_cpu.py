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

import datasets
import pytest
from omegaconf import OmegaConf

from verl.utils.dataset.rl_dataset import RLHFDataset


def _dataset(rows: list[dict], tmp_path, **settings) -> RLHFDataset:
    path = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).to_parquet(path)
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(tmp_path), **settings})
    return RLHFDataset(path, tokenizer=None, config=config)


ROW = {"prompt": [{"role": "user", "content": "2 + 2?"}], "data_source": "sums"}


@pytest.mark.parametrize(
    "settings, keys",
    [
        ({}, {"images": "images", "videos": "videos", "audios": "audios"}),
        ({"image_key": "picture"}, {"images": "picture", "videos": "videos", "audios": "audios"}),
    ],
)
def test_keys_are_where_the_dataset_looks(tmp_path, settings, keys):
    assert _dataset([ROW], tmp_path, **settings).media_keys == keys


def test_items_keep_none_of_those_columns(tmp_path):
    row = {**ROW, "picture": [], "videos": [], "clip": "kept"}
    item = _dataset([row], tmp_path, image_key="picture")[0]
    assert {"picture", "videos", "clip"} & item.keys() == {"clip"}


def test_a_subclass_may_add_one(tmp_path):
    class WithDepth(RLHFDataset):
        @property
        def media_keys(self):
            return {**super().media_keys, "depths": "depth"}

    dataset = _dataset([{**ROW, "depth": []}], tmp_path)
    dataset.__class__ = WithDepth
    assert "depth" not in dataset[0]
