"""Compare GRPO with a preset on real verl and vLLM, without a GPU, at the same number of generated rollouts.

    python examples/cpu/quickstart.py [--arms grpo,grpo:4,solo] [--seeds 5] [--rollouts 2048] [--work DIR] [--fresh]

Called by ``examples/quickstart_cpu.sh``, which installs everything first. Makes data and a tiny model, trains every arm
with every seed on one start-up of verl, and ends with a table, a plot and a JSON file. What exists is reused; ``--fresh``
starts over. An arm is a preset and its ``rollout.n``: ``grpo:4`` is GRPO with groups of 4 and as many rollouts a step;
``"solo adaptive.advantage.thin=1"`` is a preset with further words.

Three things let a quarter of an hour tell arms apart:

* more questions than GRPO gets to in so many rollouts, as in a short run on most public data sets: the more there are to
  choose from, the more it matters how the rollouts are spread;
* accuracy is exact: the chance of the right answer on every held-out question, from one forward pass, not from samples;
* arms are compared within a seed, which decides on the order of the questions. The seeds are others than those of the
  benchmark that this setting was chosen from.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # this script's own neighbours, from wherever it is called

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from verl_adaptive.integration.selftest.runs import override, read_metrics  # noqa: E402
from verl_adaptive.integration.selftest.suite import own_ray  # noqa: E402
from verl_adaptive.report.arms import Outcome, Trial, median, outcomes  # noqa: E402
from verl_adaptive.report.arms import plot as draw_arms  # noqa: E402
from verl_adaptive.significance import difference  # noqa: E402

#: The preset that is shown beside GRPO.
BEST = "solo"
ARMS = f"grpo,grpo:4,{BEST}"
#: Runs of each arm, and the first one's seed: not those of the runs from which the setting was chosen.
SEEDS, FIRST = 5, 21

ROLLOUTS_PER_STEP = 128
UPDATES_PER_STEP = 2
N = 8
#: Sixteen steps: accuracy still rises at the end.
ROLLOUTS = 2048
#: Held-out questions of verl's own validation, for the report; the curves are of all, and exact.
VALIDATION = 120
#: Points of a curve, the start left out.
POINTS = 8
#: Presets that generate as many rollouts a step as GRPO; the others get more steps, and end with the rollouts.
EVEN = ("grpo", "solo", "spo", "cero")
#: Seconds on two idle cores, for the first guess of what is left: the start-up, and a step.
START_UP, STEP = 90.0, 3.3

console = Console()


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Attributes:
        preset: the word after ``+adaptive=``, and further words.
        n: ``actor_rollout_ref.rollout.n``; a step has as many rollouts in every arm.
    """

    preset: str
    n: int = N

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read ``grpo`` or ``grpo:4``.

        Raises:
            SystemExit: the number does not divide a step's rollouts, or is none.
        """
        preset, _, n = text.strip().partition(":")
        if n and not (n.isdigit() and int(n) and ROLLOUTS_PER_STEP // UPDATES_PER_STEP % int(n) == 0):
            raise SystemExit(
                f"quickstart: --arms {text}: the number must divide {ROLLOUTS_PER_STEP // UPDATES_PER_STEP}"
            )
        return cls(preset, int(n or N))

    @property
    def name(self) -> str:
        """For people."""
        name = "GRPO" if self.preset == "grpo" else self.preset
        return name if self.n == N and name != "GRPO" else f"{name} n={self.n}"

    @property
    def folder(self) -> str:
        """How its runs' folders begin."""
        return f"{re.sub(r'[^a-z0-9_.]+', '_', self.preset)}-n{self.n}"

    @property
    def prompts(self) -> int:
        """``data.train_batch_size``."""
        return ROLLOUTS_PER_STEP // self.n

    def words(self, seed: int, rollouts: int, work: Path, run: Path) -> list[str]:
        """verl's command line after ``python -m verl.trainer.main_ppo``.

        Apart from the words with "adaptive" and the saved weights, it is what any verl user would write.
        """
        steps = -(-rollouts // ROLLOUTS_PER_STEP)
        preset, *more = self.preset.split()
        return [
            f"+adaptive={preset}",
            *more,
            "+adaptive/platform=cpu",
            f"adaptive.total_rollouts={rollouts}",
            f"adaptive.seed={seed}",
            *(override(f"data.{name}_files", work / "data" / f"{name}.parquet") for name in ("train", "val")),
            f"data.train_batch_size={self.prompts}",
            f"data.val_max_samples={VALIDATION}",
            "data.max_prompt_length=64",
            "data.max_response_length=12",
            f"data.seed={seed}",
            override("reward.custom_reward_function.path", HERE / "reward.py"),
            "algorithm.adv_estimator=grpo",
            override("actor_rollout_ref.model.path", work / "model"),
            f"actor_rollout_ref.rollout.n={self.n}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts // UPDATES_PER_STEP}",
            "actor_rollout_ref.actor.optim.lr=3e-4",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
            'trainer.logger=["console","file"]',
            "trainer.project_name=quickstart",
            f"trainer.experiment_name={run.name}",
            f"trainer.total_training_steps={steps if preset in EVEN else 4 * steps}",
            "trainer.total_epochs=1000",
            "trainer.val_before_train=false",
            f"trainer.test_freq={max(1, steps // 2)}",
            f"trainer.save_freq={max(1, steps // POINTS)}",
            "trainer.resume_mode=disable",
            override("trainer.default_local_dir", run / "checkpoints"),
            override("hydra.run.dir", run / "hydra"),
        ]


@dataclass
class Result:
    """What one run did.

    Attributes:
        arm, preset, n, seed: who it is.
        steps, updates: training steps, optimizer updates.
        generated, trained: rollouts.
        informative_share: share of finished groups with both right and wrong answers.
        curve: rollouts generated so far, exact held-out accuracy.
        seconds: of training steps, saving weights aside.
        checkpoints: the run's folder, for the commands; below the quickstart's.
    """

    arm: str
    preset: str
    n: int
    seed: int
    steps: int = 0
    updates: int = 0
    generated: int = 0
    trained: int = 0
    informative_share: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    checkpoints: str = ""

    @property
    def trial(self) -> Trial:
        """As ``verl-adaptive compare`` takes a run."""
        rollouts, accuracy = np.array(self.curve, dtype=np.float64).T
        return Trial(self.seed, rollouts, accuracy)


# ----------------------------------------------------------------------------------------------------------------------
# Data and model
# ----------------------------------------------------------------------------------------------------------------------


def prepare(work: Path) -> None:
    """Make data and model, unless they are there.

    Args:
        work: The quickstart's folder.
    """
    work.mkdir(parents=True, exist_ok=True)
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


class Held:
    """Exact pass rates on the held-out questions, under any weights.

    Args:
        work: The quickstart's folder.
    """

    def __init__(self, work: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from examples.cpu.warm_start import encode, lessons

        disable_progress_bar()
        self._encoded = encode(AutoTokenizer.from_pretrained(work / "model"), lessons(work / "data" / "val.parquet")[0])

    def accuracy(self, weights: Path) -> Any:
        """Chance of the right answer at temperature 1, of each question, float64."""
        import torch
        from transformers import AutoModelForCausalLM

        from examples.cpu.warm_start import pass_rates

        torch.set_num_threads(1)  # matrices this small gain nothing from a second one
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        return pass_rates(model, self._encoded).double().numpy()


# ----------------------------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------------------------


def train(arms: Sequence[Arm], seeds: int, rollouts: int, work: Path) -> list[Result]:
    """Train what no earlier call has trained.

    Args:
        arms: What is compared.
        seeds: Runs of each, with seeds from ``FIRST``.
        rollouts: Rollouts of each run.
        work: The quickstart's folder, prepared.

    Returns:
        All results, by seed and arm.

    Raises:
        SystemExit: If training fails.
    """
    runs = {
        work / "runs" / f"{arm.folder}-{rollouts}-seed{seed}": (arm, seed)
        for seed in range(FIRST, FIRST + seeds)
        for arm in arms
    }
    missing = {run: who for run, who in runs.items() if not (run / "result.json").exists()}
    if len(missing) < len(runs):
        console.print(f"[dim]{len(runs) - len(missing)} of {len(runs)} runs are there already (--fresh starts over)[/]")
    if missing:
        log, status = _start(missing, rollouts, work)
        judge({run: who for run, who in missing.items() if (run / "metrics.done").exists()}, work)
        # What ended well counts, whatever became of the process afterwards: Ray's own threads may crash as it leaves.
        if not all((run / "result.json").exists() for run in missing):
            tail = "\n".join(deque(log.read_text(errors="replace").splitlines(), maxlen=25))
            console.print(tail, markup=False, highlight=False)
            raise SystemExit(
                f"quickstart: training failed with status {status}; see {log}. The same command goes on with what is missing"
            )
    return [read_result(run / "result.json") for run in runs]


def judge(runs: dict[Path, tuple[Arm, int]], work: Path) -> None:
    """Write the results of runs that ended: their metrics, and the accuracy of the weights that they saved."""
    held = Held(work)
    start = float(held.accuracy(work / "model").mean())
    for run, (arm, seed) in runs.items():
        result = summarize(arm, seed, run)
        result.curve = [(0, start), *_curve(run, held)]
        (run / "result.json").write_text(json.dumps(asdict(result), indent=1))


def read_result(path: Path) -> Result:
    """A finished run's result."""
    return result_of(json.loads(path.read_text()))


def result_of(stored: dict[str, Any]) -> Result:
    """A result as JSON has it."""
    return Result(**{**stored, "curve": [tuple(point) for point in stored["curve"]]})


def planned(runs: dict[Path, tuple[Arm, int]], rollouts: int, work: Path) -> list[dict[str, Any]]:
    """The runs, as :mod:`examples.cpu.several` reads them."""
    return [
        {
            "name": f"{arm.name}, seed {seed}",
            "metrics": str(run / "metrics.jsonl"),
            "words": arm.words(seed, rollouts, work, run),
        }
        for run, (arm, seed) in runs.items()
    ]


def _start(runs: dict[Path, tuple[Arm, int]], rollouts: int, work: Path) -> tuple[Path, int]:
    """Start verl, and train one run after the other; the log and the process's status."""
    for run in runs:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
    listed = planned(runs, rollouts, work)
    plan, log = work / "runs" / "plan.json", work / "runs" / "train.log"
    plan.write_text(json.dumps(listed, indent=1))
    environment = {
        **own_ray(),
        "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p),
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": listed[0]["metrics"],
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_worker_niceness": "0",  # Ray's own is 15: beside anything else its workers would hardly run
    }
    console.print(f"[dim]log: {shown(log)}[/]", soft_wrap=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.cpu.several", str(plan)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=work / "runs",
        )
    try:
        _follow(process, {run["name"]: Path(run["metrics"]) for run in listed}, rollouts)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return log, process.returncode


def _follow(process: subprocess.Popen[bytes], runs: dict[str, Path], rollouts: int) -> None:
    """Show progress until the process ends."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} rollouts"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    total, begun = rollouts * len(runs), time.monotonic()
    first, said = 0.0, 0.0
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting verl", total=total, left="")
        while process.poll() is None:
            now, done, doing = time.monotonic(), 0, "starting verl, Ray and vLLM"
            for name, metrics in runs.items():
                spent = _generated(metrics)
                done += min(rollouts, spent)
                doing = name if metrics.with_suffix(".begun").exists() else doing
            first = first or (now if done else 0.0)
            left = _left(total, done, now - begun, now - first if first else 0.0)
            progress.update(bar, completed=done, description=doing, left=left)
            if not console.is_terminal and now - said > 20:  # a bar does not move in a log file
                said = now
                console.print(f"{doing}: {done:,}/{total:,} rollouts, {left}")
            time.sleep(1.0)
        progress.update(bar, completed=sum(min(rollouts, _generated(m)) for m in runs.values()), left="")


def _left(total: int, done: int, since_start: float, since_first: float) -> str:
    """What is left to wait, in words."""
    step = STEP / ROLLOUTS_PER_STEP
    if done > 4 * ROLLOUTS_PER_STEP:
        seconds = (total - done) * since_first / (done - ROLLOUTS_PER_STEP)
    else:
        seconds = (total - done) * step + (0.0 if done else max(0.0, START_UP - since_start))
    return f"about {max(1, round(seconds / 60))} min left"


def _generated(metrics: Path) -> int:
    done = 0
    for row in read_metrics(metrics):
        done = int(row.get("adaptive/cumulative/rollouts_generated", done))
    return done


# ----------------------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------------------


def summarize(arm: Arm, seed: int, run: Path) -> Result:
    """Add up a run's metrics; its curve is left empty."""
    result = Result(arm.name, arm.preset, arm.n, seed, checkpoints=f"runs/{run.name}/checkpoints")
    groups = informative = 0.0
    for data in read_metrics(run / "metrics.jsonl"):
        if "adaptive/rollouts/generated_total" not in data:
            continue
        result.steps = data["step"]
        result.updates += int(data["adaptive/updates_total"])
        result.generated += int(data["adaptive/rollouts/generated_total"])
        result.trained += int(data["adaptive/rollouts/trained_total"])
        result.seconds += data["timing_s/step"] - data.get("timing_s/save_checkpoint", 0.0)
        finished = data["adaptive/groups/finished_total"]
        groups += finished
        informative += finished * data["adaptive/groups/informative_share"]
    result.informative_share = informative / groups if groups else 0.0
    return result


def _curve(run: Path, held: Held) -> list[tuple[int, float]]:
    """Accuracy of the weights that were saved, by the rollouts generated until then."""
    spent = {
        int(row["step"]): int(row["adaptive/cumulative/rollouts_generated"])
        for row in read_metrics(run / "metrics.jsonl")
        if "adaptive/cumulative/rollouts_generated" in row
    }
    saved = sorted(int(p.name.rpartition("_")[2]) for p in (run / "checkpoints").glob("global_step_*"))
    weights = run / "checkpoints" / "global_step_{}" / "actor" / "huggingface"
    return [(spent[step], float(held.accuracy(Path(str(weights).format(step))).mean())) for step in saved]


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each arm, its seeds in order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.arm, []).append(result)
    return found


def trials(results: Sequence[Result]) -> dict[str, list[Trial]]:
    """The runs of each arm, as ``verl-adaptive compare`` takes them."""
    return {name: [result.trial for result in found] for name, found in by_arm(results).items()}


def summary(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """The table's lines: what, and a cell for each arm; the first arm is what the others are compared with."""
    arms, found = by_arm(results), outcomes(trials(results))
    first = found[0].name

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def each(text: Callable[[list[Result]], str]) -> list[str]:
        return [text(runs) for runs in arms.values()]

    def reached(one: Outcome) -> str:
        share = median(list(one.shares.values()))
        return "never" if share is None else f"{share:.0%}"

    def against(one: Outcome) -> str:
        gaps = list(one.gains.values())
        return f"{mean(gaps):+.3f} ({', '.join(f'{x:+.3f}' for x in gaps)})" if gaps else ""

    return [
        ("prompts x rollouts of a step", each(lambda runs: _shape(runs[0]))),
        ("optimizer updates", each(lambda runs: f"{mean([r.updates for r in runs]):,.0f}")),
        ("rollouts generated", each(lambda runs: f"{mean([r.generated for r in runs]):,.0f}")),
        ("  of them trained", each(lambda runs: f"{mean([r.trained for r in runs]):,.0f}")),
        ("training steps take", each(lambda runs: minutes(mean([r.seconds for r in runs])))),
        ("held-out accuracy at the start", each(lambda runs: f"{runs[0].curve[0][1]:.3f}")),
        ("held-out accuracy at the end", each(lambda runs: f"{mean([r.curve[-1][1] for r in runs]):.3f}")),
        (f"  against {first} (by seed)", [against(one) for one in found]),
        (f"rollouts to {first}'s accuracy (median)", [reached(one) for one in found]),
    ]


def _shape(result: Result) -> str:
    spread = result.preset.split()[0] in ("solo", "spo")  # a step's rollouts go to more prompts
    n = 1 if spread else result.n
    return f"{ROLLOUTS_PER_STEP // n} x {n}"


def verdict(results: Sequence[Result]) -> str:
    """The last arm's final accuracy minus each other's, paired by seed, by the project's rule of significance."""
    arms = trials(results)
    *others, best = arms
    apart = {
        name: difference(list(outcomes({name: arms[name], best: arms[best]}, whole=True)[1].gains.values()))
        for name in others
    }
    ends = "; ".join(f"{gap} over {name}" for name, gap in apart.items())
    return f"Final held-out accuracy, {best}: {ends}."


def minutes(seconds: float) -> str:
    """As 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def show(results: Sequence[Result]) -> None:
    """Print the table and what it says."""
    table = Table("", *by_arm(results), title="Equal numbers of generated rollouts and of updates")
    for name, cells in summary(results):
        table.add_row(name, *cells, end_section=name.startswith("training"))
    console.print(table)
    console.print(verdict(results), highlight=False)


def plot(results: Sequence[Result], *paths: Path) -> None:
    """Draw held-out accuracy against generated rollouts; the ending of each path says the kind of file."""
    title = "Real verl and vLLM on two CPU cores, same rollouts, same updates"
    draw_arms(trials(results), ("rollouts generated", "held-out accuracy"), *paths, title=title)


def shown(path: Path) -> str:
    """A path as short as it can be said here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arms",
        default=ARMS,
        help="presets with commas, grpo:4 with rollout.n=4, further words after a space (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each arm (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help="rollouts of each run (default: %(default)s)")
    parser.add_argument(
        "--work", type=Path, default=Path("outputs/quickstart_cpu"), help="folder (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="throw away what exists and start over")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.rollouts < ROLLOUTS_PER_STEP:
        parser.error(f"--seeds must be 1 or greater, --rollouts {ROLLOUTS_PER_STEP} or greater")
    arms = [Arm.parse(text) for text in options.arms.split(",")]

    work, begun = options.work.resolve(), time.monotonic()
    if options.fresh:
        for name in ("data", "model", "model-untrained", "runs"):
            shutil.rmtree(work / name, ignore_errors=True)
    console.rule("1/3  Data and model")
    prepare(work)
    console.rule(f"2/3  Training: {len(arms)} arms, {options.seeds} seeds")
    results = train(arms, options.seeds, options.rollouts, work)
    console.rule("3/3  Results")
    show(results)
    plot(results, work / "accuracy.png", work / "accuracy.svg")
    (work / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    last = results[-1]
    console.print(
        f"plot:    {shown(work / 'accuracy.png')}\nresults: {shown(work / 'results.json')}\n"
        f"took:    {minutes(time.monotonic() - begun)}\n\n"
        "Next, what the run learned of its questions, and the same word on your own command line:\n\n"
        f"  verl-adaptive report {shown(work / last.checkpoints)} -o report.html\n"
        f"  verl-adaptive doctor <your overrides> +adaptive={last.preset}\n\n"
        f"Its accuracy is verl's validation, an answer to each of {VALIDATION} held-out questions; the table's is exact, over all.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
