"""What a step costs in the driver, beside generation and training: requests, looks, rewards, decisions, the batch.

    python -m benchmarks.driver                         # 8,192 and 65,536 rollouts a step, every preset
    python -m benchmarks.driver --rollouts 8192 --presets grpo greso     # these rows anew, the others stay

The rollout client, the engine, the layout and TransferQueue are the real ones, TransferQueue with verl's own settings; only the
rollout workers are a stand-in, which writes the rows between the looks, in twenty waves, and whose time does not count.
Seconds are processor time of the driver's process, up to twice as much on a busy machine; ``wall`` is what passed. Parts
named ``queue`` are inside TransferQueue, those named ``verl`` are what verl's own trainer does for the same prompts and
rows: reading prompts, making a batch of them, balancing rows over ranks. What the driver does while answers are still under way costs nobody anything: ``after_last`` is what a step waits for.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import Dataset, RandomSampler
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from benchmarks.cells import Parser, load_average, machine, to_json, versions, write_whole
from benchmarks.presets import SHIPPED, SOLO
from verl_adaptive.config import RunFacts
from verl_adaptive.engine import make_engine
from verl_adaptive.engine.shape import step_shape
from verl_adaptive.integration import rollout_client as client_module
from verl_adaptive.integration.abort import Aborted
from verl_adaptive.integration.dataloader import DataloaderPrompts
from verl_adaptive.integration.layout import plan
from verl_adaptive.integration.polling import PARTITION
from verl_adaptive.integration.rollout_client import RolloutHandles
from verl_adaptive.integration.run_store import RunStore
from verl_adaptive.integration.sync_client import SyncRolloutClient
from verl_adaptive.policy import build_policy
from verl_adaptive.simulate.presets import compose_preset
from verl_adaptive.stats import Journal, StatsTable
from verl_adaptive.stats.keys import KEY_DTYPE

#: TransferQueue's calls, untimed: the stand-in's own.
RAW = SimpleNamespace(put=tq.kv_batch_put, clear=tq.kv_clear, list=tq.kv_list)
OUT = Path(__file__).parent / "results" / "driver.json"
MEASURED = {**SHIPPED, "solo": SOLO["solo"]}
N = 16
WAVES = 20
TOKENS = 128
RANKS = 64
STEPS = 2


class Clock:
    """Seconds by part; a part inside a part is its own."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self._stack: list[str] = []
        self._at = (time.process_time(), time.perf_counter())
        self._set = ExitStack()

    def _charge(self) -> None:
        now = (time.process_time(), time.perf_counter())
        if self._stack:
            name = self._stack[-1]
            self.cpu[name] = self.cpu.get(name, 0.0) + now[0] - self._at[0]
            self.wall[name] = self.wall.get(name, 0.0) + now[1] - self._at[1]
        self._at = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def around(self, owner: Any, method: str, name: str) -> None:
        """Time a method of an object or module, until :meth:`off`."""
        real = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return real(*args, **kwargs)

        setattr(owner, method, timed)
        self._set.callback(setattr, owner, method, real)

    def off(self) -> None:
        """Time nothing any longer."""
        self._set.close()


