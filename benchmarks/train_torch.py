"""Every preset at the same number of generated rollouts, on a tiny transformer trained with GRPO in this process.

    python benchmarks/train_torch.py                                  # what is missing in the results
    python benchmarks/train_torch.py --presets "greso;full" --seeds 3 --lrs 1e-3
    python benchmarks/train_torch.py --cell "base/greso/lr=0.001/seed=2" --check
    python benchmarks/report.py                                       # the tables again, from the JSON

The policies are the package's own, composed by Hydra as on verl's command line and driven through the same engine and the
same cut into minibatches as in verl's trainer; only generation and the update are small enough for one core. Runs that the
JSON holds are not run again. See ``tiny_learner.py`` for model and task.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from cells import Parser, load_average, machine, prediction, to_json, versions, write_whole
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from oracle_sampler import draw_by_variance
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

_PILOTS = ("adaptive/allocator=pilot_commit", "adaptive/filter=band")
_ORACLE = "oracle"

#: What is compared: name → words after ``+adaptive=``. In those whose name begins with "oracle", the sampler is replaced
#: by one that sees the exact pass rates.
PRESETS: dict[str, list[str]] = {
    # as shipped, and DAPO with the round size of GRESO's paper
    "grpo": ["grpo"],
    "dapo": ["dapo"],
    "dapo-sized": ["dapo", "adaptive.sampler.round.adaptive=true"],
    "greso": ["greso"],
    "aero": ["aero"],
    "cero": ["cero"],
    "pilot_commit": ["pilot_commit"],
    "full": ["full"],
    "oracle+keep_all": ["grpo"],
    "oracle+informative": ["dapo"],
    "oracle+aero": ["aero"],
    "oracle+full": ["full"],
    # one ingredient at a time
    "greso-gate": ["greso", "adaptive.sampler.round.adaptive=false"],
    "greso+keep_all": ["grpo", "adaptive/sampler=greso", "adaptive.sampler.round.adaptive=false"],
    "aero-rescue": ["grpo", "adaptive/allocator=aero", "adaptive.refill=false"],
    "aero-reject": ["grpo", "adaptive/filter=aero", "adaptive.refill=false"],
    "aero-beta": ["grpo", "adaptive/advantage=beta"],
    "cero-select": ["cero", "adaptive.sampler.n_max=1"],
    "cero+informative": ["cero", "adaptive/filter=informative"],
    "pilots": ["dapo", *_PILOTS],
    "pilot_commit-sized": ["pilot_commit", "adaptive.allocator.sized_to_need=true"],
    "pilot_commit-pipelined": ["pilot_commit", "adaptive.allocator.form=pipelined"],
    # parts of several papers together
    "greso+pilot_commit": ["greso", *_PILOTS, "adaptive.allocator.sized_to_need=true"],
    "rescue+informative": ["dapo", "adaptive/allocator=aero"],
    "greso+rescue+informative": ["greso", "adaptive/allocator=aero"],
    "greso+aero": ["aero", "adaptive/sampler=greso", "adaptive.sampler.round.adaptive=false"],
    "mopps+keep_all": ["grpo", "adaptive/sampler=mopps"],
    "mopps+informative": ["dapo", "adaptive/sampler=mopps"],
    "mopps+aero": ["aero", "adaptive/sampler=mopps"],
}
#: Group and pool sizes other than the usual ones; name → settings that differ.
VARIANTS: dict[str, dict[str, int]] = {"base": {}, "n16": {"n": 16}, "pool96": {"pool": 96}}
#: Starting pass rates that are told apart.
BINS = ((0.0, 0.02), (0.02, 0.2), (0.2, 0.8), (0.8, 1.01))
#: What a point of a curve holds.
COLUMNS = (
    *("rollouts", "updates", "held_out", "pool", "tokens_generated", "tokens_trained", "tokens_zero_advantage"),
    *("groups", "informative"),
)


@dataclass(frozen=True)
class Settings:
    """What is equal for all runs.

    Attributes:
        batch, n, updates: prompts a step, rollouts a prompt, optimizer updates a step.
        steps: GRPO's steps; the budget is as many rollouts as they generate.
        pool, held_out: questions to train on, and to judge by.
        judged: questions of the pool that are judged, too.
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
    held_out: int = 256
    judged: int = 128
    warm_steps: int = 1000
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    clip: float = 0.2
    weight_decay: float = 0.01
    max_norm: float = 1.0
    evaluate_every: int = 512

    @property
    def budget(self) -> int:
        """Rollouts that every run generates."""
        return self.steps * self.batch * self.n


