"""Single rows of a step that verl would not weigh as they deserve: padding, and rollouts alone in their group."""

from __future__ import annotations

import numpy as np
import torch
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

from verl_adaptive.advantages.verl import EPSILON, GROUP_RELATIVE
from verl_adaptive.engine import StepResult
from verl_adaptive.roles import Advantage


def padding_row(source: dict, tag: dict, eos: int, *, short: bool, copied: bool = False) -> tuple[dict, dict]:
    """A row that weighs nothing: verl's own, one of two tokens, or the source itself where it has pictures.

    verl's are 128 tokens long, which context parallelism needs; with a small model they can cost more than the data.

    They are text. A micro batch of padding alone would then be one without pictures, which a batch of prompts with
    pictures has nowhere else, and which not every model takes: with transformers 5 verl's forward of Qwen2-VL and
    Qwen2.5-VL fails on it (``verl/models/transformers/qwen2_vl.py``, ``_get_input_embeds``), and where verl has no such
    branch, the ranks of FSDP would wait for each other in the vision tower. A row of the batch suits the model.

    Args:
        source: a row of the batch (a dict or a TensorDict), for the fields that rows have.
        tag: its tag.
        eos: the token to fill with.
        short: two tokens; only where text alone trains under FSDP. A source whose positions have several axes
            (multimodal models) gets verl's length all the same.
        copied: the source itself, whatever it has.

    Returns:
        The row and its tag.
    """
    if copied or ("multi_modal_inputs" in source.keys() and source["multi_modal_inputs"]):  # noqa: SIM118  # a TensorDict, too
        return _masked(source, tag)
    row, tag = construct_minimal_padding_template(source, tag, eos)
    if not short or row["position_ids"].dim() != 1:
        return row, tag
    for name in ("input_ids", "attention_mask", "teacher_ids", "teacher_logprobs", "routed_experts"):
        if isinstance(row.get(name), torch.Tensor):
            row[name] = row[name][-2:]
    row["prompts"] = row["prompts"][-1:]
    row["position_ids"] = row["position_ids"][:2]
    tag.update(prompt_len=1, response_len=1, seq_len=2)
    return row, tag


def _masked(source: dict, tag: dict) -> tuple[dict, dict]:
    """The row as it is, of which nothing counts."""
    row = {name: source[name] for name in source.keys()}  # noqa: SIM118
    for name in ("response_mask", "loss_mask", "rm_scores"):
        row[name] = torch.zeros_like(row[name])
    return row, {**tag, "is_padding": True}


def longer(row: dict, tag: dict, eos: int) -> tuple[dict, dict]:
    """A padding row with one token more at its end, which weighs nothing either.

    For :meth:`~verl_adaptive.integration.layout.Layout.uneven`.

    Returns:
        The row and its tag.
    """
    last = {"input_ids": eos, "responses": eos, "teacher_ids": eos, "attention_mask": 1}
    zeros = ("response_mask", "loss_mask", "rm_scores", "rollout_log_probs", "teacher_logprobs", "routed_experts")
    row = dict(row)
    for name, value in {**last, **dict.fromkeys(zeros, 0)}.items():
        if isinstance(row.get(name), torch.Tensor):
            row[name] = torch.cat([row[name], row[name].new_full((1, *row[name].shape[1:]), value)])
    row["position_ids"] = torch.cat([row["position_ids"], row["position_ids"][..., -1:] + 1], dim=-1)
    return row, {**tag, "response_len": tag["response_len"] + 1, "seq_len": tag["seq_len"] + 1}


def unseen_advantages(
    result: StepResult, role: Advantage, *, estimator: str, by_std: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Trained groups whose advantage verl cannot see in the rows that it gets, and what it is.

    Two kinds. A batch of which every row has zero advantage keeps one row all the same, for verl to have a step:
    that row's advantage is 0. And where one rollout trains of a group that was observed with more, verl's
    group-relative estimators would take its reward itself for the advantage (mean 0, std 1); it gets what the whole
    group implies, as GRPO (verl's unbiased std) or RLOO define it. A KL penalty in the reward is not in it: these two
    compare penalties, too, and the rows left out have none. Estimators of ours see the whole group anyway.

    Args:
        result: of the step, or of the mini-step.
        estimator: ``algorithm.adv_estimator``.
        by_std: ``algorithm.norm_adv_by_std_in_grpo``.

    Returns:
        int64 ``(k,)`` positions among the trained groups, in submission order; float64 ``(k,)`` the advantage of whatever
        rows of them train.
    """
    inside = result.groups.rollout_mask(result.trained)
    groups, trains, zero_row = result.groups.select(result.trained), result.trains[inside], result.zero_row[inside]
    count = groups.sum(trains.astype(np.float64))
    if zero_row.any() and not (trains & ~role.zero(groups, trains | zero_row)).any():
        at = np.flatnonzero(count > 0)
        return at, np.zeros(len(at))
    if estimator not in GROUP_RELATIVE:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    at = np.flatnonzero((count == 1) & (groups.n > 1))
    mean, n = groups.mean(groups.reward), groups.n
    off = groups.reward - mean[groups.group_of]
    own = groups.sum(np.where(trains, off, 0.0))[at]
    if estimator.startswith("rloo"):
        own = own * (n / np.maximum(n - 1, 1))[at]
    elif by_std:
        own = own / (np.sqrt(groups.sum(off**2) / np.maximum(n - 1, 1))[at] + EPSILON)
    return at, np.where(groups.spread(groups.reward)[at] == 0, 0.0, own)
