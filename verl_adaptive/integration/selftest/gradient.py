"""Rows of zero advantage, left out and kept: the gradient of the tiny model, on this machine's devices and ranks.

    python -m verl_adaptive.integration.selftest.gradient FOLDER/model OUT.json [OVERRIDE ...]

The model under FSDP1 and FSDP2, verl's ``ppo_loss`` and its cut into micro batches are real; the rows are laid out over two
ranks (one, where there is one GPU) as the trainer lays them out. A sum in another order differs by rounding, so what is
allowed is measured: the same rows in reversed order. And the test is shown to see something: without the left-out rows'
tokens in the denominator the gradient is another. Beside that it says what the overrides amount to.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl_adaptive.integration.compat import version_of
from verl_adaptive.integration.layout import PAD, Pass, plan

GROUPS, SIZE, PROMPT, LONGEST = 8, 8, 6, 12
#: verl's default first.
STRATEGIES = ("fsdp", "fsdp2")


class GradientRows:
    """A step's rows, the same on every rank, and what the layout makes of them.

    ``model`` gives the old log-probs and is not wrapped yet; ``ranks`` are data-parallel.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, ranks: int) -> None:
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

        rng, vocabulary = np.random.default_rng(3), model.config.vocab_size
        count = GROUPS * SIZE
        self.group = np.repeat(np.arange(GROUPS), SIZE)
        rate = np.tile([0.5, 0.0, 0.6, 1.0], GROUPS // 4)[self.group]
        reward = (rng.random(count) < rate).astype(np.float32)
        reward[np.searchsorted(self.group, np.arange(0, GROUPS, 2))] = 1.0  # every second group has both
        reward[np.searchsorted(self.group, np.arange(0, GROUPS, 2)) + 1] = 0.0
        length = rng.integers(2, LONGEST + 1, size=count)
        ids = [torch.tensor(rng.integers(0, vocabulary, size=PROMPT + n)) for n in length]
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in length], batch_first=True)
        scores = torch.zeros(mask.shape)
        scores[torch.arange(count), torch.tensor(length) - 1] = torch.tensor(reward)
        advantage, _ = compute_grpo_outcome_advantage(scores, mask, np.array([f"g{g}" for g in self.group]))
        flat = np.array([len(set(reward[self.group == g])) == 1 for g in range(GROUPS)])
        self.trains = ~flat[self.group]
        self.rows = []
        for i, own in enumerate(ids):
            ones = torch.ones(int(length[i]), dtype=torch.int64)
            with torch.no_grad():
                old = log_probs(model, own.to(device), torch.tensor([len(own)]))[PROMPT - 1 : -1].cpu()
            drift = torch.from_numpy(rng.normal(0, 0.2, size=len(ones))).float()
            self.rows.append(
                {
                    "input_ids": own,
                    "attention_mask": torch.ones_like(own),
                    "position_ids": torch.arange(len(own)),
                    "prompts": own[:PROMPT],
                    "responses": own[PROMPT:],
                    "response_mask": ones,
                    "loss_mask": ones,
                    "old_log_probs": old + drift,
                    "advantages": advantage[i, : len(ones)],
                }
            )
        self.padding = {name: value[:1] for name, value in self.rows[0].items()}
        self.padding["input_ids"] = self.padding["attention_mask"] = torch.ones(2, dtype=torch.int64)
        self.padding["position_ids"] = torch.arange(2)
        for name in ("response_mask", "loss_mask", "old_log_probs", "advantages"):
            self.padding[name] = torch.zeros_like(self.padding[name])
        self.layout = plan(
            self.group,
            length + PROMPT,
            np.where(self.trains, 0, length),
            self.trains,
            ranks=ranks,
            updates=2,
            partition=lambda cost, k: get_seqlen_balanced_partitions(cost.tolist(), k_partitions=k, equal_size=True),
            passes=[Pass(ranks, "actor")],
        )

    def kept(self, members: np.ndarray) -> list[list[dict[str, torch.Tensor]]]:
        """Every row of these groups, dealt to the ranks."""
        all_rows = [self.rows[i] for i in np.flatnonzero(np.isin(self.group, members))]
        return [all_rows[rank :: self.layout.ranks] for rank in range(self.layout.ranks)]

    def sent(self, chunk: int, *, tokens: bool) -> list[list[dict[str, torch.Tensor]]]:
        """The rows that the trainer sends, and, where it says so, the tokens of those that it does not."""
        positions = self.layout.positions(chunk)
        made = [dict(self.rows[i]) if i != PAD else dict(self.padding) for i in self.layout.order[positions]]
        if tokens:
            denominator_row = made[int(np.flatnonzero(positions == self.layout.denominator_row(chunk))[0])]
            denominator_row["loss_mask"] = denominator_row["loss_mask"].clone()
            denominator_row["loss_mask"][0] += int(self.layout.zero_row_tokens[chunk])
        share = self.layout.rows_per_chunk
        return [made[rank * share : (rank + 1) * share] for rank in range(self.layout.ranks)]


