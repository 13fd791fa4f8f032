"""Several training runs, one after the other, on one start-up of verl.

    python -m examples.cpu.several runs.json

A start-up is a dozen processes that import verl: a minute and a half of processor time, against a few seconds for a step.
Ray, TransferQueue, the worker processes, vLLM, the reward worker and the agent loop's are started by the first run and kept.
Every run has its own configuration, trainer, policy, data loader, statistics and checkpoints, and a model and an optimizer
made anew. What is read once, when a process starts, is the first run's: ranks, vLLM's settings. So are reward function,
agent loop, and the sampling that it asks vLLM for, unless a run is to have these two processes anew.

``runs.json`` lists the runs: their names, overrides (``words``), files for verl's ``metrics``, and, false if it is not said,
whether they are ``anew`` or to be ``refused`` before their first step. The first other one that fails ends it all.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from examples.cpu import BEGIN
from verl_adaptive.errors import AdaptiveError

__all__ = ["Several", "main", "planned"]


class Planned(NamedTuple):
    """One of several runs.

    Attributes:
        name: of it.
        metrics: file for them.
        config: all of it.
        anew: with an agent loop, and a reward function, of its own.
        refused: ours is to refuse it before the first step.
    """

    name: str
    metrics: str
    config: DictConfig
    anew: bool = False
    refused: bool = False


def once(make: Callable[..., Any]) -> Any:
    """The first result, for all calls; ``made`` keeps it, and may be emptied."""
    made: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(make(*args, **kwargs))
        return made[0]

    call.made = made  # type: ignore[attr-defined]
    return call


def keep_processes() -> None:
    """Let what starts processes, in a trainer's ``init``, do so for the first trainer only."""
    from verl.trainer.ppo.v1 import trainer_base as verls

    groups = verls.RayWorkerGroup

    def kept_workers(**kwargs: Any) -> Any:
        made = groups(**kwargs)
        spawn = made.spawn

        def spawned(prefix_set: Any) -> dict[str, Any]:
            """By the name of the actor's role, which tells whether there is a reference model: one that is there may idle."""
            found = spawn(prefix_set=prefix_set)
            (actor,) = (group for name, group in found.items() if name.startswith("actor"))
            return {"actor_rollout": actor, "actor_rollout_ref": actor, **found}

        made.spawn = once(spawned)
        return made

    pools = once(verls.ResourcePoolManager)

    def kept_pools(mapping: dict[Any, str], **kwargs: Any) -> Any:
        made = pools(mapping=mapping, **kwargs)
        made.mapping.update(mapping)
        return made

    verls.ResourcePoolManager.create_resource_pool = once(verls.ResourcePoolManager.create_resource_pool)
    verls.ResourcePoolManager = kept_pools
    verls.RayWorkerGroup = once(kept_workers)
    verls.RewardLoopManager = once(verls.RewardLoopManager)
    verls.LLMServerManager.create = once(verls.LLMServerManager.create)


def begin_anew(workers: Any, actor: DictConfig) -> None:
    """Let ``init_model``, of workers that have a model, take it back to its beginning: weights, optimizer and losses.

    Args:
        actor: ``actor_rollout_ref.actor`` of the run that begins.
    """

    def reset(worker: Any) -> None:  # in a worker's process; compare ActorRolloutRefWorker.init_model
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss

        for role in worker.worker_dict.values():
            if hasattr(role, "actor"):
                role.actor.reset()
                role.loss_fn = partial(ppo_loss, config=omega_conf_to_dataclass(actor))
                role.actor.set_loss_fn(role.loss_fn)

    calls = [worker.execute_with_func_generator.remote for worker in workers.workers]
    workers.init_model = lambda: ray.get([call(reset) for call in calls])


class Several(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's driver, for several runs.

    Args:
        runs: what they are.
    """

    def __init__(self, runs: list[Planned]) -> None:
        super().__init__()
        self.runs = runs
        self.workers: Any = None
        self.reward: Any = None  # settings of the reward worker, as they were before verl wrote to them

    def run(self, config: DictConfig) -> None:
        import transfer_queue as tq

        keep_processes()
        tq.init(config.transfer_queue)
        try:
            for each in self.runs:
                print(BEGIN.format(each.name), flush=True)
                Path(each.metrics).with_suffix(".begun").touch()
                try:
                    self.one(each)
                except AdaptiveError:
                    if not each.refused:
                        raise
                    print(traceback.format_exc(), flush=True)  # where the marks are: between them it is this run's
                    continue
                Path(each.metrics).with_suffix(".done").touch()
        finally:
            tq.close()

    def one(self, each: Planned) -> None:
        """A run, from its trainer's making to its end."""
        from verl.trainer.ppo.v1 import get_trainer_cls

        self.config = each.config
        reward = OmegaConf.to_container(each.config.reward)
        os.environ["VERL_FILE_LOGGER_PATH"] = each.metrics
        self.trainer = get_trainer_cls(self.config.trainer.v1.trainer_mode)(config=self.config)
        if self.workers is not None:
            begin_anew(self.workers, self.config.actor_rollout_ref.actor)
            if each.anew:
                self.retire(rewards=reward != self.reward)
        self.trainer.init()
        if self.workers is None or each.anew:
            self.reward = reward
            self.init_agent_loop_manager()
        self.workers = self.trainer.actor_rollout_wg
        self.trainer.fit(self.agent_loop_manager)
        self.trainer.logger.finish(exit_code=0)

    def retire(self, rewards: bool) -> None:
        """End the processes that have read the settings of an earlier run's agent loop and, perhaps, reward function."""
        from verl.trainer.ppo.v1 import trainer_base as verls

        for worker in self.agent_loop_manager.agent_loop_workers:
            ray.kill(worker)
        if not rewards:
            return
        for worker in verls.RewardLoopManager.made.pop().reward_loop_workers:
            ray.kill(worker)
        deadline = time.monotonic() + 60
        while any(name.startswith("reward_loop_worker_") for name in ray.util.list_named_actors()):
            if time.monotonic() > deadline:
                raise TimeoutError("a reward worker that was ended still has its name, which the next one needs")
            time.sleep(0.05)


def composed(words: list[str]) -> DictConfig:
    """What ``python -m verl.trainer.main_ppo <words>`` would run with."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    OmegaConf.resolve(config)
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    config.transfer_queue.enable = True
    return config


def planned(listed: Sequence[Mapping[str, Any]]) -> list[Planned]:
    """The runs that a ``runs.json`` lists, composed."""
    return [Planned(config=composed(run["words"]), **{k: v for k, v in run.items() if k != "words"}) for run in listed]


def main() -> None:
    """Compose all, then start a driver for them."""
    runs = planned(json.loads(Path(sys.argv[1]).read_text()))
    actor = ray.remote(Several)
    run_ppo(runs[0].config, task_runner_class=SimpleNamespace(remote=lambda: actor.remote(runs)))


if __name__ == "__main__":
    main()
