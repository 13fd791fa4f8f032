"""One run of the tiny benchmark: the package's policy and engine around a tiny transformer that GRPO trains."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from benchmarks.cells import thinned
from benchmarks.tiny_learner import (
    Critic,
    Rollouts,
    TinyModel,
    lengths,
    make_questions,
    pass_rates,
    sample,
    up_to_end,
    warm_start,
)
from benchmarks.torch_cells import CRITIC, ORACLE, PRESETS, REINFORCE, Cell, Settings
from verl_adaptive.config import RunFacts
from verl_adaptive.engine import OrderedEngine, Requests, StepResult
from verl_adaptive.engine.shape import step_shape
from verl_adaptive.groups import Groups
from verl_adaptive.integration.layout import PAD, plan
from verl_adaptive.policy import build_policy
from verl_adaptive.progress import Progress
from verl_adaptive.roles import Pick, Sampler
from verl_adaptive.simulate.learning import advantages
from verl_adaptive.simulate.presets import compose_preset
from verl_adaptive.stats.keys import KEY_DTYPE, key_hex
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.stats.warm_start import warm_start as warm_statistics

# -- policy -------------------------------------------------------------------------------------------------------


def draw_by_variance(rate: np.ndarray, uniform: np.ndarray, count: int) -> np.ndarray:
    """``count`` positions drawn without replacement in proportion to p (1 - p) (Efraimidis and Spirakis 2006).

    Args:
        rate: p, float64 ``(M,)``.
        uniform: random numbers in [0, 1), ``(M,)``.
    """
    score = np.log(np.maximum(uniform, 1e-300)) / np.maximum(rate * (1 - rate), 1e-9)
    return np.argsort(-score, kind="stable")[:count]


class Oracle(Sampler):
    """Picks prompts at random in proportion to p (1 − p), p being the exact pass rate at this moment; rows are positions."""

    name: ClassVar[str] = "oracle"
    kind: ClassVar[str] = "pool"
    rates: Any  # called without arguments, float64 (M,)
    _step, _rate = -1, np.zeros(0)

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        if progress.step != self._step:  # the weights change between steps only
            self._step, self._rate = progress.step, self.rates()
        u = progress.draw.uniform(f"oracle.{progress.chunk}", self.table.key_hi[pool], self.table.key_lo[pool])
        return Pick(pool[draw_by_variance(self._rate[pool], u, count)])


class Epochs:
    """A prompt stream: another order every epoch, cut anywhere."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self._rng, self._left = size, np.random.default_rng([seed, 2]), np.zeros(0, dtype=np.int64)

    def take(self, count: int) -> np.ndarray:
        while len(self._left) < count:
            self._left = np.concatenate([self._left, self._rng.permutation(self.size)])
        out, self._left = self._left[:count], self._left[count:]
        return out


def make_engine(
    preset: str, settings: Settings, seed: int, sources: list[str], rates: Any, prior: np.ndarray | None = None
) -> OrderedEngine:
    """The engine of a run, over a table without visits, or with what is expected of each prompt."""
    config = replace(compose_preset(PRESETS[preset]), seed=seed, total_rollouts=settings.budget)
    shape = step_shape(config, settings.batch, settings.n, settings.pool)
    policy = build_policy(shape.config)
    if preset.startswith(ORACLE):
        policy.sampler = Oracle()
        policy.sampler.rates = rates
    keys = np.zeros(settings.pool, dtype=KEY_DTYPE)
    keys["hi"], keys["lo"] = seed + 1, np.arange(settings.pool)
    table = StatsTable()
    row_of = table.rows_for(keys, sources=sources)
    if prior is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prior.jsonl"
            told = zip(key_hex(keys), prior.tolist(), strict=True)
            file.write_text("".join(json.dumps({"key": key, "prior": p}) + "\n" for key, p in told))
            warm_statistics(table, file, discount=config.warm_start_discount)
    facts = RunFacts.of(config, batch=shape.groups, n=shape.n, steps=settings.steps, prompts=settings.pool)
    return OrderedEngine(policy, table, shape.config, facts, row_of, Epochs(settings.pool, seed))


# -- a run --------------------------------------------------------------------------------------------------------


