"""Every preset at the same number of generated rollouts, on a tiny transformer trained with GRPO in this process.

    python benchmarks/train_torch.py                                  # what is missing in the results, then the report
    python benchmarks/train_torch.py --presets greso --seeds 3 --lrs 1e-3
    python benchmarks/train_torch.py --report                         # RESULTS.md again, from the JSON

The policies are the package's own, composed by Hydra as on verl's command line and driven through the same engine and the
same cut into minibatches as in verl's trainer; only generation and the update are small enough for one core. Runs that
the JSON holds are not run again. See ``tiny_learner.py`` for model and task.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from tiny_learner import Rollouts, TinyModel, make_questions, pass_rates, sample, up_to_end, warm_start
from torch import nn

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.groups import Groups
from verl_adaptive.integration.layout import PAD, plan
from verl_adaptive.policy import build_policy
from verl_adaptive.progress import Progress
from verl_adaptive.samplers._base import Pick, Sampler
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.table import StatsTable

HERE = Path(__file__).resolve().parent

_GATED_PILOTS = ("greso", "adaptive/allocator=pilot_commit", "adaptive/filter=band")

#: What is compared: name → words after ``+adaptive=``.
PRESETS: dict[str, list[str]] = {
    "grpo": ["grpo"],
    "dapo": ["dapo"],
    "dapo, adaptive size": ["dapo", "adaptive.sampler.round.adaptive=true"],
    "greso": ["greso"],
    "aero": ["aero"],
    "cero": ["cero"],
    "pilot_commit": ["pilot_commit"],
    "oracle + informative": ["dapo"],  # the sampler is replaced by one that sees the exact pass rates
    "greso + pilot_commit": [*_GATED_PILOTS],
    "greso + pilot_commit, sized": [*_GATED_PILOTS, "adaptive.allocator.sized_to_need=true"],
    "greso + pilot_commit, sized, 4 pilots": [
        *_GATED_PILOTS,
        "adaptive.allocator.sized_to_need=true",
        "adaptive.allocator.n_pilot=4",
    ],
    "greso, surplus trains": ["greso", "adaptive.surplus=train"],
    "mopps + informative": ["dapo", "adaptive/sampler=mopps"],
    "mopps + keep_all": ["grpo", "adaptive/sampler=mopps"],
    "cero + informative": ["cero", "adaptive/filter=informative"],
    "greso + keep_all": ["grpo", "adaptive/sampler=greso", "adaptive.sampler.round.adaptive=false"],
    "retire + keep_all": ["grpo", "adaptive/sampler=retire"],
    "greso + aero": ["aero", "adaptive/sampler=greso", "adaptive.sampler.round.adaptive=false"],
    "mopps + aero": ["aero", "adaptive/sampler=mopps"],
    "mopps (decay 0.5) + keep_all": ["grpo", "adaptive/sampler=mopps", "adaptive.sampler.decay=0.5"],
    "oracle + keep_all": ["grpo"],
}
#: Starting pass rates that are told apart.
BINS = ((0.0, 0.02), (0.02, 0.2), (0.2, 0.8), (0.8, 1.01))


@dataclass(frozen=True)
class Settings:
    """What is equal for all runs.

    Attributes:
        batch, n, updates: prompts a step, rollouts a prompt, optimizer updates a step.
        steps: GRPO's steps; the budget is as many rollouts as they generate.
        pool, held_out: questions to train on, and to judge by.
        warm_steps: supervised updates before.
        layers, hidden, heads: the model's size.
        clip, weight_decay, max_norm: of the update.
        evaluate_every: rollouts between two evaluations, at least.
    """

    batch: int = 16
    n: int = 8
    updates: int = 2
    steps: int = 60
    pool: int = 512
    held_out: int = 512
    warm_steps: int = 1000
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    clip: float = 0.2
    weight_decay: float = 0.01
    max_norm: float = 1.0
    evaluate_every: int = 384

    @property
    def budget(self) -> int:
        """Rollouts that every run generates."""
        return self.steps * self.batch * self.n


@dataclass
class Cell:
    """One run; ``curve`` holds (rollouts generated, updates, held-out accuracy, pool accuracy)."""

    preset: str
    lr: float
    seed: int
    curve: list[tuple[int, int, float, float]] = field(default_factory=list)
    by_start: list[tuple[int, float, float]] = field(default_factory=list)  # per bin: questions, accuracy before, after
    steps: int = 0
    groups: int = 0
    informative: int = 0  # groups with variance, of those
    rollouts: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, float, int]:
        return self.preset, self.lr, self.seed


# -- policy -------------------------------------------------------------------------------------------------------


class Oracle(Sampler):
    """Picks prompts at random in proportion to p (1 − p), p being the exact pass rate at this moment."""

    name: ClassVar[str] = "oracle"
    kind: ClassVar[str] = "pool"
    rates: Any  # called without arguments, float64 (M,)

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        p = self.rates()
        u = progress.draw.uniform(f"oracle.{progress.round}", self.table.key_hi[pool], self.table.key_lo[pool])
        score = np.log(np.maximum(u, 1e-300)) / np.maximum(p * (1 - p), 1e-9)  # Efraimidis and Spirakis
        return Pick(pool[np.argsort(-score, kind="stable")[:count]])


class Epochs:
    """A prompt stream: another order every epoch, cut anywhere."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self._rng, self._left = size, np.random.default_rng([seed, 2]), np.zeros(0, dtype=np.int64)

    def take(self, count: int) -> np.ndarray:
        while len(self._left) < count:
            self._left = np.concatenate([self._left, self._rng.permutation(self.size)])
        out, self._left = self._left[:count], self._left[count:]
        return out


