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

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN, construct_minimal_padding_template
from verl.trainer.ppo.v1.trainer_base import PPOTrainer


def _source() -> tuple[dict, dict]:
    sample = {
        "prompts": torch.arange(5),
        "responses": torch.arange(3),
        "input_ids": torch.arange(8),
        "position_ids": torch.arange(8),
        "routed_experts": torch.ones(8, 2, 4, dtype=torch.int16),
        "teacher_ids": torch.ones(8, 3, dtype=torch.int64),
        "teacher_logprobs": torch.ones(8, 3),
    }
    return sample, {"prompt_len": 5, "response_len": 3, "seq_len": 8}


@pytest.mark.parametrize("seq_len", [2, 16, SYNTHETIC_PADDING_SEQ_LEN])
def test_every_field_of_the_template_has_the_length(seq_len):
    sample, tag = construct_minimal_padding_template(*_source(), eos_token_id=7, seq_len=seq_len)

    for name in ("input_ids", "attention_mask", "position_ids", "routed_experts", "teacher_ids", "teacher_logprobs"):
        assert sample[name].size(0) == seq_len, name
    assert (sample["prompts"].size(0), sample["responses"].size(0)) == (seq_len - 1, 1)
    assert (tag["prompt_len"], tag["response_len"], tag["seq_len"]) == (seq_len - 1, 1, seq_len)
    assert tag["is_padding"] and sample["response_mask"].sum() == 0


def test_default_length_is_safe_for_context_parallelism():
    assert construct_minimal_padding_template(*_source(), eos_token_id=7)[1]["seq_len"] == SYNTHETIC_PADDING_SEQ_LEN


def test_a_prompt_and_a_response_token_are_the_least():
    with pytest.raises(AssertionError, match="seq_len=1"):
        construct_minimal_padding_template(*_source(), eos_token_id=7, seq_len=1)


def _trainer(actor="fsdp", ref=None, critic=None, processor=None) -> PPOTrainer:
    trainer = PPOTrainer.__new__(type("Trainer", (PPOTrainer,), {"on_step_end": None, "on_sample_end": None}))
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"strategy": actor, "ppo_mini_batch_size": 2},
                "ref": {"strategy": ref},
                "rollout": {"n": 2},
            },
            "critic": {"strategy": critic, "ppo_mini_batch_size": 2},
            "trainer": {"critic_warmup": 0},
        }
    )
    trainer.use_reference_policy, trainer.use_critic = ref is not None, critic is not None
    trainer.processor, trainer.global_steps = processor, 1
    trainer.tokenizer = SimpleNamespace(eos_token_id=7)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    return trainer


@pytest.mark.parametrize(
    "settings, length",
    [
        ({"actor": "fsdp", "ref": "fsdp2", "critic": "fsdp"}, 2),
        ({"actor": "megatron"}, SYNTHETIC_PADDING_SEQ_LEN),
        ({"actor": "fsdp", "ref": "megatron"}, SYNTHETIC_PADDING_SEQ_LEN),
        ({"actor": "fsdp2", "critic": "veomni"}, SYNTHETIC_PADDING_SEQ_LEN),
        ({"actor": "fsdp", "processor": object()}, SYNTHETIC_PADDING_SEQ_LEN),
    ],
)
def test_short_where_no_engine_splits_a_sequence(settings, length):
    assert _trainer(**settings)._get_padding_seq_len() == length


def test_balance_batch_pads_with_that_length(monkeypatch):
    sample, tag = _source()
    monkeypatch.setattr(padding_utils.tq, "kv_batch_get", lambda keys, partition_id: [sample])
    monkeypatch.setattr(padding_utils.tq, "kv_batch_put", lambda **kwargs: None)
    batch = KVBatchMeta(partition_id="train", keys=["u_0_0", "u_1_0", "u_2_0"], tags=[dict(tag) for _ in range(3)])

    padded = _trainer()._balance_batch(batch, metrics={})

    assert sorted(tag["seq_len"] for tag in padded.tags) == [2, 8, 8, 8]