@dataclass
class Cell:
    """One run.

    Attributes:
        variant, preset, lr, seed: who it is.
        curve: one point an evaluation, of ``COLUMNS``.
        by_start: for each of ``BINS``: held-out questions, their accuracy before and after.
        steps: made in all.
        calibration: how far the table's estimates of the visited prompts are from the exact rates, at the end.
        seconds: of CPU time, by part, and of wall clock.
        load: of the machine when the run began.
        machine: which of the file's ``machines`` it ran on.
    """

    variant: str
    preset: str
    lr: float
    seed: int
    command: str = ""
    curve: list[list[float]] = field(default_factory=list)
    by_start: list[tuple[int, float, float]] = field(default_factory=list)
    steps: int = 0
    rollouts: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    load: float | None = None
    machine: int = 0

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.variant, self.preset, self.lr, self.seed

    @property
    def id(self) -> str:
        return cell_id(*self.key)


def cell_id(variant: str, preset: str, lr: float, seed: int) -> str:
    """How a cell is named on the command line."""
    return f"{variant}/{preset}/lr={lr:g}/seed={seed}"


def parse_id(text: str) -> tuple[str, str, float, int]:
    """The cell that a name means.

    Raises:
        ValueError: it is not a cell's name.
    """
    parts = text.split("/")
    if len(parts) != 4 or not parts[2].startswith("lr=") or not parts[3].startswith("seed="):
        raise ValueError(
            f"{text!r} is no cell; write VARIANT/PRESET/lr=RATE/seed=NUMBER, as base/greso/lr=0.001/seed=0"
        )
    variant, preset = parts[:2]
    for what, name, known in (("variant", variant, VARIANTS), ("preset", preset, PRESETS)):
        if name not in known:
            raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}")
    try:
        return variant, preset, float(parts[2][3:]), int(parts[3][5:])
    except ValueError:
        raise ValueError(f"{text!r} is no cell: RATE must be a number and the seed a whole number") from None


# -- policy -------------------------------------------------------------------------------------------------------


class Oracle(Sampler):
    """Picks prompts at random in proportion to p (1 − p), p being the exact pass rate at this moment."""

    name: ClassVar[str] = "oracle"
    kind: ClassVar[str] = "pool"
    rates: Any  # called without arguments, float64 (M,)
    _step, _rate = -1, np.zeros(0)

    def pick(self, pool: np.ndarray, count: int, progress: Progress) -> Pick:
        if progress.step != self._step:  # the weights change between steps only
            self._step, self._rate = progress.step, self.rates()
        u = progress.draw.uniform(f"oracle.{progress.round}", self.table.key_hi[pool], self.table.key_lo[pool])
        return Pick(pool[draw_by_variance(self._rate, u, count)])


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


