"""Faults for runs of the real pipeline: broken reward functions, broken agent loops, processes that die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.harness import ProcessRun, assets, balanced, groups_of, train
from verl_adaptive.stats import open_run, read_snapshot

#: Trainer mode → what chooses it.
MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "colocate_async": ("trainer.v1.trainer_mode=colocate_async",),
    "separate_async": (
        *("+adaptive/platform=cpu_separate", "trainer.v1.trainer_mode=separate_async"),
        "trainer.v1.separate_async.parameter_sync_step=2",
    ),
}

#: Processes by what Ray and vLLM call them.
AGENT_LOOP = "ray::AgentLoopWorker"
ROLLOUT_SERVER = "ray::vLLMHttpServer"
DRIVER = "ray::TaskRunnerV1"
QUEUE = "ray::TransferQueueController"

REWARD = """
import time
import zlib
from pathlib import Path

BEGUN = Path({begun!r})


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    kind = zlib.crc32(f"{{solution_str}}|{{ground_truth}}".encode()) % 24
    first = not BEGUN.exists()
    BEGUN.touch()
{body}
"""


def reward(folder: Path, body: str) -> tuple[str, Path]:
    """A reward function of our own.

    Args:
        folder: where its file goes.
        body: its last lines; ``kind`` is 0 to 23, the same for the same answer, ``first`` is true in the first call.

    Returns:
        The override that chooses it, and a file that exists once it was called.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun = folder / "reward-called"
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    path = folder / "reward.py"
    path.write_text(REWARD.format(begun=str(begun), body=lines))
    return f"reward.custom_reward_function.path={path}", begun


def sound(run: ProcessRun, step: int) -> None:
    """Snapshot, journal and metrics of an unbroken run tell one story: every group once, and nothing but numbers."""
    assert run.steps
    balanced(run)
    table, state, _ = read_snapshot(run.folder / "checkpoints" / f"global_step_{step}" / "adaptive")
    finished = sum(run.series("adaptive/groups/finished_total"))
    failed = sum(run.series("adaptive/groups/failed_total"))
    assert table.col("failures").sum() == failed
    assert table.col("visits").sum() == finished - failed
    for name in table.columns:
        values = table.col(name)[table.col("visits") > 0]
        assert np.isfinite(values.astype(np.float64)).all(), name
    assert (table.col("successes") <= table.col("rollouts")).all()
    store = open_run(run.folder / "checkpoints" / "adaptive")
    seen = groups_of(store)
    assert len(seen) == finished and not seen["submission"].duplicated().any()
    assert seen["failed"].sum() == failed
    assert seen.loc[~seen["failed"], "n"].sum() == table.col("rollouts").sum()
    total = state["engine"]["total"]["rollouts"]
    assert total["generated"] == sum(run.series("adaptive/rollouts/generated_total"))
    assert np.isfinite(run.series("actor/grad_norm")).all()


def processes(title: str) -> list[psutil.Process]:
    """Descendants of this process whose title begins so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith(title):
                found.append(process)
        except psutil.Error:  # gone meanwhile
            continue
    return found


class Killer(threading.Thread):
    """SIGKILLs a process of the pipeline once something has happened.

    Args:
        title: the process; the first that is found.
        when: tells that the time has come.
        after: seconds to wait from then on.

    Attributes:
        killed: the process id; None if it never came to that.
        parent: the command line of that process's parent.
    """

    def __init__(self, title: str, when: Callable[[], bool], after: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.title, self.when, self.after = title, when, after
        self.killed: int | None = None
        self.parent: list[str] = []
        self._over = threading.Event()

    def run(self) -> None:
        while not self.when():
            if self._over.wait(0.1):
                return
        self._over.wait(self.after)
        victims = processes(self.title)
        if victims:
            self.parent = victims[0].parent().cmdline()
            os.kill(victims[0].pid, signal.SIGKILL)
            self.killed = victims[0].pid

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(10)


def failed_run(folder: Path, *overrides: str, timeout: float = 1800, **env: str) -> ProcessRun:
    """A run that must end by itself, with an error."""
    run = train(folder, *overrides, timeout=timeout, **env)
    assert run.code not in (0, None), run.tail
    return run


def changed_data(path: Path, drop: int, add: int) -> tuple[str, int]:
    """The training set without its first ``drop`` rows, in reverse order, with ``add`` new prompts.

    Returns:
        The override that chooses it, and its number of rows.
    """
    table = pq.read_table(assets() / "data" / "train.parquet")
    rows = table.to_pylist()[drop:][::-1]
    for number in range(add):
        row = dict(rows[number])
        row["reward_model"] = {**row["reward_model"], "ground_truth": f"another answer {number}"}
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return f"data.train_files={path}", len(rows)
