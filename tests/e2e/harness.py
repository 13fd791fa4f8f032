"""Runs real verl + vLLM on the CPU platform, in a process of its own, and reads what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import torch

from verl_adaptive.record import attempts, replay

REPO = Path(__file__).resolve().parents[2]
MARK = "=== run "
BEGIN = MARK + "{} ==="  # before each of several runs, in the log (examples/cpu/several.py)
ASSETS = Path(os.environ.get("VERL_ADAPTIVE_E2E_DIR", REPO / "runs" / "e2e"))
STEPS = ("make_data", "make_model", "warm_start")


def assets() -> Path:
    """Data, model and warm start, made once and reused: ``data/{train,val}.parquet`` and ``model/``."""
    done = ASSETS / "model" / "config.json"
    if not done.exists():
        ASSETS.mkdir(parents=True, exist_ok=True)
        scripts = REPO / "examples" / "cpu"
        for command in (
            [scripts / "make_data.py", "--out", ASSETS / "data"],
            [scripts / "make_model.py", "--out", ASSETS / "fresh"],
            [
                *(scripts / "warm_start.py", "--model", ASSETS / "fresh", "--data", ASSETS / "data"),
                *("--out", ASSETS / "model"),
            ],
        ):
            subprocess.run([sys.executable, *map(str, command)], check=True, timeout=600)
    return ASSETS


@dataclass
class Run:
    """One training run and what it left behind."""

    folder: Path
    code: int
    log: str
    metrics: list[dict] = field(default_factory=list)

    def series(self, name: str) -> list[float]:
        """A metric over the steps that have it."""
        return [m[name] for m in self.metrics if name in m]

    @property
    def tail(self) -> str:
        """The log's end, and before it the trace of a worker that crashed in native code: what a failed test shows."""
        crash = self.log.find("*** SIG")
        return (self.log[crash : crash + 6000] + "\n[...]\n" if crash >= 0 else "") + self.log[-3000:]

    @property
    def steps(self) -> list[dict]:
        """Metrics of the training steps, in order."""
        return [m for m in self.metrics if "training/global_step" in m]

    def prompts(self, step: int) -> list[str]:
        """Prompt of every rollout that trained in a step, from verl's own dump."""
        lines = (self.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        return [json.loads(line)["input"] for line in lines]


def words(folder: Path, *overrides: str) -> list[str]:
    """verl's overrides for a small run in a folder; a later word takes the place of an earlier one."""
    made = assets()
    platform = () if any(o.startswith("+adaptive/platform=") for o in overrides) else ("+adaptive/platform=cpu",)
    return [
        *platform,
        f"actor_rollout_ref.model.path={made / 'model'}",
        f"data.train_files={made / 'data' / 'train.parquet'}",
        f"data.val_files={made / 'data' / 'val.parquet'}",
        f"reward.custom_reward_function.path={REPO / 'examples' / 'cpu' / 'reward.py'}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        "data.seed=1",
        'trainer.logger=["console","file"]',
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_epochs=1000",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
        "trainer.experiment_name=run",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
        *overrides,
    ]


def environment(metrics: Path, **extra: str) -> dict[str, str]:
    # bytecode halves the start-up of a dozen processes
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = (extra.pop("PYTHONPATH", ""), str(REPO), os.environ.get("PYTHONPATH", ""))
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        "VERL_PLATFORM": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_worker_niceness": "0",  # Ray's own is 15: on a busy machine its workers would hardly run
        "VERL_FILE_LOGGER_PATH": str(metrics),
        **extra,
    }


def read_metrics(path: Path) -> list[dict]:
    if not path.exists():
        return []
    out = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last line of a killed run
            continue
        out.append({"step": record["step"], **record["data"]})
    return out


def train(folder: Path, *overrides: str, timeout: float = 1800, kill_at: int | None = None, **env: str) -> Run:
    """Run verl to its end, or until ``kill_at`` training steps are logged, and then SIGKILL it.

    The process that is killed is the one that started Ray: its raylet, workers, driver and vLLM die with it.
    """
    metrics = _next_metrics(folder)
    command = ["-m", "verl.trainer.main_ppo", *words(folder, *overrides)]
    code, text = _call(folder, command, metrics, timeout, kill_at, env)
    return Run(folder, code, text, read_metrics(metrics))