def make_engine(preset: str, settings: Settings, seed: int, rates: Any) -> Engine:
    """The engine of a run, over an empty table."""
    config = composed([*PRESETS[preset], f"adaptive.seed={seed}", f"adaptive.total_rollouts={settings.budget}"])
    policy = build_policy(config)
    if preset.startswith(_ORACLE):
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
    """One cell."""

    def __init__(self, cell: Cell, settings: Settings, cache: Path) -> None:
        seed = cell.seed
        self.settings, self.seed, self.cell = settings, seed, cell
        rng = np.random.default_rng([seed, 0])
        made = make_questions(4 * (settings.pool + settings.held_out), rng)
        _, first = np.unique(made.code, return_index=True)
        first = np.sort(first)[: settings.pool + settings.held_out]
        self.pool, self.held_out = made.pick(first[: settings.pool]), made.pick(first[settings.pool :])
        self.judged = self.pool.pick(np.arange(min(settings.judged, settings.pool)))
        torch.manual_seed(seed)
        self.model = TinyModel(settings.layers, settings.hidden, settings.heads)
        name = f"{settings.layers}x{settings.hidden}x{settings.heads}-{settings.warm_steps}-{len(first)}-{seed}.pt"
        warm_start(self.model, made.code[first], settings.warm_steps, seed, cache / name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cell.lr, weight_decay=settings.weight_decay)
        self.engine = make_engine(cell.preset, settings, seed, lambda: pass_rates(self.model, self.pool))
        self._groups = np.zeros(2, dtype=np.int64)  # finished, and of these informative
        self._made: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by ticket: responses, log-probs

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
        while not self.engine.finished:
            cell.steps += 1
            requests = self.engine.begin(cell.steps)
            while requests is not None:
                requests = self.engine.receive(timed("generate", self._generate, requests, cell.steps))
            result = self.engine.finish()
            self._groups += [(~result.groups.failed).sum(), (~result.groups.degenerate()).sum()]
            timed("update", self._update, result)
            for ticket in result.groups.ticket.tolist():
                self._made.pop(ticket, None)
            since = self.engine.total.rollouts.generated - cell.curve[-1][0]
            if since >= self.settings.evaluate_every or self.engine.finished:
                end = timed("evaluate", self._evaluate)
        for low, high in BINS:
            here = (start >= low) & (start < high)
            before, after = (round(float(p[here].mean()), 4) if here.any() else 0.0 for p in (start, end))
            cell.by_start.append((int(here.sum()), before, after))
        cell.calibration = self._calibration()
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

    def _calibration(self) -> dict[str, float]:
        """Mean error and mean absolute error of two estimates of a visited prompt's pass rate, against the exact one."""
        table, rows = self.engine.table, self.engine.row_of
        exact, seen = pass_rates(self.model, self.pool), table.col("rollouts")[rows] > 0
        out = {"visited": float(seen.mean())}
        history = table.col("successes")[rows] / np.maximum(table.col("rollouts")[rows], 1)
        for name, estimate in (("history", history), ("last_visit", table.col("last_rate")[rows])):
            error = (estimate - exact)[seen]
            out |= {f"{name}_bias": float(error.mean()), f"{name}_error": float(np.abs(error).mean())}
        return {name: round(value, 4) for name, value in out.items()}

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


def settings_of(variant: str, settings: Settings) -> Settings:
    """The settings of a variant."""
    return replace(settings, **VARIANTS[variant])


def prepare(variant: str, seed: int, settings: Settings, cache: Path) -> None:
    """Make a seed's warm start."""
    torch.set_num_threads(1)
    Run(Cell(variant, "grpo", 1e-3, seed), settings_of(variant, settings), cache)


def run_cell(key: tuple[str, str, float, int], settings: Settings, cache: Path) -> Cell:
    """One run, on one core."""
    torch.set_num_threads(1)
    changed = [
        f"--{name.replace('_', '-')} {value}" for name, value in asdict(settings).items() if value != DEFAULT[name]
    ]
    words = ["python", "benchmarks/train_torch.py", "--cell", f'"{cell_id(*key)}"', "--check", *changed]
    cell = Cell(*key, command=" ".join(words), load=load_average())
    return Run(cell, settings_of(cell.variant, settings), cache).go()


DEFAULT = asdict(Settings())


# -- results ------------------------------------------------------------------------------------------------------

Cells = dict[tuple[str, str, float, int], Cell]


def load(path: Path, settings: Settings) -> tuple[Cells, list[dict[str, Any]]]:
    """The cells of a results file and the machines that they ran on; none if there is no file.

    Raises:
        SystemExit: the file's settings are others.
    """
    if not path.exists():
        return {}, []
    data = json.loads(path.read_text())
    if data["settings"] != asdict(settings):
        raise SystemExit(f"{path} was measured with other settings; name another file with --results, or remove it")
    return {cell.key: cell for cell in (Cell(**c) for c in data["cells"])}, data["machines"]


def here(machines: list[dict[str, Any]]) -> int:
    """This machine's place among the machines; it is added if it is not there."""
    this = machine() | {"versions": versions("verl-adaptive", "torch", "numpy", "hydra-core")}
    if this not in machines:
        machines.append(this)
    return machines.index(this)


@functools.cache
def parts(preset: str) -> dict[str, str]:
    """Names of the four parts that a preset's YAML puts together; composing one takes a twentieth of a second."""
    config = composed(PRESETS[preset])
    made = {role: getattr(config, role)["name"] for role in ("sampler", "allocator", "filter", "advantage")}
    return made | ({"sampler": "exact pass rates"} if preset.startswith(_ORACLE) else {})


