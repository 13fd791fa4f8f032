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
"""What the tag of a trajectory says, so that a sampler can decide without fetching the trajectory."""

import asyncio

import pytest
import torch
import transfer_queue as tq

from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ


class _Worker:
    """The methods that ``_agent_loop_postprocess`` calls; the real one needs a model and servers."""

    score: float | None = 0.5

    async def _compute_score(self, outputs, kwargs):
        outputs[-1].reward_score = self.score
        outputs[-1].extra_fields["reward_extra_info"] = {}

    async def _compute_teacher_logprobs(self, *args, **kwargs):
        return

    def _compute_multi_modal_inputs(self, output, input_ids):
        return {}

    def _compute_position_ids(self, input_ids, attention_mask, multi_modal_inputs):
        return torch.arange(input_ids.size(1)).unsqueeze(0)

    _agent_loop_postprocess = AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess


def _output(response_mask: list[int]) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=list(range(len(response_mask))),
        response_mask=response_mask,
        metrics=AgentLoopMetrics(),
    )


@pytest.fixture
def put(monkeypatch):
    calls = []

    async def async_kv_batch_put(**kwargs):
        calls.append(kwargs)

    monkeypatch.setattr(tq, "async_kv_batch_put", async_kv_batch_put)
    return calls


def _run(worker: _Worker, outputs: list[AgentLoopOutput]) -> None:
    asyncio.run(worker._agent_loop_postprocess(outputs, validate=False, uid="u", session_id=0, global_steps=1))


def test_every_output_of_a_session_carries_the_score_and_its_own_loss_tokens(put):
    # The second turn's middle token is a tool's answer and does not enter the loss.
    _run(_Worker(), [_output([1, 1]), _output([1, 0, 1, 1])])

    (call,) = put
    assert call["keys"] == ["u_0_0", "u_0_1"]
    assert [tag["score"] for tag in call["tags"]] == [0.5, 0.5]
    assert [tag["loss_tokens"] for tag in call["tags"]] == [2, 3]
    assert [type(tag["score"]) for tag in call["tags"]] == [float, float]
    scores = [row.sum().item() for row in call["fields"]["rm_scores"]]
    assert scores == [tag["score"] for tag in call["tags"]]


def test_a_reward_that_comes_after_sampling_leaves_the_score_empty(put):
    worker = _Worker()
    worker.score = None
    _run(worker, [_output([1, 1])])

    assert put[0]["tags"][0]["score"] is None
    assert put[0]["tags"][0]["loss_tokens"] == 2


def test_padding_scores_nothing():
    source = {"position_ids": torch.arange(4), "prompts": torch.ones(3)}
    _, tag = construct_minimal_padding_template(source, {"score": 1.0, "loss_tokens": 7}, eos_token_id=0)

    assert (tag["score"], tag["loss_tokens"]) == (0.0, 0)
