"""A tiny transformer, arithmetic with one right answer a question, and a careless teacher.

Questions are ``+``, ``-`` and ``*`` of two numbers of two to four digits, least significant first, one token for each
column of two digits, in a layout of fixed length, so that batches need no padding. The model first imitates a teacher who forgets to carry half of the time
and to borrow four times of five, and whose products are noise: pass rates then run from solved (nothing to carry) over
all degrees (one to four carries) to hopeless (products). A response is right if it is *the* answer, so one forward pass
gives the exact pass rate of every question at temperature 1.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

DIGITS = 4
PROMPT = DIGITS + 2  # operator, columns of two digits, "="
RESPONSE = DIGITS + 2  # digits, a last carry, the end
ABSENT, PLUS, MINUS, TIMES, EQUALS, END, COLUMN = 10, 11, 12, 13, 14, 15, 16  # COLUMN + 10 x + y: digits x and y
OUTPUTS, VOCABULARY = COLUMN, COLUMN + 100

#: Operator, share of the questions, fewest digits, chance that the teacher forgets a carry or borrow.
TASKS = ((PLUS, 0.45, 2, 0.5), (MINUS, 0.40, 2, 0.8), (TIMES, 0.15, 3, 0.0))

NAMES = {PLUS: "sums", MINUS: "differences", TIMES: "products"}

Cache: TypeAlias = "list[tuple[Tensor, Tensor]]"


@dataclass
class Questions:
    """``M`` questions: ``prompt`` int64 ``(M, PROMPT)``, ``answer`` int64 ``(M, RESPONSE)`` filled up with END, and
    ``code`` int64 ``(M,)``, different for different questions."""

    prompt: Tensor
    answer: Tensor
    code: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def sources(self) -> list[str]:
        """What would be verl's ``data_source``: the operation."""
        return [NAMES[operator] for operator in self.prompt[:, 0].tolist()]

    @property
    def learnable(self) -> np.ndarray:
        """bool ``(M,)``: no products, of which the teacher knows nothing."""
        return (self.prompt[:, 0] != TIMES).numpy()

    def seen(self, rates: np.ndarray) -> np.ndarray:
        """float64 ``(M,)``: pass rates as far as a question shows them: of each operation, the best linear fit of these rates to the
        digits, carries and borrows."""
        operator, columns = self.prompt[:, 0].numpy(), self.prompt[:, 1:-1].numpy()
        there, a, b = columns >= COLUMN, (columns - COLUMN) // 10, (columns - COLUMN) % 10
        flags = (there, there & (a + b >= 10), there & (a < b))
        out = np.zeros(len(rates))
        for at in (operator == one for one in np.unique(operator)):
            shown = np.stack([np.ones(at.sum()), *(flag[at].sum(1) for flag in flags)], axis=1)
            out[at] = np.clip(shown @ np.linalg.lstsq(shown, rates[at], rcond=None)[0], 0.02, 0.98)
        return out

    def pick(self, chosen: np.ndarray) -> Questions:
        """Those questions only."""
        at = torch.as_tensor(chosen)
        return Questions(self.prompt[at], self.answer[at], self.code[chosen])


def make_questions(count: int, rng: np.random.Generator, careless: bool = False) -> Questions:
    """Random questions, with the right answers or with the careless teacher's."""
    task = rng.choice(len(TASKS), size=count, p=[share for _, share, _, _ in TASKS])
    operator, fewest = np.array([t[0] for t in TASKS])[task], np.array([t[2] for t in TASKS])[task]
    slip = np.array([t[3] for t in TASKS])[task] if careless else np.zeros(count)
    length = rng.integers(fewest, DIGITS + 1)
    scale = 10**length
    a, b = rng.integers(0, scale), rng.integers(0, scale)
    minus = operator == MINUS
    a, b = np.where(minus, np.maximum(a, b), a), np.where(minus, np.minimum(a, b), b)
    answer = np.full((count, RESPONSE), END)
    prompt = np.full((count, PROMPT), ABSENT)
    prompt[:, 0], prompt[:, -1] = operator, EQUALS
    carry = np.zeros(count, dtype=np.int64)
    product = rng.integers(0, scale) if careless else a * b % scale
    for i in range(DIGITS):
        here = i < length
        x, y = a // 10**i % 10, b // 10**i % 10
        prompt[here, 1 + i] = (COLUMN + 10 * x + y)[here]
        kept = carry * (rng.random(count) >= slip)
        value = np.where(minus, x - y - kept, x + y + kept)
        digit = np.where(operator == TIMES, product // 10**i % 10, value % 10)
        answer[here, i] = digit[here]
        carry = np.where(here, (value < 0) | (value > 9), carry)
    last = (operator == PLUS) & (carry * (rng.random(count) >= slip) > 0)
    answer[last, length[last]] = 1
    code = ((operator * 10 + length) * 10**DIGITS + a) * 10**DIGITS + b
    return Questions(torch.from_numpy(prompt), torch.from_numpy(answer), code)


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows, length, hidden = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, hidden))
        return x + self.down(functional.gelu(self.up(self.between(x)))), (k, v)