class Prompts(Dataset):
    """Many prompts, as verl's data set gives them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        return {
            "raw_prompt": [{"role": "user", "content": f"question {index}"}],
            "data_source": "toy",
            "index": 0,
            "number": int(index),
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }


class Workers:
    """Writes what verl's agent-loop workers write, when it is told to."""

    def __init__(self, clock: Clock, rate: np.ndarray) -> None:
        self.clock, self.rate, self.rng = clock, rate, np.random.default_rng(0)
        self.jobs: list[tuple[str, int, int]] = []
        self.total = 0
        self.last: tuple[dict[str, float], dict[str, float]] = ({}, {})

    def submit(self, batch: TensorDict) -> int:
        with self.clock.part("workers"):
            uids = [getattr(u, "data", u) for u in batch["uid"]]
            RAW.put(keys=uids, partition_id=PARTITION, tags=[{"is_prompt": True, "status": "pending"}] * len(uids))
            numbers, amounts = list(batch["number"]), list(batch["__rollout_n__"])
            self.jobs += [(u, int(n), int(i)) for u, n, i in zip(uids, amounts, numbers, strict=True)]
            self.total = max(self.total, len(self.jobs))
        return len(uids)

    def deliver(self, *_: Any) -> None:
        """One wave of answers, in no order."""
        with self.clock.part("workers"):
            self.rng.shuffle(self.jobs)  # type: ignore[arg-type]
            wave = max(1, self.total // WAVES)
            taken, self.jobs = self.jobs[:wave], self.jobs[wave:]
            for start in range(0, len(taken), 256):
                self._write(taken[start : start + 256])
        self.last = (dict(self.clock.cpu), dict(self.clock.wall))

    def _write(self, jobs: list[tuple[str, int, int]]) -> None:
        keys = [f"{uid}_{s}_0" for uid, n, _ in jobs for s in range(n)]
        home = np.repeat([uid for uid, _, _ in jobs], [n for _, n, _ in jobs])
        reward = self.rng.random(len(keys)) < np.repeat(self.rate[[i for *_, i in jobs]], [n for _, n, _ in jobs])
        lengths = TOKENS + self.rng.integers(-32, 33, len(keys))
        scores = [torch.zeros(int(n)) for n in lengths]
        for row, good in zip(scores, reward, strict=True):
            row[-1] = float(good)
        masks = torch.nested.as_nested_tensor(
            [torch.ones(int(n), dtype=torch.int64) for n in lengths], layout=torch.jagged
        )
        fields = TensorDict(
            {
                "uid": NonTensorStack(*[NonTensorData(u) for u in home]),
                "rm_scores": torch.nested.as_nested_tensor(scores, layout=torch.jagged),
                "response_mask": masks,
            },
            batch_size=len(keys),
        )
        tags = [
            {
                "status": "success",
                "prompt_len": 64,
                "response_len": int(n),
                "seq_len": 64 + int(n),
                "min_global_steps": 0,
            }
            for n in lengths
        ]
        RAW.put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)
        RAW.put(keys=[uid for uid, _, _ in jobs], partition_id=PARTITION, tags=[{"status": "finished"}] * len(jobs))

    def sweep(self) -> None:
        """As :class:`verl_adaptive.integration.abort.Abort`."""

    def __call__(self, uids: list[str]) -> Aborted:
        with self.clock.part("workers"):
            mine = set(uids)
            self.jobs = [job for job in self.jobs if job[0] not in mine]
            RAW.clear(keys=uids, partition_id=PARTITION)
        return Aborted(0, 0)


def run(preset: str, rollouts: int) -> dict[str, Any]:
    """Seconds of the second step of a preset: the first one's caches are warm, its yield is known."""
    batch, clock = rollouts // N, Clock()
    prompts = 40 * batch
    rng = np.random.default_rng(1)
    kind = rng.integers(0, 3, prompts)  # as many hopeless as solved prompts, and as many in between
    workers = Workers(clock, np.where(kind == 0, 0.0, np.where(kind == 1, 1.0, rng.random(prompts))))
    shape = step_shape(compose_preset(MEASURED[preset]), batch, N, prompts)
    config = shape.config
    policy = build_policy(config)
    keys = np.zeros(prompts, dtype=KEY_DTYPE)
    keys["lo"] = np.arange(prompts)
    table = StatsTable()
    whole = policy.sampler.kind == "stream" and policy.sampler.whole_batches
    data = Prompts(prompts)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    stream = DataloaderPrompts(data, order, chunk=batch if whole else 1, workers=0)
    facts = RunFacts.of(config, batch=shape.groups, n=shape.n, steps=100, prompts=prompts)
    engine = make_engine(policy, table, config, facts, table.rows_for(keys), stream)
    step_of = [1]
    handles = RolloutHandles(workers.submit, lambda: step_of[0], single_turn=True)
    client = SyncRolloutClient(engine, stream, handles, workers)  # type: ignore[arg-type]
    timing(clock, client, workers)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "adaptive", {"preset": preset})
        journal.begin(0)
        store = SimpleNamespace(journal=journal, table=table, adaptive=config, plan=SimpleNamespace(longest=2 * TOKENS))
        for step in range(1, STEPS + 1):
            step_of[0] = step
            clock.cpu.clear()
            clock.wall.clear()
            client.start()
            made = client.complete()
            with clock.part("layout"):
                lengths = dict(zip(made.keys, (tag["seq_len"] for tag in made.tags), strict=True))
                cut(clock, made, lengths)
            with clock.part("commit"):
                RunStore.commit(store, step, client.finish(), engine)  # type: ignore[arg-type]
            RAW.clear(keys=made.keys, partition_id=PARTITION)
        journal.close()
    clock.off()
    left = (RAW.list(PARTITION) or {}).get(PARTITION, {})
    if left:
        RAW.clear(keys=list(left), partition_id=PARTITION)
    cpu = {k: v for k, v in clock.cpu.items() if k != "workers"}
    before, _ = workers.last
    late = sum(v - before.get(k, 0.0) for k, v in cpu.items())
    return {
        "preset": preset,
        "rollouts": rollouts,
        "generated": int(made.result.ledger.rollouts.generated),
        "rows": len(made.keys),
        "parts": {k: round(v, 3) for k, v in sorted(cpu.items())},
        **{whose: round(sum(v for k, v in cpu.items() if _whose(k) == whose), 3) for whose in ("own", "verl", "queue")},
        "after_last": round(late, 3),
        "wall": round(sum(v for k, v in clock.wall.items() if k != "workers"), 3),
    }


