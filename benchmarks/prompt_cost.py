"""What a prompt costs verl's agent loop and TransferQueue besides its answers, by who works for it.

    python -m benchmarks.prompt_cost

The same rollouts as many prompts of one rollout and as few prompts of eight, in turn: verl's own worker task, whose sessions
write their row at once, and TransferQueue with verl's settings. What the two differ by, divided by the prompts they differ
by, is a prompt's; the rest is a row's. Both with a message for each status, as verl sends them, and with statuses that share
messages (:mod:`verl_adaptive.integration.status_messages`). Milliseconds of processor time: of the worker, of TransferQueue's
only controller, and of its storage units. ``wall`` is what passed.
"""

from __future__ import annotations

import asyncio
import inspect
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from benchmarks.cells import Parser, load_average, machine, to_json, versions, write_whole
from verl_adaptive.integration.polling import PARTITION
from verl_adaptive.integration.status_messages import gather

OUT = Path(__file__).parent / "results" / "prompt_cost.json"
ROLLOUTS = 2048
REPEATS = 5
SPREADS = (1, 8)
WHO = {"worker": "Worker", "controller": "TransferQueueController", "storage": "SimpleStorageUnit"}


class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's worker; a session writes a row of 64 + 128 tokens and is done."""

    def __init__(self) -> None:
        tq.init()
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 8}}})

    async def _run_agent_loop(self, sampling_params: dict, *, session_id: int, uid: str, **_: Any) -> None:
        prompts, responses = torch.ones(64, dtype=torch.int64), torch.ones(128, dtype=torch.int64)
        ids = torch.cat([prompts, responses])
        row = {
            "uid": uid,
            "prompts": prompts,
            "responses": responses,
            "response_mask": responses,
            "loss_mask": responses,
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "rm_scores": torch.zeros(len(responses)),
        }
        await tq.async_kv_batch_put(
            keys=[f"{uid}_{session_id}_0"],
            partition_id=PARTITION,
            fields=tu.list_of_dict_to_tensordict([row]),
            tags=[{"status": "success", "prompt_len": 64, "response_len": 128, "seq_len": 192}],
        )

    async def generate(self, uids: list[str], n: int) -> None:
        """All prompts at once, as a step's are."""
        prompts = [{"uid": uid, "__rollout_n__": n} for uid in uids]
        await asyncio.gather(*[self._run_prompt(p, {}, trajectory={"validate": False}) for p in prompts])


def apart(worker: Any) -> None:
    """Undo :func:`gather`."""
    names = inspect.unwrap(type(worker)._run_prompt).__globals__
    names["tq"] = inspect.unwrap(names["tq"])


FORMS = {"apart": apart, "together": gather}


def spent() -> dict[str, float]:
    """Processor seconds so far of each kind of process below this one's Ray."""
    out = dict.fromkeys(WHO, 0.0)
    node = psutil.Process(ray._private.worker.global_worker.node.all_processes["raylet"][0].process.pid)
    for process in node.children(recursive=True):
        name = " ".join(process.cmdline())
        for who, kind in WHO.items():
            if f"ray::{kind}" in name:
                times = process.cpu_times()
                out[who] += times.user + times.system
    return out


def measure(worker: Any, label: str, n: int) -> dict[str, float]:
    """Seconds for all rollouts in groups of n."""
    uids = [f"{label}{i}" for i in range(ROLLOUTS // n)]
    tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=[{"is_prompt": True, "status": "pending"}] * len(uids))
    before, begun = spent(), time.perf_counter()
    ray.get(worker.generate.remote(uids, n))
    wall = time.perf_counter() - begun
    after = spent()
    tq.kv_clear(keys=list(tq.kv_list(PARTITION)[PARTITION]), partition_id=PARTITION)
    return {"wall": wall, **{who: after[who] - before[who] for who in WHO}}


def costs(pair: dict[int, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Milliseconds that a prompt and a row take, of the same rollouts in groups of two sizes."""
    many, few = (ROLLOUTS // n for n in SPREADS)
    prompt = {k: (pair[SPREADS[0]][k] - pair[SPREADS[1]][k]) / (many - few) for k in pair[SPREADS[0]]}
    row = {k: (pair[SPREADS[0]][k] - many * prompt[k]) / ROLLOUTS for k in prompt}
    return {name: {k: round(1e3 * v, 3) for k, v in each.items()} for name, each in (("prompt", prompt), ("row", row))}


def main() -> None:
    Parser(prog="prompt_cost", description=__doc__.splitlines()[0]).parse_args()
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    with initialize_config_module("verl.trainer.config", version_base=None):
        units = ["transfer_queue.backend.SimpleStorage.num_data_storage_units=2"]
        tq.init(compose("ppo_trainer", overrides=units).transfer_queue)
    worker = ray.remote(Worker).remote()
    measure(worker, "warm", 1)
    rows = []
    for repeat in range(REPEATS):
        for form, prepare in FORMS.items():
            ray.get(worker.__ray_call__.remote(prepare))
            pair = {n: measure(worker, f"{form}{repeat}n{n}_", n) for n in SPREADS}
            rows.append({"repeat": repeat, "statuses": form, **costs(pair)})
            print(rows[-1], flush=True)
    head = {
        "command": "python -m benchmarks.prompt_cost",
        "rollouts": ROLLOUTS,
        "groups_of": list(SPREADS),
        "machine": machine(),
        "load": load_average(),
        "versions": versions("verl", "TransferQueue", "ray", "torch"),
        "median": {
            form: {
                of: {
                    who: statistics.median(row[of][who] for row in rows if row["statuses"] == form)
                    for who in ("wall", *WHO)
                }
                for of in ("prompt", "row")
            }
            for form in FORMS
        },
    }
    write_whole(OUT, to_json({**head, "rows": rows}, "rows"))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