class Run:
    """One cell."""

    def __init__(self, cell: Cell, settings: Settings, cache: Path) -> None:
        seed = cell.seed
        self.settings, self.seed, self.cell = settings, seed, cell
        rng = np.random.default_rng([seed, 0])
        spare = 20 if settings.rare else 1  # few questions are hopeless enough
        made = make_questions(4 * spare * (settings.pool + settings.held_out), rng)
        _, first = np.unique(made.code, return_index=True)
        candidates = settings.pool * (2 if settings.flat else 1)
        first = np.sort(first)[: spare * (candidates + settings.held_out)]
        self.pool, self.held_out = made.pick(first[:candidates]), made.pick(first[candidates:])
        torch.manual_seed(seed)
        self.model = TinyModel(settings.layers, settings.hidden, settings.heads)
        name = f"{settings.layers}x{settings.hidden}x{settings.heads}-{settings.warm_steps}-{len(first)}-{seed}.pt"
        warm_start(self.model, made.code[first], settings.warm_steps, seed, cache / name)
        if settings.flat:
            flat = round(settings.flat * settings.pool)
            self.pool = self.pool.pick(thinned(pass_rates(self.model, self.pool), settings.pool, flat))
        if settings.rare:
            hard = first[(pass_rates(self.model, made.pick(first)) < settings.rare) & made.learnable[first]]
            self.pool, self.held_out = made.pick(hard[: settings.pool]), made.pick(hard[-settings.held_out :])
            assert len(hard) >= settings.pool + settings.held_out, f"{len(hard)} questions are hard enough"
        self.judged = self.pool.pick(np.arange(min(settings.judged, settings.pool)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cell.lr, weight_decay=settings.weight_decay)
        self.critic = Critic(self.model) if cell.preset.startswith(CRITIC) else None
        if self.critic is not None:
            self.critic_optimizer = torch.optim.AdamW(self.critic.parameters(), lr=settings.critic_lr)
        rates = functools.partial(pass_rates, self.model, self.pool)
        prior = None
        if settings.prior:
            prior = rates() if settings.prior == 2 else self.pool.seen(rates())
        self.engine = make_engine(cell.preset, settings, seed, self.pool.sources, rates, prior)
        self._groups = np.zeros(2, dtype=np.int64)  # finished, and of these informative
        self._made: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by submission: responses, log-probs

    def go(self) -> Cell:
        """Train to the budget."""
        cell = self.cell
        spent = dict.fromkeys(("generate", "update", "evaluate", "all"), 0.0)
        begun, wall = time.process_time(), time.perf_counter()

        def timed(name: str, call: Any, *arguments: Any) -> Any:
            start = time.process_time()
            out = call(*arguments)
            spent[name] += time.process_time() - start
            return out

        start = timed("evaluate", self._evaluate)
        first = self._ends(start)
        while not self.engine.finished:
            cell.steps += 1
            self.engine.begin(cell.steps)
            while not self.engine.decided:  # in the order of submission: nothing is generated in vain
                lot = self.engine.flight.select(slice(-(-self.engine.facts.batch // 16)))
                self.engine.receive(timed("generate", self._generate, lot, cell.steps))
            result = self.engine.finish()
            self._groups += [(~result.groups.failed).sum(), (~result.groups.degenerate()).sum()]
            timed("update", self._update, result)
            for submission in result.groups.submission.tolist():
                self._made.pop(submission, None)
            since = self.engine.total.rollouts.generated - cell.curve[-1][0]
            if since >= self.settings.evaluate_every or self.engine.finished:
                end = timed("evaluate", self._evaluate)
        cell.ends = {
            name: [value, after] for (name, value), after in zip(first.items(), self._ends(end).values(), strict=True)
        }
        spent["all"] = time.process_time() - begun
        cell.rollouts = self.engine.total.rollouts.as_dict()
        cell.seconds = {name: round(value, 2) for name, value in spent.items()}
        cell.seconds["wall"] = round(time.perf_counter() - wall, 2)
        return cell

    def _evaluate(self) -> np.ndarray:
        held, pool = pass_rates(self.model, self.held_out), pass_rates(self.model, self.judged)
        rollouts, tokens = self.engine.total.rollouts, self.engine.total.tokens
        self.cell.curve.append(
            [
                *(rollouts.generated, self.cell.steps * self.settings.updates),
                *(round(float(held.mean()), 4), round(float(pool.mean()), 4)),
                *(tokens.generated, tokens.trained, tokens.dropped.get("zero_advantage", 0)),
                *self._groups.tolist(),
            ]
        )
        return held

    def _ends(self, rates: np.ndarray) -> dict[str, float]:
        """Of the held-out questions: pass@8, and mean entropy of a token and length of four responses sampled to each."""
        n, generator = np.full(len(self.held_out), 4), torch.Generator().manual_seed(self.seed)
        made = sample(self.model, self.held_out, n, generator)
        out = {
            "pass@8": (1 - (1 - rates) ** 8).mean(),
            "entropy": -made.log_prob.sum() / up_to_end(made.response).sum(),
            "length": lengths(made.response).double().mean(),
        }
        return {name: round(float(value), 4) for name, value in out.items()}

    def _generate(self, requests: Requests, step: int) -> Groups:
        """Roll a round out: one group a request."""
        generator = torch.Generator().manual_seed(
            ((self.seed * 10_000 + step) * 1_000 + self.engine.progress.chunk) * 2 + 1
        )
        made: Rollouts = sample(self.model, self.pool.pick(requests.index), requests.n, generator)
        ends = np.cumsum(requests.n)
        cut = [slice(end - n, end) for n, end in zip(requests.n, ends, strict=True)]
        for submission, part in zip(requests.submission.tolist(), cut, strict=True):
            self._made.setdefault(submission, []).append((made.response[part], made.log_prob[part]))
        reward = made.reward
        if self.settings.noise:  # judged wrongly
            flipped = torch.rand(len(reward), generator=generator).numpy() < self.settings.noise
            reward = np.where(flipped, 1 - reward, reward)
        if self.settings.offset:
            sources = np.unique(self.pool.sources, return_inverse=True)[1]
            reward = reward + self.settings.offset * np.repeat(sources[requests.index], requests.n)
        return Groups.from_lists(
            requests.row,
            [reward[part] for part in cut],
            tokens=[made.tokens[part] for part in cut],
            stage=[[s] * n for s, n in zip(requests.stage.tolist(), requests.n.tolist(), strict=True)],
            submission=requests.submission,
            index=requests.index,
        )

    def _update(self, result: StepResult) -> None:
        """PPO's clipped loss, a mean over tokens, in as many minibatches of groups as GRPO has."""
        groups, settings = result.groups.select(result.trained), self.settings
        here = result.groups.rollout_mask(result.trained)
        trains, zero_row = result.trains[here], result.zero_row[here]
        if not trains.any():
            return
        made = [part for submission in groups.submission.tolist() for part in self._made[submission]]
        response, old = torch.cat([r for r, _ in made]), torch.cat([log_prob for _, log_prob in made])
        home = groups.group_of
        advantage = advantages(result, self.engine.policy)[here]
        if self.cell.preset.startswith(REINFORCE):
            advantage[trains] = whitened(groups.reward[trains])
        self.cell.greatest = max(self.cell.greatest, round(float(np.abs(advantage).max()), 3))
        rows = np.flatnonzero(trains | zero_row)  # rows that the filter rejected are in no denominator
        layout = plan(
            np.unique(home[rows], return_inverse=True)[1],
            groups.tokens[rows],
            groups.tokens[rows],
            trains[rows],
            ranks=1,
            updates=settings.updates,
            partition=lambda cost, k: [],
        )
        prompt = self.pool.prompt[torch.from_numpy(groups.index)][torch.from_numpy(home)]
        mask = up_to_end(response)
        target = torch.from_numpy(advantage).float()[:, None]
        reward = torch.from_numpy(groups.reward).float()[:, None]
        if self.critic is not None:  # gae with γ = λ = 1, whitened over tokens as verl has it
            with torch.no_grad():
                target = reward - self.critic(prompt, response)
            seen = target[mask]
            target = (target - seen.mean()) / (seen.std() + 1e-8)
        if settings.decay:
            left = 1 - (self.engine.total.rollouts.generated - result.groups.rollouts) / settings.budget
            self.optimizer.param_groups[0]["lr"] = self.cell.lr * max(0.0, left)
        minibatches = np.split(layout.order, layout.chunks)
        if self.critic is not None:
            for order in minibatches * settings.critic_epochs:
                at = torch.from_numpy(rows[order[order != PAD]])
                off = (self.critic(prompt[at], response[at]) - reward[at])[mask[at]]
                self.critic_optimizer.zero_grad()
                (off.square().mean() / 2).backward()
                nn.utils.clip_grad_norm_(self.critic.parameters(), settings.max_norm)
                self.critic_optimizer.step()
            if self.cell.steps < settings.critic_warmup:
                return
        for chunk, order in list(enumerate(minibatches)) * settings.epochs:
            at = torch.from_numpy(rows[order[order != PAD]])
            if not len(at):  # nothing but rows of zero advantage
                continue
            ratio = (self.model.log_probs(prompt[at], response[at]) - old[at]).exp()
            clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
            loss = torch.maximum(-ratio * target[at], -clipped * target[at]) * mask[at]
            if self.critic is not None:  # SAO's loss: masked where the ratio left the band, and not clipped inside
                loss = -ratio * target[at] * (mask[at] & (ratio > 0.2) & (ratio < 4))
            self.optimizer.zero_grad()
            (loss.sum() / (mask[at].sum() + int(layout.zero_row_tokens[chunk]))).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_norm)
            self.optimizer.step()


def whitened(reward: np.ndarray) -> np.ndarray:
    """REINFORCE with the batch's mean as baseline and its deviation as scale."""
    return (reward - reward.mean()) / (reward.std() + 1e-6)
