"""Padding: rows of a step that weigh nothing."""

from __future__ import annotations

import torch
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template


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