def log_probs(model: torch.nn.Module, packed: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Log-probability of each next token, for sequences packed one after another."""
    rows = torch.nn.utils.rnn.pad_sequence(list(packed.split(lengths.tolist())), batch_first=True)
    seen = torch.arange(rows.shape[1], device=rows.device)[None] < lengths[:, None].to(rows.device)
    logits = model(rows, attention_mask=seen.long()).logits.float().log_softmax(-1)
    return logits.gather(-1, rows.roll(-1, 1)[..., None])[..., 0][seen]


def wrapped(model: torch.nn.Module, strategy: str, device: torch.device) -> torch.nn.Module:
    """The model, sharded over all ranks."""
    if strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))


class Sharded:
    """A model's gradients, of which every rank has its part."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        from hydra import compose, initialize_config_module
        from verl.utils.config import omega_conf_to_dataclass

        with initialize_config_module("verl.trainer.config", version_base=None):
            words = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
            self.actor = omega_conf_to_dataclass(compose("ppo_trainer", overrides=words).actor_rollout_ref.actor)
        self.model, self.device = model, device

    def gradient(self, ranks: list[list[dict[str, torch.Tensor]]], sequences: float) -> torch.Tensor:
        """This rank's part, of an update with each rank's rows, as verl's FSDP engine makes it."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.utils import prepare_micro_batches
        from verl.workers.utils.losses import ppo_loss

        mine = ranks[dist.get_rank()]
        columns = {n: torch.nested.as_nested_tensor([r[n] for r in mine], layout=torch.jagged) for n in mine[0]}
        data = TensorDict(columns, batch_size=len(mine))
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=120,
            batch_num_tokens=float(sum(r["loss_mask"].sum() for rows in ranks for r in rows)),
            global_batch_size=sequences,
            dp_size=len(ranks),
        )
        self.model.zero_grad()
        for micro in prepare_micro_batches(data, dp_group=dist.group.WORLD, same_micro_num_in_dp=True)[0]:
            packed = micro["input_ids"]
            made = log_probs(self.model, packed.values().to(self.device), packed.offsets().diff())
            loss, _ = partial(ppo_loss, self.actor)(model_output={"log_probs": made}, data=micro.to(self.device))
            loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return torch.cat([(g.to_local() if hasattr(g, "to_local") else g).float().flatten() for g in grads])

    def norm(self, part: torch.Tensor) -> float:
        """Over all ranks."""
        square = part.square().sum()
        dist.all_reduce(square)
        return float(square.sqrt())


def examine(model_dir: str, dtype: str, strategy: str, device: torch.device) -> dict[str, Any]:
    """Compare gradients in a dtype; on every rank at once.

    Returns:
        ``difference``: relative norm of (left out − kept); ``rounding``: of the kept rows in two orders;
        ``without_tokens``: of a wrong denominator; ``left_out``: rows; ``balance``: the largest rank's tokens over the mean;
        ``ok``.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).to(device)
    rows = GradientRows(model, device, dist.get_world_size())
    sharded = Sharded(wrapped(model, strategy, device), device)
    layout, worst, control = rows.layout, {"difference": 0.0, "rounding": 0.0}, np.inf
    tokens = np.zeros(layout.ranks)
    for chunk, members in enumerate(np.array_split(np.arange(GROUPS), 2)):
        sequences = layout.sequences / layout.updates
        kept = rows.kept(members)
        whole = sharded.gradient(kept, sequences)
        size = sharded.norm(whole)
        for name, other in (
            ("difference", rows.sent(chunk, tokens=True)),
            ("rounding", [share[::-1] for share in kept]),
        ):
            worst[name] = max(worst[name], sharded.norm(sharded.gradient(other, sequences) - whole) / size)
        forgotten = rows.sent(chunk, tokens=False)
        control = min(control, sharded.norm(sharded.gradient(forgotten, sequences) - whole) / size)
        tokens += [sum(len(row["input_ids"]) for row in share) for share in forgotten]
    allowed = max(8 * worst["rounding"], 1e-6)
    left_out = int((~rows.trains).sum())
    return {
        **worst,
        "allowed": allowed,
        "without_tokens": control,
        "left_out": left_out,
        "balance": float(tokens.max() / tokens.mean()),
        "ok": bool(worst["difference"] <= allowed < control) and left_out > 0,
    }