def save(path: Path, settings: Settings, cells: Cells, machines: list[dict[str, Any]]) -> None:
    """Write all cells; the old file stays whole until the new one is."""
    data = {
        "benchmark": "train_torch",
        "machines": machines,
        "settings": asdict(settings),
        "variants": VARIANTS,
        "presets": {name: {"words": words, "parts": parts(name)} for name, words in PRESETS.items()},
        "bins": BINS,
        "columns": COLUMNS,
        "cells": [asdict(cells[key]) for key in sorted(cells)],
    }
    write_whole(path, to_json(data, "cells"))


def check(cell: Cell, cells: Cells) -> str:
    """Whether a cell that ran again lies where its seeds put it, in words.

    Raises:
        SystemExit: it does not.
    """
    seeds = [c.curve[-1][2] for key, c in cells.items() if key[:3] == cell.key[:3]]
    if not seeds:
        raise SystemExit(f"{cell.id}: the results hold no seed of this cell to check against")
    centre, half = prediction(seeds)
    now = cell.curve[-1][2]
    before = cells.get(cell.key)
    text = f"{cell.id}: held-out {now:.4f} at the end"
    text += f", {before.curve[-1][2]:.4f} in the results" if before else ""
    if len(seeds) == 1:
        return f"{text}; one seed gives no interval"
    text += f"; 95 % of further runs lie in {centre - half:.4f} to {centre + half:.4f} ({len(seeds)} seeds)"
    if abs(now - centre) > half:
        raise SystemExit(f"{text}: OUTSIDE")
    return f"{text}: inside"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(prog="train_torch.py", description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default="", help=f"separated by semicolons, of: {'; '.join(PRESETS)}")
    parser.add_argument("--variants", default="base", help=f"separated by commas, of {', '.join(VARIANTS)} (base)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to this less one (default: %(default)s)")
    parser.add_argument("--lrs", default="3e-4,1e-3,2e-3", help="learning rates (default: %(default)s)")
    parser.add_argument("--cell", action="append", default=[], metavar="ID", help="run this cell again")
    parser.add_argument("--check", action="store_true", help="with --cell: compare with the results, do not store")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="run again what the results hold")
    parser.add_argument("--list", action="store_true", help="print the cells that would run, and stop")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "train_torch.json")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "outputs" / "train_torch", help="warm starts")
    for name, value in DEFAULT.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="(%(default)s)")
    options = parser.parse_args(arguments)
    settings = Settings(**{name: getattr(options, name) for name in DEFAULT})
    names = [name.strip() for name in options.presets.split(";") if name.strip()] or list(PRESETS)
    variants = [name.strip() for name in options.variants.split(",")]
    for what, chosen, known in (("preset", names, PRESETS), ("variant", variants, VARIANTS)):
        for name in chosen:
            if name not in known:
                parser.error(f"no {what} {name!r}; there are {', '.join(known)}")
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs must be 1 or greater")
    if options.check and not options.cell:
        parser.error("--check needs --cell ID")
    try:
        rates = [float(lr) for lr in options.lrs.split(",")]
        again = [parse_id(text) for text in options.cell]
    except ValueError as error:
        parser.error(str(error))

    cells, machines = load(options.results, settings)
    wanted = again or [
        (variant, name, lr, seed)
        for seed in range(options.seeds)
        for variant in variants
        for lr in rates
        for name in names
    ]
    if not again and not options.fresh:
        wanted = [key for key in wanted if key not in cells]
    if options.list:
        print("\n".join(cell_id(*key) for key in wanted))
        return
    for done, cell in enumerate(run_all(wanted, settings, options.cache, options.jobs), 1):
        if options.check:
            print(check(cell, cells))
            continue
        cell.machine = here(machines)
        cells[cell.key] = cell
        save(options.results, settings, cells, machines)
        print(
            f"[{done}/{len(wanted)}] {cell.id}: held-out {cell.curve[0][2]:.3f} -> {cell.curve[-1][2]:.3f}, "
            f"{cell.steps} steps, {cell.seconds['all']:.1f} s",
            flush=True,
        )


def run_all(wanted: list[tuple[str, str, float, int]], settings: Settings, cache: Path, jobs: int) -> Iterator[Cell]:
    """The cells in the order in which they finish."""
    if jobs == 1:
        for key in wanted:
            yield run_cell(key, settings, cache)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        starts = sorted({(key[0], key[3]) for key in wanted})
        for future in [pool.submit(prepare, variant, seed, settings, cache) for variant, seed in starts]:
            future.result()
        for future in as_completed([pool.submit(run_cell, key, settings, cache) for key in wanted]):
            yield future.result()


if __name__ == "__main__":
    main()
