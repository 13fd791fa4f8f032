"""Compare plain GRPO with GRESO on real verl and vLLM, without a GPU, at the same number of generated rollouts.

    python examples/cpu/quickstart.py [--presets grpo,greso] [--rollouts 7680] [--work DIR] [--fresh]

Called by ``examples/quickstart_cpu.sh``, which installs everything first. Makes data and a tiny model, trains once with
each preset, and ends with a table, a plot and a JSON file. What exists is reused; ``--fresh`` starts over.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent

PROMPTS_PER_STEP = 16
ROLLOUTS_PER_PROMPT = 8

#: Steps between two validations. A step of GRPO generates fewer rollouts than one that refills its batch.
VALIDATE_EVERY = {"grpo": 5}
VALIDATE_EVERY_DEFAULT = 3

console = Console()


@dataclass
class Result:
    """What one run did.

    Attributes:
        preset: The preset's name.
        steps: Training steps.
        updates: Optimizer updates.
        generated: Rollouts generated.
        trained: Rollouts that trained.
        surplus: Rollouts that were left over when a batch was full.
        dropped: Rollouts dropped, by reason.
        informative_share: Share of finished groups with both right and wrong answers.
        accuracy: Points of the validation curve: rollouts generated so far, accuracy.
        seconds: Wall clock of the whole run, start-up included.
        training_seconds: Of it, in training steps.
    """

    preset: str
    steps: int = 0
    updates: int = 0
    generated: int = 0
    trained: int = 0
    surplus: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    informative_share: float = 0.0
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    training_seconds: float = 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Data and model
# ----------------------------------------------------------------------------------------------------------------------


def prepare(work: Path) -> None:
    """Make data and model, unless they are there.

    Args:
        work: The quickstart's folder.
    """
    data, untrained, model = work / "data", work / "model-untrained", work / "model"
    if not (data / "done").exists():
        _call("make_data.py", "--out", data)
        (data / "done").touch()
    if not (model / "done").exists():
        _call("make_model.py", "--out", untrained)
        _call("warm_start.py", "--model", untrained, "--data", data, "--out", model)
        (model / "done").touch()


def _call(script: str, *arguments: Any) -> None:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    if subprocess.run(command, env=environment).returncode:
        raise SystemExit(f"quickstart: {script} failed; see above")


# ----------------------------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------------------------


def command_line(preset: str, rollouts: int, work: Path, run: Path) -> list[str]:
    """verl's command line.

    Args:
        preset: Name of the preset.
        rollouts: Rollouts to generate.
        work: The quickstart's folder.
        run: The run's folder.

    Returns:
        The command. Apart from the two ``+adaptive`` words and the budget, it is what any verl user would write.
    """
    group = PROMPTS_PER_STEP * ROLLOUTS_PER_PROMPT
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        f"+adaptive={preset}",
        "+adaptive/platform=cpu",
        f"adaptive.total_rollouts={rollouts}",
        f"data.train_files={work / 'data' / 'train.parquet'}",
        f"data.val_files={work / 'data' / 'val.parquet'}",
        f"data.train_batch_size={PROMPTS_PER_STEP}",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        "data.seed=1",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={work / 'model'}",
        f"actor_rollout_ref.rollout.n={ROLLOUTS_PER_PROMPT}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS_PER_STEP}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        'trainer.logger=["console","file"]',
        "trainer.project_name=quickstart",
        f"trainer.experiment_name={preset}",
        f"trainer.total_training_steps={-(-rollouts // group)}",
        "trainer.val_before_train=true",
        f"trainer.test_freq={VALIDATE_EVERY.get(preset, VALIDATE_EVERY_DEFAULT)}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={run / 'checkpoints'}",
        f"hydra.run.dir={run / 'hydra'}",
    ]


def train(preset: str, rollouts: int, work: Path) -> Result:
    """Train with one preset, or read the result of an earlier run of the same length.

    Args:
        preset: Name of the preset.
        rollouts: Rollouts to generate.
        work: The quickstart's folder.

    Returns:
        What the run did.

    Raises:
        SystemExit: If training fails.
    """
    run = work / "runs" / f"{preset}-{rollouts}"
    finished = run / "result.json"
    if finished.exists():
        console.print(f"[dim]{preset}: reusing {finished}[/]")
        stored = json.loads(finished.read_text())
        stored["accuracy"] = [tuple(point) for point in stored["accuracy"]]
        return Result(**stored)

    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    log, metrics = run / "train.log", run / "metrics.jsonl"
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_DEDUP_LOGS": "1",
    }
    # Bytecode halves the start-up of a dozen processes.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    console.print(f"[dim]{preset}: log in {log}[/]", soft_wrap=True)
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command_line(preset, rollouts, work, run), stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=run
        )
    try:
        _follow(process, preset, rollouts, metrics)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        tail = "\n".join(deque(log.read_text(errors="replace").splitlines(), maxlen=25))
        console.print(tail, markup=False, highlight=False)
        raise SystemExit(f"quickstart: training with {preset} failed with status {process.returncode}; see {log}")
    result = summarize(preset, metrics, _validation_counts(work))
    result.seconds = time.monotonic() - start
    finished.write_text(json.dumps(asdict(result), indent=1))
    return result


def _follow(process: subprocess.Popen[bytes], preset: str, rollouts: int, metrics: Path) -> None:
    """Show progress until the process ends."""
    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[preset]}[/]"),
        BarColumn(),
        TextColumn("{task.completed:>5.0f}/{task.total:.0f} rollouts"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting Ray, verl and vLLM", total=rollouts, preset=preset)
        said = 0.0
        while process.poll() is None:
            time.sleep(1.0)
            done, text = _latest(metrics)
            if text:
                progress.update(bar, completed=done, description=text)
            # A bar does not move in a log file.
            if text and not console.is_terminal and time.monotonic() - said > 15:
                said = time.monotonic()
                console.print(f"{preset}: {done}/{rollouts} rollouts, {text}")
        done, text = _latest(metrics)
        progress.update(bar, completed=done, description=text or "ended")


def _latest(metrics: Path) -> tuple[int, str]:
    """Rollouts generated so far, and a line on the latest step."""
    done, step, reward, text = 0, 0, 0.0, ""
    for row in read_metrics(metrics):
        data = row["data"]
        step = row["step"]
        done = int(data.get("adaptive/cumulative/rollouts_generated", done))
        reward = data.get("adaptive/reward/generated_mean", reward)
        text = f"step {step}, reward {reward:.2f}"
    return done, text


# ----------------------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows that verl's file logger has written so far: ``{"step": …, "data": {…}}``."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return  # the last line is still being written


def _validation_counts(work: Path) -> dict[str, int]:
    import pandas as pd

    return (
        pd.read_parquet(work / "data" / "val.parquet", columns=["data_source"])["data_source"].value_counts().to_dict()
    )


def summarize(preset: str, metrics: Path, counts: dict[str, int]) -> Result:
    """Add up a run's metrics.

    Args:
        preset: Name of the preset.
        metrics: What verl's file logger wrote.
        counts: Validation prompts of each task; verl reports accuracy for each task.

    Returns:
        What the run did; its wall clock is left at 0.
    """
    result = Result(preset)
    groups = informative = 0.0
    dropped = "adaptive/rollouts/dropped_total/"
    for row in read_metrics(metrics):
        data = row["data"]
        if "adaptive/rollouts/generated_total" in data:
            result.steps = row["step"]
            result.updates += int(data.get("adaptive/updates_total", 0))
            result.generated += int(data["adaptive/rollouts/generated_total"])
            result.trained += int(data["adaptive/rollouts/trained_total"])
            result.surplus += int(data["adaptive/rollouts/surplus_total"])
            result.training_seconds += data.get("timing_s/step", 0.0)
            for name, value in data.items():
                if name.startswith(dropped) and value:
                    reason = name.removeprefix(dropped)
                    result.dropped[reason] = result.dropped.get(reason, 0) + int(value)
            finished = data["adaptive/groups/finished_total"]
            groups += finished
            informative += finished * data["adaptive/groups/informative_share"]
        correct = [
            data[f"val-core/{task}/acc/mean@1"] * n
            for task, n in counts.items()
            if f"val-core/{task}/acc/mean@1" in data
        ]
        if len(correct) == len(counts):
            result.accuracy.append((result.generated, sum(correct) / sum(counts.values())))
    result.informative_share = informative / groups if groups else 0.0
    return result


def show(results: list[Result], prompts: int) -> None:
    """Print the table.

    Args:
        results: The runs.
        prompts: Number of validation prompts.
    """
    table = Table("", *(result.preset for result in results), title="Equal numbers of generated rollouts")

    def line(name: str, *cells: str, end: bool = False) -> None:
        table.add_row(name, *cells, end_section=end)

    line("steps", *(str(result.steps) for result in results))
    line("optimizer updates", *(str(result.updates) for result in results))
    line("rollouts generated", *(f"{result.generated:,}" for result in results))
    line("  trained", *(f"{result.trained:,}" for result in results))
    for reason in sorted({reason for result in results for reason in result.dropped}):
        line(f"  dropped: {reason}", *(f"{result.dropped.get(reason, 0):,}" for result in results))
    line("  surplus", *(f"{result.surplus:,}" for result in results), end=True)
    line("informative groups", *(f"{result.informative_share:.0%}" for result in results), end=True)
    line(
        "validation accuracy before",
        *(f"{result.accuracy[0][1]:.3f}" if result.accuracy else "-" for result in results),
    )
    line(
        "validation accuracy after",
        *(f"[bold]{result.accuracy[-1][1]:.3f}[/]" if result.accuracy else "-" for result in results),
        end=True,
    )
    line("wall clock", *(_minutes(result.seconds) for result in results))
    line("  of it in training steps", *(_minutes(result.training_seconds) for result in results))
    if results[-1].accuracy:
        share = results[-1].accuracy[-1][1]
        error = (share * (1 - share) / prompts) ** 0.5
        table.caption = f"{prompts} validation prompts, one seed: a difference below {2 * error:.2f} says nothing."
    console.print(table)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def plot(results: list[Result], path: Path) -> None:
    """Draw validation accuracy against generated rollouts.

    Args:
        results: The runs.
        path: PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for result, marker in zip(results, "osD^v<>*", strict=False):
        if result.accuracy:
            axes.plot(*zip(*result.accuracy, strict=True), marker=marker, markersize=4, label=result.preset)
    axes.set(xlabel="rollouts generated", ylabel="validation accuracy", title="Same rollouts, same updates per step")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare presets on real verl and vLLM, without a GPU.")
    parser.add_argument("--presets", default="grpo,greso", help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--rollouts", type=int, default=7680, help="rollouts to generate in each run (default: %(default)s)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("outputs/quickstart_cpu"), help="folder (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="throw away what exists and start over")
    options = parser.parse_args()

    work = options.work.resolve()
    if options.fresh:
        for name in ("data", "model", "model-untrained", "runs"):
            shutil.rmtree(work / name, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    console.rule("Data and model")
    prepare(work)
    console.rule("Training")
    results = [train(preset.strip(), options.rollouts, work) for preset in options.presets.split(",")]
    console.rule("Results")
    show(results, sum(_validation_counts(work).values()))
    image, summary = work / "accuracy.png", work / "results.json"
    plot(results, image)
    summary.write_text(json.dumps([asdict(result) for result in results], indent=1))
    console.print(f"plot:    {image}\nresults: {summary}\nlogs:    {work / 'runs'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