def _rank(rank: int, ranks: int, place: str, model_dir: str, out: str) -> None:
    """One data-parallel rank: every strategy and dtype."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{place}", rank=rank, world_size=ranks)
    kinds = ["float32", *(["bfloat16"] if cuda and torch.cuda.is_bf16_supported() else [])]
    found = {f"{s} {kind}": examine(model_dir, kind, s, device) for s in STRATEGIES for kind in kinds}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def machine() -> dict[str, Any]:
    """The accelerators of this process."""
    if not torch.cuda.is_available():
        return {"accelerators": []}
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(len(names)))
    return {"accelerators": names, "memory of one (GiB)": round(memory / 2**30), "cuda": torch.version.cuda}


def settings(words: list[str]) -> dict[str, Any]:
    """What verl's overrides amount to: strategy, engine, replicas, parallelism, dtype."""
    from hydra import compose, initialize_config_module
    from verl.utils.torch_dtypes import PrecisionType

    from verl_adaptive.integration.facts import replicas_of

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    versions = [have for name in (rollout.name, f"{rollout.name}-cpu") if (have := version_of(name))]
    computed = "the engine's own"
    if actor.strategy in ("fsdp", "fsdp2"):  # whose engine does not read fsdp_config.dtype
        mixed = actor.fsdp_config.get("mixed_precision") or {}
        computed = str(PrecisionType.to_dtype(mixed.get("param_dtype", "bf16"))).removeprefix("torch.")
    return {
        "strategy": actor.strategy,
        "ranks": config.trainer.n_gpus_per_node
        * config.trainer.nnodes
        // actor.get("ulysses_sequence_parallel_size", 1),
        "engine": " ".join([rollout.name, *versions[:1]]),
        "replicas": replicas_of(config),
        "TP": rollout.tensor_model_parallel_size,
        "rollout dtype": rollout.dtype,
        "actor dtype": computed,
        "free_cache_engine": rollout.free_cache_engine,
        "longest answer": config.data.max_response_length,
    }


def main() -> None:
    model_dir, out, *words = sys.argv[1:]
    found = machine()
    ranks = min(2, len(found["accelerators"]) or 2)
    result = {"machine": found, "ranks": ranks, "gradient": {}, "settings": settings(words) if words else {}}
    Path(out).write_text(json.dumps(result))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _rank, (ranks, str(Path(folder) / "store"), model_dir, str(Path(folder) / "found")), nprocs=ranks
        )
        result["gradient"] = json.loads((Path(folder) / "found").read_text())
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