def several(
    folder: Path,
    runs: Mapping[str, Sequence[str]],
    *common: str,
    timeout: float = 3600,
    kill_at: int | None = None,
    module: str = "tests.e2e.several",
    **env: str,
) -> dict[str, Run]:
    """Runs in folders of their own, one after the other on one start-up of verl; see :mod:`tests.e2e.several`.

    Args:
        runs: name → overrides. One that has a folder already goes on in it.
        common: overrides of all.
        kill_at: SIGKILL after so many steps of the last run.
        module: what runs them.

    Returns:
        Each run. The status of one that ended well is 0 whatever came after it; not 0 if it did not begin.
    """
    listed = []
    for name, overrides in runs.items():
        metrics = _next_metrics(folder / name)
        listed.append({"name": name, "metrics": str(metrics), "words": words(folder / name, *common, *overrides)})
    (folder / "runs.json").write_text(json.dumps(listed))
    command = ["-m", module, str(folder / "runs.json")]
    code, text = _call(folder, command, Path(listed[-1]["metrics"]), timeout, kill_at, env)
    made = {}
    for run in listed:
        metrics, (_, mark, log) = Path(run["metrics"]), text.partition(BEGIN.format(run["name"]))
        ended = 0 if metrics.with_suffix(".done").exists() else code or 1
        said = log.partition(MARK)[0] if mark else f"{run['name']} did not begin:\n{text}"
        made[run["name"]] = Run(folder / run["name"], ended, said, read_metrics(metrics))
    return made


def _next_metrics(folder: Path) -> Path:
    """A file for an attempt's metrics; verl's file logger would overwrite an earlier attempt's."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"metrics-{len(list(folder.glob('metrics-*.jsonl')))}.jsonl"


def _call(
    folder: Path, command: list[str], metrics: Path, timeout: float, kill_at: int | None, env: dict[str, str]
) -> tuple[int, str]:
    """Run Python to its end, or until it is killed: the status, and what it said."""
    with open(folder / "log.txt", "a") as log:
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment(metrics, **env),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + timeout
        while process.poll() is None:
            if kill_at is not None and sum("training/global_step" in m for m in read_metrics(metrics)) >= kill_at:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                break
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                tail = (folder / "log.txt").read_text()[-3000:]
                raise TimeoutError(f"verl did not finish within {timeout} s:\n{tail}")
            time.sleep(0.2)
    return process.returncode, (folder / "log.txt").read_bytes()[start:].decode(errors="replace")


def balanced(run: Run, before: dict | None = None) -> None:
    """generated + held before = trained + dropped + surplus + held after, in rollouts and in tokens, every step.

    Args:
        before: the account in the snapshot from which the run went on.
    """
    for unit in ("rollouts", "tokens"):
        account = (before or {}).get(unit, {})
        held = float(account.get("held", 0))
        for m in run.steps:
            name = f"adaptive/{unit}/"
            dropped = sum(v for k, v in m.items() if k.startswith(f"{name}dropped_total/"))
            assert dropped == m[f"{name}dropped_total"]
            out = m[f"{name}trained_total"] + dropped + m[f"{name}surplus_total"] + m[f"{name}held"]
            assert m[f"{name}generated_total"] + held == out, m
            held = m[f"{name}held"]
        generated = account.get("generated", 0) + sum(run.series(f"{name}generated_total"))
        assert run.steps[-1][f"adaptive/cumulative/{unit}_generated"] == generated


def optimizer_updates(run: Run, step: int) -> int:
    """Updates that Adam has really made, from verl's own checkpoint."""
    folder = run.folder / "checkpoints" / f"global_step_{step}" / "actor"
    (path,) = folder.glob("optim_world_size_*_rank_0.pt")
    state = torch.load(path, weights_only=False)["state"]
    return int(next(iter(state.values()))["step"])


def replays(run: Run, steps: int | None = None) -> None:
    """The record of a run: the same policy, driven by the recorded rewards alone, makes the same decisions and counts.

    Args:
        run: the last attempt at a run with ``adaptive.record=true``.
        steps: training steps of all attempts together; None: those of this one.
    """
    metrics = {int(m["training/global_step"]): m for m in run.steps}
    reports = [replay(folder) for folder in attempts(run.folder / "checkpoints" / "record")]
    assert reports and all(report.identical for report in reports), reports
    ledgers = reports[-1].ledgers
    assert len(ledgers) == len(metrics)
    for ledger, m in zip(ledgers, metrics.values(), strict=True):
        for unit, account in (("rollouts", ledger.rollouts), ("tokens", ledger.tokens)):
            counts = [m[f"adaptive/{unit}/{k}"] for k in ("generated_total", "trained_total", "surplus_total", "held")]
            assert counts == [account.generated, account.trained, account.surplus, account.held]
            prefix = f"adaptive/{unit}/dropped_total/"
            assert {k.removeprefix(prefix): v for k, v in m.items() if k.startswith(prefix)} == account.dropped
    if steps is not None:
        assert sum(report.steps for report in reports) >= steps


def train_rows() -> int:
    """Rows of the training set."""
    return pq.read_metadata(assets() / "data" / "train.parquet").num_rows
