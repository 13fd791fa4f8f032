"""Training runs as processes of their own, and what they left behind. Imports neither verl nor torch."""

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

from hydra.core.override_parser.types import Quote, QuotedString


@dataclass
class ProcessRun:
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


def read_metrics(path: Path) -> list[dict]:
    """What verl's file logger wrote, with the step."""
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


def train(
    folder: Path, words: Sequence[str], env: Mapping[str, str], *, timeout: float = 1800, kill_at: int | None = None
) -> ProcessRun:
    """Run verl to its end, or until ``kill_at`` training steps are logged, and then SIGKILL it.

    The process that is killed is the one that started Ray: its raylet, workers, driver and vLLM die with it.

    Args:
        folder: for the log and the metrics.
        words: verl's overrides.
        env: of the process; the place of the metrics is added.
        timeout: seconds; afterwards its whole session is killed, and the status is 124.
        kill_at: SIGKILL after so many training steps.
    """
    metrics = next_metrics(folder)
    code, text = call(folder, ["-m", "verl.trainer.main_ppo", *words], metrics, timeout, kill_at, env)
    return ProcessRun(folder, code, text, read_metrics(metrics))


def override(key: str, value: object) -> str:
    """A word of verl's command line whose value Hydra takes as it is: a path has whatever letters its user chose."""
    return f"{key}={QuotedString(str(value), Quote.single).with_quotes()}"


def next_metrics(folder: Path) -> Path:
    """A file for an attempt's metrics; verl's file logger would overwrite an earlier attempt's."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"metrics-{len(list(folder.glob('metrics-*.jsonl')))}.jsonl"


def end_on_signals() -> None:
    """Let SIGTERM, and SIGHUP where ``nohup`` does not ignore it, end this process as Ctrl-C does: a training run has a session
    of its own and would keep the GPUs."""
    for ends in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ends) is not signal.SIG_IGN:
            signal.signal(ends, lambda number, _: sys.exit(128 + number))


def call(
    folder: Path, command: list[str], metrics: Path, timeout: float, kill_at: int | None, env: Mapping[str, str]
) -> tuple[int, str]:
    """Run Python to its end, or until it is killed: the status (124: out of time), and what it said."""
    with open(folder / "log.txt", "a") as log:
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**env, "VERL_FILE_LOGGER_PATH": str(metrics)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline, late = time.monotonic() + timeout, 0
        try:
            while process.poll() is None:
                if kill_at is not None and sum("training/global_step" in m for m in read_metrics(metrics)) >= kill_at:
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
                    break
                if time.monotonic() > deadline:
                    late = 124
                    break
                time.sleep(0.2)
        finally:
            if process.poll() is None:  # out of time, interrupted, or ended
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if late:
            print(f"\nTimeoutError: it did not end within {timeout:g} s", file=log, flush=True)
    return late or process.returncode, (folder / "log.txt").read_bytes()[start:].decode(errors="replace")
