"""What ``gpu_first_hour.sh`` runs: a self-test, a few small trainings at the same budget, and one page about them.

    python -m examples.gpu_first_hour [--out FOLDER] [--seeds 1 2] [--steps N] [--presets grpo solo greso] [--cpu-rehearsal]
                                      [--model PATH] [--data FOLDER] [-- verl's overrides of the trainings]

Without a hub, --model is a folder and --data one with train.parquet and val.parquet. Paths in overrides are absolute: each
training runs in a folder of its own. Everything is in FOLDER, and what is finished there is not run again. The page is
FOLDER/page.txt, with page.json beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_adaptive.commands.arguments import count
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.selftest.runs import end_on_signals, override, read_metrics, train
from verl_adaptive.integration.selftest.suite import (
    PLAIN,
    PRESETS,
    count_gpus,
    has_flash_attn,
    last_words,
    on_gpus,
    on_platform,
    own_ray,
    usable,
)
from verl_adaptive.text import counted

__all__ = ["Sizes", "main", "page", "sizes_of", "words"]

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


@dataclass(frozen=True)
class Sizes:
    """What depends on the GPU's memory.

    Attributes:
        steps: of GRPO; the budget of every run is the rollouts that it generates in them.
        tokens: of a micro batch (``ppo_max_token_len_per_gpu``).
        memory: share of the GPU that vLLM gets.
        offload: parameters and optimizer wait in main memory.
        batch: prompts of a step.
        n: rollouts of a prompt.
        longest: tokens of an answer.
        lr: learning rate.
    """

    steps: int
    tokens: int
    memory: float
    offload: bool
    batch: int = 128
    n: int = 8
    longest: int = 512
    lr: float = 1e-6


#: Without a GPU: nothing is learned, everything is run.
REHEARSAL = Sizes(steps=2, tokens=4096, memory=0.5, offload=False, batch=16, longest=16, lr=3e-4)


def sizes_of(gib: float, packed: bool = True) -> Sizes:
    """For a GPU with so much memory, a guess: logits of a micro batch take 12 bytes a token and word; --steps changes the first.

    Args:
        gib: of one GPU.
        packed: rows lie one after another. Without flash-attn they are padded, which takes twice the memory and more time.
    """
    if gib >= 70:
        made = Sizes(steps=14, tokens=16384, memory=0.6, offload=False)
    elif gib >= 38:
        made = Sizes(steps=12, tokens=8192, memory=0.5, offload=False)
    else:
        made = Sizes(steps=8, tokens=4096, memory=0.4, offload=gib < 20)
    return made if packed else replace(made, steps=max(4, made.steps // 3), tokens=made.tokens // 2)


def words(folder: Path, data: Path, model: str, sizes: Sizes, gpus: int) -> list[str]:
    """verl's overrides that all runs share.

    Args:
        folder: of the run.
        data: that has ``train.parquet`` and ``val.parquet``.
        model: to train.
        sizes: as above.
        gpus: of this machine; 0: the CPU platform.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    made = [
        *(override(f"data.{name}_files", data / f"{name}.parquet") for name in ("train", "val")),
        *(f"data.train_batch_size={sizes.batch}", f"data.max_response_length={sizes.longest}"),
        *("data.max_prompt_length=512", "data.filter_overlong_prompts=true", "data.truncation=error"),
        *(
            override("actor_rollout_ref.model.path", model),
            f"{actor}.optim.lr={sizes.lr:g}",
            f"{actor}.use_dynamic_bsz=true",
        ),
        *(f"{actor}.ppo_mini_batch_size={sizes.batch // 2}", f"{actor}.ppo_max_token_len_per_gpu={sizes.tokens}"),
        *("algorithm.adv_estimator=grpo", f"{rollout}.n={sizes.n}", f"{rollout}.calculate_log_probs=true"),
        *("trainer.val_before_train=true", f"trainer.test_freq={max(1, sizes.steps // 4)}"),
        *(
            f"trainer.save_freq={max(1, sizes.steps // 2)}",
            "trainer.max_actor_ckpt_to_keep=1",
            "trainer.total_epochs=1000",
        ),
        *(
            f"trainer.total_training_steps={4 * sizes.steps}",
            override("trainer.default_local_dir", folder / "checkpoints"),
        ),
        *('trainer.logger=["console","file"]', "trainer.project_name=first_hour"),
        f"trainer.experiment_name={folder.name}",
        # verl's 8 of each take 8 GB and many seconds of start-up, for batches that need fewer
        *("data.dataloader_num_workers=0", "reward.num_workers=2", f"{rollout}.agent.num_workers=4"),
        f"adaptive.total_rollouts={sizes.steps * sizes.batch * sizes.n}",
    ]
    if not gpus:
        from verl_adaptive.integration.selftest import reward

        return ["+adaptive/platform=cpu", override("reward.custom_reward_function.path", reward.__file__), *made]
    if sizes.offload:
        made += [f"{actor}.fsdp_config.param_offload=true", f"{actor}.fsdp_config.optimizer_offload=true"]
    return [*made, *on_gpus(gpus), f"{rollout}.gpu_memory_utilization={sizes.memory}"]