def composed(words: list[str]) -> AdaptiveConfig:
    """The configuration that ``+adaptive=<word> <further words>`` means."""
    GlobalHydra.instance().clear()
    with initialize_config_module("hydra_configs.verl_adaptive", version_base=None):
        made = compose(overrides=[f"+adaptive={words[0]}", *words[1:]])
    return AdaptiveConfig.from_mapping(OmegaConf.to_container(made.adaptive, resolve=True))


def shipped(preset: str) -> list[str]:
    """Names in PRESETS that mean the same as the shipped preset of that name."""

    def parts(config: AdaptiveConfig) -> dict[str, Any]:
        return {key: value for key, value in asdict(config).items() if key != "name"}

    real = {name: words for name, words in PRESETS.items() if not name.startswith("oracle")}
    return [name for name, words in real.items() if parts(composed(words)) == parts(composed([preset]))]


def make_engine(preset: str, settings: Settings, seed: int, rates: Any) -> Engine:
    """The engine of a run, over an empty table."""
    config = composed([*PRESETS[preset], f"adaptive.seed={seed}", f"adaptive.total_rollouts={settings.budget}"])
    policy = build_policy(config)
    if preset.startswith("oracle"):
        policy.sampler = Oracle()
        policy.sampler.rates = rates
    keys = np.zeros(settings.pool, dtype=KEY_DTYPE)
    keys["hi"], keys["lo"] = seed + 1, np.arange(settings.pool)
    table = StatsTable()
    row_of = table.rows_for(keys)
    facts = RunFacts(settings.batch, settings.n, settings.steps, settings.pool, seed, config.tolerance)
    return Engine(policy, table, config, facts, row_of, Epochs(settings.pool, seed))


# -- a run --------------------------------------------------------------------------------------------------------


