"""Start-ups of the pipeline that serve several tests: what runs on them, in order. A run that must fail comes last."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.e2e.faults import AGENT_LOOP, MODES, Killer, changed_data
from tests.e2e.harness import REPO, ProcessRun, assets, several, train, train_rows

SHORT = ("trainer.total_training_steps=3",)
#: No chance in sampling: two trainers see the same rollouts.
GREEDY = ("trainer.total_training_steps=2", "actor_rollout_ref.rollout.top_k=1")
#: MoPPS in front of AERO's allocator: parts of three presets.
MIXED = ("+adaptive=dapo", "adaptive/sampler=mopps_by_source", "adaptive/allocator=aero")
#: Presets that are no main run of a test of their own.
PRESETS = {
    **{name: (f"+adaptive={name}",) for name in ("aero", "cero", "pilot_commit")},
    "sao": ("+adaptive=sao", "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "trainer.critic_warmup=0"),
}

#: More than one pass over a third of the prompts, so that GRESO skips some in the end.
GRESO_STEPS, SOME = 14, 200
#: Six steps, of which the last that was begun is lost when the run is killed after three.
SIX = ("trainer.total_training_steps=6", "trainer.save_freq=2", "adaptive.record=true")


class Usual(NamedTuple):
    """Runs of the usual trainer: two unbroken, one that was killed with SIGKILL and started again, one that its budget
    ends, one refused.

    When the second has ended, an old checkpoint of it is validated and nothing else.
    """

    greso: ProcessRun
    pilots: tuple[ProcessRun, ProcessRun]
    validated: ProcessRun
    solo: ProcessRun
    spent: ProcessRun
    small: ProcessRun


class Colocated(NamedTuple):
    """Runs of the ``colocate_async`` trainer; the first was killed and started again."""

    pilots: tuple[ProcessRun, ProcessRun]
    mixed: ProcessRun
    solo: ProcessRun


class OneRank(NamedTuple):
    """Runs on one rank.

    Attributes:
        greedy: verl's trainer and ours without chance in sampling.
        usual: the usual trainer's.
        colocated: those of another one.
        faulty: see :func:`faulty`.
    """

    greedy: dict[str, ProcessRun]
    usual: Usual
    colocated: Colocated
    faulty: dict[str, ProcessRun]


def one_rank(folder: Path) -> OneRank:
    """Each start-up goes on with what was killed on the one before, and ends in the next run that is killed."""
    some, _ = changed_data(folder / "some.parquet", drop=train_rows() - SOME, add=0)
    steps = GRESO_STEPS
    greso = (
        *("+adaptive=greso", "adaptive.record=true", f"trainer.total_training_steps={steps}", some),
        *(f"trainer.save_freq={steps}", "trainer.val_before_train=True", f"trainer.test_freq={steps}"),
    )
    # GRESO's gate, and Pilot-Commit in the paper's form, where pilots wait for a later generation
    pilots = (
        *("+adaptive=greso", "adaptive/allocator=pilot_commit", "adaptive/filter=band"),
        *("adaptive.allocator.form=pipelined", *SIX),
    )
    spent = (
        *("+adaptive=grpo", "trainer.total_training_steps=6", "adaptive.total_rollouts=256"),
        *("trainer.save_freq=100", "trainer.test_freq=100"),
    )
    chosen, _ = small(folder / "small.parquet")
    old = folder / "pilots" / "checkpoints"
    validated = (
        *(*pilots, "trainer.val_only=true", "trainer.val_before_train=True", f"trainer.default_local_dir={old}"),
        "adaptive.seed=99",  # training would not resume with it
        *("trainer.resume_mode=resume_path", f"trainer.resume_from_path={old / 'global_step_2'}"),
    )
    colocated = MODES["colocate_async"]
    top_ups = (*colocated, "+adaptive=pilot_commit", *SIX)
    # agent loops keep their sampling settings: those after the greedy runs are made anew
    first = several(
        folder,
        {"verls": GREEDY, "ours": ("+adaptive=grpo", *GREEDY), "greso": greso, "pilots": pilots},
        anew=["greso"],
        kill_at=3,
    )
    second = several(
        folder,
        {
            **{"pilots": pilots, "validated": validated, "solo": ("+adaptive=solo", *SIX), "spent": spent},
            **{"small": ("+adaptive=greso", chosen), "top_ups": top_ups},
        },
        refused=["small"],
        anew=["top_ups"],  # this trainer's agent loops ask vLLM in a way of their own
        kill_at=3,
    )
    runs = {
        # first, because it needs a reference model
        "two": (
            *(*colocated, "+adaptive=solo", "adaptive.allocator.n=2", "trainer.v1.colocate_async.num_warmup_batches=1"),
            *("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coeff=0.001"),
            *("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64", *SHORT, "adaptive.record=true"),
        ),
        "top_ups": top_ups,
        "mixed": (*colocated, *MIXED, *SHORT, "adaptive.record=true"),
        **misbehaving(folder),
    }
    last = several(folder, runs, anew=["faulty"], PYTHONPATH=str(folder))
    return OneRank(
        {name: first[name] for name in ("verls", "ours")},
        Usual(
            first["greso"],
            (first["pilots"], second["pilots"]),
            *(second[name] for name in ("validated", "solo", "spent", "small")),
        ),
        Colocated((second["top_ups"], last["top_ups"]), last["mixed"], last["two"]),
        {name: last[name] for name in ("faulty", "hangs")},
    )


def small(path: Path) -> tuple[str, int]:
    """A training set smaller than a batch: the override that chooses it, and its rows."""
    return changed_data(path, drop=600, add=0)


SLOW_REWARD = """
import importlib.util
import time
from pathlib import Path

