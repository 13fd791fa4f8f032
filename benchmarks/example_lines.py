"""verl's own example command lines through ``doctor``: which are priced, which are refused, by whom and why.

    python -m benchmarks.example_lines PATH_TO_A_CLONE_OF_VERL                # its HEAD, with +adaptive=solo and =greso
    python -m benchmarks.example_lines CLONE --ref v0.9.0 --presets solo grpo --json lines.json

Each ``.sh`` below ``examples`` runs in a temporary copy with nothing on its PATH but the shell's own tools and stand-ins
for all that it would start, which write their arguments down: no model is loaded, nothing is installed or fetched. Settings
are the scripts' defaults; a variable that a script insists on gets its own name as value. Each line of arguments then goes
through ``doctor`` with each preset, with a stand-in for its training set, so that the cost of the whole run is asked for,
too. What ``doctor`` refuses is tried without the preset: what verl refuses by itself is no finding of ours.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cells import Parser, run_script, to_json, versions, write_whole

OUT = Path(__file__).resolve().parent / "results" / "example_lines.json"
#: Rows of the stand-in for a line's training set; GSM8K's.
PROMPTS = 7473
#: Programs of which a script runs the stand-in, and those that are the shell's own.
STUBS = (
    "python python3 uv torchrun ray accelerate srun sbatch nsys pip pip3 hf huggingface-cli wget curl git docker sleep ssh "
    "scp rm kill pkill nvidia-smi npu-smi"
)
TOOLS = (
    "bash sh env basename dirname cat date seq mkdir tee echo ls wc tr cut sed awk grep head tail sort uniq nproc hostname pwd "
    "realpath readlink test expr true false whoami touch mktemp"
)
#: Python without a script is asked what there is (an NPU, for one): nothing.
STUB = r"""#!{bash}
case "${{0##*/}} ${{1:-}}" in python*" -c" | python*" -" | python*" ") exit 1 ;; esac
printf '%s\0' "${{0##*/}}" "$@" > "$LINES/$(date +%s%N)"
"""
#: What a script's last words say of a variable that it insists on.
INSISTS = re.compile(r"line \d+: (\w+): (?:unbound variable|must set|set )")
#: A line that trains; others convert, fetch or generate.
TRAINS = re.compile(r"(?:^|[./])(?:main_ppo\w*|fully_async_main|async_main_ppo|sft_trainer\w*)(?:\.py)?$")


@dataclass
class Line:
    """What a script would run.

    Attributes:
        script: its path in the clone.
        words: the program and its arguments; none: it ended before.
        why: how it ended before.
        found: of each preset, class and reason.
    """

    script: str
    words: list[str] = field(default_factory=list)
    why: str = ""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)


def unpacked(clone: Path, ref: str, folder: Path) -> str:
    """Unpack a commit; its name.

    Raises:
        SystemExit: there is no such clone or commit.
    """
    try:
        commit = subprocess.check_output(["git", "-C", clone, "rev-parse", f"{ref}^{{commit}}"], text=True).strip()
        archive = subprocess.check_output(["git", "-C", clone, "archive", commit])
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{clone}: no clone of verl with a commit {ref}: {error}") from error
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian 12's Python has none
        tar.extractall(folder)
    return commit


def stand_ins(folder: Path) -> None:
    """A folder for PATH."""
    folder.mkdir()
    for name in TOOLS.split():
        if place := shutil.which(name):
            (folder / name).symlink_to(place)
    for name in STUBS.split():
        (folder / name).write_text(STUB.format(bash=shutil.which("bash")))
        (folder / name).chmod(0o755)


def lines_of(root: Path, home: Path) -> Iterator[Line]:
    """Run every example script of a clone, and tell what each would run."""
    stand_ins(home / "bin")
    for script in sorted((root / "examples").rglob("*.sh")):
        name = str(script.relative_to(root))
        called, said = run(name, root, home)
        trains = [words for words in called if any(TRAINS.search(word) for word in words[:20])]
        if not trains:
            other = f"only runs {' '.join(called[0][:3])}" if called else said
            yield Line(name, why=other.replace(str(home), "~").replace(str(root), "."))
        for words in trains:
            yield Line(name, words)


def run(script: str, root: Path, home: Path) -> tuple[list[list[str]], str]:
    """What a script called, and its last words."""
    out = home / "called"
    # ulimit is a word of the shell's, and what it asks for may be more than is allowed here
    given = {"PATH": str(home / "bin"), "HOME": str(home), "USER": "me", "LINES": str(out), "INFER_BACKEND": "vllm"}
    given["BASH_FUNC_ulimit%%"] = "() { :; }"
    while True:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        try:
            done = subprocess.run(
                ["bash", script],
                cwd=root,
                env=given,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
            )
        except subprocess.TimeoutExpired:
            return [], "does not end within a minute"
        wants = INSISTS.search(done.stderr) if done.returncode else None
        if wants is None or wants[1] in given:
            break
        given[wants[1]] = str(home / wants[1])
    called = [path.read_text().split("\0")[:-1] for path in sorted(out.iterdir())]
    return called, ((done.stdout + done.stderr).strip().splitlines() or ["runs nothing"])[-1]


def judged(words: list[str], preset: str, data: Path) -> dict[str, Any]:
    """A line through ``doctor``: its class, the reason if it is refused, the cost if not."""
    from verl_adaptive.commands.doctor import Examination

    examination = Examination()
    try:
        plan = examination.training([*words, f"+adaptive={preset}", f"data.train_files={data}"])
    except Exception as error:
        return {"class": "crashed", "reason": f"{type(error).__name__}: {error}"}
    failed = [check for check in examination.checks if check.status == "fail"]
    if plan is not None and not failed:
        cost = plan["cost"]
        if cost["step"] is None or cost["total"] is None:
            return {"class": "no cost", "reason": cost["why_not"]}
        return {"class": "priced", **{key: cost[key] for key in ("grpo_step", "grpo_total", "step", "total")}}
    kind = "another program" if failed[0].name == "program" else "refused"
    if kind == "refused" and "refuses the line without the preset" in failed[0].detail:
        kind = "verl refuses"
    elif kind == "refused" and (alone := refused_alone(words)):
        return {"class": "verl refuses", "reason": alone}
    return {"class": kind, "reason": failed[0].detail}


def answer_once() -> None:
    """Many lines ask for the same cost, which takes seconds to simulate."""
    from verl_adaptive import simulate

    asked, known = simulate.expected_waiting, {}

    def remembered(*words: Any, **options: Any) -> Any:
        key = repr((words, sorted(options.items())))
        if key not in known:
            known[key] = asked(*words, **options)
        return known[key]

    simulate.expected_waiting = remembered


def refused_alone(words: list[str]) -> str:
    """Why verl refuses the line without a preset; empty: it does not."""
    from verl_adaptive.commands.doctor import quiet
    from verl_adaptive.integration import composing, inspect
    from verl_adaptive.text import one_line

    try:
        with quiet():
            inspect.validate_as_verl(composing.compose(composing.Command.parse(words)))
    except Exception as error:
        return one_line(str(error))
    return ""


def main() -> None:
    """The command line."""
    parser = Parser(prog="example_lines", description=__doc__.splitlines()[0])
    parser.add_argument("clone", type=Path, help="a clone of verl, bare or not")
    parser.add_argument("--ref", default="HEAD", help="commit, tag or branch of it (default: %(default)s)")
    parser.add_argument("--presets", nargs="+", default=["solo", "greso"], help="(default: solo greso)")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write (default: %(default)s)")
    options = parser.parse_args()
    os.environ.pop("VERL_PLATFORM", None)  # no example is for a CPU
    os.environ.setdefault(
        "HF_HUB_OFFLINE", "1"
    )  # models are not here: the hub's client would look for each for minutes
    answer_once()
    with tempfile.TemporaryDirectory() as folder:
        home, root = Path(folder) / "home", Path(folder) / "verl"
        home.mkdir()
        commit = unpacked(options.clone, options.ref, root)
        data = home / "train.parquet"
        prompts = [[{"role": "user", "content": f"{row}?"}] for row in range(PROMPTS)]
        pq.write_table(pa.table({"data_source": [""] * PROMPTS, "prompt": prompts}), data)
        lines = list(lines_of(root, home))
        for number, line in enumerate(lines, start=1):
            for preset in options.presets if line.words else ():
                found = judged(line.words, preset, data)
                if "reason" in found:
                    found["reason"] = found["reason"].replace(str(home), "~").replace(str(root), ".")
                line.found[preset] = found
                print(f"{number}/{len(lines)} {line.script} +adaptive={preset}: {found['class']}", flush=True)
    report = {
        "command": f"python -m benchmarks.example_lines CLONE --ref {options.ref} --presets {' '.join(options.presets)}",
        "ref": options.ref,
        "commit": commit,
        "prompts": PROMPTS,
        "versions": versions("verl", "hydra-core"),
        "counts": {p: Counter(line.found[p]["class"] for line in lines if line.found) for p in options.presets},
        "without a line": {line.script: line.why for line in lines if not line.words},
        "lines": [{"script": line.script, **line.found} for line in lines if line.words],
    }
    write_whole(options.json, to_json(report, "lines"))
    print(*(f"+adaptive={p}: {dict(c)}" for p, c in report["counts"].items()), sep="\n")


if __name__ == "__main__":
    run_script(main)