class Run:
    """One preset, one learning rate, one seed."""

    def __init__(self, preset: str, lr: float, seed: int, settings: Settings, cache: Path) -> None:
        self.settings, self.seed = settings, seed
        rng = np.random.default_rng([seed, 0])
        made = make_questions(4 * (settings.pool + settings.held_out), rng)
        _, first = np.unique(made.code, return_index=True)
        first = np.sort(first)[: settings.pool + settings.held_out]
        self.pool, self.held_out = made.pick(first[: settings.pool]), made.pick(first[settings.pool :])
        torch.manual_seed(seed)
        self.model = TinyModel(settings.layers, settings.hidden, settings.heads)
        name = f"{settings.layers}x{settings.hidden}x{settings.heads}-{settings.warm_steps}-{len(first)}-{seed}.pt"
        warm_start(self.model, made.code[first], settings.warm_steps, seed, cache / name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=settings.weight_decay)
        self.engine = make_engine(preset, settings, seed, lambda: pass_rates(self.model, self.pool))
        self.cell = Cell(preset, lr, seed)
        self._made: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by ticket: responses, log-probs

    def go(self) -> Cell:
        """Train to the budget."""
        cell, budget = self.cell, self.settings.budget
        spent = dict.fromkeys(("generate", "update", "evaluate", "all"), 0.0)
        begun = time.process_time()

        def timed(name: str, call: Any, *arguments: Any) -> Any:
            start = time.process_time()
            out = call(*arguments)
            spent[name] += time.process_time() - start
            return out

        start = timed("evaluate", self._evaluate)
        while not self.engine.finished:
            cell.steps += 1
            requests = self.engine.begin(cell.steps)
            while requests is not None:
                requests = self.engine.receive(timed("generate", self._generate, requests, cell.steps))
            result = self.engine.finish()
            cell.groups += int((~result.groups.failed).sum())
            cell.informative += int((~result.groups.degenerate()).sum())
            timed("update", self._update, result)
            for ticket in result.groups.ticket.tolist():
                self._made.pop(ticket, None)
            done = self.engine.total.rollouts.generated
            if done - cell.curve[-1][0] >= self.settings.evaluate_every or done >= budget or self.engine.finished:
                final = timed("evaluate", self._evaluate)
        for low, high in BINS:
            here = (start >= low) & (start < high)
            before, after = (float(p[here].mean()) if here.any() else 0.0 for p in (start, final))
            cell.by_start.append((int(here.sum()), before, after))
        spent["all"] = time.process_time() - begun
        cell.rollouts, cell.tokens = self.engine.total.rollouts.as_dict(), self.engine.total.tokens.as_dict()
        cell.seconds = {name: round(value, 2) for name, value in spent.items()}
        return cell

    def _evaluate(self) -> np.ndarray:
        held, pool = pass_rates(self.model, self.held_out), pass_rates(self.model, self.pool)
        done = self.engine.total.rollouts.generated
        point = (done, self.cell.steps * self.settings.updates, float(held.mean()), float(pool.mean()))
        self.cell.curve.append(point)
        return held

    def _generate(self, requests: Requests, step: int) -> Groups:
        """Roll a round out: one group a request."""
        generator = torch.Generator().manual_seed(
            ((self.seed * 10_000 + step) * 1_000 + self.engine.progress.round) * 2 + 1
        )
        made: Rollouts = sample(self.model, self.pool.pick(requests.index), requests.n, generator)
        ends = np.cumsum(requests.n)
        cut = [slice(end - n, end) for n, end in zip(requests.n, ends, strict=True)]
        for ticket, part in zip(requests.ticket.tolist(), cut, strict=True):
            self._made.setdefault(ticket, []).append((made.response[part], made.log_prob[part]))
        return Groups.from_lists(
            requests.row,
            [made.reward[part] for part in cut],
            tokens=[made.tokens[part] for part in cut],
            stage=[[s] * n for s, n in zip(requests.stage.tolist(), requests.n.tolist(), strict=True)],
            ticket=requests.ticket,
            index=requests.index,
        )

    def _update(self, result: StepResult) -> None:
        """PPO's clipped loss, a mean over tokens, in as many minibatches of groups as GRPO has."""
        groups, settings = result.groups.select(result.trained), self.settings
        here = result.groups.rollout_mask(result.trained)
        trains, ghost = result.trains[here], result.ghost[here]
        if not trains.any():
            return
        made = [part for ticket in groups.ticket.tolist() for part in self._made[ticket]]
        response, old = torch.cat([r for r, _ in made]), torch.cat([log_prob for _, log_prob in made])
        home = groups.group_of
        advantage = np.zeros(len(home))
        estimate = self.engine.policy.advantage
        if estimate.estimator is None:
            advantage[trains] = group_relative(groups.reward[trains], home[trains], len(groups))
        else:
            advantage[trains] = estimate.compute(groups.reward[trains], home[trains], groups)
        rows = np.flatnonzero(trains | ghost)  # rows that the filter rejected are in no denominator
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
        for chunk, order in enumerate(np.split(layout.order, layout.chunks)):
            at = torch.from_numpy(rows[order[order != PAD]])
            if not len(at):  # nothing but rows of zero advantage
                continue
            ratio = (self.model.log_probs(prompt[at], response[at]) - old[at]).exp()
            clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
            loss = torch.maximum(-ratio * target[at], -clipped * target[at]) * mask[at]
            self.optimizer.zero_grad()
            (loss.sum() / (mask[at].sum() + int(layout.ghost_tokens[chunk]))).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_norm)
            self.optimizer.step()


def group_relative(reward: np.ndarray, home: np.ndarray, groups: int) -> np.ndarray:
    """GRPO's advantage as verl has it: unbiased deviation, 1e-6 added; a group of one has mean 0 and deviation 1."""
    n = np.bincount(home, minlength=groups)
    mean = np.bincount(home, reward, minlength=groups) / np.maximum(n, 1)
    square = np.bincount(home, (reward - mean[home]) ** 2, minlength=groups)
    deviation = np.sqrt(square / np.maximum(n - 1, 1))
    one = (n == 1)[home]
    return np.where(one, reward, (reward - mean[home]) / (deviation[home] + 1e-6))


