"""Runs real verl + vLLM on the CPU platform, in a process of its own, and reads what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.cpu import BEGIN, MARK
from verl_adaptive.integration.selftest import runs, verdicts
from verl_adaptive.integration.selftest.runs import ProcessRun, read_metrics
from verl_adaptive.integration.selftest.verdicts import optimizer_updates

__all__ = [
    "BEGIN", "MARK", "REPO", "ProcessRun", "assets", "balanced", "environment", "optimizer_updates", "read_metrics", "replays",
    "several", "train", "train_rows", "trains", "words",
]  # fmt: skip

REPO = Path(__file__).resolve().parents[2]
ASSETS = Path(os.environ.get("VERL_ADAPTIVE_E2E_DIR", REPO / "runs" / "e2e"))


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


def environment(**extra: str) -> dict[str, str]:
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
        **extra,
    }


def train(folder: Path, *overrides: str, timeout: float = 1800, kill_at: int | None = None, **env: str) -> ProcessRun:
    """A small run of verl's in a folder; see :func:`verl_adaptive.integration.selftest.runs.train`."""
    return runs.train(folder, words(folder, *overrides), environment(**env), timeout=timeout, kill_at=kill_at)


def several(
    folder: Path,
    named: Mapping[str, Sequence[str]],
    *common: str,
    timeout: float = 3600,
    kill_at: int | None = None,
    anew: Collection[str] = (),
    refused: Collection[str] = (),
    **env: str,
) -> dict[str, ProcessRun]:
    """Small runs, one after the other on one start-up of verl; see :mod:`examples.cpu.several`.

    Args:
        folder: that has a folder for each. A run that has one already goes on in it.
        named: name → overrides.
        common: overrides of all.
        timeout: seconds for all.
        kill_at: SIGKILL after so many steps of the last run.
        anew: runs with an agent loop, and a reward function, of their own; later ones share them.
        refused: runs that we refuse before their first step: others may follow.
        env: of the process.

    Returns:
        Each run. The status of one that ended well is 0 whatever came after it; not 0 if it did not begin.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = {
        name: (runs.next_metrics(folder / name), words(folder / name, *common, *overrides))
        for name, overrides in named.items()
    }
    (folder / "runs.json").write_text(
        json.dumps(
            [
                {
                    **{"name": name, "metrics": str(metrics), "words": said},
                    **{"anew": name in anew, "refused": name in refused},
                }
                for name, (metrics, said) in listed.items()
            ]
        )
    )
    command = ["-m", "examples.cpu.several", str(folder / "runs.json")]
    last = next(reversed(listed.values()))[0]
    code, text = runs.call(folder, command, last, timeout, kill_at, environment(**env))
    made = {}
    for name, (metrics, _) in listed.items():
        _, mark, log = text.partition(BEGIN.format(name))
        ended = 0 if metrics.with_suffix(".done").exists() else code or 1
        said = log.partition(MARK)[0] if mark else f"{name} did not begin:\n{text}"
        made[name] = ProcessRun(folder / name, ended, said, read_metrics(metrics))
    return made


def balanced(run: ProcessRun, before: dict | None = None) -> None:
    """Nothing is lost: see :func:`verl_adaptive.integration.selftest.verdicts.imbalance`."""
    assert not verdicts.imbalance(run, before)


def replays(run: ProcessRun, steps: int | None = None) -> None:
    """See :func:`verl_adaptive.integration.selftest.verdicts.differences`."""
    assert not verdicts.differences(run, steps)


def trains(run: ProcessRun, steps: int) -> None:
    """So many steps trained, each with a gradient; nothing is lost, and the record gives the same decisions."""
    assert run.code == 0, run.tail
    assert len(run.steps) == steps
    balanced(run)
    replays(run, steps)
    assert all(g > 0 for g in run.series("actor/grad_norm"))


def trained_groups(run: ProcessRun, step: int) -> dict[str, int]:
    """Rows of each group in verl's dump of what trained in a step, padding left out."""
    lines = (run.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    groups = Counter(json.loads(line)["uid"].split("_")[0].split(".")[0] for line in lines)
    return {uid: n for uid, n in groups.items() if not uid.startswith("pad")}


def train_rows() -> int:
    """Rows of the training set."""
    return pq.read_metadata(assets() / "data" / "train.parquet").num_rows


def validation_rows() -> int:
    """Rows of the validation set."""
    return pq.read_metadata(assets() / "data" / "val.parquet").num_rows


def groups_of(run: Any) -> Any:
    """A journal's finished groups as a data frame."""
    return pa.concat_tables(run.observations()).to_pandas()
