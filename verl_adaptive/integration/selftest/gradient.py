"""Rows of zero advantage, left out and kept: the gradient of the tiny model on this machine's device.

    python -m verl_adaptive.integration.selftest.gradient FOLDER/model OUT.json

The model, verl's ``ppo_loss`` and its cut into micro batches are real; the rows are laid out as the trainer lays them out.
A sum in another order differs by rounding, so what is allowed is measured: the same rows in reversed order. And the
test is shown to see something: without the left-out rows' tokens in the denominator the gradient is another.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

from verl_adaptive.integration.layout import PAD, Pass, plan

__all__ = ["examine"]

GROUPS, SIZE, PROMPT, LONGEST = 8, 8, 6, 12


def examine(model_dir: str, dtype: str) -> dict[str, Any]:
    """Compare gradients in a dtype.

    Args:
        model_dir: of the model.
        dtype: ``float32`` or ``bfloat16``.

    Returns:
        ``difference``: relative norm of (left out − kept); ``rounding``: of the kept rows in two orders;
        ``without_tokens``: of a wrong denominator; ``ok``.
    """
    from hydra import compose, initialize_config_module
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).to(device)  # type: ignore[arg-type]
    with initialize_config_module("verl.trainer.config", version_base=None):
        words = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
        actor = omega_conf_to_dataclass(compose("ppo_trainer", overrides=words).actor_rollout_ref.actor)
    rng, vocabulary = np.random.default_rng(3), model.config.vocab_size
    count = GROUPS * SIZE
    group = np.repeat(np.arange(GROUPS), SIZE)
    rate = np.tile([0.5, 0.0, 0.6, 1.0], GROUPS // 4)[group]
    reward = (rng.random(count) < rate).astype(np.float32)
    reward[np.searchsorted(group, np.arange(0, GROUPS, 2))] = 1.0  # every second group has both
    reward[np.searchsorted(group, np.arange(0, GROUPS, 2)) + 1] = 0.0
    length = rng.integers(2, LONGEST + 1, size=count)
    ids = [torch.tensor(rng.integers(0, vocabulary, size=PROMPT + n)) for n in length]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in length], batch_first=True)
    scores = torch.zeros(mask.shape)
    scores[torch.arange(count), torch.tensor(length) - 1] = torch.tensor(reward)
    advantage, _ = compute_grpo_outcome_advantage(scores, mask, np.array([f"g{g}" for g in group]))
    flat = np.array([len(set(reward[group == g])) == 1 for g in range(GROUPS)])
    trains = ~flat[group]

    def log_probs(packed: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.utils.rnn.pad_sequence(list(packed.split(lengths.tolist())), batch_first=True)
        seen = torch.arange(rows.shape[1], device=rows.device)[None] < lengths[:, None].to(rows.device)
        logits = model(rows, attention_mask=seen.long()).logits.float().log_softmax(-1)
        return logits.gather(-1, rows.roll(-1, 1)[..., None])[..., 0][seen]

    rows = []
    for i, own in enumerate(ids):
        ones = torch.ones(int(length[i]), dtype=torch.int64)
        with torch.no_grad():
            old = log_probs(own.to(device), torch.tensor([len(own)]))[PROMPT - 1 : -1].cpu()
        drift = torch.from_numpy(rng.normal(0, 0.2, size=len(ones))).float()
        rows.append(
            {
                **{"input_ids": own, "attention_mask": torch.ones_like(own), "position_ids": torch.arange(len(own))},
                **{"prompts": own[:PROMPT], "responses": own[PROMPT:], "response_mask": ones, "loss_mask": ones},
                **{"old_log_probs": old + drift, "advantages": advantage[i, : len(ones)]},
            }
        )
    padding = {name: value[:1] for name, value in rows[0].items()}
    padding["input_ids"] = padding["attention_mask"] = torch.ones(2, dtype=torch.int64)
    padding["position_ids"] = torch.arange(2)
    for name in ("response_mask", "loss_mask", "old_log_probs", "advantages"):
        padding[name] = torch.zeros_like(padding[name])

    def gradient(sent: list[dict[str, torch.Tensor]], sequences: float) -> torch.Tensor:
        columns = {n: torch.nested.as_nested_tensor([r[n] for r in sent], layout=torch.jagged) for n in sent[0]}
        data = TensorDict(columns, batch_size=len(sent))
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=120,
            batch_num_tokens=float(sum(r["loss_mask"].sum() for r in sent)),
            global_batch_size=sequences,
            dp_size=1,
        )
        model.zero_grad()
        for micro in prepare_micro_batches(data)[0]:
            packed = micro["input_ids"]
            made = log_probs(packed.values().to(device), packed.offsets().diff())
            loss, _ = partial(ppo_loss, actor)(model_output={"log_probs": made}, data=micro.to(device))
            loss.backward()
        return torch.cat([p.grad.float().flatten().cpu() for p in model.parameters() if p.grad is not None])

    layout = plan(
        group,
        length + PROMPT,
        np.where(trains, 0, length),
        trains,
        ranks=1,
        updates=2,
        partition=lambda cost, k: get_seqlen_balanced_partitions(cost.tolist(), k_partitions=k, equal_size=True),
        passes=[Pass(1, "actor")],
    )
    worst = {"difference": 0.0, "rounding": 0.0}
    control = np.inf
    for chunk, members in enumerate(np.array_split(np.arange(GROUPS), 2)):
        kept = [rows[i] for i in np.flatnonzero(np.isin(group, members))]
        sequences = layout.sequences / layout.updates
        whole = gradient(kept, sequences)
        size = float(whole.norm())
        sent = [dict(rows[i]) if i != PAD else dict(padding) for i in layout.order[layout.positions(chunk)]]
        forgotten = gradient(sent, sequences)
        at = int(np.flatnonzero(layout.positions(chunk) == layout.carrier(chunk))[0])
        sent[at]["loss_mask"] = sent[at]["loss_mask"].clone()
        sent[at]["loss_mask"][0] += int(layout.ghost_tokens[chunk])
        lean = gradient(sent, sequences)
        worst["difference"] = max(worst["difference"], float((lean - whole).norm()) / size)
        worst["rounding"] = max(worst["rounding"], float((gradient(kept[::-1], sequences) - whole).norm()) / size)
        control = min(control, float((forgotten - whole).norm()) / size)
    allowed = max(8 * worst["rounding"], 1e-6)
    ok = worst["difference"] <= allowed < control
    return {**worst, "allowed": allowed, "without_tokens": control, "left_out": int((~trains).sum()), "ok": bool(ok)}


def machine() -> dict[str, Any]:
    """The accelerators of this process."""
    if not torch.cuda.is_available():
        return {"accelerators": []}
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"accelerators": names, "cuda": torch.version.cuda, "bfloat16": torch.cuda.is_bf16_supported()}


def main() -> None:
    found = machine()
    kinds = ["float32", *(["bfloat16"] if found.get("bfloat16") else [])]
    result = {"machine": found, "gradient": {kind: examine(sys.argv[1], kind) for kind in kinds}}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