def _whose(part: str) -> str:
    name, *more = part.split(" ")
    return name if more else "own"


def cut(clock: Clock, made: Any, lengths: dict[str, int]) -> None:
    """The layout of the batch over 64 ranks, as the trainer asks for it."""

    def partition(cost: np.ndarray, k: int) -> list[list[int]]:
        with clock.part("verl balance"):
            return get_seqlen_balanced_partitions(cost.tolist(), k_partitions=k, equal_size=True)

    plan(
        made.group,
        np.array([lengths[key] if trains else 0 for key, trains in made.sequences], dtype=np.int64),
        made.zero_row_tokens,
        np.array([trains for _, trains in made.sequences], dtype=bool),
        ranks=RANKS,
        updates=4,
        partition=partition,
        workload=lambda x: calculate_workload(torch.as_tensor(x, dtype=torch.int64)),
    )


def timing(clock: Clock, client: SyncRolloutClient, workers: Workers) -> None:
    """Put the clock around the parts of a step; answers come between its looks."""
    queue, engine = client.queue, client.engine
    clock.around(tq.get_client(), "kv_retrieve_meta", "queue names")
    clock.around(tq.get_client(), "get_data", "queue get")
    clock.around(tq.get_client(), "put", "queue put")
    for method, name in (("list", "list"), ("batch_get", "get"), ("batch_put", "put"), ("clear", "clear")):
        clock.around(tq, f"kv_{method}", f"queue {name}")
    for function in ("collate_fn", "stacked"):
        clock.around(client_module, function, "verl batch")
    clock.around(client_module.tu, "get_tensordict", "verl batch")
    clock.around(client.stream, "take", "verl prompts")
    for owner, methods, name in (
        (engine, ("begin", "receive", "never_trains", "finish"), "decide"),
        (queue, ("look",), "look"),
        (queue, ("collect",), "read"),
        (queue, ("take_batch", "close", "drop"), "settle"),
        (client, ("send",), "send"),
    ):
        for method in methods:
            clock.around(owner, method, name)
    client.pause = workers.deliver  # type: ignore[method-assign]
    real: Callable = client.timeout

    def timeout() -> Any:
        made = real()
        made.rest = workers.deliver
        return made

    client.timeout = timeout  # type: ignore[method-assign]


def put(row: dict[str, Any]) -> None:
    """Write a row in the place of its preset's and size's earlier one; the others stay."""
    former = json.loads(OUT.read_text())
    rows = former["rows"]
    order = list(MEASURED)
    rows = [r for r in rows if (r["preset"], r["rollouts"]) != (row["preset"], row["rollouts"])] + [row]
    rows.sort(key=lambda r: (r["rollouts"], order.index(r["preset"])))
    said = {
        "groups_of": N,
        "waves": WAVES,
        "tokens": TOKENS,
        "ranks": RANKS,
        "machine": machine(),
        "versions": versions("verl", "TransferQueue", "ray", "torch"),
        "heads": former["heads"],
    }
    write_whole(OUT, to_json({**said, "rows": rows}, "rows"))


def main() -> None:
    parser = Parser(prog="driver", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rollouts", type=int, nargs="+", default=[8192, 65536], help="rollouts of a batch (groups of 16)"
    )
    parser.add_argument("--presets", nargs="+", default=list(MEASURED), choices=list(MEASURED))
    args = parser.parse_args()
    logging.getLogger("verl_adaptive").setLevel("ERROR")
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    with initialize_config_module("verl.trainer.config", version_base=None):
        storage = "transfer_queue.backend.SimpleStorage"
        units = [f"{storage}.num_data_storage_units=2", f"{storage}.total_storage_size=null"]
        tq.init(compose("ppo_trainer", overrides=units).transfer_queue)
    for rollouts in args.rollouts:
        for preset in args.presets:
            row = {**run(preset, rollouts), "load": load_average()}
            print(
                f"{preset:14s} {rollouts:6d}: own {row['own']:.2f} s, verl {row['verl']:.2f} s, queue {row['queue']:.2f} s, after the last answer "
                f"{row['after_last']:.2f} s, wall {row['wall']:.1f} s; {row['parts']}",
                flush=True,
            )
            put(row)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