class TinyModel(nn.Module):
    """A decoder of a few layers with learned positions.

    Args:
        layers, hidden, heads: its size.
    """

    def __init__(self, layers: int = 2, hidden: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, hidden), nn.Embedding(PROMPT + RESPONSE, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, OUTPUTS, bias=False)

    def forward(self, ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Log-probabilities of the next token ``(rows, length, OUTPUTS)``, and the keys and values so far.

        ``past`` is of all tokens before ``ids``, which is then one token a row.
        """
        x, now = self.trunk(ids, past)
        return self.head(x).log_softmax(-1), now

    def trunk(self, ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """What the head reads ``(rows, length, hidden)``, and the keys and values so far."""
        start = 0 if past is None else past[0][0].shape[2]
        x = self.token(ids) + self.position.weight[start : start + ids.shape[1]]
        now = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, None if past is None else past[i])
            now.append(kv)
        return self.norm(x), now

    def log_probs(self, prompt: Tensor, response: Tensor) -> Tensor:
        """Log-probability of every token of the responses, ``(rows, RESPONSE)``."""
        out, _ = self(torch.cat([prompt, response[:, :-1]], 1))
        return out[:, PROMPT - 1 :].gather(-1, response[..., None])[..., 0]


class Critic(nn.Module):
    """A model's trunk with a head for the expected reward, as PPO's critic starts from the actor's model."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.model.head = nn.Linear(model.head.in_features, 1)  # type: ignore[assignment]
        nn.init.zeros_(self.model.head.weight)

    def forward(self, prompt: Tensor, response: Tensor) -> Tensor:
        """The value before every token of the responses, ``(rows, RESPONSE)``."""
        x, _ = self.model.trunk(torch.cat([prompt, response[:, :-1]], 1))
        return self.model.head(x[:, PROMPT - 1 :])[..., 0]


def lengths(response: Tensor) -> Tensor:
    """Tokens of every response, its end included; RESPONSE for one that did not end."""
    ended = response == END
    return torch.where(ended.any(1), ended.int().argmax(1) + 1, RESPONSE)


def up_to_end(response: Tensor) -> Tensor:
    """bool ``(rows, RESPONSE)``: the response's own tokens."""
    return torch.arange(RESPONSE) < lengths(response)[:, None]


@torch.no_grad()
def pass_rates(model: TinyModel, questions: Questions) -> np.ndarray:
    """Exact probability that a response sampled at temperature 1 is the answer, float64 ``(M,)``."""
    picked = model.log_probs(questions.prompt, questions.answer)
    return (picked * up_to_end(questions.answer)).sum(1).exp().double().numpy()


@dataclass
class Rollouts:
    """``response`` int64 and ``log_prob`` float32, both ``(rows, RESPONSE)``; ``reward`` and ``tokens`` ``(rows,)``."""

    response: Tensor
    log_prob: Tensor
    reward: np.ndarray
    tokens: np.ndarray


@torch.no_grad()
def sample(model: TinyModel, questions: Questions, n: np.ndarray, generator: torch.Generator) -> Rollouts:
    """Roll out: ``n[i]`` responses to question ``i``, one question after the other; prompts are read once."""
    out, past = model(questions.prompt)
    home = torch.repeat_interleave(torch.arange(len(n)), torch.as_tensor(n))
    past = [(k[home], v[home]) for k, v in past]
    now = out[home, -1]
    response = torch.full((len(home), RESPONSE), END)
    log_prob = torch.zeros(len(home), RESPONSE)
    ended = torch.zeros(len(home), dtype=torch.bool)
    for i in range(RESPONSE):
        token = torch.multinomial(now.exp(), 1, generator=generator)
        response[:, i] = torch.where(ended, END, token[:, 0])
        log_prob[:, i] = now.gather(1, token)[:, 0] * ~ended
        ended |= token[:, 0] == END
        if i + 1 < RESPONSE:
            if ended.all():
                break
            step, past = model(token, past)
            now = step[:, 0]
    reward = (response == questions.answer[home]).all(1).double().numpy()
    unended = ~(response == END).any(1).numpy()
    return Rollouts(response, log_prob, np.where(unended, 0.0, reward), lengths(response).numpy())


def warm_start(model: TinyModel, apart: np.ndarray, steps: int, seed: int, path: Path) -> None:
    """Imitate the careless teacher on fresh questions, none of which is in ``apart`` (codes); cached at ``path``."""
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return
    rng = np.random.default_rng([seed, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 30, 1 - 0.95 * s / steps))
    for _ in range(steps):
        lesson = make_questions(256, rng, careless=True)
        lesson = lesson.pick(np.flatnonzero(~np.isin(lesson.code, apart)))
        mask = up_to_end(lesson.answer)
        loss = -(model.log_probs(lesson.prompt, lesson.answer) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")  # another process may make the same
    torch.save(model.state_dict(), unfinished)
    unfinished.replace(path)