def prepare(seed: int, settings: Settings, cache: Path) -> None:
    """Make a seed's warm start."""
    torch.set_num_threads(1)
    Run("grpo", 1e-3, seed, settings, cache)


def run_cell(preset: str, lr: float, seed: int, settings: Settings, cache: Path) -> Cell:
    """One run, on one core."""
    torch.set_num_threads(1)
    return Run(preset, lr, seed, settings, cache).go()


# -- results ------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        cpu = ""
    packages = ("verl-adaptive", "torch", "numpy", "hydra-core")
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def load(path: Path, settings: Settings) -> dict[tuple[str, float, int], Cell]:
    """The cells of a results file; none if there is no file.

    Raises:
        SystemExit: the file's settings are others.
    """
    if not path.exists():
        return {}
    data = json.loads(path.read_text())
    if data["settings"] != asdict(settings):
        raise SystemExit(f"{path} was measured with other settings; name another file with --results, or remove it")
    return {cell.key: cell for cell in (Cell(**c) for c in data["cells"])}


def save(path: Path, settings: Settings, cells: dict[tuple[str, float, int], Cell], command: str) -> None:
    """Write all cells; the old file stays whole until the new one is."""
    data = {
        "benchmark": "train_torch",
        "command": command,
        "machine": machine(),
        "settings": asdict(settings),
        "presets": PRESETS,
        "seeds": sorted({c.seed for c in cells.values()}),
        "cells": [asdict(cells[key]) for key in sorted(cells)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    head = json.dumps({k: v for k, v in data.items() if k != "cells"}, indent=1)[:-2]
    rows = ",\n".join(json.dumps(cell) for cell in data["cells"])
    temporary.write_text(f'{head},\n "cells": [\n{rows}\n]\n}}\n')
    temporary.replace(path)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default="", help=f"separated by semicolons, of: {'; '.join(PRESETS)}")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to this less one (default: %(default)s)")
    parser.add_argument("--lrs", default="3e-4,1e-3", help="learning rates (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="run again what the results hold")
    parser.add_argument("--report", action="store_true", help="write the report only")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "train_torch.json")
    parser.add_argument("--page", type=Path, default=HERE / "RESULTS.md", help="the report; a part of this file")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "outputs" / "train_torch", help="warm starts")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="(%(default)s)")
    options = parser.parse_args(arguments)
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    names = [name.strip() for name in options.presets.split(";") if name.strip()] or list(PRESETS)
    if unknown := [name for name in names if name not in PRESETS]:
        parser.error(f"no such preset: {'; '.join(unknown)}")

    cells = load(options.results, settings)
    if not options.report:
        command = " ".join(["python", "benchmarks/train_torch.py", *(sys.argv[1:] if arguments is None else arguments)])
        rates = [float(lr) for lr in options.lrs.split(",")]
        wanted = [(name, lr, seed) for seed in range(options.seeds) for lr in rates for name in names]
        wanted = [key for key in wanted if options.fresh or key not in cells]
        for done, cell in enumerate(run_all(wanted, settings, options.cache, options.jobs), 1):
            cells[cell.key] = cell
            save(options.results, settings, cells, command)
            print(
                f"[{done}/{len(wanted)}] {cell.preset}, lr {cell.lr:g}, seed {cell.seed}: held-out "
                f"{cell.curve[0][2]:.3f} -> {cell.curve[-1][2]:.3f}, {cell.steps} steps, {cell.seconds['all']:.1f} s",
                flush=True,
            )
    if cells:
        from train_torch_report import write

        write(json.loads(options.results.read_text()), options.page, shipped("full"))


def run_all(wanted: list[tuple[str, float, int]], settings: Settings, cache: Path, jobs: int) -> Iterator[Cell]:
    """The cells in the order in which they finish."""
    if jobs == 1:
        for key in wanted:
            yield run_cell(*key, settings, cache)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for future in [pool.submit(prepare, seed, settings, cache) for seed in sorted({key[2] for key in wanted})]:
            future.result()
        for future in as_completed([pool.submit(run_cell, *key, settings, cache) for key in wanted]):
            yield future.result()


if __name__ == "__main__":
    main()