def make_gsm8k(folder: Path, val: int = 400) -> None:
    """GSM8K in verl's format, from the hub; verl's own reward scores it."""
    from datasets import Dataset, load_dataset

    for split, name in (("test", "val"), ("train", "train")):
        rows = [
            {
                "data_source": DATA,
                "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
                "ability": "math",
                "reward_model": {
                    "style": "rule",
                    "ground_truth": row["answer"].rpartition("####")[2].strip().replace(",", ""),
                },
                "extra_info": {"split": split, "index": index},
            }
            for index, row in enumerate(load_dataset(DATA, "main", split=split))
        ]
        part = folder / f"{name}.part"  # what an interrupted attempt leaves is not taken for the data
        Dataset.from_list(rows[:val] if name == "val" else rows).to_parquet(part)
        part.replace(folder / f"{name}.parquet")


def summary(folder: Path) -> dict[str, Any]:
    """Of a run: seconds, rollouts and accuracy, from verl's metrics; of a step that was made again, the last time."""
    by_step: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("metrics-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2])):
        for m in read_metrics(path):
            by_step[m["step"]] = by_step.get(m["step"], {}) | m
    metrics = [by_step[step] for step in sorted(by_step)]
    steps = [m for m in metrics if "training/global_step" in m]
    # verl gives a number a data source: their mean, as `compare` shows it
    sources = [[v for key, v in m.items() if key.startswith("val-core/") and "mean@" in key] for m in metrics]
    accuracy = [sum(found) / len(found) for found in sources if found]
    return {
        "steps": len(steps),
        "rollouts": int(sum(m.get("adaptive/rollouts/generated_total", 0) for m in steps)),
        "trained": int(sum(m.get("adaptive/rollouts/trained_total", 0) for m in steps)),
        "seconds": round(sum(m.get("timing_s/step", 0.0) for m in steps)),
        "accuracy": [round(accuracy[0], 3), round(accuracy[-1], 3)] if accuracy else [],
    }


def begun_otherwise(folder: Path, said: list[str]) -> bool:
    """Whether a run's folder was begun with other overrides; they are noted in it."""
    noted = folder / "overrides.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not noted.exists():
        noted.write_text(json.dumps(said, indent=1))
    return json.loads(noted.read_text()) != said


def page(results: Sequence[dict[str, Any]], selftest: dict[str, Any], said: str) -> str:
    """One page.

    Args:
        results: of the runs, each with ``preset`` and ``seed``.
        selftest: its JSON.
        said: what ``compare`` printed of all arms, or why there is no comparison.
    """
    machine, versions = selftest["machine"], selftest["versions"]
    failed = ", ".join(item["name"] for item in selftest["items"] if item["findings"])
    lines = [
        f"first hour: selftest {f'FAILED ({failed}: see selftest/selftest.txt)' if failed else 'passed'}, {counted(len(results), 'run')}",
        "",
        f"hardware  {', '.join(machine['accelerators']) or 'no GPU'}; {machine['cores']} cores, {machine['memory (GiB)']} GiB",
        f"versions  {', '.join(f'{name} {v}' for name, v in versions.items())}",
        "",
        f"{'preset':14}{'seed':>5}{'steps':>7}{'rollouts':>10}{'trained':>9}{'seconds':>9}{'first':>8}{'last':>8}  accuracy",
    ]
    for r in results:
        first, last = (f"{a:.3f}" for a in r["accuracy"]) if r["accuracy"] else ("", "")
        numbers = f"{r['steps']:>7}{r['rollouts']:>10}{r['trained']:>9}{r['seconds']:>9}"
        lines.append(f"{r['preset']:14}{r['seed']:>5}{numbers}{first:>8}{last:>8}{r['status']}")
    lines += [
        "",
        "Equal for all: model, data, settings, and the budget in generated rollouts. One seed decides nothing.",
        "",
        said.strip(),
    ]
    return "\n".join(lines) + "\n"


def _call(*command: str, log: Path) -> int:
    """Run a module with its progress shown, everything it says in ``log``, and end it if this process is ended: the status."""
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=said, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            for line in process.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                said.write(line)
                said.flush()
            return process.wait()
        finally:
            try:
                process.wait(timeout=1)  # Ctrl-C has reached it, too
            except subprocess.TimeoutExpired:
                process.terminate()  # it ends what it started
                process.wait()


def refusal(args: argparse.Namespace, gpus: int, why_none: str) -> str:
    """What is wrong with the command line on this machine; empty: nothing."""
    if bool(gpus) == args.cpu_rehearsal:
        none = f"no GPU was found{why_none}; --cpu-rehearsal runs without"
        return "leave --cpu-rehearsal out: there is a GPU" if gpus else none
    if args.data and not all((args.data / f"{split}.parquet").is_file() for split in ("train", "val")):
        return f"--data {args.data}: train.parquet and val.parquet must be there"
    return ""


def fetched(model: str, data: Path, say: Callable[[str], None]) -> str:
    """Fetch model and data, before anything takes time: why that is not possible, and what to do; empty: they are there."""
    try:
        if not Path(model).is_dir():
            say("model ...")
            from huggingface_hub import snapshot_download

            snapshot_download(model)
        if not (data / "train.parquet").exists():
            say("data ...")
            data.mkdir(exist_ok=True)
            make_gsm8k(data)
    except Exception as error:  # of the hub's client, of HTTP, of the disk
        first = str(error).partition("\n")[0]
        return (
            f"model and data cannot be fetched ({type(error).__name__}: {first}); name --model <folder> and --data <folder "
            "with train.parquet and val.parquet>"
        )
    return ""


#: No row is left out of training, so the selftest's item `gradient` need not have passed.
EVERY_ROW = "adaptive.skip_zero_advantage=false"


def may_train(selftest: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Whether the selftest finished, and plain verl and the gradient passed; presets may have failed."""
    failed = {item["name"] for item in selftest.get("items", []) if item["findings"]}
    needed = {PLAIN} if EVERY_ROW in overrides else {PLAIN, "gradient"}
    return bool(selftest.get("finished")) and not failed & needed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_first_hour.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("first-hour"), help="folder (default: first-hour)")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 1 2; 1 in a rehearsal")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["grpo", "solo", "greso"])
    parser.add_argument(
        "--steps", type=count, help="of GRPO, which set the budget of all (default: by the GPU's memory)"
    )
    parser.add_argument("--cpu-rehearsal", action="store_true", help="a tiny model on the CPU: every step, no learning")
    parser.add_argument("--model", help=f"default: {MODEL}; in a rehearsal the selftest's")
    parser.add_argument("--data", type=Path, help="folder with train.parquet and val.parquet (default: GSM8K)")
    parser.add_argument("overrides", nargs="*", help="verl's, of the trainings and not of the selftest; after --")
    args = parser.parse_args(argv)
    out, begun = args.out.resolve(), time.monotonic()
    try:
        there, why_none = count_gpus(dict(os.environ), timeout=300)
        gpus = usable(there)
        wrong = refusal(args, gpus, why_none)
    except AdaptiveError as error:
        wrong = str(error)
    if wrong:
        print(f"gpu_first_hour.sh: {wrong}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    end_on_signals()
    say = lambda line: print(f"first hour, {(time.monotonic() - begun) / 60:.0f} min: {line}", flush=True)  # noqa: E731

    tiny = out / "selftest" / "tiny"
    model = args.model or (MODEL if gpus else str(tiny / "model"))
    model = str(Path(model).resolve()) if Path(model).is_dir() else model  # a run has a folder of its own
    data = args.data.resolve() if args.data else out / "data" if gpus else tiny
    if gpus and (lacks := fetched(model, data, say)):
        print(f"gpu_first_hour.sh: {lacks}", file=sys.stderr)
        return 2

    say("selftest ...")
    tested = _call(
        *("verl_adaptive", "selftest", "--json", "--folder", str(out / "selftest")),
        *(["--timeout", "3600", "--presets", "greso"] if args.cpu_rehearsal else []),
        log=out / "selftest.log",
    )
    written = out / "selftest" / "selftest.json"
    selftest = json.loads(written.read_text()) if written.exists() else {}
    if tested and not may_train(selftest, args.overrides):
        print(
            f"the selftest failed: see {args.out}/selftest.log and, if there, {args.out}/selftest/selftest.txt, and send them; "
            f"where only its gradient failed, the trainings run with -- {EVERY_ROW}",
            file=sys.stderr,
        )
        return 1
    sizes = REHEARSAL if not gpus else sizes_of(selftest["machine"]["memory of one (GiB)"], has_flash_attn())
    if gpus and not has_flash_attn():
        say("flash-attn is not installed: rows are padded, and the trainings are shorter (--steps changes that)")
    if args.steps:
        sizes = replace(sizes, steps=args.steps)
    env = on_platform(own_ray(), gpus)
    results, runs = [], list(itertools.product(args.seeds or ([1, 2] if gpus else [1]), args.presets))
    for seed, preset in runs:
        folder = out / f"{preset}-{seed}"
        done = folder / "done"
        status, why = 0, ""
        own = [f"+adaptive={preset}", f"adaptive.seed={seed}", f"data.seed={seed}"]
        said = [*own, *words(folder, data, model, sizes, gpus), *args.overrides]
        if begun_otherwise(folder, said):
            print(f"{folder} was begun with other options: take another --out, or remove it", file=sys.stderr)
            return 2
        if not done.exists():  # one that was interrupted goes on from its checkpoint
            say(f"{preset}, seed {seed} ... (log: {folder}/log.txt)")
            run = train(folder, said, env, timeout=max(3600, 180 * sizes.steps))
            status = run.code
            if status:
                why = last_words(run.log)
            else:
                done.touch()
                for weights in folder.glob("checkpoints/global_step_*/actor"):
                    shutil.rmtree(weights)  # gigabytes, of a run that is over
        failed = "" if not status else f"  status {status}: {why} (see {folder.name}/log.txt)"
        results.append({"preset": preset, "seed": seed, **summary(folder), "status": failed})
        if not status:
            made = ("report", str(folder / "checkpoints"), "-o", str(folder / "report.html"))
            if _call("verl_adaptive", *made, log=folder / "report.log"):
                results[-1]["status"] = f"  no report: see {folder.name}/report.log"
        if status and len(results) == 1:
            break  # the others would fail alike
    compared = "no comparison: a run or its report failed"
    compared += f", and {len(runs) - len(results)} were not begun" * (len(results) < len(runs))
    compared += "; after a mend the same command goes on"
    status = int(any(result["status"] for result in results))
    if not status and len(args.presets) == 1:
        compared = "no comparison: there is one preset"
    elif not status:  # verl's name of a run is in its path: preset, seed
        arms = [f"{preset}={out}/{preset}-*/checkpoints" for preset in args.presets]
        status = _call(
            "verl_adaptive", "compare", *arms, "--csv", str(out / "curves.csv"), "--overwrite", log=out / "compare.log"
        )
        compared = (out / "compare.log").read_text() if not status else f"compare failed: see {args.out}/compare.log"
    text = page(results, selftest, compared)
    (out / "page.txt").write_text(text, encoding="utf-8")
    (out / "page.json").write_text(json.dumps({"runs": results, "sizes": vars(sizes), "selftest": selftest}, indent=1))
    print(text)
    return int(status != 0 or tested != 0)


if __name__ == "__main__":
    sys.exit(main())
