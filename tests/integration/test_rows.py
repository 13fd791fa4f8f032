"""Padding rows, and rollouts that are alone in training: what verl gets to see of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN
from verl.utils.tensordict_utils import index_select_tensor_dict, list_of_dict_to_tensordict, maybe_fix_3d_position_ids

from verl_adaptive.advantages.verl import GROUP_RELATIVE, Verl, unseen_advantages
from verl_adaptive.config import RunFacts
from verl_adaptive.engine import StepResult
from verl_adaptive.groups import Groups
from verl_adaptive.integration.rows import longer, padding_row
from verl_adaptive.ledger import Ledger

IDS = torch.arange(9)
TEXT = {
    "uid": "u",
    "prompts": IDS[:5],
    "responses": IDS[5:],
    "input_ids": IDS,
    "attention_mask": torch.ones_like(IDS),
    "position_ids": IDS,
    "response_mask": torch.ones(4, dtype=torch.int64),
    "loss_mask": torch.ones(4, dtype=torch.int64),
    "rm_scores": torch.tensor([0.0, 0.0, 0.0, 1.0]),
    "multi_modal_inputs": {},
    "routed_experts": torch.ones(9, 2, 3, dtype=torch.int32),
}
PICTURE = {**TEXT, "position_ids": IDS.expand(4, 9), "multi_modal_inputs": {"pixel_values": torch.ones(3, 2)}}


#: A text among pictures: the positions of a multimodal model, and nothing to look at.
WORDS = {**TEXT, "position_ids": IDS.expand(4, 9)}


@pytest.mark.parametrize("source", [TEXT, WORDS], ids=["text", "words"])
@pytest.mark.parametrize("short", [True, False])
def test_padding_rows(source, short):
    row, tag = padding_row(dict(source), {"status": "success"}, 7, short=short)
    length = 2 if short and source is TEXT else SYNTHETIC_PADDING_SEQ_LEN
    assert {len(row[name]) for name in ("input_ids", "attention_mask", "routed_experts")} == {length}
    assert row["position_ids"].shape == (*source["position_ids"].shape[:-1], length)
    assert len(row["prompts"]) + len(row["responses"]) == length == tag["seq_len"] == tag["prompt_len"] + 1
    assert tag["is_padding"] and row["multi_modal_inputs"] == {}  # verl's own choice
    assert not row["response_mask"].any() and not row["loss_mask"].any() and not row["rm_scores"].any()
    assert source["attention_mask"].shape == (9,)  # the source is as it was


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("kind", [dict, lambda row: list_of_dict_to_tensordict([row])[0]], ids=["dict", "queue"])
def test_padding_rows_of_pictures(kind, short):
    """As any row of the batch to the model, whatever micro batch it is in; nothing of it counts."""
    given = {"status": "success", "prompt_len": 5, "response_len": 4, "seq_len": 9}
    row, tag = padding_row(kind(PICTURE), given, 7, short=short)
    for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "routed_experts"):
        assert row[name].equal(PICTURE[name])
    assert row["multi_modal_inputs"]["pixel_values"].equal(PICTURE["multi_modal_inputs"]["pixel_values"])
    assert tag == {**given, "is_padding": True} and "is_padding" not in given
    for name in ("response_mask", "loss_mask", "rm_scores"):
        assert row[name].shape == (4,) and not row[name].any() and PICTURE[name].any()


def selected(rows: list[dict]) -> list[torch.Tensor]:
    """Positions of the rows as the queue packs them, and verl's workers then take each by itself."""
    packed = torch.nested.as_nested_tensor([row["position_ids"] for row in rows], layout=torch.jagged)
    data = TensorDict({"position_ids": packed}, batch_size=len(rows))
    maybe_fix_3d_position_ids(data)
    return [index_select_tensor_dict(data, [i])["position_ids"].values() for i in range(len(rows))]


@pytest.mark.parametrize("source", [PICTURE, WORDS], ids=["picture", "words"])
def test_a_padding_row_that_is_longer(source):
    """Beside it a row of several axes of positions can be told by its length; alone, verl fails."""
    row, tag = padding_row(dict(source), {"prompt_len": 5, "response_len": 4, "seq_len": 9}, 7, short=False)
    more, more_tag = longer(row, tag, 7)
    length, answer = tag["seq_len"], tag["response_len"]
    assert (more_tag["seq_len"], more_tag["response_len"], more_tag["prompt_len"]) == (
        *(length + 1, answer + 1),
        tag["prompt_len"],
    )
    for name in (
        "input_ids",
        "attention_mask",
        "routed_experts",
        "responses",
        "response_mask",
        "loss_mask",
        "rm_scores",
    ):
        of = answer if name in ("responses", "response_mask", "loss_mask", "rm_scores") else length
        assert len(row[name]) == of and len(more[name]) == of + 1 and more[name][:-1].equal(row[name])
    assert more["input_ids"][-1] == more["responses"][-1] == 7 and more["attention_mask"][-1] == 1
    assert not more["response_mask"].any() and not more["loss_mask"].any() and not more["rm_scores"].any()
    assert more["position_ids"].diff(dim=-1).eq(1).all() and more["prompts"].equal(row["prompts"])
    for rows in ([row], [row, row]):
        with pytest.raises(RuntimeError, match="split_with_sizes"):  # passing means that none need be longer
            selected(rows)
    assert [got.shape for got in selected([row, more, row])] == [(4, length), (4, length + 1), (4, length)]


