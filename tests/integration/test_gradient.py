"""Loss honesty: leaving out rows of zero advantage, and padding, change no gradient, under verl's own loss.

A tiny model stands for the actor. The reference is the gradient of every row, in plain GRPO's minibatches; against it
stands what the layout sends: fewer rows, padding rows, and denominators as the trainer writes them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.integration.test_layout import even
from verl_adaptive.integration.layout import PAD, plan

pytest.importorskip("verl")
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
VOCAB, WIDTH = 11, 7


class Actor(torch.nn.Module):
    """Token logits from the token before: enough to have gradients everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, 16)
        self.head = torch.nn.Linear(16, VOCAB)

    def log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embed(tokens[:, :-1]))).log_softmax(-1)
        return logits.gather(-1, tokens[:, 1:, None])[..., 0]


def gradient(actor, tokens, old, advantage, mask, mode, *, batch_tokens, sequences, loss_mode):
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=8,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        loss_scale_factor=WIDTH,
        policy_loss={"loss_mode": loss_mode},
    )
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=batch_tokens, global_batch_size=sequences, loss_scale_factor=WIDTH
    )
    actor.zero_grad()
    loss, _ = get_policy_loss_fn(loss_mode)(
        old_log_prob=old,
        log_prob=actor.log_probs(tokens),
        advantages=advantage,
        response_mask=mask.bool(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=None,
    )
    loss.backward()
    return torch.cat([p.grad.flatten() for p in actor.parameters()])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("equal", [True, False], ids=["groups of 8", "groups of any size"])
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "cispo"])
def test_left_out_rows_change_no_gradient(mode, equal, loss_mode):
    rng = np.random.default_rng(5)
    sizes = np.full(12, 8) if equal else rng.integers(2, 12, size=12)
    group = np.repeat(np.arange(12), sizes)
    rows, updates = len(group), 3
    rate = np.tile([0.5, 0.0, 0.6, 1.0], 3)  # every minibatch has groups of both kinds
    reward = torch.tensor((rng.random(rows) < rate[group]).astype(np.float32))
    tokens = torch.tensor(rng.integers(0, VOCAB, size=(rows, WIDTH + 1)))
    lengths = rng.integers(1, WIDTH + 1, size=rows)
    mask = (torch.arange(WIDTH)[None] < torch.tensor(lengths)[:, None]).float()
    rewards = torch.zeros(rows, WIDTH)
    rewards[torch.arange(rows), torch.tensor(lengths) - 1] = reward
    advantage, _ = compute_grpo_outcome_advantage(rewards, mask, np.array([f"g{g}" for g in group]))
    actor = Actor()
    old = actor.log_probs(tokens).detach() + 0.2 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))

    flat = np.array([len(set(reward[group == g].tolist())) == 1 for g in range(12)])
    assert flat.any() and not flat.all()
    trains = ~flat[group]
    layout = plan(
        group,
        lengths + 3,
        np.where(trains, 0, lengths),
        trains,
        ranks=1,
        updates=updates,
        partition=even,
        micro=(None, None),
    )
    assert layout.updates == updates
    # as the trainer sends it: padding rows of mask 0, loss_mask of the carrier plus the ghosts' tokens
    pad_tokens, pad_mask = torch.zeros(1, WIDTH + 1, dtype=torch.long), torch.zeros(1, WIDTH)
    total_real = layout.sequences / layout.updates
    groups_of_chunk = np.array_split(np.arange(12), updates)
    for c in range(updates):
        sent = layout.order[c * layout.rows_per_chunk : (c + 1) * layout.rows_per_chunk]
        pick = lambda x, pad, sent=sent: torch.cat([x[[r]] if r != PAD else pad for r in sent])  # noqa: E731
        loss_mask_sum = float(mask[sent[sent != PAD]].sum()) + float(layout.ghost_tokens[c])
        lean = gradient(
            actor,
            pick(tokens, pad_tokens),
            pick(old, pad_mask),
            pick(advantage, pad_mask),
            pick(mask, pad_mask),
            mode,
            batch_tokens=loss_mask_sum,
            sequences=total_real,
            loss_mode=loss_mode,
        )
        members = np.isin(group, groups_of_chunk[c])
        full = gradient(
            actor,
            tokens[members],
            old[members],
            advantage[members],
            mask[members],
            mode,
            batch_tokens=float(mask[members].sum()),
            # equal groups: verl's own ppo_mini_batch_size * n; else every sequence of the step weighs the same
            sequences=float(members.sum()) if equal else rows / updates,
            loss_mode=loss_mode,
        )
        assert len(sent[sent != PAD]) < members.sum()
        torch.testing.assert_close(lean, full, rtol=1e-5, atol=1e-7)
        assert full.abs().max() > 1e-4
