"""At how many rollouts does a gradient's noise equal its signal? GRPO by group size, REINFORCE, and an exact baseline.

    python -m benchmarks.gradient_noise --json benchmarks/results/gradient_noise.json

A batch of B rollouts has a gradient with mean G and a covariance whose trace is S / B; where B = S / |G|² the noise is as
large as the signal (McCandlish et al. 2018, 1812.06162, the simple noise scale), and a step with many more rollouts gains
little from less noise. The model is the tiny benchmark's, trained by GRPO; before some of its steps each estimator gets
rollouts of its own on prompts drawn from the pool. Of the policy gradient as it is: no clipping and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cells import Parser, load_average, machine, run_script, to_json, versions, write_whole
from benchmarks.tiny_learner import Questions, Rollouts, TinyModel, pass_rates, sample, up_to_end
from benchmarks.torch_cells import Cell, Settings
from benchmarks.torch_run import Run, group_relative, whitened
from benchmarks.train_torch import settings_of
from verl_adaptive.engine import StepResult

#: What is measured: name → rollouts of a prompt, prompts, and advantages from rewards, prompts' places and exact pass rates.
ESTIMATORS: dict[str, tuple[int, int, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]]] = {
    "grpo": (8, 1024, lambda reward, home, _: group_relative(reward, home, int(home[-1]) + 1)),
    "grpo-4": (4, 1024, lambda reward, home, _: group_relative(reward, home, int(home[-1]) + 1)),
    "reinforce": (1, 4096, lambda reward, _home, _rate: whitened(reward)),
    "exact pass rate as baseline": (1, 4096, lambda reward, home, rate: reward - rate[home]),
}
GROUNDS = ("base", "sparse", "onepass", "noise")
#: Steps before whose update it is measured: the start, a third of the run and its end.
STEPS = (1, 20, 60)
LR = 1e-3
CHUNK = 128  # gradients side by side


def noise_scale(gradients: Callable[[slice], Tensor], count: int, n: int) -> float:
    """Rollouts at which noise equals signal; infinite where no signal is seen.

    Args:
        gradients: of some of the prompts, ``(prompts, parameters)``.
        count: prompts; ``n``: rollouts of each.
    """
    total, square = torch.zeros(()), 0.0
    for start in range(0, count, CHUNK):
        made = gradients(slice(start, start + CHUNK)).double()
        total, square = total + made.sum(0), square + float(made.square().sum())
    mean = float((total / count).square().sum())
    trace = (square - count * mean) / (count - 1)
    signal = mean - trace / count  # the mean's square holds its noise, too
    return n * trace / signal if signal > 0 else float("inf")


def per_prompt(model: TinyModel, asked: Questions, made: Rollouts, advantage: np.ndarray, n: int) -> Any:
    """Gradients of the loss, one a prompt, as :func:`noise_scale` takes them."""
    weights = {name: value.detach() for name, value in model.named_parameters()}
    prompt = asked.prompt[:, None].expand(-1, n, -1)
    response = made.response.view(len(prompt), n, -1)
    weight = (torch.from_numpy(advantage).float()[:, None] * up_to_end(made.response)).view(response.shape)

    def loss(at: dict[str, Tensor], prompt: Tensor, response: Tensor, weight: Tensor) -> Tensor:
        out = functional_call(
            _LogProbs(model), {f"model.{name}": value for name, value in at.items()}, (prompt, response)
        )
        return -(out * weight).sum()

    each = vmap(grad(loss), in_dims=(None, 0, 0, 0))

    def gradients(part: slice) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
            found = each(weights, prompt[part], response[part], weight[part])
        return torch.cat([g.flatten(1) for g in found.values()], 1)

    return gradients


class _LogProbs(torch.nn.Module):
    """Calls the model's ``log_probs``, for ``functional_call``."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, prompt: Tensor, response: Tensor) -> Tensor:
        return self.model.log_probs(prompt, response)


class Measured(Run):
    """A run of the tiny benchmark that stops before some updates to measure."""

    found: list[dict[str, Any]]

    def _update(self, result: StepResult) -> None:
        if self.cell.steps in STEPS:
            self.found += [self._scale(name) for name in ESTIMATORS]
        super()._update(result)

    def _scale(self, name: str) -> dict[str, Any]:
        n, prompts, estimate = ESTIMATORS[name]
        seed = [self.seed, self.cell.steps, n, prompts, len(name)]
        at = np.random.default_rng(seed).integers(0, len(self.pool), prompts)
        asked = self.pool.pick(at)
        generator = torch.Generator().manual_seed(int(np.random.default_rng(seed).integers(2**62)))
        made = sample(self.model, asked, np.full(prompts, n), generator)
        reward = made.reward
        if self.settings.noise:
            flipped = torch.rand(len(reward), generator=generator).numpy() < self.settings.noise
            reward = np.where(flipped, 1 - reward, reward)
        rate = pass_rates(self.model, asked)
        rate = rate + self.settings.noise * (1 - 2 * rate)
        advantage = estimate(reward, np.repeat(np.arange(prompts), n), rate)
        scale = noise_scale(per_prompt(self.model, asked, made, advantage, n), prompts, n)
        return {"step": self.cell.steps, "estimator": name, "rollouts": None if np.isinf(scale) else round(scale)}


def measure(ground: str, seed: int, cache: Path) -> list[dict[str, Any]]:
    """All estimators on one ground, one seed."""
    torch.set_num_threads(1)
    run = Measured(Cell(ground, "grpo", LR, seed), settings_of(ground, Settings()), cache)
    run.found = []
    run.go()
    return [{"ground": ground, "seed": seed, **row} for row in run.found]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser("gradient_noise", description=__doc__.splitlines()[0])
    parser.add_argument("--grounds", default=",".join(GROUNDS), help="separated by commas (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to this less one (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path("outputs/train_torch"), help="warm starts (%(default)s)")
    parser.add_argument("--json", type=Path, help="write here")
    options = parser.parse_args(arguments)
    data: dict[str, Any] = {"benchmark": "gradient_noise", "machine": machine(), "load": load_average()}
    data |= {"versions": versions("verl-adaptive", "torch", "numpy"), "lr": LR, "steps": STEPS}
    data |= {"samples": {name: {"n": n, "prompts": count} for name, (n, count, _) in ESTIMATORS.items()}, "rows": []}
    for ground in options.grounds.split(","):
        for seed in range(options.seeds):
            found = measure(ground, seed, options.cache)
            data["rows"] += found
            for row in found:
                print(f"{ground} seed {seed} step {row['step']:>2} {row['estimator']}: {row['rollouts']}", flush=True)
            if options.json:
                write_whole(options.json, to_json(data, "rows"))


if __name__ == "__main__":
    run_script(main)