def test_verls_forward_without_pictures():
    """Why padding has pictures: a micro batch that has none fails. Passing means that verl's rows will do again."""
    qwen = pytest.importorskip("verl.models.transformers.qwen2_vl")
    from transformers import Qwen2VLConfig, Qwen2VLModel

    text = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 0, "intermediate_size": 8, "eos_token_id": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "bos_token_id": 1}
    vision = {"depth": 0, "embed_dim": 8, "hidden_size": 8, "num_heads": 1}
    model = Qwen2VLModel(Qwen2VLConfig(text_config={**text, **heads}, vision_config=vision))
    with pytest.raises(AttributeError, match="has no attribute 'mean'"):
        qwen._get_input_embeds(model, IDS[None], torch.ones(1, 9))


def result(rewards: list[list[float]], trains: list[list[int]], zero_row: list[list[int]] | None = None) -> StepResult:
    groups = Groups.from_lists(range(len(rewards)), rewards)
    flat = lambda lists: np.array([x for xs in lists for x in xs], dtype=bool)  # noqa: E731
    none = np.zeros(groups.rollouts, dtype=bool)
    outcome = np.full(len(groups), "trained", dtype=object)
    zero = none if zero_row is None else flat(zero_row)
    return StepResult(groups, outcome, flat(trains), zero, Ledger(), "", 1)


def role() -> Verl:
    made = Verl()
    made.facts = RunFacts(batch=2, n=4, steps=1, prompts=4)
    return made


def unseen(step: StepResult, **said):
    return unseen_advantages(step.groups, step.trains, step.zero_row, role(), **said)


def test_a_rollout_that_trains_among_ghosts_keeps_its_own():
    """A batch with one real row is no batch of equal rewards."""
    step = result([[1, 1], [1, 0, 0, 0]], [[0, 0], [1, 0, 0, 0]], [[1, 1], [0, 0, 0, 0]])
    places, advantage = unseen(step, estimator="grpo", by_std=True)
    assert places.tolist() == [1] and advantage[0] == pytest.approx(1.5, rel=1e-5)  # (1 - 1/4) / 0.5


def test_the_one_row_of_a_batch_of_equal_rewards_has_no_advantage():
    """Of a batch that is whole nothing is known: a KL penalty in the reward may tell its rows apart."""
    step = result([[1, 1], [0, 0]], [[1, 0], [0, 0]], [[0, 1], [1, 1]])
    places, advantage = unseen(step, estimator="adaptive_mine", by_std=True)
    assert places.tolist() == [0] and advantage.tolist() == [0]
    assert not len(unseen(result([[1, 1]], [[1, 1]]), estimator="grpo", by_std=True)[0])


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
@pytest.mark.parametrize("by_std", [True, False])
def test_one_of_many_gets_what_the_whole_group_implies(estimator, by_std):
    """As verl's own estimator says when it sees all of them; of one alone it takes the reward."""
    rewards = [[0.2, 0.9, 0.4, 0.4], [0.3, 0.3, 0.3], [1.0], [0.5, 1.0]]
    step = result(rewards, [[0, 1, 0, 0], [0, 0, 1], [1], [1, 1]])
    places, advantage = unseen(step, estimator=estimator, by_std=by_std)
    assert places.tolist() == [0, 1]  # a group of one is verl's business, and so is one that trains whole
    config = {"config": SimpleNamespace(), "norm_adv_by_std_in_grpo": by_std} if estimator.startswith("grpo") else {}
    whole, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=torch.tensor(rewards[0], dtype=torch.float64)[:, None],
        response_mask=torch.ones(4, 1),
        index=np.array(["g"] * 4),
        **config,
    )
    assert advantage[0] == pytest.approx(float(whole[1, 0]), rel=1e-5)
    assert advantage[1] == 0.0


def test_other_estimators_are_left_alone():
    step = result([[0.2, 0.9]], [[0, 1]])
    for estimator in ("gae", "adaptive_beta", "opo"):
        places, _ = unseen(step, estimator=estimator, by_std=True)
        assert not len(places)