spec = importlib.util.spec_from_file_location("real_reward", {real!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)


def compute_score(*args, **kwargs):
    if Path({slow!r}).exists():
        Path({called!r}).touch()
        time.sleep(2)
    return real.compute_score(*args, **kwargs)
"""


def short(folder: Path) -> dict[str, ProcessRun]:
    """Short runs on two data-parallel ranks; in the last one the agent loop's worker is killed while answers are judged."""
    recorded = (*SHORT, "trainer.save_freq=3", "adaptive.record=true")
    called = folder / "slow-called"
    (folder / "reward.py").write_text(
        SLOW_REWARD.format(
            real=str(REPO / "examples" / "cpu" / "reward.py"),
            slow=str(folder / "killed" / "metrics-0.begun"),
            called=str(called),
        )
    )
    runs = {
        "critic": (
            *("+adaptive=greso", "algorithm.adv_estimator=gae", "trainer.total_training_steps=2"),
            *(f"critic.model.path={assets() / 'model'}", "critic.optim.lr=1e-3"),
            *("critic.ppo_micro_batch_size_per_gpu=32", "critic.ppo_mini_batch_size=16"),
            # the first step trains the critic alone; the second takes the actor twice through its batch
            *("trainer.critic_warmup=2", "actor_rollout_ref.actor.ppo_epochs=2"),
        ),
        "verls": (*SHORT, "trainer.save_freq=3"),
        "every_row": ("+adaptive=grpo", "adaptive.skip_zero_advantage=false", *recorded),
        "grpo": ("+adaptive=grpo", *SHORT),
        **{name: (*words, *recorded) for name, words in PRESETS.items()},
        "killed": ("+adaptive=dapo", "adaptive.stall_timeout=600"),
    }
    with Killer(AGENT_LOOP, called.exists) as killer:
        made = several(
            folder,
            runs,
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
            f"reward.custom_reward_function.path={folder / 'reward.py'}",
        )
    assert killer.killed is not None or not called.exists(), made["killed"].tail
    # start-ups take half as long where Ray's workers are forks of one process: let nobody lose that unseen
    assert killer.killed is None or "--serve" in killer.parent, killer.parent
    return made


FAULTY_LOOP = """
import collections
import zlib

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

begun = collections.Counter()


class FaultyAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        prompt = str(kwargs["raw_prompt"])
        kind = zlib.crc32(prompt.encode()) % 12
        begun[prompt] += 1
        if kind == 0:
            return []
        if kind == 1 or (kind == 2 and begun[prompt] > 2):  # or all but two of a group
            raise RuntimeError("the tool server is away")
        return await super().run(sampling_params, **kwargs)
"""

FAULTY_REWARD = """
import time
import zlib
from pathlib import Path

HANGS, HUNG = Path({hangs!r}), Path({hung!r})


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    kind = zlib.crc32(f"{{solution_str}}|{{ground_truth}}".encode()) % 36
    if HANGS.exists() and ({all} or not HUNG.exists()):
        HUNG.touch()
        time.sleep(100_000)
    if kind == 0:
        return {{"score": float("nan"), "acc": 0.0}}
    if kind == 1:
        raise ValueError("the verifier broke")
    if kind == 2:
        return {{"score": float("inf"), "acc": 1.0}}
    if kind == 3:
        return {{"score": 0.0, "acc": "wrong"}}
    if kind == 4:
        return None
    if kind == 5:
        return "not a number"
    return {{"score": float(kind > 20), "acc": float(kind > 20)}}
"""


def misbehaving(folder: Path, mode: str = "sync") -> dict[str, tuple[str, ...]]:
    """An agent loop and a reward function that misbehave; in the second run, which ends with an error, the latter hangs.

    For one sample, or for all: an asynchronous step need not wait for one sample that hangs (tests/test_engine.py).

    Returns:
        The overrides of both. The folder has to be on PYTHONPATH.
    """
    (folder / "faulty.py").write_text(FAULTY_LOOP)
    (folder / "loops.yaml").write_text("- name: faulty_agent\n  _target_: faulty.FaultyAgentLoop\n")
    hangs = folder / "hangs" / "metrics-0.begun"
    (folder / "reward.py").write_text(
        FAULTY_REWARD.format(hangs=str(hangs), hung=str(folder / "hung"), all=mode != "sync")
    )
    common = (
        *("+adaptive=dapo", *MODES[mode], "adaptive.signal=acc"),
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=faulty_agent",
    )
    return {
        "faulty": (*common, "trainer.total_training_steps=2", "trainer.save_freq=2", "adaptive.record=true"),
        "hangs": (*common, "adaptive.stall_timeout=15"),
    }


def faulty(folder: Path, mode: str) -> dict[str, ProcessRun]:
    """Both on start-ups of their own, for an asynchronous mode."""
    made = {}
    for name, words in misbehaving(folder, mode).items():
        if name == "hangs":
            begun = folder / "hangs" / "metrics-0.begun"
            begun.parent.mkdir()
            begun.touch()
        made[name] = train(folder / name, *words, PYTHONPATH=str(folder))
    return made
